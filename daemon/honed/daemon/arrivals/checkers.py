"""All preflight helpers of an instance: job files are checked with the rights of their submitters where possible.

    root and accounts of the system, and where workers are no units    children of the daemon, in common
    people (access.is_person)                                          each their own, as honed-check@UID.service

A unit is kept while there is work for it, and for a while after. Only a few run at a time: a user who waits for one
takes the place of an idle unit, or of the unit that has worked the longest, when that is between two job files. Turns
at a place are weighted (turns.py): a user whose next turn comes before that of one who waits keeps the place.
A unit that rehearses (line.py) is no reason for others to wait: up to NUM_MORE_HELPERS of them do not count.

While the helper of a user who has just come is being started, no other begins a check: a flood that is being checked
is ahead of them by the checks under way, and no more.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from honed.daemon.arrivals.checker import IDLE_SEC, LOOK_SEC, Checker
from honed.daemon.arrivals.line import NUM_MORE_HELPERS, Request
from honed.daemon.arrivals.turns import Turns, alike
from honed.run.helper import Start, Watch
from honed.run.reply import Answer
from honed.system import access

#: Units at a time that are more than children: a check that waits for a slow disk takes no core.
NUM_MORE_UNITS = 2
#: Seconds that a unit may continue while others wait for its place, unless these have just come.
TURN_SEC = 5.0
#: Seconds that the others wait for the helper of a user who has just come, at most.
START_GRACE_SEC = 30.0
#: Common helpers by default, at most: honed itself accepts no faster than these check.
MAX_HELPERS = 4


def default_num_helpers() -> int:
    """Return the number of common helpers where none is configured: one for every two cores that honed may use."""
    return max(1, min(MAX_HELPERS, len(os.sched_getaffinity(0)) // 2))


class Checkers:
    """One interface to all helpers of an instance; see Checker for the parameters.

    `start` starts a common helper, `start_as` one with the rights of a submitter (None: there are no units), and
    `num_helpers` of the common ones run at a time.
    """

    def __init__(
        self,
        start: Start,
        start_as: Callable[[int], Start] | None = None,
        helper_changed: Watch = lambda _old, _new: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        num_helpers: int = 1,
        weight: Callable[[int | None], float] = alike,
    ) -> None:
        self._start_as = start_as
        self._helper_changed = helper_changed
        self._clock = clock
        self._num_units = num_helpers + NUM_MORE_UNITS
        self._common = Checker(start, helper_changed, clock=clock, num_helpers=num_helpers, weight=weight)
        self._people: dict[int, Checker] = {}  # by uid
        self._turns = Turns(weight)  # at a place
        self._placed: dict[int, float] = {}  # uid → since when it has had a place, or another turn at it
        self._idle: dict[int, float] = {}  # uid → since when it has been idle, of those with a place
        self._queue: deque[int] = deque()  # users that wait for a place
        self._ending: set[int] = set()  # users with a place that give it up when their check has ended
        self._came: dict[int, float] = {}  # uid → when they came with work, of the last START_GRACE_SEC
        self._new: set[int] = set()  # of those, the ones whose helper is not ready yet
        self._answers: list[Answer] = []  # that `poll` has not returned yet

    @property
    def deadline(self) -> float | None:
        """Time by which `poll` must be called, by the clock; None without one."""
        deadlines = [checker.deadline for checker in (self._common, *self._people.values())]
        ends = [since + IDLE_SEC for since in self._idle.values()]
        ends += [self._came[uid] + START_GRACE_SEC for uid in self._new]
        ends += [self._clock() + LOOK_SEC] if self._queue else []
        return min((moment for moment in (*deadlines, *ends) if moment is not None), default=None)

    @property
    def fault(self) -> str:
        """Reason why some job files cannot be checked; empty if all can."""
        return next((person.why_stuck for person in (self._common, *self._people.values()) if person.why_stuck), "")

    def stuck(self) -> set[int]:
        """Return the numbers of the job files that cannot be checked."""
        return set[int]().union(*(checker.stuck() for checker in (self._common, *self._people.values())))

    def is_stuck(self, uid: int) -> bool:
        """Return True if this user's job files cannot be checked for now."""
        checker = self._people.get(uid) if self._has_unit(uid) else self._common
        return checker is not None and bool(checker.fault)

    def submit(self, request: Request) -> None:
        """Submit a job file as Checker.submit does, to be checked with the rights of its user; None: with our own."""
        checker, uid = self._of(request.uid), request.uid
        if uid is not None and checker is not self._common and not (checker.is_busy or checker.has_helper):
            self._welcome(uid)
        checker.submit(request)
        self._hand_out()

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call. An error loses none: the next call returns them."""
        for checker in (self._common, *self._people.values()):
            self._answers += checker.poll()
        self._hand_out()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End all helpers for good, whatever they are doing."""
        for checker in (self._common, *self._people.values()):
            checker.close()

    def _has_unit(self, uid: int | None) -> bool:
        return self._start_as is not None and uid is not None and access.is_person(uid)

    def _of(self, uid: int | None) -> Checker:
        if self._start_as is None or uid is None or not self._has_unit(uid):
            return self._common
        if uid not in self._people:
            checker = Checker(
                self._start_as(uid),
                self._helper_changed,
                clock=self._clock,
                who=f" for the user {access.user_name(uid)}",
                may_go_on=False,  # until it has a place
            )
            self._people[uid] = checker
        return self._people[uid]

    # -- places -------------------------------------------------------------------------------------------------------

    def _welcome(self, uid: int) -> None:
        """Let the others wait for a user's helper; not again and again within START_GRACE_SEC."""
        if uid not in self._came:
            self._came[uid] = self._clock()
            self._new.add(uid)

    def _hand_out(self) -> None:
        """Give the places to users with work, by turns."""
        now = self._clock()
        for uid in list(self._placed):
            self._look_after(uid, self._people[uid], now)
        self._queue.extend(
            uid
            for uid, checker in self._people.items()
            if checker.wants_helper and uid not in self._placed and uid not in self._queue
        )
        self._came = {uid: since for uid, since in self._came.items() if now - since < START_GRACE_SEC}
        self._new = {uid for uid in self._new if uid in self._came and self._is_awaited(uid)}
        self._end_turns(now)
        while self._queue:
            uid = min(self._queue, key=self._rank)
            if len(self._placed) >= self._max_units and not self._take_back_one(uid):
                break
            self._queue.remove(uid)
            self._placed[uid] = now
            self._turns.take(uid, self._present())
        if self._present() <= self._placed.keys():
            self._turns.end()
        for uid in self._placed:
            self._people[uid].let(go_on=uid in self._new or not (self._new or uid in self._ending))
        self._common.let(go_on=self._new.isdisjoint(self._placed))
        self._forget()

    @property
    def _max_units(self) -> int:
        return self._num_units + min(NUM_MORE_HELPERS, sum(self._people[uid].is_rehearsing for uid in self._placed))

    def _is_awaited(self, uid: int) -> bool:
        checker = self._people.get(uid)
        return checker is not None and checker.is_busy and not (checker.is_ready or checker.fault)

    def _look_after(self, uid: int, checker: Checker, now: float) -> None:
        if not checker.has_helper and not checker.wants_helper:
            self._take_back(uid)  # its start has failed, or its helper has died without work
        elif not checker.is_ready:
            self._placed[uid] = now  # the time of the start does not count
        elif checker.is_busy:
            self._idle.pop(uid, None)
        elif now - self._idle.setdefault(uid, now) >= IDLE_SEC:
            self._take_back(uid)

    def _end_turns(self, now: float) -> None:
        """Choose units, of those whose turn is over, that end after their job file: one for each user who waits and is
        due before them; of several that of the user who is due last, or has worked the longest. Where a user who waits
        is due later, the others begin their next turns."""
        working = sorted(self._placed.keys() - self._idle.keys(), key=self._placed.__getitem__)
        # A unit at its rehearsal may not be between two job files for minutes, and is no reason to wait.
        may_end = [uid for uid in working if not self._people[uid].is_rehearsing]
        over = [uid for uid in may_end if now - self._placed[uid] >= TURN_SEC]
        over.sort(key=self._turns.due, reverse=True)
        num_free = max(0, self._max_units - len(working))
        left = sorted(self._queue, key=self._rank)[num_free:]
        self._ending = set()
        for comer in left:
            if over and self._turns.due(over[0]) >= self._turns.due(comer):
                self._ending.add(over.pop(0))
        if len(self._ending) < len(left):
            for uid in reversed(over):
                self._placed[uid] = now
                self._turns.take(uid, self._present())

    def _present(self) -> set[int]:
        return {uid for uid, checker in self._people.items() if checker.is_busy}

    def _rank(self, uid: int) -> tuple[bool, bool, float]:
        return (uid not in self._new, self._people[uid].is_late, self._turns.due(uid))

    def _take_back_one(self, comer: int) -> bool:
        """Take back the longest-idle place, or for `comer` one that is between two job files: of a user whose turn is
        over, or of the longest-working one for a user who has just come."""
        working = sorted(self._placed, key=self._placed.__getitem__)
        giving = [uid for uid in working if uid in self._ending or (comer in self._new and uid not in self._new)]
        between = [uid for uid in giving if self._people[uid].is_between]
        for uid in [*sorted(self._idle, key=self._idle.__getitem__), *between][:1]:
            self._take_back(uid)
            return True
        return False

    def _take_back(self, uid: int) -> None:
        del self._placed[uid]
        self._idle.pop(uid, None)
        self._people[uid].rest()

    def _forget(self) -> None:
        for uid, checker in list(self._people.items()):
            if uid not in self._placed and not checker.is_busy:
                checker.close()
                del self._people[uid]
