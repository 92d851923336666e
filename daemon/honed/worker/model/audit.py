"""Audit of the loaded model against the plan: every parameter, by role, dtype and device.

    base        parameters of no other role: in the planned dtype
    quantized   bitsandbytes' storage, whose dtype says nothing; its compute dtype is checked instead
    adapter     added by peft: in the adapter's own dtype, as everything that is trained beside a frozen base
    norm        may stay in float32, in which some backends and families keep it
    vision, audio, projector
                the encoders, and what leads from them into the language model: as base, and never quantized by honed
    meta        not there (offloaded): skipped

A difference is fixed and reported where the fix loses no bit of the checkpoint. Any other ends the job with
precision_mismatch, as does a dtype that has changed by the time weights are saved. `model.config.dtype` counts too,
since libraries read it instead of the parameters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from honed.inputs import modality
from honed.job.event import EventWriter
from honed.job.plan_file import Precision
from honed.system import quote
from honed.system.error import PrecisionError
from honed.worker.model.division import class_of
from honed.worker.model.dtypes import Rule

_ADAPTER = re.compile(r"\blora_|\bmodules_to_save\b|\btrainable_tokens_")
_NORM = re.compile(r"norm|\bln_|layernorm", re.IGNORECASE)
#: The classes in which bitsandbytes keeps quantized weights.
_QUANTIZED = {"Params4bit": "4bit", "Int8Params": "8bit"}
#: Dtypes from which a cast gives what loading in the planned dtype would have: nothing is rounded away yet.
_WIDE = ("float32", "float64")
#: Parameters that an error names.
MAX_NAMED = 5


@dataclass(frozen=True)
class Count:
    """Number of parameters of one role, dtype and device."""

    role: str
    dtype: str
    device: str
    num_parameters: int


@dataclass(frozen=True)
class Audit:
    """State of the model at one moment of a run, after all that could be fixed was fixed."""

    when: str  #: loaded, adapted, built, resumed, restored, saved
    counts: tuple[Count, ...]
    model_dtype: str | None  #: of most parameters that are neither quantized nor an adapter's
    config_dtype: str | None  #: what model.config claims
    embedding_dtype: str | None
    quantization: str
    mended: tuple[str, ...]

    @property
    def text(self) -> str:
        return ", ".join(f"{item.role} {item.dtype} {item.num_parameters:,} on {item.device}" for item in self.counts)


class Auditor:
    """Comparison of one run's model with its plan, made and logged whenever something may have changed the model."""

    def __init__(self, precision: Precision, events: EventWriter, *, backend: str = "transformers") -> None:
        self._precision = precision
        self._events = events
        self._is_other = backend != "transformers"
        self._dtypes: dict[str, Any] = {}  #: of every parameter, at the last audit
        self._kept: Mapping[str, str] = {}  #: dtypes of those that are saved in a wider one

    def model(self, model: Any, when: str, *, mended: Sequence[str] = ()) -> Audit:
        """Count, fix and report; `mended` lists the caller's fixes. Raises PrecisionError, naming the parameters."""
        with self._advised():
            audit = examine(model, self._precision, when, mended=mended, kept=self._kept)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._events.emit("audit", **asdict(audit))
        for text in audit.mended:
            self._events.log("info", f"audit ({when}): {text}")
        return audit

    def saved(self, model: Any, rule: Rule) -> Audit:
        """Audit the model after full fine-tuning's weights are cast to the dtype in which they are saved.

        The cast was planned, and is no difference. Raises PrecisionError where a weight is left in another dtype than
        that of the rule.
        """
        self._precision = replace(self._precision, load_dtype=str(self._precision.save_dtype), bf16=False, fp16=False)
        self._kept = {name: rule.of(name) for name, _ in model.named_parameters() if rule.of(name) != rule.wanted}
        return self.model(model, "saved")

    def trainer(self, trainer: Any) -> None:
        """Raise PrecisionError if the trainer would compute in another precision than the planned one."""
        with self._advised():
            check_arguments(trainer.args, self._precision)
            check_accelerator(trainer.accelerator, self._precision)

    def unchanged(self, model: Any) -> None:
        """Raise PrecisionError if a parameter's dtype has changed since the last audit.

        Casting it back would only hide that it was rounded.
        """
        changed = [
            f"{name} was {_name(self._dtypes[name])} and is {_name(parameter.dtype)}"
            for name, parameter in model.named_parameters()
            if self._dtypes.get(name, parameter.dtype) != parameter.dtype
            and role(name, parameter) not in ("meta", "quantized")
        ]
        if changed:
            raise PrecisionError(
                f"weights changed their dtype during training: {quote.first(changed, MAX_NAMED, separator='; ')}",
                hint="its last checkpoint is not affected"
                + ("; submit it again with backend: transformers" if self._is_other else ""),
            )

    @contextmanager
    def _advised(self) -> Iterator[None]:
        """Add advice on the transformers backend to errors under another backend."""
        try:
            yield
        except PrecisionError as error:
            if not self._is_other:
                raise
            other = "backend: transformers, or backend: auto, which falls back to it before the first step"
            raise PrecisionError(error.said, hint=f"{error.hint}, or {other}" if error.hint else other) from error


def examine(
    model: Any, precision: Precision, when: str, *, mended: Sequence[str] = (), kept: Mapping[str, str] | None = None
) -> Audit:
    """Bring the model to the planned precision and return its audit. Raises PrecisionError for what cannot be fixed.

    `kept` are the dtypes of parameters that are stored in a wider one than planned.
    """
    quantization = _quantization(model)
    if quantization != precision.quantization:
        raise PrecisionError(
            f"planned quantization {precision.quantization}, but the loaded model is "
            + (f"quantized to {quantization}" if quantization != "none" else "not quantized"),
            hint="quantization: none",
        )
    if quantization != "none":
        _check_quantized_share(model)
    done = [*mended, *_mend_parameters(model, precision, kept or {}), *_mend_compute_dtype(model, precision)]
    done += _mend_config(model, precision)
    counts = count(model)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return Audit(
        when=when,
        counts=counts,
        model_dtype=_model_dtype(counts),
        config_dtype=_name(getattr(model.config, "dtype", None)),
        embedding_dtype=None if embedding is None else _name(embedding.dtype),
        quantization=quantization,
        mended=tuple(done),
    )


def role(name: str, parameter: Any) -> str:
    """Return a parameter's role: base, quantized, adapter, norm, vision, audio, projector or meta."""
    if parameter.device.type == "meta":
        return "meta"
    if class_of(parameter) in _QUANTIZED or not parameter.is_floating_point():
        return "quantized"
    if _ADAPTER.search(name):
        return "adapter"
    if (part := modality.part(name)) != "language":
        return part
    return "norm" if _NORM.search(name) else "base"


def count(model: Any) -> tuple[Count, ...]:
    """Count parameters by role, dtype and device. bitsandbytes packs two 4-bit ones into a byte."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, parameter in model.named_parameters():
        is_packed = class_of(parameter) == "Params4bit"
        number = parameter.numel() * parameter.element_size() * 2 if is_packed else parameter.numel()
        counts[role(name, parameter), str(_name(parameter.dtype)), str(parameter.device)] += number
    return tuple(Count(*key, number) for key, number in sorted(counts.items()))


def describe(audit: Audit, precision: Precision) -> str:
    """Return the log line to read when a dtype is wrong: the model's dtype, the training precision, and the reasons."""
    flags = "bf16 autocast" if precision.bf16 else "fp16 autocast" if precision.fp16 else "no autocast"
    why = "; ".join(f"{choice}: {reason}" for choice, reason in precision.reasons.items())
    beside = f", {precision.quantization} weights" if precision.quantization != "none" else ""
    adapter = f", adapter in {precision.adapter_dtype}" if precision.adapter_dtype else ""
    return (
        f"detected model dtype: {audit.model_dtype}{beside} (loaded: {audit.text}; config {audit.config_dtype}, "
        f"embeddings {audit.embedding_dtype}); training precision: {flags}{adapter}" + (f" ({why})" if why else "")
    )


# --- Differences ------------------------------------------------------------------------------------------------------


def _mend_parameters(model: Any, precision: Precision, kept: Mapping[str, str]) -> list[str]:
    """Cast every parameter to its planned dtype, in place; return the changes. Raises PrecisionError for lost bits."""
    import torch

    changed: dict[tuple[str, str, str], int] = {}
    lost = []
    for name, parameter, allowed in _planned(model, precision, kept):
        dtype = str(_name(parameter.dtype))
        if dtype in allowed:
            continue
        is_trained = parameter.requires_grad and precision.adapter_dtype is not None
        if dtype not in _WIDE and not is_trained:
            lost.append(f"{name} is {dtype}")
            continue
        kind = "trained" if is_trained else role(name, parameter)
        changed[kind, dtype, allowed[0]] = changed.get((kind, dtype, allowed[0]), 0) + 1
        parameter.data = parameter.data.to(getattr(torch, allowed[0]))
    if lost:
        raise PrecisionError(
            f"planned {precision.load_dtype}, but {quote.first(lost, MAX_NAMED, separator='; ')}",
            hint="set the dtype in the job file",
        )
    return [f"{number} {kind} weights were {dtype}, now {wanted}" for (kind, dtype, wanted), number in changed.items()]


def _planned(model: Any, precision: Precision, kept: Mapping[str, str]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield every parameter that the plan covers, with the dtypes that it may have, the planned one first."""
    wide = {
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    }
    for name, parameter in model.named_parameters():
        if role(name, parameter) in ("meta", "quantized"):
            continue
        if name in kept:
            yield name, parameter, (kept[name],)
        elif parameter.requires_grad and precision.adapter_dtype is not None:
            yield name, parameter, (precision.adapter_dtype,)
        elif _NORM.search(name) or any(re.search(rf"(^|\.){re.escape(item)}(\.|$)", name) for item in wide):
            yield name, parameter, (precision.load_dtype, "float32")
        else:
            yield name, parameter, (precision.load_dtype,)


def _mend_compute_dtype(model: Any, precision: Precision) -> list[str]:
    """Set the compute dtype of 4-bit layers, which a checkpoint stored quantized brings along; return the changes."""
    import torch

    if precision.quantization != "4bit" or precision.compute_dtype is None:
        return []
    wanted = getattr(torch, precision.compute_dtype)
    wrong = [module for module in model.modules() if getattr(module, "compute_dtype", wanted) not in (wanted, None)]
    old = sorted({str(_name(module.compute_dtype)) for module in wrong})
    for module in wrong:
        module.compute_dtype = wanted
    return [f"{len(wrong)} 4-bit layers computed in {', '.join(old)}, now {precision.compute_dtype}"] if wrong else []


def _mend_config(model: Any, precision: Precision) -> list[str]:
    import torch

    dtype = _name(getattr(model.config, "dtype", None))
    if dtype == precision.load_dtype:
        return []
    model.config.dtype = getattr(torch, precision.load_dtype)
    return [f"model.config.dtype said {dtype}, now {precision.load_dtype}"]


def _check_quantized_share(model: Any) -> None:
    """Raise PrecisionError for a model most of whose layers are not quantized though some are.

    In every family heads, encoders, routers and the layers that the checkpoint excludes stay unquantized. They never
    have more weights than the quantized layers.
    """
    import torch

    head = model.get_output_embeddings()
    plain, quantized = {}, 0
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if class_of(weight) == "Params4bit":
            quantized += weight.numel() * weight.element_size() * 2  # two in a byte
        elif class_of(weight) in _QUANTIZED:
            quantized += weight.numel()
        elif type(module) is torch.nn.Linear and module is not head and role(f"{name}.weight", weight) == "base":
            plain[name] = weight.numel()
    if sum(plain.values()) > quantized:
        raise PrecisionError(
            f"planned a quantized model, but {len(plain)} layers are not quantized: {', '.join([*plain][:5])}",
            hint="quantization: none",
        )


def _quantization(model: Any) -> str:
    kinds = {_QUANTIZED[kind] for parameter in model.parameters() if (kind := class_of(parameter)) in _QUANTIZED}
    return "none" if not kinds else "4bit" if "4bit" in kinds else "8bit"


def _model_dtype(counts: Sequence[Count]) -> str | None:
    """Return the dtype of most base parameters, or of most others beside quantized ones and adapters."""
    for roles in (("base",), ("norm", "vision", "audio", "projector")):
        sizes: Counter[str] = Counter()
        for item in counts:
            if item.role in roles:
                sizes[item.dtype] += item.num_parameters
        if sizes:
            return sizes.most_common(1)[0][0]
    return None


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# --- The trainer ------------------------------------------------------------------------------------------------------


def check_arguments(arguments: Any, precision: Precision) -> None:
    """Raise PrecisionError if the trainer's final flags are not the planned ones: a backend may flip them."""
    planned, final = (precision.bf16, precision.fp16), (bool(arguments.bf16), bool(arguments.fp16))
    if planned != final:
        raise PrecisionError(
            f"planned bf16={planned[0]} fp16={planned[1]}, but the trainer has bf16={final[0]} fp16={final[1]}"
        )


def check_accelerator(accelerator: Any, precision: Precision) -> None:
    """Raise PrecisionError unless accelerate will do what the flags say.

    On a CPU it accepts fp16 and then neither autocasts nor scales, so its `mixed_precision` alone proves nothing.
    """
    planned = "bf16" if precision.bf16 else "fp16" if precision.fp16 else "no"
    wanted = (planned, planned != "no", planned == "fp16")
    actual = (str(accelerator.mixed_precision), bool(accelerator.native_amp), accelerator.scaler is not None)
    if actual != wanted:
        words = "mixed_precision={} autocast={} scaler={}".format
        raise PrecisionError(
            f"planned {words(*wanted)}, but accelerate uses {words(*actual)}",
            hint="ACCELERATE_MIXED_PRECISION in the environment overrides the plan",
        )
