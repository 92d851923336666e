"""A tokenizer read from its files, for the check of a job: enough of transformers' interface for `chat.ChatFormat`,
without transformers and without any code that comes with the model.

    tokenizer.json          read by the tokenizers library: ids, offsets
    tokenizer_config.json   names the special tokens, and tokens that are added
    the chat template       rendered in the sandbox that transformers sets up

`read` returns None where the files do not determine what transformers would do. Where only the vocabulary cannot be
read, each character counts as a token: conversations are rendered and their turns found, and `counts` is False.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.inputs import modality

#: Largest tokenizer file that is read, in bytes, and tokenizers that are cached: one may take 200 MB of memory.
MAX_FILE_BYTES = 128 * 1024 * 1024
MAX_KEPT = 2
#: Tokens that transformers knows by name and passes to each template.
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
        identity: tuple[int, ...] = (),
    ) -> None:
        self._backend, self._named = backend, dict(named)
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
            found = self._backend.token_to_id(token)
            return None if found is None else int(found)
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


def read(path: Path, chat_template: str | None) -> FileTokenizer | None:
    """Read the tokenizer of a checkpoint. Return None where its files do not determine its behaviour."""
    config = _json(path / "tokenizer_config.json")
    if config is None or "auto_map" in config or (path / "tekken.json").exists():
        return None
    tokens = {int(number): each for number, each in (config.get("added_tokens_decoder") or {}).items()}
    if not tokens:  # transformers reads these two files only where the config has no tokens
        config = config | (_json(path / "special_tokens_map.json") or {})
        if (path / "added_tokens.json").exists():
            return None
    named = {name: text for name in NAMES if (text := _text(config.get(name))) is not None}
    if "eos_token" not in named:
        return None  # the tokenizer class has a default that is not in the files
    special = _texts(config.get("extra_special_tokens")) + _texts(config.get("additional_special_tokens"))
    special += [text for key, each in config.items() if key.endswith("_token") and (text := _text(each)) is not None]
    backend = _backend(path / "tokenizer.json")
    added = {number: str(each["content"]) for number, each in tokens.items()}
    if backend is not None:
        known = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        if any(backend.token_to_id(text) != number for number, text in added.items()):
            return None
        if any(backend.token_to_id(text) is None for text in [*named.values(), *special]):
            backend = None  # transformers would add it
        added = known | added
    return FileTokenizer(backend, named, special, added, chat_template, _facts(path / "tokenizer.json"))


def _backend(file: Path) -> Any:
    """Load a file with the tokenizers library; None if the library or a valid file of acceptable size is missing."""
    try:
        return _load(file, facts) if (facts := _facts(file)) and facts[2] <= MAX_FILE_BYTES else None
    except ImportError:
        return None


def _facts(file: Path) -> tuple[int, ...]:
    """Return the facts by which a changed file is recognized; empty where there is no file."""
    try:
        info = file.stat()
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@functools.lru_cache(maxsize=MAX_KEPT)
def _load(file: Path, _facts: tuple[int, ...]) -> Any:
    import tokenizers  # noqa: PLC0415  (it belongs to the worker's packages)

    try:
        found = tokenizers.Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001  (the library raises nothing else)
        return None
    found.no_truncation()
    found.no_padding()
    return found


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = modality.loads(file.read_bytes()) if file.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> list[str]:
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in each if (text := _text(item)) is not None]
