"""The whole check on real files, and the helper process that runs it for the daemon."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import gpus
from honed.check import datacheck, placecheck, preflight
from honed.check.checklist import Asked, Verdict
from honed.daemon.arrivals.checker import Checker
from honed.daemon.arrivals.line import MAX_PAUSE_SEC, Request
from honed.job.plan_file import Earlier
from honed.plan.plan import Plan
from honed.run.helper import READY, STAGE_BYTES, ChildHelper, children
from honed.run.helper_slot import MAX_ANSWER_BYTES, START_TIMEOUT_SEC
from honed.run.reply import Answer, Passed, Refused
from honed.spec.config import Config, PolicyConfig, SpoolConfig
from honed.spec.spec import JobSpec
from honed.system import installed
from honed.system.device import Device
from honed.system.error import (
    DatasetError,
    DegradedError,
    DiskShortError,
    EnvironmentInvalidError,
    HonedError,
    MemoryShortError,
    ModelError,
    SpecError,
)
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from told import refused
from waiting import wait_for
from zoo import plain

CPU = Device("cpu", "a processor", total_bytes=24 * 2**30, free_bytes=20 * 2**30)
SOURCE = Path(preflight.__file__).parents[2]


class Desk:
    """A model, a data set, and job files that name them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = Layout(path / "root")
        self.layout.jobs_dir.mkdir(parents=True)
        self.model = plain.write_base_model(path / "model")
        self.rows = plain.write_dataset(path / "rows.jsonl")

    def write(self, name: str = "job.json", **keys: Any) -> Path:
        path = self.path / name
        path.write_text(json.dumps(plain.spec(self.model, self.rows, **keys)))
        return path

    def check(self, config: Config | None = None, *, job_id: int | None = None, **keys: Any) -> Verdict:
        spec_path = self.write(**keys)
        return preflight.check(spec_path, Asked(self.layout, config=config or Config(), device=CPU, job_id=job_id))

    def edit_config(self, **keys: Any) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    def drop_template(self) -> None:
        (self.model / "tokenizer_config.json").write_text("{}")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_good_job_has_a_plan_and_a_directory_of_its_own(desk: Desk) -> None:
    verdict = desk.check(job_id=7)
    assert verdict.plan.backend.name == "transformers"
    assert verdict.output_dir == desk.layout.job(7).output_dir
    assert verdict.warnings == []


def test_settings_that_a_run_is_too_short_for_are_told(desk: Desk) -> None:
    plain.write_dataset(desk.rows, num_rows=80)
    held_out = plain.write_dataset(desk.path / "held-out.jsonl", num_rows=90, first=2000)
    training = {"warmup_steps": 100, "num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 0.2}
    keys: dict[str, Any] = {"training": training, "eval_datasets": [{"path": str(held_out)}]}
    [rate, warmup] = desk.check(**keys).warnings
    assert rate.startswith("training.learning_rate: 0.2 is very high for an adapter")
    assert warmup.startswith("training.warmup_steps: 100 of at most 20 steps: the learning rate will reach at most 20%")
    plain.write_dataset(desk.rows, num_rows=1000)  # more than are looked at
    assert desk.check(**keys).warnings == [rate]


def test_a_bad_spec_is_told_with_key_and_line(desk: Desk) -> None:
    with pytest.raises(SpecError, match=r"line 1: training\.learning_rat: unknown key"):
        desk.check(training={"learning_rat": 1e-4})


# --- The base model ---------------------------------------------------------------------------------------------------


BY_HAND = """\
base_model: {model}
datasets:
  - path: {rows}
    format: auto
  - path: {rows}
{key}: {value}
"""


@pytest.mark.parametrize(
    ("key", "value", "begins"),
    [
        ("trust_remote_code", "true", "line 6: trust_remote_code: running code"),
        ("output_dir", "/etc/passwd/x", "line 6: output_dir: "),
        ("eval_datasets", "[{path: /nowhere.jsonl}]", "line 6: eval_datasets.0: /nowhere.jsonl: no such file"),
        ("chat_template", "/nowhere.jinja", "line 6: chat_template: "),
        ("adapter", "/nowhere", "line 6: adapter: "),
        ("model_type", "gpt_nobody", "line 1: base_model: "),
    ],
)
def test_what_the_file_names_is_refused_with_key_and_line(desk: Desk, key: str, value: str, begins: str) -> None:
    path = desk.path / "job.yaml"
    path.write_text(BY_HAND.format(model=desk.model, rows=desk.rows, key=key, value=value))
    with pytest.raises(HonedError) as refused:
        preflight.check(path, Asked(desk.layout, config=Config(), device=CPU))
    assert refused.value.message.startswith(begins)
    assert refused.value.hint


def test_an_empty_data_set_is_refused_with_its_line_and_what_to_do(desk: Desk) -> None:
    path = desk.path / "job.yaml"
    path.write_text(BY_HAND.format(model=desk.model, rows=desk.rows, key="eval_split", value=0.5))
    desk.rows.write_text("")
    with pytest.raises(DatasetError) as refused:
        preflight.check(path, Asked(desk.layout, config=Config(), device=CPU))
    assert refused.value.message.startswith(f"line 3: datasets.0: {desk.rows}: ")
    assert refused.value.hint


def test_a_vision_model_is_trained_on_text_alone_and_the_plan_says_with_what_and_why(desk: Desk) -> None:
    desk.edit_config(model_type="qwen2_5_vl", vision_config={"depth": 2})
    backend = desk.check(backend="auto").plan.backend
    assert backend.name == "transformers"
    assert backend.reasons in (
        ("without an NVIDIA GPU, Unsloth does not train vision or audio models",),
        ("Unsloth is not installed",),
    )


#: Rows with pictures are rehearsed; these models cannot be made small.
UNREHEARSED = Config.model_validate({"spool": {"rehearsal_cpu_sec": 0}})


def write_pictures(desk: Desk, *names: str) -> None:
    """Write rows that each name a picture; only good.png exists."""
    Image.new("RGB", (40, 30)).save(desk.path / "good.png")
    turns = [{"role": "user", "content": "<image> What?"}, {"role": "assistant", "content": "A cat."}]
    desk.rows.write_text("".join(json.dumps({"messages": turns, "images": [name]}) + "\n" for name in names))


def test_files_beside_the_rows_are_looked_at(desk: Desk) -> None:
    desk.edit_config(model_type="qwen3_vl", vision_config={"depth": 2})
    (desk.model / "preprocessor_config.json").write_text("{}")
    write_pictures(desk, "good.png", "gone.png", "good.png")
    (warning,) = desk.check(UNREHEARSED).warnings
    assert "1 of the first 3 rows with media have an unusable file, and will be skipped" in warning
    assert f"rows.jsonl, line 2: {desk.path}/gone.png: no such file" in warning
    with pytest.raises(DatasetError, match=r"datasets\.0: .*1 of the first 3 rows .*gone\.png: no such file"):
        desk.check(UNREHEARSED, media={"broken": "refuse"})
    with pytest.raises(DatasetError, match=r"such rows cannot be packed"):
        desk.check(UNREHEARSED, training={"packing": True})
    write_pictures(desk, "gone.png", "lost.png")
    with pytest.raises(DatasetError, match=r"2 of the first 2 rows .*gone\.png: no such file; .*lost\.png") as caught:
        desk.check(UNREHEARSED)
    assert "`media_dir`" in caught.value.hint
    folder = {"path": str(desk.rows), "media_dir": str(desk.path / "pictures")}
    (desk.path / "pictures").mkdir()
    Image.new("RGB", (40, 30)).save(desk.path / "pictures/gone.png")
    assert len(desk.check(UNREHEARSED, datasets=[folder]).warnings) == 1


def test_a_vision_model_without_its_processor_takes_only_rows_of_text(desk: Desk) -> None:
    desk.edit_config(model_type="gemma3", vision_config={"depth": 2})
    desk.check(UNREHEARSED)
    write_pictures(desk, "good.png")
    with pytest.raises(DatasetError, match=r"rows with images, but .*/model has neither preprocessor_config") as caught:
        desk.check(UNREHEARSED)
    assert caught.value.hint == "copy the processor's files from the model's source, or use rows of text"
    (desk.model / "preprocessor_config.json").write_text("{}")
    desk.check(UNREHEARSED)


def test_rows_whose_pictures_are_not_read_or_too_large_are_told(desk: Desk) -> None:
    desk.edit_config(model_type="qwen2_5_vl", vision_config={"depth": 2})
    (desk.model / "preprocessor_config.json").write_text('{"merge_size": 2, "patch_size": 14}')
    write_pictures(desk, "good.png")
    Image.new("RGB", (560, 560)).save(desk.path / "good.png")
    assert not desk.check(UNREHEARSED, training={"max_length": 400}).warnings
    (warning,) = desk.check(UNREHEARSED, training={"max_length": 399}).warnings
    assert "1 of 1 rows with media are probably longer than max_length (399) from their media alone" in warning
    assert "up to 400 tokens" in warning
    assert not desk.check(UNREHEARSED, training={"max_length": 399}, media={"max_image_size": 280}).warnings
    desk.rows.write_text(desk.rows.read_text().replace('"images"', '"pictures"'))
    column, word, absent = desk.check(datasets=[{"path": str(desk.rows), "columns": {"image": "photo"}}]).warnings
    assert column.startswith("datasets.0: the column `pictures` seems to contain images, but is not read")
    assert word.startswith("datasets.0: `<image>` in the text of rows")
    assert absent == "datasets.0: `columns` names `photo`, and none of the 1 rows has that column"


def test_rows_with_pictures_need_a_model_that_sees(desk: Desk) -> None:
    write_pictures(desk, "good.png")
    with pytest.raises(DatasetError, match=r"rows with images, which .* does not support"):
        desk.check()


def test_models_that_hear_are_taken(desk: Desk) -> None:
    desk.edit_config(model_type="qwen2_audio", audio_config={"d_model": 8, "encoder_layers": 1})
    (desk.model / "preprocessor_config.json").write_text("{}")
    verdict = desk.check()
    assert verdict.plan is not None
    assert verdict.plan.as_dict()["checkpoint"]["has_vision"]


def test_weights_in_float8_without_their_scales_are_refused(desk: Desk) -> None:
    (desk.model / "model.safetensors").unlink()
    plain.write_safetensors(desk.model / "model.safetensors", {"model.norm.weight": ("F8_E4M3", [8])})
    with pytest.raises(ModelError, match=r"config\.json: the weights are stored in float8"):
        desk.check()


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("lama", "does not know the model_type lama"),
        ("t5", "not a causal language model"),
        ("whisper_large", "does not know"),
    ],
)
def test_an_architecture_that_cannot_be_trained_is_refused(desk: Desk, model_type: str, message: str) -> None:
    desk.edit_config(model_type=model_type)
    with pytest.raises(ModelError, match=message):
        desk.check()


def test_an_alias_and_a_model_type_from_the_job_file_are_taken(desk: Desk) -> None:
    desk.edit_config(model_type="code_llama")
    assert desk.check().plan.model.model_type == "code_llama"
    assert desk.check(model_type="llama").plan.model.model_type == "llama"


def test_a_model_type_that_contradicts_the_checkpoint_is_refused(desk: Desk) -> None:
    desk.edit_config(model_type="qwen3")
    with pytest.raises(SpecError, match=r"model_type: llama, but .*config\.json says qwen3") as refused:
        desk.check(model_type="llama")
    assert "remove model_type" in refused.value.hint
    assert desk.check(model_type="qwen3").plan.model.model_type == "qwen3"
    desk.edit_config(model_type="llama")
    assert desk.check(model_type="llama2").plan.model.model_type == "llama2"  # another name for the same


def test_what_the_libraries_would_find_after_the_load_is_refused_by_key(desk: Desk) -> None:
    with pytest.raises(
        SpecError, match=r"training\.loss_type: chunked_nll is not compatible with label_smoothing_factor"
    ):
        desk.check(training={"loss_type": "chunked_nll", "label_smoothing_factor": 0.1})
    with pytest.raises(EnvironmentInvalidError, match=r"training\.optim: stable_adamw needs torch-optimi"):
        desk.check(training={"optim": "stable_adamw"})
    desk.edit_config(max_position_embeddings=1)
    assert any("the model has only 1 positions" in told for told in desk.check().warnings)
    desk.edit_config(model_type="gpt2", n_positions=1)
    assert any("has only 1 positions; a longer row ends the job" in told for told in desk.check().warnings)
    desk.edit_config(model_type="mamba")
    with pytest.raises(SpecError, match=r"training\.packing: .*mamba has layers that carry state"):
        desk.check(training={"packing": True})


def test_an_adapter_on_a_layer_that_the_model_has_not_is_refused(desk: Desk) -> None:
    adapter = plain.write_adapter(desk.path / "adapter")
    desk.check(adapter=str(adapter), lora=None)
    module = "base_model.model.model.layers.4.self_attn.q_proj"
    shapes = {f"{module}.lora_A.weight": ("F32", [4, 8]), f"{module}.lora_B.weight": ("F32", [8, 4])}
    plain.write_safetensors(adapter / "adapter_model.safetensors", shapes)
    with pytest.raises(ModelError, match=r"changes layer 4, but .* has only 1 layers, counted from 0"):
        desk.check(adapter=str(adapter), lora=None)


def test_a_model_with_code_of_its_own_needs_leave(desk: Desk) -> None:
    desk.edit_config(model_type="homemade", auto_map={"AutoModelForCausalLM": "modeling.Homemade"})
    with pytest.raises(ModelError, match="the model's own code"):
        desk.check()
    with pytest.raises(SpecError, match="is not allowed here"):
        desk.check(trust_remote_code=True)
    allowed = Config(policy=PolicyConfig(trust_remote_code=True))
    assert desk.check(allowed, trust_remote_code=True).plan.model.model_type == "homemade"


def test_pickled_weights_need_leave(desk: Desk) -> None:
    (desk.model / "model.safetensors").rename(desk.model / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        desk.check()
    verdict = desk.check(Config(policy=PolicyConfig(pickle=True)))
    assert any("pickled" in warning for warning in verdict.warnings)


def test_another_jobs_model_is_checked_when_it_is_there(desk: Desk) -> None:
    spec_path = desk.write(base_model="job:stage1")
    verdict = preflight.check(spec_path, Asked(desk.layout, config=Config(), device=CPU))
    assert (verdict.plan, verdict.waits_for) == (None, {"base_model": "stage1"})
    assert any("job:stage1" in warning for warning in verdict.warnings)
    for directory in (desk.model, desk.model / "merged"):  # a checkpoint, or one that lies merged beside an adapter
        verdict = preflight.check(
            spec_path, Asked(desk.layout, config=Config(), device=CPU, earlier=Earlier({"stage1": desk.model}))
        )
        assert verdict.plan is not None
        assert verdict.plan.model.path == directory
        plain.write_base_model(desk.model / "merged")
        (desk.model / "config.json").unlink(missing_ok=True)


def test_a_job_that_waits_for_another_is_checked_as_far_as_it_goes(desk: Desk) -> None:
    waiting = {"base_model": "job:stage1"}
    with pytest.raises(DatasetError, match=r"gone\.jsonl"):
        desk.check(**waiting, datasets=[{"path": str(desk.path / "gone.jsonl")}])
    with pytest.raises(SpecError, match="chat_template"):
        desk.check(**waiting, chat_template=str(desk.path / "gone.jinja"))
    with pytest.raises(ModelError, match="adapter: no such directory"):
        desk.check(**waiting, adapter=str(desk.path / "adapter"), lora=None)
    with pytest.raises(ModelError, match="no such directory"):
        desk.check(base_model=str(desk.path / "gone"), adapter="job:stage1", lora=None)


def merge(desk: Desk, **keys: Any) -> Verdict:
    adapter = keys.pop("adapter", None) or str(plain.write_adapter(desk.path / "adapter"))
    return desk.check(**{"kind": "merge", "lora": None, "datasets": [], "adapter": adapter, **keys})


def test_a_merge_is_planned_in_one_dtype_on_the_cpu(desk: Desk) -> None:
    planned = merge(desk, dtype="bfloat16")
    assert planned.plan is not None
    assert (planned.plan.precision.load_dtype, planned.plan.device.kind) == ("bfloat16", "cpu")
    assert planned.adapter_path == desk.path / "adapter"
    made = merge(desk, resources={"gpus": 1}).plan
    assert made is not None
    assert made.precision.load_dtype == "float32"
    assert made.precision.reasons["load_dtype"] == "the dtype of the stored base model"


def test_what_cannot_be_merged_is_refused_by_name(desk: Desk) -> None:
    config = desk.path / "adapter/adapter_config.json"
    merge(desk)
    for changes, said in (
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4 changes"),
    ):
        adapter = str(plain.write_adapter(desk.path / "adapter"))
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
        with refused(HonedError, said):
            merge(desk, adapter=adapter)
    desk.edit_config(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="stored in gptq"):
        merge(desk)


def test_an_adapter_is_looked_at(desk: Desk) -> None:
    with pytest.raises(ModelError, match="adapter: no such directory"):
        desk.check(adapter=str(desk.path / "adapter"), lora=None)


# --- Data sets and templates ------------------------------------------------------------------------------------------


def test_a_data_set_is_told_by_its_key(desk: Desk) -> None:
    with pytest.raises(DatasetError, match=r"eval_datasets\.1: .*gone.jsonl: no such file"):
        desk.check(eval_datasets=[{"path": str(desk.rows)}, {"path": str(desk.path / "gone.jsonl")}])


def test_rows_that_do_not_parse_are_told_with_their_line(desk: Desk) -> None:
    desk.rows.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DatasetError, match=r"datasets\.0: .*rows.jsonl: line 2"):
        desk.check()


def test_messages_without_a_chat_template_are_refused_with_the_key_to_name_one(desk: Desk) -> None:
    desk.drop_template()
    with pytest.raises(DatasetError, match="the base model has none") as raised:
        desk.check()
    assert "chat_template:" in raised.value.hint
    template = desk.path / "chat.jinja"
    template.write_text(plain.TEMPLATE)
    assert desk.check(chat_template=str(template)).plan


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b"},
    ],
)
def test_rows_that_need_no_chat_template_do_without(desk: Desk, row: dict[str, Any]) -> None:
    desk.drop_template()
    desk.rows.write_text(json.dumps(row) + "\n")
    assert desk.check().plan


def test_a_prompt_of_messages_needs_a_chat_template(desk: Desk) -> None:
    desk.drop_template()
    turns = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    desk.rows.write_text(json.dumps(turns) + "\n")
    with pytest.raises(DatasetError, match="the base model has none"):
        desk.check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{% for m in messages %}", "not a Jinja template"),
        ("{{ a | nofilter }}", "not a Jinja template"),
    ],
)
def test_a_chat_template_that_is_none_is_refused(desk: Desk, text: str, message: str) -> None:
    template = desk.path / "chat.jinja"
    template.write_text(text)
    with pytest.raises(SpecError, match=f"chat_template: .*{message}"):
        desk.check(chat_template=str(template))


def test_a_template_with_transformers_own_tags_compiles(desk: Desk) -> None:
    template = desk.path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content | tojson }}<|im_end|>{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ 'assistant' if add_generation_prompt }}"
    )
    assert desk.check(chat_template=str(template)).plan


def test_a_template_that_is_a_pipe_is_not_waited_for(desk: Desk) -> None:
    os.mkfifo(desk.path / "chat.jinja")
    with pytest.raises(SpecError, match="no such file"):
        desk.check(chat_template=str(desk.path / "chat.jinja"))


# --- Packages, output, disk -------------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_told(desk: Desk) -> None:
    with pytest.raises(EnvironmentInvalidError, match="report_to: trackio is not installed") as raised:
        desk.check(report_to=["trackio"])
    assert raised.value.hint == "pip install 'trackio>=0.21.1'"


@pytest.mark.parametrize(("version", "is_taken"), [("0.20.2", False), ("0.21.1", True), ("0.43.0", True)])
def test_a_tracker_that_transformers_cannot_report_to_is_told_before_training(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, version: str, *, is_taken: bool
) -> None:
    """pip installs one that is years old where a newer one conflicts with the installed packages."""
    metadata = desk.path / f"packages/trackio-{version}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: trackio\nVersion: {version}\n")
    monkeypatch.syspath_prepend(desk.path / "packages")
    if is_taken:
        assert desk.check(report_to=["trackio"]).plan
        return
    with pytest.raises(EnvironmentInvalidError, match=r"report_to: trackio 0\.20\.2 is too old") as raised:
        desk.check(report_to=["trackio"])
    assert raised.value.hint == "pip install 'trackio>=0.21.1'"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"predictions": {"metrics": ["exact_match", "bleu"]}}, "predictions.metrics"),
        ({"guard": {"metric": "bleu"}, "eval_split": 0.5}, "guard.metric"),
        ({"training": {"metric_for_best_model": "eval_predictions/bleu"}}, "training.metric_for_best_model"),
    ],
)
def test_a_metric_that_nobody_brings_is_told(desk: Desk, keys: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError, match=f"{key}: no metric 'bleu'") as raised:
        desk.check(**keys)
    assert "rouge_l" in raised.value.hint


def test_a_torch_without_cuda_is_told_before_the_gpu_is_waited_for(desk: Desk) -> None:
    if not (installed.version("torch") or "").endswith("+cpu"):
        pytest.skip("this torch has CUDA")
    gpu = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * 2**30, 80 * 2**30)
    with pytest.raises(EnvironmentInvalidError, match="built without CUDA"):
        preflight.check(desk.write(), Asked(desk.layout, config=Config(), device=gpu))
    spec_path = desk.write(resources={"gpus": 0})
    assert preflight.check(spec_path, Asked(desk.layout, config=Config(), device=gpu)).plan.device.kind == "cpu"


def test_an_output_directory_that_can_be_made_is_taken(desk: Desk) -> None:
    target = desk.path / "new/out"
    assert desk.check(output_dir=str(target)).output_dir == target
    assert not target.exists()


def test_an_output_directory_with_something_in_it_is_refused(desk: Desk) -> None:
    target = desk.path / "out"
    target.mkdir()
    (target / "precious.txt").write_text("x")
    with pytest.raises(SpecError, match=r"output_dir: .* is not empty \(it contains precious.txt\)"):
        desk.check(output_dir=str(target))


def test_only_the_jobs_own_output_is_written_again(desk: Desk) -> None:
    target = desk.path / "out"
    target.mkdir()
    manifest = {"job": {"id": 7, "instance": str(desk.layout.root)}}
    (target / "honed.json").write_text(json.dumps(manifest))
    assert desk.check(output_dir=str(target), job_id=7).output_dir == target
    for other in (8, None):
        with pytest.raises(SpecError, match="is not empty"):
            desk.check(output_dir=str(target), job_id=other)
    (target / "honed.json").write_text(json.dumps({"job": {"id": 7, "instance": "/elsewhere"}}))
    with pytest.raises(SpecError, match="is not empty"):
        desk.check(output_dir=str(target), job_id=7)


def test_an_output_directory_without_leave_is_refused(desk: Desk) -> None:
    (desk.path / "closed").mkdir(mode=0o555)
    path = desk.write(output_dir=str(desk.path / "closed/out"))
    # Root may write everywhere, unless that power is taken away.
    as_a_user = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*as_a_user, sys.executable, "-m", "honed.cli.honectl", "--root", str(desk.layout.root), "check", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stdout


def test_an_output_directory_behind_a_link_is_the_one_that_the_link_names(desk: Desk) -> None:
    (desk.path / "there").mkdir()
    for name, target in (("link", "there"), ("dangling", "not-yet")):
        (desk.path / name).symlink_to(desk.path / target)
        assert desk.check(output_dir=str(desk.path / name)).output_dir == (desk.path / target).resolve()


def test_an_output_directory_below_a_file_or_in_honeds_own_is_refused(desk: Desk) -> None:
    with pytest.raises(SpecError, match=r"rows.jsonl is a file|rows.jsonl.*Not a directory"):
        desk.check(output_dir=str(desk.rows / "out"))
    for ours in (desk.layout.jobs_dir / "3", desk.layout.spool_dir / "incoming", desk.path):
        with pytest.raises(SpecError, match="belongs to honed"):
            desk.check(output_dir=str(ours))


def test_checkpoints_that_do_not_fit_on_the_disk_are_told(desk: Desk) -> None:
    with pytest.raises(DiskShortError, match="is free") as raised:
        desk.check(lora={"r": 4096}, training={"save_total_limit": 10**8, "max_steps": 10**8})
    assert "save_total_limit" in raised.value.hint


def test_rows_that_do_not_fit_on_the_disk_are_told_with_numbers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are sampled: what they take is estimated from the first rows and the files' sizes."""
    turns = [{"role": "user", "content": "one two " * 60}, {"role": "assistant", "content": "three " * 80}]
    line = json.dumps({"messages": turns}) + "\n"
    desk.rows.write_text(line * 5000)
    rows = desk.check().plan.rows
    assert 4900 < rows.num_rows < 5100
    assert 2 * desk.rows.stat().st_size < rows.disk_bytes < 4 * desk.rows.stat().st_size
    assert rows.memory_bytes < 200 * 2**20
    cut = desk.check(training={"max_length": 16}).plan.rows
    assert cut.disk_bytes < rows.disk_bytes
    assert 99 < desk.check(datasets=[{"path": str(desk.rows), "max_rows": 100}]).plan.rows.num_rows < 101
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": rows.disk_bytes // 2}))
    told = r"about .* is needed \(.*encoded rows .*\), but only .* is free"
    with pytest.raises(DiskShortError, match=told) as raised:
        desk.check()
    assert "max_rows" in raised.value.hint
    assert "honectl prune --rows" not in raised.value.message
    cached = desk.layout.rows_dir / str(os.geteuid()) / ("0" * 32) / "tokens.arrow"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(bytes(2**21))
    with pytest.raises(DiskShortError, match=r"encoded rows of earlier jobs take [23] MiB \(honectl prune --rows\)"):
        desk.check()


def test_rows_that_do_not_fit_in_host_memory_are_told(desk: Desk) -> None:
    plain.write_dataset(desk.rows, num_rows=500)
    with desk.rows.open("r+b") as file:
        file.truncate(2**43)  # sparse: only the first rows are read
    told = r"encoding about [\d,]+ rows needs about .* of host memory, but"
    with pytest.raises(MemoryShortError, match=told) as raised:
        desk.check()
    assert ".jsonl" in raised.value.hint


def test_each_rank_needs_host_memory_beside_its_device(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", "GPU", 0, "GPU-0", (9, 0), 80 * 2**30, 80 * 2**30)
    gpus.variables(desk.path / "gpus", 4)
    monkeypatch.syspath_prepend(desk.path / "gpus")

    def planned(num_gpus: int) -> Plan:
        spec_path = desk.write(resources={"gpus": num_gpus})
        made = preflight.check(spec_path, Asked(desk.layout, config=Config(), device=gpu)).plan
        assert made is not None
        return made

    made = planned(4)
    parts = placecheck.host_parts(made)
    assert parts["libraries"] == 4 * placecheck.PROCESS_BYTES
    assert parts["rows"] > made.rows.memory_bytes
    machine = Device("cpu", "CPU", total_bytes=sum(parts.values()) - 1)
    monkeypatch.setattr("honed.check.placecheck.cpu", lambda: machine)
    told = r"4 processes on one machine need about .* of host memory \(libraries .*, rows .*\), but"
    with pytest.raises(MemoryShortError, match=told) as raised:
        planned(4)
    assert "resources.gpus" in raised.value.hint
    assert planned(2).parallel.num_ranks == 2
    divided = placecheck.host_parts(replace(made, parallel=replace(made.parallel, mode="fsdp")))
    assert divided["weights"] == 4 * made.model.num_parameters * 2  # bfloat16


def test_a_merged_model_and_every_checkpoint_count_for_the_disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(**keys: Any) -> int:
        """Return the number of bytes needed: the smallest free disk space that is enough."""
        low, high = 0, 2**20
        while low < high:
            free = (low + high) // 2
            monkeypatch.setattr("shutil.disk_usage", lambda _path, free=free: type("Usage", (), {"free": free}))
            try:
                desk.check(**keys)
            except DiskShortError:
                low = free + 1
            else:
                high = free
        return low

    rows = desk.check().plan.rows.disk_bytes
    many = {"max_steps": 100}
    plain_job = needed(lora={"r": 4}, training=many)
    beside = sum((desk.path / "model" / name).stat().st_size for name in ("tokenizer.json", "tokenizer_config.json"))
    each = 544 * 4 + 544 * 8 + 14 * 4 + beside  # adapter, two states and a step a matrix, tokenizer
    # Two are kept, and a third is written before one of them goes.
    assert plain_job == 3 * each + 544 * 4 + beside + rows
    assert needed(lora={"r": 4}, training=many | {"save_total_limit": 4}) == plain_job + 2 * each
    assert needed(lora={"r": 4}, save_merged="bfloat16", training=many) == plain_job + 1176 * 2 + beside


def test_a_job_that_can_never_fit_is_refused_with_what_would(desk: Desk) -> None:
    small = Device("cpu", "a small processor", total_bytes=2**29 + 2**20, free_bytes=2**29)  # 1 MiB above the reserve
    plain.write_dataset(desk.rows, num_rows=512)
    with pytest.raises(MemoryShortError, match=r"needed \(.*weights .* but a small processor has only 1 MiB") as raised:
        preflight.check(
            desk.write(training={"per_device_train_batch_size": 512}), Asked(desk.layout, config=Config(), device=small)
        )
    assert "per_device_train_batch_size: " in raised.value.hint
    plain.write_dataset(desk.rows, num_rows=2)  # no batch can have more
    path = desk.write(training={"per_device_train_batch_size": 512})
    assert preflight.check(path, Asked(desk.layout, config=Config(), device=small)).plan.memory.batch_size == 2


def test_the_length_of_rows_is_taken_from_the_data(desk: Desk) -> None:
    length = desk.check().plan.memory.length
    assert 0 < length < 20
    desk.rows.write_text(json.dumps({"text": "one two " * 4000}) + "\n")
    assert desk.check().plan.memory.length == 1024  # where rows are cut


@pytest.mark.parametrize("what", ["model", "rows.jsonl"])
def test_what_cannot_be_read_is_told_without_a_traceback(desk: Desk, what: str) -> None:
    path = desk.path / what
    (path / "config.json" if path.is_dir() else path).unlink()
    (path / "config.json" if path.is_dir() else path).symlink_to("loop")
    ((path if path.is_dir() else desk.path) / "loop").symlink_to("loop")
    with pytest.raises(HonedError) as raised:
        desk.check()
    assert raised.value.code != "error"


#: A regular file to stat(2), which no process can read at its beginning: EIO, as of a faulty disk.
UNREADABLE = Path("/proc/self/mem")


@pytest.mark.parametrize("name", ["model/config.json", "rows.jsonl", "rows.parquet"])
def test_a_fault_of_the_machine_refuses_nothing(desk: Desk, name: str) -> None:
    path = desk.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(UNREADABLE)
    keys = {"datasets": [{"path": str(path)}]} if name.startswith("rows") else {}
    with pytest.raises(DegradedError, match=f"{name}: Input/output error" if keys else "Input/output error"):
        desk.check(**keys)


def test_a_template_on_a_faulty_disk_refuses_nothing(desk: Desk) -> None:
    with pytest.raises(DegradedError, match=f"chat_template: {UNREADABLE}: .*Input/output error"):
        desk.check(chat_template=str(UNREADABLE))


def test_an_image_on_a_faulty_disk_is_skipped_and_refuses_nothing(desk: Desk) -> None:
    desk.edit_config(model_type="qwen3_vl", vision_config={"depth": 2})
    (desk.model / "preprocessor_config.json").write_text("{}")
    write_pictures(desk, "good.png", "bad.png")
    (desk.path / "bad.png").symlink_to(UNREADABLE)
    (warning,) = desk.check(UNREHEARSED).warnings
    assert "1 of the first 2 rows with media have an unusable file, and will be skipped" in warning
    with pytest.raises(DegradedError, match="Input/output error"):
        desk.check(UNREHEARSED, media={"broken": "refuse"})


# --- The helper -------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a test can set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Daemon:
    """The part of the daemon's loop that drives the helper."""

    def __init__(self, layout: Layout, command: list[str] | None = None) -> None:
        self.clock = Clock()
        self.selector = selectors.DefaultSelector()
        self.client = Checker(children(layout, command), self._follow, clock=self.clock)
        self.num_starts = 0

    def _follow(self, old: int | None, new: int | None) -> None:
        if old is not None:
            self.selector.unregister(old)
        if new is not None:
            self.num_starts += 1
            self.selector.register(new, selectors.EVENT_READ)

    def submit(self, number: int, spec_path: Path, config: Config, device: Device) -> None:
        self.client.submit(Request(number, PersonPath.own(spec_path), config, device))

    def answers(self, count: int) -> list[Answer]:
        found: list[Answer] = []

        def turn(_sec: float) -> None:
            self.selector.select(0.1)
            found.extend(self.client.poll())

        wait_for(lambda: len(found) >= count, what=f"{count} answers", account=lambda: found, pause=turn)
        return found

    def _turn(self, _sec: float) -> None:
        self.selector.select(0.01)
        assert self.client.poll() == []

    def wait_stage(self, stage: str) -> None:
        seat = self.client._seats[0]
        wait_for(lambda: seat.slot.stage() == stage, what=stage, account=seat.slot.stage, pause=self._turn)

    def wait_sent(self, num_helpers: int = 1) -> None:
        """Wait until the current request was sent to its first helper, or to a later one."""
        seat = self.client._seats[0]
        wait_for(
            lambda: seat.current is not None and seat.current.num_helpers == num_helpers,
            what=f"sent to helper {num_helpers}",
            pause=self._turn,
        )

    def helper_pid(self) -> int:
        assert isinstance(self.client._seats[0].slot._helper, ChildHelper)
        return self.client._seats[0].slot._helper.process.pid

    def close(self) -> None:
        self.client.close()
        self.selector.close()


def error_of(answer: Answer) -> HonedError:
    assert isinstance(answer, Refused), answer
    return answer.error


@pytest.fixture
def daemon(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    daemon = Daemon(desk.layout)
    yield daemon
    daemon.close()


def test_the_helper_answers_in_order(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    first = daemon.answers(1)[0]
    assert isinstance(first, Passed), first
    assert first.id == 1
    assert JobSpec.model_validate(first.spec).base_model == str(desk.model)
    assert first.plan.base_model_path == desk.model
    assert first.output_dir == str(desk.layout.job(1).output_dir)
    for number in range(2, 22):
        daemon.submit(number, desk.write(), Config(), CPU)
    answers = daemon.answers(20)
    assert [answer.id for answer in answers] == list(range(2, 22))
    assert daemon.num_starts == 1


def test_a_spec_survives_the_way_through_the_helper(desk: Desk, daemon: Daemon) -> None:
    path = desk.write(training={"learning_rate": 2e-4, "num_train_epochs": 3}, eval_split=0.1)
    daemon.submit(1, path, Config(), CPU)
    answer = daemon.answers(1)[0]
    sent = preflight.check(path, Asked(desk.layout, config=Config(), device=CPU)).spec
    assert isinstance(answer, Passed), answer
    assert JobSpec.model_validate(answer.spec) == sent
    assert answer.spec["training"] == {"learning_rate": 2e-4, "num_train_epochs": 3}


@pytest.mark.parametrize(
    ("swept", "training", "words"),
    [
        ({"eval_split": [0.1, 0.3]}, {}, "eval_split gives the jobs different rows"),
        ({"lora.r": [2, 4]}, {"num_train_epochs": 1, "eval_strategy": "epoch"}, "the only evaluation is at the last"),
        ({"lora.r": [2, 4]}, {"eval_strategy": "no"}, "they are not evaluated"),
        ({"lora.r": [2, 4]}, {"max_steps": 2}, "is not before the last step"),
    ],
)
def test_halving_that_could_not_work_is_refused(
    desk: Desk, swept: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        desk.check(sweep={**swept, "halving": {"min_steps": 2}}, lora={"r": 2}, eval_split=0.2, training=training)


def test_the_helper_reads_the_rows_of_a_sweep_once(desk: Desk, daemon: Daemon) -> None:
    text = "x" * 100_000
    desk.rows.write_text(f'{{"text": "{text}"}}\n' * 200)
    time.sleep(datacheck.SETTLED_NS / 1e9 + 0.1)

    def num_read() -> int:
        (told,) = [line for line in Path(f"/proc/{daemon.helper_pid()}/io").read_text().splitlines() if "rchar" in line]
        return int(told.split()[1])

    daemon.submit(1, desk.write("a.json"), Config(), CPU)
    assert isinstance(daemon.answers(1)[0], Passed)
    first = num_read()
    daemon.submit(2, desk.write("b.json", priority=7), Config(), CPU)
    assert isinstance(daemon.answers(1)[0], Passed)
    assert first > 200 * len(text)
    assert num_read() - first < 50 * len(text)


def test_a_refusal_keeps_its_code_and_remedy(desk: Desk, daemon: Daemon) -> None:
    (desk.model / "model.safetensors").unlink()
    daemon.submit(1, desk.write(), Config(), CPU)
    error = error_of(daemon.answers(1)[0])
    assert error.code == "model_invalid"
    assert "no weights" in error.message
    assert error.hint


def test_the_helper_imports_no_torch_and_has_limits(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.answers(1)
    process = Path(f"/proc/{daemon.helper_pid()}")
    assert "libtorch" not in (process / "maps").read_text()
    limits = (process / "limits").read_text()
    assert f"Max address space         {preflight.MAX_HELPER_BYTES}" in limits
    assert "Max core file size        0 " in limits


def test_pipes_and_endless_files_cost_only_their_own_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    command = [
        sys.executable,
        "-m",
        "honed.check.preflight",
        "--root",
        str(desk.layout.root),
        "--max-bytes",
        str(2**29),
    ]
    daemon = Daemon(desk.layout, command)
    os.mkfifo(desk.path / "pipe.jsonl")
    os.mkfifo(desk.path / "pipe.json")
    with (desk.path / "huge.jsonl").open("wb") as file:
        file.truncate(2**40)  # one line of a terabyte
    endless = (str(desk.path / "pipe.jsonl"), "/dev/zero", str(desk.path / "huge.jsonl"))
    for number, path in enumerate(endless, start=1):
        daemon.submit(number, desk.write(f"{number}.json", datasets=[{"path": path}]), Config(), CPU)
    daemon.submit(4, desk.path / "pipe.json", Config(), CPU)
    daemon.submit(5, desk.write("5.json"), Config(), CPU)
    answers = daemon.answers(5)
    daemon.close()
    codes = [isinstance(answer, Passed) or answer.error.code for answer in answers]
    assert codes == ["dataset_invalid", "dataset_invalid", "dataset_invalid", "spec_invalid", True]
    assert daemon.num_starts == 1


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Make opening the file block, as on a network file system that does not answer: a lease (fcntl(2)), which its
    holder keeps until the kernel revokes it after 45 s."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the signal that somebody opens the file
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_what_takes_too_long_is_refused_with_the_stage_it_was_in(desk: Desk, daemon: Daemon) -> None:
    slow = desk.path / "slow.jsonl"
    slow.write_text('{"text": "a"}\n')
    with held(slow):
        job = desk.write("slow.json", datasets=[{"path": str(slow)}])
        daemon.submit(1, job, Config(spool=SpoolConfig(preflight_timeout_sec=600)), CPU)
        daemon.submit(2, desk.write(), Config(), CPU)
        daemon.wait_stage("datasets")
        daemon.clock.ahead = 601
        answers = daemon.answers(2)
    assert error_of(answers[0]).code == "environment_invalid"
    assert "the check did not finish within 600 s; it was at: datasets" in error_of(answers[0]).message
    assert isinstance(answers[1], Passed)
    assert daemon.num_starts == 2


def test_a_deadline_that_passes_in_silence_is_noticed_by_the_clock(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.wait_sent()
    os.kill(daemon.helper_pid(), signal.SIGSTOP)
    assert daemon.client.poll() == []
    assert daemon.client.deadline is not None
    daemon.clock.ahead = 61.0
    answer = daemon.client.poll()[0]
    assert "within 60 s" in error_of(answer).message
    assert not daemon.client.has_helper


def test_a_helper_killed_in_the_middle_is_started_again_once(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.wait_sent()
    os.kill(daemon.helper_pid(), signal.SIGKILL)
    assert isinstance(daemon.answers(1)[0], Passed)
    assert daemon.num_starts == 2


def test_a_job_that_kills_two_helpers_is_refused_and_the_next_one_checked(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.submit(2, desk.write(), Config(), CPU)
    for number in (1, 2):
        daemon.wait_sent(number)
        os.kill(daemon.helper_pid(), signal.SIGKILL)
    answers = daemon.answers(2)
    assert error_of(answers[0]).code == "environment_invalid"
    assert "died 2 times" in error_of(answers[0]).message
    assert isinstance(answers[1], Passed)


def test_a_helper_without_descriptors_refuses_nothing_and_is_replaced(
    desk: Desk, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    assert isinstance(daemon.answers(1)[0], Passed)
    first = daemon.helper_pid()
    num_open = len(list(Path(f"/proc/{first}/fd").iterdir()))
    resource.prlimit(first, resource.RLIMIT_NOFILE, (num_open, num_open))
    daemon.submit(2, desk.write(), Config(), CPU)
    wait_for(lambda: daemon.client.stuck() == {2}, what="the fault", pause=daemon._turn)
    assert daemon.client.why_stuck == "the machine keeps a file that the job names from being read"
    assert "job 2: not checked yet: " in caplog.text
    assert os.strerror(errno.EMFILE) in caplog.text
    daemon.clock.ahead += MAX_PAUSE_SEC
    assert isinstance(daemon.answers(1)[0], Passed)
    assert daemon.helper_pid() != first
    assert daemon.client.stuck() == set()


def test_a_helper_that_dies_in_idleness_is_replaced(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.answers(1)
    os.kill(daemon.helper_pid(), signal.SIGKILL)
    daemon.submit(2, desk.write(), Config(), CPU)
    assert isinstance(daemon.answers(1)[0], Passed)


def speaking(words: str) -> list[str]:
    """Return the command of a helper that gets ready, and runs this code at its first request."""
    lines = (
        f"print({READY.decode()!r}, flush=True)",
        "sys.stdin.readline()",
        "sys.stdin.readline()",
        words,
        "sys.stdin.readline()",
    )
    return [sys.executable, "-c", "\n".join(["import sys", *lines])]


ACCEPTED: dict[str, Any] = {
    "id": 1,
    "ok": True,
    "spec": {"kind": "sft", "retry": {"max_attempts": 3}, "resources": {"gpus": 1}},
    "plan": {},
    "output_dir": "/o",
    "warnings": [],
    "lines": {},
    "references": {},
    "waits_for": {},
    "needs_fetch": None,
}


def but(**keys: Any) -> str:
    return json.dumps({**ACCEPTED, **keys})


def but_spec(**keys: Any) -> str:
    return but(spec={**ACCEPTED["spec"], **keys})


def test_an_answer_of_the_right_shape_is_taken(desk: Desk) -> None:
    daemon = Daemon(desk.layout, speaking(f"print({but()!r}, flush=True)"))
    daemon.submit(1, desk.write(), Config(), CPU)
    assert [json.loads(answer.to_line()) for answer in daemon.answers(1)] == [ACCEPTED]
    daemon.close()


#: Answers that an attacker in control of a helper could send; each would raise an exception somewhere.
NONSENSE = {
    "a word": "hello",
    "a list": "[]",
    "another number": but(id=9),
    "neither yes nor no": but(ok="perhaps"),
    "depth": "[" * 100_000,
    "a spec without attempts": but(spec={"kind": "sft", "resources": {"gpus": 1}}),
    "a number for a name": but_spec(name=7),
    "half a character for a name": but_spec(name="\ud800"),
    "attempts that no database holds": but_spec(retry={"max_attempts": 2**70}),
    "a number of thousands of digits": but_spec(depends_on=["9" * 5000]),
    "a path that no system takes": but(output_dir="/a\0b"),
    "names that are none": but(references={"base_model": ["a"]}),
    "a fetch of nothing": but(needs_fetch={"repo_id": "a/b"}),
    "an error without a word": '{"id": 1, "ok": false, "error": {}}',
    "an error with a number for evidence": json.dumps(
        {"id": 1, "ok": False, "error": {"code": "error", "message": "no", "hint": "", "evidence": 7}}
    ),
    "no end": "x" * (MAX_ANSWER_BYTES + 100_000),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_helper_that_talks_nonsense_is_no_helper(desk: Desk, what: str, tmp_path: Path) -> None:
    (tmp_path / "said").write_text(NONSENSE[what])
    daemon = Daemon(desk.layout, speaking(f"print(open({str(tmp_path / 'said')!r}).read(), flush=True)"))
    daemon.submit(1, desk.write(), Config(), CPU)
    assert "died 2 times" in error_of(daemon.answers(1)[0]).message
    daemon.close()


def test_a_helper_that_never_becomes_ready_costs_no_job(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """The start is retried with growing delays, and logged once."""
    caplog.set_level("INFO")
    is_whole = desk.path / "whole"
    lines = (
        "import os, sys",
        f"if not os.path.exists({str(is_whole)!r}): sys.exit(1)",
        "from honed.check import preflight",
    )
    daemon = Daemon(desk.layout, [sys.executable, "-c", "\n".join([*lines, "preflight.main()"])])
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.submit(2, desk.write(), Config(), CPU)
    until = time.monotonic() + 120
    while daemon.num_starts < 3:
        assert time.monotonic() < until
        daemon.selector.select(0.05)
        assert daemon.client.poll() == []
    assert daemon.client.stuck() == {1, 2}
    assert daemon.client.fault == "it ended before it was ready; see the journal"
    assert caplog.text.count("cannot be started, so job files wait") == 1
    is_whole.touch()
    assert all(isinstance(answer, Passed) for answer in daemon.answers(2))
    assert daemon.client.stuck() == set()
    assert "can be started again" in caplog.text
    daemon.close()


def test_a_helper_that_is_not_ready_in_time_is_tried_again(desk: Desk) -> None:
    daemon = Daemon(desk.layout, [sys.executable, "-c", "import sys; sys.stdin.read()"])
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.clock.ahead = START_TIMEOUT_SEC + 1
    assert daemon.client.poll() == []
    assert daemon.client.stuck() == {1}
    assert not daemon.client.has_helper
    daemon.clock.ahead *= 2
    assert daemon.client.poll() == []
    assert daemon.num_starts == 2
    daemon.close()


def test_a_job_file_that_is_gone_is_refused(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.path / "gone.json", Config(), CPU)
    error = error_of(daemon.answers(1)[0])
    assert error.code == "spec_invalid"
    assert error.message == "gone.json cannot be read: No such file or directory"


@pytest.mark.timeout(120)
def test_a_helper_that_does_not_read_holds_nobody_up(desk: Desk) -> None:
    """The job file is larger than a socket's buffer; the user who dropped it may also have stopped the helper."""
    large = desk.write("large.json", chat_template_kwargs={"note": "x" * 250_000})
    daemon = Daemon(desk.layout)
    daemon.submit(1, desk.write(), Config(), CPU)
    daemon.answers(1)
    os.kill(daemon.helper_pid(), signal.SIGSTOP)
    for number in range(2, 6):
        daemon.submit(number, large, Config(), CPU)  # or it would wait for the helper, which is stopped, for ever
    assert daemon.client.poll() == []
    os.kill(daemon.helper_pid(), signal.SIGCONT)
    assert [isinstance(answer, Passed) for answer in daemon.answers(4)] == [True] * 4
    daemon.close()


def test_bad_requests_do_not_end_the_helper(desk: Desk) -> None:
    path = desk.write()
    good = {
        "id": 3,
        "spec_name": path.name,
        "spec": base64.b64encode(path.read_bytes()).decode(),
        "config": {},
        "device": asdict(CPU),
        "uid": None,
        "earlier": asdict(Earlier()),
    }
    lines = ["not json", "[]", '{"id": 2}', json.dumps(good)]
    done = subprocess.run(
        [sys.executable, "-m", "honed.check.preflight", "--root", str(desk.layout.root)],
        input="\n".join(lines) + "\n",
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        check=True,
        text=True,
    )
    ready, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready == {"ready": True}
    assert [answer["ok"] for answer in answers] == [False, False, False, True]
    assert [answer["error"]["code"] for answer in answers[:3]] == ["error", "error", "error"]


def test_a_tokenizer_without_a_limit_is_one_that_transformers_writes(desk: Desk) -> None:
    written = json.loads((desk.model / "tokenizer_config.json").read_text()) | {"model_max_length": int(1e30)}
    (desk.model / "tokenizer_config.json").write_text(json.dumps(written))
    assert desk.check().plan is not None


@pytest.mark.parametrize("is_rehearsed", [False, True])
def test_the_stages_are_told_in_their_order(desk: Desk, is_rehearsed: bool) -> None:
    """The stage of a rehearsal is told where one runs: the daemon gives the others another helper beside it."""
    stages: list[str] = []
    config = Config.model_validate({"spool": {"rehearsal_cpu_sec": 1}})  # enough to begin
    path = desk.write(lora={"use_dora": is_rehearsed})
    preflight.check(path, Asked(desk.layout, config=config, device=CPU, progress=stages.append))
    assert stages == [
        "spec",
        "permissions",
        "base model",
        "adapter",
        "chat template",
        "datasets",
        "rows in the chat template",
        "packages",
        "plan",
        "memory",
        "output directory",
        "disk",
        *(["a step on a small model"] if is_rehearsed else []),
    ]
    assert max(map(len, stages)) <= STAGE_BYTES


def test_a_stage_that_cannot_be_told_refuses_no_job(desk: Desk, daemon: Daemon) -> None:
    slot = daemon.client._seats[0].slot
    slot._stage_file.close()
    sealed_fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed_fd, STAGE_BYTES)
    fcntl.fcntl(sealed_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    slot._stage_file = os.fdopen(sealed_fd, "r+b", buffering=0)
    daemon.submit(1, desk.write(), Config(), CPU)
    [answer] = daemon.answers(1)
    assert isinstance(answer, Passed), answer


def test_a_template_without_an_end_costs_its_own_job_and_is_told(desk: Desk, daemon: Daemon) -> None:
    endless = desk.path / "endless.jinja"
    loops = "".join(f"{{% for a{n} in range(99999) %}}" for n in range(4))
    endless.write_text(f"{loops}{'{% endfor %}' * 4}{{{{ messages[0].content }}}}")
    daemon.submit(1, desk.write("endless.json", chat_template=str(endless)), Config(), CPU)
    daemon.wait_stage("rows in the chat template")
    daemon.clock.ahead = 1e6
    [answer] = daemon.answers(1)
    assert error_of(answer).code == "environment_invalid"
    assert error_of(answer).message.endswith("it was at: rows in the chat template")


def test_closing_ends_the_helper(desk: Desk, daemon: Daemon) -> None:
    daemon.submit(1, desk.write(), Config(), CPU)
    pid = daemon.helper_pid()
    daemon.client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
