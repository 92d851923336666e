"""Text that must never be shown unescaped, and checks of all that is shown."""

from __future__ import annotations

import re

from zoo.fuzz import check_shown

#: One text of each hostile kind, each with a word that identifies it.
PAINT = "\x1b[31mRED\x1b[0m\x1b]0;TITLE\x07\x9b2J"
TURN = "\u202eKCATTA\u202c\u2066\u2069\u200f"
MARKUP = "[bold red]BOLD[/bold red][/]<script>alert('SCRIPT')</script>&lt;"
FORGED = "x\n<2>12:00:00 CRITICAL job 99 (FORGED): succeeded\n\rHONED_JOB=99\u2028\u0085END"
LONG = "LONG" * 25_000
ALL = f"{PAINT} {TURN} {MARKUP} {FORGED} \0\ud800 %s %(x)s {{0}}"

#: Cells that a spreadsheet would execute, also one that accepts separators other than a comma.
FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1", "a;=1+1;b", '"=1+1"')
#: A job's name, which is printable and has no slash: for shells, SQL, HTML, Markdown, chats and formats.
NAME = "hostile.$(touch PWNED)`touch PWNED`';DROP TABLE jobs;--<b>\"[a](b)@channel =1+1 %s {0} -x"


def check_lines(text: str) -> None:
    """Check that no line of the text was forged by a job."""
    check_shown(text)
    assert not re.search(r"^(<\d>)?\d\d:\d\d:\d\d CRITICAL|^(<\d>)?HONED_JOB=|^x$", text, re.MULTILINE)


#: The sequences that rich itself writes: colours, and the cursor and line control of a live display.
_RICH = re.compile(r"\x1b\[(\d*(;\d+)*m|\?25[lh]|2K|1A)|\r(?=\x1b)")


def without_colours(text: str) -> str:
    assert "\x1b[31mRED" not in text
    return _RICH.sub("", text)
