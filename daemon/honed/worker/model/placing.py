"""Where an adapter goes: peft's own choice, less what the job leaves out, and the check that it went nowhere else.

peft turns the names of a mixture's experts and router into `target_parameters`, to which it applies neither
`exclude_modules` nor `layers_to_transform`. So its choice is made first, on a copy, and the parameters that remain are
named in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from honed.plan import placement
from honed.plan.parameter import EXPERT_NAMES
from honed.spec import kind
from honed.spec.spec import LoraSpec
from honed.system import quote
from honed.system.error import ModelError
from honed.worker.assignment import Assignment

#: Names in a message.
MAX_NAMED = 3


def resolved(model: Any, lora: LoraSpec, options: dict[str, Any]) -> dict[str, Any]:
    """Return peft's options with every adapted parameter named in full, those left out removed.

    Raises ModelError where a request cannot be met: some of the experts that are one parameter, or a parameter that
    does not exist.
    """
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", **{name: value for name, value in options.items() if name != "layers_to_transform"}
    )
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    names, targets = expert_names(model), config.target_parameters or ()
    if not (names or targets):
        return options
    chosen, absent = [], set(lora.target_parameters or ())
    for name, parameter in model.named_parameters():
        ends = {target for target in targets if name == target or name.endswith(f".{target}")}
        absent -= ends
        count = parameter.shape[0] if parameter.ndim == 3 else 1
        if ends and _is_kept(
            name, lora, options, names, count, is_named=bool(ends & set(lora.target_parameters or ()))
        ):
            chosen.append(name)
        elif not ends and isinstance(lora.target_modules, str):
            _check_passed_over(name, lora, names, count)
    if absent:
        raise ModelError(
            f"lora.target_parameters: the model has no parameter {quote.first(sorted(absent), MAX_NAMED)}",
            hint="name parameters as they end once the model is loaded, such as mlp.experts.gate_up_proj",
        )
    if not targets:
        return options
    return options | {
        "target_modules": _modules(model, lora, config, options.get("exclude_modules")),
        "target_parameters": chosen or None,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    }


def expert_names(model: Any) -> dict[str, str]:
    """Return the names that a family's experts and router had as modules; empty where peft knows none."""
    return EXPERT_NAMES.get(str(getattr(model.config, "model_type", "")), {})


def _is_kept(
    name: str, lora: LoraSpec, options: dict[str, Any], names: dict[str, str], count: int, *, is_named: bool
) -> bool:
    """Return whether a parameter that peft would choose is to have an adapter; `is_named`: in target_parameters."""
    if not placement.is_in_layers(lora, name):
        return False
    out = placement.covered(name, options.get("exclude_modules"), names, count)
    wanted = "all" if is_named else placement.wanted(name, lora, names, count)
    for key, part in (("exclude_modules", out), ("target_modules", wanted)):
        if part == "some":
            raise ModelError(
                f"lora.{key}: part of {name} is named, which holds all experts of its layer in one parameter",
                hint="name all of its experts, with gate_proj and up_proj (or w1 and w3) together, or none",
            )
    return out == "none" and wanted == "all"


def _check_passed_over(name: str, lora: LoraSpec, names: dict[str, str], count: int) -> None:
    """Raise ModelError if a regular expression names experts one by one, which peft does not see."""
    is_expert = name.rpartition(".")[2] in names.values() and lora.target_modules != "all-linear"
    if is_expert and placement.is_in_layers(lora, name) and placement.wanted(name, lora, names, count) != "none":
        raise ModelError(
            f"lora.target_modules: experts of {name} are named by their numbers, which peft does not see",
            hint="name them as one: `experts` followed by `gate_proj`, `up_proj` or `down_proj` (or w1, w3, w2)",
        )


def _modules(model: Any, lora: LoraSpec, config: Any, excluded: str | list[str] | None) -> str | list[str]:
    """Return peft's choice of modules. Of a regular expression, and of all-linear, it has kept the ends of names alone,
    which may be those of other modules, too: of a convolution, say.
    """
    if isinstance(config.target_modules, str):
        return str(config.target_modules)
    ends = sorted(config.target_modules or ())
    if not isinstance(lora.target_modules, str):
        return ends
    reached = {name: module for name, module in model.named_modules() if any(name.endswith(f".{end}") for end in ends)}
    if lora.target_modules != "all-linear":
        return [name for name in reached if re.fullmatch(lora.target_modules, name)]
    linear = [name for name, item in reached.items() if _is_linear(item)]
    others = [name for name in reached if name not in linear and not placement.is_excluded(name, excluded)]
    return linear if others else ends


def _is_linear(module: Any) -> bool:
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def adapted(model: Any) -> set[str]:
    """Return the names of modules and parameters of the base model that have a low-rank adapter."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    names = set()
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            inner = name.replace(".base_layer", "")
            names.add(f"{inner}.{module.parameter_name}" if isinstance(module, ParamWrapper) else inner)
    return names


def misplaced(model: Any, lora: LoraSpec) -> str:
    """Return what is wrong where the model has an adapter that the job leaves out; empty where there is none."""
    names = expert_names(model.get_base_model())
    wrong = [
        name
        for name in sorted(adapted(model))
        if not placement.is_in_layers(lora, name) or placement.covered(name, lora.exclude_modules, names, 1) == "all"
    ]
    listed = quote.first(wrong, MAX_NAMED)
    return f"lora: {listed} got an adapter that exclude_modules or layers_to_transform leaves out" if wrong else ""


def check(model: Any, assignment: Assignment) -> None:
    """Raise ModelError if an adapter is where the job wants none."""
    assert assignment.spec.lora is not None
    if wrong := misplaced(model, assignment.spec.lora):
        raise ModelError(wrong, hint="choose the modules by target_modules alone: a list of names, or all-linear")


def remarks(model: Any, assignment: Assignment) -> Iterator[str]:
    """Yield a warning about layers that the job names and that have no adapter."""
    lora = assignment.spec.lora
    if lora is not None and (lacking := _lacking(model, lora)):
        yield (
            f"lora: {len(lacking)} modules that target_modules names have no adapter: "
            f"{quote.first(lacking, MAX_NAMED)}; peft takes these names for the mixture's experts alone"
        )


def counted(model: Any, assignment: Assignment) -> Iterator[str]:
    """Yield a warning where another number of parameters is trained than the plan counted."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    planned, unsure = assignment.plan.checkpoint.num_trained, assignment.plan.checkpoint.trained_unsure
    if kind.of(assignment.spec).trains and trained != planned:
        key = "lora" if assignment.spec.lora is not None else "adapter" if assignment.spec.adapter else "base_model"
        why = f" ({unsure})" if unsure else ""
        counted = f"{trained:,} parameters are trained, not {planned:,} as planned"
        yield f"{key}: {counted}{why}: more or less memory is needed"


def _lacking(model: Any, lora: LoraSpec) -> list[str]:
    """Return linear layers that are named as the experts of their family are, and so were passed over by peft."""
    base = model.get_base_model()
    names, there = expert_names(base), adapted(model)
    targets = lora.target_modules
    return [
        name
        for name, module in base.named_modules()
        if type(module).__name__ == "Linear"
        and (leaf := name.rpartition(".")[2]) in names
        and name not in there
        and ".lora_" not in name
        and (leaf in targets if isinstance(targets, list) else targets == "all-linear")
        and placement.is_in_layers(lora, name)
        and not placement.is_excluded(name, lora.exclude_modules)
    ]
