"""Full fine-tuning on each rung: the trained weights, the state that a resume continues from, and the saved weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.job.plan_file import Precision
from worker.conftest import Ended, MakeJob, WorkerJob

BFLOAT16 = {"dtype": "bfloat16"}
TRAINING = {"max_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 2e-4}
RUNGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32-8bit": {"training": TRAINING | {"optim": "adamw_8bit"}},
    "compensated": {"master_weights": "compensated", "training": TRAINING | {"optim": "adamw_torch"}},
    "compensated-8bit": {"master_weights": "compensated"},
    "none": {"master_weights": "none"},
}


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def dtypes(ended: Ended, when: str) -> set[str]:
    [found] = [item for item in ended.of("audit") if item["when"] == when]
    return {each["dtype"] for each in found["counts"]}


def bare_losses(base: Path, data_path: Path, output_dir: Path, **training: Any) -> list[float]:
    """Return TRL's losses for a checkpoint's path with its own defaults, on the same rows."""
    import transformers
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from honed.inputs.row import convert
    from honed.text.chat import ChatFormat

    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = ChatFormat(tokenizer)
    rows = [chat.encode(convert(json.loads(line), "messages")) for line in data_path.read_text().splitlines()]
    dataset = Dataset.from_dict({"input_ids": [row.input_ids for row in rows], "labels": [row.labels for row in rows]})
    args = SFTConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        loss_type="nll",
        dataset_kwargs={"skip_prepare_dataset": True},
        **training,
    )
    transformers.set_seed(args.seed)
    trainer = SFTTrainer(model=str(base), args=args, train_dataset=dataset, processing_class=tokenizer)
    assert (args.bf16, str(next(trainer.model.parameters()).dtype)) == (True, "torch.float32"), "TRL's own defaults"
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_full_fine_tuning_of_a_bfloat16_checkpoint_learns_as_trls_own_default_does(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """bfloat16 weights without a master copy end at a far higher loss: most of their updates are rounded away."""
    training = {"max_steps": 30, "per_device_train_batch_size": 4, "learning_rate": 1e-4}
    job = make_job(model=BFLOAT16, training=training)
    ended = job.run()
    assert ended.status == 0, ended.result
    losses = list(ended.losses.values())
    bare = bare_losses(Path(job.plan["base_model_path"]), job.dir / "facts.jsonl", tmp_path / "bare", **training)
    assert losses == pytest.approx(bare, abs=0.02)
    assert losses[-1] == pytest.approx(bare[-1], abs=1e-6), "and not only within 0.02"
    plain = make_job(model=BFLOAT16, training=training, master_weights="none")
    assert list(plain.run().losses.values())[-1] > bare[-1] + 0.02
    assert any("updates below 1/256 of a weight" in text for text in plain.plan["warnings"])


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_resumes_bit_for_bit_with_predictions_on_or_off_and_saves_what_was_stored(
    make_job: MakeJob, rung: str
) -> None:
    keys: dict[str, Any] = {"model": BFLOAT16, "training": TRAINING, "eval_split": 0.25} | RUNGS[rung]
    undisturbed_job = make_job(**keys, predictions={"sample_frequency": "off"})
    undisturbed = undisturbed_job.run()
    assert undisturbed.status == 0, undisturbed.result
    job = make_job(**keys, predictions={"sample_frequency": 2, "num_samples": 2, "max_new_tokens": 4})
    first = job.stopped_at(5)
    checkpoint = basemodel.inspect(job.dir / "checkpoints/checkpoint-5")
    assert set(checkpoint.stored_dtypes) == {"float32" if rung.startswith("float32") else "bfloat16"}
    second = job.run(2)
    assert second.status == 0, second.result
    assert first.losses | second.losses == undisturbed.losses
    assert digest(job.output_dir) == digest(undisturbed_job.output_dir)
    saved = basemodel.inspect(job.output_dir)
    assert set(saved.stored_dtypes) == {"bfloat16"}
    assert saved.config["dtype"] == "bfloat16"
    assert dtypes(second, "built") == {"float32" if rung.startswith("float32") else "bfloat16"}
    assert dtypes(second, "saved") == {"bfloat16"}


def test_the_output_keeps_float32_where_the_job_asks(make_job: MakeJob) -> None:
    job = make_job(model=BFLOAT16, training=TRAINING | {"max_steps": 2}, save_dtype="float32")
    assert job.run().status == 0
    saved = basemodel.inspect(job.output_dir)
    assert (set(saved.stored_dtypes), saved.config["dtype"]) == ({"float32"}, "float32")


def test_the_best_checkpoints_remainders_are_in_an_output_of_more_than_bfloat16(
    make_job: MakeJob, learned: Path
) -> None:
    """Only the weights are restored from the best checkpoint: the remainders in memory were the last step's, and none
    of them was saved."""
    import torch
    from safetensors.torch import load_file

    from honed.worker.train.optimizer import REMAINDER, join

    training = {
        "max_steps": 9,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 11,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "save_total_limit": 9,
    }
    job = make_job(
        model=learned,
        num_rows=8,
        eval_split=0.25,
        training=training,
        master_weights="compensated",
        predictions={"num_samples": 2, "max_new_tokens": 4},
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    losses = {item["step"]: item["metrics"]["eval_loss"] for item in ended.of("evaluation") if item["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 9, "or it shows nothing"
    path = job.dir / f"checkpoints/checkpoint-{best}"
    weights, saved = (load_file(each / "model.safetensors") for each in (path, job.output_dir))
    states = torch.load(path / "optimizer.pt", weights_only=True)["state"].values()
    remainders = [state["__bnb_optimizer_quant_state__"][REMAINDER] for state in states]
    assert {each.dtype for each in saved.values()} == {torch.float32}
    assert not any(torch.equal(saved[name], each.float()) for name, each in weights.items())
    for name, found in saved.items():
        fitting = [each for each in remainders if each.shape == found.shape]
        assert any(torch.equal(join(weights[name], each), found) for each in fitting), name


def test_a_job_that_was_planned_before_there_were_rungs_is_trained_as_it_was_planned(make_job: MakeJob) -> None:
    job = make_job(model=BFLOAT16, training=TRAINING | {"max_steps": 2}, master_weights="none")
    before: WorkerJob = job
    old = {
        key: value
        for key, value in job.plan["precision"].items()
        if key not in ("master_weights", "optim", "save_dtype")
    }
    before.change_plan(precision=old)
    ended = before.run()
    assert ended.status == 0, ended.result
    assert dtypes(ended, "built") == {"bfloat16"}
    assert set(basemodel.inspect(job.output_dir).stored_dtypes) == {"bfloat16"}


def test_the_room_that_a_first_checkpoint_needs_is_that_of_all_that_it_holds(tmp_path: Path) -> None:
    import torch

    from honed.worker.train import disk_reserve
    from honed.worker.train.optimizer import CompensatedAdamW

    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.Linear(400, 400)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = CompensatedAdamW(model[1].parameters(), lr=1e-3)
    model(torch.ones(1, 400, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for is_whole, number in ((True, 2), (False, 1)):
        weights = list(model[2 - number :].state_dict().values())
        torch.save(weights, tmp_path / "model.pt")
        needed = disk_reserve.written_bytes(model, optimizer, is_whole=is_whole)
        assert needed * 0.95 < disk_reserve.size_of(tmp_path) < needed * disk_reserve.MARGIN


# --- As saved ---------------------------------------------------------------------------------------------------------


def precision(save_dtype: str | None, *, load_dtype: str = "float32", bf16: bool = False) -> Precision:
    return Precision(
        load_dtype=load_dtype,
        compute_dtype=None,
        bf16=bf16,
        fp16=False,
        adapter_dtype=None,
        quantization="none",
        attn_implementation="sdpa",
        reasons={},
        master_weights="float32",
        save_dtype=save_dtype,
    )


def as_asked(dtype: str) -> Any:
    """The rule for a model of which nothing is kept in a wider dtype."""
    from honed.worker.model.dtypes import Rule

    return Rule(dtype, frozenset(), {})


def tiny(*, has_tie: bool = False) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=has_tie,
        )
    )


@pytest.mark.parametrize(("bf16", "held"), [(True, "bfloat16"), (False, "float32")])
def test_what_is_asked_of_the_model_is_asked_of_the_numbers_that_are_saved(*, bf16: bool, held: str) -> None:
    """The model is in half precision if training computes in it; otherwise it has the same numbers in float32."""
    import torch

    from honed.worker.model import cast

    model = tiny(has_tie=True)
    own = {name: (each.data_ptr(), each.detach().clone()) for name, each in model.named_parameters()}
    with cast.as_saved(model, precision("bfloat16", bf16=bf16), as_asked("bfloat16")):
        for name, each in model.named_parameters():
            assert each.dtype == getattr(torch, held)
            assert torch.equal(each.float(), own[name][1].bfloat16().float())
        assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, each in model.named_parameters():
        assert (each.data_ptr(), each.dtype) == (own[name][0], torch.float32), "the masters are the same storage"
        assert torch.equal(each, own[name][1])


def test_compensated_weights_are_asked_and_saved_with_their_remainders_where_more_than_bfloat16_is_saved() -> None:
    import torch

    from honed.worker.model import cast
    from honed.worker.train.optimizer import CompensatedAdamW, master

    model = tiny(has_tie=True).bfloat16()
    optimizer = CompensatedAdamW(model.parameters(), lr=1e-4)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    masters = {name: master(each, optimizer) for name, each in model.named_parameters()}
    assert any(not torch.equal(each, each.bfloat16().float()) for each in masters.values())
    for save_dtype in ("float32", "float16"):
        plan = replace(precision(save_dtype, load_dtype="bfloat16", bf16=True), master_weights="compensated")
        assert cast.computed_dtype(plan) == "float32"
        wanted = {name: each.to(getattr(torch, save_dtype)) for name, each in masters.items()}
        with cast.as_saved(model, plan, as_asked(save_dtype), optimizer):
            for name, each in model.named_parameters():
                assert torch.equal(each, wanted[name].float())
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert cast.cast(model, plan, as_asked(save_dtype), optimizer) == ""
    assert all(torch.equal(each, wanted[name]) for name, each in model.named_parameters())


def test_plain_bfloat16_weights_are_asked_as_they_are_where_float32_is_saved() -> None:
    """Such weights were held in float32, the same numbers in twice the memory, and computed under autocast."""
    import torch

    from honed.worker.model import cast

    model = tiny().bfloat16()
    plan = replace(precision("float32", load_dtype="bfloat16", bf16=True), master_weights="none")
    assert cast.computed_dtype(plan) == "bfloat16"
    with cast.as_saved(model, plan, as_asked("float32")):
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_weights_that_float16_has_no_numbers_for_are_saved_in_float32_and_that_is_said() -> None:
    import torch

    from honed.worker.model import cast

    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 70000.0
    plan = precision("float16")
    with cast.as_saved(model, plan, as_asked("float16")):
        assert float(model.lm_head.weight[0, 0]) == 70000.0
    assert "lm_head.weight grew beyond 65504" in cast.cast(model, plan, as_asked("float16"))
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_the_configs_within_a_config_say_the_dtype_that_is_saved_too() -> None:
    """A server reads the dtype of `text_config`."""
    import torch
    from transformers import Gemma3Config

    from honed.worker.model import cast

    model: Any = torch.nn.Linear(2, 2)
    model.config = Gemma3Config(dtype="float32", text_config={"dtype": "float32"}, vision_config={"dtype": "float32"})
    assert cast.cast(model, precision("bfloat16"), as_asked("bfloat16")) == ""
    every = (model.config, model.config.text_config, model.config.vision_config)
    assert {str(each.dtype) for each in every} == {"torch.bfloat16"}


def test_what_the_class_and_the_base_keep_in_float32_is_saved_so(tmp_path: Path) -> None:
    """A family's router bias; a base's float32 norm beside bfloat16 weights; and nothing of a base of one dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    from honed.worker.model import cast, dtypes

    model = tiny()
    model.bfloat16().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.float()
    type(model)._keep_in_fp32_modules_strict = {"q_norm"}
    try:
        rule = dtypes.for_saving(model, tmp_path, "bfloat16", loaded="float32")
        wide = dtypes.for_saving(model, tmp_path, "float32", loaded="float32")
        half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert dtypes.for_saving(half, tmp_path, "bfloat16", loaded="bfloat16") == rule
    finally:
        type(model)._keep_in_fp32_modules_strict = None
    assert cast.cast(model, precision("bfloat16"), rule) == ""
    kept = {name for name, each in model.named_parameters() if each.dtype == torch.float32}
    assert kept == {"model.layers.0.self_attn.q_norm.weight", "model.norm.weight"}
    assert {wide.of(name) for name, _ in model.named_parameters()} == {"float32"}


# --- The optimizer ----------------------------------------------------------------------------------------------------


def test_a_weight_and_its_remainder_are_the_float32_master_bit_for_bit() -> None:
    import torch

    from honed.worker.train.optimizer import join, part

    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64)  # a prime: all kinds of ends
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x00000001, 0, -(2**31)])
    masters = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)
    masters = masters[torch.isfinite(masters) & (masters.abs() < 3.38e38)]
    weight, remainder = part(masters)
    assert torch.equal(join(weight, remainder).view(torch.int32), masters.view(torch.int32))
    nearest = (weight.float() - masters).abs() <= (masters.bfloat16().float() - masters).abs()
    assert bool(nearest.all())


def test_a_master_that_is_not_a_number_is_none_as_a_weight_either() -> None:
    """CUDA's NaN has every bit set: rounded up it became zero, which the check for NaN weights passes."""
    import torch

    from honed.worker.train.optimizer import join, part

    bits = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, -0x400000], dtype=torch.int32)
    weight, remainder = part(bits.view(torch.float32))
    assert bool(weight.isnan().all())
    assert bool(join(weight, remainder).isnan().all())
    assert bool(part(torch.tensor([float("inf"), float("-inf")]))[0].isinf().all())


@pytest.mark.parametrize("slice_elements", [512, 2**22])
def test_compensated_weights_are_stepped_as_float32_ones_are_and_a_checkpoint_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    """Moments, decay and 8-bit states included: the masters equal those of torch's and bitsandbytes' own AdamW."""
    import bitsandbytes
    import torch

    from honed.worker.train import optimizer as optimizers
    from honed.worker.train.optimizer import REMAINDER, CompensatedAdamW, eight_bit, join, take_remainders

    monkeypatch.setattr(optimizers, "SLICE_ELEMENTS", slice_elements)
    torch.manual_seed(0)
    start = torch.randn(80, 64).bfloat16()
    own: list[tuple[Any, Any]] = [(torch.optim.AdamW, CompensatedAdamW), (bitsandbytes.optim.AdamW8bit, eight_bit())]
    for theirs, ours in own:
        wide, half = torch.nn.Parameter(start.float()), torch.nn.Parameter(start.clone())
        reference, optimizer = (
            kind([each], lr=1e-4, weight_decay=0.01) for kind, each in ((theirs, wide), (ours, half))
        )
        for number in range(20):
            if number == 10:  # a resume
                torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
                then = half.detach().clone(), wide.detach().clone()
                fresh = ours([half], lr=1e-4, weight_decay=0.01)
                fresh.load_state_dict(optimizer.state_dict())
                optimizer = fresh
            gradient = torch.randn(80, 64).bfloat16()
            wide.grad, half.grad = gradient.float(), gradient
            reference.step()
            optimizer.step()
            assert half.dtype == half.grad.dtype == torch.bfloat16
        assert torch.equal(join(half.data, optimizer.state[half][REMAINDER]), wide.data)
        take_remainders(optimizer, tmp_path / "optimizer.pt")
        assert torch.equal(join(then[0], optimizer.state[half][REMAINDER]), then[1])
