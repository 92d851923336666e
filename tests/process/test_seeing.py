"""The terminal's view of a job that learns: predictions, watch, and a trial by the real worker."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys

import pytest
from harness import DEADLINE_SEC, Instance, RealInstance

from honed.job.job import State
from honed.worker.model import torchvision
from waiting import wait_for
from zoo import plain
from zoo.model import build_checkpoint, write_facts


@pytest.fixture
def reported(instance: Instance) -> Instance:
    """An instance with a job that reported two examples at three steps."""
    instance.drop("report-2")
    assert instance.drain() == 0
    return instance


def test_one_examples_way_through_the_steps_is_held_against_the_truth(reported: Instance) -> None:
    done = reported.honectl("predictions", "1", "--sample", "1")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "#1 Frage 1: wie weit ist es bis Köln?"
    assert [line.split() for line in rest if line.strip()] == [
        ["reference", "weit"],
        ["0", "[-weit-]{+nach", "0", "Schritten+}"],
        ["1", "[-weit-]{+nach", "1", "Schritten+}"],
        ["2", "[-weit-]{+nach", "2", "Schritten+}"],
    ]
    assert "#0" not in done.stdout
    last = reported.honectl("predictions", "1", "--step", "-1").stdout
    assert "nach 2" in last
    assert "nach 1" not in last


def test_predictions_go_to_other_tools_as_json_lines_and_as_csv(reported: Instance) -> None:
    lines = reported.honectl("predictions", "1", "--jsonl").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["step"], row["sample_index"]) for row in rows] == [(s, n) for s in range(3) for n in range(2)]
    table = list(csv.DictReader(io.StringIO(reported.honectl("predictions", "1", "--csv").stdout)))
    assert [row["prediction"] for row in table] == [row["prediction"] for row in rows]
    assert reported.honectl("predictions", "1", "--csv", "--jsonl").returncode == 2


def test_watch_of_one_job_tells_its_steps_memory_and_predictions_in_a_pipe(instance: Instance) -> None:
    instance.drop("report-40-go")
    instance.start()
    instance.wait_state("report-40-go", State.RUNNING)
    with instance.beside("watch", "1") as watch:
        wait_for(
            lambda: any("running" in line and "  memory " in line for line in watch.said.splitlines()),
            what="its memory while it runs",
            account=lambda: watch.said,
        )
        instance.go("report-40-go")
        assert watch.process.wait(DEADLINE_SEC) == 0, watch.said
        assert any("[-weit-]{+nach 40 Schritten+}" in line for line in watch.said.splitlines()), watch.said
        assert "job 1 (report-40-go): succeeded" in watch.said
        assert "step 40/40" in watch.said


def test_a_trial_is_at_the_head_of_the_queue(instance: Instance) -> None:
    instance.drop("slow-100000")  # it blocks the queue until all are submitted
    instance.start()
    instance.wait_state("slow-100000", State.RUNNING)
    instance.drop("succeed", priority=999_999)
    instance.wait_state("succeed", State.QUEUED)
    path = instance.root / "succeed-9.json"
    path.write_text(json.dumps(plain.spec(instance.model, instance.dataset)))
    command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(instance.root), "trial", str(path)]
    asking = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(
            lambda: [row["name"] for row in instance.client.ask("list")][1] == "trial of succeed-9",
            what="the trial before all that waits",
        )
        instance.client.ask("cancel", id="slow-100000")
        instance.wait_state("succeed", State.SUCCEEDED)
    finally:
        asking.kill()
        asking.wait()
    tried, other = instance.job("trial of succeed-9"), instance.job("succeed")
    assert tried is not None
    assert other is not None
    assert other.id < tried.id
    assert tried.attempts[0].started_at < other.attempts[0].started_at


def test_a_trial_goes_before_all_others_and_says_what_the_job_would_be(real: RealInstance) -> None:
    root = real.root
    torchvision.mend()
    build_checkpoint(root / "tiny", "qwen3")
    write_facts(root / "facts.jsonl", 16)
    (root / "facts.yaml").write_text(
        f"base_model: {root / 'tiny'}\ndatasets: [{{path: {root / 'facts.jsonl'}}}]\ndtype: float32\npriority: 5\n"
        f"output_dir: {root / 'out'}\neval_split: 0.25\npredictions: {{max_new_tokens: 24}}\n"
        "training: {num_train_epochs: 2, learning_rate: 1.0e-2, per_device_train_batch_size: 8}\n"
    )
    assert real.honectl("trial", str(root / "facts.yaml")).returncode == 69  # honed is down
    real.start()
    done = real.honectl("trial", str(root / "facts.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "It learns: the loss of 8 rows fell from",
        "12 rows, 4 held out",
        "4 steps of",
        "peak memory of the process, including Python and its libraries",
        "training alone",
        "job 1 (trial of facts)",
        "⟦",
    ):
        assert words in " ".join(done.stdout.split()), done.stdout
    row = next(line for line in real.honectl("list").stdout.splitlines() if "trial of facts" in line)
    assert ("head" in row.split(), "1000000" in row) == (True, False)
    assert json.loads(real.honectl("list", "--json").stdout)[0]["priority"] == 1_000_000
    assert real.spool.job(1).priority == 1_000_000
    assert real.spool.job(1).state is State.SUCCEEDED
    assert not (root / "out").exists()
