"""Checked arrivals that name other jobs: settled once those jobs are known.

A job may be submitted together with the jobs that it names, in any order: it waits for the other arrivals of its time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

from honed.daemon.arrivals.checks import MAX_TOGETHER, Pending
from honed.daemon.arrivals.rejection import Rejection
from honed.job import query
from honed.job.brief import Listed
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.run.reply import Passed
from honed.spec import export, kind, problem
from honed.spec.config import Config
from honed.system.error import HonedError, SpecError

#: Seconds that a pass over waiting arrivals may take.
PASS_SEC = 0.1
#: Seconds that a job waits for the arrival of a job that it names, and for other arrivals to be settled first.
NAMED_JOB_PATIENCE_SEC = 3.0
ARRIVALS_PATIENCE_SEC = 30.0

#: An arrival that is ready to be accepted: the helper's answer, and the job that it becomes.
Ready = tuple[Pending, Passed, Job]


@dataclass(frozen=True)
class _Waiting:
    """A checked arrival that names other jobs."""

    pending: Pending
    answer: Passed
    job: Job  #: as it would be accepted
    since: float  #: by the clock
    missing_since: float | None = None  #: since when a job that it names is known not to be there


class _Names:
    """The names of users' waiting arrivals, and the names that these wait for."""

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


class Naming:
    """Keeps arrivals that name other jobs until those are known, or until it is clear that they do not come."""

    def __init__(
        self,
        spool: Spool,
        rejection: Rejection,
        config: Callable[[], Config],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._rejection = rejection
        self._config = config
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._names = _Names()
        self.num_by_user: Counter[int] = Counter()  #: waiting arrivals
        self._quiet_since: float | None = None  # since when no other arrival is being taken or checked
        self._last_waiting = 0  # the number at which the last pass stopped

    @property
    def numbers(self) -> Set[int]:
        """Numbers of the waiting arrivals."""
        return self._waiting.keys()

    def add(self, pending: Pending, answer: Passed, job: Job) -> None:
        """Keep an arrival; `job` is the job that it becomes."""
        waiting = _Waiting(pending, answer, job, self._clock())
        self._waiting[job.id] = waiting
        self.num_by_user[job.uid] += 1
        self._names.add(job, named_jobs(answer))

    def settle(
        self,
        accept: Callable[[list[Ready]], list[Job]],
        *,
        is_quiet: bool,
        fetched: set[str],
        has_more: Callable[[int], bool],
    ) -> list[Job]:
        """Accept the arrivals whose named jobs are known by now, and reject those that have waited long enough.

        `is_quiet`: no other arrival is being taken or checked. `fetched`: names of arrivals that wait for a fetch.
        `has_more`: a user has files that are not taken yet, since too many of their jobs are queued. Returns the
        accepted jobs.
        """
        began = self._clock()
        self._quiet_since = (self._quiet_since if self._quiet_since is not None else began) if is_quiet else None
        accepted: list[Job] = []
        ready: list[Ready] = []
        numbers = list(self._waiting)  # first those that the last pass did not reach
        first = next((index for index, number in enumerate(numbers) if number > self._last_waiting), 0)
        for number in numbers[first:] + numbers[:first]:
            waiting, now = self._waiting[number], self._clock()
            if not is_quiet and now - waiting.since < ARRIVALS_PATIENCE_SEC:
                continue
            self._last_waiting = number
            job, named = replace(waiting.job, submitted_at=time.time()), named_jobs(waiting.answer)
            if fetched and not self._named_by(named, job.uid).isdisjoint(fetched):
                self._waiting[number] = replace(waiting, missing_since=None)
                continue
            if len(ready) >= MAX_TOGETHER or any({other.name, str(other.id)} & set(named) for _, _, other in ready):
                accepted += accept(ready)  # first the arrivals that this one names
                ready = []
            makers = {name: self._named(name, job) for name in named}
            missing = next((name for name, other in makers.items() if other is None), None)
            if missing is not None and (self._may_still_come(waiting, now) or has_more(job.uid)):
                continue
            unknown = self._unknown(missing, job, _key_of(missing, waiting.answer)) if missing is not None else None
            del self._waiting[number]
            self.num_by_user[job.uid] -= 1
            self._names.forget(job)
            try:
                if unknown is not None:
                    raise unknown
                job = self._with_inputs(job, waiting.answer, {name: other for name, other in makers.items() if other})
            except HonedError as error:
                locate(error, waiting.answer)
                self._rejection.reject(waiting.pending.claim, error)
            except Exception as problem:  # noqa: BLE001 - the others are settled all the same
                self._rejection.postpone(waiting.pending.claim, problem)
            else:
                ready.append((waiting.pending, waiting.answer, job))
            if now - began >= PASS_SEC:
                break  # the others in the next pass
        else:
            self._last_waiting = 0
        return accepted + accept(ready)

    def named_now(self, job: Job, answer: Passed) -> Job:
        """Return an accepted job, depending on the jobs that its new file names. Raises SpecError for a name that no
        job has by now."""
        makers = {name: self._named(name, job) for name in named_jobs(answer)}
        for name, other in makers.items():
            if other is None:
                raise self._unknown(name, job, _key_of(name, answer))
        return self._with_inputs(job, answer, {name: other for name, other in makers.items() if other})

    def _may_still_come(self, waiting: _Waiting, now: float) -> bool:
        missing_since = waiting.missing_since if waiting.missing_since is not None else now
        self._waiting[waiting.job.id] = replace(waiting, missing_since=missing_since)
        return now - max(missing_since, self._quiet_since or missing_since) < NAMED_JOB_PATIENCE_SEC

    def _named(self, name: str, job: Job) -> Listed | None:
        """Return the job of that number, or the newest of that name; None while a newer one is still waiting."""
        known = [other for other in self._known(name) if other.id != job.id]
        if not self._config().policy.share_results and job.uid != 0:
            known = [other for other in known if other.uid == job.uid]  # other users' outputs are not shared
        # Of a name that several users use, the user's own job wins: nobody else's newer job replaces it.
        known = [other for other in known if other.uid == job.uid] or known
        newest = max(known, key=lambda other: other.id, default=None)
        return None if self._names.newest(name, job) > (newest.id if newest else 0) else newest

    def _known(self, name: str) -> list[Listed]:
        numbered = self._spool.listed(int(name)) if name.isdecimal() else None
        named = self._spool.named(name)
        return [*named, numbered] if numbered is not None else named

    def _unknown(self, name: str, job: Job, key: str) -> SpecError:
        if self._names.newest(name, job):
            if not self._named_by([name], job.uid).isdisjoint({job.name, str(job.id)}):
                return SpecError(
                    f"{key}: {name!r} and this job wait for each other", hint="remove one of the two references"
                )
            return SpecError(
                f"{key}: {name!r} waits for a job that does not exist",
                hint="see why that job was rejected, and submit all of them again",
            )
        if (pruned := self._spool.pruned.get(name)) is not None and is_seen_by(pruned, job, self._config()):
            return SpecError(
                f"{key}: job {pruned.id} ({pruned.name}) {query.words_of_pruned(pruned)}",
                hint="submit its job file again, before this one or together with it",
            )
        return SpecError(
            f"{key}: there is no job {name!r}",
            hint="submit that job first, or both together; see honectl list",
        )

    def _named_by(self, first: Iterable[str], uid: int) -> set[str]:
        seen: set[str] = set()
        ahead = list(first)
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += self._names.wanted_by(name, uid)
        return seen

    def _with_inputs(self, job: Job, answer: Passed, named: dict[str, Listed]) -> Job:
        """Return the job, depending on the makers of its inputs. Raises SpecError if one makes no such output."""
        for key, name in answer.references.items():
            plan = PlanFile.read(self._spool.files(named[name].id).plan_path)
            _check_product(key, named[name], plan)
        makers = {name: named[name].id for name in answer.references.values()}
        dependencies = [str(named[name].id) for name in named_jobs(answer)]  # numbers: a later job may take the name
        return replace(job, depends_on=tuple(dict.fromkeys(dependencies)), inputs=makers, is_deferred=bool(makers))


def is_seen_by(other: Listed, job: Job, config: Config) -> bool:
    """Return True if a job's submitter may know of the other job."""
    return config.policy.share_results or job.uid in {0, other.uid}


def named_jobs(answer: Passed) -> list[str]:
    """Return the jobs that a spec names: its dependencies, and the jobs whose outputs it starts from."""
    return list(dict.fromkeys([*map(str, answer.spec.get("depends_on") or ()), *answer.references.values()]))


def locate(error: HonedError, answer: Passed) -> None:
    """Add the line of its key to a rejection, where the answer has lines."""
    problem.locate(error, answer.spec, {(key,): line for key, line in answer.lines.items()})


def _key_of(name: str, answer: Passed) -> str:
    return next((key for key, maker in answer.references.items() if maker == name), "depends_on")


def _check_product(key: str, maker: Listed, plan: PlanFile) -> None:
    """Check that a job makes what another job's key asks for. Raises SpecError if not."""
    spec = plan.spec
    makes_adapter = kind.of(spec).trains and bool(spec.get("lora") or spec.get("adapter"))
    who = f"{key}: job {maker.id} ({maker.name})"
    if not kind.of(spec).makes:
        raise SpecError(f"{who} is an evaluation, which produces no model", hint="name the job that it evaluates")
    if key == "adapter" and not makes_adapter:
        raise SpecError(
            f"{who} produces a complete checkpoint, not an adapter",
            hint="set it as base_model, and remove adapter",
            fix={"base_model": spec["adapter"], "adapter": None},
        )
    if key == "base_model" and makes_adapter and not any(item.is_base_model for item in export.asked(spec)):
        raise SpecError(
            f"{who} produces an adapter, not a base model",
            hint="add a job of kind: merge between the two, or save_merged: bfloat16 to that one",
        )
