"""Sweeps from one dropped file to their jobs, once each, and the verbs that name a whole sweep."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from harness import Instance, RealInstance, wait_for

from honed.job.job import Job, State
from zoo.model import build_checkpoint, write_facts

GRID: dict[str, Any] = {"training.learning_rate": [1e-4, 2e-4, 3e-4], "training.seed": [1, 2]}


def jobs_of(instance: Instance, name: str) -> list[Job]:
    found = [job for job in instance.spool.all_jobs().values() if job.group and job.group["name"] == name]
    return sorted(found, key=lambda job: job.id)


def test_a_sweep_becomes_each_of_its_jobs_once_though_honed_is_killed_meanwhile(instance: Instance) -> None:
    instance.configure("[jobs]\nmax_running = 1\n")
    instance.start()
    instance.client.ask("pause")
    instance.drop("grid", sweep=GRID, output_dir=str(instance.root / "out"))
    wait_for(lambda: list((instance.layout.spool_dir / "claimed").glob("*/grid*")) or jobs_of(instance, "grid"))
    instance.kill(signal.SIGKILL)
    instance.start()
    wait_for(lambda: jobs_of(instance, "grid"), what="the first of the jobs")
    instance.kill(signal.SIGKILL)
    instance.start()
    jobs = wait_for(lambda: found if len(found := jobs_of(instance, "grid")) >= 6 else None, what="six jobs")
    wait_for(lambda: not list((instance.layout.spool_dir / "claimed").iterdir()), what="nothing under way")
    assert [job.name for job in jobs_of(instance, "grid")] == [f"grid-{n}" for n in range(1, 7)]
    assert [job.group["values"] for job in jobs if job.group] == [
        {"training.learning_rate": rate, "training.seed": seed} for rate in (1e-4, 2e-4, 3e-4) for seed in (1, 2)
    ]
    assert [job.output_dir for job in jobs] == [str(instance.root / "out" / str(n)) for n in range(1, 7)]
    assert len({job.group["id"] for job in jobs if job.group}) == 1
    assert instance.rejected() == {}
    assert instance.show("grid-4")["spec"]["training"]["seed"] == 2
    assert instance.show("grid-4")["spec"]["group"]["values"] == {"training.learning_rate": 2e-4, "training.seed": 2}

    listed = json.loads(instance.honectl("list", "grid", "--json", check=True).stdout)
    assert {row["group"]["name"] for row in listed} == {"grid"}
    assert len(listed) == 6
    assert "learning_rate 0.0002, seed 2" in instance.honectl("list", check=True).stdout
    held = instance.honectl("hold", "grid", check=True).stdout
    assert held.count("held") == 6
    assert instance.honectl("release", "grid-1", check=True).returncode == 0
    assert instance.honectl("cancel", "grid", check=True).stdout.count("cancelled") == 6
    again = instance.honectl("cancel", "grid")
    assert again.returncode != 0
    assert "none of its 6 jobs is queued or held or running" in again.stderr


def test_a_sweep_with_a_bad_value_or_too_many_jobs_is_refused_whole(instance: Instance) -> None:
    instance.configure("[spool]\nsettle_sec = 0.1\nmax_sweep_jobs = 3\n")
    instance.start()
    instance.drop("many", sweep=GRID)
    instance.drop("bad", sweep={"training.learning_rate": [1e-4, 5.0]})
    instance.drop("unknown", sweep={"training.learning_rat": [1e-4]})
    reasons = wait_for(lambda: found if len(found := instance.rejected()) == 3 else None, what="three reasons")
    assert "6 jobs, but a sweep may have at most 3" in reasons["many.json"]
    assert "training.learning_rate" in reasons["bad.json"]
    assert "(with training.learning_rate: 5)" in reasons["bad.json"]
    assert "training.learning_rat" in reasons["unknown.json"]
    assert not list(instance.spool.all_jobs())
    claimed_dir = instance.layout.spool_dir / "claimed"
    wait_for(lambda: not list(claimed_dir.iterdir()), what="nothing is left of them")


@pytest.mark.timeout(1200)
def test_a_sweep_of_real_jobs_names_the_best_one(real: RealInstance) -> None:
    build_checkpoint(real.root / "llama", "llama")
    data = write_facts(real.root / "facts.jsonl", 24)
    real.start()
    keys = {
        "base_model": str(real.root / "llama"),
        "datasets": [{"path": str(data)}],
        "eval_split": 0.2,
        "lora": {"r": 4},
        "training": {"max_steps": 8, "per_device_train_batch_size": 4},
        "predictions": {"sample_frequency": "off"},
        "sweep": {"training.learning_rate": [1e-6, 2e-2], "lora.r": [2, 8]},
    }
    path = real.root / "rates.json"
    path.write_text(json.dumps(keys))
    sent = real.honectl("submit", "--wait", "--json", str(path), check=True)
    [answer] = json.loads(sent.stdout)
    assert (answer["state"], answer["num_jobs"], len(answer["jobs"])) == ("sweep", 4, 4)
    assert [job.state for job in jobs_of(real, "rates")] == [State.SUCCEEDED] * 4
    found = json.loads(real.honectl("show", "rates", "--json", check=True).stdout)
    losses = {job["id"]: job["eval_loss"] for job in found["jobs"]}
    assert found["best"] == min(losses, key=lambda number: losses[number])
    best = next(job for job in found["jobs"] if job["id"] == found["best"])
    assert best["values"]["training.learning_rate"] == 2e-2
    assert f"has job {found['best']}" in real.honectl("show", "rates", check=True).stdout
