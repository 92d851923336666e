"""Proof that an output is what was trained, as other programs will open it, before it is put in place.

    config.json          describes the model that was trained, and no other
    weights              every parameter of the model that config.json describes is stored, in a form that transformers
                         turns back into the parameter in memory, bit for bit; nothing else is stored but tensors of the
                         base that transformers does not read
    adapter              as in memory, and fits the model that the base's config.json describes
    end tokens           are in the vocabulary

The base model is not loaded again: its layers are made without weights. Raises ModelError, naming what differs.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from honed.system import quote
from honed.system.error import HonedError, ModelError
from honed.worker.assignment import Assignment
from honed.worker.model import adapter, config_file, generation, leftover, names, written

_MAX_NAMED = 3
_HINT = "requeue the job: it resumes from its last checkpoint; if this happens again, please report it"
#: Keys of adapter_config.json that say where an adapter is from, not what it is.
_ORIGIN = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"})


def prove(made: Path, assignment: Assignment, model: Any) -> None:
    """Prove a model's output in `made`, an adapter or a whole model; the model is in memory as it was saved.

    An adapter gets its digests, for those that load it.
    """
    base_dir, trust_remote_code = assignment.base_model_path, assignment.spec.trust_remote_code
    with _told(made):
        if hasattr(model, "peft_config"):
            held = adapter.write_digests(model, made)
            _prove_adapter(made, model, held, _skeleton(base_dir, trust_remote_code=trust_remote_code, like=model))
        else:
            _prove_whole(made, base_dir, model, trust_remote_code=trust_remote_code)
        _check_ends(made, base_dir)


@contextlib.contextmanager
def _told(made: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except ModelError as error:
        text = error.said.replace(str(made), "the output")
        raise ModelError(f"the output cannot be opened as what was trained: {text}", hint=_HINT) from error
    except HonedError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(f"the output cannot be opened as what was trained: {text}", hint=_HINT) from error


def _check(what: str, names: Any) -> None:
    if wrong := sorted(names):
        raise ModelError(f"{what}: {quote.first(wrong, _MAX_NAMED)}")


def _skeleton(directory: Path, *, trust_remote_code: bool, like: Any = None) -> Any:
    """Build the model that a config.json describes, without weights; `like` is one of the class of config to use."""
    import torch
    from transformers import AutoConfig

    from honed.worker.model.config import model_class

    if like is None:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    else:
        config = copy.deepcopy(like.config)  # not through to_dict, which some classes do not read again
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        return model_class(config).from_config(config, trust_remote_code=trust_remote_code)


# --- A whole model ----------------------------------------------------------------------------------------------------


def _prove_whole(made: Path, base_dir: Path, model: Any, *, trust_remote_code: bool) -> None:
    skeleton = _skeleton(made, trust_remote_code=trust_remote_code)
    name = type(model).__name__.removeprefix("FSDP")  # which a divided model has
    if type(skeleton).__name__ != name:
        raise ModelError(f"config.json describes a {type(skeleton).__name__}, not a {name}")
    _check("config.json describes another model", config_file.differences(skeleton.config, model.config))
    stored, held, described = leftover.stored(made), model.state_dict(), skeleton.state_dict()
    other = [name for name, item in described.items() if name not in held or held[name].shape != item.shape]
    _check("config.json describes other weights", {*other, *(held.keys() - described.keys())})
    placed = names.read(skeleton, stored)
    seen, wrong = set(), []
    with _opened(made) as read:
        for name, value in _loaded(placed, skeleton, read):
            seen.add(name)
            if not _is_same(value, held[name]):
                wrong.append(name)
    _check("has other weights than the model in memory", wrong)
    _check("lacks weights", written.lacking(skeleton, seen))
    _check_copied(made, base_dir, [name for name in stored if placed.parameter(name) is None])
    _check_ties(skeleton, held)


def _loaded(placed: names.Names, skeleton: Any, read: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Yield every parameter and its value, as transformers makes it of stored tensors."""
    for name, parameter in placed.whole.items():
        yield parameter, read(name)
    for first, group in placed.groups.items():
        try:
            made = group.convert(first, read, skeleton)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(f"has other weights than {first} is made of: {error}") from error
        yield from made.items()


def _check_copied(made: Path, base_dir: Path, unread: list[str]) -> None:
    """Raise ModelError for stored tensors that no model reads, unless they are the base's."""
    ours, theirs = leftover.stored(made), leftover.stored(base_dir)
    _check("has weights that no model reads", set(unread) - theirs.keys())
    _check(
        "has other weights than the base", (name for name in unread if not leftover.is_same(ours[name], theirs[name]))
    )


def _check_ties(skeleton: Any, held: dict[str, Any]) -> None:
    """Raise ModelError for weights that a load ties, and that differ in memory: they are stored once."""
    ties = getattr(skeleton, "all_tied_weights_keys", None) or {}
    _check(
        "has as one what are two weights in memory",
        (target for target, source in ties.items() if not _is_same(held[target], held[source])),
    )


@contextlib.contextmanager
def _opened(made: Path) -> Iterator[Callable[[str], Any]]:
    """Open the files of weights, and yield a function that reads a tensor by its stored name."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in leftover.files(made)}
        holders = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 - not a dict
        yield lambda name: holders[name].get_tensor(name)


def _is_same(one: Any, other: Any) -> bool:
    from honed.worker.model import tensorfile

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.data_ptr() == other.data_ptr() and one.device == other.device and one.stride() == other.stride():
        return True
    return tensorfile.equal_bits(one.cpu(), other.cpu())


# --- An adapter -------------------------------------------------------------------------------------------------------


def _prove_adapter(made: Path, model: Any, held: dict[str, Any], skeleton: Any) -> None:
    import peft
    from safetensors import safe_open

    written, held_config = _parts(peft.PeftConfig.from_pretrained(made)), _parts(model.peft_config["default"])
    _check(
        "adapter_config.json describes another adapter",
        (key for key in written.keys() | held_config.keys() if written.get(key) != held_config.get(key)),
    )
    with safe_open(made / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
        _check("lacks weights of the adapter", held.keys() - names)
        _check("has weights that the adapter does not have", names - held.keys())
        _check(
            "has other weights than the adapter in memory",
            (name for name in names if not _is_same(file.get_tensor(name), held[name])),
        )
    adapter.check_fits(skeleton, made)


def _parts(config: Any) -> dict[str, Any]:
    values = {key: item for key, item in config.to_dict().items() if key not in _ORIGIN}
    # A set is a list in the file; `target_parameters` is either in memory.
    return {key: sorted(item, key=str) if isinstance(item, set | list) else item for key, item in values.items()}


# --- End tokens -------------------------------------------------------------------------------------------------------


def _check_ends(made: Path, base_dir: Path) -> None:
    """Raise ModelError for end tokens outside of the vocabulary, unless the base's own files name them, too."""
    config = made if (made / config_file.FILE).is_file() else base_dir
    size = _vocabulary(config / config_file.FILE)
    for name in (config_file.FILE, generation.FILE):
        if (made / name).is_file():
            known = {end for file in (config_file.FILE, generation.FILE) for end in _ends(base_dir / file)}
            added = (str(end) for end in _ends(made / name) - known if not 0 <= end < size)
            _check(f"{name} ends answers at tokens that do not exist", added)


def _ends(path: Path) -> set[int]:
    ids = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    return set() if ids is None else {int(item) for item in (ids if isinstance(ids, list) else [ids])}


def _vocabulary(path: Path) -> float:
    raw = json.loads(path.read_bytes())
    sizes = [level["vocab_size"] for level in (raw, raw.get("text_config") or {}) if level.get("vocab_size")]
    return max(sizes, default=float("inf"))
