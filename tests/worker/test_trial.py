"""A trial on a few rows: its report on the whole job, and that it leaves no trace in the job itself."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warm
from honed.job import trial
from honed.job.trial import Findings
from worker.conftest import Ended, MakeJob, read_events
from zoo.vision import build_vision_checkpoint, write_pictures

LORA = {"r": 8, "lora_alpha": 32}


def findings(ended: Ended) -> Findings:
    assert ended.status == 0, ended.result
    [told] = ended.of("trial")
    return Findings.from_dict(told)


@pytest.mark.usefixtures("warm_trials")
def test_a_trial_learns_its_rows_by_heart_and_tells_of_the_whole(make_job: MakeJob) -> None:
    job = make_job(
        num_rows=16,
        eval_split=0.25,
        trial="only",
        dtype="float32",
        predictions={"max_new_tokens": 24},
        training={"learning_rate": 1e-2, "num_train_epochs": 3, "max_steps": -1, "per_device_train_batch_size": 4},
    )
    ended = job.run()
    found = findings(ended)
    assert found.verdict == "learns", found
    assert found.num_right > found.num_right_before
    assert found.loss_after < found.loss_before / 2
    assert found.whole_steps == 9  # 12 rows in batches of 4, three times
    assert found.data["num_train"] == 12
    assert found.data["trial"]["num_rows"] == trial.NUM_ROWS
    assert found.whole_sec > found.step_sec * 9
    assert found.peak_bytes > 0
    assert any(part["trained"] for part in found.segments)
    assert not job.output_dir.exists()
    assert not ended.of("step")
    said = dict(trial.words(found))
    assert said["Does it learn?"].startswith("It learns: the loss of 8 rows fell from ")
    assert "12 rows, 4 held out" in said["Training data"]


@pytest.mark.usefixtures("warm_trials")
def test_a_job_learns_the_same_after_a_trial_that_warns_of_it(make_job: MakeJob) -> None:
    keys: dict[str, Any] = {
        "lora": LORA | {"lora_dropout": 0.1},
        "training": {"max_steps": 3, "learning_rate": 1e-5},
        "model": {"template": "words"},
    }
    tried, plain = make_job(**keys, trial=True).run(), make_job(**keys).run()
    found = findings(tried)
    assert (found.verdict, found.num_steps) == ("does_not_learn", 40)
    assert any("It does not learn" in text for text in tried.messages("warning"))
    [warning] = [text for title, text in trial.words(found) if title == "Warning"]
    assert "will not learn to stop" in warning, "and no word of rows held out, which no trial has"
    assert tried.losses == plain.losses
    assert tried.of("artifact")


@pytest.mark.parametrize(("keys", "is_ahead"), [({}, True), ({"quantization": "4bit"}, False)], ids=["lora", "4bit"])
def test_the_job_imports_its_libraries_during_its_trial_if_that_asks_no_device(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict[str, Any], is_ahead: bool
) -> None:
    job = make_job(lora=LORA, trial=True, training={"max_steps": 1}, **keys)
    places = [str(tmp_path / "ended-before-import"), str(job.dir / "trial/findings.json"), str(job.dir)]
    code = f"""if True:
        import os, sys
        told, findings, job_dir = {places!r}
        def hear(event, values):
            if event == "open" and "sft_trainer.cpython" in str(values[0]) and job_dir in sys.orig_argv:
                with open(told, "w") as file:
                    file.write(str(os.path.exists(findings)))
        sys.addaudithook(hear)
    """
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # which WorkerJob.start hands on
    ended = job.wait(job.start(popen=subprocess.Popen))
    assert ended.status == 0, job.log()
    assert (tmp_path / "ended-before-import").read_text() == str(not is_ahead)


@pytest.mark.usefixtures("warm_trials")
def test_what_ends_the_trial_ends_the_job(make_job: MakeJob) -> None:
    ended = make_job(trial=True, rows=[{"prompt": "a", "completion": ""}] * 4).run()
    assert ended.status == 65
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert not ended.of("step")


#: The keys of every job, and of a vision job, one with packing, and one through Unsloth.
PARTS = ["Does it learn?", "Training data", "Duration", "Memory"]


@pytest.mark.usefixtures("warm_trials")
def test_a_job_with_pictures_is_tried(make_job: MakeJob, tmp_path: Path) -> None:
    warm.address("seeing")
    rows = write_pictures(tmp_path / "pictures.jsonl", 12)
    job = make_job(
        model=build_vision_checkpoint(tmp_path / "qwen", "qwen2_5_vl"),
        trial="only",
        eval_split=0.25,
        datasets=[{"path": str(rows)}],
        training={"learning_rate": 1e-2, "num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 4},
    )
    found = findings(job.run())
    assert found.verdict == "learns", found
    assert found.num_asked == trial.NUM_ROWS
    assert found.data["num_media"] == 12, "all are read"
    assert found.whole_steps == 6
    assert [asked for asked, _ in trial.words(found)] == PARTS
    [trained] = [part["text"] for part in found.segments if part["trained"]]
    assert trained.removesuffix("<|im_end|>") in {"red", "green", "blue", "yellow"}


@pytest.mark.usefixtures("warm_trials")
def test_the_steps_of_a_packed_jobs_trial_are_as_full_as_its_own(make_job: MakeJob) -> None:
    keys: dict[str, Any] = {
        "num_rows": 16,
        "dtype": "float32",
        "predictions": {"max_new_tokens": 24},
        "training": {
            "learning_rate": 1e-2,
            "num_train_epochs": 4,
            "max_steps": -1,
            "per_device_train_batch_size": 2,
            "packing": True,
            "max_length": 200,
        },
    }
    job = make_job(trial="only", **keys)
    found = findings(job.run())
    assert found.verdict == "learns", found
    assert found.num_asked == trial.NUM_ROWS, "each row is asked about once, however often it is packed"
    tokens_of_a_step = keys["training"]["per_device_train_batch_size"] * keys["training"]["max_length"]
    assert 0.8 * tokens_of_a_step <= found.data["trial"]["num_tokens"] <= 1.2 * tokens_of_a_step
    assert [asked for asked, _ in trial.words(found)] == PARTS
    whole = make_job(**keys).run()
    assert whole.status == 0, whole.result
    assert found.whole_steps == max(whole.losses)


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth")
@pytest.mark.usefixtures("warm_trials")
def test_a_job_through_unsloth_is_tried_through_unsloth(make_job: MakeJob) -> None:
    warm.address("unsloth")
    job = make_job(
        num_rows=16,
        eval_split=0.25,
        trial="only",
        backend="unsloth",
        dtype="float32",
        lora={"r": 16, "modules_to_save": ["lm_head"]},
        predictions={"max_new_tokens": 24},
        training={"learning_rate": 1e-2, "num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 8},
    )
    found = findings(job.run())
    assert found.verdict == "learns", found
    assert found.num_asked == trial.NUM_ROWS
    assert (found.whole_steps, found.peak_bytes > 0) == (4, True)
    assert [asked for asked, _ in trial.words(found) if asked != "What to do"] == PARTS
    [started] = [item for item in read_events(job.dir / "trial/attempts/1/events.jsonl") if item.kind == "started"]
    assert started.data["backend"] == "unsloth"
