"""What values of a spec must say together. A rule names the keys it reads, and is silent where one is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from honed.problem import KeyPath, Problem, dotted, line_of
from honed.score import PREFIX

if TYPE_CHECKING:
    from honed.spec import DatasetSpec, JobSpec

#: Path of the key that is told, what is wrong, what to do.
Finding = tuple[KeyPath, str, str]


@dataclass(frozen=True)
class Rule:
    reads: tuple[KeyPath, ...]
    find: Callable[[JobSpec], Iterator[Finding]]


def problems(spec: JobSpec, lines: Mapping[KeyPath, int], *, except_of: Sequence[KeyPath]) -> list[Problem]:
    """What does not fit together, but for the rules that read one of the paths `except_of`."""
    rules = MERGE_RULES if spec.kind == "merge" else RULES
    kept = [rule for rule in rules if not any(_overlap(a, b) for a in rule.reads for b in except_of)]
    found = [finding for rule in kept for finding in rule.find(spec)]
    return [Problem(dotted(path), line_of(path, lines), message, hint) for path, message, hint in found]


def _overlap(read: KeyPath, refused: KeyPath) -> bool:
    return all(x in (y, ANY) for x, y in zip(read, refused, strict=False))


def _has_eval(spec: JobSpec) -> bool:
    return bool(spec.eval_datasets) or spec.eval_split is not None


_HOLD_OUT = "add eval_split: 0.05, or eval_datasets"
_EVALUATE = "set training.eval_strategy to steps or epoch"


def _datasets(spec: JobSpec) -> Iterator[Finding]:
    if not spec.datasets:
        yield ("datasets",), "missing: a job needs at least one data set", "datasets: [{path: /srv/data/rows.jsonl}]"


def _fractions(spec: JobSpec) -> Iterator[Finding]:
    sections: tuple[tuple[str, list[DatasetSpec]], ...] = (
        ("datasets", spec.datasets), ("eval_datasets", spec.eval_datasets),
    )  # fmt: skip
    for name, datasets in sections:
        bare = [index for index, dataset in enumerate(datasets) if dataset.fraction is None]
        if bare and len(bare) < len(datasets):
            yield (name, bare[0]), "fraction is missing here, others have one", "give it for all data sets or none"


def _held_out(spec: JobSpec) -> Iterator[Finding]:
    if spec.eval_split is not None and spec.eval_datasets:
        yield ("eval_split",), "eval_datasets are given too", "keep one of the two"


def _quantization(spec: JobSpec) -> Iterator[Finding]:
    if spec.quantization != "none" and spec.lora is None and spec.adapter is None:
        yield (
            ("quantization",), f"{spec.quantization} weights cannot be trained, only an adapter on them can",
            "add a lora: section, or write none",
        )  # fmt: skip


def _adapter(spec: JobSpec) -> Iterator[Finding]:
    if spec.lora is not None and spec.adapter is not None:
        yield ("lora",), "adapter is given too, and brings its own LoRA settings", "keep one of the two"


def _merged(spec: JobSpec) -> Iterator[Finding]:
    if spec.save_merged != "none" and spec.lora is None and spec.adapter is None:
        yield (
            ("save_merged",), "there is no adapter to merge: full fine-tuning writes a whole checkpoint anyway",
            "leave it out, or add a lora: section",
        )  # fmt: skip


def _evaluation(spec: JobSpec) -> Iterator[Finding]:
    if spec.training.eval_strategy != "no" and not _has_eval(spec):
        yield ("training", "eval_strategy"), "there is nothing to evaluate on", _HOLD_OUT


def _needs_evaluation(spec: JobSpec) -> Iterator[Finding]:
    if spec.eval_strategy != "no":
        return
    training = spec.training
    needy: tuple[tuple[KeyPath, bool], ...] = (
        (("early_stopping_patience",), spec.early_stopping_patience is not None),
        (("guard", "patience"), spec.guard is not None and spec.guard.patience is not None),
        (("training", "load_best_model_at_end"), training.load_best_model_at_end),
        (("training", "save_strategy"), training.save_strategy == "best"),
        (("training", "lr_scheduler_type"), training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")),
    )
    for path, is_set in needy:
        if is_set:
            yield (
                path,
                "needs evaluations during training",
                _EVALUATE if _has_eval(spec) else f"{_EVALUATE}, {_HOLD_OUT}",
            )


def _guard(spec: JobSpec) -> Iterator[Finding]:
    if spec.guard is not None and not _has_eval(spec):
        yield ("guard",), "there is nothing held out to measure on", _HOLD_OUT


def _best_prediction(spec: JobSpec) -> Iterator[Finding]:
    """A metric on predictions can choose the best checkpoint where each evaluation makes them."""
    name = (spec.training.metric_for_best_model or "").removeprefix("eval_")
    if not name.startswith(PREFIX):
        return
    path: KeyPath = ("training", "metric_for_best_model")
    if spec.predictions.prompts:
        yield path, "predictions.prompts have no ground truth to measure with", "leave prompts out, or name eval_loss"
    elif spec.predictions.sample_frequency != "eval":
        yield path, f"{name} is there only where each evaluation predicts", "write predictions.sample_frequency: eval"


def _truthless(spec: JobSpec) -> Iterator[Finding]:
    if spec.predictions.prompts and spec.predictions.metrics != "auto":
        yield (
            ("predictions", "metrics"), "predictions.prompts have no ground truth to measure with",
            "leave one of the two out",
        )  # fmt: skip


def _best(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if not training.load_best_model_at_end or spec.eval_strategy == "no" or training.save_strategy == "best":
        return
    path: KeyPath = ("training", "load_best_model_at_end")
    if training.save_strategy != spec.eval_strategy:
        yield (
            path, f"save_strategy is {training.save_strategy}, eval_strategy {spec.eval_strategy}",
            "make the two the same, or save_strategy: best",
        )  # fmt: skip
    elif training.save_strategy == "steps":
        evaluated = training.eval_steps or training.logging_steps
        if (training.save_steps < 1) != (evaluated < 1) or not _divides(evaluated, training.save_steps):
            yield path, f"save_steps {training.save_steps:g} is no multiple of eval_steps {evaluated:g}", "make it one"


def _divides(small: float, large: float) -> bool:
    ratio = large / small
    return abs(ratio - round(ratio)) < 1e-6


def _packing(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if training.packing and training.max_length is None:
        yield ("training", "packing"), "needs max_length: it is the length that is packed to", "set max_length"
    if training.padding_free and not training.packing and training.max_length is not None:
        yield (
            ("training", "padding_free"),
            "cannot cut at max_length without packing",
            "packing: true, or max_length: null",
        )


def _loaders(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if training.dataloader_num_workers:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(training, name):
            yield ("training", name), "needs dataloader_num_workers of at least 1", ""


def _liger(spec: JobSpec) -> Iterator[Finding]:
    if spec.training.use_liger_kernel and spec.training.loss_type == "chunked_nll":
        yield ("training", "loss_type"), "chunked_nll and use_liger_kernel exclude each other", "write nll"


def _smoothing(spec: JobSpec) -> Iterator[Finding]:
    if spec.training.label_smoothing_factor and spec.training.loss_type == "dft":
        yield ("training", "label_smoothing_factor"), "loss_type: dft smooths no labels", "keep one of the two"


def _schedule(spec: JobSpec) -> Iterator[Finding]:
    """transformers builds the schedule once the model is loaded; for some it drops in silence what it does not take."""
    name, given = spec.training.lr_scheduler_type, spec.training.lr_scheduler_kwargs or {}
    path: KeyPath = ("training", "lr_scheduler_kwargs")
    takes = SCHEDULE_KWARGS[name]
    if unknown := sorted(set(given) - takes):
        hint = f"it takes {', '.join(sorted(takes))}" if takes else "leave it out"
        yield path, f"{name} takes no {', '.join(unknown)}", hint
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        lowest = [key for key in ("min_lr", "min_lr_rate") if given.get(key) is not None]
        if len(lowest) != 1:
            yield path, f"{name} needs one of min_lr and min_lr_rate", "lr_scheduler_kwargs: {min_lr_rate: 0.1}"
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield path, f"{name} needs num_decay_steps", "lr_scheduler_kwargs: {num_decay_steps: 100}"


def _optimizer(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    is_low_rank = training.optim.startswith(("galore_", "apollo_"))
    if is_low_rank and not training.optim_target_modules:
        yield (
            ("training", "optim_target_modules"), f"missing: {training.optim} works on modules that are named",
            "optim_target_modules: all-linear",
        )  # fmt: skip
    if is_low_rank and training.optim.endswith("_layerwise") and training.gradient_accumulation_steps != 1:
        yield (
            ("training", "gradient_accumulation_steps"), f"{training.optim} steps at each backward pass",
            "leave it out, or take the optimizer without _layerwise",
        )  # fmt: skip
    if training.optim_args and any(each.count("=") != 1 for each in training.optim_args.split(",")):
        yield ("training", "optim_args"), f"{training.optim_args!r} is no list of key=value", "rank=64,scale=0.25"


def _media(spec: JobSpec) -> Iterator[Finding]:
    media = spec.media
    largest = min(media.max_pixels or math.inf, (media.max_image_size or math.inf) ** 2)
    if media.min_pixels is not None and media.min_pixels > largest:
        yield ("media", "min_pixels"), f"{media.min_pixels} is more than an image may have", "make it smaller"


def _adapted_parts(spec: JobSpec) -> Iterator[Finding]:
    lora = spec.lora
    if lora is not None and not (
        lora.finetune_language_layers
        or lora.finetune_vision_layers
        or lora.finetune_audio_layers
        or lora.finetune_projector
    ):
        yield ("lora", "finetune_language_layers"), "no part of the model gets an adapter", "set one of them to true"


def _notify(spec: JobSpec) -> Iterator[Finding]:
    if spec.notify is not None and spec.notify.webhook is None and spec.notify.mail is None:
        yield ("notify",), "says not whom to tell", "add webhook or mail"


def _merge_keys(spec: JobSpec) -> Iterator[Finding]:
    for key in sorted(spec.model_fields_set - MERGE_KEYS):
        if getattr(spec, key) != type(spec).model_fields[key].get_default(call_default_factory=True):
            yield (key,), "a merge has none: nothing is trained", "leave it out, or make it a job of its own"


def _merge_adapter(spec: JobSpec) -> Iterator[Finding]:
    if spec.adapter is None:
        yield ("adapter",), "missing: a merge needs the adapter that goes into base_model", "a directory, or job:NAME"


def _training(*names: str) -> tuple[KeyPath, ...]:
    return tuple(("training", name) for name in names)


#: What each schedule takes in `lr_scheduler_kwargs`; a test holds the list against transformers.
SCHEDULE_KWARGS: dict[str, frozenset[str]] = {
    "linear": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
    "inverse_sqrt": frozenset({"timescale"}),
    "reduce_lr_on_plateau": frozenset({
        "mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps",
    }),
    "cosine_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate"}),
    "cosine_warmup_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"}),
    "warmup_stable_decay": frozenset({
        "num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles",
    }),
    "greedy": frozenset({
        "mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "warmup", "min_lr", "max_lr", "eps",
        "verbose", "smooth", "window_size", "reset_start",
    }),
}  # fmt: skip

#: In what a rule reads: every item of a list.
ANY = "*"
_EVAL_KEYS: tuple[KeyPath, ...] = (("eval_split",), ("eval_datasets",))
RULES = (
    Rule((("datasets",), ("kind",)), _datasets),
    Rule((("datasets", ANY, "fraction"), ("eval_datasets", ANY, "fraction")), _fractions),
    Rule(_EVAL_KEYS, _held_out),
    Rule((("quantization",), ("lora",), ("adapter",)), _quantization),
    Rule((("lora",), ("adapter",)), _adapter),
    Rule((("save_merged",), ("lora",), ("adapter",)), _merged),
    Rule((*_EVAL_KEYS, *_training("eval_strategy")), _evaluation),
    Rule(
        (*_training("eval_strategy", "load_best_model_at_end", "save_strategy", "lr_scheduler_type"),
         ("early_stopping_patience",), ("guard",)),
        _needs_evaluation,
    ),
    Rule((*_training("metric_for_best_model"), ("predictions",)), _best_prediction),
    Rule((("predictions", "metrics"), ("predictions", "prompts")), _truthless),
    Rule((*_EVAL_KEYS, ("guard",)), _guard),
    Rule(
        _training(
            "load_best_model_at_end", "save_strategy", "eval_strategy", "save_steps", "eval_steps", "logging_steps"
        ),
        _best,
    ),
    Rule(_training("packing", "max_length", "padding_free"), _packing),
    Rule(
        _training("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"), _loaders
    ),
    Rule(_training("use_liger_kernel", "loss_type"), _liger),
    Rule(_training("label_smoothing_factor", "loss_type"), _smoothing),
    Rule(_training("lr_scheduler_type", "lr_scheduler_kwargs"), _schedule),
    Rule(_training("optim", "optim_target_modules", "optim_args", "gradient_accumulation_steps"), _optimizer),
    Rule((("media", "min_pixels"), ("media", "max_pixels"), ("media", "max_image_size")), _media),
    Rule((("lora",),), _adapted_parts),
    Rule((("notify",),), _notify),
)  # fmt: skip

#: What a merge takes; every other key speaks of training.
MERGE_KEYS = frozenset({
    "name", "kind", "priority", "base_model", "model_type", "revision", "trust_remote_code", "chat_template", "adapter",
    "dtype", "output_dir", "resources", "retry", "depends_on", "time_limit_sec", "notify",
    "pin",
})  # fmt: skip
MERGE_RULES = (
    Rule((("kind",),), _merge_keys),
    Rule((("adapter",), ("kind",)), _merge_adapter),
    Rule((("notify",),), _notify),
)
