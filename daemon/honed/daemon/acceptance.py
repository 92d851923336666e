"""The way from a file in incoming/ to an entry in queued/, or to rejected/ with its reason.

    arrival ── whole ──► claimed/<id>/ ── copied, checked by the preflight helper ──► queued/ or held/, or rejected/
                                                   ├─ names other jobs ──► once those are known, the same
                                                   └─ names a model or data set to fetch ──► checked again once fetched

No step here blocks: a helper answers after it has checked the files that a job names. A job that names other jobs may
have been dropped together with them, in any order: it is settled after the other arrivals of its time. A job whose
`job:NAME` has not been made yet is accepted without a plan; a second check plans it when those jobs have succeeded.
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

#: Arrivals of one user that are claimed and not checked yet, at most: the rest of a flood stays in incoming/, where it
#: costs nothing and delays nobody.
MAX_PENDING = 64
#: Arrivals that are claimed, or accepted, together: they share the syncs of the disk. More would hold up the loop.
MAX_TOGETHER = 16
#: Arrivals looked at in one pass; and the pause between two listings of incoming/, as a multiple of a listing's
#: duration.
MAX_LOOKS_PER_PASS = 200
LISTING_REST = 20
#: Seconds that a checked arrival waits for others to be accepted with; seconds that a pass over waiting arrivals may
#: take.
ACCEPT_TOGETHER_SEC = 0.25
PASS_SEC = 0.1
#: Accepted jobs that are checked again at the same time, at most.
MAX_ASKED_AGAIN = 32
#: Seconds that a job waits for the arrival of a job that it names, and for other arrivals to be settled first.
NAMED_JOB_PATIENCE_SEC = 3.0
ARRIVALS_PATIENCE_SEC = 30.0
#: Failed attempts to take an arrival, after which it is left in incoming/.
MAX_DENIALS = 3
#: Unchecked files of one user that came over the control socket: they count on honed's disk, and not in the user's
#: quota.
MAX_SUBMITTED = 10_000
#: Fetches of the same model or data set for one arrival: a cached copy can be removed before the next check.
MAX_FETCHES_PER_ARRIVAL = 3
#: Errors of a write where another file has its name: in a job's directory, its submitter put it there.
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
    """An arrival, or an accepted job that is planned again, and the model or data set that is fetched for it."""

    missing: Missing
    answer: dict[str, Any]
    pending: _Pending | None
    ask_again: Callable[[], None]


@dataclass(frozen=True)
class Replanned:
    """The second check's answer on a job that waited for other jobs' outputs: a plan, or an error."""

    job_id: int
    answer: dict[str, Any]


class _Names:
    """The names of each user's waiting arrivals, and the names that these wait for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], list[int]] = {}
        self._wanted: dict[tuple[int, str], list[str]] = {}

    def add(self, job: Job, wanted: list[str]) -> None:
        self._numbers.setdefault((job.uid, job.name), []).append(job.id)
        self._wanted[job.uid, job.name] = wanted

    def forget(self, job: Job) -> None:
        """Remove an arrival that no longer waits."""
        numbers = self._numbers[job.uid, job.name]
        numbers.remove(job.id)
        if not numbers:
            del self._numbers[job.uid, job.name], self._wanted[job.uid, job.name]

    def newest(self, name: str, job: Job) -> int:
        """Return the number of this user's newest waiting arrival of that name other than `job`; 0 without one."""
        return max((number for number in self._numbers.get((job.uid, name), ()) if number != job.id), default=0)

    def wanted_by(self, name: str, uid: int) -> list[str]:
        return self._wanted.get((uid, name), [])


class Acceptance:
    """Claims arrivals, has them checked, and accepts or refuses them."""

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
        self._submitted: dict[int, deque[Claim]] = {}  # came over the control socket and not copied yet, by submitter
        self._pending: dict[int, _Pending] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._names = _Names()  # of the waiting arrivals
        self._quiet_since: float | None = None  # since when no other arrival is being taken or checked
        self._last_waiting = 0  # the number at which the last pass stopped
        self._fetching: dict[int, _Fetching] = {}
        self._num_fetches: dict[int, Counter[Missing]] = {}
        self._ask_again: dict[int, Callable[[], None]] = {}  # for accepted jobs that are being checked again
        self._asked_again: set[int] = set()
        self._replanned: list[Replanned] = []
        self._checked: list[tuple[_Pending, dict[str, Any]]] = []  # accepted together
        self._checked_since = 0.0
        self._listed: dict[int, deque[Path]] = {}  # listed in incoming/ and not looked at yet, by owner
        self._num_unsettled = 0
        self._list_at = 0.0
        self._must_list = False
        self._tried: set[int] = set()  # claims that could not be settled
        self._left: dict[str, int] = {}  # name → inode
        self._num_denials: dict[str, int] = {}
        self._num_scans = 0
        self._seen_at: dict[str, int] = {}  # name → the scan that saw it first
        self._late: list[Job] = []  # accepted, although an error followed after their entry was written
        self.fault = ""  #: the machine's fault that kept the last scan's arrivals from being settled

    @property
    def is_busy(self) -> bool:
        """True while something lies in incoming/ or is being checked."""
        asked_again = self._asked_again - self._fetching.keys() - self._checkers.stuck()
        return bool(self._being_checked() or asked_again or self._checked or self._late or self.num_unsettled)

    def _being_checked(self) -> set[int]:
        """Return the arrivals that are being checked, except those that cannot be checked for now."""
        return self._pending.keys() - self._checkers.stuck()

    @property
    def num_stuck(self) -> int:
        """Number of arrivals and jobs that cannot be checked for now."""
        arrivals = sum(len(waiting) for uid, waiting in self._lists() if self._checkers.is_stuck(uid))
        return len(self._checkers.stuck()) + arrivals

    def _lists(self) -> Iterator[tuple[int, Sequence[object]]]:
        """Yield the arrivals that were not looked at yet, by user."""
        yield from self._listed.items()
        yield from self._submitted.items()

    @property
    def num_waiting(self) -> int:
        """Number of checked arrivals that name jobs which may still arrive."""
        return len(self._waiting)

    @property
    def num_fetching(self) -> int:
        """Number of arrivals and jobs whose base model is being fetched."""
        return len(self._fetching)

    @property
    def num_arriving(self) -> int:
        """Number of arrivals that were seen and not taken yet: they may still be being written."""
        return self._num_unsettled + sum(len(waiting) for _, waiting in self._lists())

    @property
    def num_unsettled(self) -> int:
        """Number of arrivals that can be taken, plus one if more may have arrived since the last listing."""
        arrivals = sum(len(waiting) for uid, waiting in self._lists() if not self._checkers.is_stuck(uid))
        return self._num_unsettled + arrivals + self._must_list

    @property
    def has_room(self) -> bool:
        """True if more accepted jobs may be checked again now: a few at a time, so that new arrivals get their turn."""
        return len(self._asked_again - self._checkers.stuck()) < MAX_ASKED_AGAIN

    def submit(self, name: str, data: bytes, uid: int) -> Claim:
        """Take a job file over the control socket; it is checked like a dropped one. Raises HonedError if it is not
        taken, and OSError if the machine prevents it."""
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
        """Claim complete arrivals, and check those again that were claimed before and could not be settled then."""
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
        """Take items off these lists, one of each user in turn, until `limit` are `taken`.

        Users with too much under way, and users whose files cannot be checked, are skipped.
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
                lists[uid] = waiting  # behind the other users
            yield first
            counts[uid] += len(taken) - num_taken

    def _list(self) -> None:
        """List incoming/. While a flood is taken, this happens only now and then."""
        arrivals = self._in_order(self._arrivals.dropped())
        self._watcher.keep({each.path.name for each in arrivals})
        self._listed, self._num_unsettled = {}, 0
        for each in arrivals:
            self._listed.setdefault(each.uid, deque()).append(each.path)

    def _in_order(self, arrivals: list[Dropped]) -> list[Dropped]:
        """Sort arrivals by the scan that first saw them, then by their times, which clock jumps falsify."""
        self._num_scans += 1
        self._seen_at = {each.path.name: self._seen_at.get(each.path.name, self._num_scans) for each in arrivals}
        return sorted(arrivals, key=lambda each: self._seen_at[each.path.name])

    def _check_claimed(self) -> None:
        """Take up earlier claims: of a honed that was killed, or left unsettled by a full disk."""
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
            self._tried.clear()  # tried once more at the next scan
            return
        self._tried |= {claim.id for claim in found}
        self._must_list = True  # and then the arrivals behind them
        unsettled = []
        for claim in found:
            if (job := self._arrivals.accepted(claim)) is not None:
                self._late.append(job)
            else:
                unsettled.append(claim)
        self._copy(unsettled)

    def _room(self) -> int:
        """Return how many more of the earlier claims may be looked at now."""
        return max(0, min(MAX_TOGETHER, MAX_PENDING - len(self._being_checked()) - len(self._checked)))

    def _claim(self, paths: list[Path]) -> None:
        """Claim these arrivals. Raises OSError if the machine prevents one claim, after the others were made."""
        claims: list[Claim] = []
        faults: list[Exception] = []
        for path, taken in zip(paths, self._arrivals.claim_all(paths), strict=True):
            match taken:
                case PermissionError() if taken.filename == str(path):  # else the error is about a directory of our own
                    self._num_denials[path.name] = self._num_denials.get(path.name, 0) + 1
                    if self._num_denials[path.name] < MAX_DENIALS:
                        continue  # the next attempt may succeed
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
        """Leave an arrival that cannot be taken (another user's directory) where it is, and log it once."""
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
        """Accept or refuse the arrivals that the helpers have answered on. Returns the accepted jobs."""
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
        """Accept, together, the arrivals that conflict with no other job. Returns the accepted jobs."""
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
        """Return the job that a claim became if its acceptance failed only after the commit; else None."""
        with contextlib.suppress(OSError):
            return self._arrivals.accepted(claim)
        return None

    # -- models to fetch ----------------------------------------------------------------------------------------------

    def _fetch(self, answer: dict[str, Any], pending: _Pending | None) -> None:
        """Start the fetch of the model or data set that a check missed; the check is repeated after the fetch."""
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
        """Check again the arrivals and jobs whose fetch succeeded, and refuse those whose fetch failed."""
        for fetched in self._fetcher.poll():
            waits = self._fetching.pop(fetched.number)
            if fetched.error is None:
                waits.ask_again()
            else:
                self._end_fetch(fetched.number, waits, fetched.error)
        if not self.config.policy.hub:  # no longer allowed: the check reports it
            for number, waits in list(self._fetching.items()):
                self._fetcher.leave(number)
                del self._fetching[number]
                waits.ask_again()

    def _end_fetch(self, number: int, waits: _Fetching, error: HonedError) -> None:
        """Refuse an arrival, or fail the replanning of a job, because its fetch failed."""
        if waits.pending is not None:
            self._refuse(waits.pending.claim, error)
            return
        self._asked_again.remove(number)
        self._ask_again.pop(number, None)
        self._replanned.append(Replanned(number, {"id": number, "ok": False, "error": error.as_dict()}))

    def fetching(self) -> list[dict[str, Any]]:
        """Return a row for each arrival and job that waits for a fetch, with its progress."""
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
        """Refuse an arrival that waits for a fetch, at its owner's request."""
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
                accepted += self._settle(ready)  # first the arrivals that this one names
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
                break  # the others in the next pass
        else:
            self._last_waiting = 0
        return accepted + self._settle(ready)

    def _waiting_in_turn(self) -> list[int]:
        """Return the waiting arrivals, first those that the last pass did not reach."""
        numbers = list(self._waiting)
        at = next((index for index, number in enumerate(numbers) if number > self._last_waiting), 0)
        return numbers[at:] + numbers[:at]

    def _may_still_come(self, waiting: _Waiting, now: float) -> bool:
        """Return True while a job that an arrival names has not been missing for long enough to be given up."""
        missing_since = waiting.missing_since if waiting.missing_since is not None else now
        self._waiting[waiting.job.id] = replace(waiting, missing_since=missing_since)
        return now - max(missing_since, self._quiet_since or missing_since) < NAMED_JOB_PATIENCE_SEC

    def _named(self, name: str, job: Job) -> Job | None:
        """Return the job of that number, or the newest of that name; None while a newer one is still waiting."""
        known = [other for other in self._known(name) if other.id != job.id]
        if not self.config.policy.share_results and job.uid != 0:
            known = [other for other in known if other.uid == job.uid]  # other users' outputs are not shared
        # Of a name that several users use, the user's own job wins: nobody else's newer job replaces it.
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
        """Return these names, the names that this user's waiting arrivals of these names wait for, and so on."""
        seen: set[str] = set()
        ahead = list(first)
        while ahead:
            found = ahead.pop()
            if found not in seen:
                seen.add(found)
                ahead += self._names.wanted_by(found, uid)
        return seen

    def _with_inputs(self, job: Job, answer: dict[str, Any], named: dict[str, Job]) -> Job:
        """Return the job, depending on the makers of its inputs. Raises SpecError if one makes no such output."""
        for key, name in answer["references"].items():
            _check_product(key, named[name], self._spec_of(named[name]))
        makers = {name: named[name].id for name in answer["references"].values()}
        dependencies = [str(named[name].id) for name in _names(answer)]  # numbers: a later job may take the name
        return replace(job, depends_on=tuple(dict.fromkeys(dependencies)), inputs=makers, is_deferred=bool(makers))

    def _spec_of(self, job: Job) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(untrusted.read_plain(self._spool.job_layout(job.id).plan_path, num_names=1))
        return dict(plan["spec"])

    def plan_again(self, job: Job, made: dict[str, Path], device: Device | None = None) -> None:
        """Check a job again whose inputs (name → output directory) now exist, or that will run on another device than
        it was planned for. `replanned` returns the answer."""
        if job.id in self._asked_again:
            return
        self._asked_again.add(job.id)
        self._ask_again[job.id] = functools.partial(self._submit_again, job, made, device)
        self._ask_again[job.id]()

    def _submit_again(self, job: Job, made: dict[str, Path], device: Device | None) -> None:
        files = self._spool.job_layout(job.id)
        commit, pinned = None, None
        places: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # without a pinned commit, the branch's current one is used
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
        """Return the answers to `plan_again` that have come since the last call."""
        done, self._replanned = self._replanned, []
        return done

    def plan_of(self, job: Job, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the content of plan.json."""
        identity = {"id": job.id, "name": job.name, "user_id": str(job.uid), "instance": str(self._spool.root)}
        # Chat templates may ask for today's date in local time; every attempt gets the date of the acceptance.
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
        """Leave an arrival, which a fault of the machine keeps from being settled, to the next scan."""
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
    """Return the jobs that a spec names, each once: its dependencies, and the jobs whose outputs it starts from."""
    return list(dict.fromkeys([*map(str, answer["spec"].get("depends_on") or ()), *answer["references"].values()]))


def _key_of(name: str, answer: dict[str, Any]) -> str:
    """Return the key with which a spec names a job."""
    return next((key for key, maker in answer["references"].items() if maker == name), "depends_on")


def _locate(error: HonedError, answer: dict[str, Any]) -> None:
    """Add the line of its key to a refusal, where the answer has lines."""
    problem.locate(error, answer["spec"], {(key,): line for key, line in answer.get("lines", {}).items()})


def _check_product(key: str, maker: Job, spec: dict[str, Any]) -> None:
    """Check that a job makes what another job's key asks for. Raises SpecError if not."""
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
