"""The trainer with checks for what ends runs (divergence, a full disk), and with its phases reported to the pulse."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch

from honed.job import tree
from honed.system.error import said
from honed.worker.train import checkpoint, disk_reserve, divergence
from honed.worker.train.callback import is_epoch_end
from honed.worker.train.divergence import Divergence
from honed.worker.train.durable import Durable


class Watched(Durable):
    """A durable trainer that never saves a checkpoint of a run that may be lost, nor of weights that are."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        assignment = self._assignment
        model_type = str(getattr(self.model.config, "model_type", ""))
        vocab_size = int(self.model.get_input_embeddings().weight.shape[0])  # also with an adapter on them
        suspect = divergence.suspicion(assignment.precision, model_type)
        self._divergence = Divergence(
            assignment.spec.divergence, self._progress.divergence, suspect, vocab_size=vocab_size
        )
        self._losses: list[Any] = []  #: of the step's batches
        self._looked_step = -1
        self._is_save_withheld = False
        self._needed_bytes = 0  #: for the next checkpoint
        self._is_short = False  #: the last checkpoint found no room
        self._write_sec = 0.0  #: that the last checkpoint's writing took
        is_divided = any(
            "training.gradient_accumulation_steps" in adjustment.changes for adjustment in assignment.adjustments
        )
        if is_divided and not self.model_accepts_loss_kwargs:
            self._warn(
                f"{model_type} averages its loss per batch: the parts of a divided batch count the same, regardless "
                "of their number of tokens"
            )

    # --- divergence -------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        lost = None
        # This is called at the end of an epoch, too, and once more there by a run that resumes from it.
        if self._losses and self._looked_step != self.state.global_step:
            self._looked_step = self.state.global_step
            loss, self._losses = self._ranks.sum(float(sum(self._losses)))[0] / self._ranks.world, []
            norm = None if grad_norm is None else float(grad_norm)
            was_skipped = bool(self.accelerator.optimizer_step_was_skipped)
            lost = self._divergence.look(self.state.global_step, loss, norm, was_skipped=was_skipped)
        has_failed = any(self._ranks.agree(self._sealing.has_failed))
        if has_failed and not (self._callback.is_in_step and is_epoch_end(self.state)):
            self.control.should_save = True  # the next one takes its place, or its error ends the run
        self._withhold()
        if lost is not None:
            self.control.should_log, self.control.should_evaluate = True, False
        is_logged = self.control.should_log
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)
        if is_logged and not torch.isfinite(self._tr_loss):
            self._tr_loss.zero_()  # transformers subtracts it from itself, which leaves NaN for the rest of the run
        if lost is not None:
            raise lost

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._ranks.num_calls += 1  # its backward pass adds up the gradients of all
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _withhold(self) -> None:
        """Postpone a checkpoint while the run may be lost, until it is known to be well."""
        if self._divergence.is_suspicious:
            self._is_save_withheld = self._is_save_withheld or self.control.should_save
            self.control.should_save = False
        elif self._is_save_withheld:
            self._is_save_withheld, self.control.should_save = False, True

    def check_weights(self) -> None:
        """Raise DivergedError if a trained weight is not a number, PrecisionError if one was cast."""
        self._auditor.unchanged(self.model)
        own = divergence.not_finite(self.model.named_parameters())
        if names := sorted({name for names in self._ranks.gather(own) for name in names}) if self.is_divided else own:
            raise self._divergence.lost_weights(names, self.state.global_step)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> None:
        if self._divergence.is_suspicious:
            self.finish_save()
            return  # the last checkpoint is better
        if self._stop.left_sec is not None and self._sealing.step not in {None, self.state.global_step}:
            # This step's checkpoint needs its own time; an earlier one is given up rather than this one.
            with self._stop.phase("seal"):
                self._sealing.hurry(self._stop.left_sec - self._write_sec)
        super().save()

    def finish_save(self) -> None:
        """Wait until the last checkpoint is in place; if it found no room, save this step's in its stead.

        A run that may be lost is left without, unless this step is the best, whose checkpoint nothing postpones.
        """
        if not self._sealing.is_idle:
            with self._stop.phase("save"):
                if self._ranks.are_several:
                    super().finish_save()  # another would need a part of every rank
                    return
                while not self._could_save() and (self._is_best or not self._divergence.is_suspicious):
                    self.check_weights()
                    self._write(self.model, None)

    def finish_after_error(self) -> None:
        """Wait for the last checkpoint at the end of a run that another error has ended: this one is only logged."""
        if self._sealing.is_idle:
            return
        self._wait_for_seal()
        try:
            super().finish_save()
        except Exception as problem:  # noqa: BLE001 - the other error is raised
            self._warn(f"the last checkpoint could not be written: {said(problem)}")

    def _wait_for_seal(self) -> None:
        """Wait for the last checkpoint, in a phase whose rhythm is the disk's and not that of writing."""
        if not self._sealing.is_idle and not self._sealing.has_ended:
            with self._stop.phase("seal"):
                self._sealing.join()

    def _could_save(self) -> bool:
        """Wait for the last checkpoint. Return False if it found no room; then there is room now."""
        self._wait_for_seal()
        try:
            super().finish_save()
        except Exception as problem:  # noqa: BLE001 - raised again unless room helps
            self._make_room(problem)
            return False
        self._is_short = False
        return True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.check_weights()
        with self._stop.phase("save"):
            self.gather_states()
            if self.is_divided:
                self._save_parts(model, trial)
            elif self._ranks.is_zero:
                self._could_save()
                began = time.monotonic()
                self._write(model, trial)
                self._write_sec = time.monotonic() - began
                while self._is_best and not self._could_save():  # no later step can stand in for the best one
                    self._write(model, trial)
            self.state.best_model_checkpoint = self._ranks.broadcast(self.state.best_model_checkpoint)

    def _save_parts(self, model: Any, trial: Any) -> None:
        """Write a checkpoint of which every rank has a part: all begin again while one finds no room for its own.

        Raises DiskShortError on all ranks, with none of it left.
        """
        began = time.monotonic()
        made = checkpoint.place_of_new(self._assignment.layout.checkpoints_dir, self.state.global_step)

        def begin() -> None:
            self._could_save()
            self._reserve()
            self.begin_parts()

        def end() -> Exception | None:
            try:
                super(Watched, self)._save_checkpoint(model, trial)
            except (OSError, RuntimeError) as problem:  # torch.save reports only that it failed
                return problem
            return None

        while True:
            self._ranks.by_zero(begin)
            problem: Exception | None = None
            try:
                self.write_part(made)
            except (OSError, RuntimeError) as failed:
                problem = failed
            problems = [item for item in self._ranks.gather(problem) if item is not None]
            if not problems and (failed_on_zero := self._ranks.by_zero(end)) is not None:
                problems = [failed_on_zero]
            if problems:
                self._ranks.by_zero(functools.partial(self._give_up_parts, made, problems[0]))
            elif not self._is_best or self._ranks.by_zero(
                self._could_save
            ):  # no later step can stand in for the best one
                break
        self._write_sec = time.monotonic() - began

    def _give_up_parts(self, made: Path, problem: Exception) -> None:
        self._run_dir = None
        tree.remove(made.parent)
        self._make_room(problem)

    @property
    def _is_best(self) -> bool:
        """True if the run ends with the best checkpoint, and that is this step's."""
        return bool(self.args.load_best_model_at_end and self.state.best_global_step == self.state.global_step)

    def _needed(self) -> set[Path]:
        """Return the checkpoints that may not be removed to make room: until another is in place, a resume begins with
        the newest one and ends with the one that was the best then."""
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        earlier = checkpoint.best_of_newest(checkpoints_dir) if self.args.load_best_model_at_end else None
        return {*self._kept(), *([earlier] if earlier is not None else [])}

    def _write(self, model: Any, trial: Any) -> None:
        """Write a checkpoint; remove older ones if there is no room. Raises DiskShortError, with none of it left."""
        self._reserve()
        while True:
            try:
                return super()._save_checkpoint(model, trial)
            except Exception as problem:  # noqa: BLE001 - raised again unless room helps
                self._make_room(problem)

    def _reserve(self) -> None:
        """Ensure that there is room for a checkpoint, by removing older ones. Raises DiskShortError."""
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        is_whole = self._assignment.precision.adapter_dtype is None
        written = disk_reserve.written_bytes(self.model, self.optimizer, is_whole=is_whole)
        self._needed_bytes = disk_reserve.needed_bytes(checkpoints_dir, written)
        disk_reserve.make(checkpoints_dir, self._needed_bytes, keep=self._needed(), log=self._warn)

    def _make_room(self, problem: Exception) -> None:
        """Make room after a checkpoint found none; raise any other problem, and DiskShortError if there is none.

        One that finds none right after it ends the run.
        """
        checkpoints_dir = self._assignment.layout.checkpoints_dir
        # torch.save reports only that it failed.
        left = disk_reserve.free_bytes(checkpoints_dir)
        is_full = isinstance(problem, RuntimeError) and left < max(self._needed_bytes, disk_reserve.SPARE_BYTES)
        if not (is_full or disk_reserve.is_no_room(problem)):
            raise problem
        self._warn(f"a checkpoint could not be written: {problem}")
        # Others write there, too, or the checkpoint is larger than the last one.
        num_bytes = max(self._needed_bytes, disk_reserve.free_bytes(checkpoints_dir)) + disk_reserve.SPARE_BYTES
        if self._is_short:
            raise disk_reserve.short(checkpoints_dir, num_bytes) from problem
        self._is_short = True
        disk_reserve.make(checkpoints_dir, num_bytes, keep=self._needed(), log=self._warn)

    def _warn(self, text: str) -> None:
        self._events.log("warning", text)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._stop.phase("evaluate"):
            return super()._evaluate(*args, **kwargs)
