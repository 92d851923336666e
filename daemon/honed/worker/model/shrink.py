"""A model's config made small: the same kinds of modules, with few layers, experts and words, and narrow.

Layers are the first ones, as many as show every kind. Widths and numbers of heads are divided by one number, so that
their ratios and every head's width stay. What a family derives from other keys is derived again from the small ones.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

#: Layers at least, and at most where the kinds of layers are many.
MIN_LAYERS, MAX_LAYERS = 2, 16
#: Limits of the small model.
NUM_EXPERTS, NUM_CHOSEN, NUM_WORDS, MIN_WIDTH, MAX_INNER = 4, 2, 512, 64, 128

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "num_blocks")
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "layers_num_experts")
_PLACES = re.compile(r"(layers|idxs?|index(es)?|indices|layer_ids)$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)(_local|_routed)?_experts$")
_CHOSEN = re.compile(r"^(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|moe_router_topk)$")
_HEADS = re.compile(r"(^|_)(n|num)(_\w+)?_heads?$|^attention_heads$|^(kv_)?n_heads$|^(mamba_)?n_groups$")
_SHARED_HEADS = re.compile(r"(kv|key_value)\w*_heads$|^kv_n_heads$|n_groups$")
_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "word_embed_proj_dim",
    "lru_width",
    "attention_hidden_size",
    "mamba_d_ssm",
    "embedding_dim",
)
#: Widths of other parts that are the language model's where the values are equal.
_LINKS = (
    "out_hidden_size",
    "projection_dim",
    "text_hidden_size",
    "text_dim",
    "output_proj_dims",
    "vision_output_dim",
    "hidden_size",
)
_INNER = re.compile(r"^(\w+_)?intermediate_size(_mlp)?$|^(expert_)?ffn_(dim|hidden_size)$|^n_inner$")
_WORDS = re.compile(r"^(\w+_)?vocab_size(_\w+)?$")
_WORD = re.compile(r"_token_(id|ids|index)$")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def shrunk(config: Any, *, narrows: bool = True, narrows_eyes: bool = False) -> Any:
    """Return a small config of the same class. `narrows`: widths and heads are divided too; `narrows_eyes`: those of
    the other parts by numbers of their own."""
    text = config.get_text_config()
    divisor = _divisor(_document(text)) if narrows else 1
    width = next((value for key in _WIDTHS if (value := getattr(text, key, None))), 0)
    small = functools.partial(_small, text=text, divisor=divisor, width=width, words=words(config), eyes=narrows_eyes)
    return type(config).from_dict(small(config) | {"model_type": config.model_type})


def words(config: Any) -> dict[int, int]:
    """Return the tokens that a config names, with those of the small one."""
    return {word: number for number, word in enumerate(sorted(set(_words(config))))}


def _small(config: Any, *, text: Any, divisor: int, width: int, words: Mapping[int, int], eyes: bool) -> dict[str, Any]:
    """Return the keys of a small config. Those of the language model are divided by `divisor`, its `width` too."""
    document = _document(config)
    has_text_width = not config.sub_configs and getattr(config, "hidden_size", None) == width
    is_text = config is text or (has_text_width and getattr(config, "vocab_size", None) is not None)
    number = _num_layers(config, document)
    own = divisor if is_text else _divisor(document) if eyes and not config.sub_configs else 1
    made = {key: _value(key, value, number, own, words) for key, value in document.items()}
    if not is_text and width:
        made |= {key: width // divisor for key in _LINKS if made.get(key) == width and _is_link(key, document)}
    nested = {name: part for name in config.sub_configs if (part := getattr(config, name, None)) is not None}
    for name, part in nested.items():
        if hasattr(part, "to_dict"):
            made[name] = _small(part, text=text, divisor=divisor, width=width, words=words, eyes=eyes)
            made[name]["model_type"] = part.model_type
    return made


def _is_link(key: str, document: Mapping[str, Any]) -> bool:
    """Return whether a width is that of the next part; `hidden_size` is where the part has another name for its own."""
    return key != "hidden_size" or "embed_dim" in document or "resampler_depth" in document


def _value(
    key: str,
    value: Any,
    num_layers: tuple[int, int],
    divisor: int,
    words: Mapping[int, int],
) -> Any:
    before, after = num_layers
    match value:
        case list() if _WORD.search(key):
            return [words.get(item, item) for item in value]
        case list() | tuple() | str() if before and len(value) == before and not _PLACES.search(key.removesuffix("s")):
            return value[:after]
        case list() | tuple() if (
            value and _PLACES.search(key) and all(type(item) is int and item >= 0 for item in value)
        ):
            return value[:after] if len(value) == before else [item for item in value if item < after] or [after - 1]
        case int() if type(value) is int and value > 0:
            return _number(key, value, before, after, divisor, words)
        case 0 if _WORD.search(key):
            return words.get(0, 0)
    return value


def _number(key: str, value: int, before: int, after: int, divisor: int, words: Mapping[int, int]) -> int:
    if _WORD.search(key):
        return words.get(value, value)
    if key in _LAYERS:
        return after if value == before else min(value, MIN_LAYERS)
    if key in _FIRST:
        return min(value, 1)
    if key == "moe_layer_end_index":
        return min(value, after - 1)
    if key == "num_kv_shared_layers":
        return min(value, after // 2)
    if _EXPERTS.search(key):
        return min(value, NUM_EXPERTS)
    if _CHOSEN.search(key) or key in ("n_group", "topk_group"):
        return min(value, NUM_CHOSEN if key != "topk_group" else 1)
    if _WORDS.search(key):
        return min(value, max(NUM_WORDS, len(words) + 64))
    if _INNER.search(key):
        return min(value, MAX_INNER)
    if _HEADS.search(key) or key in _WIDTHS:
        return max(1, value // divisor)
    return value


def _document(config: Any) -> dict[str, Any]:
    """Return the keys that the config is made from, without what it derives from them."""
    given = config.to_dict()
    if dataclasses.is_dataclass(config):
        known = {field.name for field in dataclasses.fields(config) if field.init}
    else:
        known = set(inspect.signature(type(config).__init__).parameters)
    known.add("rope_theta")  # which dbrx reads from a part that has no such field
    left_out = {*config.sub_configs, "quantization_config", "architectures", "transformers_version", "auto_map"}
    is_used = {key: key in known or bool(_WORD.search(key)) for key in given}  # omni's has tokens without a field
    return {key: value for key, value in given.items() if is_used[key] and key not in left_out}


def _num_layers(config: Any, document: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of layers before and after: as many as show every kind."""
    before = next((value for key in _LAYERS if isinstance(value := document.get(key), int)), 0)
    wanted = MIN_LAYERS
    for key in _KINDS:
        kinds = getattr(config, key, None)
        if isinstance(kinds, list | tuple) and len(kinds) == before:
            wanted = max(wanted, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))
    for key, value in document.items():
        if isinstance(value, list) and _PLACES.search(key) and value and len(value) != before:
            wanted = max([wanted, *(1 + min(item) for item in [[n for n in value if type(n) is int]] if item)])
    return before, min(before, wanted, MAX_LAYERS)


def _divisor(document: Mapping[str, Any]) -> int:
    """Return the largest number that divides widths and heads, and leaves both in proportion."""
    whole = [
        value
        for key, value in document.items()
        if type(value) is int
        and value > 1
        and (key in _WIDTHS or (_HEADS.search(key) and not _SHARED_HEADS.search(key)))
    ]
    shared = [
        value for key, value in document.items() if type(value) is int and value > 1 and _SHARED_HEADS.search(key)
    ]
    widths = [value for key, value in document.items() if key in _WIDTHS and type(value) is int]
    if not widths or not whole:
        return 1
    common = math.gcd(*whole)
    for number in range(common, 1, -1):
        if common % number == 0 and min(widths) // number >= MIN_WIDTH and all(_fits(one, number) for one in shared):
            return number
    return 1


def _fits(shared: int, divisor: int) -> bool:
    return shared % divisor == 0 or divisor % shared == 0


def _words(config: Any) -> Iterator[int]:
    """Yield the ids of tokens that a config and its parts name."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for key, value in part.to_dict().items() if hasattr(part, "to_dict") else ():
            if _WORD.search(key):
                yield from (
                    item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0
                )
