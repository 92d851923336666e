"""Edits of jobs that wait: a new job file, which is checked as if it arrived now.

    edit ── kept (job/editing.py) ──► replanning (a helper checks it as its owner) ──► made: entry, job file and plan
                                          └─ rejected, or it changes what stays: the job is as it was

Until that is settled the job does not start. Once the entry says that it is being edited, no error rejects it any more:
the edit is completed as soon as that is possible. What honed kept when it was killed is checked again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from honed.daemon.arrivals.acceptance import Acceptance, facts_of
from honed.daemon.arrivals.naming import locate, named_jobs
from honed.daemon.backlog import Backlog
from honed.daemon.placement import Placement
from honed.daemon.verb import Right, verb
from honed.job.arrival import too_large
from honed.job.database import Database
from honed.job.editing import ALWAYS, Edits, obstacle
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.query import Asker
from honed.job.shape import Edited
from honed.job.spool import Spool
from honed.run.reply import Answer, Passed, Refused
from honed.spec import problem
from honed.system import durable, message, untrusted
from honed.system.control import Request
from honed.system.error import EnvironmentInvalidError, HonedError, InternalError, SpecError, UsageError, said
from honed.system.log import about

log = logging.getLogger(__name__)

#: What jobs that `halving` compares have in common.
COMPARED = ("eval_split", "eval_datasets", "training.max_steps", "training.num_train_epochs")

#: Verdicts that are kept for those who ask.
MAX_VERDICTS = 1000


class Editing:
    """The edits that are not settled yet, by job number, and what became of the last ones."""

    def __init__(
        self, spool: Spool, database: Database, acceptance: Acceptance, backlog: Backlog, placement: Placement
    ) -> None:
        self._spool = spool
        self._database = database
        self._acceptance = acceptance
        self._backlog = backlog
        self._placement = placement
        self._edits = Edits(spool)
        self._pending: dict[int, Path] = {}
        self._not_asked: list[Job] = []  # of the helper
        self._answers: dict[int, Answer] = {}
        self._verdicts: dict[int, HonedError | None] = {}
        self._put_off: set[int] = set()  # that could not be settled, which the journal has

    @property
    def numbers(self) -> Set[int]:
        """Jobs whose edits are not settled."""
        return self._pending.keys()

    # -- verbs --------------------------------------------------------------------------------------------------------

    @verb("edit", right=Right.OWNER, wakes=True)
    def edit(self, request: Request, _asker: Asker, job: Job) -> Edited:
        """Take a new file for a job; `edited` has the verdict. Raises HonedError if the job cannot be edited."""
        data, was = request.arguments.get("data"), request.arguments.get("was")
        self._require_editable(job)
        if not isinstance(data, str):
            raise UsageError("edit needs the new file's bytes as data, in base64")
        try:
            content = base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise UsageError(f"data is not base64: {error}") from error
        try:
            present = untrusted.read_plain(path := self._spool.files(job.id).spec_path)
            if was is not None and was != hashlib.sha256(present).hexdigest():
                raise UsageError(
                    f"job {job.id} ({job.name}) has been edited meanwhile",
                    hint=f"look at it, and edit it again: {path}",
                )
            if len(content) > (limit := self._acceptance.config.spool.max_spec_bytes):
                raise too_large(path.name, limit)
            self._pending[job.id] = self._edits.put(job, content, path.suffix)
        except OSError as error:
            if durable.machine_fault(error):
                raise
            raise EnvironmentInvalidError(
                f"job {job.id} cannot be edited: {said(error)}", hint="see the journal"
            ) from error
        self._verdicts.pop(job.id, None)
        self._not_asked.append(job)
        return {"id": job.id, "state": "checking", "error": None}

    @verb("edited", right=Right.OWNER)
    def edited(self, _request: Request, _asker: Asker, job: Job) -> Edited:
        """Return what became of a job's last edit: `checking`, `edited` or `refused`; `unknown` after a restart."""
        if job.id in self._pending or job.is_being_edited:
            return {"id": job.id, "state": "checking", "error": None}
        if job.id not in self._verdicts:
            return {"id": job.id, "state": "unknown", "error": None}
        error = self._verdicts[job.id]
        state = "edited" if error is None else "refused"
        return {"id": job.id, "state": state, "error": error.as_dict() if error else None}

    def _require_editable(self, job: Job) -> None:
        if (refusal := obstacle(job.id, job.name, job.state)) is not None:
            raise refusal
        who = f"job {job.id} ({job.name})"
        if job.id in self._pending:
            raise UsageError(f"{who}: another edit of it is being checked", hint="edit it again in a moment")
        if job.id in self._acceptance.replanning.numbers:
            raise UsageError(f"{who} is being planned again", hint="edit it in a moment, or hold it first")

    # -- steps --------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Take up the edits that a crash has interrupted; they are checked again in the first pass."""
        for job, path in self._edits.take_up():
            self._pending[job.id] = path
            self._not_asked.append(job)
        for job in list(self._backlog.jobs()):
            if job.is_being_edited and job.id not in self._pending:
                self._edits.give_up(job)
            if job.edited_at:
                self._database.put_edits(job)

    def take(self, number: int, answer: Answer) -> None:
        """Take the helper's answer on an edit; `settle` acts on it."""
        self._answers[number] = answer

    def settle(self) -> None:
        """Make or reject the edits that the helpers have answered on, each by itself. Raises OSError if the machine
        prevents one of them; it is tried again then, as is one that has begun, whatever prevents it."""
        self._edits.tend()
        while self._not_asked:
            job = self._not_asked[-1]
            self._acceptance.replanning.check_edit(job, self._pending[job.id])
            self._not_asked.pop()
        fault: Exception | None = None
        for number, answer in list(self._answers.items()):
            try:
                error = self._settled(number, answer)
            except Exception as problem:
                if durable.machine_fault(problem):
                    fault = fault or problem
                elif number not in self._put_off:
                    log.exception("job %d: its edit is not complete, and is tried again", number, extra=about(number))
                self._put_off.add(number)
                continue
            del self._answers[number], self._pending[number]
            self._put_off.discard(number)
            self._verdicts[number] = error
            while len(self._verdicts) > MAX_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
        if fault is not None:
            raise fault

    def _settled(self, number: int, answer: Answer) -> HonedError | None:
        """Make one edit, or drop it. Returns the reason of a rejection; before the edit has begun, an error of ours is
        one, too. Raises an exception if it can be neither made nor dropped now."""
        path, job = self._pending[number], self._spool.job(number)
        if job is None:
            self._edits.drop(path)
            return UsageError(f"job {number} is gone")
        try:
            return self._settle(job, path, answer)
        except Exception as error:
            if durable.machine_fault(error) or self._edits.is_begun(number):
                raise
            log.exception("job %d (%s): its edit failed", job.id, job.name, extra=about(job))
            self._edits.drop(path)
            return InternalError(f"the edit failed: {said(error)}", hint="journalctl -u honed has the error")

    def _settle(self, job: Job, path: Path, answer: Answer) -> HonedError | None:
        """Make one edit, or drop it. Returns the reason of a rejection."""
        plan = self._plan_of(job)
        before = dict(plan.document.get("spec") or {})
        try:
            if job.is_being_edited:  # committed before a crash, so the job has its facts already
                changes: dict[str, Any] = {"is_deferred": bool(job.inputs)}
            elif isinstance(answer, Refused):
                raise answer.error
            else:
                changes = self._changes(job, before, answer)
        except HonedError as error:
            if isinstance(answer, Passed):
                locate(error, answer)
            self._edits.drop(path)
            first = error.message.partition("\n")[0]
            log.warning(
                "job %d (%s): its edit was refused: %s", job.id, job.name, first, extra=about(job, code=error.code)
            )
            return error
        if isinstance(answer, Refused):
            made = None
        elif job.attempts:  # its checkpoint belongs to the decisions of its plan
            made = PlanFile({**plan.document, "spec": answer.spec})
        else:
            made = self._acceptance.plan_of(replace(job, **changes), answer)
        job = self._edits.make(job, path, changes, made)
        self._placement.forget(job)
        self._database.put_job(job)
        self._database.put_edits(job)
        text = "planned again before it starts"
        if isinstance(answer, Passed):  # deeper keys may be a user's own words
            text = ", ".join(_changed(before, answer.spec)) or "no value changed"
        log.info("job %d (%s): edited: %s", job.id, job.name, text, extra=about(job, message.EDITED))
        for warning in answer.warnings if isinstance(answer, Passed) else ():
            log.warning("job %d (%s): %s", job.id, job.name, warning, extra=about(job))
        return None

    def _plan_of(self, job: Job) -> PlanFile:  # an empty one if it cannot be read
        try:
            return PlanFile.read(self._spool.files(job.id).plan_path)
        except (OSError, ValueError) as error:
            if durable.machine_fault(error):
                raise
            return PlanFile({})

    # -- what changes -------------------------------------------------------------------------------------------------

    def _changes(self, job: Job, before: Mapping[str, Any], answer: Passed) -> dict[str, Any]:
        """Return the changes of a job's entry. Raises HonedError if the job cannot become what its new file says."""
        if not job.is_editable:
            raise UsageError(f"job {job.id} ({job.name}) is {job.state} by now, and was not edited")
        _check_kept(job, before, answer)
        is_pinned = answer.spec.get("pin") if bool(answer.spec.get("pin")) != bool(before.get("pin")) else job.is_pinned
        changes = {**facts_of(answer), "is_pinned": bool(is_pinned), "is_deferred": bool(job.inputs)}
        named = {*map(str, before.get("depends_on") or ()), *job.inputs}
        if named != set(named_jobs(answer)):
            changed = self._acceptance.naming.named_now(job, answer)
            self._check_no_circle(changed)
            changes |= {key: getattr(changed, key) for key in ("depends_on", "inputs", "is_deferred")}
            changes |= {"error": None, "held_for": None}
        self._acceptance.check_against_others(replace(job, **changes))
        return changes

    def _check_no_circle(self, job: Job) -> None:
        ahead, seen = list(self._backlog.dependencies.of(job)), set[int]()
        while ahead:
            other = ahead.pop()
            if other.id == job.id:
                raise SpecError("depends_on: this job and one that it names would wait for each other")
            if other.id not in seen and (whole := self._spool.job(other.id)) is not None:
                seen.add(other.id)
                ahead += self._backlog.dependencies.of(whole)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if _stated(before.get(key)) != _stated(after.get(key))]


def _stated(value: Any) -> Any:
    """Return a value without keys that are not set: a key that a later version adds is no change."""
    if isinstance(value, Mapping):
        stated = {key: _stated(item) for key, item in value.items()}
        return {key: item for key, item in stated.items() if item is not None} or None
    return [_stated(item) for item in value] if isinstance(value, list | tuple) else value


def _check_kept(job: Job, before: Mapping[str, Any], answer: Passed) -> None:
    """Raise SpecError for a change of what a job keeps: its kind, its name, its sweep."""
    spec, again = answer.spec, f"honectl rerun {job.id} makes a new job of this one's file"
    if answer.members:
        raise SpecError(
            "sweep: a job that waits does not become a sweep", hint=f"{again}: --set 'sweep={{KEY: [1, 2]}}'"
        )
    if before and spec["kind"] != before["kind"]:
        raise SpecError(f"kind: stays {before['kind']} in an edit", hint="submit the other job, and cancel this one")
    if (spec.get("name") or job.name) != job.name:
        raise SpecError(f"name: stays {job.name} in an edit", hint=f"{again}: --name NAME")
    if _stated(spec.get("group")) != _stated(job.group):
        raise SpecError("group: honed writes it, and it stays in an edit", hint="leave it as it is")
    for key in _changed(before, spec) if job.attempts else ():
        if key not in ALWAYS:
            raise SpecError(
                f"{key}: the job has run before, and what it may resume from belongs to the present value",
                hint=f"{', '.join(ALWAYS)} can be edited; {again}",
            )
    for key in job.group["values"] if job.group else ():
        path = problem.as_path(key)
        if problem.at(spec, path) != problem.at(before, path):
            raise SpecError(f"{key}: its sweep sets it, so it stays in an edit", hint=again)
    for key in COMPARED if job.group and job.group.get("halving") else ():
        path = problem.as_path(key)
        if _stated(problem.at(spec, path)) != _stated(problem.at(before, path)):
            raise SpecError(f"{key}: its sweep compares the job with others by it, so it stays in an edit", hint=again)
