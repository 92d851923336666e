"""TRL's SFTTrainer, as honed's durable and watched trainer (durable.py, watched.py).

It is imported after the backend has imported its libraries: under Unsloth, SFTTrainer is Unsloth's.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import EarlyStoppingCallback
from trl import SFTConfig, SFTTrainer

from honed.worker.assignment import Assignment
from honed.worker.parallel import ALONE, Ranks
from honed.worker.rows import prefix
from honed.worker.rows.collator import AnswerCollator, Collator
from honed.worker.rows.data import Data
from honed.worker.train import arguments, share
from honed.worker.train.checkpoint import Progress
from honed.worker.train.durable import Durable
from honed.worker.train.evaluation import TokenMeans, by_length, kinds_by_length
from honed.worker.train.share import Shares
from honed.worker.train.watched import Watched

#: Arguments that Unsloth's SFTTrainer sets while it is built, and that nothing reads before an evaluation. With one of
#: the first two set, an evaluation outside of training casts the whole model, adapters too, for good.
_RESET_ARGS = ("bf16_full_eval", "fp16_full_eval", "per_device_eval_batch_size", "eval_accumulation_steps")


class _Before:
    """The values that SFTTrainer, or Unsloth's, changes while it is built."""

    def __init__(self, model: Any, args: SFTConfig) -> None:
        self._adapters = {name: weight.data for name, weight in model.named_parameters() if weight.requires_grad}
        self._arguments = {name: getattr(args, name) for name in _RESET_ARGS}

    def reset(self, trainer: Any) -> list[str]:
        """Restore arguments. Return what was done."""
        changed = {
            name: now for name, value in self._arguments.items() if (now := getattr(trainer.args, name)) != value
        }
        for name in changed:
            setattr(trainer.args, name, self._arguments[name])
        if changed.keys() & {"bf16_full_eval", "fp16_full_eval"} and not trainer.is_model_parallel:
            trainer._move_model_to_device(trainer.model, trainer.args.device)  # it was postponed under these flags
        return [f"the trainer had set {name} to {now}, now {self._arguments[name]}" for name, now in changed.items()]

    def restore(self, model: Any) -> list[str]:
        """Restore the values of adapters. Return what was done.

        SFTTrainer casts a quantized model's adapters to bfloat16, whatever is planned; casting back would leave them
        rounded.
        """
        num_cast = 0
        for name, parameter in model.named_parameters():
            if name in self._adapters and parameter.dtype != self._adapters[name].dtype:
                parameter.data = self._adapters[name].to(parameter.device)
                num_cast += 1
        return [f"SFTTrainer had cast {num_cast} adapter weights to another dtype; restored"] if num_cast else []


class Trainer(Durable, SFTTrainer):
    """One attempt's trainer, before it is watched."""

    def __init__(
        self,
        *,
        assignment: Assignment,
        data: Data,
        loaded: Any,
        args: SFTConfig,
        progress: Progress,
        ranks: Ranks = ALONE,
        **parts: Any,
    ) -> None:
        events, callback = parts["events"], parts["callback"]
        self._shares = Shares(ranks)
        kinds = kinds_by_length(data, args)
        if kinds is None and data.groups is not None and data.groups.names:
            events.log(
                "info", "rows that are packed or shuffled have no evaluation loss by data set and tag, only scores"
            )
        patience = assignment.spec.early_stopping_patience
        before = _Before(loaded.model, args)
        super().__init__(
            assignment=assignment,
            # Its tokenizer, not the processor: TRL's own support for images makes another mask.
            loaded=loaded,
            args=args,
            progress=progress,
            ranks=ranks,
            means=TokenMeans(kinds, ranks),
            train_dataset=data.train.dataset,
            eval_dataset=_held_out(data, args),
            data_collator=_collator(assignment, data, loaded.tokenizer, args),
            callbacks=[callback, *([EarlyStoppingCallback(patience)] if patience is not None else [])],
            **parts,
        )
        self.mended = [*before.reset(self), *before.restore(self.model)]
        if args.router_aux_loss_coef is not None:
            share.set_coefficient(self.model, args.router_aux_loss_coef)
        for text in arguments.changed(assignment, self.args):
            events.log("warning", text)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._progress.num_trained_tokens += self._shares.begin(batches)
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        return prefix.trained(self.model, super()._prepare_inputs(inputs))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._shares.next()
        return self._shares.reported(super().training_step(*args, **kwargs))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a batch; in training it counts by its share of the step."""
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        shares, metrics = self._shares, self._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        shares.weigh(metrics, lengths)
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func):  # the mean over the batch's own tokens
            factor = shares.weight(0)
            loss = loss * factor
        else:
            factor = shares.num_batches * (self._ranks.world if self.args.average_tokens_across_devices else 1)
        balance: Any = getattr(outputs, "aux_loss", None)
        if torch.is_tensor(balance) and balance.requires_grad:
            shares.weigh_balance(balance, shares.weight(1) / factor if factor else 0.0, self.accelerator.scaler)
        return (loss, outputs) if return_outputs else loss

    def _keep_figures(self) -> None:
        super()._keep_figures()
        self._progress.num_seen_tokens = int(self._total_train_tokens)

    def _restore_figures(self) -> None:
        super()._restore_figures()
        self._total_train_tokens = self._progress.num_seen_tokens


class WatchedTrainer(Watched, Trainer):
    """One attempt's trainer."""


def _held_out(data: Data, args: SFTConfig) -> Any:
    if data.held_out is None:
        return None
    return by_length(data.held_out, args)


def _collator(assignment: Assignment, data: Data, tokenizer: Any, args: SFTConfig) -> Any:
    """Return honed's collator for rows with media or with several answers, and None, for TRL's own, for other rows."""
    if data.num_answers > 1:
        return AnswerCollator(pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=args.pad_to_multiple_of)
    if data.media is None:
        return None
    return Collator(
        data.media.processor,
        data.media.sources,
        dtype=assignment.precision.load_dtype,
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=args.pad_to_multiple_of,
    )
