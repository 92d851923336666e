"""How honectl draws: tables, progress, masked text. Everything that came in a job file is data, never markup or an
escape sequence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from honed.progress import duration

#: Columns of what goes into a pipe: nothing is cut there.
PIPE_WIDTH = 400
console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
STATE_STYLES = {
    "running": "bold cyan",
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
    """A value as text that cannot move the cursor: control characters shown as ·, long text cut with its length."""
    text = "" if value is None else str(value)
    text = "".join(char if char.isprintable() or char == "\n" else "·" for char in text)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def say(text: str = "", *, style: str = "") -> None:
    console.print(Text(plain(text), style=style))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[str] = ()) -> None:
    """One table; a cell that is a known state gets its colour."""
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_header=any(column.strip() for column in columns))
    for column in columns:
        drawn.add_column(
            column, justify="right" if column in right else "left", no_wrap=column not in {"detail", "hint"}
        )
    for row in rows:
        drawn.add_row(*(Text(plain(cell), style=STATE_STYLES.get(str(cell), "")) for cell in row))
    console.print(drawn)


def progress_cells(progress: dict[str, Any]) -> tuple[str, str, str]:
    """Step, loss and ETA as they stand in a row."""
    step, num_steps = progress.get("step"), progress.get("num_steps")
    loss, eta_sec = progress.get("loss"), progress.get("eta_sec")
    return (
        f"{step:.0f}/{num_steps:.0f}" if step is not None and num_steps else "",
        f"{loss:.4g}" if isinstance(loss, int | float) else "",
        duration(eta_sec) if isinstance(eta_sec, int | float) else "",
    )


def segments(parts: Iterable[dict[str, Any]]) -> Text:
    """Text as it is trained on: what is trained stands out, what is masked is dim; marked without colours too."""
    drawn = Text()
    for part in parts:
        text = plain(part["text"])
        if part["trained"]:
            drawn.append(text if console.is_terminal else f"⟦{text}⟧", style="bold green")
        else:
            drawn.append(text, style="dim")
    return drawn


class _Figures(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("figures", "")))


def progress_bar() -> Progress:
    """A bar a job: step, loss and ETA behind it."""
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), _Figures(), console=console
    )


def bar(progress: dict[str, Any], *, width: int = 20) -> str:
    """How far a job is, in characters; empty before its first step."""
    step, num_steps = progress.get("step"), progress.get("num_steps")
    if step is None or not num_steps:
        return ""
    done = round(width * min(step / num_steps, 1))
    return f"[{'#' * done}{'.' * (width - done)}]"


def sparkline(values: Sequence[float], *, width: int = 24) -> str:
    """The course of a figure in one line."""
    if not values:
        return ""
    bars = "▁▂▃▄▅▆▇█"
    stride = max(1, -(-len(values) // width))
    points = [sum(values[at : at + stride]) / len(values[at : at + stride]) for at in range(0, len(values), stride)]
    low, high = min(points), max(points)
    scale = (len(bars) - 1) / (high - low) if high > low else 0
    return "".join(bars[int((point - low) * scale)] for point in points)
