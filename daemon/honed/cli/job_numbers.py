"""The numbers of all jobs, for the completion of a shell: at each TAB, so it imports and asks as little as possible."""

from __future__ import annotations

from honed.system import layout as layouts
from honed.system.client import Client
from honed.system.error import HonedError

#: Seconds that a TAB may take.
TIMEOUT_SEC = 2.0
#: Those of job.State, whose module takes longer to import than all else here.
STATES = ("queued", "held", "running", "succeeded", "failed", "cancelled")


def job_numbers() -> list[str]:
    """Return the numbers of all jobs, in the order of `honectl list`; while honed is down, of those in its spool.

    Digits alone: bash expands the words that it is offered (`compgen -W`), and would run a `$(command)` among them.
    """
    layout = layouts.of(layouts.default_root())
    try:
        found = [str(number) for number in Client(layout.control_path, timeout_sec=TIMEOUT_SEC).ask("numbers")]
    except HonedError:
        found = [path.stem for state in STATES for path in layout.spool_dir.glob(f"{state}/*.json")]
    return [number for number in found if number.isascii() and number.isdecimal()]
