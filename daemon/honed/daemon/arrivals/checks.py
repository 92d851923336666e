"""Arrivals under check, from their copy to the answer of the preflight helper."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.line import Request
from honed.job.arrival import Claim, Copy
from honed.run.reply import Passed
from honed.spec.config import Config

#: Arrivals that are claimed, or accepted, together: they share the syncs of the disk. More would hold up the loop.
MAX_TOGETHER = 16
#: Seconds that a checked arrival waits for others to be accepted with.
ACCEPT_TOGETHER_SEC = 0.25


@dataclass(frozen=True)
class Pending:
    """An arrival that is claimed and copied."""

    claim: Claim
    copy: Copy


class Checks:
    """Arrivals that are being checked, and those whose check is over and that wait to be accepted together."""

    def __init__(
        self, checkers: Checkers, config: Callable[[], Config], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._checkers = checkers
        self._config = config
        self._clock = clock
        self._pending: dict[int, Pending] = {}
        self._checked: list[tuple[Pending, Passed]] = []
        self._checked_since = 0.0

    def begin(self, pending: Pending) -> None:
        """Have an arrival checked, for the first time or again."""
        self._pending[pending.claim.id] = pending
        self._checkers.submit(Request(pending.claim.id, pending.copy.path, self._config(), uid=pending.copy.uid))

    def end(self, number: int) -> Pending:
        """Return the arrival that the helper has answered on; it is no longer being checked."""
        return self._pending.pop(number)

    def add_checked(self, pending: Pending, answer: Passed) -> None:
        """Keep an arrival that can be accepted until `take_checked`."""
        self._checked_since = self._checked_since if self._checked else self._clock()
        self._checked.append((pending, answer))

    def take_checked(self) -> list[tuple[Pending, Passed]]:
        """Return the arrivals to accept together now: when enough have come, or no more are to be expected soon."""
        is_late = self._clock() - self._checked_since >= ACCEPT_TOGETHER_SEC
        if not self._checked or not (is_late or len(self._checked) >= MAX_TOGETHER or not self._pending):
            return []
        checked, self._checked = self._checked, []
        return checked

    @property
    def numbers(self) -> set[int]:
        """Numbers of all these arrivals."""
        return {*self._pending, *(pending.claim.id for pending, _ in self._checked)}

    @property
    def num_checked(self) -> int:
        """Number of arrivals that wait to be accepted together."""
        return len(self._checked)

    def being_checked(self) -> set[int]:
        """Return the arrivals that are being checked, except those that cannot be checked for now."""
        return self._pending.keys() - self._checkers.stuck()

    def num_by_user(self) -> Counter[int]:
        """Return the number of these arrivals by user."""
        return Counter(item.copy.uid for item in (*self._pending.values(), *(pending for pending, _ in self._checked)))
