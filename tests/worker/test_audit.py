"""Every difference that a loaded model can have from its plan, planted in real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.job.event import EventWriter
from honed.job.plan_file import Precision
from honed.system.error import PrecisionError
from honed.worker import assignment as assignments
from honed.worker.model import audit, load
from worker.conftest import Ended, MakeJob, WorkerJob, read_events

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
OFF = {"sample_frequency": "off"}


class Bench:
    """A model as the worker loads it, with its plan, and its audits' events."""

    def __init__(self, job: Any, *, is_adapted: bool = True) -> None:
        self.events_path = job.dir / "audit.jsonl"
        events = EventWriter(self.events_path)
        self.job = assignments.read(job.dir, 1)
        self.precision: Precision = self.job.precision
        self.auditor = audit.Auditor(self.precision, events)
        backend = load.choose("transformers")
        self.model = backend.load_base(self.job)
        load.freeze(self.model, self.job)
        if is_adapted:
            self.model = backend.attach_adapter(self.model, self.job)

    def look(self, when: str = "adapted") -> audit.Audit:
        return self.auditor.model(self.model, when)

    def parameter(self, ending: str) -> Any:
        return next(each for name, each in self.model.named_parameters() if name.endswith(ending))

    def cast(self, ending: str, dtype: torch.dtype) -> None:
        parameter = self.parameter(ending)
        parameter.data = parameter.data.to(dtype)

    def told(self) -> list[str]:
        return [item.data["message"] for item in read_events(self.events_path) if item.kind == "log"]


@pytest.fixture
def bench(make_job: MakeJob) -> Callable[..., Bench]:
    def build(family: str = "llama", *, is_adapted: bool = True, **keys: Any) -> Bench:
        return Bench(make_job(family, **{"lora": LORA, "dtype": "bfloat16"} | keys), is_adapted=is_adapted)

    return build


def counts(found: audit.Audit) -> dict[tuple[str, str], int]:
    return {(each.role, each.dtype): each.num_parameters for each in found.counts}


def test_parameters_are_counted_by_role_dtype_and_device(bench: Callable[..., Bench]) -> None:
    found = bench().look()
    assert counts(found) == {
        ("adapter", "float32"): 2 * 2 * 4 * (64 + 64) - 2 * 4 * 32,  # v_proj has half the rows
        ("base", "bfloat16"): sum(n for (role, _), n in counts(found).items() if role == "base"),
        ("norm", "bfloat16"): 5 * 64,
    }
    assert {each.device for each in found.counts} == {"cpu"}
    assert (found.model_dtype, found.config_dtype, found.embedding_dtype) == ("bfloat16",) * 3
    assert found.mended == ()


def test_a_base_weight_in_float32_is_mended_and_said(bench: Callable[..., Bench]) -> None:
    a = bench()
    a.cast("layers.1.mlp.up_proj.weight", torch.float32)
    assert a.look().mended == ("1 base weights were float32, now bfloat16",)
    assert a.told() == ["audit (adapted): 1 base weights were float32, now bfloat16"]
    assert a.parameter("layers.1.mlp.up_proj.weight").dtype is torch.bfloat16
    assert a.look().mended == ()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_base_weight_that_has_lost_bits_is_refused_by_name(bench: Callable[..., Bench], dtype: str) -> None:
    a = bench()
    a.cast("layers.1.mlp.up_proj.weight", getattr(torch, dtype))
    with pytest.raises(PrecisionError, match=rf"planned bfloat16, but .*layers\.1\.mlp\.up_proj\.weight is {dtype}"):
        a.look()


def test_a_whole_model_in_the_wrong_half_is_refused_with_some_names_and_the_number_of_the_rest(
    bench: Callable[..., Bench],
) -> None:
    a = bench()
    a.auditor = audit.Auditor(replace(a.precision, load_dtype="float16"), EventWriter(a.events_path))
    with pytest.raises(PrecisionError, match=r"embed_tokens\.weight is bfloat16;.* and \d+ more"):
        a.look()


def test_a_full_fine_tunings_weight_in_half_is_refused_and_not_rounded_up(bench: Callable[..., Bench]) -> None:
    a = bench(lora=None, dtype="float32")
    a.cast("layers.0.mlp.up_proj.weight", torch.bfloat16)
    with pytest.raises(PrecisionError, match="planned float32"):
        a.look()


def test_an_adapter_in_half_under_fp16_goes_back_to_float32(bench: Callable[..., Bench]) -> None:
    a = bench(dtype="float16")
    assert a.precision.adapter_dtype == "float32"
    a.cast("layers.0.self_attn.q_proj.lora_A.default.weight", torch.float16)
    assert a.look().mended == ("1 trained weights were float16, now float32",)
    assert counts(a.look())["adapter", "float32"] == sum(
        number for (role, _), number in counts(a.look()).items() if role == "adapter"
    )


def test_whole_modules_beside_an_adapter_count_as_trained_and_not_as_the_models_dtype(
    bench: Callable[..., Bench],
) -> None:
    a = bench(lora=LORA | {"modules_to_save": ["embed_tokens", "lm_head"]})
    a.cast("embed_tokens.modules_to_save.default.weight", torch.bfloat16)
    found = a.look()
    assert found.mended == ("1 trained weights were bfloat16, now float32",)
    assert (found.model_dtype, found.embedding_dtype) == ("bfloat16", "float32")


def test_a_norm_kept_in_float32_is_no_difference(bench: Callable[..., Bench]) -> None:
    a = bench()
    a.cast("model.norm.weight", torch.float32)
    found = a.look()
    assert found.mended == ()
    assert counts(found)["norm", "float32"] == 64
    assert found.model_dtype == "bfloat16"


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_config_that_lies_is_corrected(bench: Callable[..., Bench], is_adapted: bool) -> None:
    a = bench(is_adapted=is_adapted)
    a.model.config.dtype = torch.float32  # Unsloth: "model is in float32, but you want …"
    assert a.look().mended == ("model.config.dtype said float32, now bfloat16",)
    assert a.model.config.dtype is torch.bfloat16


def test_a_parameter_on_the_meta_device_is_passed_over(bench: Callable[..., Bench]) -> None:
    a = bench()
    a.model.base_model.model.lm_head.weight = torch.nn.Parameter(
        torch.empty(8, 64, dtype=torch.float16, device="meta"), requires_grad=False
    )
    found = a.look()
    assert counts(found)["meta", "float16"] == 8 * 64
    assert (found.model_dtype, found.mended) == ("bfloat16", ())


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantized_storage_is_counted_as_what_it_stands_for(bench: Callable[..., Bench], quantization: str) -> None:
    a = bench(quantization=quantization, is_adapted=False)
    found = a.look("loaded")
    plain = bench(is_adapted=False).look("loaded")
    [number] = [number for (role, _), number in counts(found).items() if role == "quantized"]
    assert number + counts(found)["base", "bfloat16"] == counts(plain)["base", "bfloat16"]
    assert (found.quantization, found.model_dtype) == (quantization, "bfloat16")


def test_quantization_that_was_left_out_or_is_another_is_refused(bench: Callable[..., Bench]) -> None:
    for planned, found, words in [("8bit", "none", "not quantized"), ("8bit", "4bit", "quantized to 4bit")]:
        a = bench(quantization=found)
        a.auditor = audit.Auditor(replace(a.precision, quantization=planned), EventWriter(a.events_path))
        with pytest.raises(PrecisionError, match=f"planned quantization {planned}, .* is {words}"):
            a.look()


def test_layers_that_compute_in_another_dtype_than_they_are_loaded_in_are_mended(bench: Callable[..., Bench]) -> None:
    a = bench(quantization="4bit")
    layer = next(module for module in a.model.modules() if type(module).__name__ == "Linear4bit")
    layer.compute_dtype = torch.float16
    assert a.look().mended == ("1 4-bit layers computed in float16, now bfloat16",)
    assert layer.compute_dtype is torch.bfloat16


# --- The trainer ------------------------------------------------------------------------------------------------------


def trainer_of(a: Bench, tmp_path: Path, **flags: bool) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2, "labels": [[1, 2, 3]] * 2})
    arguments = SFTConfig(
        str(tmp_path / "out"),
        use_cpu=True,
        loss_type="nll",
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
        **flags,
    )
    tokenizer = load.load_tokenizer(a.job)
    return SFTTrainer(a.model, args=arguments, train_dataset=rows, processing_class=tokenizer)


def test_a_flag_flipped_after_the_trainer_was_built_is_refused(bench: Callable[..., Bench], tmp_path: Path) -> None:
    a = bench()
    trainer = trainer_of(a, tmp_path, bf16=True)
    a.auditor.trainer(trainer)
    trainer.args.bf16, trainer.args.fp16 = False, True
    with pytest.raises(PrecisionError, match="planned bf16=True fp16=False, but the trainer has bf16=False fp16=True"):
        a.auditor.trainer(trainer)


def test_fp16_that_accelerate_only_names_is_refused(bench: Callable[..., Bench], tmp_path: Path) -> None:
    a = bench(dtype="float32")
    trainer = trainer_of(a, tmp_path, fp16=True, bf16=False)
    planned = replace(a.precision, fp16=True)
    audit.check_arguments(trainer.args, planned)
    with pytest.raises(PrecisionError, match="accelerate uses mixed_precision=fp16 autocast=False scaler=False"):
        audit.check_accelerator(trainer.accelerator, planned)


def test_autocast_that_the_environment_brings_in_is_refused_before_the_first_step(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ended = make_job("llama", lora=LORA, dtype="float32", predictions=OFF, training={"max_steps": 1}).run()
    assert ended.status == 80, ended.result
    assert "mixed_precision=bf16" in ended.result["error"]["message"]
    assert not ended.of("step")


# --- A run ------------------------------------------------------------------------------------------------------------


def adapters(ended: Ended) -> list[tuple[str, set[str]]]:
    """Return each audit with the dtypes of its adapter."""
    return [
        (item["when"], {each["dtype"] for each in item["counts"] if each["role"] == "adapter"})
        for item in ended.of("audit")
    ]


QLORA: dict[str, Any] = {"lora": LORA, "quantization": "4bit", "dtype": "bfloat16", "predictions": OFF}


def test_every_audit_of_a_run_is_told_and_a_resume_does_not_change_precision(make_job: MakeJob) -> None:
    job = make_job("llama", **QLORA, training={"max_steps": 3})
    first = job.stopped_at(1)
    assert adapters(first) == [("loaded", set()), ("adapted", {"float32"}), ("built", {"float32"})]
    [line] = [text for text in first.messages("info") if "detected" in text]
    assert "detected model dtype: bfloat16, 4bit weights" in line
    assert "training precision: bf16 autocast, adapter in float32 (load_dtype: as the job asks" in line
    second = job.run(2)
    assert second.status == 0, second.result
    assert adapters(second)[-1] == ("resumed", {"float32"})


def test_a_job_that_was_planned_with_adapters_in_bfloat16_ends_as_it_began(make_job: MakeJob) -> None:
    """Every QLoRA job was planned so until adapters became float32; `adapter_dtype` asks for the same."""
    job, named = (
        make_job("llama", **QLORA, training={"max_steps": 3}),
        make_job("llama", **QLORA, adapter_dtype="bfloat16"),
    )
    spec = {key: value for key, value in job.plan["spec"].items() if key != "adapter_dtype"}
    old = job.plan["precision"] | {"adapter_dtype": "bfloat16"}
    job.change_plan(spec=spec, precision=old)
    assert adapters(job.stopped_at(1))[-1] == ("built", {"bfloat16"})
    second = job.run(2)
    assert second.status == 0, second.result
    assert adapters(second)[-1] == ("resumed", {"bfloat16"})
    assert second.of("audit")[-1]["mended"] == []  # peft's load would cast them to float32 and back
    assert {str(weight.dtype) for weight in exported(job).values()} == {"torch.bfloat16"}
    assert named.plan["precision"]["adapter_dtype"] == "bfloat16"
    assert "adapter_dtype: adapters in bfloat16 lose updates" in named.plan["warnings"][0]


def test_an_adapter_that_is_stored_in_bfloat16_goes_on_in_float32(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("llama", **QLORA, training={"max_steps": 2})
    assert job.run().status == 0
    halved = {name: weight.bfloat16() for name, weight in exported(job).items()}
    save_file(halved, job.output_dir / "adapter_model.safetensors", metadata={"format": "pt"})
    still = {"max_steps": 1, "learning_rate": 1e-30}
    for quantization in ("4bit", "none"):
        keys = {**QLORA, "lora": None, "quantization": quantization, "adapter": str(job.output_dir)}
        following = make_job("llama", **keys, training=still)
        ended = following.run()
        assert ended.status == 0, ended.result
        assert adapters(ended)[-1] == ("built", {"float32"})
        assert all(torch.equal(weight, halved[name].float()) for name, weight in exported(following).items())


def exported(job: WorkerJob) -> dict[str, torch.Tensor]:
    return load_file(job.output_dir / "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_sfttrainer_does_to_a_quantized_models_adapters_is_undone_and_said(make_job: MakeJob, dtype: str) -> None:
    still = {"max_steps": 1, "learning_rate": 1e-30}
    job, plain = (
        make_job("llama", **{**QLORA, "quantization": quantization, "dtype": dtype}, training=still)
        for quantization in ("4bit", "none")
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert adapters(ended)[-1] == ("built", {"float32"})
    assert "SFTTrainer had cast 8 adapter weights to another dtype; restored" in ended.of("audit")[-1]["mended"]
    assert plain.run().status == 0
    drawn = exported(plain)  # for the same seed, and no constructor has rounded these
    assert all(torch.allclose(weight, drawn[name], rtol=0, atol=1e-20) for name, weight in exported(job).items())


def test_a_model_of_which_most_layers_were_left_unquantized_is_refused(bench: Callable[..., Bench]) -> None:
    a = bench(quantization="4bit")
    a.look()
    layers = a.model.get_base_model().model.layers
    for layer in layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            quantized = getattr(layer.mlp, name)
            plain = torch.nn.Linear(quantized.in_features, quantized.out_features, bias=False, dtype=torch.bfloat16)
            setattr(layer.mlp, name, plain.requires_grad_(False))
    with pytest.raises(PrecisionError, match=r"6 layers are not quantized: .*mlp\.gate_proj"):
        a.look()
