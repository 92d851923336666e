"""A trial on a few rows: what it says of the whole, and that the job itself knows nothing of it."""

from __future__ import annotations

from typing import Any

from honed import trial
from honed.trial import Findings
from worker.conftest import Ended, MakeJob

LORA = {"r": 8, "lora_alpha": 32}


def findings(ended: Ended) -> Findings:
    assert ended.status == 0, ended.result
    [told] = ended.of("trial")
    return Findings.from_dict(told)


def test_a_trial_learns_its_rows_by_heart_and_tells_of_the_whole(make_job: MakeJob) -> None:
    job = make_job(
        num_rows=40, eval_split=0.1, trial="only", dtype="float32", predictions={"max_new_tokens": 24},
        training={"learning_rate": 1e-2, "num_train_epochs": 3, "max_steps": -1, "per_device_train_batch_size": 4},
    )  # fmt: skip
    ended = job.run()
    found = findings(ended)
    assert found.verdict == "learns", found
    assert found.num_right > found.num_right_before
    assert found.loss_after < found.loss_before / 2
    assert found.whole_steps == 27  # 36 rows in batches of 4, three times
    assert found.data["num_train"] == 36
    assert found.data["trial"]["num_rows"] == trial.NUM_ROWS
    assert found.whole_sec > found.step_sec * 27
    assert found.peak_bytes > 0
    assert any(part["trained"] for part in found.segments)
    assert not job.output_dir.exists()
    assert not ended.of("step")
    said = dict(trial.words(found))
    assert said["Does it learn?"].startswith("It learns them: the loss of 8 rows fell from ")
    assert "36 rows, 4 held out" in said["What is trained on"]


def test_a_job_learns_the_same_after_a_trial_that_warns_of_it(make_job: MakeJob) -> None:
    keys: dict[str, Any] = {
        "lora": LORA | {"lora_dropout": 0.1},
        "training": {"max_steps": 3, "learning_rate": 1e-5},
    }
    tried, plain = make_job(**keys, trial=True).run(), make_job(**keys).run()
    found = findings(tried)
    assert (found.verdict, found.num_steps) == ("does_not_learn", 40)
    assert any("It does not learn them" in text for text in tried.messages("warning"))
    assert tried.losses == plain.losses
    assert tried.of("artifact")


def test_what_ends_the_trial_ends_the_job(make_job: MakeJob) -> None:
    ended = make_job(trial=True, rows=[{"prompt": "a", "completion": ""}] * 4).run()
    assert ended.status == 65
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert not ended.of("step")
