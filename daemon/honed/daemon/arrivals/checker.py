"""The daemon's end of the preflight helpers of one kind (preflight.py). It never blocks, and kills a helper that does
not answer in time. It imports none of the helper's checks, so that the daemon stays small."""

from __future__ import annotations

import time
from collections.abc import Callable

from honed.daemon.arrivals.line import NUM_MORE_HELPERS, Line, Request
from honed.daemon.arrivals.seat import Seat
from honed.daemon.arrivals.turns import alike
from honed.run.helper import Start, Watch
from honed.run.helper_slot import HelperSlot
from honed.run.reply import Answer

#: Seconds that a helper is kept without work; the first one of several stays.
IDLE_SEC = 20.0
#: Seconds between looks whether a check has come to its rehearsal, while others wait.
LOOK_SEC = 0.5


class Checker:
    """Hands requests to helpers, each one at a time, by turns of their users, and never blocks.

    `helper_changed` is called with the old and the new descriptor to watch for reading (None: there is none), so that
    the caller's selector can follow: up to `num_helpers` are started as requests come, and again after a death. While
    none can be started, requests wait, and `fault` says why. `who` names the user in log lines; `weight` returns that
    of one. Without `may_go_on`, current checks are finished, and no other is begun.
    """

    def __init__(
        self,
        start: Start,
        helper_changed: Watch = lambda _old, _new: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        who: str = "",
        may_go_on: bool = True,
        num_helpers: int = 1,
        weight: Callable[[int | None], float] = alike,
    ) -> None:
        self._clock = clock
        self._line = Line(num_helpers, weight)
        self._answers: list[Answer] = []  # that `poll` has not returned yet
        self._may_go_on = may_go_on
        self._seats = [
            Seat(HelperSlot(start, helper_changed, self._advance, clock=clock, who=who), self._line, clock=clock)
            for _ in range(num_helpers + NUM_MORE_HELPERS)
        ]

    @property
    def deadline(self) -> float | None:
        """Time by which `poll` must be called, by the client's clock; None without one."""
        deadlines = [request.deadline for seat in self._seats if (request := seat.current) is not None]
        starts = [seat.slot.deadline(is_wanted=bool(self._line)) for seat in self._seats if seat.current is None]
        ends = [seat.idle_since + IDLE_SEC for seat in self._seats[1:] if seat.is_free]
        looks = [self._clock() + LOOK_SEC] if self._line and not self.is_between and not self.is_rehearsing else []
        times = (*deadlines, *starts, *ends, *looks, self._line.due_at)
        return min((moment for moment in times if moment is not None), default=None)

    @property
    def is_busy(self) -> bool:
        return bool(self._line or self._answers) or not self.is_between

    @property
    def is_between(self) -> bool:
        """True if no helper is working on a request."""
        return all(seat.current is None for seat in self._seats)

    @property
    def is_rehearsing(self) -> bool:
        """True if all helpers that work are at a rehearsal."""
        return not self.is_between and all(seat.is_rehearsing for seat in self._seats if seat.current is not None)

    @property
    def is_late(self) -> bool:
        """True if the last checks of all who wait here ran into their deadlines."""
        return self._line.is_late

    @property
    def has_helper(self) -> bool:
        return not all(seat.slot.is_empty for seat in self._seats)

    @property
    def is_ready(self) -> bool:
        """True if it has a helper that takes requests."""
        return any(seat.slot.is_ready for seat in self._seats)

    @property
    def wants_helper(self) -> bool:
        """True if a helper has to be started now, as there is none."""
        return self._line.num_takeable > 0 and not self.has_helper and self._may_start(self._seats[0])

    @property
    def fault(self) -> str:
        """Reason why no helper can be started; empty if one can, or works."""
        return "" if self.is_ready else next((seat.slot.fault for seat in self._seats if seat.slot.fault), "")

    @property
    def why_stuck(self) -> str:
        """Reason why some requests cannot be checked now; empty if all can."""
        return self.fault or self._line.fault

    def stuck(self) -> set[int]:
        """Return the requests for which no helper can be started, or whose files cannot be read."""
        return {request.id for request in (self._line if self.fault else self._line.aside)}

    def submit(self, request: Request) -> None:
        """Submit a job file for a check; `poll` returns the answer."""
        self._line.add(request)
        self._advance()

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call. An error loses none: the next call returns them."""
        for seat in self._seats:
            self._answers += seat.poll()
        self._advance()
        self._end_idle()
        answers, self._answers = self._answers, []
        return answers

    def let(self, *, go_on: bool) -> None:
        """Allow another check to be begun, or not."""
        self._may_go_on = go_on
        self._advance()

    def rest(self) -> None:
        """End the idle helpers; requests wait until `let`."""
        self._may_go_on = False
        for seat in self._seats:
            seat.slot.drop()

    def close(self) -> None:
        """End the helpers for good, whatever they are doing."""
        for seat in self._seats:
            seat.slot.close()

    def _advance(self) -> None:
        """Begin the next requests, if that is possible now, and start the helpers that they need."""
        self._line.bring_back(self._clock())
        if not self._may_go_on:
            return
        for seat in self._seats:
            while seat.is_free and (request := self._line.take()) is not None:
                self._answers += seat.send(request)
        num_coming = sum(not seat.slot.is_empty and seat.current is None for seat in self._seats)
        for seat in self._seats:
            if self._line.num_takeable > num_coming and self._may_start(seat):
                seat.idle_since = self._clock()
                seat.slot.start()
                num_coming += 1

    def _may_start(self, seat: Seat) -> bool:
        """Return True if a seat's helper may be started: after a failure no other than the one that has failed, and
        the first one alone, so that what prevents all of them is reported once."""
        failed = next((other for other in self._seats if other.slot.fault), seat)
        return seat.slot.may_start and failed is seat and (self.is_ready or not self.has_helper)

    def _end_idle(self) -> None:
        for seat in self._seats[1:]:
            if seat.is_free and self._clock() - seat.idle_since >= IDLE_SEC:
                seat.slot.drop()
