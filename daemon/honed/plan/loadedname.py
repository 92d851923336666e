"""Names of modules once they are loaded, where a checkpoint's differ, by transformers' source.

A checkpoint of the bare model lacks the first part of all names; some families have another one. What else transformers
renames is not known here: `unknown` says where that may decide which modules an adapter gets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from honed.inputs.basemodel import BaseModelInfo
from honed.system import installed

#: Families with a vision encoder that were published before transformers put its parts below `model`.
SEEING_FAMILIES = (
    "aya_vision",
    "gemma3",
    "internvl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "mllama",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "vipllava",
)
#: Their stored names, and the loaded ones.
_SEEING = (
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^language_model\.model\."), "model.language_model."),
    (re.compile(r"^model\.(?=(layers|embed_tokens|norm)\.)"), "model.language_model."),
    (re.compile(r"^(?!model\.|lm_head\.)"), "model."),
)
#: Parts of names that differ once they are loaded, beside the first one, in order.
_RENAMED = {
    "gpt_neox": ((re.compile(r"^embed_out\."), "lm_head."),),
    "phimoe": ((re.compile(r"\.block_sparse_moe\.gate\."), ".mlp.router."),),
    "laguna": (
        (re.compile(r"\.mlp\.experts\.(?=e_score_correction_bias$)"), ".mlp.gate."),
        (re.compile(r"\.mlp\.shared_expert\."), ".mlp.shared_experts."),
    ),
    "kimi_linear": (
        (re.compile(r"\.self_attn\.(?=(f_a_proj|f_b_proj|dt_bias|A_log)\b)"), ".self_attn.forget_gate."),
        (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    ),
    **dict.fromkeys(SEEING_FAMILIES, _SEEING),
}
#: Heads, which stand beside the bare model.
_HEAD = re.compile(r"(lm_head|embed_out|output_projection|score|decoder)\.(?!layers|embed)")


def translation(model: BaseModelInfo) -> Callable[[str], str]:
    """Return the function from a stored name to the loaded one, as far as that is known."""
    first = _first_part(model)
    renamed = _RENAMED.get(model.model_type, ())

    def translated(name: str) -> str:
        name = first(name)
        for pattern, to in renamed:
            name = pattern.sub(to, name)
        return name

    return translated


def is_exact(model: BaseModelInfo) -> bool:
    """Tell whether all names of a model with a vision encoder are known as they are loaded."""
    return _RENAMED.get(model.model_type) is _SEEING and "auto_map" not in model.config


def _first_part(model: BaseModelInfo) -> Callable[[str], str]:
    prefix = installed.base_prefix(model.model_type)
    parts = {tensor.name.partition(".")[0] for tensor in model.tensors if not _HEAD.match(tensor.name)}
    if prefix is None or prefix in parts or senses(model) or "auto_map" in model.config:
        return lambda name: name
    known = installed.attribute_names(model.model_type) or frozenset()
    (only,) = parts if len(parts) == 1 else [""]
    is_other = only not in ("", *known)  # else it is within the bare model
    old = f"{only}." if is_other else ""
    return lambda name: name if _HEAD.match(name) else f"{prefix}.{name.removeprefix(old)}"


#: The same tensors under other names than those that transformers has in its source: routers' biases, and numbers of an
#: activation.
_FIXED = re.compile(r"(^|\.)(e_score_correction_bias|expert_bias|act_fn\.(beta|eps))$")


def is_trainable(model: BaseModelInfo) -> Callable[[str], bool]:
    """Return the function that tells whether a stored tensor is a parameter: others are loaded, and never trained."""
    fixed = installed.fixed_names(model.model_type)
    return lambda name: name.rpartition(".")[2] not in fixed and not _FIXED.search(name)


def is_held(model: BaseModelInfo) -> Callable[[str], bool]:
    """Return the function that tells whether a stored tensor is a parameter that is not trained, unless peft makes a
    copy of its module, of which it trains every parameter."""
    held = installed.held_names(model.model_type)
    return lambda name: name.rpartition(".")[2] in held


def senses(model: BaseModelInfo) -> bool:
    return model.has_vision or model.has_audio or model.speaks


def unknown(model: BaseModelInfo, asked: Sequence[str], chosen: Iterable[str]) -> str:
    """Return the first name that may stand for other modules once they are loaded; empty if there is none.

    `asked`: names in a list, which are ends of modules' names. `chosen`: the modules that they and other keys choose.
    """
    modules = {translation(model)(tensor.name.rpartition(".")[0]) for tensor in model.tensors}
    known = installed.attribute_names(model.model_type)
    for name in asked:
        if senses(model) and not is_exact(model) and "." in name and _may_differ(name, modules):
            return name
        leaf = name.rpartition(".")[2]
        if known is None or leaf not in known or leaf.isdecimal():
            continue
        if not any(f".{leaf}." in f".{module}." for module in modules):
            return name
    return next((item for item in chosen if known and _is_renamed(item, known)), "")


def _is_renamed(module: str, known: frozenset[str]) -> bool:
    leaf = module.rpartition(".")[2]
    return not leaf.isdecimal() and leaf not in known


def _may_differ(name: str, modules: Iterable[str]) -> bool:
    """Tell whether a dotted name reaches to where a loaded name may differ: before the name of a list of layers."""
    parts = name.split(".")
    if any(part.isdecimal() for part in parts):
        return next(place for place, part in enumerate(parts) if part.isdecimal()) > 1
    return any(
        module.rpartition(".")[2] == parts[-1] and not any(part.isdecimal() for part in module.split("."))
        for module in modules
    )
