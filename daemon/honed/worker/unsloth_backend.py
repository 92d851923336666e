"""Loading with Unsloth, which must be imported before transformers, trl and peft, and patches them for good."""

from __future__ import annotations

from typing import Any

from honed.error import BackendError, InterruptedRunError, ModelError, PrecisionError
from honed.worker.assignment import Assignment
from honed.worker.load import is_out_of_memory


class UnslothBackend:
    """The quick one. Whatever goes wrong in it is a BackendError, since the process it patched is of no more use."""

    name = "unsloth"

    def import_libraries(self) -> None:
        try:
            import unsloth  # noqa: F401
        except Exception as error:
            raise _unable(error) from error

    def load_model(self, assignment: Assignment) -> Any:
        try:
            return self._load(assignment)
        except (InterruptedRunError, ModelError, PrecisionError):
            raise
        except Exception as error:
            if is_out_of_memory(error):  # another backend would need no less
                raise
            raise _unable(error) from error

    def _load(self, assignment: Assignment) -> Any:
        import torch
        from unsloth import FastLanguageModel

        from honed.worker.transformers_backend import attach_adapter, cast_trainable, keep_trainable_layout

        spec, precision = assignment.spec, assignment.precision
        kwargs = spec.training.as_kwargs()
        model, _ = FastLanguageModel.from_pretrained(
            str(assignment.base_model_path),
            max_seq_length=spec.training.max_length or 1024,
            dtype=getattr(torch, precision.load_dtype),
            load_in_4bit=precision.quantization == "4bit",
            load_in_8bit=precision.quantization == "8bit",
            full_finetuning=spec.lora is None and not spec.adapter,
            attn_implementation=precision.attn_implementation,
            trust_remote_code=spec.trust_remote_code,
            use_gradient_checkpointing=kwargs.get("gradient_checkpointing", True),
        )
        keep_trainable_layout(model)
        if spec.adapter or spec.lora is None:
            return attach_adapter(model, assignment)
        options = spec.lora.model_dump(exclude_unset=False, exclude_none=True)
        model = FastLanguageModel.get_peft_model(
            model,
            **options,
            random_state=assignment.seed,
            use_gradient_checkpointing=kwargs.get("gradient_checkpointing", True),
        )
        cast_trainable(model, precision)
        return model


def _unable(error: Exception) -> BackendError:
    return BackendError(
        f"Unsloth cannot train this model here: {type(error).__name__}: {error}",
        hint="backend: transformers, or backend: auto, which falls back to it",
    )
