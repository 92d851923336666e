"""Checkpoints that are whole: written beside their place, then sealed and renamed during the next steps. One is
restored only if every tensor is what was saved."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from honed.job import tree
from honed.job.event import EventWriter
from honed.system import durable
from honed.worker.assignment import Assignment
from honed.worker.model import adapter, generation
from honed.worker.model.audit import Auditor
from honed.worker.parallel import Ranks
from honed.worker.stop import Stop
from honed.worker.timelimit import TimeLimit
from honed.worker.train import checkpoint, optimizer, parts, weights
from honed.worker.train.callback import RunCallback, is_epoch_end
from honed.worker.train.checkpoint import Progress
from honed.worker.train.sealing import Sealing

#: Number of checkpoints that are kept, if the spec does not say.
SAVE_TOTAL_LIMIT = 2


class Saving(transformers.Trainer):
    """A trainer's checkpoints; the attributes are those of the trainer that it is a part of (durable.py)."""

    control: Any
    _assignment: Assignment
    _auditor: Auditor
    _basis: Any  #: of an adapter (basis.py)
    _callback: RunCallback
    _events: EventWriter
    _has_best: bool = False  #: the model is that of the best checkpoint
    _limit: TimeLimit
    _progress: Progress
    _ranks: Ranks
    _run_dir: Path | None  #: where a checkpoint is written
    _saved_step: int | None  #: of the last checkpoint in its place
    _sealing: Sealing
    _states: list[dict[str, Any]]  #: of every rank, for the checkpoint that is being written
    _stop: Stop

    @property
    def is_divided(self) -> bool:
        """True if every rank has a part of every weight."""
        return self._assignment.plan.parallel.mode == "fsdp"

    @property
    def _is_adapted(self) -> bool:
        return self._assignment.precision.adapter_dtype is not None

    @property
    def _is_compensated(self) -> bool:
        return self._assignment.precision.master_weights == "compensated"

    def save(self) -> None:
        """Save a checkpoint of the step just done, unless there is one, and wait until it is in place."""
        self.finish_save()
        step = self.state.global_step
        if self._ranks.broadcast(bool(step and self._saved_step != step)):
            self._save_checkpoint(self.model, None)
            self.finish_save()
        self._ranks.barrier()

    def finish_save(self) -> None:
        """Wait until the last checkpoint is in place. Raises the error for which it is not."""
        if (sealed := self._sealing.wait()) is not None:
            self._saved_step = sealed.step
            num_bytes = durable.num_bytes_below(sealed.path)
            self._events.emit("checkpoint", step=sealed.step, path=str(sealed.path), num_bytes=num_bytes)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place. It is sealed and renamed into place beside the next steps."""
        checkpoints_dir, step = self._assignment.layout.checkpoints_dir, self.state.global_step
        best = self.state.best_global_step
        if best and (best == step or (checkpoints_dir / f"checkpoint-{best}").is_dir()):
            self.state.best_model_checkpoint = str(checkpoints_dir / f"checkpoint-{best}")
        best_path = self.state.best_model_checkpoint
        self._run_dir = new_dir = self._run_dir or checkpoint.new_dir(checkpoints_dir)
        made = new_dir / f"checkpoint-{step}"
        try:
            with generation.savable(self.model), self._without_barrier():
                super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint != best_path:  # transformers takes the path of writing for its place
                self.state.best_model_checkpoint = best_path
                self.state.save_to_json(str(made / TRAINER_STATE_NAME))
            if self._basis is not None:
                self._basis.write(made, self.model)
            self._remember()
        except BaseException:
            tree.remove(new_dir)  # where the disk is full, the room is needed
            raise
        finally:
            self._run_dir = None
        limit = self._assignment.spec.training.as_kwargs().get("save_total_limit") or SAVE_TOTAL_LIMIT
        commit = functools.partial(
            checkpoint.commit,
            made,
            copy.deepcopy(self._progress),  # it goes on changing
            checkpoints_dir,
            limit=limit,
            keep=self._kept(),
        )
        self._sealing.start(step, lambda beat: commit(beat=beat))

    @contextlib.contextmanager
    def _without_barrier(self) -> Iterator[None]:
        """Have transformers write a checkpoint on rank 0 alone: it would wait for the others under this strategy."""
        strategy = self.args.save_strategy
        if self._ranks.are_several:
            self.args.save_strategy = SaveStrategy.NO
        try:
            yield
        finally:
            self.args.save_strategy = strategy

    def begin_parts(self) -> None:
        """Make the directory of a checkpoint to which every rank adds its part."""
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        self._run_dir = checkpoint.new_dir(checkpoints_dir)
        checkpoint.place_of_new(checkpoints_dir, self.state.global_step).mkdir()

    def write_part(self, made: Path) -> None:
        """Write this rank's part of a checkpoint."""
        parts.write(made, self.model, self.optimizer, self._ranks)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_divided:  # else the parts are there
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights of a checkpoint, and their digests."""
        made = Path(str(output_dir))
        if self._is_adapted:
            with adapter.without_card(self.model):
                super()._save(output_dir, state_dict)
            adapter.write_digests(self.model, made)
            return
        made.mkdir(parents=True, exist_ok=True)
        weights.write(made, self.model)
        for part in (self.model.config, self.model.generation_config, self.processing_class):
            if part is not None:
                part.save_pretrained(made)  # for whoever opens the checkpoint as a model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_divided:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/{SCHEDULER_NAME}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_divided or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            parts.load_optimizer(Path(checkpoint), self.optimizer, self._ranks)
            self.lr_scheduler.load_state_dict(torch.load(f"{checkpoint}/{SCHEDULER_NAME}", weights_only=True))

    def store_flos(self) -> None:
        if not self._ranks.are_several:
            super().store_flos()
            return
        num_flos: float = self.current_flos  # type: ignore[has-type]
        self.state.total_flos += num_flos * self._ranks.world  # without asking the others
        self.current_flos = 0

    def gather_states(self) -> None:
        """Take every rank's part of the next checkpoint, which rank 0 writes."""
        if self._ranks.are_several:
            self._states = self._ranks.gather({"random": _random_state(), "running_loss": float(self._tr_loss)})

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._ranks.are_several:
            super()._save_rng_state(output_dir)
        for rank, state in enumerate(self._states):
            torch.save(state["random"], f"{output_dir}/rng_state_{rank}.pth")

    def _remember(self) -> None:
        """Keep the state that transformers and TRL leave out of a checkpoint, or lose when they resume from it."""
        self._progress.num_ranks = self._ranks.world
        self._progress.is_divided = self.is_divided
        self._progress.running_losses = [state["running_loss"] for state in self._states]
        self._progress.elapsed_sec = self._limit.elapsed_sec()
        self._progress.has_ended = self.control.should_training_stop
        self._progress.is_epoch_end_due = self._callback.is_in_step and (
            self._progress.has_ended or is_epoch_end(self.state)
        )
        self._keep_figures()

    def _get_output_dir(self, trial: Any) -> str:
        """Return the directory for checkpoints: while one is written, the directory beside their place."""
        return str(self._run_dir) if self._run_dir is not None else str(super()._get_output_dir(trial))

    def _kept(self) -> set[Any]:
        if not self.args.load_best_model_at_end or self.state.best_model_checkpoint is None:
            return set()
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        return {checkpoints_dir / str(self.state.best_model_checkpoint).rsplit("/", 1)[-1]}

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a checkpoint needs no model card."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint: transformers would leave out what is named otherwise than in the model."""
        assert model is None or model is self.model
        self._restore(Path(resume_from_checkpoint), "resumed")

    def _restore(self, path: Path, when: str) -> None:
        """Load a checkpoint's weights, before an optimizer is made for them; audit and compare them."""
        if self.is_divided:
            parts.load_weights(path, self.model, self._ranks)
        elif self._is_adapted:
            adapter.load(self.model, path, hint=weights.hint(path))
        else:
            weights.load(path, self.model)
        if self._basis is not None:
            self._basis.restore(path, self.model)
        self._auditor.model(self.model, when)

    def _load_best_model(self) -> None:
        """Load the best checkpoint if it is whole: it may be older than those that a resume has checked."""
        self.finish_save()
        self._ranks.barrier()
        path = Path(str(self.state.best_model_checkpoint))
        if (why := checkpoint.read(path, beat=self._stop.beat)[1]) != "":
            self._events.log(
                "error",
                f"{path.name}, the best checkpoint, is damaged ({why}): using the model of the last step instead",
            )
            return
        self._restore(path, "restored")
        if self._is_compensated:
            optimizer.take_remainders(self.optimizer, path / "optimizer.pt")
        self._has_best = True

    def _keep_figures(self) -> None:
        self._progress.running_loss = float(self._tr_loss)
        self._progress.logged_step = self._globalstep_last_logged
        figures = self._metrics["train"].items()
        self._progress.running_figures = {name: [float(value) for value in values] for name, values in figures}

    def _restore_figures(self) -> None:
        """Take up the figures since the last log."""
        progress, rank = self._progress, self.args.process_index
        running_loss, losses = progress.running_loss, progress.running_losses
        if losses:  # their mean is what is logged
            running_loss = losses[rank] if len(losses) == self.args.world_size else sum(losses) / len(losses)
        self._tr_loss = torch.tensor(running_loss, device=self.args.device)
        self._globalstep_last_logged = progress.logged_step
        self._metrics["train"].update({name: list(values) for name, values in progress.running_figures.items()})


def _random_state() -> dict[str, Any]:
    """Return this process's random state, as transformers keeps it in a checkpoint of several."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})
