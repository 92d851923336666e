"""The division of a job between devices, with reasons.

    ddp    the whole model on each device; the rows are divided, and gradients are averaged
    fsdp   weights, gradients and optimizer states are divided, too; a layer is whole while it is computed

One rank trains on each device. `num_ranks` follows from the job file alone; the mode depends on the model's size.
"""

from __future__ import annotations

from typing import Literal, get_args

from honed.job.plan_file import Memory, Parallel
from honed.job.progress import gib
from honed.plan import precision
from honed.spec.spec import JobSpec
from honed.system.device import Device
from honed.system.error import SpecError

Mode = Literal["none", "ddp", "fsdp"]
#: The modes that the worker has: others are refused by name, and never chosen.
SUPPORTED: frozenset[Mode] = frozenset({"none", "ddp"})


def check(spec: JobSpec, *, has_cluster: bool = False) -> None:
    """Raise SpecError for a division that this version, or this machine's configuration, does not have."""
    if spec.resources.nodes > 1 and not has_cluster:
        raise SpecError(
            f"resources.nodes: {spec.resources.nodes} machines need a cluster, and honed.toml has none",
            hint="write resources.nodes: 1",
            fix={"resources.nodes": 1},
        )
    asked = spec.parallel
    if spec.resources.num_ranks > 1 and asked != "auto" and asked not in SUPPORTED:
        others = [f"parallel: {mode}" for mode in get_args(Mode)[1:] if mode in SUPPORTED]
        raise SpecError(
            f"parallel: {asked} is not supported yet",
            hint=f"write {' or '.join(others)}" if others else "write resources.gpus: 1",
            fix={"parallel": "auto"},
        )
    if spec.resources.num_ranks > 1 and not SUPPORTED - {"none"}:
        raise SpecError(
            f"resources.gpus: training on several GPUs is not supported yet, got {spec.resources.gpus}",
            hint="write gpus: 1",
            fix={"resources.gpus": 1},
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


def modes(spec: JobSpec, device: Device) -> tuple[Mode, ...]:
    """Return the modes that a job may take, the preferred one first."""
    if spec.resources.num_ranks == 1 or (device.kind != "cuda" and spec.resources.nodes == 1):
        return ("none",)
    if device.kind != "cuda":
        return ("ddp",)  # the processors of several nodes
    if spec.parallel != "auto":
        return (spec.parallel,)
    return ("ddp", "fsdp") if "fsdp" in SUPPORTED and not why_whole(spec) else ("ddp",)


def why_whole(spec: JobSpec) -> str:
    """Return why a model cannot be divided; empty if it can. The job file's rules refuse the same by name."""
    if spec.quantization == "8bit":
        return "8-bit weights cannot be divided"
    if spec.training.save_strategy == "best" or spec.training.load_best_model_at_end:
        return "the best checkpoint must be loadable as one"
    if precision.is_full(spec) and spec.master_weights == "compensated":
        return "compensated weights cannot be divided"
    return ""


def choose(spec: JobSpec, mode: Mode, memory: Memory, whole: Memory) -> Parallel:
    """Return the division in a mode. `memory` is the estimate for one device, `whole` that of the preferred mode."""
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
        reasons={"mode": _why(spec, mode, memory, whole), "effective_batch": _times(spec, rows, steps, ranks)},
    )


def _why(spec: JobSpec, mode: Mode, memory: Memory, whole: Memory) -> str:
    if mode == "none":
        return "the job uses one device"
    if spec.parallel == mode:
        return "as the job asks"
    if mode == "fsdp":
        return (
            f"the whole model needs {gib(whole.total_bytes)} on each GPU, but only {gib(whole.available_bytes)} is "
            f"available; divided, {gib(memory.total_bytes)}"
        )
    if memory.fits:
        return f"the whole model fits on each GPU, in {gib(memory.total_bytes)}"
    return f"{why_whole(spec) or 'parallel: fsdp is not supported yet'}, and the estimate is near the limit"


def _times(spec: JobSpec, rows: int, steps: int, ranks: int) -> str:
    many = f"{ranks} {'GPUs' if spec.resources.gpus else 'nodes'}"
    product = f"{rows} rows × {steps} accumulation steps" + (f" × {many}" if ranks > 1 else "")
    return f"as the job asks: {product}" if spec.batch.effective else product
