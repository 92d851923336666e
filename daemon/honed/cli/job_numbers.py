"""The numbers and names of all jobs, for the completion of a shell: at every TAB, so it imports and asks as little as
possible.
"""

from __future__ import annotations

import json

from honed.system import layout as layouts
from honed.system.client import Client
from honed.system.error import HonedError
from honed.system.layout import Layout

#: Seconds that a TAB may take.
TIMEOUT_SEC = 2.0
#: Those of job.State, whose module takes longer to import than all else here.
STATES = ("queued", "held", "running", "succeeded", "failed", "cancelled")
#: What a name that is offered to a shell may have besides ASCII letters and digits.
SAFE = frozenset("._-+")


def job_numbers() -> list[str]:
    """Return the numbers of all jobs, in the order of `honectl list`, then their names; while honed is down, of those
    in its spool.

    Digits and plain names alone: bash expands the words that it is offered (`compgen -W`), and would run a `$(command)`
    among them.
    """
    layout = layouts.of(layouts.default_root())
    client = Client(layout.control_path, timeout_sec=TIMEOUT_SEC)
    try:
        numbers, names = [str(number) for number in client.ask("numbers")], client.ask("names")
    except HonedError:
        numbers, names = _entries(layout)
    return [*(item for item in numbers if item.isascii() and item.isdecimal()), *filter(_is_safe, names)]


def _entries(layout: Layout) -> tuple[list[str], list[str]]:
    numbers: list[str] = []
    names: dict[str, None] = {}
    for state in STATES:
        for path in layout.spool_dir.glob(f"{state}/*.json"):
            numbers.append(path.stem)
            try:
                names[str(json.loads(path.read_bytes())["name"])] = None
            except (OSError, ValueError, LookupError, TypeError, RecursionError):
                continue
    return numbers, [*names]


def _is_safe(name: str) -> bool:
    return name.isascii() and name[:1].isalnum() and all(char.isalnum() or char in SAFE for char in name)
