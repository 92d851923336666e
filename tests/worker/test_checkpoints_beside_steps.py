"""Runs whose checkpoints are made whole beside their steps: on time, late, in vain, and when the run is stopped."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from honed.system import durable
from honed.worker.stop import Stop
from honed.worker.train import checkpoint, disk_reserve
from honed.worker.train.checkpoint import Progress
from honed.worker.train.divergence import Divergence
from honed.worker.train.trainer import WatchedTrainer
from waiting import wait_for
from worker.conftest import Ended, MakeJob, WorkerJob, read_events

DEADLINE_SEC = 120.0
KEYS: dict[str, Any] = {
    "dtype": "float32",
    "predictions": {"sample_frequency": "off"},
    "training": {"max_steps": 6, "save_steps": 2, "save_total_limit": 6, "learning_rate": 1e-3},
}


def names(job: WorkerJob) -> set[str]:
    return {path.name for path in (job.dir / "checkpoints").iterdir()}


def order(ended: Ended) -> list[tuple[str, int]]:
    return [(item.kind, item.data["step"]) for item in ended.events if item.kind in {"step", "checkpoint"}]


def hold_back(monkeypatch: pytest.MonkeyPatch, job: WorkerJob, *, number: int, until_step: int) -> None:
    """Let a checkpoint be sealed only once a step after it is reported."""
    seal = checkpoint.seal

    def late(path: Path, *args: Any, **kwargs: Any) -> None:
        def is_reported() -> bool:
            events = read_events(job.events_path(1))
            return any(item.kind == "step" and item.data["step"] == until_step for item in events)

        if path.name == f"checkpoint-{number}":
            wait_for(is_reported, what="a step while a checkpoint is sealed")
        seal(path, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "seal", late)


def fail_syncs(monkeypatch: pytest.MonkeyPatch, *, of: set[str], number: int) -> list[Path]:
    """Have the syncs of these checkpoints' files fail; return the files for which they have."""
    sync: Callable[[Path], None] = durable.sync_file
    failed: list[Path] = []

    def failing(path: Path) -> None:
        if path.parent.name in of:
            failed.append(path)
            raise OSError(number, os.strerror(number), str(path))
        sync(path)

    monkeypatch.setattr(durable, "sync_file", failing)
    return failed


def fail_once(monkeypatch: pytest.MonkeyPatch, *, of: str) -> None:
    """Have the disk full at the first sync of this checkpoint's files."""
    sync: Callable[[Path], None] = durable.sync_file
    failed: list[Path] = []

    def failing(path: Path) -> None:
        if path.parent.name == of and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        sync(path)

    monkeypatch.setattr(durable, "sync_file", failing)


def test_steps_go_on_while_a_checkpoint_is_sealed_and_it_is_reported_once_it_is_in_place(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make_job(**KEYS).run()
    job = make_job(**KEYS)
    hold_back(monkeypatch, job, number=2, until_step=3)
    ended = job.run()
    assert ended.status == 0, ended.result["error"]
    assert ended.losses == undisturbed.losses
    found = order(ended)
    assert found.index(("checkpoint", 2)) > found.index(("step", 3))
    assert [step for kind, step in found if kind == "checkpoint"] == [2, 4, 6]
    assert names(job) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not checkpoint.find(job.dir / "checkpoints")[1]


def test_a_checkpoint_holds_the_state_of_its_step_though_it_is_sealed_later(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = make_job(**KEYS).run()
    job = make_job(**KEYS)
    hold_back(monkeypatch, job, number=2, until_step=3)
    job.stopped_at(3)
    assert names(job) == {"checkpoint-2", "checkpoint-3"}, "the stop waits for both"
    for name in ("checkpoint-3", "checkpoint-2"):
        found, _ = checkpoint.find(job.dir / "checkpoints")
        assert found is not None
        assert found.path.name == name
        assert len(found.progress.divergence["steps"]) == found.step
        if name == "checkpoint-3":
            (found.path / checkpoint.MANIFEST).unlink()
    ended = job.run(2)
    assert ended.status == 0, ended.result["error"]
    assert ended.losses == {step: loss for step, loss in undisturbed.losses.items() if step > 2}


def test_a_stop_gives_up_an_earlier_checkpoint_where_its_time_suffices_for_the_last_step_s_alone(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seal = make_job(**KEYS), checkpoint.seal

    def slow(path: Path, progress: Progress, *, beat: Callable[[], None]) -> None:
        deadline = time.monotonic() + DEADLINE_SEC
        while path.name == "checkpoint-4":
            assert time.monotonic() < deadline
            beat()  # a piece is hashed
            time.sleep(0.01)
        seal(path, progress, beat=beat)

    monkeypatch.setattr(checkpoint, "seal", slow)
    monkeypatch.setattr(Stop, "left_sec", property(lambda self: 6.0 if self.is_set else None))
    job.stopped_at(5)
    assert names(job) == {"checkpoint-2", "checkpoint-5"}


def test_a_checkpoint_that_cannot_be_synced_ends_the_run_with_the_error_and_is_not_there(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**(KEYS | {"training": KEYS["training"] | {"max_steps": 80, "save_steps": 40}}))
    fail_syncs(monkeypatch, of={"checkpoint-40"}, number=errno.EIO)
    ended = job.run()
    assert ended.status != 0
    assert "Input/output error" in ended.result["error"]["message"]
    assert ended.of("checkpoint") == []
    assert names(job) == set()
    assert 40 < ended.result["step"] < 80, "it ends the run at a boundary soon after, not when the next one is due"


def test_one_that_finds_no_room_while_it_is_sealed_ends_the_run_for_lack_of_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**KEYS)
    fail_syncs(monkeypatch, of={f"checkpoint-{step}" for step in range(3, 7)}, number=errno.ENOSPC)
    ended = job.run()
    assert ended.status == 73
    assert ended.result["error"]["code"] == "disk_insufficient"
    assert names(job) == {"checkpoint-2"}


def test_a_run_that_another_error_ends_keeps_the_checkpoint_that_is_being_sealed(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from honed.worker.train.callback import RunCallback

    job = make_job(**KEYS)
    hold_back(monkeypatch, job, number=2, until_step=3)
    on_log = RunCallback.on_log

    def failing(self: Any, args: Any, state: Any, *others: Any, **more: Any) -> None:
        on_log(self, args, state, *others, **more)
        if state.global_step == 3:
            raise RuntimeError("the run fails here")

    monkeypatch.setattr(RunCallback, "on_log", failing)
    ended = job.run()
    assert ended.status not in {0, 73}
    assert [item["step"] for item in ended.of("checkpoint")] == [2]
    assert checkpoint.find(job.dir / "checkpoints")[0] is not None


def test_a_run_that_may_be_lost_saves_nothing_in_the_stead_of_one_that_found_no_room(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(**KEYS)
    hold_back(monkeypatch, job, number=2, until_step=3)
    fail_syncs(monkeypatch, of={"checkpoint-2"}, number=errno.ENOSPC)
    monkeypatch.setattr(disk_reserve, "SPARE_BYTES", -(2**60))  # removing older ones has made room
    monkeypatch.setattr(Divergence, "is_suspicious", property(lambda self: self._good_step >= 3))
    ended = job.run()
    assert any("No space left" in text for text in ended.messages("warning"))
    assert ended.of("checkpoint") == []
    assert names(job) == set()


def of_best(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> WorkerJob:
    """Return a job that ends with its best checkpoint; `losses`: those of its evaluations."""
    evaluate = WatchedTrainer._evaluate

    def told(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        return evaluate(self, *args, **kwargs) | {"eval_loss": losses.get(self.state.global_step, 9.0)}

    monkeypatch.setattr(WatchedTrainer, "_evaluate", told)
    training = {"max_steps": 8, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "learning_rate": 1e-3}
    training |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 1}
    return make_job(**KEYS | {"eval_split": 0.25, "training": training})


@pytest.mark.parametrize("is_suspicious", [False, True])
def test_the_best_checkpoint_is_written_again_if_it_finds_no_room(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, is_suspicious: bool
) -> None:
    """Another step's weights in its stead would be the output, and the earlier best would be removed for them."""
    monkeypatch.setattr(disk_reserve, "SPARE_BYTES", -(2**60))
    if is_suspicious:  # when the best one finds no room
        monkeypatch.setattr(Divergence, "is_suspicious", property(lambda self: self._good_step == 4))
    job = of_best(make_job, monkeypatch, {2: 2.0, 4: 1.0, 6: 3.0, 8: 4.0})
    fail_once(monkeypatch, of="checkpoint-4")
    ended = job.run()
    assert ended.status == 0, ended.result["error"]
    later = [5, 6, 8] if is_suspicious else [6, 8]  # the one that was due is made up for
    assert [each["step"] for each in ended.of("checkpoint")] == [2, 4, *later]
    assert names(job) == {"checkpoint-4", "checkpoint-8"}
    assert not ended.messages("error")
    best, output = (
        load_file(place / "model.safetensors") for place in (job.dir / "checkpoints/checkpoint-4", job.dir / "output")
    )
    assert all(torch.equal(output[name], best[name]) for name in output)


def test_a_best_checkpoint_that_finds_no_room_costs_neither_the_earlier_best_nor_the_newest(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = of_best(make_job, monkeypatch, {2: 2.0, 4: 3.0, 6: 1.0})
    failed = fail_syncs(monkeypatch, of={"checkpoint-6"}, number=errno.ENOSPC)
    free_bytes = disk_reserve.free_bytes
    monkeypatch.setattr(disk_reserve, "free_bytes", lambda path: 0 if failed else free_bytes(path))
    ended = job.run()
    assert ended.status == 73
    assert ended.result["error"]["code"] == "disk_insufficient"
    assert names(job) == {"checkpoint-2", "checkpoint-4"}
