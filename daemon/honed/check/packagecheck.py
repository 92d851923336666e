"""Checks of the packages that a job needs: whether they are installed, in versions known to work."""

from __future__ import annotations

import importlib.util

from honed.inputs.basemodel import BaseModelInfo
from honed.plan.activation import Row
from honed.spec import metric_names
from honed.spec.spec import JobSpec
from honed.system import installed
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError, SpecError
from honed.system.installed import Installed

#: Prefixes of optimizers that need a package of their own, the package's module, and the requirement for pip.
OPTIMIZER_PACKAGES: tuple[tuple[str, str, str], ...] = (
    ("galore_", "galore_torch", "galore-torch"),
    ("apollo_", "apollo_torch", "apollo-torch"),
    ("lomo", "lomo_optim", "lomo-optim"),
    ("adalomo", "lomo_optim", "lomo-optim"),
    ("grokadamw", "grokadamw", "grokadamw"),
    ("schedule_free_", "schedulefree", "schedulefree>=1.2.6"),
    ("schedule_free_radam", "schedulefree", "schedulefree>=1.4.0"),
    ("stable_adamw", "optimi", "torch-optimi"),
    ("adamw_torch_4bit", "torchao", "torchao>=0.15.0"),
    ("adamw_torch_8bit", "torchao", "torchao>=0.15.0"),
    ("adamw_torch_xla", "torch_xla", "torch-xla"),
    ("adamw_torch_npu_fused", "torch_npu", "torch-npu"),
    ("adamw_anyprecision", "torchdistx", "torchdistx"),
)
#: The module of Liger's kernels, and the oldest version that transformers accepts.
LIGER = ("liger_kernel", "liger-kernel>=0.3.0")


def check(job_spec: JobSpec, model: BaseModelInfo | None, planned_for: Device, here: Installed) -> None:
    """Raise EnvironmentInvalidError for a package that the job needs and that is missing or known to fail."""
    needed = [*installed.WINDOWS]
    if (
        _of_bitsandbytes(job_spec.training.optim)
        or job_spec.quantization != "none"
        or (model is not None and model.quantization)
    ):
        needed.append("bitsandbytes")
    if missing := [name for name in needed if here.versions[name] is None]:
        raise EnvironmentInvalidError(
            f"not installed in honed's environment: {', '.join(missing)}",
            hint="pip install 'honed[train]'; see honectl doctor",
        )
    for name, window, why in installed.BROKEN:
        version = here.versions[name]
        if version is not None and installed.fits(version, window):
            raise EnvironmentInvalidError(
                f"{name} {version} {why}", hint=f"pip install '{name}{installed.WINDOWS[name]}'"
            )
    _check_optimizer(job_spec.training.optim)
    _check_kernels(job_spec.training.optim, planned_for)
    _check_liger(job_spec, planned_for)
    torch = here.versions["torch"] or ""
    if planned_for.kind == "cuda" and torch.endswith("+cpu"):
        raise EnvironmentInvalidError(
            f"torch {torch} was built without CUDA, but the job is planned for {planned_for.name}",
            hint="install torch from PyPI, or set resources: {gpus: 0}",
            fix={"resources.gpus": 0},
        )
    if job_spec.guard is not None:
        metric_names.check(metric_names.parts(job_spec.guard.metric)[0], "guard.metric")
    for name in job_spec.predictions.metrics if job_spec.predictions.metrics != "auto" else ():
        metric_names.check(name, "predictions.metrics")
    if (chooser := metric_names.chooser(job_spec.training.metric_for_best_model)) is not None:
        metric_names.check(chooser, "training.metric_for_best_model")
    for tracker in job_spec.report_to:
        version, oldest = installed.version(tracker), installed.OLDEST_TRACKERS.get(tracker)
        wanted = f"'{tracker}>={oldest}'" if oldest else tracker  # quoted, since > means a redirection to a shell
        if version is None:
            raise EnvironmentInvalidError(f"report_to: {tracker} is not installed", hint=f"pip install {wanted}")
        if oldest and not installed.fits(version, f">={oldest}"):
            raise EnvironmentInvalidError(
                f"report_to: {tracker} {version} is too old for transformers", hint=f"pip install {wanted}"
            )


def _of_bitsandbytes(optimizer: str) -> bool:
    return optimizer.startswith(("paged_", "ademamix", "lion_", "rmsprop_bnb", "galore_adamw_8bit")) or optimizer in (
        "adamw_bnb_8bit",
        "adamw_8bit",
    )


def _check_optimizer(optimizer: str) -> None:
    for begins, module, wanted in OPTIMIZER_PACKAGES:
        if optimizer.startswith(begins):
            _check_there(f"training.optim: {optimizer}", module, wanted)


def _check_kernels(optimizer: str, planned_for: Device) -> None:
    """Raise SpecError for a bitsandbytes optimizer that would fail in its first step on that device."""
    is_paged = optimizer.startswith("paged_")
    match planned_for.kind:
        case "mps" if _of_bitsandbytes(optimizer) and (is_paged or "8bit" in optimizer):
            why, instead = "bitsandbytes has neither 8-bit nor paged optimizers for Apple GPUs", "adamw_torch"
        case "cpu" if optimizer.startswith("paged_ademamix"):
            why = "bitsandbytes supports paged AdEMAMix only on GPUs, but the job is planned for a CPU"
            instead = optimizer.removeprefix("paged_").removesuffix("_32bit")
        case _:
            return
    raise SpecError(f"training.optim: {why}", hint=f"optim: {instead}", fix={"training.optim": instead})


def unpaged(job_spec: JobSpec, planned_for: Device) -> list[str]:
    """Return a warning if the optimizer pages its states on NVIDIA GPUs only and the job is planned for another
    device."""
    optimizer = job_spec.training.optim
    if not optimizer.startswith("paged_") or planned_for.kind == "cuda":
        return []
    return [f"training.optim: {optimizer} pages its states only on NVIDIA GPUs; on this device they stay in memory"]


def _check_liger(job_spec: JobSpec, planned_for: Device) -> None:
    if not job_spec.training.use_liger_kernel:
        return
    if planned_for.kind == "cpu":
        raise SpecError(
            "training.use_liger_kernel: Liger's kernels run only on GPUs, but the job is planned for a CPU",
            hint="remove it",
            fix={"training.use_liger_kernel": None},
        )
    _check_there("training.use_liger_kernel", *LIGER)


def _check_there(key: str, module: str, wanted: str) -> None:
    package, _, oldest = wanted.partition(">=")
    version = installed.version(package)
    if importlib.util.find_spec(module) is None:
        raise EnvironmentInvalidError(f"{key} needs {package}, which is not installed", hint=f"pip install '{wanted}'")
    if oldest and version is not None and not installed.fits(version, f">={oldest}"):
        raise EnvironmentInvalidError(f"{key}: {package} {version} is too old", hint=f"pip install '{wanted}'")


def lacking(attached: list[Row], here: Installed) -> list[str]:
    """Return a warning if torchvision is missing, which most models' image and video processors need, though not
    all."""
    if here.versions["torchvision"] is None and any(item.kind != "audio" for row in attached for item in row.media):
        return ["torchvision is not installed: most vision models' processors need it, and the job may fail without it"]
    return []


def outside_window(here: Installed) -> list[str]:
    return [
        f"{name} {here.versions[name]} is outside the tested versions ({window})"
        for name, window in {**installed.WINDOWS, **installed.OPTIONAL_WINDOWS}.items()
        if (version := here.versions[name]) is not None and not installed.fits(version, window)
    ]
