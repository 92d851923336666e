"""Many runs: lists, refused files beside jobs, new jobs made of old ones, and comparisons."""

from __future__ import annotations

import json

import pytest
from harness import Instance, said_on_terminal

from honed.job.job import State


@pytest.fixture
def runs(instance: Instance) -> Instance:
    """Three jobs that have ended, one of them failed, and one refused file."""
    instance.drop("succeed.low", name="succeed.low", training={"learning_rate": 1e-4})
    instance.drop("succeed.high", name="succeed.high", training={"learning_rate": 2e-4}, priority=5)
    instance.drop("fail", name="fail", retry={"max_attempts": 1})
    instance.drop("odd", colour="red")
    assert instance.drain() == 0
    return instance


def names(instance: Instance, *arguments: str) -> list[str]:
    return instance.honectl("list", "-o", "name", *arguments, check=True).stdout.split()


def test_a_list_is_sorted_filtered_and_has_the_columns_that_were_asked_for(runs: Instance) -> None:
    assert names(runs, "--sort=priority")[-1] == "succeed.high"
    assert names(runs, "--sort=-priority")[0] == "succeed.high"
    assert names(runs, "--filter", "state=failed") == ["fail"]
    assert names(runs, "--filter", "priority>=5", "--filter", "name~SUCCEED") == ["succeed.high"]
    assert names(runs, "--filter", "state!=failed", "--sort", "id", "--limit", "1") == [
        min(names(runs, "--filter", "state=succeeded"), key=lambda name: runs.job(name).id)  # type: ignore[union-attr]
    ]
    head, *rows = runs.honectl("list", "-o", "columns=id,model,data", check=True).stdout.splitlines()
    assert head.split() == ["id", "model", "data"]
    assert all(row.split()[1:] == [runs.model.name, runs.dataset.name] for row in rows)
    (row,) = json.loads(runs.honectl("list", "-o", "json", "succeed.low", check=True).stdout)
    assert (row["model"], row["data"]) == (str(runs.model), [str(runs.dataset)])
    assert row["elapsed_sec"] > 0
    assert "ETA" not in said_on_terminal(runs, 200, "list")
    unknown = runs.honectl("list", "--sort", "scoer")
    assert unknown.returncode == 2
    assert "did you mean score?" in unknown.stderr
    assert "not a comparison" in runs.honectl("list", "--filter", "loss").stderr


def test_a_refused_file_is_listed_and_shown_beside_the_jobs(runs: Instance) -> None:
    assert "1 refused file, the newest odd.json" in runs.honectl("list", check=True).stdout
    listed = runs.honectl("list", "--rejected", check=True).stdout
    assert "odd.json" in listed
    assert "colour" in listed
    for name in ("odd.json", "odd"):
        assert "colour" in runs.honectl("show", name, check=True).stdout
    assert runs.honectl("show", "nothing").returncode == 2


def test_what_show_says_first_is_how_the_job_ended_and_why(runs: Instance) -> None:
    lines = runs.honectl("show", "fail", check=True).stdout.splitlines()
    assert lines[0].endswith("(fail): failed")
    assert lines[1].startswith("killed: the worker exited")
    facts = [line.split()[0] for line in lines if line.strip()]
    assert facts.index("model") < facts.index("data") < facts.index("duration") < facts.index("output_dir")


def test_a_rerun_is_a_new_job_of_the_same_file_with_the_changes(runs: Instance) -> None:
    runs.start()
    old = runs.job("succeed.low")
    assert old is not None
    refused = runs.honectl("requeue", str(old.id))
    assert refused.returncode == 2
    assert f"honectl rerun {old.id}" in refused.stderr
    done = runs.honectl("rerun", "succeed.low", "--set", "training.learning_rate=3e-4", "--set", "lora={r: 2}")
    assert done.returncode == 0, done.stderr
    new = runs.wait_state("succeed.low-2", State.SUCCEEDED)
    assert str(runs.layout.job(new.id).spec_path) in done.stdout
    spec = json.loads(runs.honectl("show", "--json", str(new.id), check=True).stdout)["spec"]
    assert (spec["training"]["learning_rate"], spec["lora"]["r"]) == (3e-4, 2)
    assert runs.job("succeed.low") == old
    assert "succeed.low-3" in runs.honectl("rerun", str(new.id), check=True).stdout
    for setting, said in (("training.learning_rat=1", "learning_rate"), ("nothing", "KEY=VALUE"), ("lora.r=-1", "r")):
        wrong = runs.honectl("rerun", "succeed.low", "--set", setting)
        assert wrong.returncode in (1, 2)
        assert said in wrong.stderr
    assert runs.job("succeed.low-4") is None
