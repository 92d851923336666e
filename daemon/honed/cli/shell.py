"""The words of a shell script's simple commands, as far as they are known without running anything.

    MODEL=a/b                    known from here on
    if …; then MODEL=c/d; fi     known within the branch, unknown after it
    ARGS=( --seed 1 ); $ARGS     one word for each value that stands outside quotes, or in an array

A variable that is unknown, or set outside the script, stays in a word as `$NAME`; what the shell computes as
`$computed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: What stands for the output of a command, or for arithmetic.
COMPUTED = "$computed"
#: Characters of a variable, which could double itself with each line.
MAX_VALUE = 64 * 1024
#: Scripts within scripts: a variable may hold an `eval` of itself.
MAX_DEPTH = 5
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(\[[@*]\])?(?::?[-=]([^}]*))?\})")
_NAMED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>]+")
_QUOTED = re.compile(r"[^\\\"$`]+")
_SPECIAL = re.compile(r"\$(?:\w+|[@*?#$!])")
_SIGN = re.compile(r"<<<|<<-|&>>|;;&|<<|>>|[<>]&|&>|>\||&&|\|\||\|&|;;|;&|\(\)|.")
_SIGNS = ";&|()<>\n"
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
_OPENING = {"if", "for", "while", "until", "case", "select", "{", "function"}
_CLOSING = {"fi", "done", "esac", "}"}
_BETWEEN = {"then", "do", "else", "elif", "!", "time"}
_DECLARING = {"export", "local", "declare", "typeset", "readonly"}
_RESERVED = _OPENING | _CLOSING | _BETWEEN
_TESTS = {"[", "[[", "test"}


@dataclass(frozen=True)
class Piece:
    """A part of a word under one kind of quote."""

    text: str
    quote: str = ""  #: `'` also for an escaped character


@dataclass(frozen=True)
class Sign:
    """A word of the shell's own: `;`, `&&`, `>`."""

    text: str


Word = tuple[Piece, ...]


@dataclass(frozen=True)
class Array:
    """`NAME=( … )` or `NAME+=( … )`."""

    name: str
    is_added: bool
    words: list[Word]


Token = Sign | Word | Array


@dataclass(frozen=True)
class Command:
    """A simple command, its variables put in, and the values of all variables that are known before it."""

    words: list[str]
    variables: Mapping[str, str | None]  #: None: it depends on what runs
    before: Sequence[str] = ()  #: the words before a script within this one: `srun … bash -c`


# -- words -------------------------------------------------------------------------------------------------------------


class _UnfinishedError(Exception):
    """A quote or a bracket that never ends: the shell would not run such a command."""


class _Lexer:
    """Divides a text into words and signs."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._ends: list[str] = []  #: of the here-documents that begin after this line

    def tokens(self) -> Iterator[Token]:
        is_end_next = False
        while self._at < len(self._text):
            if self._skip_blank(" \t"):
                continue
            here = self._text[self._at]
            if here == "\n":
                self._at += 1
                self._skip_documents()
                yield Sign(";")
            elif here in _SIGNS and not self._is_computed():
                sign = self._sign()
                is_end_next = sign in ("<<", "<<-")
                yield Sign(sign)
            else:
                word = self._word()
                if isinstance(word, Array):
                    yield word
                    continue
                if is_end_next:
                    self._ends.append("".join(item.text for item in word))
                    is_end_next = False
                is_bare = len(word) == 1 and not word[0].quote
                if is_bare and word[0].text.isdecimal() and self._next() in "<>":
                    continue  # the number of a redirection
                yield word

    def _next(self) -> str:
        return self._text[self._at : self._at + 1] or " "

    def _is_computed(self) -> bool:
        """Tell whether `<(…)`, `>(…)` or `((…))` begins here, which a word is."""
        return self._text.startswith(("<(", ">(", "(("), self._at)

    def _sign(self) -> str:
        match = _SIGN.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return match[0]

    def _skip_documents(self) -> None:
        for end in self._ends:
            while self._at < len(self._text):
                start, after = self._at, self._text.find("\n", self._at)
                self._at = len(self._text) if after < 0 else after + 1
                if self._text[start : self._at].strip() == end:
                    break
        self._ends = []

    def _word(self) -> Word | Array:
        made: list[Piece] = []
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == "(" and len(made) == 1 and (match := _NAMED.fullmatch(made[0].text)):
                return Array(match[1], bool(match[2]), self._array())
            if here in " \t" or (here in _SIGNS and (made or not self._is_computed())):
                break
            made += self._piece()
        return tuple(made)

    def _piece(self) -> list[Piece]:
        text, start = self._text, self._at
        here = text[start]
        if here == "\\":
            self._at += 2
            return [Piece(text[start + 1 : start + 2], "'")] if text[start + 1 : start + 2] != "\n" else []
        if text.startswith("$'", start) or here == "'":
            begin = text.index("'", start) + 1
            end = text.find("'", begin)
            if end < 0:
                raise _UnfinishedError
            self._at = end + 1
            return [Piece(text[begin:end], "'")]
        if text.startswith('$"', start) or here == '"':
            self._at = text.index('"', start) + 1
            return self._double()
        if here in "$`<>(" and (found := self._special()) is not None:
            return [Piece(found)]
        match = _PLAIN.match(text, start)
        self._at = match.end() if match else start + 1
        return [Piece(text[start : self._at])]

    def _double(self) -> list[Piece]:
        """Read up to the closing quote."""
        made: list[Piece] = []
        while self._at < len(self._text):
            here, after = self._text[self._at], self._text[self._at + 1 : self._at + 2]
            if here == '"':
                self._at += 1
                return made or [Piece("", "'")]
            if here == "\\" and after and after in '$`"\\\n':
                made += [Piece(after, "'")] if after != "\n" else []
                self._at += 2
            elif here in "$`" and (found := self._special()) is not None:
                made.append(Piece(found, '"'))
            else:
                match = _QUOTED.match(self._text, self._at)
                self._at = match.end() if match else self._at + 1
                made.append(Piece(match[0] if match else here, "'"))
        raise _UnfinishedError

    def _special(self) -> str | None:
        """Read a variable or what the shell computes; None if it is neither."""
        text, start = self._text, self._at
        if text[start] == "`":
            end = text.find("`", start + 1)
            if end < 0:
                raise _UnfinishedError
            self._at = end + 1
            return COMPUTED
        if text.startswith(("$(", "<(", ">(", "(("), start):
            self._at = _end(text, text.index("(", start), "()")
            return COMPUTED
        if text.startswith("${", start):
            self._at = _end(text, start + 1, "{}")
            return text[start : self._at]
        match = _SPECIAL.match(text, start)
        if match is None:
            return None
        self._at = match.end()
        return match[0]

    def _array(self) -> list[Word]:
        made: list[Word] = []
        self._at += 1
        while self._at < len(self._text):
            if self._skip_blank(" \t\n"):
                continue
            here = self._text[self._at]
            if here == ")":
                self._at += 1
                return made
            if here in _SIGNS or isinstance(word := self._word(), Array):
                raise _UnfinishedError
            made.append(word)
        raise _UnfinishedError

    def _skip_blank(self, blanks: str) -> bool:
        """Skip a blank, the end of a line that goes on, or a comment, if one begins here."""
        here = self._text[self._at]
        if self._text.startswith("\\\n", self._at):
            self._at += 2
        elif here in blanks:
            self._at += 1
        elif here == "#":
            end = self._text.find("\n", self._at)
            self._at = end if end >= 0 else len(self._text)
        else:
            return False
        return True


def _end(text: str, start: int, pair: str) -> int:
    """Return the place after the bracket that closes the one at `start`."""
    depth, at = 0, start
    while at < len(text):
        here = text[at]
        if here == "\\":
            at += 1
        elif here == "'" and pair == "()":
            at = text.find("'", at + 1)
            if at < 0:
                break
        elif here in pair:
            depth += 1 if here == pair[0] else -1
            if not depth:
                return at + 1
        at += 1
    raise _UnfinishedError


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(
    text: str, _shell: _Shell | None = None, _before: Sequence[str] = (), _depth: int = 0
) -> Iterator[Command]:
    """Yield each simple command of a script, and of the scripts that it hands to `bash -c`, `eval` or an option
    `--wrap`, up to one that never ends."""
    shell, is_sure, was_test = _shell or _Shell(), True, False
    for sign, tokens in _simple(text):
        is_sure = sign != "||" and (sign != "&&" or (is_sure and not was_test))
        if sign.startswith(";;") or sign == ";&":
            shell.leave(is_closed=False)
        command = shell.run(tokens, is_sure=is_sure)
        was_test = command is not None and command.words[0] in _TESTS
        if command is None:
            continue
        if (found := _inner(command.words)) is not None and _depth < MAX_DEPTH:
            place, script = found
            yield from commands(script, shell, [*_before, *command.words[:place]], _depth + 1)
        else:
            yield Command(command.words, command.variables, _before)


def _simple(text: str) -> Iterator[tuple[str, list[Word | Array]]]:
    """Yield the words of each simple command, without its redirections, after the sign before it."""
    before, made, is_redirected = ";", [], False
    tokens = _Lexer(text).tokens()
    while True:
        try:
            token = next(tokens, None)
        except _UnfinishedError:
            return
        if token is not None and not isinstance(token, Sign):
            made += [] if is_redirected else [token]
            is_redirected = False
        elif token is not None and set(token.text) & set("<>"):
            is_redirected = True
        else:
            if made:
                yield before, made
            if token is None:
                return
            before = token.text if made or token.text != ";" else before  # a line may go on after && and ||
            made, is_redirected = [], False


def _inner(words: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of a script that a command is given as a word, and the script."""
    if words[0] == "eval" and len(words) > 1:
        return 0, " ".join(words[1:])
    for place, word in enumerate(words[:-1]):
        if word == "--wrap":
            return place, words[place + 1]
        if word.startswith("--wrap="):
            return place, word.partition("=")[2]
        if word.rsplit("/", 1)[-1] in _SHELLS:
            after = place + 1
            while after + 1 < len(words) and words[after].startswith("-"):
                if re.fullmatch(r"-[a-z]*c", words[after]):
                    return place, words[after + 1]
                after += 1
    return None


@dataclass
class _Shell:
    """The variables, as a script's commands set them."""

    values: dict[str, list[str] | None] = field(default_factory=dict)  #: None: it depends on what runs
    blocks: list[set[str]] = field(default_factory=list)  #: the variables that each open `if`, loop or function sets

    def run(self, tokens: Sequence[Word | Array], *, is_sure: bool) -> Command | None:
        """Set the variables that a command sets. Return the command if there is more to it."""
        rest, own = self._begin([*tokens]), dict[str, list[str] | None]()
        is_declaring = bool(rest) and _reserved(rest[0]) in _DECLARING
        for token in [*rest[is_declaring:]]:
            if (found := self._assigned(token)) is not None:
                own[found[0]] = found[1] if is_sure else None
            elif not is_declaring:
                break
            rest.remove(token)
        if is_declaring or not rest:
            for name, value in own.items():
                self._set(name, value)
            return None
        words = [item for token in rest if not isinstance(token, Array) for item in self._fields(token)]
        if words[:1] == ["read"]:
            for name in words[1:]:
                self._set(name, None)
        known = {name: None if value is None else " ".join(value) for name, value in {**self.values, **own}.items()}
        return Command(words, known) if words else None

    def leave(self, *, is_closed: bool) -> None:
        """Forget what a branch has set: it may not have run."""
        for names in self.blocks[-1:]:
            self.values |= dict.fromkeys(names)
            if is_closed:
                self.blocks.pop()
                if self.blocks:
                    self.blocks[-1] |= names

    def _begin(self, tokens: list[Word | Array]) -> list[Word | Array]:
        """Take the words that begin and end blocks from the start of a command, and return the others."""
        while tokens and (word := _reserved(tokens[0])) in _RESERVED:
            if word in _OPENING:
                self.blocks.append(set())
            elif word in _CLOSING:
                self.leave(is_closed=True)
            elif word in ("else", "elif"):
                self.leave(is_closed=False)
            del tokens[0]
            if word in ("for", "select") and tokens:
                self._set(_reserved(tokens[0]), None)
            if word in ("for", "select", "case", "function"):
                return []
        return tokens

    def _assigned(self, token: Word | Array) -> tuple[str, list[str] | None] | None:
        """Return the name and the value that a word assigns."""
        if isinstance(token, Array):
            before = self.values.get(token.name, []) if token.is_added else []
            values = [item for word in token.words for item in self._fields(word)]
            return token.name, None if before is None else [*before, *values]
        match = None if token[0].quote else _NAMED.match(token[0].text)
        if match is None:
            return None
        before = self.values.get(match[1], []) if match[2] else []
        text = "".join(self._text(item) for item in (Piece(token[0].text[match.end() :]), *token[1:]))
        return match[1], None if before is None or len(text) > MAX_VALUE else ["".join([*before, text])]

    def _set(self, name: str, value: list[str] | None) -> None:
        self.values[name] = value
        for names in self.blocks[-1:]:
            names.add(name)

    def _fields(self, word: Word) -> list[str]:
        """Return the words that a word becomes: a value outside quotes is divided at its spaces."""
        made: list[str] = []
        is_open = False  # the last one grows by the next piece
        for piece in word:
            parts, is_ended = [piece.text], False
            if piece.quote == '"':
                parts = self._values(piece.text)
            elif not piece.quote and (text := self._text(piece)) != piece.text:
                parts, is_ended = text.split(), text[-1:].isspace()
                is_open = is_open and not text[:1].isspace()
            if parts and is_open:
                made[-1] += parts.pop(0)
            made += parts
            is_open = bool(made) and not is_ended
        return made

    def _text(self, piece: Piece) -> str:
        return piece.text if piece.quote == "'" else " ".join(self._values(piece.text))

    def _values(self, text: str) -> list[str]:
        """Return the values of a variable; of anything else, and of what is not known, its text."""
        match = _VARIABLE.fullmatch(text)
        if match is None:
            return [text]
        name, default = match[1] or match[2], match[4]
        if name not in self.values and default is not None:
            return [_VARIABLE.sub(lambda inner: " ".join(self._values(inner[0])), default.strip("\"'"))]
        found = self.values.get(name)
        if found is None:
            return [text]
        return found if match[3] else found[:1] or [""]


def _reserved(token: Word | Array) -> str:
    """Return a word that stands outside quotes; no text for another one."""
    return token[0].text if not isinstance(token, Array) and len(token) == 1 and not token[0].quote else ""
