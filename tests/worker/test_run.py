"""A job from plan to output, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trl import SFTTrainer

from honed.job import history
from honed.job.database import Database
from honed.job.event import Reading
from worker.conftest import MakeJob
from zoo.jobs import JOB

LORA = {"r": 8, "lora_dropout": 0.1}


def dtypes(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return {str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118


@pytest.mark.quick
def test_a_job_tells_its_story_in_order_and_leaves_an_adapter(make_job: MakeJob) -> None:
    job = make_job(lora=LORA, eval_split=0.2)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert ended.result["outcome"] == "succeeded"
    assert ended.events[0].kind == "started"
    assert ended.events[-1].kind == "finished"
    stages = [item["stage"] for item in ended.of("stage")]
    assert stages == ["prepare", "data", "load", "audit", "mask", "baseline", "train", "export"]
    assert sorted(ended.losses) == [1, 2, 3, 4, 5, 6]
    assert {"learning_rate", "grad_norm", "eta_sec", "epoch", "num_steps"} <= set(ended.of("step")[-1])
    assert {"train_loss", "eval_loss", "num_trained_tokens"} <= set(ended.metrics)
    assert {path.name for path in job.output_dir.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "README.md",
        "honed.json",
    }
    manifest = json.loads((job.output_dir / "honed.json").read_text())
    assert {"spec", "plan", "versions", "seed", "data", "metrics"} <= set(manifest)
    assert manifest["job"]["id"] == job.plan["job"]["id"]
    assert ended.result["artifacts"] == {"output_dir": str(job.output_dir)}
    assert not list(job.output_dir.parent.glob(".output*"))


def test_every_metric_that_the_trainer_logs_for_a_step_arrives_in_the_database(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SFTTrainer.log

    def logging(self: SFTTrainer, logs: dict[str, float], *arguments: Any) -> None:
        log(self, logs | ({"rewards/margins": logs["loss"] / 2} if "loss" in logs else {}), *arguments)

    monkeypatch.setattr(SFTTrainer, "log", logging)
    ended = make_job(lora=LORA, training={"max_steps": 2, "logging_steps": 1}).run()
    database = Database(tmp_path / "honed.db")
    database.apply(JOB, Reading(ended.events, 1, 0))
    names = {"loss", "learning_rate", "grad_norm", "mean_token_accuracy", "entropy", "rewards/margins"}
    curves = {
        name: [row[:2] for row in history.present(history.metric(database.path, JOB.id, name))]
        for name in history.names(database.path, JOB.id)
    }
    assert {name for name in curves if not name.startswith(("eval_", "predictions/"))} == names
    assert curves["rewards/margins"] == [(step, loss / 2) for step, loss in ended.losses.items()]
    for name in names:
        assert curves[name] == [(item["step"], item[name]) for item in ended.of("step")]
    assert all(0 <= value <= 1 for _, value in curves["mean_token_accuracy"])


def test_checkpoints_and_the_output_are_told_with_their_bytes(make_job: MakeJob) -> None:
    ended = make_job(
        lora=LORA, training={"max_steps": 2, "save_steps": 1}, predictions={"sample_frequency": "off"}
    ).run()
    saved = ended.of("checkpoint")
    assert [each["step"] for each in saved] == [1, 2]
    for told in (*saved, *ended.of("artifact")):
        files = [path for path in Path(told["path"]).rglob("*") if path.is_file()]
        assert told["num_bytes"] == sum(path.stat().st_size for path in files) > 10_000, told


def test_the_first_example_is_told_with_its_mask(make_job: MakeJob) -> None:
    ended = make_job("llama", lora=LORA, training={"max_steps": 1}, predictions={"sample_frequency": "off"}).run()
    [example] = ended.of("example")
    trained = "".join(part["text"] for part in example["segments"] if part["trained"])
    assert trained == "Paris.<|eot_id|>"
    assert "capital of France" in "".join(part["text"] for part in example["segments"] if not part["trained"])


@pytest.mark.parametrize("format", ["messages", "prompt_completion", "alpaca", "sharegpt", "text"])
def test_every_format_trains(make_job: MakeJob, format: Any) -> None:  # noqa: A002
    ended = make_job("qwen2", format=format, lora=LORA, eval_split=0.2, training={"max_steps": 2}).run()
    assert ended.status == 0, ended.result
    assert [item["num_failed"] for item in ended.of("predictions")] == [0, 0]
    [data] = ended.of("data")
    assert data["num_train"] + data["num_eval"] == 12


def test_the_model_learns(make_job: MakeJob) -> None:
    job = make_job(
        "llama",
        num_rows=4,
        dtype="float32",
        training={"max_steps": 60, "learning_rate": 5e-3, "per_device_train_batch_size": 4},
        predictions={"num_samples": 4, "max_new_tokens": 8},
    )
    ended = job.run()
    before, *_, after = ended.of("predictions")
    assert not any(row["prediction"] == row["ground_truth"] for row in before["rows"])
    assert all(row["prediction"] == row["ground_truth"] for row in after["rows"]), after
    assert "no rows are held out" in " ".join(ended.messages("warning"))


def test_the_log_says_which_precision_and_why(make_job: MakeJob) -> None:
    ended = make_job(lora=LORA, dtype="bfloat16", training={"max_steps": 1}).run()
    [message] = [text for text in ended.messages("info") if "loaded" in text]
    assert "base bfloat16" in message
    assert "bf16 autocast" in message
    assert "load_dtype: as the job asks" in message


def test_rows_that_are_cut_or_dropped_are_counted(make_job: MakeJob) -> None:
    long = {"messages": [{"role": "user", "content": "why " * 80}, {"role": "assistant", "content": "because"}]}
    ends_cut = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because " * 80}]}
    short = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
    ended = make_job(rows=[long, ends_cut, short, short], lora=LORA, training={"max_steps": 1, "max_length": 48}).run()
    assert ended.status == 0, ended.result
    [data] = ended.of("data")
    assert (data["num_train"], data["num_truncated"], data["num_dropped"]) == (3, 2, 1)
    assert "1 row is skipped" in " ".join(ended.messages("warning"))


def test_rows_that_cannot_be_used_are_counted_and_named_those_held_out_too(make_job: MakeJob, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(json.dumps(row) for row in [*[good] * 8, *[{"else": n} for n in range(7)]]) + "\n")
    ended = make_job(
        rows=[good, {"messages": []}, good],
        lora=LORA,
        eval_datasets=[{"path": str(held_out)}],
        training={"max_steps": 1},
    ).run()
    assert ended.status == 0, ended.result
    [data] = ended.of("data")
    assert data["num_unusable"] == 8
    assert [each["num_bad"] for each in (*data["datasets"], *data["eval_datasets"])] == [1, 7]
    of_train, of_eval = [text for text in ended.messages("warning") if "rows cannot be used" in text]
    assert "1 of 3 rows" in of_train
    assert "line 2: " in of_train
    assert "held_out.jsonl: 7 of 15 rows" in of_eval
    assert "line 9: " in of_eval
    assert of_eval.endswith("and 2 more")


def test_a_job_whose_rows_are_all_cut_away_is_refused_before_training(make_job: MakeJob) -> None:
    ended = make_job(lora=LORA, training={"max_length": 4}).run()
    assert ended.status == 65
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert not ended.of("step")


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_packed_rows_keep_their_masks(make_job: MakeJob, strategy: str) -> None:
    training = {"max_steps": 2, "packing": True, "packing_strategy": strategy, "max_length": 64}
    ended = make_job(lora=LORA, training=training).run()
    assert ended.status == 0, ended.result


@pytest.mark.quick
def test_a_full_fine_tuning_leaves_a_whole_checkpoint(make_job: MakeJob) -> None:
    job = make_job("gpt_neox", eval_split=0.2)
    assert job.run().status == 0
    assert (job.output_dir / "model.safetensors").exists()
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(job.output_dir)


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "bfloat16"), ("4bit", "float16"), ("8bit", "bfloat16")])
def test_a_merged_checkpoint_has_every_parameter_in_the_asked_dtype(
    make_job: MakeJob, quantization: str, dtype: str
) -> None:
    job = make_job(lora=LORA, quantization=quantization, save_merged=dtype, training={"max_steps": 2})
    ended = job.run()
    assert ended.status == 0, ended.result
    merged = Path(ended.result["artifacts"]["merged"])
    assert dtypes(merged / "model.safetensors") == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(job.plan["base_model_path"], dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, job.output_dir)
    ids = torch.arange(300, 316)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, whole(ids).logits, atol=0.05)


def test_a_job_goes_on_from_an_adapter(make_job: MakeJob) -> None:
    first = make_job(lora=LORA, dtype="float32")
    assert first.run().status == 0
    second = make_job(adapter=str(first.output_dir), dtype="float32", training={"learning_rate": 1e-9})
    ended = second.run()
    assert ended.status == 0, ended.result
    assert (second.output_dir / "adapter_model.safetensors").exists()
    assert ended.losses[1] < make_job(lora=LORA, dtype="float32", training={"learning_rate": 1e-9}).run().losses[1]


def test_a_chat_template_of_the_jobs_own_is_used_and_exported(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Any
) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("qwen2"), base)
    (base / "chat_template.jinja").unlink()
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    bare = make_job(model=base, lora=LORA).run()
    assert bare.result["error"]["code"] == "dataset_invalid"
    assert "chat_template" in bare.result["error"]["hint"]
    job = make_job(model=base, lora=LORA, chat_template=str(template), training={"max_steps": 1})
    assert job.run().status == 0
    assert (job.output_dir / "chat_template.jinja").read_text() == template.read_text()


def test_a_config_without_model_type_loads_with_the_specs(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Any
) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("llama"), base)
    config = json.loads((base / "config.json").read_text())
    del config["model_type"]
    (base / "config.json").write_text(json.dumps(config))
    ended = make_job(model=base, model_type="llama", lora=LORA, training={"max_steps": 1}).run()
    assert ended.status == 0, ended.result
    (base / "config.json").write_text(json.dumps(config | {"model_type": "code_llama"}))
    ended = make_job(model=base, lora=LORA, training={"max_steps": 1}).run()
    assert ended.status == 0, ended.result


def test_missing_weights_are_refused_and_not_drawn_at_random(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Any
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("llama"), base)
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    ended = make_job(model=base, lora=LORA).run()
    assert ended.status == 66
    assert "up_proj" in ended.result["error"]["message"]


def test_a_loss_that_is_not_a_number_ends_the_job_as_diverged(
    make_job: MakeJob, tmp_path: Path, checkpoint_of: Any
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("llama"), base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    job = make_job(model=base, lora=LORA, dtype="float32", training={"save_steps": 1})
    ended = job.run()
    assert ended.status == 84
    assert ended.result["error"]["code"] == "diverged"
    assert ended.result["step"] == 2
    assert not list((job.dir / "checkpoints").iterdir())


def test_early_stopping_ends_a_run_and_returns_to_its_best(make_job: MakeJob, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    row = {"prompt": "What is the capital of France?", "completion": "Nobody knows, and reasoning will not help."}
    other.write_text(json.dumps(row) + "\n")
    job = make_job(
        num_rows=2,
        format="prompt_completion",
        dtype="float32",
        early_stopping_patience=2,
        eval_datasets=[{"path": str(other)}],
        training={"max_steps": 60, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    evaluations = {item["step"]: item["metrics"]["eval_loss"] for item in ended.of("evaluation")}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert ended.result["step"] == best + 4 < 60
    kept = [path.name for path in (job.dir / "checkpoints").iterdir()]
    assert f"checkpoint-{best}" in kept
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(job.output_dir).state_dict()
    from_best = AutoModelForCausalLM.from_pretrained(job.dir / f"checkpoints/checkpoint-{best}").state_dict()
    assert all(torch.equal(exported[name], from_best[name]) for name in exported)


def test_a_time_limit_leaves_a_checkpoint_and_no_success(make_job: MakeJob) -> None:
    job = make_job(lora=LORA, time_limit_sec=0.001, predictions={"sample_frequency": "off"})
    ended = job.run()
    assert ended.status == 88
    assert "time limit" in ended.result["error"]["message"]
    assert (job.dir / "checkpoints/checkpoint-1/MANIFEST.json").exists()


def test_a_model_that_ends_worse_than_it_began_has_regressed(make_job: MakeJob) -> None:
    learned = make_job(
        "llama",
        num_rows=4,
        dtype="float32",
        training={"max_steps": 60, "learning_rate": 5e-3, "per_device_train_batch_size": 4},
    )
    assert learned.run().status == 0
    worse = make_job(
        model=learned.output_dir,
        num_rows=4,
        dtype="float32",
        eval_split=0.5,
        guard={"metric": "exact_match", "max_drop": 0.1},
        training={"max_steps": 8, "learning_rate": 0.3},
        predictions={"sample_frequency": "off"},
    )
    ended = worse.run()
    assert ended.result["error"]["code"] == "regressed", ended.result
    assert ended.metrics["guard_before"] > ended.metrics["guard_after"]
    assert (worse.output_dir.with_name("output.regressed") / "model.safetensors").exists()
    assert not worse.output_dir.exists()


def test_what_leads_elsewhere_since_it_was_checked_is_not_trained_on(make_job: MakeJob, tmp_path: Path) -> None:
    """The workers' user can read the outputs of every job."""
    job, theirs = make_job(), tmp_path / "theirs"
    rows = Path(job.plan["spec"]["datasets"][0]["path"])
    theirs.mkdir()
    rows.rename(theirs / "rows.jsonl")
    rows.symlink_to(theirs / "rows.jsonl")
    job.change_plan(may_read={"closed": [str(theirs)], "allowed": None, "inputs": [job.plan["base_model_path"]]})
    ended = job.run()
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert "belongs to honed or to another user" in ended.result["error"]["message"]
    assert not [item for item in ended.events if item.kind == "step"]


def test_an_output_directory_that_is_anothers_is_left_alone(make_job: MakeJob, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    ended = make_job(lora=LORA, output_dir=str(taken), training={"max_steps": 1}).run()
    assert ended.result["error"]["code"] == "environment_invalid"
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]
