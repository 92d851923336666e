"""requeue with real training: from the last checkpoint, or from the start."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RealInstance

from honed.job.job import State
from honed.system.error import HonedError
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts


class QueryInstance(RealInstance):
    """A real instance whose database can be queried."""

    def drop_long(self) -> None:
        """Drop a job of many steps, each of which logs its loss."""
        base = build_checkpoint(self.root / "llama", "llama")
        rows = write_facts(self.root / "facts.jsonl", 12)
        training = {
            "max_steps": 3000,
            "per_device_train_batch_size": 2,
            "save_steps": 5,
            "eval_strategy": "no",
            "learning_rate": 1e-3,
        }
        spec = {
            "name": "long",
            "base_model": str(base),
            "datasets": [{"path": str(rows)}],
            "lora": {"r": 4},
            "training": training,
            "eval_split": 0.25,
            "predictions": {"num_samples": 2, "max_new_tokens": 2, "sample_frequency": 4},
        }
        path = self.incoming_dir / ".long.json"
        path.write_text(json.dumps(spec))
        path.rename(self.incoming_dir / "long.json")

    def rows(self, sql: str) -> list[Any]:
        with sqlite3.connect(self.layout.database_path) as db:
            return db.execute(sql).fetchall()

    def losses(self, attempt: int) -> dict[int, float]:
        return dict(self.rows(f"SELECT step, value FROM metrics WHERE name = 'loss' AND attempt = {attempt}"))

    def cancel_after(self, attempt: int, num_steps: int) -> None:
        wait_for(lambda: len(self.losses(attempt)) >= num_steps, what=f"{num_steps} steps", deadline_sec=300)
        self.client.ask("cancel", id="long")
        self.wait_state("long", State.CANCELLED)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[QueryInstance]:
    made = QueryInstance(tmp_path)
    yield made
    made.end()


def test_a_cancelled_job_goes_on_where_it_was_or_begins_anew_as_it_is_asked_to(real: QueryInstance) -> None:
    real.start()
    real.drop_long()
    wait_for(lambda: real.job("long") is not None, what="the job")
    wait_for(lambda: real.rows("SELECT * FROM metrics"), what="a step", deadline_sec=300)
    real.cancel_after(1, 12)
    first = real.losses(1)
    real.client.ask("requeue", id="long")
    real.cancel_after(2, 6)
    second = real.losses(2)
    assert min(second) == max(first) + 1  # a cancel writes a checkpoint
    job = real.job("long")
    assert job is not None
    checkpoints_dir = real.layout.job(job.id).checkpoints_dir
    assert max(second) == max(int(path.name.rpartition("-")[2]) for path in checkpoints_dir.iterdir())

    real.client.ask("requeue", id="long", from_start=True)
    real.cancel_after(3, 6)
    third = real.losses(3)
    assert min(third) == 1
    both = first.keys() & third.keys()
    assert len(both) >= 6
    assert {step: third[step] for step in both} == {step: first[step] for step in both}  # the same run, from its start
    assert real.rows("SELECT attempt, kind FROM events WHERE kind IN ('resumed', 'started_over') ORDER BY attempt") == [
        (2, "resumed"),
        (3, "started_over"),
    ]
    # Predictions of the first two attempts at steps beyond the third's are gone.
    predicted = real.rows("SELECT step, count(*), count(DISTINCT sample_index) FROM training_predictions GROUP BY step")
    expected = [(step, 2, 2) for step in range(0, max(third) + 1, 4)]
    # A stop in the evaluation of the last step leaves that step's predictions to the next attempt.
    assert predicted in ([expected, expected[:-1]] if max(third) % 4 == 0 else [expected])


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("chattr") is None, reason="needs root and chattr")
def test_checkpoints_that_cannot_be_taken_away_are_not_gone_on_from_in_silence(real: QueryInstance) -> None:
    real.start()
    real.client.ask("pause")
    real.drop_long()
    job = real.wait_state("long", State.QUEUED)
    real.client.ask("cancel", id="long")
    held = real.layout.job(job.id).checkpoints_dir / "checkpoint-5"
    held.mkdir(parents=True)
    place = real.layout.job(job.id).dir
    if os.system(f"chattr +i {place}") != 0:
        pytest.skip("this file system has no immutable files")
    try:
        with pytest.raises(HonedError, match="not permitted"):
            real.client.ask("requeue", id="long", from_start=True)
        real.wait_state("long", State.CANCELLED)
    finally:
        os.system(f"chattr -i {place}")
    real.client.ask("requeue", id="long", from_start=True)
    real.wait_state("long", State.QUEUED)
    assert not held.exists()
