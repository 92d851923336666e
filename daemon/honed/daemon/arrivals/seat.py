"""One preflight helper's place, and the request that the helper has."""

from __future__ import annotations

import logging
from collections.abc import Callable

from honed.daemon.arrivals.line import Line, Request
from honed.run import reply
from honed.run.helper_slot import HelperSlot
from honed.run.rehearsed import STAGE
from honed.run.reply import Answer, Postponed, Refused
from honed.system import durable
from honed.system.error import EnvironmentInvalidError, SpecError
from honed.system.log import about

log = logging.getLogger(__name__)

#: Helpers that one job file may crash; after the second it is rejected.
MAX_HELPERS_PER_REQUEST = 2


class Seat:
    """Takes requests off a line and hands them to a helper, one at a time."""

    def __init__(self, slot: HelperSlot, line: Line, *, clock: Callable[[], float]) -> None:
        self.slot = slot
        self._line = line
        self._clock = clock
        self.current: Request | None = None  #: what the helper is working on
        self.idle_since = 0.0  #: by the clock, while it has no request

    @property
    def is_free(self) -> bool:
        """True if its helper takes a request now."""
        return self.slot.is_ready and self.current is None

    @property
    def is_rehearsing(self) -> bool:
        return self.current is not None and self.current.is_rehearsing

    def send(self, request: Request) -> list[Answer]:
        """Hand a request to the helper. Returns the answers to a job file whose copy is not there or is not a file. One
        that the machine keeps from being read waits, and holds up no other."""
        try:
            line = request.line()
        except (OSError, MemoryError) as error:
            if (problem := durable.machine_fault(error)) is not None:  # no free descriptor, a server that is gone
                return self._line.set_aside(request, problem, self._clock())
            why = getattr(error, "strerror", error)
            fault = SpecError(f"{request.spec_path.name} cannot be read: {why}", hint="submit it again")
            return self._line.end(request, Refused(request.id, fault))
        self.current = request
        request.num_helpers += 1
        request.deadline = self._clock() + request.timeout_sec
        log.debug("job %d: its check begins", request.id, extra=about(request.id, uid=request.uid))
        self.slot.send(line)
        return []

    def poll(self) -> list[Answer]:
        """Take what the helper has answered, and end it if it takes too long."""
        answers: list[Answer] = []
        while (line := self.slot.read_line()) is not None:
            answers += self._take(line)
        self.slot.tend()
        if (request := self.current) is not None:
            if not request.is_rehearsing and self.slot.stage() == STAGE:
                self._line.rehearse(request)
                request.deadline = self._clock() + request.timeout_sec
            elif self._clock() >= request.deadline:
                answers += self._give_up(request)
        return answers

    def _take(self, line: bytes) -> list[Answer]:
        request = self.current
        answer = reply.read(line, request.id) if request is not None else None
        if request is None or answer is None:
            return self._revive()  # the helper has ended; an invalid answer is treated as a crash
        if isinstance(answer, Postponed):
            return self._postpone(request, answer)
        return self._end(request, answer, is_late=False)

    def _postpone(self, request: Request, answer: Postponed) -> list[Answer]:
        """Let a request wait whose check has met a fault of the machine; the helper has not crashed."""
        self.current, self.idle_since = None, self._clock()
        request.num_helpers = 0
        # Of the files that a job names, the status of honed says nothing.
        shown = "the machine keeps a file that the job names from being read"
        return self._line.set_aside(request, answer.fault, self._clock(), shown=shown)

    def _end(self, request: Request, answer: Answer, *, is_late: bool | None = None) -> list[Answer]:
        self.current, self.idle_since = None, self._clock()
        return self._line.end(request, answer, is_late=is_late)

    def _revive(self) -> list[Answer]:
        """Let a new helper have the request after the helper's death, or reject it if it has crashed two."""
        self.slot.drop()
        if (request := self.current) is None:
            return []
        if request.num_helpers < MAX_HELPERS_PER_REQUEST:
            self.current = None
            self._line.put_back(request)
            return []
        error = EnvironmentInvalidError(
            f"the check failed: the checking process died {request.num_helpers} times during: {self.slot.stage()}",
            hint="see the journal; a file named in the job may be damaged",
        )
        return self._end(request, Refused(request.id, error))

    def _give_up(self, request: Request) -> list[Answer]:
        self.slot.drop()
        error = EnvironmentInvalidError(
            f"the check did not finish within {request.timeout_sec:g} s; it was at: {self.slot.stage()}",
            hint="check whether a file named in the job is a pipe, or on a slow or unreachable file system",
        )
        return self._end(request, Refused(request.id, error), is_late=True)
