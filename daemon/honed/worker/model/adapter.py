"""A stored adapter, put into the model that it is for: a partial fit would resume from zeros, or be merged in part.

peft reads adapters with `load_state_dict(strict=False)`. Here names are compared, and every tensor of the file
with the one in the model, so that no step between the two goes unnoticed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from honed.inputs.basemodel import read_header
from honed.system import quote
from honed.system.error import InternalError, ModelError

#: Advice for an adapter that does not fit.
OTHER_BASE = "set base_model to the model it was trained on: see base_model_name_or_path in its adapter_config.json"
#: Advice for one whose file is damaged.
COPY_AGAIN = "copy the adapter again from where it was made, with all of its files"
FILE = "adapter_model.safetensors"


def check_fits(empty: Any, adapter_dir: Path) -> None:
    """Raise ModelError for an adapter that fits a model only in part, as peft itself finds on a model without weights.

    `empty`, on meta, is wrapped in the adapter and cannot be used for anything else afterwards.
    """
    import peft
    import torch

    config = peft.PeftConfig.from_pretrained(adapter_dir)
    config.init_lora_weights = False  # nothing is drawn
    stored, _ = read_header(adapter_dir / FILE, hint="the adapter is incomplete: copy it again")
    state = {item.name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device="meta") for item in stored}
    wrap(empty, config, state, adapter_dir)


def wrap(model: Any, config: Any, state: dict[str, Any], adapter_dir: Path) -> Any:
    """Wrap the model's modules in place, load an adapter's stored tensors into them, and return the wrapped model.

    Raises ModelError where the tensors do not fit the model, or only in part.
    """
    import peft

    try:
        wrapped = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise _misfit(model, adapter_dir, error) from error
    put(wrapped, state, adapter_dir, low_cpu_mem_usage=True)
    return wrapped


def load(model: Any, adapter_dir: Path, *, hint: str = "") -> None:
    """Load an adapter into a model that is wrapped for it. Raises ModelError, naming the tensors, unless all of it is
    in the model afterwards, and nothing else. `hint`: the remedy, where it is neither another base model nor copy.
    """
    put(model, read(adapter_dir, hint=hint), adapter_dir, hint=hint)


def read(adapter_dir: Path, *, hint: str = "") -> dict[str, Any]:
    """Read an adapter's tensors. Raises ModelError for one of honed's that is not what it was in memory.

    `hint`: what to do about a checkpoint's; none for an adapter that a person names.
    """
    from safetensors.torch import load_file

    from honed.worker.model import tensorfile

    path = adapter_dir / FILE
    tensorfile.require(path, hint=hint or COPY_AGAIN)
    state = load_file(path)
    digests = tensorfile.read(path, hint=hint or COPY_AGAIN)
    # An adapter that a person names may have been written anew, in another dtype for instance, and is not honed's then.
    if digests is not None and (hint or set(digests.values()) & set(tensorfile.digests(state).values())):
        tensorfile.compare(path, digests, state, hint=hint or COPY_AGAIN)
    return state


@contextlib.contextmanager
def without_card(model: Any) -> Iterator[None]:
    """Have peft write no model card: an output gets honed's, a checkpoint needs none, and peft's takes 20 ms."""
    if not hasattr(model, "create_or_update_model_card"):
        yield  # it is not peft's
        return
    model.create_or_update_model_card = lambda _directory: None
    try:
        yield
    finally:
        del model.create_or_update_model_card


def write_digests(model: Any, adapter_dir: Path) -> dict[str, Any]:
    """Write the digests of a saved adapter's tensors, from memory; return these tensors.

    Raises InternalError for what peft has not saved.
    """
    import peft

    from honed.worker.model import tensorfile

    saved = peft.get_peft_model_state_dict(model)
    addresses = {tensor.data_ptr() for tensor in saved.values()}
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    if lost := [name for name, item in trained if item.data_ptr() not in addresses]:
        raise InternalError(f"peft leaves out weights that were trained: {quote.first(lost, 3)}")
    tensorfile.write(adapter_dir, {FILE: tensorfile.digests(saved)})
    return saved


def lost(wrapped: Any) -> list[str]:
    """Return the trained weights of an adapter that peft does not find again by the names under which it saves them.

    transformers' own renaming of stored weights, which peft applies to adapters, may rename such a name once more.
    """
    import peft

    with _recorded(wrapped) as given:
        peft.set_peft_model_state_dict(wrapped, peft.get_peft_model_state_dict(wrapped))
    return [
        name
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad and ".lora_" in name and name not in given
    ]


def put(
    wrapped: Any, state: dict[str, Any], adapter_dir: Path, *, hint: str = "", low_cpu_mem_usage: bool = False
) -> None:
    """Put an adapter's stored tensors into a model that is wrapped for it.

    Raises ModelError where the tensors do not fit the model, only in part, or are others there.
    """
    import peft

    from honed.worker.model import tensorfile

    with _recorded(wrapped) as given:
        try:
            fit = peft.set_peft_model_state_dict(wrapped, state, low_cpu_mem_usage=low_cpu_mem_usage)
        except (ValueError, RuntimeError, KeyError) as error:
            raise _misfit(wrapped.get_base_model(), adapter_dir, error, hint) from error
    _check_fitted(adapter_dir, wrapped, fit, hint or OTHER_BASE)
    held = wrapped.state_dict()
    if wrong := [name for name, tensor in given.items() if name in held and not tensorfile.is_same(held[name], tensor)]:
        raise ModelError(
            f"{adapter_dir}: after loading, {quote.first(sorted(wrong), 3)} differ from the file",
            hint=hint or COPY_AGAIN,
        )


@contextlib.contextmanager
def _recorded(wrapped: Any) -> Iterator[dict[str, Any]]:
    """Yield what peft loads into the model within the context, by the model's own names, as peft has converted them."""
    given: dict[str, Any] = {}
    load_state_dict = wrapped.load_state_dict

    def record(state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given.update(state)
        return load_state_dict(state, *args, **kwargs)

    wrapped.load_state_dict = record
    try:
        yield given
    finally:
        del wrapped.load_state_dict


def _misfit(model: Any, adapter_dir: Path, error: Exception, hint: str = "") -> ModelError:
    text = " ".join(str(error).split())[:300]
    return ModelError(f"{adapter_dir}: does not match {type(model).__name__}: {text}", hint=hint or OTHER_BASE)


def _check_fitted(adapter_dir: Path, wrapped: Any, fit: Any, hint: str) -> None:
    """Raise ModelError if peft left out weights of an adapter, or has none for some that are trained, according to
    `fit`.

    Weights beside those that the model's class ignores are accepted: they had no gradient, as in layers that share
    keys.
    """
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    lacking = sorted(
        name for name in fit.missing_keys if ".lora_" in name or ".modules_to_save." in name or name in trained
    )
    model = wrapped.get_base_model()
    homeless = sorted(name for name in fit.unexpected_keys if not is_passed_over(model, name))
    for names, what in (
        (homeless, "has weights that do not exist in the base model"),
        (lacking, "lacks weights that its own adapter_config.json requires"),
    ):
        if names:
            raise ModelError(f"{adapter_dir}: {what}: {quote.first(names, 3)}", hint=hint)


def is_passed_over(model: Any, name: str) -> bool:
    """Return True if a model's class declares that it ignores a stored weight of this name."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
