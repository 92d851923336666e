"""The spares: workers that have imported their libraries, each kept for the next job of one user.

    a job of the user has ended ──► made ── ready ── the user's next job that needs the same libraries ──► its worker
                                     └── `jobs.warm_sec` without a sign of the user, a new configuration, little
                                         memory, another one in its place, honed's end ──► ended

A user has at most one, for the libraries of the last job. It is never another user's. A job that it does not suit, or
whose spare is not ready, starts as ever, and whatever happens to a spare costs no attempt.

Only processes of honed's own can have been spares. A unit cannot: what makes it the unit of its job is settled when it
starts, and a running one takes no other (docs/operation.md has the experiment).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from honed.job.job import Job, State
from honed.job.needs import IMPORT_ALL_VARIABLE, Needs
from honed.job.plan_file import PlanFile
from honed.run.process import ProcessRunner
from honed.run.runner import Runner
from honed.run.spare import Spare
from honed.spec.config import Config
from honed.system import usage
from honed.system.error import said
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds in which a spare must have imported its libraries: many times as long as that takes on a busy machine.
MAKE_SEC = 300.0
#: Users who may have a spare at the same time.
MAX_SPARES = 4
#: Devices of attempts that had none, or none that is known.
NOWHERE = frozenset({"none", "unknown"})
#: Seconds between looks at the processes of spares that are to end, where no signal tells of them.
REAP_INTERVAL_SEC = 1.0
#: Seconds between looks at the memory while there are spares.
LOOK_INTERVAL_SEC = 10.0


@dataclass
class _Kept:
    """A user's spare."""

    spare: Spare
    needs: Needs
    made_at: float
    until: float  #: monotonic seconds, as all times here


class Spares:
    """The spares, by user. `clock` is monotonic seconds."""

    def __init__(
        self, layout: Layout, config: Callable[[], Config], runner: Runner, *, clock: Callable[[], float]
    ) -> None:
        self._layout = layout
        self._config = config
        self._runner = runner if isinstance(runner, ProcessRunner) else None
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self._wanted: dict[int, tuple[Needs, dict[str, str]]] = {}  # to be made, with their environments
        self._ending: list[Spare] = []  # until their processes are gone
        self._look_at = 0.0

    @property
    def num_ready(self) -> int:
        """The number of spares that wait for a job."""
        return sum(kept.spare.is_ready for kept in self._kept.values())

    def patience(self) -> float:
        """Return the seconds until a step is due."""
        now = self._clock()
        waits = [kept.until - now for kept in self._kept.values()]
        waits += [self._look_at - now] if self._kept else []
        waits += [REAP_INTERVAL_SEC] if self._ending else []
        return max(0.0, min(waits, default=math.inf))

    # -- use ----------------------------------------------------------------------------------------------------------

    def see(self, uid: int) -> None:
        """Note that a user is there: the user's spare is kept from now on for `jobs.warm_sec`."""
        if (kept := self._kept.get(uid)) is not None:
            kept.until = self._clock() + self._config().jobs.warm_sec

    def want(self, job: Job, environment: Mapping[str, str]) -> None:
        """Have a spare made for the user of a job whose attempt has ended. `environment`: that of its worker."""
        if self._runner is None or not self._config().jobs.warm_sec or IMPORT_ALL_VARIABLE in os.environ:
            return
        if job.state is State.QUEUED or job.attempt.device in NOWHERE:  # it is tried again; or what it ran on is gone
            return
        try:
            plan = PlanFile.read(self._layout.files(job.id).plan_path)
            needs = Needs.of(plan, job.attempt.backend)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            return
        self.see(job.uid)
        if needs.can_be_ahead:
            self._wanted[job.uid] = needs, {name: value for name, value in environment.items() if name != "HONED_JOB"}

    def start(self, job: Job, environment: Mapping[str, str]) -> bool:
        """Start the worker of a job's attempt from the user's spare. Returns False if there is none that suits; then
        the job is to be started as ever. Raises OSError."""
        kept = self._kept.get(job.uid)
        if kept is None or self._runner is None:
            return False
        try:
            plan = PlanFile.read(self._layout.files(job.id).plan_path)
            is_alike = Needs.of(plan, job.attempt.backend) == kept.needs
            is_alike = is_alike and plan.spec.get("trial") != "only"  # a process of its own does all of that
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        if not is_alike:
            return False
        attempt = job.attempt
        is_given = self._runner.start_with(
            kept.spare, job.id, attempt.number, attempt.start, backend=attempt.backend, environment=environment
        )
        if is_given:
            del self._kept[job.uid]
        return is_given

    # -- steps --------------------------------------------------------------------------------------------------------

    def tend(self, *, may_make: bool, num_busy: int) -> None:
        """End the spares that nobody needs any more, and make those that are wanted. `num_busy`: workers that live."""
        self._ending = [spare for spare in self._ending if spare.is_alive]
        if not (self._kept or self._wanted):
            return
        now = self._clock()
        for uid, kept in list(self._kept.items()):
            if not kept.spare.is_alive:
                last = kept.spare.output.decode(errors="replace").strip().rpartition("\n")[2]
                log.warning("the spare worker of user %d has ended: %s", uid, last or "it did not say why")
                self._drop(uid)
            elif now >= kept.until:
                self._end(uid, "its time is over")
            elif now - kept.made_at >= MAKE_SEC and not kept.spare.is_ready:
                self._end(uid, "it did not become ready")
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_SEC
            if usage.available_bytes() < self._config().jobs.stage_min_available_bytes / 2:
                self.end_all("little memory is available")
        wanted, self._wanted = self._wanted, {}
        for uid, (needs, environment) in wanted.items() if may_make else ():
            self._make(uid, needs, environment, num_busy)

    def end_all(self, why: str) -> None:
        """End all spares."""
        self._wanted.clear()
        for uid in list(self._kept):
            self._end(uid, why)

    # -- one ----------------------------------------------------------------------------------------------------------

    def _make(self, uid: int, needs: Needs, environment: dict[str, str], num_busy: int) -> None:
        jobs = self._config().jobs
        if (kept := self._kept.get(uid)) is not None:
            if kept.needs == needs and kept.spare.is_alive:
                return
            self._end(uid, "another one takes its place")
        if self._runner is None or not self._has_room(num_busy):
            return
        if len(self._kept) >= MAX_SPARES:
            self._end(min(self._kept, key=lambda each: self._kept[each].until), "other users need theirs more")
        now = self._clock()
        try:
            spare = self._runner.make_spare(needs, environment=environment)
        except OSError as problem:
            log.warning("no spare worker for user %d: %s", uid, said(problem))
            return
        self._kept[uid] = _Kept(spare, needs, now, now + jobs.warm_sec)
        log.debug("a spare worker for user %d is made", uid)

    def _has_room(self, num_busy: int) -> bool:
        """Return True if a processor and memory are left: training jobs need theirs."""
        has_processor = len(os.sched_getaffinity(0)) > num_busy
        return has_processor and usage.available_bytes() >= self._config().jobs.stage_min_available_bytes

    def _end(self, uid: int, why: str) -> None:
        log.debug("the spare worker of user %d ends: %s", uid, why)
        self._drop(uid)

    def _drop(self, uid: int) -> None:
        spare = self._kept.pop(uid).spare
        spare.end()
        self._ending.append(spare)
