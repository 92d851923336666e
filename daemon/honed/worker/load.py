"""The model and its tokenizer, in the planned precision, through one of two backends.

A backend is two functions behind one interface: `import_libraries`, before which nothing of the training stack may be
imported, and `load_model`. The tokenizer is the same for both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from honed.error import BackendError, HonedError, ModelError
from honed.installed import MODEL_TYPE_ALIASES
from honed.worker.assignment import Assignment


class Backend(Protocol):
    """What loads a model."""

    name: str

    def import_libraries(self) -> None:
        """Import the training stack, in the order that this backend needs."""

    def load_model(self, assignment: Assignment) -> Any:
        """The model with its adapter, every trainable parameter in the planned dtype."""


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any


def choose(name: str) -> Backend:
    """The backend of that name, with nothing imported yet."""
    match name:
        case "unsloth":
            from honed.worker.unsloth_backend import UnslothBackend

            return UnslothBackend()
        case "transformers":
            from honed.worker.transformers_backend import TransformersBackend

            return TransformersBackend()
        case _:
            raise BackendError(f"no such backend: {name}")


def load(backend: Backend, assignment: Assignment) -> Loaded:
    """Load both. Raises ModelError, or BackendError where it is Unsloth that fails."""
    from transformers import set_seed

    set_seed(assignment.seed)  # the adapter's first weights are drawn
    tokenizer = load_tokenizer(assignment)
    try:
        model = backend.load_model(assignment)
    except (ImportError, HonedError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{assignment.base_model_path}: {type(error).__name__}: {error}", hint="see worker.log for the traceback"
        ) from error
    _check_vocabulary(model, tokenizer, assignment.base_model_path)
    return Loaded(model, tokenizer)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device's memory ran out, or the machine's: torch has a class for the first alone."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def load_config(assignment: Assignment) -> Any:
    """The model's config, under the model_type of the spec where config.json has none, or one that has another name."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path = assignment.base_model_path
    raw = json.loads((path / "config.json").read_bytes())
    stored = raw.get("model_type")
    model_type = assignment.spec.model_type or stored
    if model_type not in CONFIG_MAPPING:
        model_type = MODEL_TYPE_ALIASES.get(str(model_type), model_type)
    if model_type == stored or model_type not in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, trust_remote_code=assignment.spec.trust_remote_code)
    raw.pop("model_type", None)
    return CONFIG_MAPPING[model_type].from_dict(raw)


def load_tokenizer(assignment: Assignment) -> Any:
    """The base model's tokenizer, with a chat template of the job's own where it names one, and a pad token.

    Padding is masked in the labels and in the attention, so the end token can stand in: nothing is added to the
    embeddings.
    """
    from transformers import AutoTokenizer

    spec = assignment.spec
    tokenizer = AutoTokenizer.from_pretrained(
        assignment.base_model_path, config=load_config(assignment), trust_remote_code=spec.trust_remote_code
    )
    if spec.chat_template:
        tokenizer.chat_template = Path(spec.chat_template).read_text(encoding="utf-8")
    if tokenizer.eos_token is None:
        raise ModelError(
            f"{assignment.base_model_path}: the tokenizer has no end token (eos_token)",
            hint="set eos_token in tokenizer_config.json",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_vocabulary(model: Any, tokenizer: Any, path: Path) -> None:
    num_rows = model.get_input_embeddings().num_embeddings
    if (num_ids := max(tokenizer.get_vocab().values()) + 1) > num_rows:
        raise ModelError(
            f"{path}: the tokenizer has {num_ids} tokens, the model's embeddings only {num_rows} rows",
            hint="the tokenizer is another model's, or tokens were added to it without resizing the model",
        )
