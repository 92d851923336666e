"""New plans of queued jobs: once the jobs have run whose outputs they start from, for another device than planned, and
for a job file that was edited.

backlog ── a job to plan ──► replanning (the preflight helper) ── plan.json, or an error ──► backlog
"""

from __future__ import annotations

import logging
from collections.abc import Set
from pathlib import Path

from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.backlog import Backlog
from honed.daemon.editing import Editing
from honed.daemon.placement import Placement
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.run.reply import Answer, Passed, Refused
from honed.system import durable
from honed.system.device import Device
from honed.system.error import ModelError
from honed.system.log import about

log = logging.getLogger(__name__)


class Plans:
    """The queued jobs that are being planned again, and the devices for which they are; `editing`: those that get
    another job file."""

    def __init__(
        self, spool: Spool, backlog: Backlog, placement: Placement, acceptance: Acceptance, editing: Editing
    ) -> None:
        self._spool = spool
        self._backlog = backlog
        self._placement = placement
        self.acceptance = acceptance
        self.editing = editing
        self._devices: dict[int, Device] = {}  # by job; not those that are planned for new inputs
        self._answers: dict[int, Answer] = {}  # that are not taken yet: a full disk may prevent it

    @property
    def numbers(self) -> Set[int]:
        """Jobs that are being planned again, or edited."""
        return self.acceptance.replanning.numbers | self.editing.numbers | self._answers.keys()

    @property
    def has_room(self) -> bool:
        """True if more jobs may be planned again now."""
        return self.acceptance.replanning.has_room

    def ask(self, job: Job, device: Device | None = None) -> None:
        """Have a job planned again, for this device or for its inputs, which exist now."""
        if device is not None:
            self._devices[job.id] = device
        makers = {name: self._spool.listed(number) for name, number in job.inputs.items()}
        made = {name: Path(maker.output_dir) for name, maker in makers.items() if maker is not None}
        self.acceptance.replanning.plan_again(job, made, device)

    def ask_deferred(self) -> None:
        """Have the deferred jobs planned whose inputs exist by now."""
        for job in self._backlog.unplanned():
            if not self.has_room:
                return
            if job.id not in self.numbers:
                self.ask(job)

    def settle(self) -> None:
        """Take the plans that were made again; an error found then fails the job. Raises OSError if the machine
        prevents that for one of them, which is tried again in the next pass: the plan is not made once more."""
        for done in self.acceptance.replanning.take_done():
            if done.job_id in self.editing.numbers:
                self.editing.take(done.job_id, done.answer)
            else:
                self._answers[done.job_id] = done.answer
        fault: Exception | None = None
        for number, answer in list(self._answers.items()):
            try:
                job = self._backlog.get(number)
                if job is not None and job.state is State.QUEUED and number not in self.editing.numbers:
                    self._settle(job, answer, self._devices.get(number))
            except Exception as problem:
                fault = fault or problem
                if durable.machine_fault(problem):
                    continue
                log.exception("job %d: its new plan cannot be taken", number, extra=about(number))
            self._devices.pop(number, None)
            del self._answers[number]
        self.editing.settle()
        if fault is not None:
            raise fault

    def _settle(self, job: Job, answer: Answer, device: Device | None) -> None:
        """Take one new plan. `device` is the one that it was made for; None if it was made for new inputs."""
        if isinstance(answer, Passed) and not answer.waits_for:
            self.acceptance.plan_of(job, answer).write(self._spool.files(job.id).plan_path)
            self._placement.reread_plan(job)
            self._spool.update(job, is_deferred=False, staged_at=None)  # a worker ahead of its turn has the old plan
            log.info(
                "job %d (%s): planned again, for %s", job.id, job.name, device.name if device else "the current devices"
            )
            for warning in answer.warnings:
                log.warning("job %d (%s): %s", job.id, job.name, warning)
            return
        problem = (
            answer.error if isinstance(answer, Refused) else ModelError("its checkpoint or its input no longer exists")
        )
        if device is not None:  # it was accepted, so another device can run it
            self._placement.rule_out(job, device, problem.message)
            log.warning("job %d (%s): not on %s: %s", job.id, job.name, device.name, problem.message)
            return
        self._backlog.fail(job, problem)
