"""Evaluation: the baseline, scores, the guard, and the report on a model that got worse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.job.database import figures
from honed.worker.train import budget
from worker.conftest import Ended, MakeJob, WorkerJob

LORA = {"r": 8, "lora_dropout": 0.2}
EVERY_2 = {"eval_strategy": "steps", "eval_steps": 2}


def evaluations(ended: Ended) -> list[int]:
    return [item["step"] for item in ended.of("evaluation")]


def scores(ended: Ended, name: str) -> dict[int, float]:
    return {item["step"]: item["scores"][name] for item in ended.of("predictions")}


def made_worse(make_job: MakeJob, learned: Path, **keys: Any) -> WorkerJob:
    training = {"max_steps": 8, "learning_rate": 0.3} | keys.pop("training", {})
    return make_job(model=learned, num_rows=4, dtype="float32", eval_split=0.5, training=training, **keys)


def test_the_baseline_and_the_last_step_are_evaluated_and_scored(make_job: MakeJob) -> None:
    ended = make_job(lora=LORA, eval_split=0.3, training={"max_steps": 5} | EVERY_2).run()
    assert ended.status == 0, ended.result
    assert evaluations(ended) == [0, 2, 4, 5]
    assert list(scores(ended, "exact_match")) == [0, 2, 4, 5]
    for item in ended.of("predictions"):
        assert set(item["scores"]) == {"exact_match", "exact_match_parsable", "token_f1", "token_f1_parsable"}
    kinds = [item.kind for item in ended.events]
    assert kinds.index("evaluation") < kinds.index("step")
    assert ended.metrics["predictions/exact_match"] == scores(ended, "exact_match")[5]
    assert ended.metrics["eval_loss"] == ended.of("evaluation")[-1]["metrics"]["eval_loss"]


def test_a_job_that_wants_no_evaluation_has_none(make_job: MakeJob) -> None:
    ended = make_job(lora=LORA, eval_split=0.3, training={"max_steps": 2, "eval_strategy": "no"}).run()
    assert (ended.status, evaluations(ended)) == (0, [])
    assert list(scores(ended, "exact_match")) == [0, 2]


def test_scores_are_figures_of_the_metrics_table(make_job: MakeJob) -> None:
    ended = make_job(lora=LORA, eval_split=0.3, training={"max_steps": 2}, guard={"metric": "token_f1"}).run()
    told = [figures(item) for item in ended.events if item.kind in ("predictions", "guard")]
    assert [sorted(found)[0].split("/") for found in told] == [
        ["predictions", "exact_match"],
        ["guard", "token_f1"],
        ["predictions", "exact_match"],
        ["guard", "token_f1"],
    ]


def test_the_best_checkpoint_may_be_the_one_that_answers_best(make_job: MakeJob, learned: Path) -> None:
    job = made_worse(
        make_job,
        learned,
        early_stopping_patience=2,
        training={"max_steps": 12, "learning_rate": 0.01, "metric_for_best_model": "predictions/token_f1"} | EVERY_2,
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    state = json.loads(next((job.dir / "checkpoints").glob("checkpoint-*/trainer_state.json")).read_text())
    found = scores(ended, "token_f1")
    assert state["best_metric"] in found.values()
    best = max(step for step in found if step and found[step] == max(v for s, v in found.items() if s))
    assert ended.result["step"] <= best + 4
    assert ended.metrics["predictions/token_f1"] == max(value for step, value in found.items() if step)


def test_worse_than_it_began_is_regressed_with_a_guard(make_job: MakeJob, learned: Path) -> None:
    job = made_worse(
        make_job,
        learned,
        guard={"metric": "token_f1", "max_drop": 0.1, "patience": 2},
        training={"max_steps": 40} | EVERY_2,
    )
    ended = job.run()
    assert ended.result["error"]["code"] == "regressed", ended.result
    assert ended.metrics["guard_before"] > ended.metrics["guard_after"] + 0.1
    below = [item["step"] for item in ended.of("guard") if item["line"] and item["scores"]["token_f1"] < item["line"]]
    assert ended.result["step"] == below[1] < 40, "two evaluations below the line are enough"
    assert any("training ends at step" in text for text in ended.messages("warning"))
    assert (job.output_dir.with_name("output.regressed") / "model.safetensors").exists()
    assert not job.output_dir.exists()


def test_what_has_regressed_leaves_another_jobs_regressed_output_alone(make_job: MakeJob, learned: Path) -> None:
    job = made_worse(make_job, learned, guard={"metric": "token_f1", "max_drop": 0.1})
    place = job.output_dir.with_name("output.regressed")
    place.mkdir()
    (place / "honed.json").write_text('{"job": {"id": 4711, "name": "facts", "instance": "/spool"}}')
    ended = job.run()
    assert ended.result["error"]["code"] == "regressed", ended.result
    assert (Path(ended.result["artifacts"]["output_dir"]) / "model.safetensors").exists()
    assert [path.name for path in place.iterdir()] == ["honed.json"]


def test_worse_than_it_began_is_a_success_with_a_warning_without_a_guard(make_job: MakeJob, learned: Path) -> None:
    ended = made_worse(make_job, learned).run()
    assert ended.result["outcome"] == "succeeded"
    [warning] = [text for text in ended.messages("warning") if "worse than it began" in text]
    assert "eval_loss rose from 0." in warning
    assert "exact_match fell from 1.000 to 0.000" in warning
    assert ended.result["remark"].startswith("worse than it began: eval_loss rose from 0.")


def test_a_run_that_learned_nothing_says_so_in_its_result(make_job: MakeJob) -> None:
    keys: dict[str, Any] = {"lora": LORA, "predictions": {"sample_frequency": "off"}, "eval_split": 0.3}
    training = {"max_steps": 24, "eval_strategy": "steps", "eval_steps": 24}
    still = make_job(**keys, training=training | {"learning_rate": 1e-9}).run()
    assert still.result["outcome"] == "succeeded"
    assert still.result["remark"].startswith("the loss did not fall: 6.")
    assert any(text.startswith(still.result["remark"]) for text in still.messages("warning"))
    learning = make_job(**keys, training=training | {"learning_rate": 5e-3}).run()
    assert learning.result["remark"] == ""


def test_a_model_that_gets_better_is_not_warned_of_and_takes_the_place_of_one_of_its_job_that_had_regressed(
    make_job: MakeJob,
) -> None:
    job = make_job(lora=LORA, eval_split=0.3)
    own, numbered, anothers = (job.output_dir.with_name(f"output{word}.regressed") for word in ("", ".1", ".2"))
    for place, number in ((own, 1), (numbered, 1), (anothers, 2)):
        place.mkdir()
        (place / "honed.json").write_text(json.dumps({"job": {"id": number, "name": "facts", "instance": "/spool"}}))
        (place / "model.safetensors").write_bytes(b"worse")
    ended = job.run()
    assert not [text for text in ended.messages("warning") if "worse" in text]
    assert sorted(path.name for path in job.dir.iterdir() if "output" in path.name) == ["output", "output.2.regressed"]
    removed = [text.split(",")[0] for text in ended.messages("info") if text.startswith("removed ")]
    assert removed == [f"removed {own}", f"removed {numbered}"]


def test_what_had_regressed_and_does_not_say_whose_it_is_stays(make_job: MakeJob) -> None:
    job = make_job(lora=LORA)
    place = job.output_dir.with_name("output.regressed")
    place.mkdir()
    (place / "model.safetensors").write_bytes(b"worse")
    assert job.run().status == 0
    assert (place / "model.safetensors").exists()


def test_where_time_is_short_evaluations_go_without_predictions_and_the_log_says_so(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MIN_RUN_SEC", 0.0)
    ended = make_job(
        lora=LORA,
        eval_split=0.3,
        training={"max_steps": 6} | EVERY_2,
        predictions={"max_share": 1e-6},
        guard={"metric": "token_f1", "max_drop": 1, "patience": 9},
    ).run()
    assert evaluations(ended) == [0, 2, 4, 6]
    assert [item["step"] for item in ended.of("predictions")] == [0, 6]
    assert len({tuple(row["prompt"] for row in item["rows"]) for item in ended.of("predictions")}) == 1
    said = [text for text in ended.messages("info") if "predictions are skipped at this evaluation" in text]
    assert [text.split(":")[0] for text in said] == ["step 2", "step 4"]
    assert [item["step"] for item in ended.of("guard")] == [0, 2, 4, 6], "the guard has time of its own"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The references scored with the metric `counted`, which is loaded through an entry point."""
    path, packages = tmp_path / "asked", tmp_path / "packages"
    info = packages / "counting_metric-1.0.dist-info"
    info.mkdir(parents=True)
    code = f"def counted(text, truth):\n    print(truth, file=open({str(path)!r}, 'a'))\n    return 1.0\n"
    (packages / "counting_metric.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-metric\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[honed.metrics]\ncounted = counting_metric:counted\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "counting_metric", raising=False)
    return lambda: path.read_text().splitlines()


def test_a_guard_asks_a_hundred_unless_told_otherwise_whatever_time_predictions_have(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, asked: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(budget, "MIN_RUN_SEC", 0.0)
    rows = [{"prompt": f"Number {n}?", "completion": f"n{n}"} for n in range(208)]
    ended = make_job(
        rows=rows,
        lora=LORA,
        eval_split=0.5,
        training={"max_steps": 4, "per_device_eval_batch_size": 64} | EVERY_2,
        guard={"metric": "counted", "patience": 9},
        predictions={"max_share": 1e-6, "max_new_tokens": 2},
    ).run()
    assert ended.status == 0, ended.result
    assert [item["step"] for item in ended.of("predictions")] == [0, 4], "no time for those on the way"
    assert [len(item["rows"]) for item in ended.of("predictions")] == [5, 5]
    assert [item["step"] for item in ended.of("guard")] == [0, 2, 4]
    rounds = [asked()[start : start + 100] for start in range(0, len(asked()), 100)]
    assert [len(set(each)) for each in rounds] == [100, 100, 100]
    assert rounds[0] == rounds[1] == rounds[2]


def test_a_guard_asks_all_where_there_are_fewer_and_spends_nothing_of_the_predictions_time(
    make_job: MakeJob, asked: Callable[[], list[str]]
) -> None:
    job = make_job(
        num_rows=12,
        lora=LORA,
        eval_split=0.5,
        training={"max_steps": 2, "save_steps": 2},
        guard={"metric": "counted"},
        predictions={"sample_frequency": "off", "max_new_tokens": 2},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert len(asked()) == 2 * ended.of("data")[0]["num_eval"] == 12
    [manifest] = (job.dir / "checkpoints").glob("checkpoint-2/MANIFEST.json")
    progress = json.loads(manifest.read_text())["progress"]
    assert (progress["prediction_sec"], progress["guard_before"]) == (0, 1)


def test_a_guard_with_nothing_to_compare_with_ends_the_job_before_training(make_job: MakeJob) -> None:
    rows = [{"prompt": f"Say nothing, {n}.", "completion": "\n"} for n in range(4)]
    ended = make_job(rows=rows, lora=LORA, eval_split=0.5, guard={"metric": "exact_match"}).run()
    assert (ended.result["error"]["code"], ended.losses) == ("dataset_invalid", {})
    assert "guard" in ended.result["error"]["message"]


def test_drawn_answers_are_the_same_each_round_for_the_same_model(make_job: MakeJob) -> None:
    predictions = {"num_samples": 3, "max_new_tokens": 12, "sample": {"temperature": 2.0, "top_p": 0.95, "seed": 3}}
    keys: dict[str, Any] = {"lora": LORA, "dtype": "float32", "eval_split": 0.3, "training": {"max_steps": 2}}
    first = make_job(**keys, predictions=predictions).run()
    again = make_job(**keys, predictions=predictions).run()
    greedy = make_job(**keys, predictions={"num_samples": 3, "max_new_tokens": 12}).run()
    texts = [[row["prediction"] for row in ended.of("predictions")[0]["rows"]] for ended in (first, again, greedy)]
    assert texts[0] == texts[1] != texts[2]
    assert first.losses == greedy.losses


def test_predictions_may_have_the_trainers_autocast(make_job: MakeJob) -> None:
    keys = {"lora": LORA, "dtype": "bfloat16", "eval_split": 0.3, "training": {"max_steps": 2}}
    ended = make_job(**keys, predictions={"autocast": "match"}).run()
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0], ended.messages("warning")
    assert ended.losses == make_job(**keys, predictions={"sample_frequency": "off"}).run().losses


# --- Answers that failed ----------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], None]:
    """A function that makes Llama fail for so many prompts of its n-th round (from 0), the first of a batch."""
    from transformers import LlamaForCausalLM

    generate = LlamaForCausalLM.generate

    def plant(num_failing: Callable[[int], int], num_prompts: int = 4) -> None:
        asked: list[int] = []  # sizes of the batches
        left = [0]

        def choosy(self: Any, *args: Any, **kwargs: Any) -> Any:
            size = len(kwargs["input_ids"])
            asked.append(size)
            if size == num_prompts:
                left[0] = num_failing(asked.count(num_prompts) - 1)
            if left[0]:
                left[0] -= size == 1
                raise RuntimeError("CUDA error: no kernel image is available")
            return generate(self, *args, **kwargs)

        monkeypatch.setattr(LlamaForCausalLM, "generate", choosy)

    return plant


def guarded(make_job: MakeJob, learned: Path, **keys: Any) -> WorkerJob:
    """Return a job whose model keeps what it knows, with a guard on four rows."""
    training = {"max_steps": 2, "learning_rate": 1e-9} | keys.pop("training", {})
    guard = {"metric": "token_f1", "max_drop": 0.2} | keys.pop("guard", {})
    return make_job(
        model=learned,
        num_rows=8,
        dtype="float32",
        eval_split=0.5,
        training=training,
        guard=guard,
        **{"predictions": {"sample_frequency": "off"}} | keys,
    )


def test_a_guard_none_of_whose_answers_came_ends_the_job_before_its_first_step(
    make_job: MakeJob, learned: Path, planted: Any
) -> None:
    planted(lambda _round: 4)
    ended = guarded(make_job, learned).run()
    error = ended.result["error"]
    assert (error["code"], ended.losses) == ("error", {})
    assert error["message"].endswith("the first: RuntimeError: …")
    assert error["evidence"] == (
        "guard: token_f1 could not be measured before training: 4 of 4 answers failed; the first: RuntimeError: "
        "CUDA error: no kernel image is available"
    )
    assert error["hint"].endswith("or remove the guard")
    assert [item["num_failed"] for item in ended.of("guard")] == [4]


def test_a_guard_none_of_whose_answers_came_after_training_says_so_and_is_asked_again_without_training(
    make_job: MakeJob, learned: Path, planted: Any
) -> None:
    planted(lambda number: 4 * (number == 1))
    job = guarded(make_job, learned)
    ended = job.run()
    assert (ended.result["outcome"], ended.result["error"]["code"]) == ("failed", "error")
    assert "token_f1 could not be measured after training: 4 of 4 answers failed" in ended.result["error"]["message"]
    assert (job.output_dir.with_name("output.regressed") / "model.safetensors").exists()
    assert ended.metrics["guard_before"] > 0
    assert "guard_after" not in ended.metrics
    again = job.run(2)
    assert (again.result["outcome"], again.losses) == ("succeeded", {})
    assert again.metrics["guard_after"] == again.metrics["guard_before"] == ended.metrics["guard_before"]
    assert (job.output_dir / "model.safetensors").exists()
    assert not job.output_dir.with_name("output.regressed").exists()


def test_a_guard_some_of_whose_answers_failed_goes_by_the_others_and_says_so(
    make_job: MakeJob, learned: Path, planted: Any
) -> None:
    planted(lambda number: 2 * (number == 1))
    ended = guarded(make_job, learned, guard={"max_drop": 1}).run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("guard")] == [0, 2]
    assert "step 2: 2 of the guard's 4 answers failed: its token_f1 covers only the other 2" in ended.messages(
        "warning"
    )


def test_an_evaluation_whose_answers_failed_neither_counts_for_the_guards_patience_nor_against_it(
    make_job: MakeJob, learned: Path, planted: Any
) -> None:
    planted(lambda number: 4 * (number in (1, 3)))
    ended = guarded(
        make_job,
        learned,
        guard={"patience": 2, "max_drop": 0.1},
        training={"max_steps": 12, "learning_rate": 0.3} | EVERY_2,
    ).run()
    assert ended.result["error"]["code"] == "regressed", ended.result
    assert ended.result["step"] == 8, "2 and 6 failed; 4 and 8 are below the line"
    assert [text.split(":")[0] for text in ended.messages("warning") if "has no result" in text] == ["step 2", "step 6"]


@pytest.mark.parametrize("schedule", ["linear", "reduce_lr_on_plateau"])
def test_an_evaluation_whose_answers_failed_is_not_the_best(
    make_job: MakeJob, learned: Path, planted: Any, schedule: str
) -> None:
    planted(lambda number: 4 * (number == 1))
    job = make_job(
        model=learned,
        num_rows=8,
        dtype="float32",
        eval_split=0.5,
        early_stopping_patience=3,
        training={
            "max_steps": 6,
            "learning_rate": 1e-9,
            "metric_for_best_model": "predictions/token_f1",
            "lr_scheduler_type": schedule,
        }
        | EVERY_2,
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert [(item["step"], item["num_failed"], bool(item["scores"])) for item in ended.of("predictions")] == [
        (0, 0, True),
        (2, 4, False),
        (4, 0, True),
        (6, 0, True),
    ]
    assert "step 2: no scores: 4 of 4 predictions failed" in ended.messages("warning")
    assert ended.result["step"] == 6
    assert not [text for text in ended.messages("warning") if "worse" in text]
