"""No file that a worker puts in place of its own misleads honed or blocks it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.job import event
from honed.run.outcome import judge
from honed.run.runner import Exit, read_exit_record
from honed.system import durable, untrusted
from honed.system.layout import Layout


def _link(path: Path) -> None:
    secret = path.parents[3] / "secret"
    secret.write_text('{"event": "step", "time": 1, "start": 1, "outcome": "succeeded"}\n')
    path.symlink_to(secret)


def _linked_directory(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path.name).write_text('{"event": "step", "time": 1, "start": 1, "outcome": "succeeded"}\n')
    path.parent.rmdir()
    path.parent.symlink_to(elsewhere)


def _without_end(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


PLANTED: dict[str, Callable[[Path], None]] = {
    "a link": _link,
    "a directory that is a link": _linked_directory,
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_events_are_read_from_a_plain_file_alone(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    PLANTED[what](attempt.events_path)
    with pytest.raises(OSError, match=str(attempt.events_path)):
        event.read(attempt.events_path, 0)


@pytest.mark.parametrize("what", [*PLANTED, "a file without end"])
def test_a_result_and_an_exit_are_read_from_a_plain_file_alone(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    PLANTED.get(what, _without_end)(attempt.result_path)
    assert judge(attempt.result_path, Exit(0, None)).code == "killed"
    attempt = Layout(tmp_path / "other").job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    PLANTED.get(what, _without_end)(attempt.exit_path)
    assert read_exit_record(attempt, 1) is None


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "attempts/1/result.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert json.loads(untrusted.read_plain(path)) == {}


@pytest.mark.parametrize("what", ["a link", "a pipe"])
def test_what_lies_in_the_way_of_a_file_that_is_written_whole_is_put_away(tmp_path: Path, what: str) -> None:
    """The worker can write to its job's directory: the temporary file of start.json could be anything."""
    path = Layout(tmp_path).job(7).start_path
    path.parent.mkdir(parents=True)
    PLANTED[what](path.with_name(f".{path.name}.tmp"))
    durable.write_json(path, {"number": 1})
    assert json.loads(path.read_bytes()) == {"number": 1}
    assert not path.is_symlink()


def test_a_file_that_somebody_holds_open_beside_it_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    with path.with_name(".start.json.tmp").open("w+") as held:
        durable.write_json(path, {"number": 1})
        held.write("theirs")
        held.flush()
        assert json.loads(path.read_bytes()) == {"number": 1}


@pytest.mark.parametrize("what", ["a link", "a pipe"])
def test_what_is_planted_in_place_of_a_file_is_replaced(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    PLANTED[what](attempt.exit_path)
    (attempt.dir / f".{attempt.exit_path.name}.new").symlink_to(tmp_path / "elsewhere")
    untrusted.write_plain(attempt.exit_path, b'{"start": 2}')
    assert read_exit_record(attempt, 2) == {"start": 2}
    assert list(attempt.dir.iterdir()) == [attempt.exit_path]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("what", ["a directory", "a directory that is a link"])
def test_nothing_is_written_through_a_directory_that_is_planted(tmp_path: Path, what: str) -> None:
    attempt = Layout(tmp_path).job(7).attempt(1)
    attempt.dir.mkdir(parents=True)
    PLANTED.get(what, _linked_directory)(attempt.exit_path)
    with pytest.raises(OSError, match=r"exit\.json"):
        untrusted.write_plain(attempt.exit_path, b'{"start": 2}')
    assert not [path for path in tmp_path.rglob("exit.json") if path.is_file() and b"2" in path.read_bytes()]
