"""Event lines: the daemon reads them as the worker wrote them, and skips noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.job import event
from honed.job.event import EventWriter, read
from honed.system.personpath import PersonPath


def test_what_is_written_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, clock=lambda: 5.0)
    writer.emit("step", step=1, loss=0.5)
    first = read(PersonPath.own(path), 0)
    writer.emit("step", step=2, loss=0.25)
    second = read(PersonPath.own(path), first.offset)
    assert [(item.kind, item.time, item.data) for item in first.events] == [("step", 5.0, {"step": 1, "loss": 0.5})]
    assert [item.data["step"] for item in second.events] == [2]
    assert read(PersonPath.own(path), second.offset).events == []


def test_a_line_without_its_end_waits_and_a_new_writer_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "stage", "time": 1, "stage": "load"}\n{"event": "step", "ti')
    reading = read(PersonPath.own(path), 0)
    assert (len(reading.events), reading.num_bad) == (1, 0)
    EventWriter(path).emit("stage", stage="train")
    reading = read(PersonPath.own(path), reading.offset)
    assert ([item.data["stage"] for item in reading.events], reading.num_bad) == (["train"], 1)


def test_a_loss_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventWriter(path).emit("step", loss=float("nan"), rows=[float("inf"), {"x": float("-inf")}])
    line = json.loads(path.read_text())
    assert (line["loss"], line["rows"]) == (None, [None, {"x": None}])


def test_a_line_longer_than_any_event_is_passed_over_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(b"x" * (2 * event.MAX_READ_BYTES) + b"\n")
    EventWriter(path).emit("stage", stage="load")
    offset, kinds, num_bad = 0, [], 0
    for _ in range(5):
        reading = read(PersonPath.own(path), offset)
        offset, num_bad = reading.offset, num_bad + reading.num_bad
        kinds += [item.kind for item in reading.events]
    assert kinds == ["stage"]
    assert num_bad >= 1


@given(st.binary(max_size=2000))
def test_no_bytes_whatever_raise(tmp_path_factory: object, data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data + b"\n")
        file.flush()
        reading = read(PersonPath.own(Path(file.name)), 0)
        assert reading.offset == len(data) + 1


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_any_text_and_number_comes_through(data: dict[str, object]) -> None:
    import tempfile

    data = {key: value for key, value in data.items() if key not in {"event", "time", "kind"}}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.jsonl"
        EventWriter(path).emit("log", **data)
        (item,) = read(PersonPath.own(path), 0).events
    surrogates_replaced = json.loads(json.dumps(data, ensure_ascii=False).encode(errors="replace"))
    assert item.data == surrogates_replaced


def test_what_no_clock_no_database_and_no_log_can_hold_is_no_event_or_made_fit(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    times = ["NaN", "1e20", "-1", "Infinity", "9" * 400]
    path.write_text("".join(f'{{"event": "log", "time": {when}}}\n' for when in times))
    assert (read(PersonPath.own(path), 0).events, read(PersonPath.own(path), 0).num_bad) == ([], len(times))
    path.write_text('{"event": "l\\ud800g", "time": 1, "message": "\\udfff", "metrics": {"\\ud800": 1}}\n')
    (item,) = read(PersonPath.own(path), 0).events
    assert (item.kind, item.data["message"]) == ("l?g", "?")
    assert list(item.data["metrics"]) == ["?"]
