"""Checks of the module names in a `lora:` section against a checkpoint's modules: peft silently ignores a name that
matches nothing, or reports it only after the model is loaded.

    header of the weights ──► modules ─┐
    source of transformers ──► leaves ─┴─► target_modules, exclude_modules, modules_to_save, patterns, layers

A checkpoint may store a module under another name than it is loaded with, so a name counts as unknown only if neither
the header nor the source of the model's class has it. If that cannot be determined, nothing is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from honed.check import tokencheck
from honed.inputs import modality
from honed.inputs.basemodel import QUANTIZATION_STATE, AdapterInfo, BaseModelInfo
from honed.plan import loadedname, parameter, placement, precision
from honed.plan.parameter import Parameter
from honed.spec import kind as kinds
from honed.spec.media import Part
from honed.spec.problem import shown
from honed.spec.spec import JobSpec, LoraSpec
from honed.system import installed, quote
from honed.system.error import Fix, ModelError, SpecError

#: Names listed in a hint, at most.
MAX_NAMED = 12
#: Other tools' names for peft's all-linear.
_ALL = frozenset({"all", "all_linear", "all-linear", "all-linear-layers", "linear", "auto"})
#: Prefixes of a loaded module's name, where the checkpoint's name begins otherwise.
_PREFIXES = (
    "",
    "model.",
    "transformer.",
    "language_model.",
    "language_model.model.",
    "model.language_model.",
    "model.language_model.model.",
    "model.model.",
    "thinker.",
    "thinker.model.",
    "base_model.",
    "gpt_neox.",
)
#: Attention's input projections, separate and as one matrix.
_ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "W_pack", "qkv")),
    (("query", "key", "value"), ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "W_pack", "qkv")),
)
#: peft's own way to find a module's layer; a checkpoint of the bare model lacks the first part of the name.
_LAYER = re.compile(r"(?:.*?\.)?[^.]*\.(\d+)\.")


@dataclass(frozen=True)
class Modules:
    """The modules of a base model, as far as its files and transformers' source show."""

    layers: frozenset[str]  #: modules with a matrix of their own, to which an adapter can be attached
    flat: frozenset[str]  #: modules with vectors only: norms
    packed: frozenset[str]  #: modules that hold several matrices as one parameter: nn.MultiheadAttention, experts
    source: frozenset[str] | None  #: attributes in the source of the model's class; None if it cannot be read
    is_plain: bool  #: a text-only model, whose modules keep their names when they are loaded

    @cached_property
    def containers(self) -> frozenset[str]:
        """Modules that only hold other modules."""
        names = {
            ".".join(parts[:n])
            for parts in (name.split(".") for name in self.layers | self.flat | self.packed)
            for n in range(1, len(parts))
        }
        return frozenset(names - self.layers - self.flat - self.packed)

    @cached_property
    def all(self) -> frozenset[str]:
        return self.layers | self.flat | self.packed | self.containers

    def leaves(self, parts: frozenset[Part]) -> list[str]:
        """Return the last names of the layers in these parts, most frequent first, without the head and the
        embeddings."""
        counts: dict[str, int] = {}
        for name in sorted(self.layers):
            leaf = name.rpartition(".")[2]
            if modality.part(name) in parts and _LAYER.match(name) and not leaf.isdecimal():
                counts[leaf] = counts.get(leaf, 0) + 1
        return sorted(counts, key=lambda leaf: -counts[leaf])

    def may_have(self, leaf: str) -> bool:
        """Return True if a module of that last name may exist although the header has none."""
        return self.source is None or leaf.isdecimal() or leaf in self.source


def look(model: BaseModelInfo) -> Modules | None:
    """Return the modules that the header shows; None if the weights' names are unknown."""
    layers: set[str] = set()
    flat: set[str] = set()
    packed: set[str] = set()
    for tensor in model.tensors:
        if QUANTIZATION_STATE.search(tensor.name):
            continue
        module, _, leaf = tensor.name.rpartition(".")
        is_matrix = len(tensor.shape) > 1 or leaf in ("qweight", "weight_packed")
        if leaf in ("weight", "bias", "qweight", "weight_packed"):
            (layers if is_matrix else flat).add(module)
        elif is_matrix:
            packed |= {module, tensor.name}
    if not layers:
        return None
    senses = model.has_vision or model.has_audio or model.speaks
    has_experts = any(".experts." in name for name in layers | packed)
    return Modules(
        frozenset(layers),
        frozenset(flat - layers),
        frozenset(packed - layers),
        _source(model),
        is_plain=not (senses or has_experts or "auto_map" in model.config),
    )


def _source(model: BaseModelInfo) -> frozenset[str] | None:
    """Return the attributes of all classes that the model may be built of; None if they cannot be read."""
    types = {model.model_type, *_nested_types(model.config)}
    if "auto_map" in model.config and model.model_type not in installed.known_model_types()[0]:
        return None
    files: set[str] = set()
    for model_type in types:
        names = installed.attribute_names(installed.MODEL_TYPE_ALIASES.get(model_type, model_type))
        if names is None:
            return None
        files |= names
    return frozenset(files)


def _nested_types(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("config") and not key.startswith("quantization"):
            yield str(value.get("model_type") or config.get("model_type"))
            yield from _nested_types(value)


# --- The check --------------------------------------------------------------------------------------------------------


def check(job_spec: JobSpec, model: BaseModelInfo) -> list[str]:
    """Return warnings. Raises SpecError, with the key, for names that match nothing in the model."""
    if (modules := look(model)) is None:
        return []
    _check_parts(job_spec, modules, str(model.path))
    if job_spec.lora is None:
        return []
    lora, parts, where = job_spec.lora, precision.trained_parts(job_spec), str(model.path)
    tokencheck.check(lora, model)
    return [
        *_check_targets(lora, modules, parts, where),
        *_check_renamed(lora, modules, model),
        *_check_excluded(lora, modules, where),
        *([] if job_spec.parts.patterns else _check_left(lora, modules, parts, where)),
        *_check_saved(lora, modules, where),
        *_check_parameters(lora, modules, model),
        *_check_patterns(lora, modules, where),
        *_check_layers(lora, modules, model, parts),
    ]


def _check_parts(job_spec: JobSpec, modules: Modules, where: str) -> None:
    """Check that all expressions of `parts` name modules, and that all parts which full fine-tuning trains exist."""
    for kind, text in job_spec.parts.patterns.items():
        pattern = re.compile(text)
        if not any(modality.is_within(name, pattern) for name in modules.all):
            words = {word for name in modules.all for word in name.split(".") if not word.isdecimal()}
            near = [match for asked in re.findall(r"\w+", text) for match in get_close_matches(asked, sorted(words))]
            named = list(dict.fromkeys(near)) or sorted(name for name in modules.containers if name.count(".") < 2)
            raise SpecError(
                f"parts.{kind}: no module of {where} has a name that contains {shown(text)}",
                hint=f"{'near it' if near else 'there'}: {', '.join(named[:MAX_NAMED])}",
            )
    if not precision.is_full(job_spec) or not kinds.of(job_spec).trains:
        return
    there = {modality.part(name) for name in modules.layers | modules.flat | modules.packed}
    for kind in job_spec.train_parts:
        if kind not in there:
            raise SpecError(
                f"train_parts: {where} has no modules known to belong to its {kind} part",
                hint=f"parts: {{{kind}: …}} lists them; known without it: {', '.join(sorted(there))}",
            )


def check_adapter(adapter: AdapterInfo, model: BaseModelInfo) -> None:
    """Raise ModelError for an adapter of which the base model has no module, or not all tokens."""
    tokencheck.check_adapter(adapter, model)
    changed = {
        match[1] for tensor in adapter.tensors if (match := re.search(r"(\w+)\.lora_[AB]\.weight$", tensor.name))
    }
    if not changed or (modules := look(model)) is None or any(_is_known(name, modules) for name in changed):
        return
    raise ModelError(
        f"{adapter.path / 'adapter_model.safetensors'}: trained on another base model: it changes "
        f"{', '.join(sorted(changed)[:MAX_NAMED])}, which {model.path} does not have",
        hint="set base_model to the model that the adapter was trained on: see base_model_name_or_path in its "
        "adapter_config.json",
    )


def _check_targets(lora: LoraSpec, modules: Modules, parts: frozenset[Part], where: str) -> Iterator[str]:
    key, wanted = "lora.target_modules", lora.target_modules
    if wanted == "all-linear":
        return
    if isinstance(wanted, str):
        yield from _check_expression(key, wanted, modules, parts, where)
        return
    unknown = [name for name in wanted if not _is_known(name, modules)]
    for name in wanted:
        if name not in unknown:
            _check_kind(lora, wanted, name, modules, parts, where)
    if len(unknown) == len(wanted):
        what = f"no module of {where} is named {_listed(unknown)}"
        near = _near(unknown, modules, parts)
        fix: Fix | None = (
            {key: list(dict.fromkeys(near))} if all(_near([name], modules, parts) for name in unknown) else None
        )
        if any(name.lower() in _ALL for name in unknown):
            fix = {key: "all-linear"}
        raise SpecError(f"{key}.0: {what}", hint=_meant(unknown, modules, parts), fix=fix)
    for name in unknown:
        yield (
            f"{key}.{wanted.index(name)}: no module of {where} is named {shown(name)}: it gets no adapter "
            f"({_meant([name], modules, parts)})"
        )


def _check_renamed(lora: LoraSpec, modules: Modules, model: BaseModelInfo) -> Iterator[str]:
    """Yield warnings about layers that are stored under the names in `lora.target_modules`, and loaded under others.

    Raises SpecError where none of the names is that of a loaded layer.
    """
    if not isinstance(lora.target_modules, list):
        return
    translated, of_peft = loadedname.translation(model), parameter.EXPERT_NAMES.get(model.model_type, {})
    loaded = frozenset(translated(f"{name}.")[:-1] for name in modules.all)
    is_exact = loadedname.is_exact(model)
    if is_exact and not any(_matching(name, loaded) for name in lora.target_modules):
        names = [translated(f"{name}.")[:-1] for name in lora.target_modules]
        if all(_matching(name, loaded) for name in names):
            raise SpecError(
                f"lora.target_modules.0: {shown(lora.target_modules[0])} is its name in {model.path}, and "
                f"{shown(names[0])} once transformers {installed.version('transformers')} has loaded it",
                hint=f"write {', '.join(names[:MAX_NAMED])}",
                fix={"lora.target_modules": names},
            )
    for number, name in enumerate(lora.target_modules):
        leaf = name.rpartition(".")[2]
        if leaf in of_peft or not _matching(name, modules.all):
            continue
        if not modules.may_have(leaf) or not (_matching(name, loaded) or ("." in name and not is_exact)):
            yield (
                f"lora.target_modules.{number}: {shown(name)} is its name in {model.path}, but not in transformers "
                f"{installed.version('transformers')}, so it may get no adapter"
            )


def _check_expression(key: str, wanted: str, modules: Modules, parts: frozenset[Part], where: str) -> Iterator[str]:
    if _fits_any(wanted, modules, modules.layers | modules.packed):
        return
    is_name = re.fullmatch(r"[\w.-]+", wanted) is not None
    if wanted.lower() in _ALL:
        raise SpecError(
            f"{key}: {shown(wanted)} is read as a regular expression, and no module of {where} has that name",
            hint="write all-linear for all linear layers except the head",
            fix={key: "all-linear"},
        )
    if is_name and _is_known(wanted, modules):
        raise SpecError(
            f"{key}: {shown(wanted)} is read as a regular expression for a module's full name, and no module matches "
            "it",
            hint=f"write a list: [{wanted}]",
            fix={key: [wanted]},
        )
    what = f"{key}: {shown(wanted)} matches the full name of no layer of {where}"
    example = next((name for name in sorted(modules.layers) if _LAYER.match(name)), "")
    hint = f"full names look like {example}: begin the expression with .*" if example else "use all-linear"
    if is_name:
        hint = _meant([wanted], modules, parts)
    if is_name or modules.is_plain:
        near = _near([wanted], modules, parts) if is_name else []
        raise SpecError(what, hint=hint, fix={key: near} if near else {})
    yield f"{what}, by the names in the checkpoint ({hint})"


def _check_kind(
    lora: LoraSpec, wanted: Sequence[str], name: str, modules: Modules, parts: frozenset[Part], where: str
) -> None:
    """Raise SpecError for a name in `lora.target_modules` whose modules cannot carry an adapter."""
    key, others = f"lora.target_modules.{wanted.index(name)}", [item for item in wanted if item != name]
    if _matching(name, modules.layers | modules.packed) or not (modules_there := _matching(name, modules.all)):
        return
    below = {
        other.removeprefix(f"{item}.")
        for item in modules_there
        for other in modules.all
        if other.startswith(f"{item}.")
    }
    if any(other in modules.packed for item in modules_there for other in modules.all if other.startswith(f"{item}.")):
        return
    held = [leaf for leaf in modules.leaves(parts) if leaf in {other.rpartition(".")[2] for other in below}]
    if held:
        raise SpecError(
            f"{key}: {shown(name)} is not a layer in {where} but a container of layers, and only layers can have an "
            "adapter",
            hint=f"name the layers in it: [{', '.join(held[:MAX_NAMED])}]",
            fix={"lora.target_modules": [*others, *(item for item in held if item not in others)]},
        )
    raise SpecError(
        f"{key}: {shown(name)} has no weight matrix in {where}, so it cannot have an adapter",
        hint=f"remove it here; modules_to_save: [{name}] trains it in full",
        fix={"lora.target_modules": others, "lora.modules_to_save": [*(lora.modules_to_save or ()), name]}
        if others
        else {},
    )


def _check_excluded(lora: LoraSpec, modules: Modules, where: str) -> Iterator[str]:
    key, excluded = "lora.exclude_modules", lora.exclude_modules
    if isinstance(excluded, str):
        if not _fits_any(excluded, modules, modules.all):
            yield f"{key}: {shown(excluded)} matches the full name of no module of {where}: nothing is excluded"
        return
    for number, name in enumerate(excluded or ()):
        if not _is_known(name, modules):
            near = get_close_matches(name, _last_names(modules), n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            yield f"{key}.{number}: no module of {where} is named {shown(name)}: nothing is excluded{meant}"


def _check_left(lora: LoraSpec, modules: Modules, parts: frozenset[Part], where: str) -> Iterator[str]:
    """Raise SpecError if no layer is left that gets an adapter: all are excluded, or lie in parts that are not trained.
    Names that the header does not show lead to no refusal."""
    yield from ()
    wanted, among = lora.target_modules, modules.layers | modules.packed
    if wanted == "all-linear":
        chosen = {name for name in modules.layers if name.rpartition(".")[2] in modules.leaves(parts)}
    elif isinstance(wanted, str):
        chosen = {name for name in among if _fits(wanted, name)} if modules.is_plain else set()
    else:
        matches = [set(_matching(name, among)) for name in wanted]
        if any(
            not names and modules.may_have(name.rpartition(".")[2]) for name, names in zip(wanted, matches, strict=True)
        ):
            return
        chosen = set().union(*matches)
    trained = {name for name in chosen if modality.part(name) in parts}
    if chosen and not trained:
        elsewhere = sorted({modality.part(name) for name in chosen})
        switches = {
            f"lora.{key}": part in elsewhere
            for part, key in precision.PART_KEYS.items()
            if (part in elsewhere) != (part in parts)
        }
        raise SpecError(
            f"lora.target_modules: in {where} only the {' and '.join(elsewhere)} part has these layers, and that "
            "part gets no adapter",
            hint=f"write {', '.join(f'{key}: {str(value).lower()}' for key, value in switches.items())}; or name "
            "layers of each trained part",
            fix=switches,
        )
    excluded = lora.exclude_modules
    if not trained or not excluded:
        return
    left = trained - (
        {name for name in trained if re.fullmatch(excluded, name)}
        if isinstance(excluded, str)
        else {name for item in excluded for name in _matching(item, frozenset(trained))}
    )
    if not left:
        raise SpecError(
            f"lora.exclude_modules: excludes every target module of {where}: nothing would be trained",
            hint="remove exclude_modules, or list fewer modules in it",
            fix={"lora.exclude_modules": None},
        )


def _check_saved(lora: LoraSpec, modules: Modules, where: str) -> Iterator[str]:
    """Check `modules_to_save`: peft matches the ends of names, and does not report a name that matches nothing."""
    for number, name in enumerate(lora.modules_to_save or ()):
        leaf = name.rpartition(".")[2]
        if modules.may_have(leaf):
            continue
        if any(module.endswith(name) for module in modules.all):
            yield (
                f"lora.modules_to_save.{number}: {shown(name)} is its name in {where}, but not in transformers "
                f"{installed.version('transformers')}, so it may not be trained"
            )
            continue
        near = get_close_matches(leaf, {*_last_names(modules), "lm_head"}, n=1)
        raise SpecError(
            f"lora.modules_to_save.{number}: no module of {where} is named {shown(name)}: it would not be trained",
            hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(_tops(modules)))}",
            fix={"lora.modules_to_save": [near[0] if item == name else item for item in lora.modules_to_save or ()]}
            if near
            else None,
        )


def _check_parameters(lora: LoraSpec, modules: Modules, model: BaseModelInfo) -> Iterator[str]:
    """Check `target_parameters`: the worker refuses a name that is the end of no parameter's."""
    yield from ()
    parameters = parameter.parameters(model)
    loaded = [spelled for item in parameters for spelled in placement.spellings(item.name)]
    for number, name in enumerate(lora.target_parameters or ()):
        words = name.removesuffix(".weight").removesuffix(".bias").split(".")
        if flat := [item.name for item in parameters if len(item.shape) < 2 and _ends(item, name)]:
            raise SpecError(
                f"lora.target_parameters.{number}: {flat[0]} is no matrix, and takes no adapter",
                hint="remove it; lora.modules_to_save trains norms in full, lora.bias biases",
                fix={"lora.target_parameters": [item for item in lora.target_parameters or () if item != name] or None},
            )
        ended = [item for item in parameters if _ends(item, name)]
        others = lora.model_copy(update={"target_parameters": None})
        if twice := [key for item in ended if (key := parameter.key_of(others, item, model.model_type))]:
            raise SpecError(
                f"lora.target_parameters.{number}: {ended[0].name} is the weight of a layer that {twice[0]} chooses, "
                "too",
                hint=f"remove {shown(name)} here",
                fix={"lora.target_parameters": [item for item in lora.target_parameters or () if item != name] or None},
            )
        if ended or modules.may_have(words[-1]):
            continue
        ends = sorted({".".join(item.split(".")[-3:]) for item in loaded if ".experts." in item})
        near = get_close_matches(name, ends, n=1, cutoff=0.5)
        raise SpecError(
            f"lora.target_parameters.{number}: no parameter of {model.path} has a name that ends in {shown(name)}",
            hint=f"did you mean {near[0]}?"
            if near
            else f"its experts are {', '.join(ends[:MAX_NAMED]) or 'no parameters'}",
            fix={f"lora.target_parameters.{number}": near[0]} if near else {},
        )


def _ends(param: Parameter, name: str) -> bool:
    return any(spelled == name or spelled.endswith(f".{name}") for spelled in placement.spellings(param.name))


def _check_patterns(lora: LoraSpec, modules: Modules, where: str) -> Iterator[str]:
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key) or {}:
            full = f"lora.{key}.{pattern}" if re.fullmatch(r"\w+", pattern) else f"lora.{key}"
            try:
                fits = any(_fits(rf"(.*\.)?({pattern})", name) for name in modules.all)
            except re.error as error:
                raise SpecError(
                    f"{full}: {shown(pattern)} is not a regular expression: {quote.mark(str(error))}",
                    hint="write the end of a module's name",
                ) from error
            if fits:
                continue
            leaf = re.findall(r"\w+", pattern)[-1:] or [pattern]
            what = f"{full}: {shown(pattern)} matches no module of {where}"
            if modules.may_have(leaf[0]) or not modules.is_plain:
                yield f"{what}, by the names in the checkpoint"
            else:
                near = _near(leaf, modules, frozenset(("language",))) if full != f"lora.{key}" else []
                value = getattr(lora, key)[pattern]
                fix = {full: None, **{f"lora.{key}.{item}": value for item in near}} if near else {}
                raise SpecError(what, hint=_meant(leaf, modules, frozenset(("language",))), fix=fix)


def _check_layers(lora: LoraSpec, modules: Modules, model: BaseModelInfo, parts: frozenset[Part]) -> Iterator[str]:
    yield from ()
    wanted = lora.layers_to_transform or []
    there = {
        int(match[1]) for name in modules.all if modality.part(name) in parts and (match := _LAYER.match(f"{name}."))
    }
    beyond = sorted(number for number in wanted if there and number > max(there))
    if beyond:
        raise SpecError(
            f"lora.layers_to_transform.{wanted.index(beyond[0])}: {model.path} has no layer {beyond[0]}: the last of "
            f"its {max(there) + 1} is {max(there)}",
            hint=f"layers are counted from 0: use numbers up to {max(there)}",
            fix={"lora.layers_to_transform": kept} if (kept := [item for item in wanted if item not in beyond]) else {},
        )


# --- Names ------------------------------------------------------------------------------------------------------------


def _is_known(name: str, modules: Modules) -> bool:
    return bool(_matching(name, modules.all)) or modules.may_have(name.rpartition(".")[2])


def _matching(name: str, among: frozenset[str]) -> list[str]:
    return [module for module in among if module == name or module.endswith(f".{name}")]


def _fits_any(expression: str, modules: Modules, among: frozenset[str]) -> bool:
    """Return True if an expression matches a whole name, as it is stored or may be once loaded."""
    names = among if modules.is_plain else _unprefixed(among)
    return any(_fits(expression, name) for name in names)


def _fits(expression: str, name: str) -> bool:
    return any(re.fullmatch(expression, prefix + name) for prefix in _PREFIXES)


def _unprefixed(among: frozenset[str]) -> set[str]:
    """Return the names, and the names without any of the prefixes that a loaded model's may lack."""
    longest = sorted(filter(None, _PREFIXES), key=len, reverse=True)
    return {*among, *(name.removeprefix(prefix) for name in among for prefix in longest if name.startswith(prefix))}


def _last_names(modules: Modules) -> set[str]:
    return {name.rpartition(".")[2] for name in modules.all}


def _tops(modules: Modules) -> set[str]:
    return {
        name.rpartition(".")[2] for name in modules.layers | modules.flat if not re.search(r"\.\d+(\.|$)", name)
    } or {"no module outside its layers"}


def _meant(names: Sequence[str], modules: Modules, parts: frozenset[Part]) -> str:
    if any(name.lower() in _ALL for name in names):
        return "write target_modules: all-linear for all linear layers except the head"
    leaves = modules.leaves(parts)
    near = _near(names, modules, parts)
    meant = f"did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
    if not leaves:
        return f"{meant}use all-linear"
    return f"{meant}its linear layers are {', '.join(leaves[:MAX_NAMED])}; all-linear selects all of them"


def _near(names: Sequence[str], modules: Modules, parts: frozenset[Part]) -> list[str]:
    leaves = modules.leaves(parts)
    return [near for name in names for near in _near_one(name.rpartition(".")[2], leaves)]


def _near_one(name: str, leaves: Sequence[str]) -> list[str]:
    """Return the likely meaning of a name here: families name attention's inputs too differently for a fuzzy match."""
    for one, whole in _ATTENTION:
        if name in whole and name not in leaves and (there := [item for item in one if item in leaves]):
            return there
        if name in one and (there := [item for item in whole if item in leaves]):
            return there
    return get_close_matches(name, leaves, n=1)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(shown, names[:MAX_NAMED]))
