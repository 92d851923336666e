"""The simple commands of a shell script, without running anything.

    MODEL=a/b                    known from here on
    trl sft --model $MODEL \\     one command, over several lines
        --seed 1 "$@"

A variable that is unknown, or set outside the script, stays in a word as `$NAME`; what the shell computes as
`$computed`. Branches, loops, functions, arrays and here-documents are rejected: what such a script runs is known only
by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from honed.system.error import SpecError

#: What stands for the output of a command, or for arithmetic.
COMPUTED = "$computed"
#: Characters of a variable, which could double itself with every line.
MAX_VALUE = 64 * 1024
_OUTPUT = r"`[^`]*` | \$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
_DOUBLE = rf'"(?:\\.|{_OUTPUT}|[^"\\])*+"'
_TOKEN = re.compile(
    rf"""(?P<blank> [^\S\n]+ | \\\n | \#[^\n]* )
    | (?P<redirection> \d*(?: <<<|<<|&>>?|>>|>\||[<>]&|<>|[<>]) )
    | (?P<sign> \n | &&|\|\||\|&|[;&|] )
    | (?P<word> (?: '[^']*' | {_DOUBLE} | \\. | {_OUTPUT} | \$\{{[^{{}}]*\}} | [^\s'"\\`;&|()<>] )+ )""",
    re.VERBOSE | re.DOTALL,
)
_PIECE = re.compile(
    rf"""\$?'(?P<single>[^']*)' | \$?(?P<double>{_DOUBLE}) | \\(?P<escaped>.) | (?P<output>{_OUTPUT})
    | (?P<variable>\$\w+|\$\{{[^{{}}]*\}}) | [^'"\\`$]+ | [$`]""",
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE = re.compile(
    rf"""\\(?P<escaped>[$`"\\\n]) | (?P<output>{_OUTPUT}) | (?P<variable>\$\w+|\$\{{[^{{}}]*\}})""",
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
_NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DECLARING = {"export", "local", "declare", "typeset", "readonly"}
_REJECTED = {
    **dict.fromkeys(("if", "case", "select"), "a branch"),
    **dict.fromkeys(("for", "while", "until"), "a loop"),
    **dict.fromkeys(("function", "{"), "a function or a group of commands"),
}
#: The words between a command's own.
_BLANK = "\0"

Values = dict[str, str | None]  # None: it depends on what runs


@dataclass(frozen=True)
class Command:
    """A simple command, its variables put in, and the values of all variables that are known before it."""

    words: list[str]
    variables: Mapping[str, str | None]  #: None: it depends on what runs


def commands(text: str, name: str) -> Iterator[Command]:
    """Yield the simple commands of a script. Raises SpecError for a script of which they are not known; `name` is the
    script's, for that."""
    values: Values = {}
    for sign, words in _simple(text.replace("\r\n", "\n").replace(_BLANK, ""), name):
        is_declaring = words[0] in _DECLARING
        own: Values = {}
        while words[is_declaring:] and (match := _NAMED.fullmatch(words[is_declaring])):
            value = "".join(_fields(match[2], {**values, **own}, is_split=False))
            # After && and ||, whether it is set depends on what ran before.
            own[match[1]] = value if sign not in ("&&", "||") and len(value) <= MAX_VALUE else None
            del words[is_declaring]
        if is_declaring or not words:
            values |= own
            continue
        fields = [field for word in words for field in _fields(word, values)]
        if fields[:1] == ["read"]:
            values |= dict.fromkeys(fields[1:])
        if fields:
            yield Command(fields, {**values, **own})


def _simple(text: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of every simple command, as they are written, without its redirections, after the sign before
    it."""
    before, words, is_redirected, at = ";", list[str](), False, 0

    def rejected(why: str) -> SpecError:
        number = text.count("\n", 0, at) + 1
        return SpecError(
            f"{name}: line {number} has {why}, and what runs then is not known without running it",
            hint="give the line that starts the training, in quotes: honectl convert 'trl sft …'",
        )

    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            is_array = bool(words) and words[-1].endswith("=")
            kinds = {"(": "an array" if is_array else "a function or a subshell", ")": "a branch or a subshell"}
            raise rejected(kinds.get(text[at], "a quote that never ends"))
        if match["redirection"] and match[0].lstrip("0123456789") == "<<":
            raise rejected("a here-document")
        if match["word"] and not words and not is_redirected and match[0] in _REJECTED:
            raise rejected(_REJECTED[match[0]])
        at = match.end()
        if match["redirection"]:
            is_redirected = True
        elif match["word"]:
            words += [] if is_redirected else [match[0]]
            is_redirected = False
        elif match["sign"]:
            if words:
                yield before, words
            before = match[0] if words or match[0] != "\n" else before  # a line may go on after && and ||
            words, is_redirected = [], False
    if words:
        yield before, words


def _fields(word: str, values: Mapping[str, str | None], *, is_split: bool = True) -> list[str]:
    """Return the words that a word becomes: a value outside quotes is divided at its spaces."""
    is_quoted = False

    def inner(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "" if match["escaped"] == "\n" else match["escaped"]
        return COMPUTED if match["output"] else _value(match["variable"], values)

    def piece(match: re.Match[str]) -> str:
        nonlocal is_quoted
        if match["single"] is not None or match["double"]:
            is_quoted = True
            return match["single"] or _IN_DOUBLE.sub(inner, (match["double"] or '""')[1:-1])
        if match["escaped"] or match["output"]:
            return inner(match)
        if match["variable"]:
            value = _value(match["variable"], values)
            return re.sub(r"\s+", _BLANK, value) if is_split else value
        return match[0]

    fields = _PIECE.sub(piece, word).split(_BLANK)
    return [field for field in fields if field or (is_quoted and len(fields) == 1)]


def _value(text: str, values: Mapping[str, str | None]) -> str:
    """Return the value of a variable; of one that is not known, its text."""
    if (match := _VARIABLE.fullmatch(text)) is None:
        return text
    name, default = match[1] or match[2], match[3]
    if name not in values and default is not None:
        return _VARIABLE.sub(lambda inner: _value(inner[0], values), default.strip("\"'"))
    value = values.get(name)
    return text if value is None else value
