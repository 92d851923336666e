"""Loading of the model, in the planned precision, through one of two backends.

A backend is a few functions behind one interface: `import_libraries`, before which nothing of the training stack may be
imported, `load_base`, and `attach_adapter`; the model is audited after each of the last two. `make_room` is called
before the trainer is built, `building` while it is built. The tokenizer, of tokenizer.py, is the same for both.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from honed.inputs import modality
from honed.plan.precision import trained_parts
from honed.system.error import BackendError, HonedError, InternalError, ModelError
from honed.worker import cause
from honed.worker.assignment import Assignment
from honed.worker.model import dtypes
from honed.worker.model.audit import Auditor

if TYPE_CHECKING:
    from honed.worker.model import basis
    from honed.worker.rows.processor import Processor


class Backend(Protocol):
    """The interface of a library that loads a model."""

    name: str

    @property
    def messages(self) -> Sequence[str]:
        """Messages about the load for the job's owner."""

    def import_libraries(self) -> None:
        """Import the training stack, in the order that this backend needs."""

    def load_base(self, assignment: Assignment) -> Any:
        """Load the base model as planned, whatever the checkpoint looks like. Raises ModelError or BackendError."""

    def attach_adapter(self, model: Any, assignment: Assignment) -> Any:
        """Wrap the model in a new adapter, or in the one to continue from; full fine-tuning gets its model back."""

    def make_room(self, model: Any, num_tokens: int) -> None:
        """Let rows and prompts of so many tokens through without truncation."""

    def building(self) -> AbstractContextManager[None]:
        """Wrap the construction of the trainer, whose class may be the backend's own."""


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any
    messages: tuple[str, ...] = ()  #: messages for the job's owner
    rule: dtypes.Rule | None = None  #: the dtypes in which full fine-tuning's weights are saved
    basis: basis.Basis | None = None  #: of an adapter


def choose(name: str) -> Backend:
    """Return the backend of that name, with nothing imported yet."""
    match name:
        case "unsloth":
            from honed.worker.model.unsloth_backend import UnslothBackend

            return UnslothBackend()
        case "transformers":
            from honed.worker.model.transformers_backend import TransformersBackend

            return TransformersBackend()
        case _:
            raise BackendError(f"no such backend: {name}")


def load(backend: Backend, assignment: Assignment, auditor: Auditor, tokenizer: Any) -> Loaded:
    """Load the model. Raises ModelError, PrecisionError, or BackendError if Unsloth fails."""
    from transformers import set_seed

    from honed.worker.model import basis, placing, verify

    set_seed(assignment.seed)  # the adapter's first weights are drawn
    try:
        model = backend.load_base(assignment)
        compared = verify.check(model, assignment.base_model_path)
        # Freeze before the audit, or it would take a frozen base for trained weights.
        freeze(model, assignment)
        auditor.model(model, "loaded")
        wanted, base_dir = assignment.precision.save_dtype, assignment.base_model_path
        loaded = assignment.precision.load_dtype
        rule = None if wanted is None else dtypes.for_saving(model, base_dir, wanted, loaded=loaded)
        model = backend.attach_adapter(model, assignment)
        hold_statistics(model, assignment)
        stands_on = basis.of(base_dir, compared, model) if hasattr(model, "peft_config") else None
    except (ImportError, HonedError):
        raise
    except Exception as error:
        if cause.is_out_of_memory(error):
            raise
        explained = cause.explain(error, str(assignment.job_id))
        kind = ModelError if isinstance(explained, InternalError) else type(explained)
        raise kind(f"{assignment.base_model_path}: {explained.said}", hint=explained.hint) from error
    messages = (*backend.messages, *placing.counted(model, assignment))
    return Loaded(model, tokenizer, messages, rule, stands_on)


def freeze(model: Any, assignment: Assignment) -> None:
    """Freeze all that is not trained: the base beside an adapter, and the parts that full fine-tuning excludes.

    Raises ModelError if the job names or trains a part that the model does not have.
    """
    is_adapted, wanted = assignment.precision.adapter_dtype is not None, trained_parts(assignment.spec)
    there = {modality.part(name) for name, _ in model.named_parameters()}
    for kind in sorted({*assignment.spec.parts.patterns, *(() if is_adapted else wanted)} - there):
        key = f"parts.{kind}" if kind in assignment.spec.parts.patterns else f"train_parts: {kind}"
        raise ModelError(
            f"{key}: {type(model).__name__} has no such part among its modules: "
            f"{', '.join(name for name, _ in model.named_children())}",
            hint="transformers may name modules differently than the checkpoint: a shorter expression matches both",
        )
    for name, parameter in model.named_parameters():
        if is_adapted or modality.part(name) not in wanted:
            parameter.requires_grad_(False)


def hold_statistics(model: Any, assignment: Assignment) -> None:
    """Keep batch norms of what is not trained in eval mode, whatever mode the model is put in.

    In training mode they would compute otherwise than in the output, and change statistics that an adapter does not
    carry. Those in modules_to_save are trained and saved with it.
    """
    from torch.nn.modules.batchnorm import _NormBase

    is_adapted, wanted = assignment.precision.adapter_dtype is not None, trained_parts(assignment.spec)
    for name, module in model.named_modules():
        if not isinstance(module, _NormBase) or not module.track_running_stats:
            continue
        is_trained = "modules_to_save" in name.split(".") if is_adapted else modality.part(name) in wanted
        if not is_trained:
            module.eval()
            module.train = types.MethodType(_stay, module)


def _stay(module: Any, _mode: bool = True) -> Any:
    return module


def load_tokenizer(assignment: Assignment, *, warn: Callable[[str], None] = lambda _text: None) -> Any:
    """Load the job's tokenizer; see tokenizer.py."""
    from honed.worker.model import tokenizer

    return tokenizer.load(assignment, warn=warn)


def load_processor(assignment: Assignment, tokenizer: Any) -> Processor:
    """Load the base model's processor, around the job's tokenizer. Raises DatasetError if it has none."""
    from honed.worker.rows import processor

    return processor.load(assignment, tokenizer, assignment.spec.media.limits)
