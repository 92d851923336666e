"""Second checks of accepted jobs: whose inputs other jobs have made by now, that are to run on another device, or whose
job file is edited.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from pathlib import Path

from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.line import Request
from honed.job.job import Job
from honed.job.plan_file import Earlier, PlanFile
from honed.job.spool import Spool
from honed.run.reply import Answer, Refused
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.error import HonedError
from honed.system.personpath import PersonPath

#: Accepted jobs that are checked again at the same time, at most.
MAX_ASKED_AGAIN = 32


@dataclass(frozen=True)
class Replanned:
    """The answer of a job's second check: a plan, or an error."""

    job_id: int
    answer: Answer


class Replanning:
    """Has accepted jobs checked again, and keeps the answers until they are taken."""

    def __init__(self, spool: Spool, checkers: Checkers, config: Callable[[], Config]) -> None:
        self._spool = spool
        self._checkers = checkers
        self._config = config
        self._asked: dict[int, Callable[[], None]] = {}  # number → how to ask once more
        self._done: list[Replanned] = []

    @property
    def numbers(self) -> Set[int]:
        """Jobs that are being checked again, or wait for a fetch before that."""
        return self._asked.keys()

    @property
    def has_room(self) -> bool:
        """True if more accepted jobs may be checked again now: a few at a time, so that new arrivals get their turn."""
        return len(self._asked.keys() - self._checkers.stuck()) < MAX_ASKED_AGAIN

    def plan_again(self, job: Job, made: dict[str, Path], device: Device | None = None) -> None:
        """Have a job checked whose inputs are there now, name → output directory, or that is to run on another device
        than it was planned for; `take_done` returns the answer."""
        if job.id not in self._asked:
            self._asked[job.id] = functools.partial(self._submit, job, made, device)
            self.ask(job.id)

    def check_edit(self, job: Job, path: Path) -> None:
        """Have a job's new file checked as if it arrived now; `take_done` returns the answer."""
        self._asked[job.id] = functools.partial(self._submit_edit, job, path)
        self.ask(job.id)

    def ask(self, number: int) -> None:
        """Ask the helper, for the first time or once more."""
        self._asked[number]()

    def end(self, number: int, answer: Answer) -> None:
        """End a second check with this answer."""
        del self._asked[number]
        self._done.append(Replanned(number, answer))

    def fail(self, number: int, error: HonedError) -> None:
        """End a second check that cannot be made."""
        self.end(number, Refused(number, error))

    def take_done(self) -> list[Replanned]:
        """Return the answers that have come since the last call."""
        done, self._done = self._done, []
        return done

    def _submit_edit(self, job: Job, path: Path) -> None:
        self._checkers.submit(Request(job.id, PersonPath.of(path, 1), self._config(), uid=job.uid))

    def _submit(self, job: Job, made: dict[str, Path], device: Device | None) -> None:
        files = self._spool.files(job.id)
        earlier = Earlier(made)
        unreadable = (OSError, ValueError, KeyError, TypeError)
        with contextlib.suppress(*unreadable):  # without a pinned commit, the branch's current one is used
            plan = PlanFile.read(files.plan_path)
            earlier = replace(earlier, commit=plan.base_model_commit)
            with contextlib.suppress(*unreadable):
                earlier = replace(earlier, pinned=plan.precision if plan.is_decided else None)
            commits = {key: place.commit for key, place in plan.hub_datasets.items()}
            earlier = replace(earlier, dataset_commits=commits)
        self._checkers.submit(Request(job.id, files.spec_path, self._config(), device, job.uid, earlier))
