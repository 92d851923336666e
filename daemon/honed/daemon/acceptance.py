"""From a file in incoming/ to an entry in queued/, or to rejected/ with its reason.

    arrival ── whole ──► claimed/<id>/ ── copied, checked by the preflight helper ──► queued/ or held/, or rejected/
                                                   ├─ names other jobs ──► once those are known, the same
                                                   └─ names a model or data set to fetch ──► once it is there, again

Nothing here waits: a helper answers when it has looked at the files that a job names. A job that names others may
have been dropped together with them, in any order: it is settled after the other arrivals of its time. One whose
`job:NAME` is not made yet is accepted without a plan; it is planned by a second check, when those jobs have succeeded.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from honed.daemon.checkers import Checkers
from honed.daemon.watcher import Watcher
from honed.job import query
from honed.job.arrival import Arrivals, Claim, Copy, Dropped, refusal, shown, too_large
from honed.job.database import timestamp
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.run.fetcher import Fetcher
from honed.run.snapshot import MODEL, Missing
from honed.spec import problem
from honed.spec.config import Config
from honed.system import durable, message, quote, untrusted
from honed.system.device import Device
from honed.system.error import (
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    InterruptedRunError,
    SpecError,
    from_dict,
    said,
)
from honed.system.log import about

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Of one user's flood, how many are claimed and not checked yet at a time: the rest waits in incoming/, where it costs
#: nothing and is in nobody's way.
MAX_PENDING = 64
#: How many are claimed, or accepted, together: they share the syncs of the disk. More would hold up the loop.
MAX_TOGETHER = 16
#: Arrivals that are looked at in one pass, and seconds between two listings of incoming/, as many times as one takes.
MAX_LOOKS_PER_PASS = 200
LISTING_REST = 20
#: Seconds that a checked arrival waits for others to be accepted with, and that a pass over those may take that wait.
ACCEPT_TOGETHER_SEC = 0.25
PASS_SEC = 0.1
#: Accepted jobs that are being checked again at a time.
MAX_ASKED_AGAIN = 32
#: Seconds for which a job waits for the arrival of one that it names, and for other arrivals to be settled first.
NAMED_JOB_PATIENCE_SEC = 3.0
ARRIVALS_PATIENCE_SEC = 30.0
#: Looks at which an arrival could not be taken, after which it is left where it lies.
MAX_DENIALS = 3
#: Files of one user that came over the control socket and wait: they take room on honed's disk, and not in their quota.
MAX_SUBMITTED = 10_000
#: How often one arrival has the same thing fetched: what is cached can be removed before the next look at it.
MAX_FETCHES_PER_ARRIVAL = 3
#: What a write meets where something else has its name: in a job's directory, its submitter's doing.
PLANTED_ERRNOS = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY}


@dataclass(frozen=True)
class _Pending:
    claim: Claim
    copy: Copy


@dataclass(frozen=True)
class _Waiting:
    """A checked arrival that names other jobs."""

    pending: _Pending
    answer: dict[str, Any]
    job: Job  #: as it would be accepted
    since: float  #: by the clock
    missing_since: float | None = None  #: since when a job that it names is known not to be there


@dataclass(frozen=True)
class _Fetching:
    """What waits for a model: an arrival, or a job that was accepted and is to be planned again."""

    missing: Missing
    answer: dict[str, Any]
    pending: _Pending | None
    ask_again: Callable[[], None]


@dataclass(frozen=True)
class Replanned:
    """What the second check made of a job that had waited for others' files: a plan, or an error."""

    job_id: int
    answer: dict[str, Any]


class _Names:
    """The names of the arrivals that wait, of each person, and the names that these wait for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], list[int]] = {}
        self._wanted: dict[tuple[int, str], list[str]] = {}

    def add(self, job: Job, wanted: list[str]) -> None:
        self._numbers.setdefault((job.uid, job.name), []).append(job.id)
        self._wanted[job.uid, job.name] = wanted

    def forget(self, job: Job) -> None:
        """It waits no longer."""
        numbers = self._numbers[job.uid, job.name]
        numbers.remove(job.id)
        if not numbers:
            del self._numbers[job.uid, job.name], self._wanted[job.uid, job.name]

    def newest(self, name: str, job: Job) -> int:
        """The number of this person's newest arrival of that name, besides this one; 0 where there is none."""
        return max((number for number in self._numbers.get((job.uid, name), ()) if number != job.id), default=0)

    def wanted_by(self, name: str, uid: int) -> list[str]:
        return self._wanted.get((uid, name), [])


class Acceptance:
    """The way in."""

    def __init__(
        self,
        spool: Spool,
        arrivals: Arrivals,
        watcher: Watcher,
        checkers: Checkers,
        config: Config,
        fetcher: Fetcher,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._arrivals = arrivals
        self._watcher = watcher
        self._checkers = checkers
        self.config = config
        self._fetcher = fetcher
        self._clock = clock
        self._submitted: dict[int, deque[Claim]] = {}  # over the control socket, and not looked at yet, by submitter
        self._pending: dict[int, _Pending] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._names = _Names()  # of those that wait
        self._quiet_since: float | None = None  # since when nothing else is on its way
        self._last_waiting = 0  # up to which number the last pass has come
        self._fetching: dict[int, _Fetching] = {}
        self._num_fetches: dict[int, Counter[Missing]] = {}
        self._ask_again: dict[int, Callable[[], None]] = {}  # for accepted jobs that are being checked again
        self._asked_again: set[int] = set()
        self._replanned: list[Replanned] = []
        self._checked: list[tuple[_Pending, dict[str, Any]]] = []  # to be accepted, together
        self._checked_since = 0.0
        self._listed: dict[int, deque[Path]] = {}  # what lay in incoming/ and was not looked at yet, by owner
        self._num_unsettled = 0
        self._list_at = 0.0
        self._must_list = False
        self._tried: set[int] = set()  # claims that could not be settled
        self._left: dict[str, int] = {}  # name → inode
        self._num_denials: dict[str, int] = {}
        self._num_scans = 0
        self._seen_at: dict[str, int] = {}  # name → the scan that saw it first
        self._late: list[Job] = []  # accepted, though a fault came after their entry was there
        self.fault = ""  #: what kept the last scan's arrivals from being settled, where the machine did

    @property
    def is_busy(self) -> bool:
        """Whether something lies in incoming/ or is being checked."""
        asked_again = self._asked_again - self._fetching.keys() - self._checkers.stuck()
        return bool(self._being_checked() or asked_again or self._checked or self._late or self.num_unsettled)

    def _being_checked(self) -> set[int]:
        """The arrivals that are being checked, but for those that cannot be."""
        return self._pending.keys() - self._checkers.stuck()

    @property
    def num_stuck(self) -> int:
        """Arrivals and jobs that cannot be checked for now."""
        arrivals = sum(len(waiting) for uid, waiting in self._lists() if self._checkers.is_stuck(uid))
        return len(self._checkers.stuck()) + arrivals

    def _lists(self) -> Iterator[tuple[int, Sequence[object]]]:
        """What was not looked at yet, by user."""
        yield from self._listed.items()
        yield from self._submitted.items()

    @property
    def num_waiting(self) -> int:
        """Arrivals that are checked and name jobs which may still arrive."""
        return len(self._waiting)

    @property
    def num_fetching(self) -> int:
        """Arrivals and jobs whose base model is being fetched."""
        return len(self._fetching)

    @property
    def num_arriving(self) -> int:
        """Arrivals that were seen and not taken yet: they may still be being written."""
        return self._num_unsettled + sum(len(waiting) for _, waiting in self._lists())

    @property
    def num_unsettled(self) -> int:
        """Those that can be taken, and one for what may have arrived since."""
        arrivals = sum(len(waiting) for uid, waiting in self._lists() if not self._checkers.is_stuck(uid))
        return self._num_unsettled + arrivals + self._must_list

    @property
    def has_room(self) -> bool:
        """Whether accepted jobs may be checked again now: a few at a time, so that new ones get their turn."""
        return len(self._asked_again - self._checkers.stuck()) < MAX_ASKED_AGAIN

    def submit(self, name: str, data: bytes, uid: int) -> Claim:
        """Take a job file that somebody hands over; it is checked as a dropped one is. Raises HonedError where it is
        not taken, and OSError where the machine keeps us from it."""
        if len(data) > (limit := self.config.spool.max_spec_bytes):
            raise too_large(name, limit)
        if self._arrivals.num_submitted(uid) >= MAX_SUBMITTED:
            raise EnvironmentInvalidError(
                f"{shown(name)}: {MAX_SUBMITTED} job files of yours wait to be checked",
                hint="submit it again when there are fewer: honectl list",
            )
        claim = self._arrivals.submit(name, data, uid)
        self._submitted.setdefault(uid, deque()).append(claim)
        return claim

    def scan(self) -> None:
        """Claim arrivals that are whole, and check again what was claimed before and could not be settled then."""
        self.fault = ""
        now = self._clock()
        self._must_list = now < self._list_at
        if not self._must_list:
            self._list()
            self._list_at = now + LISTING_REST * (self._clock() - now)
        self._check_claimed()
        whole: list[Path] = []
        submitted: list[Claim] = []
        for claim in self._in_turn(self._submitted, submitted, limit=MAX_TOGETHER):
            submitted.append(claim)
        self._copy(submitted)
        looked_at = self._in_turn(self._listed, whole, limit=MAX_TOGETHER - len(submitted))
        for path in itertools.islice(looked_at, MAX_LOOKS_PER_PASS):
            if self._is_left(path):
                continue
            self._num_unsettled += 1  # until it is claimed, or the next listing
            if self._watcher.is_whole(path):
                whole.append(path)
        self._claim(whole)

    def _in_turn(self, lists: dict[int, deque[T]], taken: Sequence[object], *, limit: int) -> Iterator[T]:
        """What stands in these lists, one of each user's in turn, until so many are `taken`; it is off its list then.

        A user who has much under way, or whose files cannot be checked, is passed over.
        """
        uids = [pending.copy.uid for pending in (*self._pending.values(), *(pending for pending, _ in self._checked))]
        counts = Counter(uids)
        while len(taken) < limit:
            having = (uid for uid in lists if counts[uid] < MAX_PENDING and not self._checkers.is_stuck(uid))
            if (uid := next(having, None)) is None:
                return
            waiting, num_taken = lists.pop(uid), len(taken)
            first = waiting.popleft()
            if waiting:
                lists[uid] = waiting  # behind the others
            yield first
            counts[uid] += len(taken) - num_taken

    def _list(self) -> None:
        """Look what lies in incoming/. While a flood is taken, that is done now and then."""
        arrivals = self._in_order(self._arrivals.dropped())
        self._watcher.keep({each.path.name for each in arrivals})
        self._listed, self._num_unsettled = {}, 0
        for each in arrivals:
            self._listed.setdefault(each.uid, deque()).append(each.path)

    def _in_order(self, arrivals: list[Dropped]) -> list[Dropped]:
        """As they were first seen; those first seen together by their times, which a clock that jumps gets wrong."""
        self._num_scans += 1
        self._seen_at = {each.path.name: self._seen_at.get(each.path.name, self._num_scans) for each in arrivals}
        return sorted(arrivals, key=lambda each: self._seen_at[each.path.name])

    def _check_claimed(self) -> None:
        """What was claimed before: by a honed that was killed, or when the disk was full."""
        known = {
            *self._pending,
            *self._waiting,
            *self._fetching,
            *(pending.claim.id for pending, _ in self._checked),
            *(claim.id for claims in self._submitted.values() for claim in claims),
        }
        if self._room() <= 0:
            self._must_list = True
            return
        found = self._arrivals.claims(but=known | self._tried, limit=self._room())
        if not found:
            self._tried.clear()  # once more with the next look
            return
        self._tried |= {claim.id for claim in found}
        self._must_list = True  # and then those behind them
        unsettled = []
        for claim in found:
            if (job := self._arrivals.accepted(claim)) is not None:
                self._late.append(job)
            else:
                unsettled.append(claim)
        self._copy(unsettled)

    def _room(self) -> int:
        """How many more of those that were claimed before may be looked at now."""
        return max(0, min(MAX_TOGETHER, MAX_PENDING - len(self._being_checked()) - len(self._checked)))

    def _claim(self, paths: list[Path]) -> None:
        """Raises OSError where the machine keeps one of them from being claimed; the others are."""
        claims: list[Claim] = []
        faults: list[Exception] = []
        for path, taken in zip(paths, self._arrivals.claim_all(paths), strict=True):
            match taken:
                case PermissionError() if taken.filename == str(path):  # else a place of our own
                    self._num_denials[path.name] = self._num_denials.get(path.name, 0) + 1
                    if self._num_denials[path.name] < MAX_DENIALS:
                        continue  # the next look may have more luck
                    self._leave(path, taken)
                case Exception():
                    faults.append(taken)
                    continue
                case Claim():
                    claims.append(taken)
            self._watcher.forget(path.name)
            self._num_denials.pop(path.name, None)
            self._num_unsettled -= 1
        self._copy(claims)
        if faults:
            raise faults[0]

    def _leave(self, path: Path, error: OSError) -> None:
        """What cannot be taken lies where it is, and is told of once: a directory of somebody else's."""
        with contextlib.suppress(FileNotFoundError):
            self._left[path.name] = path.lstat().st_ino
            log.warning("%r lies in %s and cannot be taken: %s", path.name, path.parent, error.strerror)

    def _is_left(self, path: Path) -> bool:
        try:
            return path.name in self._left and self._left[path.name] == path.lstat().st_ino
        except FileNotFoundError:
            del self._left[path.name]
            return False

    def _copy(self, claims: list[Claim]) -> None:
        policy = self.config.policy
        copies = self._arrivals.copy_all(
            claims,
            max_bytes=self.config.spool.max_spec_bytes,
            is_shared=policy.share_results,
            admin_group=policy.admin_group,
            drops=policy.arrivals == "spool",
        )
        for claim, copy in zip(claims, copies, strict=True):
            match copy:
                case HonedError():
                    self._refuse(claim, copy)
                case Exception():
                    self._wait(claim, copy)
                case Copy():
                    self._submit(_Pending(claim, copy))

    def _submit(self, pending: _Pending) -> None:
        self._pending[pending.claim.id] = pending
        self._checkers.submit(pending.claim.id, pending.copy.path, self.config, uid=pending.copy.uid)

    def settle(self) -> list[Job]:
        """Accept or refuse what the helper has answered on. Returns the jobs accepted."""
        late, self._late = self._late, []
        for answer in self._checkers.poll():
            if not (answer["ok"] and answer["needs_fetch"]):
                self._num_fetches.pop(answer["id"], None)
            if answer["id"] in self._asked_again:
                if answer["ok"] and answer["needs_fetch"]:
                    self._fetch(answer, None)
                    continue
                self._asked_again.remove(answer["id"])
                self._ask_again.pop(answer["id"], None)
                self._replanned.append(Replanned(answer["id"], answer))
                continue
            pending = self._pending.pop(answer["id"])
            if not answer["ok"]:
                self._refuse(pending.claim, from_dict(answer["error"]))
            elif answer["needs_fetch"]:
                self._fetch(answer, pending)
            elif answer["references"] or answer["spec"].get("depends_on"):
                waiting = _Waiting(pending, answer, self._job(pending, answer), self._clock())
                self._waiting[answer["id"]] = waiting
                self._names.add(waiting.job, _names(answer))
            else:
                self._checked_since = self._checked_since if self._checked else self._clock()
                self._checked.append((pending, answer))
        is_late = self._clock() - self._checked_since >= ACCEPT_TOGETHER_SEC
        if self._checked and (is_late or len(self._checked) >= MAX_TOGETHER or not self._pending):
            checked, self._checked = self._checked, []
            return [*late, *self._settle([(*each, self._job(*each)) for each in checked])]
        return late

    def _settle(self, checked: list[tuple[_Pending, dict[str, Any], Job]]) -> list[Job]:
        """Accept what is in no other job's way, together. Returns the jobs accepted."""
        free = []
        for pending, answer, job in checked:
            try:
                self._check_against_others(job)
            except HonedError as error:
                _locate(error, answer)
                self._refuse(pending.claim, error)
            else:
                self._spool.catalog.reserve(job)
                free.append((pending, answer, job))
        entries = [(job, pending.claim, self.plan_of(job, answer)) for pending, answer, job in free]
        accepted = []
        for (pending, answer, job), admitted in zip(free, self._arrivals.admit_all(entries), strict=True):
            if isinstance(admitted, Job):
                self._tell_accepted(admitted, answer)
                accepted.append(admitted)
                continue
            if (late := self._accepted(pending.claim)) is not None:
                accepted.append(late)
                continue
            self._spool.catalog.give_back(job)
            if isinstance(admitted, OSError) and admitted.errno in PLANTED_ERRNOS:
                self._refuse(pending.claim, _planted(job, admitted))
            else:
                self._wait(pending.claim, admitted)
        return accepted

    def _accepted(self, claim: Claim) -> Job | None:
        """What a claim has become whose acceptance failed, where that was after its commit."""
        with contextlib.suppress(OSError):
            return self._arrivals.accepted(claim)
        return None

    # -- models to fetch ----------------------------------------------------------------------------------------------

    def _fetch(self, answer: dict[str, Any], pending: _Pending | None) -> None:
        """Have the model or data set fetched that a check has missed; the check is made again when it is there."""
        number = answer["id"]
        missing = Missing(**answer["needs_fetch"])
        ask_again = self._ask_again[number] if pending is None else functools.partial(self._submit, pending)
        waits = _Fetching(missing, answer, pending, ask_again)
        counts = self._num_fetches.setdefault(number, Counter())
        counts[missing] += 1
        if counts[missing] > MAX_FETCHES_PER_ARRIVAL:
            self._end_fetch(
                number,
                waits,
                InternalError(
                    f"{missing.key}: {missing.repo_id} was fetched, and is not in the cache", hint="see the log"
                ),
            )
            return
        self._fetching[number] = waits
        self._fetcher.want(number, missing)
        who = repr(pending.claim.name) if pending else "planned again"
        log.info("job %d (%s): waits for %s at %s to be fetched", number, who, missing.repo_id, missing.revision)

    def settle_fetched(self) -> None:
        """Check again what a fetch has ended for, or refuse it with what the fetch has met."""
        for fetched in self._fetcher.poll():
            waits = self._fetching.pop(fetched.number)
            if fetched.error is None:
                waits.ask_again()
            else:
                self._end_fetch(fetched.number, waits, fetched.error)
        if not self.config.policy.hub:  # any more: the check says so
            for number, waits in list(self._fetching.items()):
                self._fetcher.leave(number)
                del self._fetching[number]
                waits.ask_again()

    def _end_fetch(self, number: int, waits: _Fetching, error: HonedError) -> None:
        """Say no to what has waited for a model."""
        if waits.pending is not None:
            self._refuse(waits.pending.claim, error)
            return
        self._asked_again.remove(number)
        self._ask_again.pop(number, None)
        self._replanned.append(Replanned(number, {"id": number, "ok": False, "error": error.as_dict()}))

    def fetching(self) -> list[dict[str, Any]]:
        """What waits for a model, and how far that is."""
        found = []
        for number, waits in sorted(self._fetching.items()):
            progress = self._fetcher.progress(number)
            pending, job = waits.pending, None if waits.pending else self._spool.job(number)
            uid = pending.copy.uid if pending else job.uid if job else None
            found.append(
                {
                    "id": number,
                    "name": self._name(waits, number),
                    "uid": uid,
                    "source": pending.claim.name if pending else None,
                    "state": "fetching",
                    "repo_id": waits.missing.repo_id,
                    "revision": waits.missing.revision,
                    "repo_type": waits.missing.repo_type,
                    "num_bytes": progress.get("bytes", 0),
                    "total_bytes": progress.get("of") or None,
                    "problem": progress.get("problem"),
                }
            )
        return found

    def cancel(self, number: int) -> None:
        """Refuse an arrival that waits for a model, on its owner's word."""
        waits = self._fetching.pop(number)
        self._fetcher.leave(number)
        self._end_fetch(number, waits, InterruptedRunError(f"cancelled, before its {_what(waits)} was fetched"))

    def _name(self, waits: _Fetching, number: int) -> str:
        title = waits.pending.claim.title if waits.pending else str(number)
        return str(waits.answer["spec"].get("name") or title)

    def _names_fetching(self) -> set[str]:
        return {
            name
            for number, waits in self._fetching.items()
            if waits.pending is not None
            for name in (self._name(waits, number), str(number))
        }

    # -- jobs that name others ----------------------------------------------------------------------------------------

    def settle_waiting(self) -> list[Job]:
        """Accept the arrivals whose named jobs are known by now, and refuse those that have waited long enough."""
        began = self._clock()
        is_quiet = not self._being_checked() and not self._checked and not self.num_unsettled
        self._quiet_since = (self._quiet_since if self._quiet_since is not None else began) if is_quiet else None
        accepted: list[Job] = []
        ready: list[tuple[_Pending, dict[str, Any], Job]] = []
        fetched = self._names_fetching()
        for number in self._waiting_in_turn():
            waiting, now = self._waiting[number], self._clock()
            if not is_quiet and now - waiting.since < ARRIVALS_PATIENCE_SEC:
                continue
            self._last_waiting = number
            job, named = replace(waiting.job, submitted_at=time.time()), _names(waiting.answer)
            if fetched and not self._named_by(named, job.uid).isdisjoint(fetched):
                self._waiting[number] = replace(waiting, missing_since=None)
                continue
            if len(ready) >= MAX_TOGETHER or any({other.name, str(other.id)} & set(named) for _, _, other in ready):
                accepted += self._settle(ready)  # first those that this one names
                ready = []
            found = {name: self._named(name, job) for name in named}
            missing = next((name for name, other in found.items() if other is None), None)
            if missing is not None and self._may_still_come(waiting, now):
                continue
            unknown = self._unknown(missing, job, _key_of(missing, waiting.answer)) if missing is not None else None
            del self._waiting[number]
            self._names.forget(job)
            try:
                if unknown is not None:
                    raise unknown
                job = self._with_inputs(job, waiting.answer, {name: other for name, other in found.items() if other})
            except HonedError as error:
                _locate(error, waiting.answer)
                self._refuse(waiting.pending.claim, error)
            else:
                ready.append((waiting.pending, waiting.answer, job))
            if now - began >= PASS_SEC:
                break  # the rest in the next pass
        else:
            self._last_waiting = 0
        return accepted + self._settle(ready)

    def _waiting_in_turn(self) -> list[int]:
        """Those that the last pass has not come to, then the others."""
        numbers = list(self._waiting)
        at = next((index for index, number in enumerate(numbers) if number > self._last_waiting), 0)
        return numbers[at:] + numbers[:at]

    def _may_still_come(self, waiting: _Waiting, now: float) -> bool:
        """Whether a job that an arrival names is missing for too short a time to be given up."""
        missing_since = waiting.missing_since if waiting.missing_since is not None else now
        self._waiting[waiting.job.id] = replace(waiting, missing_since=missing_since)
        return now - max(missing_since, self._quiet_since or missing_since) < NAMED_JOB_PATIENCE_SEC

    def _named(self, name: str, job: Job) -> Job | None:
        """The accepted job of that number, or the newest of that name; None while a newer one is still waiting."""
        known = [other for other in self._known(name) if other.id != job.id]
        if not self.config.policy.share_results and job.uid != 0:
            known = [other for other in known if other.uid == job.uid]  # what others make is theirs
        # Of a name that several people use, one's own: nobody else's newer job takes its place.
        known = [other for other in known if other.uid == job.uid] or known
        newest = max(known, key=lambda other: other.id, default=None)
        return None if self._names.newest(name, job) > (newest.id if newest else 0) else newest

    def _known(self, name: str) -> list[Job]:
        numbered = self._spool.job(int(name)) if name.isdecimal() else None
        named = self._spool.named(name)
        return [*named, numbered] if numbered is not None else named

    def _unknown(self, name: str, job: Job, key: str) -> SpecError:
        if self._names.newest(name, job):
            if not self._named_by([name], job.uid).isdisjoint({job.name, str(job.id)}):
                return SpecError(
                    f"{key}: {name!r} and this job wait for each other", hint="one of them has to come first"
                )
            return SpecError(
                f"{key}: {name!r}, which this one names, waits itself for a job that is not there",
                hint="see why it is refused, and drop them all again",
            )
        if (pruned := self._spool.pruned(name)) is not None and self._is_seen_by(pruned, job):
            return SpecError(
                f"{key}: job {pruned.id} ({pruned.name}), which this one names, {query.words_of_pruned(pruned)}",
                hint="drop its job file again, before this one or together with it",
            )
        return SpecError(
            f"{key}: there is no job {name!r}, which this one names",
            hint="drop it first, or both together; honectl list",
        )

    def _is_seen_by(self, other: Job, job: Job) -> bool:
        return self.config.policy.share_results or job.uid in {0, other.uid}

    def _named_by(self, first: Iterable[str], uid: int) -> set[str]:
        """These names, those that this user's waiting arrivals of these names wait for, and so on."""
        seen: set[str] = set()
        ahead = list(first)
        while ahead:
            found = ahead.pop()
            if found not in seen:
                seen.add(found)
                ahead += self._names.wanted_by(found, uid)
        return seen

    def _with_inputs(self, job: Job, answer: dict[str, Any], named: dict[str, Job]) -> Job:
        """The job, depending on those that make what it starts from. Raises SpecError where one makes no such thing."""
        for key, name in answer["references"].items():
            _check_product(key, named[name], self._spec_of(named[name]))
        makers = {name: named[name].id for name in answer["references"].values()}
        dependencies = [str(named[name].id) for name in _names(answer)]  # a later job of that name is another
        return replace(job, depends_on=tuple(dict.fromkeys(dependencies)), inputs=makers, is_deferred=bool(makers))

    def _spec_of(self, job: Job) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(untrusted.read_plain(self._spool.job_layout(job.id).plan_path, num_names=1))
        return dict(plan["spec"])

    def plan_again(self, job: Job, made: dict[str, Path], device: Device | None = None) -> None:
        """Have a job checked whose inputs are there now, name → output directory, or that is to run on another device
        than it was planned for; `replanned` has the answer."""
        if job.id in self._asked_again:
            return
        self._asked_again.add(job.id)
        self._ask_again[job.id] = functools.partial(self._submit_again, job, made, device)
        self._ask_again[job.id]()

    def _submit_again(self, job: Job, made: dict[str, Path], device: Device | None) -> None:
        files = self._spool.job_layout(job.id)
        commit, pinned = None, None
        places: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # without it the branch means what it means now
            plan = json.loads(untrusted.read_plain(files.plan_path, num_names=1))
            commit, pinned = plan.get("base_model_commit"), plan.get("precision")
            places = plan.get("hub_datasets") or {}
        commits = {key: str(place["commit"]) for key, place in places.items()}
        self._checkers.submit(
            job.id,
            files.spec_path,
            self.config,
            device,
            jobs=made,
            commit=commit,
            dataset_commits=commits,
            pinned=pinned,
            uid=job.uid,
        )

    def is_asked_again(self, job_id: int) -> bool:
        return job_id in self._asked_again

    def replanned(self) -> list[Replanned]:
        """The answers to `plan_again` since the last call."""
        done, self._replanned = self._replanned, []
        return done

    def plan_of(self, job: Job, answer: dict[str, Any]) -> dict[str, Any]:
        """What stands in plan.json."""
        identity = {"id": job.id, "name": job.name, "user_id": str(job.uid), "instance": str(self._spool.root)}
        # Chat templates ask for today's date in local time; every attempt is told that of the acceptance.
        date = datetime.fromtimestamp(job.submitted_at, UTC).astimezone().isoformat(timespec="seconds")
        return {**answer["plan"], "job": identity, "spec": answer["spec"], "output_dir": job.output_dir, "date": date}

    # -- one arrival --------------------------------------------------------------------------------------------------

    def _tell_accepted(self, job: Job, answer: dict[str, Any]) -> None:
        log.info(
            "job %d (%s): accepted from %s, %s",
            job.id,
            job.name,
            job.source,
            job.state,
            extra=about(job, message.ACCEPTED, file=job.source, uid=job.uid),
        )
        for warning in answer.get("warnings", []):
            log.warning("job %d (%s): %s", job.id, job.name, warning, extra=about(job))

    def _job(self, pending: _Pending, answer: dict[str, Any]) -> Job:
        spec = answer["spec"]
        return Job(
            id=pending.claim.id,
            name=spec.get("name") or pending.claim.title,
            submitted_at=time.time(),
            source=pending.claim.name,
            uid=pending.copy.uid,
            output_dir=answer["output_dir"],
            priority=spec.get("priority", 0),
            max_attempts=spec["retry"]["max_attempts"],
            num_gpus=spec["resources"]["gpus"],
            depends_on=tuple(map(str, spec.get("depends_on") or ())),
            is_pinned=bool(spec.get("pin")),
            notify=spec.get("notify"),
            time_limit_sec=spec.get("time_limit_sec"),
            state=State.HELD if pending.claim.is_held else State.QUEUED,
        )

    def _check_against_others(self, job: Job) -> None:
        ours = Path(os.path.realpath(job.output_dir))  # Path.resolve raises where a link leads to itself
        other = self._spool.catalog.owner_of(str(ours))
        if other is not None and other.id != job.id:  # itself, where its entry's last sync has failed
            named = f"job {other.id}'s ({other.name}, {other.state}: {other.output_dir})"
            raise SpecError(
                f"output_dir: {ours} is {named if self._is_seen_by(other, job) else 'that of a job of another user'}",
                hint="give this job a directory of its own, or leave output_dir out",
                fix={"output_dir": None},
            )

    def _refuse(self, claim: Claim, error: HonedError) -> None:
        try:
            self._reject(claim, error)
        except OSError as problem:
            self._wait(claim, problem)

    def _wait(self, claim: Claim, error: Exception) -> None:
        """An arrival that the machine, and not its dropper, keeps us from settling is tried again at the next scan."""
        self.fault = durable.machine_fault(error) or quote.hide(said(error))
        unforeseen = None if isinstance(error, OSError) else error
        log.error("%r waits in %s: %s", claim.name, claim.path.parent, said(error), exc_info=unforeseen)

    def _reject(self, claim: Claim, error: HonedError) -> None:
        target = self._arrivals.reject(claim, refusal(claim, error, when=timestamp(time.time())))
        first = error.message.splitlines()[0] if error.message else ""
        more = f" (and {len(error.message.splitlines()) - 1} more)" if "\n" in error.message else ""
        log.warning(
            "%r refused: %s: %s%s; see %s.reason",
            claim.name,
            error.code,
            first,
            more,
            target,
            extra=about(
                claim.id,
                message.of_error(error.code),
                state="rejected",
                code=error.code,
                file=claim.name,
                hint=error.hint,
            ),
        )


def _what(waits: _Fetching) -> str:
    return "base model" if waits.missing.repo_type == MODEL else waits.missing.what


def _names(answer: dict[str, Any]) -> list[str]:
    """The jobs that a spec names, each once: those it depends on, and those whose outputs it starts from."""
    return list(dict.fromkeys([*map(str, answer["spec"].get("depends_on") or ()), *answer["references"].values()]))


def _key_of(name: str, answer: dict[str, Any]) -> str:
    """The key with which a spec names a job."""
    return next((key for key, maker in answer["references"].items() if maker == name), "depends_on")


def _locate(error: HonedError, answer: dict[str, Any]) -> None:
    """Give a refusal the line of its key: what stands in the entry of a job that waits from before has none."""
    problem.locate(error, answer["spec"], {(key,): line for key, line in answer.get("lines", {}).items()})


def _check_product(key: str, maker: Job, spec: dict[str, Any]) -> None:
    """Whether a job makes what another one's key wants of it. Raises SpecError."""
    makes_adapter = spec["kind"] == "sft" and bool(spec.get("lora") or spec.get("adapter"))
    who = f"{key}: job {maker.id} ({maker.name})"
    if key == "adapter" and not makes_adapter:
        raise SpecError(
            f"{who} makes a whole checkpoint, not an adapter",
            hint="name it as base_model, and leave adapter out",
            fix={"base_model": spec["adapter"], "adapter": None},
        )
    if key == "base_model" and makes_adapter and spec.get("save_merged", "none") == "none":
        raise SpecError(
            f"{who} makes an adapter, and no base model",
            hint="put a job of kind: merge between the two, or save_merged: bfloat16 into that one",
        )


def _planted(job: Job, problem: OSError) -> HonedError:
    return SpecError(
        f"{problem.filename2 or problem.filename}: {problem.strerror}: it was put there while the job file was checked",
        hint=f"leave the directory of job {job.id} alone until it is accepted",
    )
