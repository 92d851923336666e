"""config.json and adapter_config.json of an output, in the spelling of the base model's own files.

transformers writes config.json in the spelling of its own version. Other programs and older versions read what was
published, and some take a default where they miss a key: transformers 4 reads `rope_theta`, not `rope_parameters`. So
an output gets the base's own file, with only the keys changed that differ. Every change is a line for the model card.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
Json = dict[str, Any]

#: Keys by which configs declare layers that predict several tokens at once.
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")
#: Keys of which the base's own value stays, whatever the model in memory has: they change no weight and no result.
_UNRELATED = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_internal",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "model_type",
        "pad_token_id",
        "quantization_config",
        "transformers_version",
        "torch_dtype",
        "use_cache",
        *_DRAFT_KEYS,
    }
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
#: What peft 0.10 wrote. Later keys are left out at their defaults, since an older peft refuses a key that it lacks.
_ADAPTER_KEYS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layer_replication",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
_INDENT = 2
_ABSENT = object()


def write(base_dir: Path, made: Path, config: Any, *, with_code: bool) -> list[str]:
    """Replace the config.json that transformers wrote for the model of `config`; return the changes to the base's.

    `with_code`: the output has the code files of the base. The file stays as transformers wrote it, with the older
    spelling added, where the model is only a part of what the base's file describes.
    """
    saved, raw = _read(made / FILE), _read(base_dir / FILE)
    if _is_part(raw, config):
        changes = _spell_rope(saved, type(config))
        _dump(made / FILE, saved)
        return ["config.json describes the trained part of the base model", *changes]
    changes = _set_differing(raw, saved, type(config))
    changes += _set_common(raw, config, saved, with_code=with_code)
    return _write(base_dir, made, raw, changes)


def write_merged(
    base_dir: Path, made: Path, config: Any, values: Json, *, architecture: str, with_code: bool
) -> list[str]:
    """Write the config.json of a merged model, whose `dtype` and other values are given; return the changes."""
    raw = _read(base_dir / FILE)
    saved = {"architectures": raw.get("architectures") or [architecture], "dtype": values["dtype"]}
    changes = []
    for prefix, level in _levels(raw):
        for key, value in values.items():
            before = level.get(key, _default(config, prefix, key) if prefix else None)
            if key != "dtype" and before not in (value, _ABSENT):
                changes.append(_said(f"{prefix}{key}", before, value))
                level[key] = value
    changes += _set_common(raw, config, saved, with_code=with_code)
    return _write(base_dir, made, raw, changes)


def _default(config: Any, prefix: str, key: str) -> Any:
    """Return what a config of a part has for a key that its file lacks."""
    for name in prefix.split(".")[:-1]:
        config = getattr(config, name, None)
    return getattr(config, key, _ABSENT)


def _set_common(raw: Json, config: Any, saved: Json, *, with_code: bool) -> list[str]:
    """Set what every output may have otherwise than its base."""
    changes = []
    for key, value in (("model_type", config.model_type), ("architectures", saved["architectures"])):
        if raw.get(key) != value:
            changes.append(_said(key, raw.get(key), value))
            raw[key] = value
    changes += _set_dtype(raw, saved.get("dtype") or saved.get("torch_dtype"))
    changes += [f"removed {key}" for key in _remove(raw, saved, with_code=with_code)]
    return changes + _spell_rope(raw, type(config))


def _write(base_dir: Path, made: Path, raw: Json, changes: list[str]) -> list[str]:
    if changes:
        _dump(made / FILE, raw)
    else:
        shutil.copyfile(base_dir / FILE, made / FILE)
    return [f"{FILE}: {change}" for change in changes]


def is_part_of(base_dir: Path, config: Any) -> bool:
    """Return whether a model is the part of its base that is trained, such as the thinker of one that also speaks."""
    return _is_part(json.loads((base_dir / FILE).read_bytes()), config)


def _is_part(raw: Json, config: Any) -> bool:
    return isinstance(raw.get("thinker_config"), dict) and "thinker_config" not in config.to_dict()


def differences(one: Any, other: Any) -> list[str]:
    """Return the keys in which two configs of one class describe other models."""
    return sorted(path for path, _, _ in _compare(_plain(one), _plain(other)))


def _described(kind: type[Any], raw: Json) -> Json:
    """Return what a config's class reads in a file. An infinite number is an object there."""
    return _plain(kind.from_dict(kind._decode_special_floats(json.loads(json.dumps(raw)))))


def _plain(config: Any) -> Json:
    text: Json = json.loads(json.dumps(config.to_dict(), default=str))
    return text


def _compare(one: Json, other: Json, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in one.keys() | other.keys():
        is_config = not prefix or prefix.endswith("_config.")
        if key in _UNRELATED or (is_config and not (key in one and key in other)):
            continue  # a key in one alone is an attribute that a library left in the object
        ours, theirs = one.get(key), other.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _compare(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            yield f"{prefix}{key}", ours, theirs


def _set_differing(raw: Json, saved: Json, kind: type[Any]) -> list[str]:
    """Take over what has changed in the model's config since it was read."""
    fresh, live = (_described(kind, {**item, "model_type": kind.model_type}) for item in (raw, saved))
    changes = []
    for path, before, after in sorted(_compare(fresh, live), key=lambda item: item[0]):
        key, *rest = path.split(".")
        if rest and isinstance(raw.get(key), dict) and len(rest) == 1:
            raw[key] |= {rest[0]: after}
        else:
            raw[key] = saved.get(key, live[key])
        if key == "rope_parameters":  # the older spelling would be read first
            raw.pop("rope_scaling", None)
        changes.append(_said(path, before, after))
    return changes


def _set_dtype(raw: Json, dtype: str | None) -> list[str]:
    """Set the dtype of the weights wherever the base's file names one, under the name that it uses."""
    if dtype is None:
        return []
    changes = []
    for prefix, level in _levels(raw):
        named = [key for key in _DTYPE_KEYS if level.get(key) is not None]
        for key in named or ([] if prefix else ["dtype"]):
            if level.get(key) != dtype:
                changes.append(_said(f"{prefix}{key}", level.get(key), dtype))
                level[key] = dtype
    return changes


def _levels(raw: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    yield prefix, raw
    for key, item in raw.items():
        if key.endswith("_config") and isinstance(item, dict) and key != "quantization_config":
            yield from _levels(item, f"{prefix}{key}.")


def _remove(raw: Json, saved: Json, *, with_code: bool) -> Iterator[str]:
    for key in ("quantization_config", "compression_config"):
        if key in raw and key not in saved:
            del raw[key]
            yield key
    if "auto_map" in raw and not with_code:
        del raw["auto_map"]
        yield "auto_map, since the base's code was not used"


def declare_no_drafts(made: Path) -> list[str]:
    """Set the numbers of layers that predict several tokens to 0 where the files do not have these layers."""
    raw, changes = _read(made / FILE), []
    for prefix, level in _levels(raw):
        for key in _DRAFT_KEYS:
            if level.get(key):
                changes.append(f"config.json: {_said(f'{prefix}{key}', level[key], 0)}: its weights cannot be copied")
                level[key] = 0
    if changes:
        _dump(made / FILE, raw)
    return changes


def _said(key: str, before: object, after: object) -> str:
    return f"{key} is {json.dumps(after)} (base: {json.dumps(before)})"


# --- Rotary positions -------------------------------------------------------------------------------------------------


def _spell_rope(raw: Json, kind: type[Any]) -> list[str]:
    """Add the keys that transformers 4 reads where a config has `rope_parameters` alone; return the changes.

    They are added only if the installed transformers reads the same model with them as without.
    """
    added = {prefix: keys for prefix, level in _levels(raw) if (keys := _older_rope(level))}
    if not added:
        return []
    trial: Json = json.loads(json.dumps(raw))
    for prefix, level in _levels(trial):
        level.update(added.get(prefix, {}))
    before = _described(kind, raw)
    try:
        after = _described(kind, trial)
    except (KeyError, TypeError, ValueError):  # as with Gemma 4's kind of positions, which no older version can say
        return []
    if any(True for _ in _compare(before, after)):
        return []
    raw.clear()
    raw |= trial
    names = sorted(f"{prefix}{key}" for prefix, keys in added.items() for key in keys)
    return [f"added {', '.join(names)}, the spelling of rope_parameters before transformers 5"]


def _older_rope(level: Json) -> Json:
    """Return the keys of before transformers 5 for a config's `rope_parameters`, without those that it has."""
    rope = level.get("rope_parameters")
    if not isinstance(rope, dict) or level.get("rope_scaling"):
        return {}
    names = ("rope_theta", "partial_rotary_factor")
    match level.get("model_type"):
        case "gpt_neox" | "gpt_neox_japanese":
            names = ("rotary_emb_base", "rotary_pct")
        case "modernbert-decoder" | "modernbert":
            names = ("global_rope_theta", "partial_rotary_factor")
    keys: Json = {}
    if isinstance(rope.get("full_attention"), dict):
        sliding = rope.get("sliding_attention") or {}
        local = "local_rope_theta" if names[0].startswith("global") else "rope_local_base_freq"
        if sliding.get("rope_type", "default") != "default":
            return {}  # no older version can say this
        keys, rope = {local: sliding.get("rope_theta")}, rope["full_attention"]
    keys |= {names[0]: rope.get("rope_theta"), names[1]: rope.get("partial_rotary_factor")}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        left = ("rope_theta", "partial_rotary_factor")
        keys["rope_scaling"] = {key: item for key, item in rope.items() if key not in left}
    return {key: item for key, item in keys.items() if item is not None and level.get(key) is None}


# --- An adapter -------------------------------------------------------------------------------------------------------


def write_adapter(made: Path, *, base_model: str, revision: str | None, defaults: Mapping[str, Any]) -> None:
    """Name the base in adapter_config.json as others can find it, and leave out what older versions of peft refuse.

    `defaults` are the values of an adapter for which nothing was chosen.
    """
    raw = _read(made / ADAPTER_FILE)
    raw |= {"base_model_name_or_path": base_model, "revision": revision}
    raw["target_modules"] = sorted(targets) if isinstance(targets := raw.get("target_modules"), list) else targets
    kept = {key: item for key, item in raw.items() if key in _ADAPTER_KEYS or item != defaults.get(key)}
    _dump(made / ADAPTER_FILE, kept)


def _read(path: Path) -> Json:
    document: Json = json.loads(path.read_bytes())
    return document


def _dump(path: Path, contents: Json) -> None:
    path.write_text(json.dumps(contents, indent=_INDENT, ensure_ascii=False) + "\n", encoding="utf-8")
