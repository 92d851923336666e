"""`honectl diff` and `honectl compare`: what differs between jobs, their losses in one plot, and their answers to the
same examples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from honed.cli import column, terminal
from honed.cli.predictions import compared
from honed.job.comparison import chosen, is_right
from honed.job.comparison import compare as pieces_of
from honed.system import untrusted
from honed.system.error import UsageError

if TYPE_CHECKING:
    from honed.cli.instance import Instance
    from honed.job.shape import Prediction, Shown

#: Marks of the jobs in the plot and before their answers, which differ without colours, too.
MARKS = "abcdefgh"
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
#: Where several curves meet.
MEETING = "#"
#: Rows of the plot, and its columns in a pipe.
PLOT_ROWS, PIPE_COLUMNS = 14, 100
#: Keys of a plan that are about this job alone, or are reasons in words.
_OF_ONE_JOB = {"job", "output_dir", "date", "spec", "may_read", "warnings"}

Flat = dict[str, Any]


def diff(instance: Instance, options: argparse.Namespace) -> int:
    """Print the differences of two jobs: spec, plan, data, versions and scores."""
    jobs = [instance.show(reference) for reference in (options.first, options.second)]
    manifests = [_manifest(job) for job in jobs]
    parts = {
        "spec": _differences([_spec(job) for job in jobs]),
        "plan": _differences([_plan(job) for job in jobs]),
        "data": _differences([_flat(manifest.get("data") or {}) for manifest in manifests]),
        "versions": _differences([_flat(manifest.get("versions") or {}) for manifest in manifests]),
        "scores": _differences([_scores(job) for job in jobs]),
    }
    unknown = [job["id"] for job, manifest in zip(jobs, manifests, strict=True) if not manifest]
    if options.json:
        head = [{key: job[key] for key in ("id", "name", "state")} for job in jobs]
        terminal.console.print_json(json.dumps({"jobs": head, **parts, "without_manifest": unknown}))
        return 0
    titles = [f"{job['id']} ({terminal.plain(job['name'], limit=30)})" for job in jobs]
    for name, rows in parts.items():
        if name in ("data", "versions") and unknown:
            numbers = " and ".join(f"job {number}" for number in unknown)
            terminal.say(f"{name}: not known: {numbers} has no output with a manifest", style="dim")
        elif not rows:
            terminal.say(f"{name}: the same", style="dim")
        else:
            terminal.table([name, *titles], [[key, *map(_shown, values)] for key, values in rows.items()])
        terminal.say()
    return 0


def compare(instance: Instance, options: argparse.Namespace) -> int:
    """Print several jobs beside each other: specs, scores, losses and predictions."""
    if not 2 <= len(options.ids) <= len(MARKS):
        raise UsageError(
            f"compare takes 2 to {len(MARKS)} jobs, got {len(options.ids)}", hint="honectl compare ID ID …"
        )
    jobs = [instance.show(reference) for reference in options.ids]
    spec = _differences([_spec(job) for job in jobs])
    names = sorted({name for job in jobs for name in _scores(job)}, key=column.scores_first)
    metrics = {name: [job["metrics"].get(name) for job in jobs] for name in names}
    losses = [_course(instance.read("losses", str(job["id"]))) for job in jobs]
    answers = shared_answers([instance.read("predictions", str(job["id"])) for job in jobs])
    if options.json:
        head = [{key: job[key] for key in ("id", "name", "state", "score")} for job in jobs]
        whole = {"jobs": head, "spec": spec, "metrics": metrics, "losses": losses, "predictions": answers}
        terminal.console.print_json(json.dumps(whole))
        return 0
    for mark, style, job in zip(MARKS, _STYLES, jobs, strict=False):
        words = [terminal.state_words(job), column.COLUMNS["score"].text(job), column.COLUMNS["elapsed"].text(job)]
        told = ", ".join(filter(None, words))
        terminal.say_drawn(
            Text.assemble((mark, f"bold {style}"), f" job {job['id']} ({terminal.plain(job['name'])}): {told}")
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


# -- differences -------------------------------------------------------------------------------------------------------


def _spec(job: Shown) -> Flat:
    return _flat({key: value for key, value in job["spec"].items() if key not in ("name", "group")})


def _plan(job: Shown) -> Flat:
    found = _flat({key: value for key, value in job["plan"].items() if key not in _OF_ONE_JOB})
    return {key: value for key, value in found.items() if ".reasons" not in f".{key}"}


def _scores(job: Shown) -> dict[str, Any]:
    """Return a job's metrics without those that say how fast the machine was."""
    return {
        name: value
        for name, value in job["metrics"].items()
        if not name.endswith(("_runtime", "_per_second", "_preparation_time"))
    }


def _flat(value: Any, above: str = "") -> Flat:
    """Return a mapping's values by their dotted keys; empty sections are left out."""
    match value:
        case dict():
            pairs = [(str(key), each) for key, each in value.items()]
        case list() if any(isinstance(each, dict) for each in value):
            pairs = [(str(number), each) for number, each in enumerate(value)]
        case _:
            return {above: value} if above else {}
    found: Flat = {}
    for key, each in pairs:
        found |= _flat(each, f"{above}.{key}" if above else key)
    return found


def _differences(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of those keys in which they differ; None where one lacks the key."""
    keys = dict.fromkeys(key for each in facts for key in each)
    values = {key: [each.get(key) for each in facts] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each[1:])}


def _manifest(job: Shown) -> Mapping[str, Any]:
    """Return the provenance manifest of a job's output; empty without one that we may read."""
    if (output_dir := job["artifacts"]["output_dir"]) is None:  # an evaluation makes none
        return {}
    path = Path(output_dir) / "honed.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(untrusted.read_plain(path, num_names=1))
        return found if isinstance(found, dict) else {}
    return {}


# -- losses ------------------------------------------------------------------------------------------------------------


def _course(pairs: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Return the losses by step; of a step that was repeated after a resume, the last."""
    return sorted({step: value for step, value in pairs if value is not None and math.isfinite(value)}.items())


def plot(courses: Sequence[Sequence[tuple[int, float]]], *, width: int, rows: int = PLOT_ROWS) -> Iterator[Text]:
    """Yield the lines of a plot of several losses over the steps, each drawn with its mark."""
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
        for place, value in _columns(course, last, columns).items():
            row = round((high - value) / (high - low) * (rows - 1)) if high > low else 0
            cells.setdefault((row, place), set()).add(number)
    yield Text("loss", style="bold")
    for row in range(rows):
        label = labels[0] if row == 0 else labels[1] if row == rows - 1 else ""
        line = Text(f"{label:>{margin}} │")
        for place in range(columns):
            there = cells.get((row, place), set())
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
    """Return the mean loss of each column of a plot that has some."""
    found: dict[int, list[float]] = {}
    for step, value in course:
        found.setdefault(round(step / last * (columns - 1)) if last else 0, []).append(value)
    return {place: sum(values) / len(values) for place, values in found.items()}


# -- predictions -------------------------------------------------------------------------------------------------------


def shared_answers(predictions: Sequence[Sequence[Prediction]]) -> list[dict[str, Any]]:
    """Return the last answers to those examples that at least two jobs have predicted."""
    shared: dict[tuple[str, str], list[str | None]] = {}
    for number, rows in enumerate(predictions):
        seen: set[tuple[str, str]] = set()
        for row in chosen(rows, step=-1):
            key = (row["prompt"] or "", row["ground_truth"] or "")
            if key not in seen:
                seen.add(key)
                shared.setdefault(key, [None] * len(predictions))[number] = row["prediction"]
    return [
        {"prompt": prompt, "ground_truth": truth, "predictions": given}
        for (prompt, truth), given in shared.items()
        if sum(each is not None for each in given) > 1
    ]


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
