"""The loop and its steps: arrivals, the queue, running jobs, housekeeping, the socket's verbs.

Why does this job wait?                     daemon/obstacles.py; behind which others, daemon/backfill.py
What happens to a dropped file?             daemon/arrivals/intake.py
What happens when the worker dies?          daemon/settling.py, from the outcome that run/outcome.py makes
"""

import sys
from types import ModuleType

# pydantic looks for plugins in all installed packages and would run them in the daemon. Looking alone takes 2.5 MiB.
no_plugins = ModuleType("pydantic.plugin._loader")
no_plugins.get_plugins = tuple  # type: ignore[attr-defined]
sys.modules.setdefault(no_plugins.__name__, no_plugins)
