"""The first stages of a run on rows: the checkpoint of an earlier attempt, the libraries, and the rows."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from honed.inputs import basemodel
from honed.job.event import has_begun
from honed.plan import parallel as division_plan
from honed.plan import position
from honed.system import durable
from honed.system.error import SpecError
from honed.text.chat import ChatFormat
from honed.worker import imports
from honed.worker.assignment import Assignment
from honed.worker.gate import read_ahead
from honed.worker.model import load
from honed.worker.model.config import load_config
from honed.worker.recipe.base import Run, versions
from honed.worker.train import checkpoint, tracker

if TYPE_CHECKING:
    from honed.worker.rows.data import Data

#: The form of a checkpoint, by its `is_divided`.
_DIVISION = {True: "in parts, with parallel: fsdp", False: "whole, without fsdp"}


@dataclass(frozen=True)
class Start:
    """What a run begins with."""

    job: Assignment
    resumed: checkpoint.Checkpoint | None
    progress: checkpoint.Progress
    backend: load.Backend

    @property
    def is_divided(self) -> bool:
        """True if the model is divided between the devices."""
        return self.job.plan.parallel.mode == "fsdp"


@dataclass(frozen=True)
class Rows:
    """The rows, and the format in which they were encoded."""

    chat: ChatFormat
    data: Data


def begin(run: Run, job: Assignment, attempt: int) -> Start:
    """Look for the checkpoint of an earlier attempt, then import the libraries, in the order that the backend needs."""
    run.events.emit("started", pid=os.getpid(), versions=versions(job.backend), backend=job.backend)
    if job.adjustments:
        run.events.emit("adjusted", steps=[asdict(step) for step in job.adjustments])
    run.stage("prepare")
    run.ranks.join()
    job.layout.checkpoints_dir.mkdir(exist_ok=True)  # its mode is the umask's: honed may be in our group
    durable.sync_dir(job.layout.dir)
    start = _resumed(run, job, attempt)
    job.check_inputs()
    if run.gate.is_closed:
        run.gate.watch(job.files())
    tracker.prepare(job)
    _import(run, start)
    return start


def _resumed(run: Run, job: Assignment, attempt: int) -> Start:
    """Find the checkpoint to resume from, and say what it means for the run."""
    ranks = run.ranks
    resumed, set_aside = ranks.by_zero(lambda: checkpoint.find(job.layout.checkpoints_dir, beat=run.stop.check))
    if resumed and not ranks.is_zero:  # no path is taken from the network
        resumed = replace(resumed, path=job.layout.checkpoints_dir / f"checkpoint-{int(resumed.step)}")
    for item in set_aside:
        run.warn(f"{item.name} is damaged ({item.why}) and was renamed to {item.path.name}")
    if set_aside and resumed is None:
        run.log("error", "all checkpoints of this job are damaged: it starts from the beginning")
    if resumed is None and any(has_begun(job.layout.attempt(number).events_path) for number in range(1, attempt)):
        run.events.emit("started_over", reason="damaged" if set_aside else "no checkpoint")
    progress = resumed.progress if resumed else checkpoint.Progress()
    start = Start(job, resumed, progress, load.choose(job.backend))
    if resumed and progress.num_ranks != ranks.world:
        run.warn(
            f"the checkpoint is of {progress.num_ranks} processes, and the run continues with {ranks.world}: its "
            "figures will not be bit-identical, because the random numbers of each process differ"
        )
    if resumed and progress.is_divided != start.is_divided:
        raise SpecError(
            f"{resumed.path.name} was written {_DIVISION[progress.is_divided]}, but the job is now planned "
            f"{_DIVISION[start.is_divided]}",
            hint=f"set parallel: {'fsdp' if progress.is_divided else 'ddp'} and the number of GPUs as before, or "
            "submit the job again",
        )
    return start


def _import(run: Run, start: Start) -> None:
    job = start.job
    if run.gate.is_closed:
        read_ahead(job.base_model_path)
        if job.backend == "unsloth":
            import torch  # noqa: F401 - all of the stack that may be imported before Unsloth

            run.pass_gate()
            run.stage("prepare")  # its turn has come
    with imports.quick():
        start.backend.import_libraries()
        if not (run.gate.is_closed and imports.asks_device(job)):
            import honed.worker.train.trainer  # noqa: F401 - TRL and peft
    if not run.gate.is_closed:
        run.load_metrics(job)


def read_rows(run: Run, start: Start) -> Rows:
    """Encode the rows, and wait for the device if its turn has not come."""
    run.stage("data")
    from honed.worker.rows import data as datas

    job, spec, progress = start.job, start.job.spec, start.progress
    tokenizer = load.load_tokenizer(job, warn=run.warn)
    chat = ChatFormat.of(spec, tokenizer, date=job.date)
    data = run.ranks.in_turn(
        lambda: datas.build(
            job,
            chat,
            run.stop,
            lambda: load.load_processor(job, tokenizer),
            warn=run.warn,
            is_ahead=run.gate.is_closed,
        )
    )
    if start.resumed and progress.data_hashes not in ({}, data.hashes):
        run.warn("the data files changed after the checkpoint: the run continues with their current content")
    progress.data_hashes = data.hashes
    run.events.emit("data", **data.counts)
    run.events.emit("rows", entries=data.entries, shared=data.shared_entries)
    for text in data.messages():
        run.warn(text)
    if "messages" in data.train.kinds:
        if spec.training.eos_token is not None:
            chat.require_end(spec.training.eos_token)
        for level, text in chat.advice.notes(data.train.examples, basemodel.end_ids(job.base_model_path)):
            run.log("info" if level == "hint" else level, text)
    if start.is_divided and data.media is not None:  # not every row was inspected before
        words = f"parallel: fsdp: {division_plan.WITH_MEDIA}"
        raise SpecError(words, hint="write parallel: ddp", fix={"parallel": "ddp"})
    config = load_config(job)
    position.check_rows(spec, config.model_type, config.to_dict(), data.longest)
    if run.gate.is_closed:
        run.pass_gate()
        run.stage("load")
        job.check_inputs()
        run.load_metrics(job)
    else:
        run.stage("load")
    return Rows(chat, data)
