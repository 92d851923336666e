"""Common causes of exceptions that libraries raise: what they mean, and advice."""

from __future__ import annotations

import errno
import re
import traceback
from dataclasses import dataclass

from honed.system.error import EnvironmentInvalidError, HonedError, InternalError, ModelError, said

#: Characters of a library's message.
MAX_WORDS = 1000


@dataclass(frozen=True)
class Cause:
    """A kind of exception, recognized by its words."""

    words: re.Pattern[str]
    kind: type[HonedError]
    hint: str


def _cause(words: str, kind: type[HonedError], hint: str) -> Cause:
    return Cause(re.compile(words, re.IGNORECASE), kind, hint)


#: The first entry whose words are in the exception's type and message is used.
CAUSES = (
    _cause(r"no kernel image is available|not compatible with the current PyTorch", EnvironmentInvalidError,
           "the installed torch was not built for this GPU: `honectl doctor` shows both"),
    _cause(r"driver version is insufficient|found no NVIDIA driver|CUDA driver initialization|libcuda",
           EnvironmentInvalidError, "the GPU's driver does not support this torch: see honectl doctor and nvidia-smi"),
    _cause(r"uncorrectable ECC|unspecified launch failure|illegal memory access|device.*is lost|Xid",
           EnvironmentInvalidError, "the GPU or its driver failed: see `journalctl -k`, then honectl requeue"),
    _cause(r"device-side assert|index out of range in self|IndexKernel", ModelError,
           "a token id is beyond the model's embeddings: tokenizer and model are from different checkpoints: fetch "
           "both again"),
    _cause(r"size mismatch for|Error\(s\) in loading state_dict|ignore_mismatched_sizes", ModelError,
           "the weights do not match their config.json: fetch the complete model again"),
    _cause(r"does not recognize this architecture|Unrecognized (model|configuration)|has no attribute 'model_type'",
           ModelError, "the installed transformers does not support the model: `honectl doctor` shows its version; set "
               "model_type if it is an alias"),
    _cause(r"trust_remote_code", ModelError,
           "the model needs its own code: set trust_remote_code: true, if the administrator allows it"),
    _cause(r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|PytorchStreamReader", ModelError,
           "a weights file is damaged: fetch the model again"),
    _cause(r"OfflineMode|LocalEntryNotFound|HTTPSConnectionPool|Max retries exceeded|Name or service not known|"
           r"Temporary failure in name resolution|Connection refused", EnvironmentInvalidError,
           "a library tried to use the network, which jobs do not have: fetch what it needs first, and use the path "
           "of its directory"),
    _cause(r"expected scalar type|must have the same dtype|should be the same.*type|mat1 and mat2 must have",
           InternalError,
           "two parts of the model have different dtypes: try dtype: float32, or backend: transformers"),
    _cause(r"TemplateError|UndefinedError|TemplateSyntaxError|Conversation roles must alternate", ModelError,
           "the chat template rejects the rows: `honectl preview FILE` shows where; or set another one with "
           "chat_template:"),
    _cause(r"Too many open files|Errno 24\b", EnvironmentInvalidError,
           "too many open files: use fewer training.dataloader_num_workers, or a larger LimitNOFILE="),
    _cause(r"DataLoader worker.*(killed|exited)|unable to open shared memory|/dev/shm", EnvironmentInvalidError,
           "a data loading process died: training.dataloader_num_workers: 0 loads data in the worker itself"),
    _cause(r"^FileNotFoundError", InternalError,
           "a file was removed after the job was accepted: restore it, then honectl requeue"),
    _cause(r"^NotImplementedError", InternalError,
           "a library does not support this on the device: try backend: transformers, or attn_implementation: eager"),
)  # fmt: skip


#: Libraries that compute, whose messages are about modules and tensors.
_COMPUTING = frozenset({"torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl"})
#: Modules of theirs and others that read text, whose messages may quote rows.
_READING = re.compile(
    r"^(datasets|jinja2|pyarrow|tokenizers|PIL|av|json|honed\.(inputs|text|worker\.rows))\b|"
    r"^transformers\..*(token|process|chat_template|feature_extraction|image|video|audio_utils)"
)


def _modules(problem: BaseException) -> list[str]:
    """Return the modules through which an exception came, the one that raised it last."""
    frames = (frame for frame, _ in traceback.walk_tb(problem.__traceback__))
    return [str(frame.f_globals.get("__name__") or "") for frame in frames]


def raised_in(problem: BaseException) -> str:
    """Return the package that raised an exception; empty if unknown."""
    return next((name.partition(".")[0] for name in reversed(_modules(problem))), "")


def is_of_peft(problem: BaseException) -> bool:
    """Return whether peft itself refuses something."""
    return raised_in(problem) == "peft" and isinstance(problem, ValueError | TypeError)


def is_public(problem: BaseException) -> bool:
    """Return whether an exception's message quotes no text of rows: it is of a library that computes, and no code that
    reads text has seen it."""
    names = _modules(problem)
    return raised_in(problem) in _COMPUTING and not any(map(_READING.search, names))


def explain(problem: Exception, job: str) -> HonedError:
    """Return the HonedError for a library's exception. The hint names the command that shows the traceback."""
    name, log = type(problem).__name__, f"`honectl logs --raw {job}` has the traceback"
    # A library's own words, unless they may quote a row.
    text = f"{name}: {str(problem)[:MAX_WORDS] if is_public(problem) else said(problem)}"
    for cause in CAUSES:
        if cause.words.search(f"{name}: {problem}"):
            return cause.kind(text, hint=f"{cause.hint}; {log}")
    return InternalError(text, hint=f"{log}, written by honed or a library; see above it for the context")


#: Messages of torch's CPU allocator, C++, CUDA and its libraries, Metal, and the loader of shared objects.
_OUT_OF_MEMORY_WORDS = (
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "Cannot allocate memory",
)


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out, the device's or the machine's: torch has a class for the first alone."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (
            isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in _OUT_OF_MEMORY_WORDS)
        )
    )
