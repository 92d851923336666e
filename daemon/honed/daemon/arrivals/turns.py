"""Turns of users who wait for the same thing: as many for each as their weight says, one at a time.

A deficit round robin, kept as times: a turn takes its user 1/weight of a round, and the user whose next turn is due
first has it. So a user of weight 3 has three turns for one of weight 1 while both wait, one of weight 0.5 has one for
two, and the turns are spread evenly. A user who comes, or comes back later, is due at once: waiting for nothing saves
up nothing, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

U = TypeVar("U", int, int | None)


def alike(_uid: int | None) -> float:
    """Return the weight of a user where all have the same."""
    return 1.0


class Turns:
    """The turns at one thing. `weight` returns a user's; the user None is honed itself."""

    def __init__(self, weight: Callable[[int | None], float] = alike) -> None:
        self.weight = weight
        self._now = 0.0  # in rounds of a user of weight 1
        self._last: dict[int | None, float] = {}  # when a user's last turn was due; in order of these turns

    def due(self, uid: int | None) -> float:
        """Return the time at which a user's next turn is due."""
        last = self._last.get(uid)
        return self._now if last is None else max(self._now, last + 1.0 / self.weight(uid))

    def order(self, users: Iterable[U]) -> list[U]:
        """Return users in the order of their last turns; before them, as they are given, those without any."""
        given = list(users)
        places = {uid: number for number, uid in enumerate(self._last)}
        return sorted(given, key=lambda uid: places.get(uid, -1))

    def first(self, users: Iterable[U]) -> U:
        """Return the user, of at least one, whose turn it is."""
        return min(self.order(users), key=self.due)

    def take(self, uid: int | None, present: Iterable[int | None]) -> None:
        """Begin a user's turn. `present`: those who wait for turns or have one; absent users earn no credit."""
        self._now = min(map(self.due, (uid, *present)))
        due = self.due(uid)
        self._last.pop(uid, None)
        self._last[uid] = due

    def give_back(self, uid: int | None) -> None:
        """Let a user whose turn was of no use be due at once."""
        self._last.pop(uid, None)

    def end(self) -> None:
        """Reset, as nobody waits: the next user owes nothing."""
        self._now = 0.0
        self._last.clear()
