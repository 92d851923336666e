"""Deadlines of fetches, as the daemon keeps them: what did not pass for a fetch does not count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from honed.run.fetcher import DEADLINE_GRACE_SEC, FIRST_DELAY_SEC, MAX_DEATHS, Fetcher
from honed.run.snapshot import Missing
from honed.spec.config import Config
from honed.system import durable
from honed.system.layout import Layout

NUMBER = 7


class Runner:
    """Fetches that only say that they run."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.killed: list[int] = []

    def start(self, number: int) -> None:
        self.running.add(number)

    def is_running(self, number: int) -> bool:
        return number in self.running

    def stop(self, number: int, *, at_once: bool = False) -> None:
        assert at_once
        self.killed.append(number)

    def close(self) -> None:
        """Nothing runs."""


class Fetching:
    """A fetcher with one fetch that runs, whose deadline is over after `timeout_sec`."""

    def __init__(self, root: Path, timeout_sec: float) -> None:
        self.now, self.runner, self.files = 1000.0, Runner(), Layout(root).fetch(NUMBER)
        config = Config.model_validate({"hub": {"fetch_timeout_sec": timeout_sec}})
        self.fetcher = Fetcher(Layout(root), config, self.runner, clock=lambda: self.now)
        self.fetcher.want(NUMBER, Missing("org/tiny", "main"))
        self.fetcher.poll()
        assert self.runner.running == {NUMBER}

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.fetcher.poll()

    def say(self, paused_sec: float) -> None:
        durable.write_json(self.files.progress_path, {"bytes": 1, "of": 2, "paused_sec": paused_sec})

    def deadline(self) -> float:
        said: float = json.loads(self.files.request_path.read_bytes())["deadline"]
        return said


@pytest.fixture
def over(tmp_path: Path) -> Fetching:
    """One whose deadline is over."""
    return Fetching(tmp_path, 1e-9)


def test_a_fetch_that_goes_on_after_its_deadline_is_killed(over: Fetching) -> None:
    over.pass_by(0.0)
    over.pass_by(DEADLINE_GRACE_SEC)
    assert over.runner.killed == []
    over.pass_by(1.0)
    assert over.runner.killed == [NUMBER]


def test_a_fetch_has_its_whole_patience_after_a_pause_of_both(over: Fetching) -> None:
    over.pass_by(0.0)  # honed's clock stood still meanwhile, and the process has not said yet that it was paused
    over.say(paused_sec=600.0)
    over.pass_by(DEADLINE_GRACE_SEC)
    over.pass_by(DEADLINE_GRACE_SEC)
    assert over.runner.killed == []


def test_the_pauses_of_a_process_that_died_are_kept(tmp_path: Path) -> None:
    fetching = Fetching(tmp_path, 3600.0)
    before = fetching.deadline()
    fetching.say(paused_sec=600.0)
    fetching.runner.running.clear()
    fetching.pass_by(1.0)
    assert fetching.deadline() == before + 600.0
    fetching.pass_by(2 * FIRST_DELAY_SEC)
    assert fetching.runner.running == {NUMBER}
    fetching.runner.running.clear()
    fetching.pass_by(1.0)
    assert fetching.deadline() == before + 600.0, "it was counted again"


def test_a_death_that_the_disk_does_not_take_is_one(tmp_path: Path) -> None:
    """It was counted with each pass of the loop, and the job failed after five."""
    fetching = Fetching(tmp_path, 3600.0)
    fetching.say(paused_sec=600.0)
    fetching.runner.running.clear()
    kept = fetching.files.request_path.rename(tmp_path / "kept")
    fetching.files.request_path.mkdir()  # as a full disk, nothing can be written there
    for _ in range(MAX_DEATHS):
        with pytest.raises(OSError, match="directory"):
            fetching.pass_by(1.0)
    fetching.files.request_path.rmdir()
    kept.rename(fetching.files.request_path)
    assert fetching.fetcher.poll() == []
    fetching.pass_by(2 * FIRST_DELAY_SEC)
    assert fetching.runner.running == {NUMBER}
