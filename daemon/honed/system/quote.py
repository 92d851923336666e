"""Quotes of what belongs to a job's owner: text of rows, prompts and predictions, of templates, values of job files.

More people read a log than may read a job. So what a sentence quotes is marked where it is put in, and the marks stay
in all that is made of the sentence, until it is told to somebody:

    f"message 2: the role is {quote.mark(repr(role))}, not one of user, assistant"
    hide    message 2: the role is …, not one of user, assistant            logs, the journal, STATUS=, notices
    show    message 2: the role is 'moderator', not one of user, assistant  `evidence`, for those who may read the job

Names are no quotes: keys, columns, files, modules. The marks are noncharacters, which Unicode keeps for a program's own
use; those that a file holds are taken out of what is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPEN, _OPEN_ASIDE, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
#: A quote that was cut goes to the end.
_MARKED = re.compile(f"([{_OPEN}{_OPEN_ASIDE}])[^{_CLOSE}]*{_CLOSE}?")
_MARKS = str.maketrans("", "", _OPEN + _OPEN_ASIDE + _CLOSE)
#: What stands in the place of a quote.
HIDDEN = "…"
#: Characters of a name.
MAX_NAME = 60
#: A word that names something, and is no sentence of somebody's.
_NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME}}}")
_PLACE = re.compile(r"\S{1,300}")


def mark(text: str) -> str:
    """A quote, in whose place `…` is told to others."""
    return f"{_OPEN}{show(text)}{_CLOSE}"


def aside(text: str) -> str:
    """A part of a sentence that quotes something, and is left out for others."""
    return f"{_OPEN_ASIDE}{show(text)}{_CLOSE}"


def name(text: str) -> str:
    """A name that somebody has given, as it is; one that is no plain word may be anything, and is a quote."""
    return text if _NAME.fullmatch(text) else mark(_cut(text))


def names(texts: Iterable[str], form: str = "{}") -> str:
    """Names of one place, such as a table's columns, each in that form: where one of them is no plain word, the others
    may be no names either, as in a table without a header."""
    told = [(text, _NAME.fullmatch(text) is not None) for text in texts]
    joined = ", ".join(form.format(text if is_plain else _cut(text)[1:-1]) for text, is_plain in told)
    return joined if all(is_plain for _, is_plain in told) else mark(joined)


def place(text: str) -> str:
    """A path that a row names, as it is; what has spaces in it may be a sentence of the row."""
    return text if _PLACE.fullmatch(text) else mark(text)


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…")


def hide(text: str) -> str:
    """The sentence for everybody."""
    return _MARKED.sub(lambda found: HIDDEN if found[1] == _OPEN else "", text).translate(_MARKS)


def show(text: str) -> str:
    """The sentence for those who may read what it quotes."""
    return text.translate(_MARKS)


def is_marked(text: str) -> bool:
    return _MARKED.search(text) is not None
