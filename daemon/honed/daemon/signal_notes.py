"""The signals of honed's first moments, while its modules are imported and its spool's lock is waited for.

signal ── noted ──► heeded before the start, while the lock is waited for, or in the loop's first turn (wake.py)
"""

from __future__ import annotations

import signal

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
