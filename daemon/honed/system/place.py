"""The places of the control socket's connections. root and honed's own user have their own, and so have the users whom
the machine does not know: no flood of one takes those of another.

If there is no place, the connection that has been silent the longest gives way: one of the same holder where that
holder has all of theirs. Within its first seconds it does so only for root and for honed's own user.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from typing import Protocol, TypeVar

from honed.system.error import EnvironmentInvalidError
from honed.system.holder import UNKNOWN

#: Connections of root, and of honed's own user, each; of all known users, and of one of them; of all unknown ones.
MAX_OWN, MAX_KNOWN, MAX_PER_HOLDER, MAX_UNKNOWN = 128, 256, 16, 32
#: Seconds without a request, and seconds in which nothing of an answer is read, after which a connection gives way.
SILENCE_SEC, READING_SEC = 10.0, 30.0


class Connected(Protocol):
    """A connection, as far as its place is concerned."""

    holder: int
    since: float  #: monotonic time of its last request, or of the last bytes of an answer that it took

    @property
    def is_silent(self) -> bool:
        """True if it has had its answers, and has not sent a request."""


AnyConnected = TypeVar("AnyConnected", bound=Connected)


def is_own(holder: int) -> bool:
    return holder in {0, os.getuid()}


def gives_way(held: Collection[AnyConnected], holder: int, now: float) -> AnyConnected | None:
    """Return the connection that has to end so that a new one of this holder has a place; None if none has to. Raises
    EnvironmentInvalidError if there is no place."""
    theirs = [item for item in held if item.holder == holder]
    if is_own(holder):
        return _first(theirs, now, patience=0.0) if len(theirs) >= MAX_OWN else None
    if holder == UNKNOWN:
        return _first(theirs, now) if len(theirs) >= MAX_UNKNOWN else None
    if len(theirs) >= MAX_PER_HOLDER:
        return _first(theirs, now)
    known = [item for item in held if item.holder != UNKNOWN and not is_own(item.holder)]
    return _first(known, now) if len(known) >= MAX_KNOWN else None


def longest_silent(held: Collection[AnyConnected]) -> AnyConnected | None:
    """Return the connection that has been silent the longest, one of the holder with the most; None if none is."""
    num_of = Counter(item.holder for item in held)
    silent = (item for item in held if item.is_silent)
    return min(silent, key=lambda item: (-num_of[item.holder], item.since), default=None)


def _first(held: Collection[AnyConnected], now: float, *, patience: float = SILENCE_SEC) -> AnyConnected:
    late = [item for item in held if now - item.since >= (patience if item.is_silent else READING_SEC)]
    if not late:
        raise EnvironmentInvalidError(
            f"honed has no free place for a connection: you have {len(held)}"
            if len({item.holder for item in held}) == 1
            else "honed has no free place for a connection",
            hint="close unused connections, or try again in a few seconds",
        )
    return longest_silent(late) or min(late, key=lambda item: item.since)
