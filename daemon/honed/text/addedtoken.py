"""Tokens that a checkpoint's settings add to those of its tokenizer.json, or change there, as transformers does.

    added_tokens_decoder, else added_tokens.json    every token, in the order of the ids
    eos_token, …, image_token, …                    those that are no added token yet
    extra_special_tokens                            the same

A token that the vocabulary lacks gets the next free id, whatever id the settings give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from honed.system import quote

#: Tokens that are named in one message, at most.
NUM_TOLD = 5


class Added(NamedTuple):
    """A token that is cut out of a text before the rest is tokenized."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    def but(self, other: Added) -> list[str]:
        """Return the flags that the other one has otherwise, of those on which ids depend."""
        return [name for name in self._fields[1:-1] if getattr(self, name) != getattr(other, name)]


def of(backend: Any) -> dict[int, Added]:
    """Return the added tokens of a tokenizer of the tokenizers library, by id."""
    return {number: _of(token) for number, token in backend.get_added_tokens_decoder().items()}


def _of(token: Any) -> Added:
    return Added(*(getattr(token, name) for name in Added._fields))


def wanted(
    settings: Mapping[str, Any], older: Mapping[str, int], names: tuple[str, ...], known: Mapping[int, Added]
) -> tuple[Added, ...]:
    """Return the tokens that transformers adds or changes, in its order. Raises TypeError or ValueError for settings
    that it does not take.

    `settings` is tokenizer_config.json, `older` added_tokens.json, `known` what tokenizer.json has. `names` are the
    keys of special tokens that every tokenizer has.
    """
    decoder = settings.get("added_tokens_decoder") or {}
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    more = extra if isinstance(extra, dict) else {}
    keys = (*names, *(key for key in settings if key.endswith("_token") and key not in names))
    named = [value for value in (*(settings.get(key) for key in keys), *more.values()) if isinstance(value, str | dict)]
    named += extra if isinstance(extra, list) else []
    specials = {_content(item) for item in named}
    numbered = [(int(number), _made(item)) for number, item in decoder.items()]
    numbered += [(number, _plain(content, is_special=content in specials)) for content, number in older.items()]
    given = [token for _, token in sorted(numbered)]
    there = {item.content for item in (*known.values(), *given)}
    for item in named:
        if (content := _content(item)) and content not in there:
            given.append(_made(item)._replace(special=True) if isinstance(item, dict) else _plain(content))
            there.add(content)
    as_known = set(known.values())
    return tuple(item for item in dict.fromkeys(given) if item not in as_known)


def _content(value: Any) -> str:
    return str(value.get("content") or "") if isinstance(value, dict) else str(value)


def _made(value: Mapping[str, Any]) -> Added:
    import tokenizers  # noqa: PLC0415  (it belongs to the worker's packages)

    return _of(tokenizers.AddedToken(**{key: item for key, item in value.items() if key != "__type"}))


def _plain(content: str, *, is_special: bool = True) -> Added:
    return Added(content, False, False, False, not is_special, is_special)


def add(backend: Any, tokens: tuple[Added, ...]) -> None:
    """Add tokens to a tokenizer of the tokenizers library, or change those that it has."""
    import tokenizers  # noqa: PLC0415

    backend.add_tokens([tokenizers.AddedToken(**token._asdict()) for token in tokens])


def message(known: Mapping[int, Added], used: Mapping[int, Added], settings: Mapping[str, Any]) -> str:
    """Return what the tokens in use have that those of tokenizer.json have not; empty if nothing."""
    added = [f"{_shown(item)} ({number})" for number, item in used.items() if number not in known]
    changed = [
        f"{_shown(item)} ({', '.join(flags)})"
        for number, item in used.items()
        if number in known and (flags := item.but(known[number]))
    ]
    changes = [f"adds {_list(added)} to the tokens of tokenizer.json"] if added else []
    changes += [f"changes {_list(changed)} in tokenizer.json"] if changed else []
    words = []
    if changes:
        words.append(
            f"tokenizer_config.json {' and '.join(changes)}: rows are tokenized so, as by transformers; programs that "
            "read tokenizer.json alone give other ids"
        )
    if moved := list(_moved(used, settings)):
        words.append(f"transformers gives tokens other ids than tokenizer_config.json: {_list(moved)}")
    return "; ".join(words)


def _moved(used: Mapping[int, Added], settings: Mapping[str, Any]) -> Iterator[str]:
    numbers = {item.content: number for number, item in used.items()}
    for number, item in (settings.get("added_tokens_decoder") or {}).items():
        if (known_as := numbers.get(_content(item))) is not None and known_as != int(number):
            yield f"{_shown(used[known_as])} {known_as} instead of {number}"


def _shown(token: Added) -> str:
    return quote.mark(repr(token.content))


def _list(items: list[str]) -> str:
    more = f" and {len(items) - NUM_TOLD} more" if len(items) > NUM_TOLD else ""
    return f"{', '.join(items[:NUM_TOLD])}{more}"
