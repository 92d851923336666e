"""Loading with Unsloth, which must be imported before transformers, trl and peft, and patches them for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from honed.inputs import unused_weights
from honed.inputs.basemodel import read_names
from honed.plan.precision import PART_KEYS, trained_parts
from honed.system.error import BackendError, HonedError, said
from honed.worker.assignment import Assignment
from honed.worker.cause import is_out_of_memory
from honed.worker.model import placing
from honed.worker.model.config import load_config

#: Tokens that a model is loaded for where the job truncates nothing: the need of its rows is only known later.
UNCUT_LENGTH = 1024


class UnslothBackend:
    """The fast backend. Every failure in it is a BackendError: the process that it has patched cannot be used on."""

    name = "unsloth"

    def __init__(self) -> None:
        self.messages: list[str] = []

    def import_libraries(self) -> None:
        # Unsloth turns autocast off, behind the plan, on a processor that only emulates bfloat16.
        os.environ.setdefault("UNSLOTH_CPU_BF16", "1")
        with _blamed(has_rows=False):
            import unsloth  # noqa: F401

    def load_base(self, assignment: Assignment) -> Any:
        with _blamed(has_rows=False):
            return _load_base(assignment, self.messages)

    def attach_adapter(self, model: Any, assignment: Assignment) -> Any:
        with _blamed(has_rows=False):
            return _attach_adapter(model, assignment)

    def make_room(self, model: Any, num_tokens: int) -> None:
        """Raise every layer's `max_seq_length`: Unsloth truncates rows to it, and says so only in its own log."""
        for module in model.modules():
            if getattr(module, "max_seq_length", num_tokens) < num_tokens:
                module.max_seq_length = num_tokens

    def building(self) -> AbstractContextManager[None]:
        return _blamed(has_rows=True)


@contextmanager
def _blamed(*, has_rows: bool) -> Iterator[None]:
    """Raise failures as BackendError, except lack of memory and honed's own errors, which any backend would meet.

    Before Unsloth has seen rows, its message concerns only the model and the machine, and is logged.
    """
    try:
        yield
    except HonedError:
        raise
    except Exception as error:
        if is_out_of_memory(error):  # another backend would need no less
            raise
        raise BackendError(
            f"Unsloth cannot train this model: {type(error).__name__}: {said(error) if has_rows else error}",
            hint="use backend: transformers, or backend: auto, which falls back to it",
        ) from error


def _load_base(assignment: Assignment, messages: list[str]) -> Any:
    import torch

    from honed.worker.model.transformers_backend import keep_trainable_layout

    spec, precision = assignment.spec, assignment.precision
    is_full = spec.lora is None and not spec.adapter
    model, _ = _loader(assignment).from_pretrained(
        str(assignment.base_model_path),
        max_seq_length=max_seq_length(assignment),
        dtype=getattr(torch, precision.load_dtype),
        load_in_4bit=precision.quantization == "4bit",
        load_in_8bit=precision.quantization == "8bit",
        full_finetuning=is_full,
        # Without it Unsloth may take bfloat16 weights, and its trainer turns autocast off; adapters are float32 anyway.
        **({"float32_mixed_precision": precision.load_dtype == "float32"} if is_full else {}),
        attn_implementation=precision.attn_implementation,
        trust_remote_code=spec.trust_remote_code,
        use_gradient_checkpointing=_is_checkpointed(assignment),
    )
    _check_complete(model, assignment)
    _check_placed(model, assignment, messages)
    if not assignment.plan.checkpoint.quantization_method:
        check_senses(model)
    keep_trainable_layout(model)
    return model


def max_seq_length(assignment: Assignment) -> int:
    """Return the length that Unsloth loads for: never more than the model has positions.

    Unsloth would stretch them (RoPE scaling), which the job did not ask for and other programs that load the adapter do
    not do.
    """
    length = assignment.spec.training.max_length or UNCUT_LENGTH
    positions = getattr(load_config(assignment), "max_position_embeddings", None)  # Unsloth reads no inner config
    return min(length, positions) if isinstance(positions, int) and positions > 0 else length


def _attach_adapter(model: Any, assignment: Assignment) -> Any:
    from honed.worker.model.transformers_backend import (
        attach_adapter,
        cast_trainable,
        check_adapted,
        check_parts,
        lora_options,
        spare_frozen,
        target_pattern,
    )

    if assignment.spec.adapter or assignment.spec.lora is None:
        return attach_adapter(model, assignment)
    check_parts(model, assignment)
    options = lora_options(model, assignment)
    if _sees(assignment):
        parts = trained_parts(assignment.spec)
        options |= {key: part in parts for part, key in PART_KEYS.items() if part != "projector"}
        # Unsloth's own all-linear turns every part on and leaves projectors out.
        if not isinstance(options["target_modules"], str) or options["target_modules"] == "all-linear":
            options["target_modules"] = target_pattern(model, options)
    model = _loader(assignment).get_peft_model(
        model,
        **options,
        random_state=assignment.seed,
        use_gradient_checkpointing=_is_checkpointed(assignment),
    )
    check_adapted(model, assignment)
    if wrong := placing.misplaced(model, assignment.spec.lora):
        raise BackendError(wrong, hint="use backend: transformers, or backend: auto, which falls back to it")
    cast_trainable(model, assignment.precision)
    spare_frozen(model)
    return model


def _loader(assignment: Assignment) -> Any:
    """Return Unsloth's class for the model: the one for text would silently ignore a vision encoder."""
    from unsloth import FastLanguageModel, FastVisionModel

    return FastVisionModel if _sees(assignment) else FastLanguageModel


def _sees(assignment: Assignment) -> bool:
    return assignment.plan.checkpoint.has_vision


def _is_checkpointed(assignment: Assignment) -> bool:
    return bool(assignment.spec.training.as_kwargs().get("gradient_checkpointing", True))


def check_senses(model: Any) -> None:
    """Raise BackendError if an encoder was quantized: Unsloth excludes them by name, and lacks Idefics3's names."""
    from honed.worker.model.transformers_backend import quantized_senses

    if names := quantized_senses(model):
        raise BackendError(
            f"Unsloth has quantized the vision or audio encoder, which the plan does not: {names[0]} and "
            f"{len(names) - 1} more",
            hint="use backend: transformers, or backend: auto, which falls back to it",
        )


def _check_complete(model: Any, assignment: Assignment) -> None:
    """Raise ModelError if weights were initialized at random for lack of stored ones: Unsloth does not report that.

    transformers marks every parameter that it has read. Marks can be lost, so only parameters that no file names count.
    """
    from honed.worker.model.transformers_backend import incomplete

    stored = read_names(assignment.base_model_path)
    missing = [
        name
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "_is_hf_initialized", False) and stored and name not in stored
    ]
    if missing:
        raise incomplete(assignment, missing)


def _check_placed(model: Any, assignment: Assignment, messages: list[str]) -> None:
    """Raise ModelError for stored weights that layers lack, and report others that are left out.

    This compares names only where every parameter is stored under its own name: otherwise they say nothing.
    """
    from honed.worker.model.transformers_backend import unplaced

    stored = read_names(assignment.base_model_path)
    if all(name in stored for name, _ in model.named_parameters()):
        left_out = unplaced(model, stored)
        if words := unused_weights.check(assignment.base_model_path, left_out, model.state_dict()):
            messages.append(words)
