"""Rules about combinations of a spec's values. A rule lists the keys that it reads; it is skipped if one is invalid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from honed.spec import export, kind
from honed.spec.metric_names import BUILT_IN, PREFIX, known
from honed.spec.optimizer import ADAMW_8BIT, COMPENSATED, DIVIDABLE, asked_optim
from honed.spec.problem import KeyPath, Problem, dotted, fix_lines, line_of, shown
from honed.system import quote
from honed.system.error import Fix

if TYPE_CHECKING:
    from honed.spec.spec import DatasetSpec, JobSpec

#: Path of the reported key, the problem, the hint; and the fix as data, if it is an edit (HonedError.fix).
Finding = tuple[KeyPath, str, str] | tuple[KeyPath, str, str, Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    reads: tuple[KeyPath, ...]
    find: Callable[[JobSpec], Iterator[Finding]]


def problems(spec: JobSpec, lines: Mapping[KeyPath, int], *, except_of: Sequence[KeyPath]) -> list[Problem]:
    """Return the conflicts in a spec, skipping the rules that read one of the paths in `except_of`."""
    of_kind = kind.of(spec)
    rules = RULES if of_kind.trains else EVALUATION_RULES if of_kind.has_rows else MERGE_RULES
    heads = {read[0] for rule in rules for read in rule.reads}
    except_of = [path for path in except_of if not path or path[0] in heads]  # unknown keys concern no rule
    kept = [rule for rule in rules if not any(_overlap(a, b) for a in rule.reads for b in except_of)]
    findings = [finding for rule in kept for finding in rule.find(spec)]
    return [Problem(dotted(path), line_of(path, lines), *words) for path, *words in findings]


def _overlap(read: KeyPath, refused: KeyPath) -> bool:
    return all(x in (y, ANY) for x, y in zip(read, refused, strict=False))


def _has_eval(spec: JobSpec) -> bool:
    return bool(spec.eval_datasets) or spec.eval_split is not None


def _clash(is_so: Callable[[JobSpec], object], finding: Finding) -> Callable[[JobSpec], Iterator[Finding]]:
    """Return the search for a conflict that has the same words of every spec."""
    return lambda spec: iter([finding] if is_so(spec) else [])


_HOLD_OUT = "add eval_split: 0.05, or eval_datasets"


_datasets = _clash(
    lambda spec: not spec.datasets,
    (("datasets",), "missing: a job needs at least one data set", "datasets: [{path: /srv/data/rows.jsonl}]"),
)


def _fractions(spec: JobSpec) -> Iterator[Finding]:
    sections: tuple[tuple[str, list[DatasetSpec]], ...] = (
        ("datasets", spec.datasets),
        ("eval_datasets", spec.eval_datasets),
    )
    for name, datasets in sections:
        bare = [index for index, dataset in enumerate(datasets) if dataset.fraction is None]
        if bare and len(bare) < len(datasets):
            yield (
                (name, bare[0]),
                "this data set has no fraction, but others have",
                "set it for all data sets or for none",
            )


def _formats(spec: JobSpec) -> Iterator[Finding]:
    formats = kind.of(spec).formats
    for section, datasets in (("datasets", spec.datasets), ("eval_datasets", spec.eval_datasets)):
        for index, dataset in enumerate(datasets):
            if dataset.format not in ("auto", *formats):
                why = f"{dataset.format} rows are not for kind: {spec.kind}"
                yield (section, index, "format"), why, f"write auto, or one of {', '.join(formats)}"


def _of_hub(spec: JobSpec) -> Iterator[Finding]:
    for section, datasets in (("datasets", spec.datasets), ("eval_datasets", spec.eval_datasets)):
        for index, dataset in enumerate(datasets):
            for key in ("name", "revision"):
                if getattr(dataset, key) is not None and not dataset.is_of_hub:
                    instead = ", or set the path of the directory, or `split`" if key == "name" else ""
                    yield (
                        (section, index, key),
                        f"is only for data sets from the hub, but path is {shown(dataset.path)}",
                        f"remove it{instead}",
                    )


_held_out = _clash(
    lambda spec: spec.eval_split is not None and spec.eval_datasets,
    (
        ("eval_split",),
        "eval_datasets is also set",
        "remove eval_split to evaluate only on eval_datasets, or remove eval_datasets",
        {"eval_split": None},
    ),
)


def _quantization(spec: JobSpec) -> Iterator[Finding]:
    if spec.quantization != "none" and spec.lora is None and spec.adapter is None:
        yield (
            ("quantization",),
            f"{spec.quantization} weights cannot be trained; only an adapter can be trained on them",
            "add a lora: section, or write none",
            {"lora": {}},
        )


_adapter = _clash(
    lambda spec: spec.lora is not None and spec.adapter is not None,
    (
        ("lora",),
        "adapter is also set, and has its own LoRA settings",
        "remove lora to continue training the adapter, or remove adapter to train a new one",
        {"lora": None},
    ),
)


def _exports(spec: JobSpec) -> Iterator[Finding]:
    for item in export.asked(spec):
        if item.adapter_reason and spec.lora is None and spec.adapter is None:
            yield (item.key,), item.adapter_reason, "remove it, or add a lora: section", {item.key: None}


_adapter_dtype = _clash(
    lambda spec: spec.adapter_dtype != "auto" and spec.lora is None and spec.adapter is None,
    (
        ("adapter_dtype",),
        "there is no adapter: full fine-tuning trains the weights themselves",
        "remove it, or add a lora: section",
        {"adapter_dtype": None},
    ),
)


def _train_parts(spec: JobSpec) -> Iterator[Finding]:
    if spec.train_parts != ["language"] and (spec.lora is not None or spec.adapter is not None):
        chosen: Fix = {}
        if spec.lora is not None and spec.adapter is None:
            keys = {
                part: f"lora.finetune_{part}" + ("" if part == "projector" else "_layers") for part in spec.train_parts
            }
            chosen = {key: True for part, key in keys.items() if part != "language"}
            chosen |= {} if "language" in keys else {"lora.finetune_language_layers": False}
        yield (
            ("train_parts",),
            "is only for full fine-tuning: with an adapter the model itself stays frozen",
            "remove it; lora.finetune_vision_layers, finetune_audio_layers and finetune_projector select the parts "
            "that get an adapter",
            {"train_parts": None, **chosen},
        )


def _kept_weights(spec: JobSpec) -> Iterator[Finding]:
    """Check how full fine-tuning stores its weights in memory and in checkpoints."""
    if spec.lora is not None or spec.adapter is not None:
        for key, value in (("master_weights", spec.master_weights), ("save_dtype", spec.save_dtype)):
            if value != "auto":
                why = "is only for full fine-tuning: with an adapter the base stays frozen"
                yield (key,), why, "remove it; see adapter_dtype", {key: None}
        return
    if spec.master_weights in ("compensated", "none") and spec.dtype in ("float32", "float16"):
        why = "the weights are then float32" if spec.dtype == "float32" else "float16 weights cannot be trained"
        yield (
            ("master_weights",),
            f"{spec.master_weights} needs bfloat16, not dtype: {spec.dtype}: {why}",
            "write dtype: bfloat16, or remove master_weights",
            {"dtype": "bfloat16"},
        )
    optim = asked_optim(spec)
    if spec.master_weights == "compensated" and optim is not None and optim not in COMPENSATED:
        yield (
            ("training", "optim"),
            f"{optim} is not compatible with master_weights: compensated",
            f"use one of {', '.join(sorted(COMPENSATED))}, or remove master_weights",
            {"training.optim": ADAMW_8BIT} if optim.startswith("paged_adamw") else {"master_weights": None},
        )


_evaluation = _clash(
    lambda spec: spec.training.eval_strategy != "no" and not _has_eval(spec),
    (("training", "eval_strategy"), "there is nothing to evaluate on", _HOLD_OUT, {"eval_split": 0.05}),
)


def _needs_evaluation(spec: JobSpec) -> Iterator[Finding]:
    if spec.eval_strategy != "no":
        return
    training = spec.training
    needy: tuple[tuple[KeyPath, bool], ...] = (
        (("early_stopping_patience",), spec.early_stopping_patience is not None),
        (("guard", "patience"), spec.guard is not None and spec.guard.patience is not None),
        (("training", "load_best_model_at_end"), training.load_best_model_at_end),
        (("training", "save_strategy"), training.save_strategy == "best" and not training.load_best_model_at_end),
        (("training", "lr_scheduler_type"), training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")),
    )
    fix = _evaluating(spec)
    hint = f"write {', '.join(fix_lines(fix))}{'' if _has_eval(spec) else ', or eval_datasets in place of eval_split'}"
    for path, is_set in needy:
        if is_set:
            yield path, "needs evaluations during training", hint, fix


def _evaluating(spec: JobSpec) -> Fix:
    """Return all edits that make a job evaluate while it trains, so that no second rejection follows the first."""
    fix: Fix = {} if _has_eval(spec) else {"eval_split": 0.05}
    training, given = spec.training, spec.training.model_fields_set
    if training.load_best_model_at_end and training.save_strategy == "no":
        fix["training.save_strategy"] = "epoch"
    goes_by_steps = training.load_best_model_at_end and training.save_strategy == "steps" and given & _SAVES
    if goes_by_steps:
        return fix | {"training.eval_strategy": "steps", "training.eval_steps": training.save_steps}
    return fix | ({"training.eval_strategy": "epoch"} if "eval_strategy" in given or not fix else {})


#: Keys that control when checkpoints are written. If neither is set and the best one is wanted, every evaluation writes
#: one.
_SAVES = {"save_strategy", "save_steps"}


_guard = _clash(
    lambda spec: spec.guard is not None and not _has_eval(spec),
    (("guard",), "there is no held-out data to measure on", _HOLD_OUT, {"eval_split": 0.05}),
)


def _best_prediction(spec: JobSpec) -> Iterator[Finding]:
    """Check that every evaluation makes predictions if a metric on them selects the best checkpoint."""
    name = (spec.training.metric_for_best_model or "").removeprefix("eval_")
    if not name.startswith(PREFIX):
        return
    path: KeyPath = ("training", "metric_for_best_model")
    if spec.predictions.prompts:
        yield (
            path,
            "predictions.prompts have no reference answers to measure against",
            "remove predictions.prompts to predict held-out rows, or use eval_loss",
            {"predictions.prompts": None},
        )
    elif spec.predictions.sample_frequency != "eval":
        yield (
            path,
            f"{quote.name(name)} is available only if each evaluation includes predictions",
            "write predictions.sample_frequency: eval",
            {"predictions.sample_frequency": "eval"},
        )


#: A metric that TRL's trainer computes in evaluations; Unsloth's does not.
_ACCURACY = "mean_token_accuracy"


def _best_metric(spec: JobSpec) -> Iterator[Finding]:
    """Check the metric that selects the best checkpoint: if evaluations lack it, the run ends with a KeyError."""
    if spec.eval_strategy == "no":
        return
    training = spec.training
    if training.metric_for_best_model is None and not training.load_best_model_at_end:
        return
    named = training.metric_for_best_model or "loss"
    name = named.removeprefix("eval_")
    metric = name.removeprefix(PREFIX).removesuffix("_parsable")
    if name == _ACCURACY:
        if spec.backend != "transformers":
            yield (
                ("training", "metric_for_best_model"),
                f"with Unsloth, no evaluation computes {shown(named)}",
                "write backend: transformers, or use eval_loss",
                {"backend": "transformers"},
            )
        return
    if name != "loss" and not name.startswith(PREFIX):
        names = ["eval_loss", *(f"{PREFIX}{item}" for item in known())]
        near = get_close_matches(name, known(), n=1)
        meant = f"{PREFIX}{near[0]}" if near else next(iter(get_close_matches(named, names, n=1)), "")
        yield (
            ("training", "metric_for_best_model"),
            f"no evaluation computes {shown(named)}",
            (f"did you mean {meant}? " if meant else "remove it to use the loss; ")
            + f"known metrics: {', '.join(names)}",
            {"training.metric_for_best_model": meant}
            if meant
            else {"training.metric_for_best_model": None, "training.greater_is_better": None},
        )
        return
    is_loss, greater = name == "loss", training.greater_is_better
    if is_loss and greater:
        yield (
            ("training", "greater_is_better"),
            "this would select the model with the highest loss",
            "write false",
            {"training.greater_is_better": False},
        )
    if name.startswith(PREFIX) and metric in BUILT_IN and greater is False:
        yield (
            ("training", "greater_is_better"),
            f"this would select the model with the lowest {metric}",
            "write true",
            {"training.greater_is_better": True},
        )


_truthless = _clash(
    lambda spec: spec.predictions.prompts and spec.predictions.metrics != "auto",
    (
        ("predictions", "metrics"),
        "predictions.prompts have no reference answers to measure against",
        "remove predictions.metrics, or remove predictions.prompts to predict held-out rows",
        {"predictions.metrics": None},
    ),
)


def _best(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if not training.load_best_model_at_end or spec.eval_strategy == "no" or training.save_strategy == "best":
        return
    if not training.model_fields_set & _SAVES:
        return  # every evaluation writes a checkpoint
    path: KeyPath = ("training", "load_best_model_at_end")
    if training.save_strategy != spec.eval_strategy:
        is_asked = "eval_strategy" in training.model_fields_set or training.save_strategy == "no"
        ours, theirs = ("save", "eval") if is_asked else ("eval", "save")
        strategy = spec.eval_strategy if is_asked else training.save_strategy
        fix: Fix = {f"training.{ours}_strategy": strategy}
        if strategy == "steps" and (steps := getattr(training, f"{theirs}_steps")) is not None:
            fix[f"training.{ours}_steps"] = steps
        yield (
            path,
            f"save_strategy is {training.save_strategy}, eval_strategy {spec.eval_strategy}",
            f"use the same for both: write {', '.join(fix_lines(fix))}",
            fix,
        )
    elif training.save_strategy == "steps":
        evaluated = training.eval_steps or training.logging_steps
        if (training.save_steps < 1) != (evaluated < 1) or not _divides(evaluated, training.save_steps):
            is_count = evaluated >= 1 and training.save_steps >= 1
            steps = math.ceil(training.save_steps / evaluated) * evaluated if is_count else evaluated
            yield (
                path,
                f"save_steps {training.save_steps:g} is not a multiple of eval_steps {evaluated:g}",
                f"use a multiple: write training.save_steps: {steps:g}",
                {"training.save_steps": steps},
            )


def _divides(small: float, large: float) -> bool:
    ratio = large / small
    return abs(ratio - round(ratio)) < 1e-6


def _packing(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if training.packing and training.max_length is None:
        yield (
            ("training", "packing"),
            "needs max_length: examples are packed to this length",
            ("set training.max_length; or remove it: the default is 1024"),
            {"training.max_length": None},
        )
    if training.padding_free and not training.packing and training.max_length is not None:
        yield (
            ("training", "padding_free"),
            "cannot truncate at max_length without packing",
            "remove it, which affects only the speed; or write training.packing: true",
            {"training.padding_free": None},
        )


def _loaders(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    if training.dataloader_num_workers:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        if getattr(training, name):
            yield (
                ("training", name),
                "needs dataloader_num_workers to be at least 1",
                ("write training.dataloader_num_workers: 1"),
                {"training.dataloader_num_workers": 1},
            )


_liger = _clash(
    lambda spec: spec.training.use_liger_kernel and spec.training.loss_type == "chunked_nll",
    (
        ("training", "loss_type"),
        "chunked_nll and use_liger_kernel are mutually exclusive",
        "write nll",
        {"training.loss_type": "nll"},
    ),
)


_smoothing = _clash(
    lambda spec: spec.training.label_smoothing_factor and spec.training.loss_type == "dft",
    (
        ("training", "label_smoothing_factor"),
        "loss_type: dft does not support label smoothing",
        "remove it, or write training.loss_type: nll, which supports it",
        {"training.label_smoothing_factor": None},
    ),
)


def _schedule(spec: JobSpec) -> Iterator[Finding]:
    """Check the schedule's arguments: transformers builds it late, and silently ignores some of them."""
    name, given = spec.training.lr_scheduler_type, spec.training.lr_scheduler_kwargs or {}
    path: KeyPath = ("training", "lr_scheduler_kwargs")
    takes = SCHEDULE_KWARGS[name]
    if unknown := sorted(set(given) - takes):
        hint = f"remove it; {', '.join(sorted(takes))} are available" if takes else "remove it"
        fix: Fix = {dotted((*path, key)): None for key in unknown}
        if name == "cosine" and set(unknown) <= {"min_lr", "min_lr_rate"}:
            hint, fix = (
                "write lr_scheduler_type: cosine_with_min_lr",
                {"training.lr_scheduler_type": "cosine_with_min_lr"},
            )
        yield path, f"{name} does not accept {quote.names(unknown)}", hint, fix
    if name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        lowest = [key for key in ("min_lr", "min_lr_rate") if given.get(key) is not None]
        if len(lowest) != 1:
            yield (
                path,
                f"{name} needs one of min_lr and min_lr_rate",
                "remove min_lr_rate, which min_lr already sets"
                if lowest
                else "lr_scheduler_kwargs: {min_lr_rate: 0.1}",
                {"training.lr_scheduler_kwargs.min_lr_rate": None}
                if lowest
                else {"training.lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            )
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        steps = max(1, spec.training.max_steps // 10) if spec.training.max_steps > 0 else 100
        yield (
            path,
            f"{name} needs num_decay_steps",
            f"lr_scheduler_kwargs: {{num_decay_steps: {steps}}}",
            {"training.lr_scheduler_kwargs": {"num_decay_steps": steps}},
        )


def _optimizer(spec: JobSpec) -> Iterator[Finding]:
    training = spec.training
    is_low_rank = training.optim.startswith(("galore_", "apollo_"))
    if is_low_rank and not training.optim_target_modules:
        yield (
            ("training", "optim_target_modules"),
            f"missing: {training.optim} needs the names of the modules to apply to",
            "optim_target_modules: all-linear",
            {"training.optim_target_modules": "all-linear"},
        )
    if is_low_rank and training.optim.endswith("_layerwise") and training.gradient_accumulation_steps != 1:
        yield (
            ("training", "gradient_accumulation_steps"),
            f"{training.optim} makes a step in each backward pass",
            "remove it, or use the optimizer without _layerwise",
            {"training.optim": training.optim.removesuffix("_layerwise")},
        )
    if training.optim_args and any(part.count("=") != 1 for part in training.optim_args.split(",")):
        yield (
            ("training", "optim_args"),
            f"{shown(training.optim_args)} is not a list of key=value",
            "rank=64,scale=0.25",
        )


def _media(spec: JobSpec) -> Iterator[Finding]:
    media = spec.media
    largest = min(media.max_pixels or math.inf, (media.max_image_size or math.inf) ** 2)
    if media.min_pixels is not None and media.min_pixels > largest:
        yield (
            ("media", "min_pixels"),
            f"{media.min_pixels} is more than an image may have",
            f"write media.min_pixels: {largest}, or less",
            {"media.min_pixels": largest},
        )


def _adapted_parts(spec: JobSpec) -> Iterator[Finding]:
    lora = spec.lora
    if lora is not None and not (
        lora.finetune_language_layers
        or lora.finetune_vision_layers
        or lora.finetune_audio_layers
        or lora.finetune_projector
    ):
        yield (
            ("lora", "finetune_language_layers"),
            "no part of the model gets an adapter",
            ("set one of them to true; or remove it: by default the language model's layers get one"),
            {"lora.finetune_language_layers": None},
        )


_notify = _clash(
    lambda spec: spec.notify is not None and spec.notify.webhook is None and spec.notify.mail is None,
    (("notify",), "has no recipients", "add webhook or mail, or remove it", {"notify": None}),
)


def _is_divided(spec: JobSpec) -> bool:
    return spec.parallel == "fsdp" and spec.resources.num_ranks > 1


def _parallel(spec: JobSpec) -> Iterator[Finding]:
    """Yield conflicts of several GPUs, which would fail late, or be ignored by a library."""
    training, path = spec.training, ("parallel",)
    if spec.parallel == "fsdp" and spec.resources.num_ranks == 1:
        where = "trains on the CPU" if not spec.resources.gpus else "uses one GPU"
        yield (
            path,
            f"fsdp divides a model between several GPUs, but the job {where}",
            "write auto, or set resources: {gpus: 2}",
            {"parallel": "auto"},
        )
    if _is_divided(spec) and spec.trial:
        yield (
            ("trial",),
            "runs on one GPU: with parallel: fsdp it is not supported on several GPUs",
            "remove it, or write parallel: ddp",
            {"trial": None},
        )
    if spec.resources.num_ranks > 1 and training.label_smoothing_factor:
        yield (
            ("training", "label_smoothing_factor"),
            "is not supported on several GPUs, where its mean would be of each GPU's tokens",
            "remove it, or write resources: {gpus: 1}",
            {"training.label_smoothing_factor": None},
        )
    if spec.resources.num_ranks > 1 and training.optim.endswith("_layerwise"):
        yield (
            ("training", "optim"),
            f"{training.optim} is not supported on several GPUs",
            "use the optimizer without _layerwise",
            {"training.optim": training.optim.removesuffix("_layerwise")},
        )
    if not _is_divided(spec):
        return
    if spec.quantization == "8bit":
        yield path, "fsdp with quantization: 8bit is not supported", "write ddp, or quantization: 4bit"
    if not DIVIDABLE.fullmatch(training.optim):
        yield (
            ("training", "optim"),
            f"{training.optim} is not supported with parallel: fsdp, which divides each weight",
            "write adamw_torch_fused",
            {"training.optim": "adamw_torch_fused"},
        )
    if spec.master_weights == "compensated":
        yield ("master_weights",), "compensated is not supported with parallel: fsdp", "write auto"


def _effective(spec: JobSpec) -> Iterator[Finding]:
    effective, ranks, training = spec.batch.effective, spec.resources.num_ranks, spec.training
    if effective is None:
        return
    rows, path = training.per_device_train_batch_size, ("batch", "effective")
    times = f"per_device_train_batch_size {rows} on {ranks} GPU{'s' if ranks > 1 else ''}"
    if effective % (rows * ranks):
        fitting = max((number for number in range(1, rows + 1) if effective % (number * ranks) == 0), default=None)
        whole = math.ceil(effective / (rows * ranks)) * rows * ranks
        yield (
            path,
            f"{effective} is not a multiple of {rows * ranks}: {times}",
            f"write effective: {whole}"
            + (f", or training.per_device_train_batch_size: {fitting}" if fitting is not None else ""),
            {"training.per_device_train_batch_size": fitting} if fitting else {"batch.effective": whole},
        )
    elif (
        "gradient_accumulation_steps" in training.model_fields_set
        and (product := rows * ranks * training.gradient_accumulation_steps) != effective
    ):
        yield (
            path,
            f"{effective} is not {product}: {times} with gradient_accumulation_steps "
            f"{training.gradient_accumulation_steps}",
            "remove training.gradient_accumulation_steps, which is derived",
            {"training.gradient_accumulation_steps": None},
        )


def with_batch(spec: JobSpec) -> JobSpec:
    """Return a spec whose gradient_accumulation_steps follow from `batch.effective`, if that is set."""
    effective, training = spec.batch.effective, spec.training
    if effective is None:
        return spec
    steps = effective // (training.per_device_train_batch_size * spec.resources.num_ranks)
    return spec.model_copy(update={"training": training.model_copy(update={"gradient_accumulation_steps": steps})})


def _merge_keys(spec: JobSpec) -> Iterator[Finding]:
    for key in sorted(spec.model_fields_set - MERGE_KEYS):
        if getattr(spec, key) != type(spec).model_fields[key].get_default(call_default_factory=True):
            yield (
                (key,),
                "a merge has none, because nothing is trained",
                "remove it, or put it in a separate job",
                {key: None},
            )


_merge_gpus = _clash(
    lambda spec: spec.resources.num_ranks > 1,
    (
        ("resources",),
        "a merge uses the CPU of one machine",
        "write resources: {gpus: 0}, or remove it",
        {"resources": None},
    ),
)


_merge_adapter = _clash(
    lambda spec: spec.adapter is None,
    (
        ("adapter",),
        "missing: a merge needs the adapter to merge into base_model",
        "write a directory, or job:NAME",
    ),
)


def _evaluation_keys(spec: JobSpec) -> Iterator[Finding]:
    for key in sorted(spec.model_fields_set - EVALUATION_KEYS):
        if getattr(spec, key) != type(spec).model_fields[key].get_default(call_default_factory=True):
            hint = {
                "datasets": "write them as eval_datasets",
                "lora": "remove it; `adapter` names a trained adapter",
                "eval_split": "remove it; eval_datasets are evaluated as a whole",
            }.get(key, "remove it, or put it in a separate job")
            fix: dict[str, Any] = {key: None}
            if key == "datasets" and not spec.eval_datasets:
                fix["eval_datasets"] = [
                    dataset.model_dump(mode="json", exclude_unset=True) for dataset in spec.datasets
                ]
            yield (key,), "an evaluation has none, because nothing is trained or written", hint, fix
    for key in sorted(spec.training.model_fields_set - EVALUATION_TRAINING):
        if getattr(spec.training, key) != type(spec.training).model_fields[key].get_default(call_default_factory=True):
            yield (
                ("training", key),
                "an evaluation has none, because nothing is trained",
                f"remove it; an evaluation takes {', '.join(sorted(EVALUATION_TRAINING))}",
                {f"training.{key}": None},
            )


_evaluated = _clash(
    lambda spec: not spec.eval_datasets and not spec.datasets,
    (
        ("eval_datasets",),
        "missing: an evaluation needs at least one data set",
        "eval_datasets: [{path: /srv/data/rows.jsonl}]",
    ),
)


_asked_once = _clash(
    lambda spec: spec.predictions.sample_frequency not in ("eval", "off"),
    (
        ("predictions", "sample_frequency"),
        "an evaluation has one round of predictions",
        "remove it, or write off",
        {"predictions.sample_frequency": None},
    ),
)


def _training(*names: str) -> tuple[KeyPath, ...]:
    return tuple(("training", name) for name in names)


#: The keys that every schedule takes in `lr_scheduler_kwargs`; a test compares the list with transformers.
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

#: In the paths that a rule reads: every item of a list.
ANY = "*"
_EVAL_KEYS: tuple[KeyPath, ...] = (("eval_split",), ("eval_datasets",))
_FORMATS = Rule((("kind",), ("datasets", ANY, "format"), ("eval_datasets", ANY, "format")), _formats)
RULES = (
    Rule((("datasets",), ("kind",)), _datasets),
    _FORMATS,
    Rule((("datasets", ANY, "fraction"), ("eval_datasets", ANY, "fraction")), _fractions),
    Rule(
        tuple((section, ANY, key) for section in ("datasets", "eval_datasets") for key in ("path", "name", "revision")),
        _of_hub,
    ),
    Rule(_EVAL_KEYS, _held_out),
    Rule((("quantization",), ("lora",), ("adapter",)), _quantization),
    Rule((("lora",), ("adapter",)), _adapter),
    Rule((*((item.key,) for item in export.EXPORTS), ("lora",), ("adapter",)), _exports),
    Rule((("adapter_dtype",), ("lora",), ("adapter",)), _adapter_dtype),
    Rule((("train_parts",), ("lora",), ("adapter",)), _train_parts),
    Rule(
        (("master_weights",), ("save_dtype",), ("dtype",), ("lora",), ("adapter",), *_training("optim")), _kept_weights
    ),
    Rule((*_EVAL_KEYS, *_training("eval_strategy")), _evaluation),
    Rule(
        (*_EVAL_KEYS, *_training("eval_strategy", "load_best_model_at_end", "save_strategy", "lr_scheduler_type"),
         ("early_stopping_patience",), ("guard",)),
        _needs_evaluation,
    ),
    Rule((*_training("metric_for_best_model"), ("predictions",)), _best_prediction),
    Rule((*_EVAL_KEYS, *_training("metric_for_best_model", "greater_is_better", "eval_strategy")), _best_metric),
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
    Rule(
        (("parallel",), ("resources",), ("quantization",), ("master_weights",), ("trial",),
         *_training("optim", "save_strategy", "load_best_model_at_end", "label_smoothing_factor")),
        _parallel,
    ),
    Rule(
        (("batch",), ("resources",), *_training("per_device_train_batch_size", "gradient_accumulation_steps")),
        _effective,
    ),
    Rule((("notify",),), _notify),
)  # fmt: skip

#: The keys that a merge takes; all others concern training.
MERGE_KEYS = frozenset(
    {
        "name",
        "kind",
        "job_class",
        "priority",
        "base_model",
        "model_type",
        "revision",
        "trust_remote_code",
        "chat_template",
        "adapter",
        "dtype",
        "output_dir",
        "resources",
        "retry",
        "depends_on",
        "time_limit_sec",
        "notify",
        "pin",
        "sweep",
        "group",
    }
)
MERGE_RULES = (
    Rule((("kind",),), _merge_keys),
    Rule((("adapter",), ("kind",)), _merge_adapter),
    Rule((("resources",),), _merge_gpus),
    Rule((("notify",),), _notify),
)

#: The keys that an evaluation takes, and those of `training` that change how rows are read and batched.
EVALUATION_KEYS = (MERGE_KEYS - {"output_dir"}) | {
    "chat_template_kwargs",
    "training_chat_template",
    "backend",
    "adapter_dtype",
    "quantization",
    "attn_implementation",
    "parts",
    "eval_datasets",
    "media",
    "training",
    "predictions",
}
EVALUATION_TRAINING = frozenset(
    {"max_length", "truncation_mode", "per_device_eval_batch_size", "pad_to_multiple_of", "loss_type", "seed"}
)
EVALUATION_RULES = (
    Rule((("kind",), ("training",), ("eval_datasets",)), _evaluation_keys),
    Rule((("eval_datasets",), ("kind",)), _evaluated),
    _FORMATS,
    Rule((("predictions", "sample_frequency"),), _asked_once),
    Rule((("eval_datasets", ANY, "fraction"),), _fractions),
    Rule(tuple(("eval_datasets", ANY, key) for key in ("path", "name", "revision")), _of_hub),
    Rule((("adapter_dtype",), ("adapter",)), _adapter_dtype),
    Rule((("predictions", "metrics"), ("predictions", "prompts")), _truthless),
    Rule((("media", "min_pixels"), ("media", "max_pixels"), ("media", "max_image_size")), _media),
    Rule((("notify",),), _notify),
)
