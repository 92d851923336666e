"""What a job's report and the comparison of jobs read, within a limited memory however much the job has reported.

curves        the metrics: all of its values, or a sample of very many (see Curve)
examples      the first held-out examples, with some of its predictions
events        of every kind the newest ones
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from honed.job import history, query
from honed.job.history import Example
from honed.job.job import Job
from honed.job.shape import Shown
from honed.job.spool import Spool
from honed.system import untrusted
from honed.system.layout import Layout
from honed.system.part import joined
from honed.system.personpath import PersonPath

#: Stretches of which a curve's sample has the lowest and the highest value: of those of STEP_METRICS, of the others.
MAX_STRETCHES, MAX_EVALUATIONS = 4096, 16_384
#: Stretches of all curves but those of STEP_METRICS: a page that compares 16 jobs has them all in memory.
MAX_ALL_STRETCHES = 32_768
#: Metrics of every run's steps, whose curves come first.
STEP_METRICS = ("loss", "learning_rate", "grad_norm")
#: Metrics of a job.
MAX_CURVES = 1000
#: Examples, and predictions of one.
MAX_SAMPLES, MAX_ROUNDS = 20, 12
#: Characters of all events.
MAX_EVENT_CHARS = 8 * 1024 * 1024
#: Bytes of the submitted spec.
MAX_SPEC_BYTES = 1024 * 1024
#: Events that are shown in other parts of the page.
ELSEWHERE = ("thinned", "worse", "example", "samples", "data", "memory", "audit")
#: Kinds of events that the page is made of.
_NEEDED = (*ELSEWHERE, "artifact", "log", "stage", "started")


class Point(NamedTuple):
    """One value of a metric; `created_at` of the loss alone."""

    step: int
    value: float
    created_at: str = ""


@dataclass
class Curve:
    """The course of a metric, by step; of a repeated step, the last value. Of more values than `most`, it keeps the
    lowest and the highest of many equal stretches, the first and the last."""

    most: int
    num: int = 0  #: all values, of which `points` may be a sample
    _size: int = 1  # values of a stretch
    _ends: list[Point] = field(default_factory=list)  # the first value, and the last
    _stretches: list[tuple[Point, Point]] = field(default_factory=list)  # the lowest and the highest

    def add(self, point: Point) -> None:
        """Add the next value."""
        self._ends = [*self._ends[:1], point]
        if self.num % self._size == 0:
            self._stretches.append((point, point))
        else:
            low, high = self._stretches[-1]
            self._stretches[-1] = (min(low, point, key=_value), max(high, point, key=_value))
        self.num += 1
        if len(self._stretches) >= self.most and self.num % self._size == 0:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [(min(a[0], b[0], key=_value), max(a[1], b[1], key=_value)) for a, b in pairs]
            self._size *= 2

    @property
    def points(self) -> list[Point]:
        """The values that are kept, by step."""
        kept = {point.step: point for point in itertools.chain(self._ends, *self._stretches)}
        return [kept[step] for step in sorted(kept)]


def _value(point: Point) -> float:
    return point.value


@dataclass(frozen=True)
class Story:
    """The data of one job's report."""

    job: Job
    shown: Shown
    curves: dict[str, Curve]  #: by metric, in the order of their first steps
    examples: list[Example]
    num_examples: int  #: of all
    events: list[dict[str, Any]]  #: the newest ones of every kind
    num_events: int  #: of all but those in ELSEWHERE
    spec_text: str
    database_path: Path

    def last(self, kind: str) -> dict[str, Any]:
        """Return the latest event of a kind; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return the steps and values of a metric."""
        return [point[:2] for point in self.curves[name].points] if name in self.curves else []


def gather(spool: Spool, layout: Layout, job: Job) -> Story:
    path = layout.database_path
    try:
        spec_text = _read(layout.files(job.id).spec_path)
    except OSError as error:
        spec_text = f"({error.strerror})"
    curves = _curves(path, job.id)
    examples, num_examples = history.examples(path, job.id, num=MAX_SAMPLES, num_rows=MAX_ROUNDS)
    return Story(
        job,
        cast("Shown", joined(query.shown(spool, layout, str(job.id), has_events=False, names=curves))),
        curves,
        examples,
        num_examples,
        history.newest_events(path, job.id, _NEEDED, max_chars=MAX_EVENT_CHARS),
        history.num_events(path, job.id, ELSEWHERE),
        spec_text,
        path,
    )


def _curves(path: Path, job_id: int) -> dict[str, Curve]:
    first = (*STEP_METRICS, "eval_loss")
    others = (name for name in history.names(path, job_id) if name not in first)
    names = [*first, *itertools.islice(others, MAX_CURVES - len(first))]  # a worker may have named very many more
    share = MAX_ALL_STRETCHES // (len(names) - len(STEP_METRICS)) // 2 * 2  # two of them become one
    most = {name: MAX_STRETCHES if name in STEP_METRICS else min(MAX_EVALUATIONS, share) for name in names}
    curves = {name: curve for name in names if (curve := _curve(path, job_id, name, most[name])).num}
    return dict(sorted(curves.items(), key=lambda item: item[1].points[0].step))


def _curve(path: Path, job_id: int, name: str, most: int) -> Curve:
    curve = Curve(most)
    for point in _last_of_each_step(history.present(history.metric(path, job_id, name))):
        curve.add(point if name == "loss" else Point(*point[:2]))
    return curve


def _last_of_each_step(rows: Iterable[tuple[int, float | None, str]]) -> Iterator[Point]:
    for step, several in itertools.groupby(rows, key=lambda row: row[0]):
        [(_, value, when)] = deque(several, maxlen=1)
        if value is not None:
            yield Point(step, value, when)


def _read(path: PersonPath) -> str:
    with os.fdopen(untrusted.open_plain(path), "rb") as file:
        return file.read(MAX_SPEC_BYTES).decode(errors="replace")
