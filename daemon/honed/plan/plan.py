"""The plan: backend, precision and memory of a job, with reasons, decided before any model is loaded.

`honectl plan --json` prints it and plan.json keeps it, in the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from honed.inputs.basemodel import AdapterInfo, BaseModelInfo
from honed.job.plan_file import Backend, Checkpoint, Loss, Memory, Parallel, Precision, RowNeeds
from honed.job.progress import gib
from honed.plan import loss, memory, parallel, parameter, precision
from honed.plan.activation import Row
from honed.plan.rung import Rung
from honed.spec import kind
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.system import quote
from honed.system.device import Device
from honed.system.error import BackendError, SpecError
from honed.system.installed import Installed, known_model_types

#: Dtypes in which a merged checkpoint may be stored.
MERGED_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Step:
    """One rung of full fine-tuning, as considered on the way down."""

    master_weights: str
    optim: str
    bytes_per_parameter: float  #: weight, gradient and optimizer state, without activations
    total_bytes: int  #: of the whole job
    fits: bool
    is_chosen: bool


@dataclass(frozen=True)
class Plan:
    """All decisions about a job."""

    backend: Backend
    precision: Precision
    memory: Memory
    model: BaseModelInfo
    device: Device
    num_trained: int  #: parameters
    loss: Loss
    warnings: tuple[str, ...]
    rows_template: Path | None = None  #: template that renders rows, if it is not the base's chat template
    rungs: tuple[Step, ...] = ()  #: of full fine-tuning
    parallel: Parallel = field(default_factory=Parallel)
    trained_unsure: str = ""  #: why `num_trained` is an estimate; empty where it is exact
    rows: RowNeeds | None = None  #: None where there are none of text, and before the data was looked at

    @property
    def num_passed(self) -> int:
        """Number of better rungs that did not fit."""
        return _num_passed(self.rungs)

    def as_dict(self) -> dict[str, object]:
        model = self.model
        checkpoint = Checkpoint(
            num_parameters=model.num_parameters,
            num_trained=self.num_trained,
            trained_unsure=self.trained_unsure,
            stored_dtypes=dict(model.stored_dtypes),
            num_weight_bytes=model.num_weight_bytes,
            model_type=model.model_type,
            architectures=model.architectures,
            quantization_method=model.quantization_method,
            has_chat_template=model.has_chat_template,
            has_vision=model.has_vision or model.has_audio,
            is_pickled=model.is_pickled,
        )
        return {
            "backend": asdict(self.backend),
            "precision": self.precision.as_dict(),
            "memory": self.memory.as_dict(),
            "parallel": asdict(self.parallel),
            "loss": asdict(self.loss),
            "rows": None if self.rows is None else asdict(self.rows),
            "rungs": [asdict(rung) for rung in self.rungs],
            "checkpoint": asdict(checkpoint),
            "base_model_path": str(model.path),
            "device": asdict(self.device),
            "training_chat_template": None if self.rows_template is None else str(self.rows_template),
            "warnings": list(self.warnings),
        }


def _num_passed(steps: Sequence[Step]) -> int:
    return next((place for place, step in enumerate(steps) if step.is_chosen), 0)


def make(
    spec: JobSpec,
    model: BaseModelInfo,
    device: Device,
    *,
    config: Config,
    installed: Installed,
    adapter: AdapterInfo | None = None,
    num_row_tokens: int | None = None,
    num_rows: int | None = None,
    rows: Sequence[Row] = (),
    pinned: Rung | None = None,
    adapter_dtype: str | None = None,
) -> Plan:
    """Plan a job on a device. Raises what `precision.decide` raises, and BackendError.

    `num_row_tokens` is the length of the longest inspected row without media, `rows` are the inspected rows with media,
    and `num_rows` is the number of all rows. `pinned` and `adapter_dtype` are the rung and the adapter's dtype that an
    earlier plan of the job chose.
    """
    if not kind.of(spec).has_rows:
        return _merge(spec, model, device, reserve_bytes=config.device.reserve_bytes, adapter=adapter)

    def look(rung: Rung | None, mode: parallel.Mode) -> tuple[Precision, Memory]:
        parallel.check_rung(mode, rung)
        choices = precision.decide(
            spec, model, device, has_flash_attn=installed.has("flash_attn"), rung=rung, adapter_dtype=adapter_dtype
        )
        parallel.check_precision(mode, choices)
        choices = parallel.explained(mode, choices)
        return choices, memory.estimate(
            spec,
            model,
            device,
            choices,
            adapter=adapter,
            reserve_bytes=config.device.reserve_bytes,
            num_row_tokens=num_row_tokens,
            num_rows=num_rows,
            rows=rows,
            mode=mode,
        )

    def descend(mode: parallel.Mode) -> tuple[Precision, Memory, tuple[Step, ...]]:
        if not precision.is_full(spec) or pinned is not None:
            return *look(pinned if precision.is_full(spec) else None, mode), ()
        rungs = precision.rungs(spec, model, device, has_bitsandbytes=installed.has("bitsandbytes"))
        if mode == "fsdp":
            rungs = tuple(item for item in rungs if parallel.can_divide(item))
        return _descend([look(rung, mode) for rung in rungs], spec)

    parallel.check(spec, has_cluster=config.jobs.has_cluster)
    modes = parallel.modes(spec, model, device, has_media=bool(rows))
    tried: dict[parallel.Mode, tuple[Precision, Memory, tuple[Step, ...]]] = {}
    for mode in modes:
        with contextlib.suppress(SpecError) if tried else contextlib.nullcontext():
            tried[mode] = descend(mode)
    fitting = [mode for mode, (_, estimate, _) in tried.items() if estimate.fits]
    mode = min(fitting, key=lambda item: _num_passed(tried[item][2]), default=[*tried][-1])
    choices, needed, steps = tried[mode]
    why = parallel.why_whole(spec, model, has_media=bool(rows))
    division = parallel.choose(spec, mode, needed, tried[modes[0]][1], why)
    backend = choose_backend(spec, model, choices, device, installed, adapter)
    num_trained = parameter.trained(spec, model, adapter).num_parameters if kind.of(spec).trains else 0
    chosen = choose_loss(spec, model, device, adapter)
    warnings = (*_warnings(model, choices, needed), *_passed_over(spec, model, adapter))
    return Plan(
        backend,
        choices,
        needed,
        model,
        device,
        num_trained,
        chosen,
        warnings,
        rungs=steps,
        parallel=division,
        trained_unsure=parameter.unsure(spec, model, adapter),
    )


def _descend(looked: Sequence[tuple[Precision, Memory]], spec: JobSpec) -> tuple[Precision, Memory, tuple[Step, ...]]:
    """Choose the first rung that fits, or else the smallest; also return all rungs, to explain the choice."""
    chosen = next((place for place, (_, needed) in enumerate(looked) if needed.fits), len(looked) - 1)
    steps = tuple(
        Step(
            str(choices.master_weights),
            choices.optim or spec.training.optim,
            round(memory.bytes_per_parameter(choices, choices.optim or spec.training.optim), 1),
            needed.total_bytes,
            needed.fits,
            place == chosen,
        )
        for place, (choices, needed) in enumerate(looked)
    )
    choices, needed = looked[chosen]
    if chosen:
        best = steps[0]
        why = (
            f"{best.master_weights} with {best.optim} needs {gib(best.total_bytes)}, but only "
            f"{gib(needed.available_bytes)} is available"
        )
        reasons = choices.reasons | {name: f"{choices.reasons[name]}: {why}" for name in ("master_weights", "optim")}
        choices = replace(choices, reasons=reasons)
    return choices, needed, steps


def _merge(
    spec: JobSpec, model: BaseModelInfo, device: Device, *, reserve_bytes: int, adapter: AdapterInfo | None
) -> Plan:
    """Plan a merge: the precision of its weights. Only sums are computed: in float32, on the CPU."""
    stored = model.stored_dtype if model.stored_dtype in MERGED_DTYPES else "float32"
    reasons = {
        "load_dtype": "the dtype of the stored base model" if spec.dtype == "auto" else "as the job asks",
        "compute_dtype": "a sum in half precision would be rounded twice",
        "quantization": "the merged checkpoint is a full model, however the adapter was trained",
    }
    choices = Precision(
        load_dtype=stored if spec.dtype == "auto" else spec.dtype,
        compute_dtype="float32",
        bf16=False,
        fp16=False,
        adapter_dtype=None,
        quantization="none",
        attn_implementation="auto",
        reasons=reasons,
    )
    needed = memory.estimate(spec, model, device, choices, adapter=adapter, reserve_bytes=reserve_bytes)
    backend = Backend("transformers", ("a merge uses transformers and peft",))
    return Plan(backend, choices, needed, model, device, 0, Loss(None), tuple(_warnings(model, choices, needed)))


def choose_backend(
    spec: JobSpec,
    model: BaseModelInfo,
    choices: Precision,
    device: Device,
    installed: Installed,
    adapter: AdapterInfo | None,
) -> Backend:
    """Choose Unsloth where it is faster and changes nothing; by name, where it does the plan, else BackendError."""
    obstacle = _unsloth_obstacle(spec, model, choices, device, installed)
    if not obstacle and parameter.asked_token_rows(spec, adapter):
        obstacle = "honed trains single tokens (trainable_token_indices) with transformers alone"
    match spec.backend:
        case "transformers":
            return Backend("transformers", ("as the job asks",))
        case "unsloth" if obstacle:
            raise BackendError(
                f"backend: unsloth: {obstacle}", hint="backend: transformers, or auto", fix={"backend": "auto"}
            )
        case "unsloth":
            return Backend("unsloth", ("as the job asks",))
        case _ if obstacle:
            return Backend("transformers", (obstacle,))
        case _ if device.kind != "cuda":
            return Backend("transformers", ("Unsloth is no faster without an NVIDIA GPU",))
        case _:
            return Backend(
                "unsloth",
                (f"Unsloth {installed.versions['unsloth']} is installed and can train this on {device.name}",),
            )


def _unsloth_obstacle(
    spec: JobSpec, model: BaseModelInfo, choices: Precision, device: Device, installed: Installed
) -> str:
    """Return the reason why Unsloth cannot do what is planned, or would silently deviate; empty where it can."""
    if not (installed.has("unsloth") and installed.has("unsloth_zoo")):
        return "Unsloth is not installed"
    if not kind.of(spec).trains and not spec.adapter:
        return "Unsloth is for training, and this evaluation has no adapter that it may have trained"
    if spec.resources.num_ranks > 1:
        return f"Unsloth trains on one GPU here, and this job uses {spec.resources.num_ranks}"
    if device.kind == "mps":
        return "Unsloth does not run on Apple GPUs"
    if device.kind == "cuda" and (device.compute_capability or (0, 0)) < (7, 0):
        return f"Unsloth needs compute capability 7.0, which {device.name} does not have"
    named, (known, _) = model.config.get("model_type"), known_model_types()
    if named not in known and "auto_map" not in model.config and known:
        return f"Unsloth reads config.json itself, and transformers does not support its model_type ({named})"
    if spec.parts.patterns:
        return "Unsloth uses its own names for the parts of a model, and this job sets them"
    if device.kind != "cuda" and (model.has_vision or model.has_audio):
        return "without an NVIDIA GPU, Unsloth does not train vision or audio models"
    if device.kind != "cuda" and precision.is_full(spec):
        return "without an NVIDIA GPU, Unsloth trains only adapters"
    if choices.master_weights in ("compensated", "none"):
        return f"full fine-tuning by Unsloth does not support master_weights: {choices.master_weights}"
    if device.kind != "cuda" and choices.quantization == "8bit":
        return "on a CPU, Unsloth would load in 16 bits instead of the requested 8 bits"
    if device.kind != "cuda" and choices.load_dtype == "float16":
        return "on a CPU, Unsloth would load in bfloat16 instead of the planned float16"
    return _unsloth_changes(spec, model, choices) if device.kind == "cuda" else ""


#: Families for which Unsloth 2026.10 has its own models, and the modules that these train whole, beside norms; a test
#: compares both with its code.
UNSLOTH_FAMILIES = frozenset({"gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"})
UNSLOTH_SAVED = frozenset({"embed_tokens", "lm_head"})


def _unsloth_changes(spec: JobSpec, model: BaseModelInfo, choices: Precision) -> str:
    """Return how Unsloth would deviate from the plan on a GPU, mostly without a log line; else "". See docs/gpu.md."""
    is_float32 = choices.load_dtype == "float32"
    if is_float32 and not (choices.bf16 or choices.fp16):
        return "Unsloth computes float32 models in half precision, under autocast"
    if precision.is_full(spec) and not is_float32:
        return "Unsloth disables autocast in full fine-tuning of half-precision weights"
    if choices.load_dtype == "float16" and precision.overflows_float16(model):
        return f"Unsloth uses a dtype other than float16 for {model.model_type}, which is known to overflow in it"
    lora = spec.lora
    if lora is None:
        return ""
    targets = lora.target_modules if isinstance(lora.target_modules, list) else []
    if names := [name for name in targets if name.rpartition(".")[2] in UNSLOTH_SAVED]:
        return f"Unsloth trains {names[0]} in full if it is among the target_modules"
    is_own = model.model_type in UNSLOTH_FAMILIES and choices.quantization != "8bit"
    for name in lora.modules_to_save or ():
        if is_own and name.rpartition(".")[2] not in UNSLOTH_SAVED and "norm" not in name:
            return f"Unsloth trains only head, embeddings and norms in full, but modules_to_save has {name}"
    return ""


def choose_loss(spec: JobSpec, model: BaseModelInfo, device: Device, adapter: AdapterInfo | None) -> Loss:
    """Choose the job's loss, else plain where chunks would change the loss or save nothing, else the backend's own."""
    # From TRL 1.15 on its own default is a Triton kernel, which a CPU cannot run.
    if spec.training.loss_type is not None:
        return Loss(spec.training.loss_type, ("as the job asks",))
    if why := loss.why_whole(spec, adapter.config if adapter else None, model.config):
        return Loss("nll", (f"TRL's chunked loss is not compatible with {why}",))
    return Loss("nll", ("a chunked loss saves no memory on a CPU",)) if device.kind != "cuda" else Loss(None)


# --- Warnings ---------------------------------------------------------------------------------------------------------


def _passed_over(spec: JobSpec, model: BaseModelInfo, adapter: AdapterInfo | None) -> list[str]:
    names = [] if adapter else parameter.passed_over(spec, model)
    if not names:
        return []
    ends = sorted({".".join(name.split(".")[-3:]) for name in names})
    return [
        f"lora: {len(names)} layers get no adapter although target_modules chooses them: {quote.first(names, 3)}; peft "
        f"takes these names for the mixture's experts alone. lora.target_parameters: [{', '.join(ends)}] adapts them"
    ]


def _warnings(model: BaseModelInfo, choices: Precision, needed: Memory) -> list[str]:
    warnings = list(choices.warnings)
    if not needed.fits:
        warnings.append(
            f"memory: the estimate is {gib(needed.total_bytes)}, but only {gib(needed.available_bytes)} is "
            "available: memory may run out; reduce per_device_train_batch_size or "
            f"{'media.max_image_size' if needed.media else 'max_length'}"
        )
    if choices.quantization != "none" and not model.is_quantized:
        experts = [item for item in parameter.parameters(model) if item.role == "experts"]
        if experts:
            kept = parameter.weights_bytes(model, experts, choices)
            warnings.append(
                f"quantization: {choices.quantization} leaves the experts in {choices.load_dtype}, {gib(kept)} of "
                f"{gib(needed.weights_bytes)} of weights: bitsandbytes quantizes linear layers alone"
            )
    if model.is_pickled:
        warnings.append(
            f"{model.path}: the weights are pickled; their number and dtype are estimated from the file size"
        )
    claimed, stored = model.config.get("dtype") or model.config.get("torch_dtype"), model.stored_dtype
    if isinstance(claimed, str) and claimed != stored and not model.is_quantized:
        warnings.append(
            f"{model.path / 'config.json'}: says {claimed}, but the weights are stored in {stored}, which is used"
        )
    return warnings
