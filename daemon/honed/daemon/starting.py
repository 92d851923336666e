"""The first moments of honed: its signals are noted before anything else is imported, which takes a good part of a
second, and its spool's lock is waited for.

    signal ── noted ──► heeded before the start, while the lock is waited for, or in the loop's first turn (wake.py)
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

_noted: set[int] = set()


def note(number: int, _frame: object = None) -> None:
    """Note a signal, as its handler."""
    _noted.add(number)


def listen() -> None:
    """Note the signals that people and systemd send to honed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)


def take() -> set[int]:
    """Return the signals noted since the last call."""
    signals = set(_noted)
    _noted.difference_update(signals)
    return signals


def has_noted() -> bool:
    return bool(_noted)


def is_asked_to_end() -> bool:
    """Return True if a signal that was noted, and not taken yet, asks honed to end."""
    return not _noted.isdisjoint({signal.SIGTERM, signal.SIGINT})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed` command."""
    listen()
    from honed.daemon import loop  # noqa: PLC0415 - not before the signals are noted

    return loop.main(arguments)
