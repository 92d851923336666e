"""The fixtures of these tests; their parts are in harness.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from certificates import authority  # noqa: F401
from harness import cold, instance, ranked, real  # noqa: F401
from limited import limited  # noqa: F401
