"""Drawing for honectl: tables, progress, masked text. Content of job files is printed as data, never as markup or
escape sequences."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from honed.job.progress import duration
from honed.system import quote
from honed.system.error import (
    DatasetError,
    DiskShortError,
    ErrorRecord,
    HonedError,
    MemoryShortError,
    ModelError,
    NotPermittedError,
    PrecisionError,
    SpecError,
    UsageError,
)
from honed.system.printable import printable

if TYPE_CHECKING:
    from honed.job.shape import Progress, Row, Segment

#: Columns for output into a pipe: nothing is cut there.
PIPE_WIDTH = 400
#: Columns that wrap where a terminal is narrow: a path or a reason that is cut is useless.
WRAPPED = {"detail", "hint", "waiting because", " "}
#: Rows from which on a table is printed without colours.
MAX_DRAWN_ROWS = 500
#: Largest value of a line of bars: the range of two is a number, too.
MAX_DRAWN = 1e300


class _Console(Console):
    def print_json(self, json: str | None = None, **options: Any) -> None:
        """Print JSON as rich does, with control characters and characters that UTF-8 cannot carry escaped as JSON
        does."""
        with self.capture() as drawn:
            super().print_json(json, **options)
        # JSON escapes its own control characters: any escape character here belongs to rich's colours.
        self.file.write(
            "".join(char if char.isprintable() or char in "\n\x1b" else _escape(char) for char in drawn.get())
        )


def _escape(char: str) -> str:
    units = char.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


console = _Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
STATE_STYLES = {
    "running": "bold cyan",
    "staged": "cyan",
    "succeeded": "green",
    "failed": "bold red",
    "rejected": "red",
    "held": "yellow",
    "cancelled": "dim",
    "ok": "green",
    "warning": "yellow",
    "error": "bold red",
}


def plain(value: Any, *, limit: int | None = None) -> str:
    """Return a value as text that cannot move the cursor: control characters shown as ·, long text cut with an
    ellipsis."""
    text = printable("" if value is None else quote.show(str(value)), keep="\n", instead="·")
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def say(text: str = "", *, style: str = "") -> None:
    """Print one message; its lines after the first are indented, so that none looks like another message."""
    say_drawn(Text(plain(text), style=style))


def say_drawn(text: Text) -> None:
    """Print styled text like `say`. Lines that a narrow terminal wraps are indented as well; a pipe's are not
    wrapped."""
    for number, line in enumerate(text.split("\n", allow_blank=True) or [text]):
        indent = "  " if number else ""
        parts = line.wrap(console, max(console.width - 4, 20)) if console.is_terminal else [line]
        for index, part in enumerate(parts):
            console.print(Text(indent + "  " * bool(index)) + part, soft_wrap=True)


def say_json(value: Any) -> None:
    """Print a value for programs, in colours on a terminal."""
    console.print_json(json.dumps(value))


def stream() -> TextIO:
    """Return a stream for a format that programs read: unchanged into a pipe, control characters replaced on a
    terminal."""
    return cast("TextIO", _Harmless()) if console.is_terminal else sys.stdout


class _Harmless:
    def write(self, text: str) -> int:
        return sys.stdout.write(plain(text.replace("\r\n", "\n")))


def say_error(error: ErrorRecord, *, prefix: str = "") -> None:
    """Print an error in the form that --json has."""
    # `usage` is about a command, not a job: its message needs no code.
    code = "" if error["code"] == "usage" else f"{error['code']}: "
    say(f"{prefix}{code}{error.get('evidence') or error['message']}", style="red")
    if error.get("hint"):
        say(f"{' ' * (len(prefix) - len(prefix.lstrip()))}hint: {error['hint']}")


def complain(error: HonedError, *, prefix: str) -> None:
    """Print an error on stderr."""
    for line in [f"{prefix}{error.shown}", *([f"hint: {error.hint}"] if error.hint else [])]:
        print(plain(line).replace("\n", "\n  "), file=sys.stderr)


@contextlib.contextmanager
def doing(words: str) -> Iterator[None]:
    """Say on stderr, if that is a terminal, what takes a while; the line is removed when it is done."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    print(plain(words, limit=max(console.width - 2, 10)), end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def status_of(error: HonedError) -> int:
    """Return the exit status for an error: 1 for a rejected job file, that of its class for wrong usage and missing
    permissions, else the one for what is not available."""
    match error:
        case UsageError():
            return UsageError.exit_status
        case _ if error.code == NotPermittedError.code:
            return NotPermittedError.exit_status
        case SpecError() | DatasetError() | ModelError() | PrecisionError() | MemoryShortError() | DiskShortError():
            return 1
        case _:
            return 1 if error.is_refusal else os.EX_UNAVAILABLE


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """Print a table; a cell that is a known state gets its colour."""
    rows = list(rows)
    if len(rows) > MAX_DRAWN_ROWS:
        _long_table(columns, rows, right)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_header=any(column.strip() for column in columns))
    for column in columns:
        drawn.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column == "id",  # rich takes as much from each of these if there is too little room
            overflow="fold" if column in WRAPPED else "ellipsis",
            min_width=max((cell_len(str(row[0])) for row in rows), default=0) if column == "id" else None,
        )
    for row in rows:
        drawn.add_row(*(_cell(column, cell) for column, cell in zip(columns, row, strict=True)))
    console.print(drawn)


def _cell(column: str, value: Any) -> Text:
    is_wrapped = column in WRAPPED
    return Text(
        _flat(value),
        style=STATE_STYLES.get(str(value), ""),
        no_wrap=not is_wrapped,
        overflow="fold" if is_wrapped else "ellipsis",
    )


def _long_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str]) -> None:
    """Print a table as plain text: rich takes many seconds for thousands of rows."""
    cells = [list(columns), *([_flat(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [
            f"{' ' * (width - cell_len(cell))}{cell}" if column in right else set_cell_size(cell, width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        print(" ".join(padded).rstrip())


def _flat(cell: Any) -> str:
    return plain(cell).replace("\n", "⏎")


def progress_cells(job: Row) -> tuple[str, str, str]:
    """Return the cells of a job's step, loss and ETA; only a running job has an ETA."""
    progress = job["progress"]
    step, num_steps = progress.get("step"), progress.get("num_steps")
    loss, eta_sec = progress.get("loss"), progress.get("eta_sec") if job["state"] == "running" else None
    return (
        f"{step:.0f}/{num_steps:.0f}" if step is not None and num_steps else "",
        f"{loss:.4g}" if isinstance(loss, int | float) else "",
        duration(eta_sec) if isinstance(eta_sec, int | float) else "",
    )


def segments(parts: Iterable[Segment]) -> Text:
    """Return the text of a row with its trained parts highlighted and its masked parts dim; also marked without
    colours."""
    drawn = Text()
    for part in parts:
        text = plain(part["text"])
        if part["trained"]:
            drawn.append(text if console.is_terminal else f"⟦{text}⟧", style="bold green")
        else:
            drawn.append(text, style="dim")
    return drawn


def bar(progress: Progress, *, width: int = 20) -> str:
    """Return a bar of a job's progress, in characters; empty before its first step."""
    step, num_steps = progress.get("step"), progress.get("num_steps")
    if step is None or not num_steps:
        return ""
    done = round(width * min(step / num_steps, 1))
    return f"[{'#' * done}{'.' * (width - done)}]"


def state_words(job: Row) -> str:
    """Return a job's state for people: a queued job whose worker waits for its device is `staged`."""
    return "staged" if job.get("staged_at") else job["state"]


def why_waiting(job: Row) -> str:
    """Return the reason why a job waits; empty if it does not wait."""
    return wait["detail"] if (wait := job.get("waiting_for")) else ""


def job_line(job: Row) -> str:
    """Return a job's state and progress in one line."""
    step, loss, eta = progress_cells(job)
    parts = [
        bar(job["progress"]),
        f"step {step}" if step else "",
        f"loss {loss}" if loss else "",
        f"ETA {eta}" if eta else "",
    ]
    return "  ".join([f"job {job['id']} ({job['name']}): {state_words(job)}", *filter(None, parts)])


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """Return the course of a metric in one line."""
    if not values:
        return ""
    bars = "▁▂▃▄▅▆▇█"
    values = [max(-MAX_DRAWN, min(MAX_DRAWN, value)) for value in values]
    stride = max(1, -(-len(values) // width))
    points = [sum(values[at : at + stride]) / len(values[at : at + stride]) for at in range(0, len(values), stride)]
    low, high = min(points), max(points)
    scale = (len(bars) - 1) / (high - low) if high > low else 0
    return "".join(bars[int((point - low) * scale)] for point in points)
