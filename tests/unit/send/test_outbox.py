"""The outbox: whatever is truncated, garbled or full, complete rows are read once and in order."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.job.event import Event, Reading
from honed.job.job import Job
from honed.send import outbox
from honed.send.outbox import Outbox, Position
from zoo.jobs import JOB


def reading(step: int, num_bytes: int = 1) -> Reading:
    answer = {"sample_index": 0, "prediction": "x" * num_bytes}
    return Reading([Event("predictions", float(step), {"step": step, "rows": [answer]})], 0, 0)


def read_all(path: Path, *, max_rows: int = 3, max_bytes: int = 1 << 20) -> list[int]:
    """Return the steps of all rows, as read by a sender that is restarted for each batch."""
    found: list[int] = []
    while True:
        position = outbox.read_cursor(path)
        rows, after, _ = outbox.read(path, position, max_rows=max_rows, max_bytes=max_bytes)
        if after == position:
            return found
        found += [row.data["step"] for row in rows]
        outbox.write_cursor(path, after)


def test_rows_come_out_in_order_whatever_the_files_and_daemons_they_went_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SEGMENT_BYTES", 600)
    found, pick = [], random.Random(1)
    box = Outbox(tmp_path, max_bytes=1 << 20)
    for step in range(60):
        assert box.put(JOB, reading(step)) == 0
        if pick.random() < 0.2:
            box = Outbox(tmp_path, max_bytes=1 << 20)
        if pick.random() < 0.3:
            found += read_all(tmp_path)
    found += read_all(tmp_path)
    assert found == list(range(60))
    box.put(JOB, reading(60))
    assert len(outbox.segments(tmp_path)) <= 2  # what is delivered is removed


def test_a_number_is_never_used_again_though_all_files_are_gone(tmp_path: Path) -> None:
    for step in range(3):
        assert Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(step)) == 0
    assert read_all(tmp_path) == [0, 1, 2]
    for path in outbox.segments(tmp_path).values():
        path.unlink()
    Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(3))
    assert read_all(tmp_path) == [3]


@settings(max_examples=60)
@given(
    cut=st.integers(1, 400), junk=st.sampled_from([b"", b"\0" * 50, b"\n\n{}\n[1]\nnull\n", b"\xff\xfe\n", b'{"a": '])
)
def test_half_a_line_of_a_daemon_that_died_costs_that_line_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    path = tmp_path_factory.mktemp("outbox")
    Outbox(path, max_bytes=1 << 20).put(JOB, reading(0))
    (first,) = outbox.segments(path).values()
    whole = first.read_bytes()
    first.write_bytes(whole + whole[: min(cut, len(whole) - 2)] + junk)
    assert [step for step in read_all(path) if step != 0] == []
    Outbox(path, max_bytes=1 << 20).put(JOB, reading(1))
    assert read_all(path)[-1] == 1


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(0))
    (path,) = outbox.segments(tmp_path).values()
    line = path.read_bytes().replace(b'"step":0', b'"step":1')
    with path.open("ab", buffering=0) as file:
        file.write(line[:50])
        assert read_all(tmp_path) == [0]
        file.write(line[50:])
    assert read_all(tmp_path) == [1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_cursor_that_the_machine_does_not_return_is_not_one_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Else the next file would have a number before the cursor: nobody would send its rows."""
    box = Outbox(tmp_path, max_bytes=1 << 20)
    box.put(JOB, reading(1))
    outbox.write_cursor(tmp_path, Position(40, 0))
    (tmp_path / "1.jsonl").unlink()
    real = os.open

    def fail(path: Path, *arguments: Any, **keys: Any) -> int:
        if Path(path).name == "cursor.json":
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        assert Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(2)) == 1, "counted as lost, and logged"
    assert Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(3)) == 0
    assert read_all(tmp_path) == [3]


def test_a_batch_keeps_its_limits_and_a_large_row_goes_alone(tmp_path: Path) -> None:
    box = Outbox(tmp_path, max_bytes=1 << 20)
    for step, size in enumerate([1, 1, 5000, 1, 1, 1]):
        box.put(JOB, reading(step, size))
    sizes, position = [], Position(0, 0)
    while True:
        rows, after, _ = outbox.read(tmp_path, position, max_rows=2, max_bytes=1000)
        if after == position:
            break
        sizes.append(len(rows))
        position = after
    assert [size for size in sizes if size] == [2, 1, 2, 1]


def test_what_has_no_room_is_counted_and_room_is_made_by_delivery(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Outbox(tmp_path, max_bytes=1000)
    lost = [box.put(JOB, reading(step)) for step in range(10)]
    for number in lost:
        box.lose(number)
    assert 0 < sum(lost) == outbox.num_lost(tmp_path)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert read_all(tmp_path) == [step for step, number in enumerate(lost) if not number]
    assert box.put(JOB, reading(10)) == 0
    assert "there is space again" in caplog.text


def test_a_disk_that_takes_half_a_row_leaves_no_half_row(tmp_path: Path) -> None:
    box = Outbox(tmp_path, max_bytes=1 << 20)
    box.put(JOB, reading(0))
    (path,) = outbox.segments(tmp_path).values()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        assert box.put(JOB, reading(1)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert box.put(JOB, reading(2)) == 0
    assert read_all(tmp_path) == [0, 2]


def test_a_row_has_the_same_key_for_ever_and_no_other_has_it() -> None:
    events = [
        Event("step", 1.0, {"step": 1, "loss": 0.5, "learning_rate": 0.1}),
        Event("evaluation", 1.0, {"step": 1, "metrics": {"loss": 0.5}}),
        Event("evaluation", 2.0, {"step": 1, "metrics": {"loss": 0.5}}),
        Event("predictions", 1.0, {"step": 1, "rows": [{"sample_index": 0}, {"sample_index": 1}, "junk"]}),
        Event("log", 1.0, {"message": "hello"}),
    ]
    keys = [row["idempotency_key"] for event in events for row in outbox.rows(JOB, event, {})]
    assert len(set(keys)) == len(keys) == 6
    assert keys[0] == outbox.rows(JOB, events[0], {"JOB_ID": "other"})[0]["idempotency_key"]
    again = Job.from_json(JOB.to_json(), JOB.state)
    assert keys == [row["idempotency_key"] for event in events for row in outbox.rows(again, event, {})]


def test_a_garbled_cursor_begins_again_rather_than_losing_rows(tmp_path: Path) -> None:
    Outbox(tmp_path, max_bytes=1 << 20).put(JOB, reading(0))
    assert read_all(tmp_path) == [0]
    for garbage in ("", "[]", '{"segment": -1, "offset": "x"}', json.dumps({"segment": None})):
        (outbox.sender_dir(tmp_path) / "cursor.json").write_text(garbage)
        assert read_all(tmp_path) == [0]
