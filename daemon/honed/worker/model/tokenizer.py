"""The tokenizer of a job: transformers' own choice of a class, if it does what the base model's tokenizer.json says.

    AutoTokenizer     ids as the file's                    it is used
                      other ids, or it does not load       the file is loaded as it is, and a warning says so
    tokenizer.json    cannot be used as it is              ModelError

Classes of transformers 5 rebuild a tokenizer from the vocabulary alone: LlamaTokenizer cuts every text as SentencePiece
does, so a byte-level vocabulary loses all white space (transformers#45488). A base without tokenizer.json, and one with
a class of its own code, has no other source than its class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from honed.inputs import basemodel
from honed.system.error import ModelError, said
from honed.text import addedtoken, tokenfile
from honed.worker.assignment import Assignment

FILE = "tokenizer.json"
#: Text that is compared by its ids: digits, code, scripts, emoji, and white space of every kind in every place.
TEXT = (
    "  The capital of France is Paris; it's nice, isn't it? 3.14159 and 1,000,000 = 10^6\n\n"
    "def f(x):\n    if x > 0:\n\treturn [x, -x]  # two  spaces\r\n\r\n"
    "Ünïcödé naïve Straße — “quoted” … 日本語の文 中文 한국어 русский ελληνικά العربية עברית हिन्दी ไทย\n"
    "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f1eb\U0001f1f7 e\u0301 \u00a0\u3000\u200b ▁ Ġ Ċ <0x0A>\n"
    '{"a": null, "b": [1, 2]} https://example.org/?q=1&r=%20 \t \n \n\n\n   end \n '
)
#: Properties of a vocabulary's model that decide about ids, whatever the kind of model.
_PROPERTIES = (
    "unk_token",
    "unk_id",
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "max_input_chars_per_word",
)


def load(assignment: Assignment, *, warn: Callable[[str], None] = lambda _text: None) -> Any:
    """Load the base model's tokenizer, with the job's chat template and end token if it names one, and a pad token.

    A vision model's template is that of its processor, in a file that tokenizers ignore.

    Padding is masked in the labels and in the attention, so the end token can stand in: nothing is added to the
    embeddings.
    """
    spec, path = assignment.spec, assignment.base_model_path
    tokenizer = _of_base(assignment, warn)
    if spec.chat_template:
        tokenizer.chat_template = Path(spec.chat_template).read_text(encoding="utf-8")
    elif not tokenizer.chat_template and (path / "chat_template.json").exists():
        tokenizer.chat_template = basemodel.chat_template(path, has_processor=basemodel.takes_media(path))
    if (end := spec.training.eos_token) is not None:
        if end not in tokenizer.get_vocab():
            raise tokenfile.unknown_end(end)
        tokenizer.eos_token = end
    if tokenizer.eos_token is None:
        raise ModelError(
            f"{path}: the tokenizer has no end token (eos_token)",
            hint="set eos_token in tokenizer_config.json, or training.eos_token in the job",
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def open_auto(path: Path, assignment: Assignment) -> Any:
    """Open a directory's tokenizer as programs that read the output do, for the base model's family."""
    from transformers import AutoTokenizer

    from honed.worker.model.config import load_config

    trusts = assignment.spec.trust_remote_code
    return AutoTokenizer.from_pretrained(path, config=load_config(assignment), trust_remote_code=trusts)


def _of_base(assignment: Assignment, warn: Callable[[str], None]) -> Any:
    """Return the base model's tokenizer. Raises ModelError if its tokenizer.json cannot be used as it is."""
    path, file = assignment.base_model_path, assignment.base_model_path / FILE
    if not file.is_file():
        return open_auto(path, assignment)
    auto, fault = None, ""
    try:
        auto = open_auto(path, assignment)
    except Exception as error:  # noqa: BLE001 - a class that does not suit the file raises anything
        fault = f"{type(error).__name__}: {said(error)}"
    if auto is not None and not _is_rebuilt(auto):
        return auto
    oracle = from_file(file)
    known = addedtoken.of(oracle)

    def note(tokenizer: Any) -> Any:
        used = addedtoken.of(tokenizer.backend_tokenizer)
        if words := addedtoken.message(known, used, tokenfile.config(path) or {}):
            warn(f"{path}: {words}")
        return tokenizer

    if auto is not None and agrees(auto, oracle):
        return note(auto)
    oracle = from_file(file)  # without the class's tokens
    tokenizer = _as_it_is(path, auto, oracle)
    if not agrees(tokenizer, oracle):
        raise ModelError(
            f"{file}: transformers does not give the token ids that this file gives",
            hint="install the version of transformers that the model's config.json names, or correct the tokenizer",
        )
    if auto is None:
        warn(f"{path}: {_named(path)} cannot load tokenizer.json ({fault}): it is loaded as it is")
    elif differing := _other_ids(auto, oracle):
        warn(
            f"{path}: {type(auto).__name__}, transformers' class for this tokenizer, gives other token ids than "
            f"tokenizer.json ({differing}): tokenizer.json is loaded as it is"
        )
    return note(tokenizer)


def _is_rebuilt(tokenizer: Any) -> bool:
    """Return False for a tokenizer of its own code, or in Python, or of another library: it does not have to be what
    tokenizer.json says."""
    return hasattr(tokenizer, "backend_tokenizer") and type(tokenizer).__module__.startswith("transformers.")


def from_file(file: Path) -> Any:
    """Read a tokenizer.json with the library that defines it. Raises ModelError."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing else
        raise tokenfile.unreadable(file, error) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_it_is(path: Path, auto: Any, oracle: Any) -> Any:
    """Load tokenizer.json as it is, with the settings of tokenizer_config.json, and special tokens that only the class
    names."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    for name in tokenfile.NAMES:
        token = None if auto is None else getattr(auto, name, None)
        if token is not None and getattr(tokenizer, name, None) is None and oracle.token_to_id(str(token)) is not None:
            setattr(tokenizer, name, token)
    return tokenizer


def agrees(tokenizer: Any, oracle: Any) -> bool:
    """Return True if a tokenizer cuts every text as the file does: the same steps, over the same vocabulary.

    Tokens that only tokenizer_config.json adds or changes are no difference, nor are offsets: the oracle gets them.
    """
    backend = tokenizer.backend_tokenizer
    there = addedtoken.of(oracle)
    own = sorted(addedtoken.of(backend).items())
    if more := tuple(item for number, item in own if there.get(number) != item):
        addedtoken.add(oracle, more)
    if tokenizer.init_kwargs.get("fix_mistral_regex") is True:
        oracle.pre_tokenizer = backend.pre_tokenizer  # tokenizer_config.json wants another one than the file's
    try:
        has_same_steps = all(_step(backend, name) == _step(oracle, name) for name in ("normalizer", "pre_tokenizer"))
    except Exception:  # noqa: BLE001 - a step in Python cannot be shown
        return False
    one, other = backend.model, oracle.model
    return (
        has_same_steps
        and type(one) is type(other)
        and all(getattr(one, name, None) == getattr(other, name, None) for name in _PROPERTIES)
        and (_is_read_whole(tokenizer) or one.__getstate__() == other.__getstate__())
        and all(
            backend.token_to_id(token.content) == number for number, token in oracle.get_added_tokens_decoder().items()
        )
        and not _other_ids(tokenizer, oracle)
    )


def _is_read_whole(tokenizer: Any) -> bool:
    """Return True for a class that takes the vocabulary from the file as it is; comparing it would take a second."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return kind is PreTrainedTokenizerFast or "__init__" not in kind.__dict__


def _step(backend: Any, name: str) -> Any:
    """Return a step of a tokenizer as JSON, without what only offsets depend on."""
    step = getattr(backend, name)
    return None if step is None else _without_offsets(json.loads(step.__getstate__()))


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_offsets(item) for key, item in value.items() if key != "trim_offsets"}
    return list(map(_without_offsets, value)) if isinstance(value, list) else value


def _other_ids(tokenizer: Any, oracle: Any) -> str:
    """Return the first text of `TEXT` that gets other ids than by the file, or is decoded otherwise; empty if none."""
    backend = tokenizer.backend_tokenizer
    for text in _texts():
        ids = oracle.encode(text, add_special_tokens=False).ids
        try:
            encoded = backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # noqa: BLE001 - the library raises nothing else, such as for a missing <unk>
            return f"{text!r} fails: {error}"
        if encoded != ids:
            return f"{text!r}: {encoded[:8]} instead of {ids[:8]}"
        if (decoded := backend.decode(ids)) != oracle.decode(ids):
            return f"{text!r} is decoded as {decoded!r}"
    return ""


def _texts() -> Iterator[str]:
    yield "a b"
    yield from TEXT.splitlines(keepends=True)
    yield TEXT


def _named(path: Path) -> str:
    config = tokenfile.config(path) or {}
    return str(config.get("tokenizer_class") or "AutoTokenizer")
