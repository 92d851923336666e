"""The same rows, ids and seed through the worker and through a bare SFTTrainer: the losses are equal to the bit.

Where honed deviates from TRL's defaults (float32 adapters and master weights), the bare trainer gets the same settings:
nothing else may differ.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from trl import SFTConfig, SFTTrainer

from honed.worker.train.trainer import Trainer
from worker.conftest import MakeJob, WorkerJob

_WORDS = ["the", "capital", "of", "is", "what", "answer", "plus", "minus", "equals", "city", "yes", "no", "Ünï", "日本"]
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16}
BASE: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "max_length": 64,
    "logging_steps": 1,
}


def rows(kind: str) -> list[dict[str, str]]:
    """Return rows, some longer and some shorter than the part of a row that is trained on."""
    rng = random.Random(1)
    made = []
    for _ in range(32):
        prompt, completion = (" ".join(rng.choices(_WORDS, k=rng.randint(*each))) for each in ((2, 20), (1, 30)))
        made.append({"prompt": f"{prompt} ", "completion": completion})
    return made if kind == "pc" else [{"text": row["prompt"] + row["completion"]} for row in made]


def case(**keys: Any) -> dict[str, Any]:
    """Return a case by its differences from a LoRA job on prompts and completions; other names are for `training:`."""
    found = {"family": "qwen3", "lora": LORA, "data": "pc", "dtype": "auto", "quantization": "none"}
    training = {name: value for name, value in keys.items() if name not in found}
    return {**found, **{name: keys[name] for name in keys if name in found}, "training": {**BASE, **training}}


CASES: dict[str, dict[str, Any]] = {
    "lora_bf16": case(), "lora_fp32": case(dtype="float32"), "q4": case(quantization="4bit"),
    "q8": case(quantization="8bit"), "full_bf16": case(lora=None, learning_rate=1e-4),
    "full_fp32": case(lora=None, dtype="float32", learning_rate=1e-4), "pack_bfd": case(packing=True),
    "pack_wrap": case(packing=True, packing_strategy="wrapped"),
    "accum": case(gradient_accumulation_steps=4, per_device_train_batch_size=2, max_steps=2),
    "sched": case(weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=0.3, max_grad_norm=0.5),
    "neftune": case(neftune_noise_alpha=5.0), "rslora": case(lora=LORA | {"use_rslora": True}),
    "dora": case(lora=LORA | {"use_dora": True}),
    "mts": case(lora=LORA | {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "text": case(data="text"), "dropout": case(lora=LORA | {"lora_dropout": 0.2}),
    "smooth": case(label_smoothing_factor=0.1), "nogc": case(gradient_checkpointing=False),
    "epochs": case(max_steps=-1, num_train_epochs=1.5, per_device_train_batch_size=8, max_length=32),
    "group": case(train_sampling_strategy="group_by_length"),
    "padfree": case(padding_free=True, max_length=None, per_device_train_batch_size=2),
    "dft": case(loss_type="dft"), "pissa": case(lora=LORA | {"init_lora_weights": "pissa"}),
    "gemma2": case(family="gemma2"), "llama_fp32full": case(family="llama", lora=None, dtype="float32"),
    "mistral": case(family="mistral"), "phi3_4bit": case(family="phi3", quantization="4bit"),
    "q4_mts": case(quantization="4bit", lora=LORA | {"modules_to_save": ["lm_head"]}), "cut": case(max_length=32),
    "shuf": case(shuffle_dataset=True), "chunk": case(loss_type="chunked_nll"),
    "bias": case(lora=LORA | {"bias": "lora_only"}), "text_pack": case(data="text", packing=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_a_bare_trainer(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    asked = CASES[name]
    base = checkpoint_of(asked["family"], dtype="bfloat16")
    keys = {key: asked[key] for key in ("lora", "dtype", "quantization") if asked[key] not in (None, "auto", "none")}
    job = make_job(
        model=base,
        rows=rows(asked["data"]),
        training=asked["training"],
        predictions={"sample_frequency": "off"},
        **keys,
    )
    ended = job.run()
    assert ended.status == 0, ended.result
    assert not [text for text in ended.messages("warning") if "model's" in text]
    expected = bare(job, asked, base, tmp_path / "bare")
    assert list(ended.losses.values()) == expected


def test_evaluations_are_those_of_a_bare_trainer(
    make_job: MakeJob,
    checkpoint_of: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the batches, they are those of one batch of all rows; TRL averages its batches' means."""
    asked = case(eval_strategy="steps", eval_steps=2, eval_on_start=True, per_device_eval_batch_size=2)
    base = checkpoint_of("qwen3", dtype="bfloat16")
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows("pc")[:8]))
    job = make_job(
        model=base,
        rows=rows("pc"),
        training=asked["training"],
        predictions={"sample_frequency": "off"},
        lora=LORA,
        eval_datasets=[{"path": str(path)}],
        dtype="float32",
    )
    lengths: list[int] = []
    predict = Trainer.prediction_step

    def recorded(self: Trainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.extend(inputs["attention_mask"].sum(1).tolist())
        return predict(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(Trainer, "prediction_step", recorded)
    ended = job.run()
    assert ended.status == 0, ended.result
    assert len(lengths) == 3 * 8
    assert lengths[:8] == sorted(lengths[:8], reverse=True)
    told: list[dict[str, float]] = []
    asked["training"]["per_device_eval_batch_size"] = 8
    bare(job, asked, base, tmp_path / "bare", held_out=rows("pc")[:8], told=told)
    names = ("eval_loss", "eval_mean_token_accuracy", "eval_entropy", "eval_num_tokens")
    found = [tuple(item["metrics"][name] for name in names) for item in ended.of("evaluation")]
    expected = [tuple(entry[name] for name in names) for entry in told if "eval_loss" in entry]
    assert len(found) == 3
    # Sums in another order.
    assert all(ours == pytest.approx(theirs, rel=1e-5) for ours, theirs in zip(found, expected, strict=True))


def bare(
    job: WorkerJob,
    asked: dict[str, Any],
    base: Path,
    scratch: Path,
    *,
    held_out: list[dict[str, str]] | None = None,
    told: list[dict[str, float]] | None = None,
) -> list[float]:
    """Return the losses that `SFTTrainer` logs for the same job, in the precision that honed planned for it."""
    precision = job.plan["precision"]
    set_seed(42)
    dtype = getattr(torch, precision["load_dtype"])
    quantized = {
        "none": None,
        "8bit": BitsAndBytesConfig(load_in_8bit=True),
        "4bit": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        ),
    }[asked["quantization"]]
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, quantization_config=quantized, attn_implementation=precision["attn_implementation"]
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    if asked["lora"]:
        options = {"target_modules": "all-linear", **asked["lora"]}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, precision["adapter_dtype"]))
    kept = {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
    arguments = SFTConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=precision["bf16"],
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"loss_type": "nll", **asked["training"]},
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows(asked["data"])),
        processing_class=tokenizer,
        eval_dataset=Dataset.from_list(held_out) if held_out else None,
    )
    for name, parameter in trainer.model.named_parameters():
        if name in kept:
            parameter.data = kept[name]  # TRL casts a quantized model's adapters to bfloat16
    trainer.train()
    if told is not None:
        told += trainer.state.log_history
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
