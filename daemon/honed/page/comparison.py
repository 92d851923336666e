"""The page on which honed-web compares jobs: their losses and scores in common figures, the differences of their specs,
and their answers to the same examples.

    python -m honed.page.comparison --root DIR ID ID…

A short-lived process makes it, as it does a job's page: see job_page.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from honed.job import history
from honed.job.comparison import differences, shared_answers, spec_of
from honed.job.progress import duration, figure
from honed.job.shape import Prediction
from honed.job.spool import Spool
from honed.page import plot
from honed.page.page import document
from honed.page.plot import Series
from honed.page.report import compared, outcome, put_out, telling_scores
from honed.page.story import Story, gather
from honed.system import layout as layouts
from honed.system import niceness
from honed.system.log import guard_tracebacks

#: Jobs on a page, at least and at most; they have letters.
MIN_JOBS, MAX_JOBS = 2, 16
MARKS = "ABCDEFGHIJKLMNOP"
#: Examples on a page, and characters of one text and of one value of a spec.
MAX_SAMPLES, MAX_TEXT, MAX_VALUE = 20, 4000, 200
#: Predictions of one job that are looked at, and their characters.
MAX_COMPARED, MAX_CHARS = 2000, 4 * 1024 * 1024


def render(stories: Sequence[Story], *, num_all: int, now: float) -> bytes:
    """Return the page. `num_all`: the jobs that it was asked for, of which it shows the best ones."""
    specs = differences([spec_of(story.shown) for story in stories])
    telling = telling_scores(stories)
    metrics = differences([_scores(story, telling) for story in stories])
    answers = shared_answers([_last_predictions(story) for story in stories])
    answers.sort(key=lambda row: len(set(row["predictions"])) == 1)  # those in which the jobs differ first
    return document(
        "compare.html",
        title=f"honed: {len(stories)} jobs compared",
        is_served=True,
        live="" if all(story.job.state.is_final for story in stories) else "/api/events",
        scripts=("uplot", "plots"),
        now=now,
        marks=MARKS[: len(stories)],
        jobs=[_head(story, now=now) for story in stories],
        best=_best(stories),
        num_all=num_all,
        specs=[(key, [_value(value) for value in values]) for key, values in specs.items()],
        metrics=[(_words(name), [_value(value) for value in values]) for name, values in metrics.items()],
        plots=_plots(stories, telling),
        answers=[_answer(row) for row in answers[:MAX_SAMPLES]],
        num_answers=len(answers),
        max_text=MAX_TEXT,
    )


def _last_predictions(story: Story) -> list[Prediction]:
    return history.last_predictions(story.database_path, story.job.id, num=MAX_COMPARED, max_chars=MAX_CHARS)


def _head(story: Story, *, now: float) -> dict[str, Any]:
    kind, line = outcome(story)
    seconds = story.job.elapsed_sec(now)
    return {
        "id": story.job.id,
        "name": story.job.name or f"job {story.job.id}",
        "kind": kind,
        "line": line,
        "time": duration(seconds) if seconds is not None else "",
    }


def _best(stories: Sequence[Story]) -> int | None:
    known = {
        index: loss
        for index, story in enumerate(stories)
        if story.job.state == "succeeded" and (loss := story.shown["metrics"].get("eval_loss")) is not None
    }
    return min(known, key=lambda index: known[index]) if len(known) > 1 else None


def _scores(story: Story, telling: Container[str]) -> dict[str, float]:
    metrics = story.shown["metrics"]
    # With those of every data set and tag: `eval_loss/general`, `predictions/exact_match/tag:x`.
    names = [name for name in metrics if name.startswith("eval_loss") or "/".join(name.split("/")[:2]) in telling]
    return {name: metrics[name] for name in sorted(names, key=lambda name: (name.startswith("eval_loss"), name))}


def _words(name: str) -> str:
    return {"eval_loss": "evaluation loss"}.get(name, name.removeprefix("predictions/").replace("_", " "))


def _value(value: Any) -> str:
    match value:
        case None:
            return "–"
        case float():
            return figure(value)
        case str():
            return value[:MAX_VALUE]
        case _:
            return json.dumps(value, ensure_ascii=False)[:MAX_VALUE]


def _plots(stories: Sequence[Story], scores: Sequence[str]) -> list[Markup]:
    titles = {
        "loss": "Training loss",
        "eval_loss": "Evaluation loss",
        **{name: _words(name).capitalize() for name in scores},
    }
    drawn = []
    for name, title in titles.items():
        series = [
            Series(f"{mark} {story.job.name or story.job.id}", story.points(name))
            for mark, story in zip(MARKS, stories, strict=False)
        ]
        drawn.append(plot.lines(title, series, from_zero=name in scores, is_served=True))
    return [item for item in drawn if item]


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    truth = row["ground_truth"]
    given = [None if item is None else compared(item, truth) for item in row["predictions"]]
    return {"prompt": row["prompt"], "truth": truth, "given": given}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page. Returns 1 if a job does not exist, or the page is too long."""
    parser = argparse.ArgumentParser(prog="honed.page.comparison", description="Print a page that compares jobs.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--of", type=int, metavar="N", help="number of jobs that were asked for")
    parser.add_argument("ids", nargs="+", type=int)
    options = parser.parse_args(arguments)
    guard_tracebacks()
    niceness.step_back()
    layout = layouts.of(options.root)
    spool = Spool(layout, lock=False)
    jobs = [job for number in options.ids if (job := spool.job(number)) is not None]
    if len(jobs) < len(options.ids):
        return 1
    stories = [gather(spool, layout, job) for job in jobs]
    return put_out(render(stories, num_all=options.of or len(jobs), now=time.time()), "the page")


if __name__ == "__main__":
    sys.exit(main())
