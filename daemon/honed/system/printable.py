"""Text from elsewhere that is about to be printed or logged: it cannot control a terminal, nor fake another line."""

from __future__ import annotations


def printable(text: str, *, keep: str = "", instead: str = "\N{REPLACEMENT CHARACTER}") -> str:
    """Replace every character that is not printable, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else instead for char in text)
