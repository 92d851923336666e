"""A worker's events in the daemon's log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from honed.job.event import Event
from honed.job.job import Job
from honed.job.narration import PROGRESS_LOG_INTERVAL_SEC, Narrator
from honed.system import message
from honed.system.log import FIELDS

JOB = Job(id=7, name="capitals", submitted_at=0.0, source="a.yaml", uid=1000, output_dir="/o")
Tell = Callable[..., list[logging.LogRecord]]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tell(clock: Clock) -> Tell:
    """A function that logs one event and returns its log records."""
    records: list[logging.LogRecord] = []
    log = logging.Logger("test", logging.DEBUG)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    narrator = Narrator(log, clock)

    def tell(kind: str, **data: Any) -> list[logging.LogRecord]:
        records.clear()
        narrator.log_event(JOB, Event(kind, 0.0, data))
        return list(records)

    return tell


def test_no_words_of_a_row_are_in_the_log(tell: Tell) -> None:
    """Users who may read the journal may not read the data."""
    [record] = tell("example", segments=[{"text": "Why?\n", "trained": False}, {"text": "So.", "trained": True}])
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "job 7 (capitals): first example rendered"
    assert not [each for each in vars(record).values() if "Why?" in str(each) or "So." in str(each)]


def test_rows_are_counted_in_words(tell: Tell) -> None:
    [record] = tell("data", num_train=3, num_unusable=8, lengths={})
    assert record.getMessage() == "job 7 (capitals): rows: 3 to train on, 8 unreadable"


@pytest.mark.parametrize(
    ("code", "explained"), [("diverged", message.of_error("diverged")), ("a worker's own", None), (None, None)]
)
def test_a_code_is_explained_only_where_it_is_one_of_ours(tell: Tell, code: str | None, explained: str | None) -> None:
    [record] = tell("log", level="warning", message="careful", code=code)
    fields = getattr(record, FIELDS)
    assert record.levelno == logging.WARNING
    assert fields.get("MESSAGE_ID") == explained
    assert fields.get("HONED_CODE") == (code if explained else None)


def test_steps_are_told_now_and_then(tell: Tell, clock: Clock) -> None:
    assert len(tell("step", step=1, num_steps=9, loss=1.5)) == 1
    assert not tell("step", step=2, num_steps=9, loss=1.25)
    clock.now += PROGRESS_LOG_INTERVAL_SEC
    [record] = tell("step", step=3, num_steps=9, loss=1.125)
    assert record.getMessage() == "job 7 (capitals): step 3/9, loss 1.125"


def test_what_it_does_not_know_is_for_developers(tell: Tell) -> None:
    [record] = tell("brandnew", x=1)
    assert record.levelno == logging.DEBUG


def test_rows_are_counted_in_words_without_what_there_is_none_of(tell: Tell) -> None:
    counts = {"num_twice": 48, "num_in_both": 0, "num_silenced": 0, "num_dropped": 2, "num_eval": 0, "num_train": 1384}
    [record] = tell("data", **counts, datasets=[], num_trained_tokens=None)
    assert record.getMessage().endswith("rows: 1,384 to train on, 2 skipped, 48 repeat an earlier row")
