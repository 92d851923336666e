"""From a file in incoming/ to an entry in queued/, or to rejected/ with its reason.

    arrival ── whole ──► claimed/<id>/ ── copied, checked by the preflight helper ──► queued/ or held/, or rejected/
                                                   ├─ names other jobs ──► once those are known, the same
                                                   └─ names a model to fetch ──► once it is there, checked again

Nothing here waits: the helper answers when it has looked at the files that a job names. A job that names others may
have been dropped together with them, in any order: it is settled after the other arrivals of its time. One whose
`job:NAME` is not made yet is accepted without a plan; it is planned by a second check, when those jobs have succeeded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from honed import durable, foreign, message
from honed.checker import Checker
from honed.config import Config
from honed.database import timestamp
from honed.device import Device
from honed.error import HonedError, InternalError, InterruptedRunError, SpecError, from_dict
from honed.fetcher import Fetcher
from honed.job import Job, State
from honed.log import about
from honed.snapshot import Missing
from honed.spool import Claim, Copy, Spool, refusal
from honed.watcher import Watcher

log = logging.getLogger(__name__)

#: How many arrivals are claimed in one pass, so that a flood does not hold the loop.
MAX_CLAIMS_PER_PASS = 50
#: Seconds for which a job waits for the arrival of one that it names, and for other arrivals to be settled first.
NAMED_JOB_PATIENCE_SEC = 3.0
ARRIVALS_PATIENCE_SEC = 30.0
#: Looks at which an arrival could not be taken, after which it is left where it lies.
MAX_DENIALS = 3
#: How often one arrival has a model fetched: what is cached can be removed before the next look at it.
MAX_FETCHES_PER_ARRIVAL = 3


@dataclass(frozen=True)
class _Pending:
    claim: Claim
    copy: Copy


@dataclass(frozen=True)
class _Waiting:
    """A checked arrival that names other jobs."""

    pending: _Pending
    answer: dict[str, Any]
    since: float  #: by the clock
    quiet_since: float | None = None  #: since when nothing else is on its way


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


class Acceptance:
    """The way in. `others` tells of the jobs that are not over, for what only one of them may have."""

    def __init__(
        self,
        spool: Spool,
        watcher: Watcher,
        client: Checker,
        config: Config,
        others: Callable[[], Iterable[Job]],
        fetcher: Fetcher,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spool = spool
        self._watcher = watcher
        self._client = client
        self.config = config
        self._others = others
        self._fetcher = fetcher
        self._clock = clock
        self._pending: dict[int, _Pending] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._fetching: dict[int, _Fetching] = {}
        self._num_fetches: dict[int, int] = {}
        self._ask_again: dict[int, Callable[[], None]] = {}  # for accepted jobs that are being checked again
        self._asked_again: set[int] = set()
        self._replanned: list[Replanned] = []
        self._num_unsettled = 0
        self._left: dict[str, int] = {}  # name → inode
        self._num_denials: dict[str, int] = {}
        self._num_scans = 0
        self._seen_at: dict[str, int] = {}  # name → the scan that saw it first
        self._late: list[Job] = []  # accepted, though a fault came after their entry was there
        self.fault = ""  #: what kept the last scan's arrivals from being settled, where the machine did

    @property
    def is_busy(self) -> bool:
        """Whether something lies in incoming/ or is being checked."""
        return bool(self._pending or self._num_unsettled or self._late or self._asked_again - self._fetching.keys())

    @property
    def num_waiting(self) -> int:
        """Arrivals that are checked and name jobs which may still arrive."""
        return len(self._waiting)

    @property
    def num_fetching(self) -> int:
        """Arrivals and jobs whose base model is being fetched."""
        return len(self._fetching)

    @property
    def num_unsettled(self) -> int:
        """Arrivals that may still be being written."""
        return self._num_unsettled

    def scan(self) -> None:
        """Claim every arrival that is whole, and check again what was claimed before and could not be settled then."""
        self.fault = ""
        for claim in self._spool.claims():
            if any(claim.id in known for known in (self._pending, self._waiting, self._fetching)):
                continue
            if (job := self._spool.accepted(claim)) is not None:
                self._late.append(job)
            else:
                self._check(claim)
        arrivals = self._in_order(path for path in self._spool.arrivals() if not self._is_left(path))
        self._watcher.keep({path.name for path in arrivals})
        self._num_unsettled = len(arrivals)
        for path in [path for path in arrivals if self._watcher.is_whole(path)][:MAX_CLAIMS_PER_PASS]:
            self._num_unsettled -= 1
            try:
                taken = self._spool.claim(path)
            except PermissionError as error:
                if error.filename != str(path):
                    raise  # a place of our own
                self._num_denials[path.name] = self._num_denials.get(path.name, 0) + 1
                if self._num_denials[path.name] < MAX_DENIALS:
                    self._num_unsettled += 1  # the next look may have more luck
                    continue
                self._leave(path, error)
                continue
            self._watcher.forget(path.name)
            self._num_denials.pop(path.name, None)
            if taken is not None:
                self._check(taken)

    def _in_order(self, arrivals: Iterable[Path]) -> list[Path]:
        """As they were first seen; those first seen together by their times, which a clock that jumps gets wrong."""
        self._num_scans += 1
        paths = list(arrivals)
        self._seen_at = {path.name: self._seen_at.get(path.name, self._num_scans) for path in paths}
        return sorted(paths, key=lambda path: self._seen_at[path.name])

    def _leave(self, path: Path, error: OSError) -> None:
        """What cannot be taken lies where it is, and is told of once: a directory of somebody else's."""
        self._num_denials.pop(path.name, None)
        with contextlib.suppress(FileNotFoundError):
            self._left[path.name] = path.lstat().st_ino
            log.warning("%r lies in %s and cannot be taken: %s", path.name, path.parent, error.strerror)

    def _is_left(self, path: Path) -> bool:
        try:
            return path.name in self._left and self._left[path.name] == path.lstat().st_ino
        except FileNotFoundError:
            del self._left[path.name]
            return False

    def _check(self, claim: Claim) -> None:
        try:
            copy = self._spool.copy(
                claim, max_bytes=self.config.spool.max_spec_bytes, is_shared=self.config.policy.share_results
            )
        except HonedError as error:
            self._refuse(claim, error)
            return
        except OSError as error:
            self._wait(claim, error)
            return
        self._submit(_Pending(claim, copy))

    def _submit(self, pending: _Pending) -> None:
        self._pending[pending.claim.id] = pending
        self._client.submit(pending.claim.id, pending.copy.path, self.config, uid=pending.copy.uid)

    def settle(self) -> list[Job]:
        """Accept or refuse what the helper has answered on. Returns the jobs accepted."""
        accepted, self._late = self._late, []
        for answer in self._client.poll():
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
                self._waiting[answer["id"]] = _Waiting(pending, answer, self._clock())
            else:
                accepted += self._settle(pending, answer, self._job(pending, answer))
        return accepted

    def _settle(self, pending: _Pending, answer: dict[str, Any], job: Job) -> list[Job]:
        try:
            self._check_against_others(job)
            return [self._admit(pending.claim, job, answer)]
        except HonedError as error:
            self._refuse(pending.claim, error)
        except OSError as error:
            with contextlib.suppress(OSError):
                if (accepted := self._spool.accepted(pending.claim)) is not None:
                    return [accepted]
            self._wait(pending.claim, error)
        return []

    # -- models to fetch ----------------------------------------------------------------------------------------------

    def _fetch(self, answer: dict[str, Any], pending: _Pending | None) -> None:
        """Have the model fetched that a check has missed; the check is made again when it is there."""
        number = answer["id"]
        missing = Missing(**answer["needs_fetch"])
        ask_again = self._ask_again[number] if pending is None else functools.partial(self._submit, pending)
        waits = _Fetching(missing, answer, pending, ask_again)
        self._num_fetches[number] = self._num_fetches.get(number, 0) + 1
        if self._num_fetches[number] > MAX_FETCHES_PER_ARRIVAL:
            self._end_fetch(
                number,
                waits,
                InternalError(
                    f"base_model: {missing.repo_id} was fetched, and is not in the cache", hint="see the log"
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
            found.append({
                "id": number, "name": self._name(waits, number), "uid": uid,
                "source": pending.claim.name if pending else None, "state": "fetching",
                "repo_id": waits.missing.repo_id, "revision": waits.missing.revision,
                "num_bytes": progress.get("bytes", 0), "total_bytes": progress.get("of") or None,
                "problem": progress.get("problem"),
            })  # fmt: skip
        return found

    def cancel(self, number: int) -> None:
        """Refuse an arrival that waits for a model, on its owner's word."""
        waits = self._fetching.pop(number)
        self._fetcher.leave(number)
        self._end_fetch(number, waits, InterruptedRunError("cancelled, before its base model was fetched"))

    def _name(self, waits: _Fetching, number: int) -> str:
        title = waits.pending.claim.title if waits.pending else str(number)
        return str(waits.answer["spec"].get("name") or title)

    def _names_fetching(self) -> set[str]:
        return {name for number, waits in self._fetching.items() if waits.pending is not None
                for name in (self._name(waits, number), str(number))}  # fmt: skip

    # -- jobs that name others ----------------------------------------------------------------------------------------

    def settle_waiting(self) -> Job | None:
        """Accept one arrival whose named jobs are known by now, and refuse those that have waited long enough."""
        now = self._clock()
        is_quiet = not self._pending and not self._num_unsettled
        for number, waiting in list(self._waiting.items()):
            if not is_quiet and now - waiting.since < ARRIVALS_PATIENCE_SEC:
                self._waiting[number] = replace(waiting, quiet_since=None)
                continue
            job = self._job(waiting.pending, waiting.answer)
            if not self._named_by(_names(waiting.answer), job.uid).isdisjoint(self._names_fetching()):
                self._waiting[number] = replace(waiting, quiet_since=None)
                continue
            found = {name: self._named(name, job) for name in _names(waiting.answer)}
            missing = next((name for name, other in found.items() if other is None), None)
            quiet_since = waiting.quiet_since if waiting.quiet_since is not None else now
            if missing is not None and now - quiet_since < NAMED_JOB_PATIENCE_SEC:
                self._waiting[number] = replace(waiting, quiet_since=quiet_since)
                continue
            problem = self._unknown(missing, job) if missing is not None else None
            del self._waiting[number]
            if problem is not None:
                self._refuse(waiting.pending.claim, problem)
                continue
            try:
                job = self._with_inputs(job, waiting.answer, {name: other for name, other in found.items() if other})
            except HonedError as error:
                self._refuse(waiting.pending.claim, error)
                continue
            if accepted := self._settle(waiting.pending, waiting.answer, job):
                return accepted[0]
        return None

    def _named(self, name: str, job: Job) -> Job | None:
        """The accepted job of that number, or the newest of that name; None while a newer one is still waiting."""
        waiting = self._names_waiting(job)
        known = [other for other in self._jobs() if name in {other.name, str(other.id)} and other.id != job.id]
        if not self.config.policy.share_results and job.uid != 0:
            known = [other for other in known if other.uid == job.uid]  # what others make is theirs
        # Of a name that several people use, one's own: nobody else's newer job takes its place.
        known = [other for other in known if other.uid == job.uid] or known
        newest = max(known, key=lambda other: other.id, default=None)
        return None if waiting.get(name, 0) > (newest.id if newest else 0) else newest

    def _names_waiting(self, job: Job) -> dict[str, int]:
        """The other arrivals that wait, by name."""
        others = [
            each for number, each in self._waiting.items() if number != job.id and each.pending.copy.uid == job.uid
        ]
        return {self._job(each.pending, each.answer).name: each.pending.claim.id for each in others}

    def _jobs(self) -> list[Job]:
        return list(self._spool.all_jobs().values())

    def _unknown(self, name: str, job: Job) -> SpecError:
        if name in self._names_waiting(job):
            if self._waits_for(name, job):
                return SpecError(f"{name!r} and this job wait for each other", hint="one of them has to come first")
            return SpecError(
                f"{name!r}, which this one names, waits itself for a job that is not there",
                hint="see why it is refused, and drop them all again",
            )
        return SpecError(
            f"there is no job {name!r}, which this one names", hint="drop it first, or both together; honectl list"
        )

    def _waits_for(self, name: str, job: Job) -> bool:
        """Whether the waiting arrival of that name waits for this job, by however many others."""
        return not self._named_by([name], job.uid).isdisjoint({job.name, str(job.id)})

    def _named_by(self, first: Iterable[str], uid: int) -> set[str]:
        """These names, those that this user's waiting arrivals of these names wait for, and so on."""
        names = {
            self._job(each.pending, each.answer).name: _names(each.answer)
            for each in self._waiting.values()
            if each.pending.copy.uid == uid
        }
        seen: set[str] = set()
        ahead = list(first)
        while ahead:
            found = ahead.pop()
            if found not in seen:
                seen.add(found)
                ahead += names.get(found, [])
        return seen

    def _with_inputs(self, job: Job, answer: dict[str, Any], named: dict[str, Job]) -> Job:
        """The job, depending on those that make what it starts from. Raises SpecError where one makes no such thing."""
        for key, name in answer["references"].items():
            _check_product(key, named[name], self._spec_of(named[name]))
        makers = {name: named[name].id for name in answer["references"].values()}
        dependencies = [str(named[name].id) for name in _names(answer)]  # a later job of that name is another
        return replace(job, depends_on=tuple(dict.fromkeys(dependencies)), inputs=makers, is_deferred=bool(makers))

    def _spec_of(self, job: Job) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(foreign.read_plain(self._spool.job_layout(job.id).plan_path, num_names=1))
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
        commit = None
        with contextlib.suppress(OSError, ValueError):  # without it the branch means what it means now
            commit = json.loads(foreign.read_plain(files.plan_path, num_names=1)).get("base_model_commit")
        self._client.submit(job.id, files.spec_path, self.config, device, jobs=made, commit=commit, uid=job.uid)

    def is_asked_again(self, job_id: int) -> bool:
        return job_id in self._asked_again

    def replanned(self) -> list[Replanned]:
        """The answers to `plan_again` since the last call."""
        done, self._replanned = self._replanned, []
        return done

    def plan_of(self, job: Job, answer: dict[str, Any]) -> dict[str, Any]:
        """What stands in plan.json."""
        identity = {"id": job.id, "name": job.name, "user_id": str(job.uid), "instance": str(self._spool.root)}
        return {**answer["plan"], "job": identity, "spec": answer["spec"], "output_dir": job.output_dir}

    # -- one arrival --------------------------------------------------------------------------------------------------

    def _admit(self, claim: Claim, job: Job, answer: dict[str, Any]) -> Job:
        job = self._spool.admit(job, claim, self.plan_of(job, answer))
        log.info("job %d (%s): accepted from %s, %s", job.id, job.name, job.source, job.state,
                 extra=about(job, message.ACCEPTED, file=job.source, uid=job.uid))  # fmt: skip
        for warning in answer.get("warnings", []):
            log.warning("job %d (%s): %s", job.id, job.name, warning, extra=about(job))
        return job

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
            state=State.HELD if pending.claim.is_held else State.QUEUED,
        )

    def _check_against_others(self, job: Job) -> None:
        ours = Path(job.output_dir).resolve()
        for other in self._others():
            theirs = Path(other.output_dir).resolve()
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                raise SpecError(
                    f"output_dir: {ours} is job {other.id}'s ({other.name}, {other.state}: {theirs})",
                    hint="give this job a directory of its own, or leave output_dir out",
                )

    def _refuse(self, claim: Claim, error: HonedError) -> None:
        try:
            self._reject(claim, error)
        except OSError as problem:
            self._wait(claim, problem)

    def _wait(self, claim: Claim, error: OSError) -> None:
        """An arrival that the machine, and not its dropper, keeps us from settling is tried again at the next scan."""
        self.fault = durable.machine_fault(error) or str(error)
        log.error("%r waits in %s: %s", claim.name, claim.path.parent, error)

    def _reject(self, claim: Claim, error: HonedError) -> None:
        target = self._spool.reject(claim, refusal(claim.name, error, when=timestamp(time.time())))
        first = error.message.splitlines()[0] if error.message else ""
        more = f" (and {len(error.message.splitlines()) - 1} more)" if "\n" in error.message else ""
        log.warning("%r refused: %s: %s%s; see %s.reason", claim.name, error.code, first, more, target,
                    extra=about(claim.id, message.of_error(error.code), state="rejected", code=error.code,
                                file=claim.name, hint=error.hint))  # fmt: skip


def _names(answer: dict[str, Any]) -> list[str]:
    """The jobs that a spec names, each once: those it depends on, and those whose outputs it starts from."""
    return list(dict.fromkeys([*map(str, answer["spec"].get("depends_on") or ()), *answer["references"].values()]))


def _check_product(key: str, maker: Job, spec: dict[str, Any]) -> None:
    """Whether a job makes what another one's key wants of it. Raises SpecError."""
    makes_adapter = spec["kind"] == "sft" and bool(spec.get("lora") or spec.get("adapter"))
    who = f"{key}: job {maker.id} ({maker.name})"
    if key == "adapter" and not makes_adapter:
        raise SpecError(
            f"{who} makes a whole checkpoint, not an adapter", hint="name it as base_model, or leave it out"
        )
    if key == "base_model" and makes_adapter and spec.get("save_merged", "none") == "none":
        raise SpecError(
            f"{who} makes an adapter, and no base model",
            hint="put a job of kind: merge between the two, or save_merged: bfloat16 into that one",
        )
