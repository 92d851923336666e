"""The arguments of a trainer: the job's keys override honed's defaults and TRL's; the plan's decisions override all.

It is imported after the backend has imported its libraries: under Unsloth, SFTConfig is Unsloth's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from trl import SFTConfig

from honed.spec.training import TrainingSpec
from honed.system import manual
from honed.system.error import SpecError, said
from honed.worker.assignment import Assignment

#: Keys of a spec that may end up different: the first is set by honed, and so is the second in a resumed run;
#: transformers has another name for the third.
_RENAMED_KEYS = ("save_total_limit", "eval_on_start", "include_num_input_tokens_seen")
#: TRL's changes to a data set before training that would separate rows from their media, or answers from their row.
_NOT_WITH_PADDING = ("packing", "padding_free", "shuffle_dataset")


def arguments(
    assignment: Assignment,
    *,
    has_eval: bool,
    padded: str = "",
    is_resumed: bool = False,
    loss_type: str | None = None,
) -> SFTConfig:
    """Return the SFTConfig: the user's keys override honed's defaults and TRL's, and the plan's decisions override all.

    `padded` names what the rows have for which honed's own collator batches them; `loss_type` is the one with which a
    resumed run was begun.
    """
    spec, precision = assignment.spec, assignment.precision
    asked = spec.training.as_kwargs()
    defaults: dict[str, Any] = {"logging_steps": 1}  # every step is an event
    if has_eval:
        defaults["eval_strategy"] = spec.eval_strategy
        defaults["eval_on_start"] = spec.eval_strategy != "no"  # the baseline
    if not torch.cuda.is_available():
        defaults["dataloader_pin_memory"] = False
    if (loss_type := _loss_type(assignment, pinned=loss_type)) is not None:
        defaults["loss_type"] = loss_type
    if spec.early_stopping_patience is not None:
        # It goes by the best evaluation, and restores its checkpoint.
        defaults |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        defaults |= _saved_as_evaluated(defaults | asked)
    elif spec.training.load_best_model_at_end and not {"save_strategy", "save_steps"} & set(asked):
        defaults |= _saved_as_evaluated(defaults | asked)
    needs_preparing = asked.get("packing") or asked.get("shuffle_dataset") or asked.get("use_liger_kernel")
    if padded and (unfit := [name for name in _NOT_WITH_PADDING if asked.get(name)]):
        raise SpecError(
            f"training.{unfit[0]}: not supported for rows with {padded}",
            hint="such rows are padded, one per line of the batch; remove the key",
        )
    fixed: dict[str, Any] = {
        "output_dir": str(assignment.layout.checkpoints_dir),
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "use_cpu": not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        "report_to": spec.report_to or "none",
        "run_name": assignment.name,
        "disable_tqdm": True,
        **({"optim": precision.optim} if precision.optim is not None else {}),
        "save_total_limit": None,  # honed removes them: see checkpoint.rotate
        "logging_nan_inf_filter": False,  # or a loss that is not a number would be shown as the one before it
        "restore_callback_states_from_checkpoint": True,
        "dataset_kwargs": None if needs_preparing and not padded else {"skip_prepare_dataset": True},
    }
    fixed |= _batch(assignment)
    if is_resumed:
        fixed["eval_on_start"] = False  # the run began in an earlier attempt
    if padded:
        fixed["remove_unused_columns"] = False  # our collator reads more than a model does
    if "max_seq_length" in (field.name for field in dataclasses.fields(SFTConfig)):
        # Unsloth's own key; without it, Unsloth takes a max_length equal to TRL's default for one that nobody has set.
        fixed["max_seq_length"] = spec.training.max_length
    if not has_eval and (defaults | asked).get("eval_strategy", "no") != "no":
        raise SpecError(
            "training.eval_strategy: there is nothing to evaluate on", hint="set eval_split or eval_datasets"
        )
    try:
        made = SFTConfig(**{**_promised(), **defaults, **asked, **fixed})
    except (TypeError, ValueError) as error:
        raise SpecError(f"training: {said(error)}", hint=manual.all_keys("honed-job.5")) from error
    if made.world_size > 1 and made.device.type == "cpu":
        vars(made)["_setup_devices"] = torch.device("cpu")  # of several ranks it has a number, which torch.load rejects
    return made


def _batch(assignment: Assignment) -> dict[str, int]:
    """Return the batch of one rank and its accumulation, where the plan divides the job's effective batch.

    A batch that was made smaller for lack of memory is divided anew, so that the effective one stays.
    """
    planned = assignment.plan.parallel
    if planned.num_ranks == 1 or planned.effective_batch is None or planned.per_device_train_batch_size is None:
        return {}
    size = planned.per_device_train_batch_size
    if any("training.per_device_train_batch_size" in adjustment.changes for adjustment in assignment.adjustments):
        size = min(size, assignment.spec.training.per_device_train_batch_size)
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": max(1, planned.effective_batch // (size * planned.num_ranks)),
    }


def _loss_type(assignment: Assignment, *, pinned: str | None) -> str | None:
    """Return the plan's loss; a resumed run keeps the one with which it was begun. None: the backend's own."""
    has_gpu = torch.cuda.is_available()
    if pinned is not None and (has_gpu or pinned != "chunked_nll"):
        return pinned
    planned = assignment.plan.loss.type
    return planned if planned is not None or has_gpu else "nll"


def _promised() -> dict[str, Any]:
    """Return every default by name: those of docs/job-spec.md, and TRL's own for the rest.

    Unsloth replaces TRL's SFTConfig by a subclass with other defaults: of learning rate, batch, optimizer, seed.
    """
    own = next(item for item in reversed(SFTConfig.__mro__) if item.__name__ == SFTConfig.__name__)
    fields = {field.name: field.default for field in dataclasses.fields(own) if field.init}
    fields |= {name: info.default for name, info in TrainingSpec.model_fields.items() if name in fields}
    # The type of the loss is left to the backend: Unsloth has kernels of its own.
    return {
        name: default for name, default in fields.items() if name != "loss_type" and default is not dataclasses.MISSING
    }


def _saved_as_evaluated(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a checkpoint with every evaluation, so that the best can be restored."""
    steps = {"save_steps": chosen["eval_steps"]} if chosen.get("eval_steps") is not None else {}
    return {"save_strategy": chosen.get("eval_strategy", "no"), **steps}


def changed(assignment: Assignment, args: SFTConfig) -> Iterator[str]:
    """Yield a warning for every key of the job that the backend changes: its own log mentions them at most."""
    for name, asked in assignment.spec.training.as_kwargs().items():
        value = getattr(args, name)
        if name in _batch(assignment):  # the plan has reported it
            continue
        if name not in _RENAMED_KEYS and isinstance(asked, bool | int | float | str) and value != asked:
            yield f"training.{name}: the job sets {asked}, but {assignment.backend} changes it to {value}"


def optimizer_of(args: SFTConfig) -> str:
    """Return the optimizer's name as in training.optim."""
    return str(getattr(args.optim, "value", args.optim))
