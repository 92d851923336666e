"""The daemon's end of one preflight helper (preflight.py). It never blocks, and kills a helper that does not answer in
time. It imports none of the helper's checks, so that the daemon stays small."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.job.plan_file import Precision
from honed.run import reply
from honed.run.helper import Start, Watch
from honed.run.helper_slot import HelperSlot
from honed.run.reply import Answer, Refused
from honed.spec.config import Config
from honed.system import untrusted
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError, SpecError

#: Helpers that one job file may crash; after the second it is refused.
MAX_HELPERS_PER_REQUEST = 2
#: Errors of reading that are a fault of the job file; any other is the machine's.
_FILE_FAULTS = {errno.ENOENT, errno.EACCES, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.ENXIO}


@dataclass
class _Request:
    id: int
    spec_path: Path
    config: Config
    uid: int | None
    rest: Mapping[str, object]
    is_sent: bool = False
    deadline: float = 0.0  #: by the client's clock, set when the request is sent
    num_helpers: int = 0  #: helpers that it was sent to

    @property
    def timeout_sec(self) -> float:
        return self.config.spool.preflight_timeout_sec

    def line(self) -> bytes:
        """Return the request's line, with the job file's content: the helper may not be able to read the file."""
        data = untrusted.read_plain(self.spec_path, max_bytes=self.config.spool.max_spec_bytes, num_names=1)
        spec = {"spec_name": self.spec_path.name, "spec": base64.b64encode(data).decode("ascii")}
        request = {"id": self.id, **spec, "config": self.config.model_dump(mode="json"), **self.rest}
        return json.dumps(request).encode() + b"\n"


class _Line:
    """Requests that wait, one of each user in turn, a user's own in order. Users whose last check ran into its deadline
    come after all others: slow data sets delay nobody else by more than the check under way."""

    def __init__(self) -> None:
        self._waiting: dict[int | None, deque[_Request]] = {}
        self._late: set[int | None] = set()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[_Request]:
        return itertools.chain.from_iterable(self._waiting.values())

    def add(self, request: _Request) -> None:
        self._waiting.setdefault(request.uid, deque()).append(request)

    def take(self) -> _Request:
        """Remove and return the next request. Raises StopIteration if none waits."""
        uid = next(iter(sorted(self._waiting, key=self._late.__contains__)))
        waiting = self._waiting.pop(uid)
        request = waiting.popleft()
        if waiting:
            self._waiting[uid] = waiting  # behind the other users
        return request

    def note(self, request: _Request, *, is_late: bool) -> None:
        """Note how a request's check ended."""
        (self._late.add if is_late else self._late.discard)(request.uid)

    @property
    def is_late(self) -> bool:
        """True if the last check of every user here ran into its deadline."""
        return bool(self._late) and self._waiting.keys() <= self._late


class Checker:
    """Hands requests to a helper, one at a time, by turns of their users, and never blocks.

    `helper_changed` is called with the old and the new descriptor to watch for reading (None: there is none), so that
    the caller's selector can follow: the helper is started with the first request, and again after a death. While none
    can be started, requests wait, and `fault` says why. `who` names the user in log lines. Without `may_go_on`, the
    current check is finished, and no other is begun.
    """

    def __init__(
        self,
        start: Start,
        helper_changed: Watch = lambda _old, _new: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        who: str = "",
        may_go_on: bool = True,
    ) -> None:
        self._slot = HelperSlot(start, helper_changed, self._advance, clock=clock, who=who)
        self._clock = clock
        self._waiting = _Line()
        self._current: _Request | None = None
        self._unread: list[Refused] = []  # refusals of job files that could not be read
        self._may_go_on = may_go_on

    @property
    def deadline(self) -> float | None:
        """Time by which `poll` must be called, by the client's clock; None without one."""
        if self._current is not None and self._current.is_sent:
            return self._current.deadline
        return self._slot.deadline(is_wanted=self.is_busy)

    @property
    def is_busy(self) -> bool:
        return self._current is not None or bool(self._waiting or self._unread)

    @property
    def is_between(self) -> bool:
        """True if no helper is working on a request."""
        return self._current is None or not self._current.is_sent

    @property
    def is_late(self) -> bool:
        """True if the last checks of all who wait here ran into their deadlines."""
        return self._waiting.is_late

    @property
    def may_go_on(self) -> bool:
        """False if the current check is finished, and no other is begun."""
        return self._may_go_on

    @property
    def has_helper(self) -> bool:
        return not self._slot.is_empty

    @property
    def is_ready(self) -> bool:
        """True if it has a helper that takes requests."""
        return self._slot.is_ready

    @property
    def wants_helper(self) -> bool:
        """True if a helper has to be started now."""
        has_work = self._current is not None or bool(self._waiting)
        return has_work and self._slot.may_start

    @property
    def fault(self) -> str:
        """Reason why no helper can be started; empty if one can."""
        return self._slot.fault

    def stuck(self) -> set[int]:
        """Return the requests for which no helper can be started."""
        requests = [*([self._current] if self._current is not None else ()), *self._waiting]
        return {request.id for request in requests} if self.fault else set()

    def submit(
        self,
        job_id: int,
        spec_path: Path,
        config: Config,
        device: Device | None = None,
        jobs: Mapping[str, Path] | None = None,
        *,
        commit: str | None = None,
        dataset_commits: Mapping[str, str] | None = None,
        pinned: Precision | None = None,
        uid: int | None = None,
    ) -> None:
        """Submit a job file for a check; `poll` returns the answer. `commit`: the commit that a hub id meant before;
        `dataset_commits`: those of data sets, by key; `pinned`: the precision of the job's earlier plan."""
        rest = {
            "device": device.as_dict() if device else None,
            "jobs": {name: str(path) for name, path in (jobs or {}).items()},
            "commit": commit,
            "dataset_commits": dict(dataset_commits or {}),
            "pinned": pinned.as_dict() if pinned else None,
            "uid": uid,
        }
        self._waiting.add(_Request(job_id, spec_path, config, uid, rest))
        self._advance()

    def poll(self) -> list[Answer]:
        """Return the answers that have come since the last call."""
        answers: list[Answer] = []
        while (line := self._slot.read_line()) is not None:
            answers += self._take(line)
        self._slot.tend()
        if self._current is not None and self._current.is_sent and self._clock() >= self._current.deadline:
            answers.append(self._give_up(self._current))
        self._advance()
        unread, self._unread = self._unread, []
        return [*answers, *unread]

    def let(self, *, go_on: bool) -> None:
        """Allow another check to be begun, or not."""
        self._may_go_on = go_on
        self._advance()

    def rest(self) -> None:
        """End the idle helper; requests wait until `let`."""
        self._may_go_on = False
        self._slot.drop()

    def close(self) -> None:
        """End the helper for good, whatever it is doing."""
        self._slot.close()

    def _advance(self) -> None:
        """Begin the next request, if that is possible now."""
        while self._may_go_on and self.is_between:
            if self._current is None and not self._waiting:
                return
            self._current = self._current or self._waiting.take()
            if self.wants_helper:
                self._slot.start()
            if not self._slot.is_ready:
                return
            self._send(self._current)

    def _send(self, request: _Request) -> None:
        """Send a request to the helper. A failure that is not the job file's does not count against it."""
        try:
            line = request.line()
        except OSError as error:
            if error.errno not in _FILE_FAULTS:  # e.g. no free descriptor
                self._slot.fail(str(error))
                return
            fault = SpecError(f"{request.spec_path.name} cannot be read: {error.strerror}", hint="submit it again")
            self._unread.append(Refused(request.id, fault))
            self._current = None
            return
        request.is_sent = True
        request.num_helpers += 1
        request.deadline = self._clock() + request.timeout_sec
        self._slot.send(line)

    def _take(self, line: bytes) -> list[Answer]:
        request = self._current
        answer = reply.read(line, request.id) if request is not None and request.is_sent else None
        if answer is None:
            return self._revive()  # the helper has ended; an invalid answer is treated as a crash
        assert request is not None
        self._waiting.note(request, is_late=False)
        self._current = None
        return [answer]

    def _revive(self) -> list[Answer]:
        """Send the request to a new helper after the helper's death, or refuse it if it has crashed two."""
        self._slot.drop()
        request = self._current
        if request is None or not request.is_sent:
            return []
        if request.num_helpers < MAX_HELPERS_PER_REQUEST:
            request.is_sent = False
            self._advance()
            return []
        self._current = None
        error = EnvironmentInvalidError(
            f"the check failed: the checking process died {request.num_helpers} times during: {self._slot.stage()}",
            hint="see the journal; a file named in the job may be damaged",
        )
        return [Refused(request.id, error)]

    def _give_up(self, request: _Request) -> Refused:
        self._slot.drop()
        self._waiting.note(request, is_late=True)
        self._current = None
        error = EnvironmentInvalidError(
            f"the check did not finish within {request.timeout_sec:g} s; it was at: {self._slot.stage()}",
            hint="check whether a file named in the job is a pipe, or on a slow or unreachable file system",
        )
        return Refused(request.id, error)
