"""`honectl diff` and `honectl compare`: what differs between jobs, their losses in one plot, and their answers to the
same examples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from honed.cli import column, members, terminal
from honed.cli.predictions import compared
from honed.job.comparison import compare as pieces_of
from honed.job.comparison import course_of, differences, flat, is_right, plan_of, scores_of, shared_answers, spec_of
from honed.system import durable, untrusted
from honed.system.error import UsageError
from honed.system.personpath import PersonPath

if TYPE_CHECKING:
    from honed.cli.instance import Instance
    from honed.job.shape import Shown

#: Marks of the jobs in the plot and before their answers, which differ without colours, too.
MARKS = "abcdefgh"
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
#: Where several curves meet.
MEETING = "#"
#: Rows of the plot, and its columns in a pipe.
PLOT_ROWS, PIPE_COLUMNS = 14, 100


def diff(instance: Instance, options: argparse.Namespace) -> int:
    """Print the differences of two jobs: spec, plan, data, versions and scores."""
    jobs = [instance.show(reference) for reference in (options.first, options.second)]
    manifests = [_manifest(job) for job in jobs]
    parts = {
        "spec": differences([spec_of(job) for job in jobs]),
        "plan": differences([plan_of(job) for job in jobs]),
        "data": differences([flat(manifest.get("data") or {}) for manifest in manifests]),
        "versions": differences([flat(manifest.get("versions") or {}) for manifest in manifests]),
        "scores": differences([scores_of(job) for job in jobs]),
    }
    unknown = [job["id"] for job, manifest in zip(jobs, manifests, strict=True) if not manifest]
    if options.json:
        head = [{key: job[key] for key in ("id", "name", "state")} for job in jobs]
        terminal.say_json({"jobs": head, **parts, "without_manifest": unknown})
        return 0
    titles = [f"{job['id']} ({terminal.plain(job['name'], limit=30)})" for job in jobs]
    for name, rows in parts.items():
        if name in ("data", "versions") and unknown:
            numbers = " and ".join(f"job {number}" for number in unknown)
            terminal.say(f"{name}: not known: {numbers} has no output with a manifest", style="dim")
            terminal.say()
        else:
            _say_table(name, titles, rows, none=f"{name}: the same")
    return 0


def compare(instance: Instance, options: argparse.Namespace) -> int:
    """Print several jobs side by side: specs, scores, losses and predictions."""
    references = [number for reference in options.ids for number in _each(instance, reference)]
    if not 2 <= len(references) <= len(MARKS):
        raise UsageError(f"compare takes 2 to {len(MARKS)} jobs, got {len(references)}", hint="honectl compare ID ID …")
    jobs = [instance.show(reference) for reference in references]
    spec = differences([spec_of(job) for job in jobs])
    names = sorted({name for job in jobs for name in scores_of(job)}, key=column.scores_first)
    metrics = {name: [job["metrics"].get(name) for job in jobs] for name in names}
    losses = [course_of(instance.ask("losses", id=str(job["id"]))) for job in jobs]
    answers = shared_answers([instance.ask("predictions", id=str(job["id"])) for job in jobs])
    if options.json:
        head = [{key: job[key] for key in ("id", "name", "state", "score")} for job in jobs]
        terminal.say_json({"jobs": head, "spec": spec, "metrics": metrics, "losses": losses, "predictions": answers})
        return 0
    for mark, style, job in zip(MARKS, _STYLES, jobs, strict=False):
        words = [terminal.state_words(job), column.COLUMNS["score"].text(job), column.COLUMNS["elapsed"].text(job)]
        what = ", ".join(filter(None, words))
        terminal.say_drawn(
            Text.assemble((mark, f"bold {style}"), f" job {job['id']} ({terminal.plain(job['name'])}): {what}")
        )
    marks = [*MARKS[: len(jobs)]]
    terminal.say()
    _say_table("spec", marks, spec, none="the specs are the same")
    _say_table("metric", marks, metrics, none="no metrics yet")
    width = min(terminal.console.width, PIPE_COLUMNS) if not terminal.console.is_terminal else terminal.console.width
    for line in plot(losses, width=width):
        terminal.console.print(line, soft_wrap=True)
    _say_answers(answers, options.samples)
    return 0


def _each(instance: Instance, reference: str) -> list[str]:
    """Return the jobs of a sweep, of a large one those with the lowest evaluation loss, if the reference names one and
    no job; else itself."""
    if not members.of(instance, reference):
        return [reference]
    jobs = instance.ask("group", id=reference)["jobs"]
    if len(jobs) <= len(MARKS):
        return [str(job["id"]) for job in jobs]
    best = sorted(jobs, key=lambda job: (job["eval_loss"] is None, job["eval_loss"], job["id"]))[: len(MARKS)]
    note = f"sweep {reference}: the {len(MARKS)} of its {len(jobs)} jobs with the lowest evaluation loss"
    print(terminal.plain(note), file=sys.stderr)
    return sorted((str(job["id"]) for job in best), key=int)


def _say_table(title: str, marks: Sequence[str], rows: Mapping[str, Sequence[Any]], *, none: str) -> None:
    if rows:
        terminal.table([title, *marks], [[key, *map(_shown, values)] for key, values in rows.items()])
    else:
        terminal.say(none, style="dim")
    terminal.say()


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return terminal.plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), limit=60)


# -- provenance --------------------------------------------------------------------------------------------------------


def _manifest(job: Shown) -> Mapping[str, Any]:
    if (output_dir := job["artifacts"]["output_dir"]) is None:  # an evaluation makes none
        return {}
    path = Path(output_dir) / "honed.json"
    return durable.json_object(lambda: untrusted.read_plain(PersonPath.of(path, 1)))


# -- losses ------------------------------------------------------------------------------------------------------------


def plot(courses: Sequence[Sequence[tuple[int, float]]], *, width: int, rows: int = PLOT_ROWS) -> Iterator[Text]:
    """Yield the lines of a plot of several losses over the steps, drawn with their marks."""
    values = [value for course in courses for _, value in course]
    if not values:
        yield Text("no losses yet", style="dim")
        return
    low, high = min(values), max(values)
    last = max(step for course in courses for step, _ in course)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = max(width - margin - 3, 8)
    cells: dict[tuple[int, int], set[int]] = {}
    for number, course in enumerate(courses):
        for index, value in _columns(course, last, columns).items():
            row = round((high - value) / (high - low) * (rows - 1)) if high > low else 0
            cells.setdefault((row, index), set()).add(number)
    yield Text("loss", style="bold")
    for row in range(rows):
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        line = Text(f"{label:>{margin}} │")
        for index in range(columns):
            there = cells.get((row, index), set())
            first = next(iter(there), 0)
            line.append(
                " " if not there else MARKS[first] if len(there) == 1 else MEETING,
                style=_STYLES[first] if len(there) == 1 else "",
            )
        line.rstrip()
        yield line
    yield Text(f"{'':>{margin}} └{'─' * columns}")
    end = f"step {last}"
    yield Text(f"{'':>{margin}}  0{end:>{max(columns - 1, len(end) + 1)}}"[: max(width, margin + 12)])


def _columns(course: Sequence[tuple[int, float]], last: int, columns: int) -> dict[int, float]:
    by_column: dict[int, list[float]] = {}
    for step, value in course:
        by_column.setdefault(round(step / last * (columns - 1)) if last else 0, []).append(value)
    return {index: sum(values) / len(values) for index, values in by_column.items()}


# -- predictions -------------------------------------------------------------------------------------------------------


def _say_answers(answers: Sequence[Mapping[str, Any]], num: int) -> None:
    terminal.say()
    if not answers:
        terminal.say("no example was predicted by two of these jobs", style="dim")
        return
    for row in answers[:num]:
        truth = row["ground_truth"]
        terminal.say_drawn(Text(terminal.plain(row["prompt"]), style="bold"))
        if truth:
            terminal.say_drawn(Text.assemble(("= ", "dim"), (terminal.plain(truth), "cyan")))
        for mark, style, text in zip(MARKS, _STYLES, row["predictions"], strict=False):
            if text is None:
                answer = Text("not predicted", style="dim")
            elif truth and not is_right({"ground_truth": truth, "prediction": text}):
                answer = compared(pieces_of(truth.strip(), text.strip()))
            else:
                answer = Text(terminal.plain(text))
            terminal.say_drawn(Text.assemble((f"{mark} ", f"bold {style}"), answer))
        terminal.say()
    if len(answers) > num:
        terminal.say(f"… and {len(answers) - num} more examples: --samples {len(answers)}", style="dim")
