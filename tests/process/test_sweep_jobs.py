"""Sweeps from one dropped file to their jobs, once each, and the verbs that name a whole sweep."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import browser
import pytest
from harness import Instance, RealInstance
from test_web import serving

from honed.job.job import Job, State
from waiting import wait_for
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
    claimed_dir = instance.layout.spool_dir / "claimed"
    wait_for(lambda: list(claimed_dir.glob("*/grid*")) or jobs_of(instance, "grid"), what="claimed")
    instance.kill(signal.SIGKILL)
    instance.start()
    wait_for(lambda: jobs_of(instance, "grid"), what="the first of the jobs")
    instance.kill(signal.SIGKILL)
    instance.start()
    jobs = wait_for(lambda: found if len(found := jobs_of(instance, "grid")) >= 6 else None, what="six jobs")
    wait_for(lambda: not list(claimed_dir.iterdir()), what="nothing under way")
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


@pytest.fixture
def trained(real: RealInstance) -> RealInstance:
    """An instance that trains tiny models, whose pages everybody may read."""
    build_checkpoint(real.root / "llama", "llama")
    write_facts(real.root / "facts.jsonl", 24)
    real.configure("[policy]\nshare_results = true\n[jobs]\npoll_interval_sec = 0.05\n")
    real.start()
    return real


def submitted(real: RealInstance, name: str, sweep: dict[str, Any], **training: Any) -> dict[str, Any]:
    """Submit a sweep, wait until its jobs have ended, and return the answer to `show`."""
    keys = {
        "base_model": str(real.root / "llama"),
        "datasets": [{"path": str(real.root / "facts.jsonl")}],
        "eval_split": 0.2,
        "lora": {"r": 4},
        "training": {"per_device_train_batch_size": 4, **training},
        "predictions": {"num_samples": 2, "max_new_tokens": 8},
        "sweep": sweep,
    }
    path = real.root / f"{name}.json"
    path.write_text(json.dumps(keys))
    sent = real.honectl("submit", "--wait", "--json", str(path))
    assert sent.returncode == 0, sent.stdout + sent.stderr
    [answer] = json.loads(sent.stdout)
    found: dict[str, Any] = json.loads(real.honectl("show", name, "--json", check=True).stdout)
    assert (answer["state"], answer["num_jobs"], answer["jobs"]) == (
        "sweep",
        len(found["jobs"]),
        [job["id"] for job in found["jobs"]],
    )
    return found


@pytest.mark.timeout(1800)
def test_a_sweep_of_twelve_real_jobs_has_one_page_that_names_the_best(trained: RealInstance, tmp_path: Path) -> None:
    sweep = {"training.learning_rate": [1e-6, 1e-3, 2e-2], "lora.r": [2, 8], "training.seed": [1, 2]}
    found = submitted(trained, "rates", sweep, max_steps=8)
    jobs = jobs_of(trained, "rates")
    assert [job.state for job in jobs] == [State.SUCCEEDED] * 12
    # The loss that each worker itself has measured at its end.
    results = {job.id: trained.layout.job(job.id).attempt(1).result_path for job in jobs}
    losses = {number: json.loads(path.read_bytes())["metrics"]["eval_loss"] for number, path in results.items()}
    best = min(losses, key=lambda number: losses[number])
    assert {job["id"]: job["eval_loss"] for job in found["jobs"]} == losses
    assert len(set(losses.values())) > 6
    assert found["best"] == best
    [job] = [job for job in jobs if job.id == best]
    assert job.group is not None
    assert job.group["values"]["training.learning_rate"] == 2e-2
    assert f"has job {best}" in trained.honectl("show", "rates", check=True).stdout

    if browser.CHROMIUM is None:
        pytest.skip("no Chromium here")
    with serving(trained) as web, browser.opened(tmp_path) as chromium:
        chromium.expected = (f"{web.address}/", "data:")
        for width in (1280, 390):
            seen = chromium.visit(f"{web.address}/compare?sweep=rates", width=width)
            assert seen["complaints"] == []
            assert seen["scrolls"] <= seen["width"]
            assert "12 jobs compared" in seen["text"]
            mark = "ABCDEFGHIJKL"[[each.id for each in jobs].index(best)]
            assert " ".join(chromium.value("document.querySelector('p.outcome').innerText").split()) == (
                f"Lowest evaluation loss: {mark} {job.name}"
            )
            assert chromium.value("document.querySelector('p.outcome a').pathname") == f"/jobs/{best}"
            assert {"lora.r", "training.learning_rate", "training.seed"} <= set(seen["text"].split())


@pytest.mark.timeout(1200)
def test_a_real_job_that_a_rung_ends_stops_at_a_step_and_goes_on_from_there(trained: RealInstance) -> None:
    often = {"eval_steps": 5, "logging_steps": 1}
    short, endless = ({"max_steps": 20, "learning_rate": 2e-2}, {"max_steps": 10**6, "learning_rate": 1e-7})
    sweep = {"training": [short | often, endless | often], "halving": {"min_steps": 10}}
    found = submitted(trained, "halved", sweep)
    good, hopeless = jobs_of(trained, "halved")
    assert (good.state, hopeless.state, hopeless.outcome) == (State.SUCCEEDED, State.CANCELLED, "stopped_early")
    assert found["best"] == good.id
    [early] = [job["stopped_early"] for job in found["jobs"] if job["stopped_early"]]
    assert (early["rung"], early["step"]) == (1, 10)
    assert early["eval_loss"] > found["jobs"][0]["eval_loss"]
    step = hopeless.attempt.step
    assert step >= 10
    assert (trained.layout.job(hopeless.id).checkpoints_dir / f"checkpoint-{step}").is_dir()
    trained.honectl("requeue", str(hopeless.id), check=True)
    wait_for(lambda: (trained.show(str(hopeless.id))["progress"]["step"] or 0) > step + 20, what="more steps")
    trained.honectl("cancel", str(hopeless.id), check=True)
    ended = trained.wait_state("halved-2", State.CANCELLED)
    assert (ended.outcome, ended.attempt.is_resumed, ended.was_stopped_early) == ("cancelled", True, False)
