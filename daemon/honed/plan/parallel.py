"""The division of a job between devices, with reasons.

    ddp    the whole model on every device; the rows are divided, and gradients are averaged
    fsdp   weights, gradients and optimizer states are divided, too; a layer is whole while it is computed

One rank trains on every device. `num_ranks` follows from the job file alone; the mode depends on the model's size.
What both cannot do is refused by name: DeepSpeed, tensor and sequence parallelism by the keys of `training`, Unsloth by
the choice of the backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from honed.inputs.basemodel import BaseModelInfo
from honed.job.plan_file import Memory, Parallel, Precision
from honed.job.progress import gib
from honed.plan import precision
from honed.plan.rung import Rung
from honed.spec import kind
from honed.spec.optimizer import DIVIDABLE
from honed.spec.spec import JobSpec
from honed.system.device import Device
from honed.system.error import SpecError

Mode = Literal["none", "ddp", "fsdp"]
#: Dtypes of numbers into which 4-bit weights may be packed for FSDP2.
FLOATING = ("bfloat16", "float16", "float32")
#: The reason for which a model is not divided beside rows with media.
WITH_MEDIA = "rows with images, videos or sounds run an encoder on some GPUs only, and the others would wait for it"


def check(spec: JobSpec, *, has_cluster: bool = False) -> None:
    """Raise SpecError for a division that this machine's configuration does not have."""
    if spec.resources.nodes > 1 and not has_cluster:
        raise SpecError(
            f"resources.nodes: {spec.resources.nodes} machines need a cluster, and honed.toml has none",
            hint="write resources.nodes: 1",
            fix={"resources.nodes": 1},
        )


def check_devices(spec: JobSpec, largest_group: int, num_devices: int) -> None:
    """Raise SpecError for a job that wants more GPUs of one kind than the machine has: `largest_group` of
    `num_devices`."""
    wanted = spec.resources.gpus
    if wanted <= 1 or spec.resources.nodes > 1 or wanted <= largest_group:
        return
    has = {0: "no GPU", 1: "1 GPU"}.get(num_devices, f"{num_devices} GPUs")
    kinds = "" if largest_group == num_devices else f", at most {largest_group} of them alike"
    raise SpecError(
        f"resources.gpus: {wanted} GPUs are wanted, but this machine has {has}{kinds}",
        hint=f"write resources.gpus: {max(1, largest_group)}",
        fix={"resources.gpus": max(1, largest_group)},
    )


def modes(spec: JobSpec, model: BaseModelInfo, device: Device, *, has_media: bool = False) -> tuple[Mode, ...]:
    """Return the modes that a job may take, the preferred one first. Raises SpecError for fsdp by name that cannot be.

    `has_media`: there are rows with images, videos or sounds.
    """
    if spec.resources.num_ranks == 1 or (device.kind != "cuda" and spec.resources.nodes == 1):
        return ("none",)
    why = why_whole(spec, model, has_media=has_media)
    if spec.parallel == "fsdp" and why:
        raise SpecError(f"parallel: fsdp: {why}", hint="write parallel: ddp", fix={"parallel": "ddp"})
    if spec.parallel != "auto":
        return (spec.parallel,)
    return ("ddp",) if why or device.kind != "cuda" else ("ddp", "fsdp")  # the processors of several nodes: ddp


def why_whole(spec: JobSpec, model: BaseModelInfo, *, has_media: bool = False) -> str:
    """Return why a model cannot be divided; empty if it can. Rules of the job file refuse some of it by name, too."""
    if not kind.of(spec).trains or spec.trial:
        return "only a training without a trial can divide a model"
    if has_media:
        return WITH_MEDIA
    if "8bit" in (spec.quantization, model.quantization):
        return "8-bit weights cannot be divided"
    if model.quantization == "4bit" and _storage(model) not in FLOATING:
        return (
            f"the checkpoint stores its 4-bit weights as {_storage(model)}, which cannot be divided "
            "(bnb_4bit_quant_storage in config.json)"
        )
    if precision.is_full(spec) and spec.master_weights == "compensated":
        return "compensated weights cannot be divided"
    if not DIVIDABLE.fullmatch(spec.training.optim):
        return f"{spec.training.optim} cannot step parts of weights"
    return ""


def can_divide(rung: Rung) -> bool:
    """Tell whether full fine-tuning's weights can be divided where they are kept and stepped this way."""
    return rung.master_weights != "compensated" and (rung.optim is None or bool(DIVIDABLE.fullmatch(rung.optim)))


def check_rung(mode: Mode, rung: Rung | None) -> None:
    """Raise SpecError for weights that an earlier plan of the job keeps in a way in which they cannot be divided."""
    if mode == "fsdp" and rung is not None and not can_divide(rung):
        raise SpecError(
            f"parallel: fsdp: the job keeps its weights as {rung.master_weights}, stepped by {rung.optim}",
            hint="write parallel: ddp",
            fix={"parallel": "ddp"},
        )


def check_precision(mode: Mode, choices: Precision) -> None:
    """Raise SpecError for a precision that cannot be trained with in a mode."""
    if mode == "fsdp" and choices.fp16:
        raise SpecError(
            "parallel: fsdp: float16 is not supported, because its GradScaler sees one part of the gradients only",
            hint="write dtype: bfloat16, or parallel: ddp",
            fix={"parallel": "ddp"},
        )


def explained(mode: Mode, choices: Precision) -> Precision:
    """Return the precision with what a mode means for it."""
    if mode != "fsdp" or not choices.bf16:
        return choices
    why = "the autocast of one GPU; FSDP's own mixed precision, which is not autocast, is not used"
    return replace(choices, reasons={**choices.reasons, "bf16": f"{choices.reasons['bf16']} ({why})"})


def _storage(model: BaseModelInfo) -> str:
    """Return the dtype into which a stored checkpoint packs its 4-bit weights."""
    quantization = model.config.get("quantization_config")
    return str(quantization.get("bnb_4bit_quant_storage", "uint8") if isinstance(quantization, dict) else "uint8")


def choose(spec: JobSpec, mode: Mode, memory: Memory, whole: Memory, why: str = "") -> Parallel:
    """Return the division in a mode. `memory` is the estimate for one device, `whole` that of the preferred mode.

    `why`: the reason for which a model is not divided.
    """
    training, resources = spec.training, spec.resources
    rows, steps, ranks = training.per_device_train_batch_size, training.gradient_accumulation_steps, resources.num_ranks
    if mode == "none":
        ranks = 1
    return Parallel(
        mode=mode,
        num_ranks=ranks,
        ranks_per_node=ranks // resources.nodes,
        num_nodes=resources.nodes,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        effective_batch=rows * steps * ranks,
        reasons={"mode": _why(spec, mode, memory, whole, why), "effective_batch": _times(spec, rows, steps, ranks)},
    )


def _why(spec: JobSpec, mode: Mode, memory: Memory, whole: Memory, why: str) -> str:
    if mode == "none":
        return "the job uses one device"
    if spec.parallel == mode:
        return "as the job asks"
    if mode == "fsdp" and whole.fits:
        return (
            "the whole model fits on each GPU only with weights or an optimizer that are rounded; divided, it needs "
            f"{gib(memory.total_bytes)} without that"
        )
    if mode == "fsdp":
        return (
            f"the whole model needs {gib(whole.total_bytes)} on each GPU, but only {gib(whole.available_bytes)} is "
            f"available; divided, {gib(memory.total_bytes)}"
        )
    if memory.fits:
        return f"the whole model fits on each GPU, in {gib(memory.total_bytes)}"
    return f"{why}, and the estimate is near the limit" if why else "the estimate is near the limit in every division"


def _times(spec: JobSpec, rows: int, steps: int, ranks: int) -> str:
    many = f"{ranks} {'GPUs' if spec.resources.gpus else 'nodes'}"
    product = f"{rows} rows × {steps} accumulation steps" + (f" × {many}" if ranks > 1 else "")
    return f"as the job asks: {product}" if spec.batch.effective else product
