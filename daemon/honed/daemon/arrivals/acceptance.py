"""The way from a file in incoming/ to an entry in queued/, or to rejected/ with its reason.

    incoming ── claimed, copied ──► checks ── the helper's answer ──► queued/ or held/, or rejection
                                      ▲         ├─ names other jobs ──► naming: once those are known, the same
                                      └─────────┴─ names a model or data set to fetch ──► fetches

No step here blocks: a helper answers after it has checked the files that a job names. A job whose `job:NAME` has not
been made yet is accepted without a plan; `replanning` plans it when those jobs have succeeded.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.checks import Checks, Pending
from honed.daemon.arrivals.fetches import Fetches
from honed.daemon.arrivals.incoming import Incoming
from honed.daemon.arrivals.naming import Naming, Ready, is_seen_by, locate
from honed.daemon.arrivals.rejection import Rejection
from honed.daemon.arrivals.replanning import Replanning
from honed.daemon.arrivals.watcher import Watcher
from honed.job.arrival import Arrivals, Claim
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.job.sweeping import Sweeps
from honed.run import rehearsed
from honed.run.fetcher import Fetcher
from honed.run.reply import Answer, Passed, Refused
from honed.spec.config import Config
from honed.system import message
from honed.system.error import HonedError, SpecError
from honed.system.failures import Failures
from honed.system.log import about

log = logging.getLogger(__name__)

#: Errors of a write where another file has its name: in a job's directory, its submitter put it there.
PLANTED_ERRNOS = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY}


class Acceptance:
    """Accepts or rejects arrivals. The stages before and after it, which others ask too, are attributes."""

    def __init__(
        self,
        spool: Spool,
        arrivals: Arrivals,
        watcher: Watcher,
        checkers: Checkers,
        config: Config,
        fetcher: Fetcher,
        *,
        failures: Failures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._arrivals = arrivals
        self._checkers = checkers
        self.config = config

        def current() -> Config:
            return self.config

        self.failures = failures or Failures(log)  #: of single arrivals
        self.sweeps = Sweeps(spool)
        self._rejection = Rejection(arrivals)
        self._checks = Checks(checkers, current, clock=clock)
        self.replanning = Replanning(spool, checkers, current)
        self.fetches = Fetches(fetcher, spool, self._checks, self.replanning, self._rejection, current)
        self.naming = Naming(spool, self._rejection, current, clock=clock)
        self.incoming = Incoming(
            arrivals, watcher, checkers, self._checks, self._rejection, current, self._num_waiting_of, clock=clock
        )

    @property
    def fault(self) -> str:
        """The machine's fault that kept the last scan's arrivals from being settled."""
        return self._rejection.fault

    @property
    def is_busy(self) -> bool:
        """True while something lies in incoming/ or is being checked."""
        asked_again = self.replanning.numbers - self.fetches.numbers - self._checkers.stuck()
        return bool(asked_again or self.incoming.has_late or not self._is_quiet)

    @property
    def _is_quiet(self) -> bool:
        return not (self._checks.being_checked() or self._checks.num_checked or self.incoming.num_unsettled)

    @property
    def num_stuck(self) -> int:
        """Number of arrivals and jobs that cannot be checked for now."""
        return len(self._checkers.stuck()) + self.incoming.num_stuck

    @property
    def num_settling(self) -> int:
        """Number of those that will be settled by themselves: the jobs that others name are kept away by a limit."""
        return sum(num for uid, num in self.naming.num_by_user.items() if num and not self._has_more(uid))

    def _num_waiting_of(self, uid: int) -> tuple[int, int]:
        return self.fetches.num_of(uid), self.naming.num_by_user[uid]

    def listen(self, listener: Callable[[int, str, float], None]) -> None:
        """Register a callback for every rejection: it gets the number, the error's code and the time of arrival."""
        self._rejection.listeners.append(listener)

    def scan(self) -> None:
        """Claim complete arrivals, and check those again that were claimed before and could not be settled then."""
        self._rejection.fault = ""
        self.incoming.scan(self._checks.numbers | self.naming.numbers | self.fetches.numbers)

    def settle(self) -> list[Job]:
        """Accept or reject the arrivals that the helpers have answered on. Returns the accepted jobs."""
        late = self.incoming.take_late()
        for answer in self._checkers.poll():
            with self.failures.alone(f"job {answer.id}"):  # after an error it is checked again
                self._take(answer)
        checked = self._checks.take_checked()
        return [*late, *self._accept([(*item, self._job(*item)) for item in checked])]

    def _take(self, answer: Answer) -> None:
        """Take an answer of a helper's: fetch what it misses, reject it, or keep it to be accepted."""
        is_sweep = isinstance(answer, Passed) and bool(answer.members)
        number, missing = answer.id, answer.needs_fetch if isinstance(answer, Passed) and not is_sweep else None
        if missing is None:
            self.fetches.forget(number)
        pending = None if number in self.replanning.numbers else self._checks.end(number)
        if answer.rehearsed is not None and pending is not None:
            directory = rehearsed.directory(self._spool.layout.cache_dir, pending.copy.uid)
            rehearsed.write(directory, answer.rehearsed)
        if isinstance(answer, Passed) and missing is not None:
            self.fetches.begin(answer, missing, pending)
        elif pending is None:
            self.replanning.end(number, answer)
        elif isinstance(answer, Refused):
            self._rejection.reject(pending.claim, answer.error)
        elif is_sweep and len(answer.members) > self.config.spool.max_sweep_jobs:  # the helper is not trusted
            problem = SpecError("sweep: more jobs than spool.max_sweep_jobs", hint="use fewer values")
            self._rejection.reject(pending.claim, problem)
        elif is_sweep:
            self._spread(pending, answer)
        elif answer.references or answer.spec.get("depends_on"):
            self.naming.add(pending, answer, self._job(pending, answer))
        else:
            self._checks.add_checked(pending, answer)

    def _spread(self, pending: Pending, answer: Passed) -> None:
        """Turn a sweep into the arrivals of its jobs, each of which is checked by itself."""
        try:
            claims = self.sweeps.spread(pending.claim, pending.copy.uid, answer.members)
        except OSError as problem:
            self._rejection.postpone(pending.claim, problem)
            return
        self.incoming.add(claims)
        claim = pending.claim
        log.info("sweep %d (%s): %d jobs", claim.id, claim.name, len(answer.members), extra=about(claim.id))

    def settle_waiting(self) -> list[Job]:
        """Accept the arrivals whose named jobs are known by now, and reject those that have waited long enough."""
        return self.naming.settle(
            self._accept, is_quiet=self._is_quiet, fetched=self.fetches.names(), has_more=self._has_more
        )

    def _has_more(self, uid: int) -> bool:
        return bool(self.incoming.beyond(uid))

    def _accept(self, checked: list[Ready]) -> list[Job]:
        """Accept, together, the arrivals that conflict with no other job. Returns the accepted jobs."""
        free, entries = list[Ready](), list[tuple[Job, Claim, PlanFile]]()
        for pending, answer, job in checked:
            try:
                self.check_against_others(job)
                plan = self.plan_of(job, answer)
            except HonedError as error:
                locate(error, answer)
                self._rejection.reject(pending.claim, error)
            except Exception as problem:  # noqa: BLE001 - the others are accepted all the same
                self._rejection.postpone(pending.claim, problem)
            else:
                self._spool.catalog.reserve(job)
                free.append((pending, answer, job))
                entries.append((job, pending.claim, plan))
        accepted = []
        for (pending, answer, job), admitted in zip(free, self._arrivals.admit_all(entries), strict=True):
            if isinstance(admitted, Job):
                _log_accepted(admitted, answer)
                accepted.append(admitted)
                continue
            if (late := self._accepted(pending.claim)) is not None:
                accepted.append(late)
                continue
            self._spool.catalog.give_back(job)
            if isinstance(admitted, OSError) and admitted.errno in PLANTED_ERRNOS:
                self._rejection.reject(pending.claim, _planted(job, admitted))
            else:
                self._rejection.postpone(pending.claim, admitted)
        return accepted

    def _accepted(self, claim: Claim) -> Job | None:
        # The acceptance may have failed after its commit.
        with contextlib.suppress(OSError):
            return self._arrivals.accepted(claim)
        return None

    def _job(self, pending: Pending, answer: Passed) -> Job:
        return _job(pending, answer, is_of_cluster=self.config.jobs.has_cluster)

    def plan_of(self, job: Job, answer: Passed) -> PlanFile:
        """Return the content of plan.json."""
        return answer.plan.accepted(job, answer.spec, self._spool.layout.root)

    def check_against_others(self, job: Job) -> None:
        """Raise SpecError if a job's output directory is that of another unfinished job."""
        # Without a look at it: the check has resolved its links, and a file system of the submitter's may never answer.
        ours = Path(os.path.normpath(job.output_dir))
        other = self._spool.catalog.owner_of(str(ours))
        if other is not None and other.id != job.id:  # itself, where its entry's last sync has failed
            named = "that of another user's job"
            if is_seen_by(other, job, self.config):
                named = f"job {other.id}'s ({other.name}, {other.state}: {other.output_dir})"
            raise SpecError(
                f"output_dir: {ours} is already used: it is {named}",
                hint="choose another directory, or remove output_dir",
                fix={"output_dir": None},
            )


def _log_accepted(job: Job, answer: Passed) -> None:
    log.info(
        "job %d (%s): accepted from %s, %s",
        job.id,
        job.name,
        job.source,
        job.state,
        extra=about(job, message.ACCEPTED, file=job.source, uid=job.uid),
    )
    for warning in answer.warnings:
        log.warning("job %d (%s): %s", job.id, job.name, warning, extra=about(job))


def _job(pending: Pending, answer: Passed, *, is_of_cluster: bool = False) -> Job:
    spec = answer.spec
    return Job(
        id=pending.claim.id,
        name=spec.get("name") or pending.claim.title,
        submitted_at=time.time(),
        source=pending.claim.name,
        uid=pending.copy.uid,
        is_of_cluster=is_of_cluster,
        is_pinned=bool(spec.get("pin")),
        arrived_at=pending.claim.arrived_at,
        group=spec.get("group"),
        state=State.HELD if pending.claim.is_held else State.QUEUED,
        depends_on=tuple(map(str, spec.get("depends_on") or ())),
        **facts_of(answer),
    )


def facts_of(answer: Passed) -> dict[str, Any]:
    """Return the facts of an entry that are those of the job file, whenever it came."""
    spec = answer.spec
    return {
        "output_dir": answer.output_dir,
        "priority": spec.get("priority", 0),
        "job_class": spec.get("class"),
        "max_attempts": spec["retry"]["max_attempts"],
        "num_gpus": spec["resources"]["gpus"] * spec["resources"].get("nodes", 1),
        "num_nodes": spec["resources"].get("nodes", 1),
        "profile": spec["resources"].get("profile"),
        "notify": spec.get("notify"),
        "time_limit_sec": spec.get("time_limit_sec"),
        "model": str(spec.get("base_model") or ""),
        "data": tuple(str(dataset["path"]) for dataset in spec.get("datasets") or spec.get("eval_datasets") or ()),
    }


def _planted(job: Job, problem: OSError) -> HonedError:
    return SpecError(
        f"{problem.filename2 or problem.filename}: {problem.strerror}: it was created while the job file was checked",
        hint=f"do not write to the directory of job {job.id} before it is accepted",
    )
