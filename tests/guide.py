"""A page of docs/ whose commands are run: its files, and its sessions with what was printed.

A fence after a line that ends in a name and a colon, as in ``the job file, `birds.yaml`:``, is that file. A fence
`console` is a session: after `$ ` or `USER$ ` a command, after it what it prints. All others are not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w./-]+)`:\n+\Z")
_COMMAND = re.compile(r"(?:(\w+)\$|\$) (.*)\Z", re.DOTALL)
#: Parts of an output that differ from run to run and from machine to machine.
_VARYING = [
    (re.compile(r" of \S+ [KMG]i?B on .+$"), " of <size> on <device>"),
    (re.compile(r"^\d\d:\d\d:\d\d(?= )"), "<time>"),
    (re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?(Z| UTC)?)?"), "<time>"),
    (re.compile(r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b\d[\d.,]* (s|min|h|days?)\b"), "<duration>"),
    (re.compile(r"\b\d[\d.,]* ([KMG]i?)?B\b"), "<size>"),
    (re.compile(r"\b\d+\.\d{2,}(e-?\d+)?\b|\b\d(\.\d+)?e-\d+\b"), "<number>"),
    (re.compile(r"(\bjob \d+ \(.*\)), (queued|running)\b"), r"\1, queued"),
    (re.compile(r"[ \t]+"), " "),
]
#: A line of progress: how many of them there are depends on the machine.
_PROGRESS = re.compile(r"^job \d+ \(.*\): (\w+  \[[#.]*\]|(queued|staged|running)\b)")

#: Runs a command as a user (None: the reader) and returns what it printed, errors included.
Shell = Callable[[str | None, str], str]


@dataclass(frozen=True)
class Exchange:
    """A command and its output, where a page has them."""

    line: int
    user: str | None
    command: str
    output: str


@dataclass(frozen=True)
class File:
    """A file that the page tells the reader to write."""

    name: str
    text: str


def steps(page: Path) -> list[File | Exchange]:
    """Return the files and the commands of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found: list[File | Exchange] = []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 2
        if fence[1] == "console":
            found += _exchanges(fence[2], line)
        elif named := _NAMED.search(text[: fence.start()]):
            found.append(File(named[1], fence[2]))
    return found


def _exchanges(session: str, line: int) -> list[Exchange]:
    exchanges: list[tuple[int, str, list[str]]] = []
    for number, each in enumerate(session.splitlines(), start=line):
        if exchanges and exchanges[-1][1].endswith("\\") and not exchanges[-1][2]:
            exchanges[-1] = (exchanges[-1][0], f"{exchanges[-1][1]}\n{each}", [])
        elif _COMMAND.match(each):
            exchanges.append((number, each, []))
        else:
            assert exchanges, f"line {number}: a session begins with a command"
            exchanges[-1][2].append(each)
    made = []
    for number, prompt, output in exchanges:
        command = _COMMAND.match(prompt)
        assert command is not None
        made.append(Exchange(number, command[1], command[2], "\n".join(output)))
    return made


def normal(output: str) -> list[str]:
    """Return the lines of an output without what varies."""
    lines = [line for line in output.rstrip().splitlines() if not _PROGRESS.match(line)]
    for pattern, word in _VARYING:
        lines = [pattern.sub(word, line).rstrip() for line in lines]
    return lines


def check(page: Path, write: Callable[[File], None], shell: Shell, *, until: str | None = None) -> None:
    """Follow a page, up to the command that begins with `until`; each must print what the page says."""
    for step in steps(page):
        if until is not None and isinstance(step, Exchange) and step.command.startswith(until):
            return
        if isinstance(step, File):
            write(step)
        else:
            printed = shell(step.user, step.command)
            assert normal(printed) == normal(step.output), f"{page}:{step.line}: {step.command}\n{printed}"


def rewrite(page: Path, write: Callable[[File], None], shell: Shell) -> None:
    """Follow a page, and put what its commands print in the place of what it says."""
    text = page.read_text(encoding="utf-8")
    done: list[str] = []
    end = 0
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        if fence[1] == "console":
            done.append(text[end : fence.start()] + "```console\n")
            for exchange in _exchanges(fence[2], before.count("\n") + 2):
                prompt = f"{exchange.user or ''}$ {exchange.command}"
                printed = shell(exchange.user, exchange.command).rstrip()
                done.append("\n".join([prompt, *_shortened(printed)]) + "\n")
            done.append("```")
            end = fence.end()
        elif named := _NAMED.search(before):
            write(File(named[1], fence[2]))
    page.write_text("".join(done) + text[end:], encoding="utf-8")


def _shortened(printed: str) -> list[str]:
    """Return the lines, of adjacent lines of progress the last."""
    lines = printed.splitlines()
    return [
        line.rstrip()
        for number, line in enumerate(lines)
        if not (_PROGRESS.match(line) and number + 1 < len(lines) and _PROGRESS.match(lines[number + 1]))
    ]
