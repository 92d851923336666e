"""Damaged entries: set aside with a reason, and done without."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.job.corrupt import copy_of
from honed.job.damaged import begun_anew
from honed.job.job import Attempt, Job, State
from honed.job.recovery import recover, renewed
from honed.job.spool import Spool
from honed.system import durable
from honed.system.layout import Layout
from honed.system.log import FIELDS
from honed.system.message import ENTRY_DAMAGED

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda _data: b"",
    "zeros": lambda data: bytes(len(data)),
    "noise": lambda data: bytes(byte ^ 0xA5 for byte in data),
    "not an entry": lambda _data: b"[]",
    "nested too deeply": lambda _data: b"[" * 100_000,
    "without a name": lambda data: json.dumps({**json.loads(data), "attempts": 7}).encode(),
    "without its attempts": lambda data: data.replace(b'"attempts"', b'"cttempts"'),
    "another job's": lambda data: json.dumps({**json.loads(data), "id": 99}).encode(),
}


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    recover(made)
    yield made
    made.close()


def add(spool: Spool, number: int, state: State) -> Job:
    files = spool.layout.job(number)
    durable.make_dir(files.dir)
    job = Job(number, f"job {number}", 1.0, "a.json", os.getuid(), str(files.output_dir), state=State.QUEUED)
    durable.finish(spool.adding(job))
    if state is State.QUEUED:
        return job
    if state is State.HELD:
        return spool.move(job, State.HELD)
    job = spool.move(job, State.RUNNING, attempts=(Attempt(1, "transformers", 2.0, device="cpu"),))
    return job if state is State.RUNNING else spool.move(job, state)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_kept_with_its_reason_and_a_running_job_goes_on(
    spool: Spool, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], state: State
) -> None:
    others = [add(spool, number, other) for number, other in enumerate(State, start=1)]
    job = add(spool, 9, state)
    path = spool.entries.path(9, state)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with caplog.at_level(logging.ERROR):
        recover(spool)
    assert [getattr(record, FIELDS)["MESSAGE_ID"] for record in caplog.records] == [ENTRY_DAMAGED]
    assert (spool.corrupt.dir / f"9.{state}.json").read_bytes() == damaged
    reason = (spool.corrupt.dir / f"9.{state}.json.reason").read_text()
    assert spool.corrupt.names() == [f"9.{state}.json"]
    assert [spool.job(other.id) for other in others] == others
    found = spool.job(9)
    if state is State.RUNNING:
        assert found is not None
        assert (found.state, found.attempts, found.uid) == (State.RUNNING, job.attempts, job.uid)
        assert f"rebuilt from {spool.layout.job(9).entry_path}" in reason
    else:
        assert found is None
        assert not path.exists()
        assert f"honectl submit {spool.layout.job(9).dir}/spec.*" in reason
    caplog.clear()
    recover(spool)
    assert caplog.records == []
    assert spool.job(9) == found


def test_a_damaged_copy_beside_a_whole_entry_changes_nothing(spool: Spool) -> None:
    job = add(spool, 1, State.RUNNING)
    spool.entries.path(1, State.QUEUED).write_text("{")
    recover(spool)
    assert spool.job(1) == job
    assert "has another, whole entry, which is in running" in (spool.corrupt.dir / "1.queued.json.reason").read_text()


def test_the_copy_is_of_the_last_start(spool: Spool) -> None:
    job = add(spool, 1, State.RUNNING)
    assert copy_of(spool.files(1)) == job
    job = spool.update(job.with_attempt(num_starts=2))
    assert copy_of(spool.files(1)) == job
    spool.update(job, is_pinned=True)
    assert copy_of(spool.files(1)) == job, "it is written at a start, and not at each change"


def test_a_copy_that_honed_has_not_written_is_not_believed(spool: Spool) -> None:
    add(spool, 1, State.RUNNING)
    files = spool.layout.job(1)
    text = files.entry_path.read_text()
    for wrong in ("{", text.replace('"id": 1', '"id": 2'), json.dumps({**json.loads(text), "attempts": []})):
        files.entry_path.write_text(wrong)
        assert copy_of(spool.files(1)) is None
    files.entry_path.unlink()
    elsewhere = files.dir.parent / "elsewhere"
    elsewhere.write_text(text)
    files.entry_path.symlink_to(elsewhere)
    assert copy_of(spool.files(1)) is None
    if os.geteuid() == 0:
        files.entry_path.unlink()
        files.entry_path.write_text(text)
        os.chown(files.entry_path, 65534, -1)
        assert copy_of(spool.files(1)) is None, "its worker may be another user, and can write there"


def test_an_entry_that_cannot_be_read_is_damaged_too(spool: Spool) -> None:
    """Here a directory in its place; a faulty disk says EIO."""
    job = add(spool, 1, State.RUNNING)
    path = spool.entries.path(1, State.RUNNING)
    path.unlink()
    path.mkdir()
    recover(spool)
    assert spool.corrupt.names() == ["1.running.json"]
    assert "Is a directory" in (spool.corrupt.dir / "1.running.json.reason").read_text()
    found = spool.job(1)
    assert found is not None
    assert found.attempts == job.attempts


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EBADMSG])
@pytest.mark.parametrize("num_failing", [1, 2])
def test_an_entry_is_damaged_if_a_second_read_fails_too(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, num_failing: int, number: int
) -> None:
    job = add(spool, 1, State.RUNNING)
    path, real, failed = spool.entries.path(1, State.RUNNING), os.open, list[Any]()

    def fail(place: Any, *arguments: Any, **keys: Any) -> int:
        if str(place) == str(path) and len(failed) < num_failing:
            failed.append(place)
            raise OSError(number, os.strerror(number), place)
        return real(place, *arguments, **keys)

    monkeypatch.setattr(os, "open", fail)
    recover(spool)
    assert len(failed) == num_failing
    assert spool.corrupt.names() == (["1.running.json"] if num_failing > 1 else [])
    found = spool.job(1)
    assert found is not None
    assert found.attempts == job.attempts


@pytest.mark.parametrize("num_failing", [1, 2])
def test_a_file_of_honeds_own_is_begun_anew_if_a_second_read_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failing: int
) -> None:
    (path := tmp_path / "state").write_text("7")
    real, failed = os.open, list[Any]()

    def fail(place: Any, *arguments: Any, **keys: Any) -> int:
        if str(place) == str(path) and len(failed) < num_failing:
            failed.append(place)
            raise OSError(errno.EIO, os.strerror(errno.EIO), place)
        return real(place, *arguments, **keys)

    monkeypatch.setattr(os, "open", fail)
    assert begun_anew(path, int) == (7 if num_failing == 1 else None)
    assert [found.name for found in tmp_path.iterdir()] == (["state"] if num_failing == 1 else ["state.damaged"])


#: What a machine says while it cannot read: it can in a moment.
OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOLINK)


@pytest.fixture(params=OF_THE_MACHINE, ids=lambda number: errno.errorcode[number])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of files that cannot be opened now."""
    names, real = set[str](), os.open

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if os.fspath(path).rpartition("/")[2] in names:  # type: ignore[call-overload]
            raise OSError(request.param, os.strerror(request.param), path)
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", fail)
    yield names
    names.clear()


@pytest.mark.parametrize("state", [State.QUEUED, State.HELD, State.RUNNING, State.SUCCEEDED])
def test_an_entry_that_the_machine_does_not_return_at_a_start_is_passed_over_by_none(
    spool: Spool, failing: set[str], state: State
) -> None:
    job = add(spool, 1, state)
    failing.add("1.json")
    with pytest.raises(OSError, match=re.escape("1.json")):
        recover(spool)
    failing.clear()
    recover(spool)
    assert spool.job(1) == job
    assert spool.corrupt.names() == []


def test_a_copy_that_the_machine_does_not_return_is_waited_for(spool: Spool, failing: set[str]) -> None:
    job = add(spool, 1, State.RUNNING)
    spool.entries.path(1, State.RUNNING).write_bytes(b"")
    failing.add(job_copy := spool.files(1).entry_path.name)
    with pytest.raises(OSError, match=re.escape(job_copy)):
        recover(spool)
    failing.clear()
    recover(spool)
    found = spool.job(1)
    assert found is not None
    assert found.attempts == job.attempts


def test_a_running_jobs_entry_that_the_machine_does_not_return_is_no_damage(spool: Spool, failing: set[str]) -> None:
    job = add(spool, 7, State.RUNNING)
    failing.add("7.json")
    with pytest.raises(OSError, match=re.escape("7.json")):
        renewed(spool, job)
    failing.clear()
    assert renewed(spool, job) is job
    assert spool.corrupt.names() == []


def test_the_rows_of_a_job_whose_entry_is_damaged_are_kept_until_it_is_removed(spool: Spool) -> None:
    add(spool, 7, State.SUCCEEDED)
    spool.entries.path(7, State.SUCCEEDED).write_text("{")
    recover(spool)
    assert spool.corrupt.numbers() == {7}
    assert "keeps the job's rows" in (spool.corrupt.dir / "7.succeeded.json.reason").read_text()


def test_a_copy_that_cannot_be_kept_keeps_no_job_from_starting(spool: Spool, caplog: pytest.LogCaptureFixture) -> None:
    durable.make_dir(spool.layout.job(1).entry_path)
    with caplog.at_level(logging.WARNING):
        assert add(spool, 1, State.RUNNING).state is State.RUNNING
    assert "no copy of its entry is kept" in caplog.text


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_running_jobs_entry_that_is_damaged_later_is_set_aside_and_written_again(
    spool: Spool, damage: Callable[[bytes], bytes]
) -> None:
    job = add(spool, 7, State.RUNNING)
    assert renewed(spool, job) is job
    path = spool.entries.path(7, State.RUNNING)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    again = renewed(spool, job)
    assert spool.entries.get(7) == again == spool.job(7)
    assert (again.revision, again.attempts) == (job.revision + 1, job.attempts)
    assert (spool.corrupt.dir / "7.running.json").read_bytes() == damaged
    assert "the entry was written again" in (spool.corrupt.dir / "7.running.json.reason").read_text()


def test_a_change_of_a_running_jobs_entry_that_has_failed_half_way_is_no_damage(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add(spool, 7, State.RUNNING)

    def fail(path: Path) -> None:
        if path == spool.state_dir(State.RUNNING):
            raise OSError(5, "the disk fails")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="fails"):
        patch.setattr(durable, "sync_dir", fail)
        spool.move(job, State.SUCCEEDED)
    assert not spool.entries.path(7, State.RUNNING).exists()
    assert renewed(spool, job) is job
    assert spool.corrupt.names() == []
