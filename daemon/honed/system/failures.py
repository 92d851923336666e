"""Failures of the loop's steps and of the items of a step: one that fails holds up no other.

A fault of the machine is tried again, and reported while it lasts; anything else is logged with its traceback. Whatever
it is, an error that the same item meets three times in a row is logged as an error with its traceback: what looks like
the machine's fault may be ours.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from honed.system import durable

#: Times in a row that an item meets the same error before it is logged, whatever it is.
NUM_IN_A_ROW = 3
#: Items whose last failure is remembered; the oldest is forgotten, so that it does not grow for ever.
MAX_REMEMBERED = 1000


@dataclass
class _Failure:
    """The last failure of an item."""

    kind: tuple[object, ...]
    num_in_a_row: int = 1


class Failures:
    """The failures of one pass of the loop, and how often each item's last one was repeated."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[tuple[str, str], _Failure] = {}
        self.step = ""  #: the step of the loop that runs: of each, an item's failures are counted apart
        self.fault = ""  #: the first fault of the machine since `begin`; empty if there was none
        self.num_unforeseen = 0  #: other failures since `begin`

    def begin(self) -> None:
        """Begin a pass: its failures are counted anew."""
        self.fault, self.num_unforeseen = "", 0

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Run one item, named `what` in the log. Its failure is noted, and raised no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the next item goes on
            self.note(what, error)
        else:
            self.succeed(what)

    def succeed(self, what: str) -> None:
        """Note that an item did not fail this time."""
        self._last.pop((self.step, what), None)

    def note(self, what: str, error: Exception) -> None:
        """Note that an item failed."""
        fault = durable.machine_fault(error)
        if fault is None:
            self.num_unforeseen += 1
        else:
            self.fault = self.fault or fault
        num = self._count(what, error)
        if num == NUM_IN_A_ROW or (fault is None and num == 1):
            words = f", {num} times in a row" if num > 1 else ""
            self._log.error("%s: an error in the daemon's loop%s: %s", what, words, fault or error, exc_info=error)

    def _count(self, what: str, error: Exception) -> int:
        """Return how many times in a row an item has met this error: one of this kind, raised in the same place."""
        where = traceback.extract_tb(error.__traceback__)[-1:]
        kind = (type(error), getattr(error, "errno", None), *((item.filename, item.lineno) for item in where))
        last = self._last.pop((self.step, what), None)
        if last is not None and last.kind == kind:
            last.num_in_a_row += 1
        else:
            last = _Failure(kind)
        self._last[self.step, what] = last  # the newest is the last one
        if len(self._last) > MAX_REMEMBERED:
            del self._last[next(iter(self._last))]
        return last.num_in_a_row
