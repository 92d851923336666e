"""No user fills the journal; what is left out is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from honed.system.log import about
from honed.system.log_quota import MAX_LINES, PERIOD_SEC, LogQuota

ALICE, EVE = 70_001, 70_002
log = logging.getLogger("honed.test")


class Journal(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Scene:
    now = 100.0

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.quota = LogQuota({1: ALICE, 2: EVE, 3: 0}.get, lambda: self.now, is_timed=False)
        journal.addFilter(self.quota)

    def say(self, num: int, job: int, level: int = logging.WARNING) -> int:
        """Log lines about a job; return how many came through."""
        before = len(self.journal.lines)
        for _ in range(num):
            log.log(level, "job %d: refused", job)
        return len(self.journal.lines) - before


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    caplog.set_level(logging.DEBUG)
    journal = Journal()
    logging.getLogger().addHandler(journal)
    yield Scene(journal)
    logging.getLogger().removeHandler(journal)


def test_the_lines_of_one_user_are_limited_and_what_is_left_out_is_counted(scene: Scene) -> None:
    assert scene.say(MAX_LINES + 70, job=2) == MAX_LINES
    assert scene.say(5, job=1) == 5
    scene.now += PERIOD_SEC
    assert scene.say(1, job=2) == 2
    assert f"user {EVE}: 70 lines" in scene.journal.lines[-2]
    scene.now += PERIOD_SEC
    scene.quota.report()
    assert "left out" not in scene.journal.lines[-1]


def test_errors_and_lines_about_no_user_or_root_are_never_left_out(scene: Scene) -> None:
    scene.say(MAX_LINES + 1, job=2)
    assert scene.say(3, job=2, level=logging.ERROR) == 3
    assert scene.say(MAX_LINES + 1, job=3) == MAX_LINES + 1
    assert scene.say(MAX_LINES + 1, job=99) == MAX_LINES + 1  # nobody knows whose


def test_a_line_about_anothers_job_is_of_the_user_whom_it_names(scene: Scene) -> None:
    for _ in range(MAX_LINES + 9):
        log.warning("job %d: hold refused for user %d", 1, EVE, extra=about(1, uid=EVE))
    assert len(scene.journal.lines) == MAX_LINES
    assert scene.say(4, job=1) == 4
