"""A disk that fills up: older checkpoints are removed first, then the run stops cleanly, and resumes with more
space."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.job.event import EventWriter
from honed.worker.train import checkpoint, disk_reserve
from worker.conftest import MakeJob, WorkerJob, read_events
from worker.test_checkpoints_beside_steps import fail_syncs

TRAINING = {"max_steps": 6, "save_steps": 1, "save_total_limit": 6, "learning_rate": 1e-3}
KEYS: dict[str, Any] = {"dtype": "float32", "predictions": {"sample_frequency": "off"}}


@pytest.fixture
def mount() -> Iterator[Callable[[Path, str], None]]:
    """Mount a small file system at a directory, or enlarge the mounted one."""
    if os.getuid() != 0:
        pytest.skip("a file system of its own takes root")
    places: list[Path] = []

    def make(place: Path, size: str) -> None:
        place.mkdir(exist_ok=True)
        again = "remount," if place in places else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={size}", "honed-test", place]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"nothing can be mounted here: {made.stderr}")
        places.append(place)

    yield make
    for place in set(places):
        subprocess.run(["umount", "-l", place], check=True)


def names(job: WorkerJob) -> set[str]:
    return {path.name for path in (job.dir / "checkpoints").iterdir()}


def test_older_checkpoints_are_given_up_before_the_run_is(make_job: MakeJob, mount: Any) -> None:
    job = make_job(training=TRAINING, **KEYS)
    mount(job.dir / "checkpoints", "24m")  # 16 MiB are left to others
    ended = job.run()
    assert ended.status == 0, ended.result["error"]
    kept = names(job)
    assert "checkpoint-6" in kept
    assert len(kept) < 6
    assert any("removing checkpoint-1: the disk is almost full" in text for text in ended.messages("warning"))
    assert checkpoint.find(job.dir / "checkpoints")[0] is not None


def test_the_best_checkpoint_is_never_given_up(make_job: MakeJob, mount: Any) -> None:
    training = TRAINING | {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
    }
    job = make_job(training=training, eval_split=0.25, **KEYS)
    mount(job.dir / "checkpoints", "24m")
    ended = job.run()
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in ended.of("evaluation") if item["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert ended.status == 0, ended.result["error"]
    assert f"checkpoint-{best}" in names(job)
    assert len(names(job)) < 6


@pytest.mark.parametrize("is_foreseen", [True, False], ids=["before it is written", "could not be written"])
def test_without_room_for_one_the_run_stops_and_goes_on_as_the_same_run(
    make_job: MakeJob, mount: Any, monkeypatch: pytest.MonkeyPatch, is_foreseen: bool
) -> None:
    undisturbed = make_job(training=TRAINING, **KEYS).run()
    job = make_job(training=TRAINING, **KEYS)
    size = disk_reserve.size_of(job.dir.parent / "job1/checkpoints/checkpoint-6")
    if is_foreseen:
        mount(job.dir / "checkpoints", f"{(size * 3 // 2 + disk_reserve.SPARE_BYTES) >> 10}k")
    else:  # another process fills the disk: the check before the write passes, and the write fails
        mount(job.dir / "checkpoints", f"{(size * 3 // 2) >> 10}k")
        monkeypatch.setattr(disk_reserve, "needed_bytes", lambda *_: 0)
    first = job.run()
    assert first.status == 73
    assert first.result["error"]["code"] == "disk_insufficient"
    assert first.result["needed_bytes"] > disk_reserve.free_bytes(job.dir / "checkpoints")
    assert names(job) == {"checkpoint-1"}
    monkeypatch.undo()
    mount(job.dir / "checkpoints", "64m")
    second = job.run(2)
    assert second.status == 0, second.result["error"]
    assert [item["step"] for item in second.of("resumed")] == [1]
    assert second.losses == {step: loss for step, loss in undisturbed.losses.items() if step > 1}


@pytest.mark.parametrize("others", [set(), {"checkpoint-4", "checkpoint-5", "checkpoint-6"}], ids=["one", "all"])
def test_a_disk_that_is_full_when_a_checkpoint_is_synced_costs_an_older_one_and_the_next_step_makes_up_for_it(
    make_job: MakeJob, mount: Any, monkeypatch: pytest.MonkeyPatch, others: set[str]
) -> None:
    """A second one in a row ends the run."""
    monkeypatch.setattr(disk_reserve, "SPARE_BYTES", 4096)
    job = make_job(training=TRAINING, **KEYS)
    mount(job.dir / "checkpoints", "64m")
    fail_syncs(monkeypatch, of={"checkpoint-3", *others}, number=errno.ENOSPC)
    ended = job.run()
    told = ended.messages("warning")
    assert any("a checkpoint could not be written: [Errno 28] No space left" in text for text in told)
    assert any("removing checkpoint-1: the disk is almost full" in text for text in told)
    if others:
        assert ended.status == 73
        assert names(job) == {"checkpoint-2"}
    else:
        assert ended.status == 0, ended.result["error"]
        assert names(job) == {f"checkpoint-{step}" for step in (2, 4, 5, 6)}
        assert [item["step"] for item in ended.of("checkpoint")] == [1, 2, 4, 5, 6]
        assert checkpoint.find(job.dir / "checkpoints")[1] == []


def test_the_word_on_an_attempts_end_has_room_kept_for_it(tmp_path: Path, mount: Any) -> None:
    place = tmp_path / "disk"
    mount(place, "256k")
    reserve = disk_reserve.Reserve(place)
    fill(place / "filler")
    with pytest.raises(OSError, match="No space"):
        (place / "result.json").write_bytes(b"x" * 4096)
    reserve.spend()
    (place / "result.json").write_bytes(b"x" * 4096)


def test_a_disk_without_a_byte_left_for_the_workers_log_ends_it_with_its_result(make_job: MakeJob, mount: Any) -> None:
    job = make_job(training=TRAINING | {"max_steps": 3000, "save_steps": 20}, **KEYS)
    files = {path: path.read_bytes() for path in job.dir.rglob("*") if path.is_file()}
    mount(job.dir, "64m")
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    log_path = job.dir / "attempts/1/worker.log"
    log_path.parent.mkdir(parents=True)
    log_path.write_bytes(b"x" * 2999 + b"\n")  # or the traceback would fit into its first block
    process = job.start()
    job.wait_for(lambda events: any(item.kind == "step" for item in events), process)
    fill(job.dir / "filler")
    ended = job.wait(process)
    assert ended.result["error"]["code"] == "disk_insufficient"
    assert ended.status == 73


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def test_events_that_find_no_room_wait_and_come_in_order(tmp_path: Path, mount: Any) -> None:
    place = tmp_path / "disk"
    mount(place, "256k")
    events = EventWriter(place / "events.jsonl")
    events.emit("step", step=1, note="x" * 3000)
    fill(place / "filler")
    for step in range(2, 50):
        events.emit("step", step=step, note="x" * 300)  # the first of them is cut
    assert [item.data["step"] for item in read_events(place / "events.jsonl")][:1] == [1]
    (place / "filler").unlink()
    events.emit("step", step=50)
    events.close()
    assert [item.data["step"] for item in read_events(place / "events.jsonl")] == list(range(1, 51))


def test_events_that_never_find_room_are_counted_on_stderr(
    tmp_path: Path, mount: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "disk"
    mount(place, "64k")
    events = EventWriter(place / "events.jsonl")
    fill(place / "filler")
    for step in range(3):
        events.emit("step", step=step, note="x" * 5000)
    events.close()
    assert "3 events were not written" in capsys.readouterr().err
