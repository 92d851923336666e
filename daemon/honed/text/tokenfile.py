"""A tokenizer read from its files, for the check of a job: enough of transformers' interface for `chat.ChatFormat`,
without transformers and without any code that comes with the model.

    tokenizer.json          read by the tokenizers library: ids, offsets
    tokenizer_config.json   names the special tokens, and tokens that are added
    the chat template       rendered in the sandbox that transformers sets up

`read` returns None where the files do not determine what the worker's tokenizer does. Where only the vocabulary cannot
be read, every character counts as a token: conversations are rendered and their turns found, and `counts` is False.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.inputs import modality
from honed.system import quote
from honed.system.error import ModelError, SpecError, said
from honed.text import addedtoken
from honed.text.addedtoken import Added

#: Largest tokenizer file that is read, in bytes, and tokenizers that are cached: one may take 200 MB of memory.
MAX_FILE_BYTES = 128 * 1024 * 1024
MAX_KEPT = 2
#: Tokens that transformers knows by name and passes to every template.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Id of the first special token where characters are tokens.
_FIRST = 0x110000


class FileTokenizer:
    """The part of a tokenizer's interface that ChatFormat uses."""

    is_fast = True

    def __init__(
        self,
        backend: Any,
        named: Mapping[str, str],
        special: Sequence[str],
        added: Mapping[int, str],
        chat_template: str | None,
        identity: tuple[object, ...] = (),
        fault: ModelError | None = None,
        note: str = "",
    ) -> None:
        self._backend, self._named = backend, dict(named)
        self.fault = fault  #: why no worker could use its tokenizer.json
        self.note = note  #: what its other files change of that one
        self.all_special_tokens = list(dict.fromkeys([*named.values(), *special]))
        self.added_tokens_decoder = dict(added)
        self.chat_template = chat_template
        self.identity = (*identity, repr(sorted(self._named.items())))  #: changes when the files change
        self.eos_token, self.bos_token = named.get("eos_token"), named.get("bos_token")
        self.pad_token = named.get("pad_token") or self.eos_token

    @property
    def counts(self) -> bool:
        """True if its tokens are the model's."""
        return self._backend is not None

    @property
    def num_tokens(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True)) if self.counts else 0

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    def _id(self, token: str | None) -> int | None:
        if token is None:
            return None
        if self._backend is not None:
            number = self._backend.token_to_id(token)
            return None if number is None else int(number)
        return _FIRST + self.all_special_tokens.index(token)

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        if self._backend is None:
            ids, offsets = [ord(char) for char in text], [(n, n + 1) for n in range(len(text))]
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids, offsets = encoding.ids, encoding.offsets
        return {"input_ids": ids} | ({"offset_mapping": offsets} if return_offsets_mapping else {})

    def decode(self, ids: Sequence[int], **_options: Any) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        return "".join(chr(n) if n < _FIRST else self.all_special_tokens[n - _FIRST] for n in ids)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return None if self._backend is None else self._backend.id_to_token(number)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        assert not tokenize
        if not conversation:
            raise ValueError("Cannot apply chat template to an empty conversation.")
        given = {"messages": conversation, "tools": tools, "documents": None}
        text: str = compiled(chat_template or self.chat_template or "").render(
            **given, add_generation_prompt=add_generation_prompt, **{**self._named, **kwargs}
        )
        return text


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Any:
    """Compile a chat template in a sandbox like transformers' own. Needs jinja2, and raises its TemplateError."""
    import jinja2  # noqa: PLC0415  (only a template needs it)
    import jinja2.ext  # noqa: PLC0415
    import jinja2.nodes  # noqa: PLC0415
    import jinja2.sandbox  # noqa: PLC0415

    class Generation(jinja2.ext.Extension):  # type: ignore[misc]
        tags = {"generation"}  # noqa: RUF012  (jinja2's own form)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)  # noqa: DTZ005
    return environment.from_string(source)


def read(path: Path, chat_template: str | None, *, eos_token: str | None = None) -> FileTokenizer | None:
    """Read the tokenizer of a checkpoint, with the job's end token if it names one.

    Return None where its files do not determine its behaviour. Raises SpecError for an end token that is none of its
    tokens.
    """
    settings = config(path)
    if (
        settings is None
        or "auto_map" in settings
        or (path / "tekken.json").exists()
        or settings.get("fix_mistral_regex")
    ):
        return None
    older: dict[str, Any] = {}
    if "added_tokens_decoder" not in settings:  # transformers reads these two files only then
        settings = settings | (_json(path / "special_tokens_map.json") or {})
        older = _json(path / "added_tokens.json") or {}
    named = {name: text for name in NAMES if (text := _text(settings.get(name))) is not None}
    backend, fault = _backend(path / "tokenizer.json")
    added = {int(number): str(item["content"]) for number, item in (settings.get("added_tokens_decoder") or {}).items()}
    more: tuple[Added, ...] = ()
    note = ""
    if backend is not None:
        known = addedtoken.of(backend)
        try:
            more = addedtoken.wanted(settings, older, NAMES, known)
        except (TypeError, ValueError):
            return None  # no class of transformers takes it
        if more:
            backend, _ = _backend(path / "tokenizer.json", more)
        used = addedtoken.of(backend)
        added, note = {number: item.content for number, item in used.items()}, addedtoken.message(known, used, settings)
    if eos_token is not None:
        if backend is not None and backend.token_to_id(eos_token) is None:
            raise unknown_end(eos_token, near=list(added.values()))
        named["eos_token"] = eos_token
    if "eos_token" not in named:
        return None  # the tokenizer class has a default that is not in the files
    special = _texts(settings.get("extra_special_tokens")) + _texts(settings.get("additional_special_tokens"))
    special += [text for key, item in settings.items() if key.endswith("_token") and (text := _text(item)) is not None]
    identity = (*_facts(path / "tokenizer.json"), more)
    return FileTokenizer(backend, named, special, added, chat_template, identity, fault, note)


def config(path: Path) -> dict[str, Any] | None:
    """Return a checkpoint's tokenizer_config.json; None if it has none that is valid."""
    return _json(path / "tokenizer_config.json")


def unknown_end(token: str, near: Sequence[str] = ()) -> SpecError:
    """Return the error for a `training.eos_token` that is no token."""
    near_words = difflib.get_close_matches(token, near, n=1, cutoff=0.5)
    meant = f"; did you mean {near_words[0]}?" if near_words else ""
    return SpecError(
        f"training.eos_token: {quote.mark(repr(token))} is not a token of the base model's vocabulary",
        hint=f"write one token of its tokenizer.json, such as the one that ends a turn in the chat template{meant}",
        fix={"training.eos_token": near_words[0]} if near_words else None,
    )


def unreadable(file: Path, error: Exception) -> ModelError:
    """Return the error for a tokenizer.json that the tokenizers library refuses."""
    return ModelError(
        f"{file}: the tokenizers library cannot read it: {said(error)}",
        hint="copy the tokenizer again from the model's source; a newer file may need newer versions of tokenizers and "
        "transformers",
    )


def _backend(file: Path, more: tuple[Added, ...] = ()) -> tuple[Any, ModelError | None]:
    """Load a file with the tokenizers library, and add tokens. Return its tokenizer, which is None if the library or a
    file of acceptable size is missing, and the error of a file that it cannot read."""
    try:
        loaded = _load(file, facts, more) if (facts := _facts(file)) and facts[2] <= MAX_FILE_BYTES else None
    except ImportError:
        return None, None
    if not isinstance(loaded, ModelError):
        return loaded, None
    model = (_json(file) or {}).get("model")  # a file without a vocabulary is no tokenizer at all
    return None, loaded if isinstance(model, dict) and model.get("vocab") else None


def _facts(file: Path) -> tuple[int, ...]:
    """Return the facts by which a changed file is recognized; empty where there is no file."""
    try:
        info = file.stat()
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@functools.lru_cache(maxsize=MAX_KEPT)
def _load(file: Path, _facts: tuple[int, ...], more: tuple[Added, ...]) -> Any:
    import tokenizers  # noqa: PLC0415  (it belongs to the worker's packages)

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  (the library raises nothing else)
        return unreadable(file, error)
    backend.no_truncation()
    backend.no_padding()
    addedtoken.add(backend, more)
    return backend


def _json(file: Path) -> dict[str, Any] | None:
    try:
        parsed = modality.loads(file.read_bytes()) if file.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> list[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items if (text := _text(item)) is not None]
