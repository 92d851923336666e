"""Encoded rows from one real job to the next, and what a prune leaves of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import RealInstance

from honed.job.job import Job, State
from honed.job.row_cache import FILES
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts


def rows_of(real: RealInstance, job: Job) -> dict[str, Any]:
    lines = real.layout.job(job.id).attempt(1).events_path.read_text().splitlines()
    return next(dict(each) for each in map(json.loads, lines) if each["event"] == "rows")


def cached(real: RealInstance) -> set[str]:
    return {path.parent.name for path in real.layout.rows_dir.glob("[0-9]*/*/MANIFEST.json")}


def submit(real: RealInstance, name: str, data: Path, **keys: Any) -> Job:
    training = {"max_steps": 4, "per_device_train_batch_size": 2} | keys
    real.drop(
        name,
        name=name,
        base_model=str(real.root / "llama"),
        datasets=[{"path": str(data)}],
        lora={"r": 4},
        training=training,
        predictions={"sample_frequency": "off"},
    )
    return real.wait_state(name, State.SUCCEEDED)


@pytest.mark.timeout(1200)
def test_jobs_of_a_sweep_encode_once_and_a_prune_leaves_nothing(real: RealInstance) -> None:
    build_checkpoint(real.root / "llama", "llama")
    data = write_facts(real.root / "facts.jsonl", 24)
    real.configure("[jobs]\npoll_interval_sec = 0.05\n")
    real.start()
    first = submit(real, "first", data)
    assert rows_of(real, first)["shared"] == []
    wait_for(lambda: cached(real), what="rows in the cache")
    copy = real.root / "copy" / data.name
    copy.parent.mkdir()
    copy.write_bytes(data.read_bytes())
    second = submit(real, "second", copy, learning_rate=1e-3)
    assert rows_of(real, second)["shared"] == list(cached(real))
    assert not real.layout.job(second.id).rows_dir.exists()
    listed = json.loads(real.honectl("prune", "--rows", "--keep", "0", "--dry-run", "--json", check=True).stdout)
    assert [row["key"] for row in listed["rows"]] == list(cached(real))

    real.honectl("prune", "first", check=True)
    assert len(cached(real)) == 1  # the second has used it, too
    real.honectl("prune", "second", check=True)
    wait_for(lambda: not [*real.layout.rows_dir.rglob(FILES[0])], what="no rows")

    third = submit(real, "third", data)
    assert rows_of(real, third)["shared"] == []
    wait_for(lambda: cached(real), what="rows in the cache")
    assert "1 set of encoded rows is being removed" in real.honectl("prune", "--rows", "--keep", "0", check=True).stdout
    wait_for(lambda: not [*real.layout.rows_dir.rglob(FILES[0])], what="no rows")
