"""Job files that wait for a preflight helper: by turns of their users (turns.py), a user's own in order.

    waiting ── take ──► under check ── end ──► answered, as soon as all earlier ones of the same user are
       ▲                     │
       ├───── put_back ◄─────┤ its helper has died
       └ bring_back ◄─ aside ┘ the machine keeps a file of it from being read: it is tried again after a pause

With several helpers, users who wait are served before anybody has two of them, the others are shared by weight, and
nobody has all: one is left for the next user. So slow data sets of one user delay nobody else by more than the check
under way.

A rehearsal (check/rehearsal.py) may take minutes on a busy machine. Beside it another helper works for the others, for
up to NUM_MORE_HELPERS rehearsals at a time, and its user has no second check until it ends.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from honed.daemon.arrivals.turns import Turns, alike
from honed.job.plan_file import Earlier
from honed.run.reply import Answer
from honed.spec.config import Config
from honed.system import record, untrusted
from honed.system.device import Device
from honed.system.log import about
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Helpers at a time besides those that rehearse.
NUM_MORE_HELPERS = 2
#: Seconds before a file that could not be read is tried again, doubled each time; and the longest.
FIRST_PAUSE_SEC, MAX_PAUSE_SEC = 0.2, 10.0


@dataclass
class Request:
    """A job file that is to be checked; `uid` is its user, None for honed itself."""

    id: int
    spec_path: PersonPath
    config: Config
    device: Device | None = None  #: the one that the job is planned for; None: the first of this machine
    uid: int | None = None
    earlier: Earlier = field(default_factory=Earlier)
    deadline: float = 0.0  #: by the client's clock, set when the request is sent
    num_helpers: int = 0  #: helpers that it was sent to
    is_rehearsing: bool = False  #: it is at its rehearsal, which has a limit of its own
    pause_sec: float = 0.0  #: for which it was set aside last

    @property
    def timeout_sec(self) -> float:
        """Seconds that its helper has, from now on: more at its rehearsal, which the helper itself ends before that."""
        spool = self.config.spool
        return spool.preflight_timeout_sec + (spool.rehearsal_timeout_sec if self.is_rehearsing else 0.0)

    def line(self) -> bytes:
        """Return the request's line, with the job file's content: the helper may not be able to read the file."""
        data = untrusted.read_plain(self.spec_path, max_bytes=self.config.spool.max_spec_bytes)
        request = {
            "id": self.id,
            "spec_name": self.spec_path.name,
            "spec": base64.b64encode(data).decode("ascii"),
            "config": self.config.model_dump(mode="json"),
            "device": asdict(self.device) if self.device else None,
            "uid": self.uid,
            "earlier": record.as_dict(self.earlier),
        }
        return json.dumps(request).encode() + b"\n"


class Line:
    """The requests of the users of these helpers. Users whose last check ran into its deadline come after all
    others. `weight` returns a user's."""

    def __init__(self, num_helpers: int, weight: Callable[[int | None], float] = alike) -> None:
        self._num_helpers = num_helpers
        self._turns = Turns(weight)
        self._waiting: dict[int | None, deque[Request]] = {}
        self._under_check: Counter[int | None] = Counter()
        self._rehearsing: dict[int, int | None] = {}  # request → user
        self._taken: dict[int | None, deque[int]] = {}  # not answered yet, in order
        self._answers: dict[int, Answer] = {}  # of requests with earlier ones of the same user under check
        self._late: set[int | None] = set()
        self._aside: list[tuple[float, Request]] = []  # when each is tried again
        self._fault = ""  # what kept the last one of them from being read

    def __len__(self) -> int:
        """Return the number of waiting requests, with those that are set aside."""
        return sum(map(len, self._waiting.values())) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        yield from self.aside
        yield from (request for waiting in self._waiting.values() for request in waiting)

    @property
    def fault(self) -> str:
        """Reason why job files cannot be read; empty if none is set aside."""
        return self._fault if self._aside else ""

    @property
    def aside(self) -> list[Request]:
        """The requests whose job files could not be read."""
        return [request for _, request in self._aside]

    @property
    def due_at(self) -> float | None:
        """Time at which the first of those that are set aside is tried again; None without one."""
        return min((due for due, _ in self._aside), default=None)

    @property
    def is_late(self) -> bool:
        """True if the last check of every user here ran into its deadline."""
        return bool(self._late) and self._waiting.keys() <= self._late

    @property
    def num_takeable(self) -> int:
        """Number of requests that may be taken now."""
        num_free = self._num_helpers + min(NUM_MORE_HELPERS, len(self._rehearsing)) - self._under_check.total()
        num_users = len(self._waiting.keys() - self._under_check.keys())
        num_waiting = sum(len(self._waiting[uid]) for uid in self._waiting.keys() - set(self._rehearsing.values()))
        return min(num_free, max(num_users, min(num_waiting, num_free - 1)))

    def add(self, request: Request) -> None:
        self._waiting.setdefault(request.uid, deque()).append(request)

    def take(self) -> Request | None:
        """Remove and return the next request; None if none may be taken now."""
        if not self._waiting:
            self._turns.end()
        if self.num_takeable <= 0:
            return None
        present = [uid for uid in self._waiting if uid not in self._rehearsing.values()]
        uid = min(self._turns.order(present), key=self._rank)
        self._turns.take(uid, (other for other in present if (other in self._late) == (uid in self._late)))
        waiting = self._waiting[uid]
        request = waiting.popleft()
        if not waiting:
            del self._waiting[uid]
        self._under_check[uid] += 1
        taken = self._taken.setdefault(uid, deque())
        if request.id not in taken:  # else it was put back
            taken.append(request.id)
        return request

    def _rank(self, uid: int | None) -> tuple[float, bool, float]:
        return (self._under_check[uid] / self._turns.weight(uid), uid in self._late, self._turns.due(uid))

    def rehearse(self, request: Request) -> None:
        """Note that a request under check is at its rehearsal."""
        request.is_rehearsing = True
        self._rehearsing[request.id] = request.uid

    def put_back(self, request: Request) -> None:
        """Let a request that was taken be the next one, in the same place among its user's."""
        self._leave(request)
        waiting = self._waiting.pop(request.uid, deque())
        waiting.appendleft(request)
        self._waiting = {request.uid: waiting, **self._waiting}
        self._turns.give_back(request.uid)

    def set_aside(self, request: Request, problem: str, now: float, *, shown: str = "") -> list[Answer]:
        """Let a request that was taken wait for a while, as the machine keeps its job file or one named in that from
        being read: `problem` for the log, `shown` for everybody. Returns its user's answers that it has held up."""
        self._leave(request)
        self._turns.give_back(request.uid)
        if not self._aside and not request.pause_sec:
            log.error("job %d: not checked yet: %s", request.id, problem, extra=about(request.id, uid=request.uid))
        self._fault = shown or problem
        request.pause_sec = min(2 * request.pause_sec or FIRST_PAUSE_SEC, MAX_PAUSE_SEC)
        self._aside.append((now + request.pause_sec, request))
        self._taken[request.uid].remove(request.id)
        return self._free(request.uid)

    def bring_back(self, now: float) -> None:
        """Let the requests whose pause is over be the next ones of their users."""
        due = [request for due_at, request in self._aside if due_at <= now]
        self._aside = [item for item in self._aside if item[0] > now]
        for request in reversed(due):
            self._waiting.setdefault(request.uid, deque()).appendleft(request)

    def end(self, request: Request, answer: Answer, *, is_late: bool | None = None) -> list[Answer]:
        """End a request's check; `is_late` is None if it tells nothing of the user's data. Returns the answers of its
        user that no earlier request holds up any more."""
        self._leave(request)
        if is_late is not None:
            (self._late.add if is_late else self._late.discard)(request.uid)
        self._answers[request.id] = answer
        return self._free(request.uid)

    def _free(self, uid: int | None) -> list[Answer]:
        taken, free = self._taken[uid], []
        while taken and taken[0] in self._answers:
            free.append(self._answers.pop(taken.popleft()))
        if not taken:
            del self._taken[uid]
        return free

    def _leave(self, request: Request) -> None:
        self._under_check[request.uid] -= 1
        if not self._under_check[request.uid]:
            del self._under_check[request.uid]
        request.is_rehearsing = False
        self._rehearsing.pop(request.id, None)
