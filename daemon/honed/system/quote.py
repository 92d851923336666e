"""Quotes of private text: from rows, prompts and predictions, of templates, values of job files.

More people can read a log than a job. So a quote is marked where it is inserted into a message, and the marks stay in
every text derived from the message, until it is shown to somebody:

    f"message 2: the role is {quote.mark(repr(role))}, not one of user, assistant"
    hide    message 2: the role is …, not one of user, assistant            logs, the journal, STATUS=, notices
    show    message 2: the role is 'moderator', not one of user, assistant  `evidence`, for those who may read the job

Names are not quotes: keys, columns, files, modules. The marks are noncharacters, which Unicode reserves for a program's
internal use; they are removed from quoted text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_OPEN, _OPEN_ASIDE, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
#: A truncated quote extends to the end of the text.
_MARKED = re.compile(f"([{_OPEN}{_OPEN_ASIDE}])[^{_CLOSE}]*{_CLOSE}?")
_MARKS = str.maketrans("", "", _OPEN + _OPEN_ASIDE + _CLOSE)
#: Replacement for a quote.
HIDDEN = "…"
#: Maximum number of characters of a name.
MAX_NAME = 60
#: A word that looks like a name, not like a sentence.
_NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME}}}")
_PLACE = re.compile(r"\S{1,300}")


def mark(text: str) -> str:
    """Mark a quote; `hide` replaces it by `…`."""
    return f"{_OPEN}{show(text)}{_CLOSE}"


def aside(text: str) -> str:
    """Mark a part of a sentence that contains a quote; `hide` removes it."""
    return f"{_OPEN_ASIDE}{show(text)}{_CLOSE}"


def name(text: str) -> str:
    """Return a name as it is; marked as a quote unless it is a plain word."""
    return text if _NAME.fullmatch(text) else mark(_cut(text))


def names(texts: Iterable[str], form: str = "{}") -> str:
    """Join names of one kind, such as a table's columns, each in that form. If one is not a plain word, all are marked:
    the others may not be names either, as in a table without a header.
    """
    checked = [(text, _NAME.fullmatch(text) is not None) for text in texts]
    joined = ", ".join(form.format(text if is_plain else _cut(text)[1:-1]) for text, is_plain in checked)
    return joined if all(is_plain for _, is_plain in checked) else mark(joined)


def first(texts: Sequence[str], number: int, *, separator: str = ", ") -> str:
    """Join the first texts of a list, and say how many more there are."""
    more = f" and {len(texts) - number} more" if len(texts) > number else ""
    return separator.join(texts[:number]) + more


def place(text: str) -> str:
    """Return a path from a row as it is; marked as a quote if it contains spaces, since it may be a sentence."""
    return text if _PLACE.fullmatch(text) else mark(text)


def _cut(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…")


def hide(text: str) -> str:
    """Return the text for everybody, with its quotes hidden."""
    return _MARKED.sub(lambda match: HIDDEN if match[1] == _OPEN else "", text).translate(_MARKS)


def show(text: str) -> str:
    """Return the text with its quotes, for those who may read them."""
    return text.translate(_MARKS)


def is_marked(text: str) -> bool:
    return _MARKED.search(text) is not None
