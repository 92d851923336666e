"""`honectl predictions`: predictions for held-out examples, next to the reference, with the differences marked."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.job import comparison
from honed.job.comparison import Kind, Piece, compare
from honed.job.shape import Prediction

#: Styles of a comparison's pieces, and wdiff's marks for output without colours.
_MARKS = {Kind.SAME: ("", "", ""), Kind.WRONG: ("{+", "+}", "bold red"), Kind.MISSING: ("[-", "-]", "cyan strike")}


def compared(pieces: Iterable[Piece], *, of: Sequence[Kind] = tuple(Kind)) -> Text:
    """Return a prediction compared with the reference; `of` selects the kinds of pieces, for two columns."""
    drawn = Text()
    for piece in pieces:
        if piece.kind in of:
            before, after, style = _MARKS[piece.kind]
            text = terminal.plain(piece.text)
            is_marked = not terminal.console.is_terminal or terminal.console.no_color
            drawn.append(f"{before}{text}{after}" if is_marked else text, style=style)
    return drawn


def predictions(instance: Instance, options: argparse.Namespace) -> int:
    everything: list[Prediction] = instance.ask("predictions", id=options.id)
    rows = comparison.chosen(everything, sample=options.sample, step=options.step)
    if options.json:
        terminal.say_json(rows)
    elif options.jsonl:
        comparison.write_jsonl(rows, terminal.stream())
    elif options.csv:
        comparison.write_csv(rows, terminal.stream())
    elif not rows:
        terminal.say("no predictions" + (" of that example or step" if everything else " yet"))
    else:
        steps = sorted({row["step"] for row in (rows if options.step is not None else everything)})
        for index, mine in comparison.by_sample(rows):
            _say_example(index, mine, steps=steps)
    return 0


#: Columns from which on the reference is printed next to the prediction, and not above it.
SIDE_BY_SIDE_WIDTH = 100


def _say_example(index: int, rows: Sequence[Prediction], *, steps: Sequence[int]) -> None:
    """Print one example's predictions at these `steps`, with differences from the reference marked.

    A step without a row is reported as failed.
    """
    truth, written = rows[0]["ground_truth"] or "", {row["step"]: row["prediction"] or "" for row in rows}
    compared_at = {step: compare(truth.strip(), text.strip()) for step, text in written.items()}
    terminal.say_drawn(Text.assemble((f"#{index} ", "bold"), (terminal.plain(rows[0]["prompt"]), "dim")))
    is_wide = terminal.console.is_terminal and terminal.console.width >= SIDE_BY_SIDE_WIDTH and bool(truth)
    drawn = Table(box=None, pad_edge=False, show_header=is_wide, header_style="bold", padding=(0, 2, 0, 0))
    drawn.add_column("step", justify="right", no_wrap=True)
    for column in ("reference", "written") if is_wide else ("written",):
        drawn.add_column(column, ratio=1, overflow="fold")
    if truth and not is_wide:
        drawn.add_row("reference", Text(terminal.plain(truth), style="cyan"))
    for step in steps:
        pieces = compared_at.get(step)
        if pieces is None:
            drawn.add_row(
                str(step), *([""] if is_wide else []), Text("no answer: the prediction failed", style="yellow")
            )
        elif not truth:
            drawn.add_row(str(step), Text(terminal.plain(written[step])))
        elif is_wide:
            sides = [[Kind.SAME, Kind.MISSING], [Kind.SAME, Kind.WRONG]]
            drawn.add_row(str(step), *(compared(pieces, of=side) for side in sides))
        else:
            drawn.add_row(str(step), compared(pieces))
    terminal.console.print(drawn)
