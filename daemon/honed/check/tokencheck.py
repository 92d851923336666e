"""Checks of `lora.trainable_token_indices` against a checkpoint's embeddings: some end a job in peft, after the model
is loaded; with others it computes another model, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from honed.inputs.basemodel import AdapterInfo, BaseModelInfo
from honed.plan import parameter
from honed.plan.parameter import Parameter
from honed.spec.problem import shown
from honed.spec.spec import LoraSpec
from honed.system.error import Fix, ModelError, SpecError

KEY = "lora.trainable_token_indices"


def check(lora: LoraSpec, model: BaseModelInfo) -> None:
    """Raise SpecError for tokens that the model does not have, or that are trained in another way too."""
    if lora.trainable_token_indices is None or not model.tensors:
        return
    loaded, where = parameter.parameters(model), str(model.path)
    words, tied = parameter.input_embedding(loaded), parameter.tied_head(loaded)
    if words is None:
        return
    if isinstance(lora.trainable_token_indices, dict):
        _check_names(lora.trainable_token_indices, loaded, words, tied, where)
    for row, ids in parameter.token_rows(lora.trainable_token_indices, loaded):
        _check_ids(lora, row, ids, where)
        _check_once(lora, row)
    if tied is not None:
        _check_once(lora, tied)
    _check_bias(lora, loaded, tied, where)


def check_adapter(adapter: AdapterInfo, model: BaseModelInfo) -> None:
    """Raise ModelError for a stored adapter that trains tokens which the model does not have."""
    words = parameter.input_embedding(parameter.parameters(model)) if model.tensors else None
    ids = max(_stored_ids(adapter), default=0)
    if words is not None and ids >= words.shape[0]:
        raise ModelError(
            f"{adapter.path / 'adapter_config.json'}: trainable_token_indices has {ids}, but the vocabulary of "
            f"{model.path} ends at {words.shape[0] - 1}",
            hint="set base_model to the model that the adapter was trained on, with the tokens that were added to it",
        )


def _stored_ids(adapter: AdapterInfo) -> Iterator[int]:
    """Yield the ids in an adapter's config; it is another program's file."""
    stored = adapter.config.get("trainable_token_indices")
    for item in stored.values() if isinstance(stored, dict) else [stored]:
        yield from (number for number in (item if isinstance(item, list) else ()) if isinstance(number, int))


def _check_names(
    asked: dict[str, list[int]],
    loaded: tuple[Parameter, ...],
    words: Parameter,
    tied: Parameter | None,
    where: str,
) -> None:
    """Check the modules of a mapping. peft gives a tied head rows of its own where the lists differ."""
    name_of = _leaf(words)
    for name, ids in asked.items():
        if parameter.named_words(name, loaded):
            continue
        if tied is not None and name.rpartition(".")[2] == _leaf(tied):
            own = next((item for key, item in asked.items() if key.rpartition(".")[2] == name_of), None)
            if own != ids:
                every = list(dict.fromkeys([*(own or ()), *ids]))
                raise SpecError(
                    f"{KEY}.{name}: this head has the weights of {name_of} in {where}, and cannot have tokens of its "
                    "own",
                    hint=f"list the tokens of {name_of} alone: its head follows",
                    fix={KEY: every},
                )
            continue
        known = {_leaf(item): item.role for item in loaded if item.role in ("embedding", "head")}
        near = [item for item in known if known[item] == "head" and parameter.is_head(name)]
        near = near or get_close_matches(name.rpartition(".")[2], sorted(known), n=1)
        raise SpecError(
            f"{KEY}.{name}: no embedding or head of {where} is named {shown(name)}",
            hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}",
            fix={f"{KEY}.{name}": None, f"{KEY}.{near[0]}": ids} if near and near[0] not in asked else {},
        )


def _check_ids(lora: LoraSpec, param: Parameter, ids: list[int], where: str) -> None:
    beyond = [number for number in ids if number >= param.shape[0]]
    if not beyond:
        return
    place = _key_of(lora, ids)
    kept = [number for number in ids if number < param.shape[0]]
    raise SpecError(
        f"{place}.{ids.index(beyond[0])}: {_leaf(param)} of {where} has no row {beyond[0]}: the last of its "
        f"{param.shape[0]:,} is {param.shape[0] - 1}",
        hint="the ids are those of the base model's tokenizer; new tokens need a base model that has them",
        fix={place: kept} if kept else {KEY: None},
    )


def _key_of(lora: LoraSpec, ids: list[int]) -> str:
    asked = lora.trainable_token_indices
    if not isinstance(asked, dict):
        return KEY
    return f"{KEY}.{next(name for name, item in asked.items() if item is ids)}"


def _check_once(lora: LoraSpec, param: Parameter) -> None:
    """Raise SpecError if another key trains the module, too; peft cannot do both."""
    if (key := parameter.key_of(lora, param)) is None:
        return
    means = "it trains all tokens in full" if key == "modules_to_save" else "it adapts all tokens"
    value = getattr(lora, key)
    left = [name for name in value if not _names(name, param)] if isinstance(value, list) else []
    fix: Fix = {f"lora.{key}": left or None} if isinstance(value, list) and (left or key != "target_modules") else {}
    raise SpecError(
        f"{KEY}: {_leaf(param)} is in lora.{key} too: {means}",
        hint=f"remove {_leaf(param)} from {key}, or remove trainable_token_indices",
        fix=fix or {KEY: None},
    )


def _names(name: str, param: Parameter) -> bool:
    return param.module.endswith(name.removesuffix(".weight")) or f".{name}." in f".{param.module}."


def _check_bias(lora: LoraSpec, loaded: tuple[Parameter, ...], tied: Parameter | None, where: str) -> None:
    """Raise SpecError for a head that has a bias, which peft leaves out of the sum."""
    heads = [row for row, _ in parameter.token_rows(lora.trainable_token_indices, loaded) if row.role == "head"]
    heads += [tied] if tied is not None else []
    names = {item.name for item in loaded}
    for head in heads:
        if f"{head.module}.bias" in names:
            raise SpecError(
                f"{KEY}: {_leaf(head)} of {where} has a bias, which peft leaves out when it trains single tokens of it",
                hint="remove it; modules_to_save trains an embedding in full",
                fix={KEY: None},
            )


def _leaf(param: Parameter) -> str:
    return param.module.rpartition(".")[2]
