"""Waiting for a condition, with a deadline: tests never wait for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
#: Seconds after which a wait fails. After `MANY` have failed in this process, those that come later have a fifth of
#: theirs, but a minute at least: what is broken for so many tests is mostly broken for all.
DEADLINE_SEC = 300.0
MANY = 3
FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 0.005, 0.1
_failed: list[str] = []


def wait_for(
    condition: Callable[[], T],
    deadline_sec: float = DEADLINE_SEC,
    *,
    what: str,
    account: Callable[[], object] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Wait until a condition is truthy, and return its value. Looking takes a third of the time at most.

    A wait that fails tells what was waited for, the condition's last value, and what `account` returns then. `pause`
    lets a time pass; give it where something else must be done meanwhile.
    """
    if len(_failed) >= MANY:
        deadline_sec = min(deadline_sec, max(deadline_sec / 5, 60.0))
    begin, pause_sec = time.monotonic(), FIRST_PAUSE_SEC
    while True:
        looked_at = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        if now - begin >= deadline_sec:
            break
        pause(max(pause_sec, 2 * (now - looked_at)))
        pause_sec = min(1.1 * pause_sec, LONGEST_PAUSE_SEC)
    _failed.append(what)
    more = f"\n{account()}" if account is not None else ""
    raise AssertionError(f"{what}: not within {deadline_sec:.0f} s; the last was {value!r}{more}")
