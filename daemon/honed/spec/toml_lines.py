"""The line of every key in a TOML text; tomllib, which parses the values, does not report lines."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable

from honed.spec.problem import KeyPath

#: Called with every key and list item and its line; may raise to end the scan.
Note = Callable[[KeyPath, int], None]
#: Called with every plain value and its start and end in the text.
Place = Callable[[KeyPath, int, int], None]
#: Maximum number of parts of a dotted key that are read; more would exceed any limit on depth.
MAX_DOTS = 200

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
#: A string of any of the four kinds, or a plain value up to its delimiter. A long string may end in two more quotes.
_VALUE = re.compile(
    r'"""(?:[^\\]|\\[\s\S])*?"""(?:"{0,2})'
    r"|'''[\s\S]*?'''(?:'{0,2})"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"""|[^\s,\[\]{}#"'=][^,\[\]{}#"'=\n]*"""
)


def scan(text: str, note: Note, place: Place = lambda _path, _begin, _end: None) -> int | None:
    """Call `note` for every key, and `place` for every value. Returns None, or the offset of invalid text."""
    scanner = _Scanner(text, note, place)
    try:
        scanner.statements()
    except _StuckError:
        return scanner.at
    return None


class _StuckError(Exception):
    """Raised where the text is not TOML."""


class _Scanner:
    def __init__(self, text: str, note: Note, place: Place) -> None:
        self.at = 0
        self._text, self._note, self._place = text, note, place
        self._line, self._line_at = 1, 0
        self._num_tables: dict[KeyPath, int] = {}  #: [[path]] -> number of tables so far

    def statements(self) -> None:
        table: KeyPath = ()
        while not self._is_end():
            if self._take("[["):
                table = self._next_table(self._keys())
                self._expect("]]")
            elif self._take("["):
                table = self._resolve(self._keys())
                self._note_all(table, len(table))
                self._expect("]")
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        path = (*table, *self._keys())
        self._note_all(path, len(path) - len(table))
        self._expect("=")
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._match(_SPACE)
        if self._take("["):
            self._array(path)
        elif self._take("{"):
            self._inline_table(path)
        else:
            begin = self.at
            self._match(_VALUE)
            self._place(path, begin, self.at)

    def _array(self, path: KeyPath) -> None:
        index = 0
        while not self._take_after_blank("]"):
            self._note_all((*path, index), 1)
            self._value((*path, index))
            index += 1
            if not self._take_after_blank(","):
                self._match(_BLANK)
                self._expect("]")
                return

    def _inline_table(self, path: KeyPath) -> None:
        if self._take_after_blank("}"):
            return
        self._pair(path)
        while self._take_after_blank(","):
            self._match(_BLANK)
            self._pair(path)
        self._expect("}")

    def _keys(self) -> KeyPath:
        """Parse a dotted key."""
        self._match(_SPACE)
        keys = [_unquoted(self._match(_KEY))]
        self._match(_SPACE)
        while self._take("."):
            self._match(_SPACE)
            keys.append(_unquoted(self._match(_KEY)))
            self._match(_SPACE)
            if len(keys) > MAX_DOTS:  # too deep, which `note` will report
                break
        return tuple(keys)

    def _resolve(self, keys: KeyPath) -> KeyPath:
        """Return a header's path, with the index of the last table wherever it passes through a [[table]]."""
        path: KeyPath = ()
        for key in keys:
            path = (*path, key)
            if path in self._num_tables:
                path = (*path, self._num_tables[path] - 1)
        return path

    def _next_table(self, keys: KeyPath) -> KeyPath:
        path = (*self._resolve(keys[:-1]), keys[-1])
        self._num_tables[path] = self._num_tables.get(path, 0) + 1
        item = (*path, self._num_tables[path] - 1)
        self._note_all(item, len(item))
        return item

    def _note_all(self, path: KeyPath, num_new: int) -> None:
        for length in range(len(path) - num_new + 1, len(path) + 1):
            self._note(path[:length], self._here())

    def _here(self) -> int:
        self._line += self._text.count("\n", self._line_at, self.at)
        self._line_at = self.at
        return self._line

    def _is_end(self) -> bool:
        self._match(_BLANK)
        return self.at >= len(self._text)

    def _match(self, pattern: re.Pattern[str]) -> str:
        if not (match := pattern.match(self._text, self.at)):
            raise _StuckError
        self.at = match.end()
        return match[0]

    def _take(self, token: str) -> bool:
        taken = self._text.startswith(token, self.at)
        self.at += len(token) * taken
        return taken

    def _take_after_blank(self, token: str) -> bool:
        self._match(_BLANK)
        return self._take(token)

    def _expect(self, token: str) -> None:
        self._match(_SPACE)
        if not self._take(token):
            raise _StuckError


def _unquoted(key: str) -> str:
    if key[0] == "'":
        return key[1:-1]
    try:
        return str(json.loads(key)) if key[0] == '"' else key
    except ValueError:  # \\U0001F600, which JSON lacks, or invalid TOML, which tomllib reports for the whole text
        return _of_toml(key)


def _of_toml(key: str) -> str:
    try:
        return next(iter(tomllib.loads(f"{key} = 0")))
    except ValueError:
        return key
