"""Keys of other tools, with their values: the remedy keeps what was asked for, or says what is lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from honed.spec import document, jobfile
from honed.spec.problem import InvalidSpecError, Problem, as_path, at, mended
from honed.system import quote
from honed.system.error import SpecError

ROOT = Path(__file__).resolve().parents[3]
BAD_SPECS = sorted(path for path in (ROOT / "tests/data/bad_specs").iterdir() if path.suffix != ".expected")
LEAST: dict[str, Any] = {"base_model": "/srv/models/m", "datasets": [{"path": "/srv/data/d.jsonl"}]}
GONE = object()  #: the key is removed without a replacement


def problems(data: dict[str, Any]) -> tuple[Problem, ...]:
    try:
        jobfile.validate(data)
    except InvalidSpecError as error:
        return error.problems
    return ()


def check_fix(data: dict[str, Any], problem: Problem) -> None:
    """Check that a fix removes its fault, adds no new one where it writes, and says so where it gives something up."""
    before = {(each.key, each.message) for each in problems(data)}
    after = {(each.key, each.message) for each in problems(mended(data, problem.fix))}
    assert (problem.key, problem.message) not in after
    written = [key for key, value in problem.fix.items() if value is not None]
    new = [key for key, _ in after - before if any(key == own or key.startswith(f"{own}.") for own in written)]
    assert not [key for key in new if "type" not in key], problem
    if not written and at(data, as_path(problem.key)) is not None:
        words = (
            "remove it",
            "remove lora",
            "remove master_weights",
            "remove eval_split",
            "systemd",
        )
        assert any(each in problem.hint for each in words), problem


@pytest.mark.parametrize("path", BAD_SPECS, ids=lambda path: path.name)
def test_each_fix_of_a_bad_spec_mends_its_fault_and_makes_none(path: Path) -> None:
    try:
        data = document.parse(path.read_bytes(), path.suffix).data
    except SpecError:
        return  # no text to edit by keys
    found = problems(data)
    for problem in found:
        if problem.fix:
            check_fix(data, problem)
    with pytest.raises(InvalidSpecError) as caught:
        jobfile.validate(data)
    unmended = [problem for problem in found if not problem.fix]
    left = problems(mended(data, caught.value.fix))
    assert len(left) <= len(unmended) + 1, left


#: Settings of other tools, and the result of applying the fix: dotted keys and their values, no key for a removed
#: setting, and None for one that honed does not support. The words are part of the hint.
VALUES: list[tuple[str, Any, dict[str, Any] | None, str]] = [
    # by hand, from notebooks
    ("lora", "qlora", {"lora": {}, "quantization": "4bit"}, "quantization: 4bit"),
    ("lora", True, {"lora": {}}, "write lora: {}"),
    ("lora", False, {}, "remove it"),
    ("lora", 16, {"lora": {"r": 16}}, "write lora: {r: 16}"),
    ("lora", ["q_proj"], {"lora": {"target_modules": ["q_proj"]}}, "target_modules"),
    ("max_length", "2k", {"training.max_length": 2048}, "2048"),
    ("max_steps", "1k", {"training.max_steps": 1000}, "1000"),
    ("eval_split", "5%", {"eval_split": 0.05}, "write 0.05"),
    ("lr", "2e-4", {"training.learning_rate": 2e-4}, "write training: {learning_rate: 0.0002}"),
    ("args", {"learning_rate": 2e-4, "num_train_epochs": 3, "bf16": False},
     {"training": {"learning_rate": 2e-4, "num_train_epochs": 3}}, "write training: {learning_rate: 0.0002"),
    ("sft_config", {"max_seq_length": "4k", "logging_steps": 1},
     {"training": {"logging_steps": 1, "max_length": 4096}}, ""),
    ("model", {"load_in_4bit": True, "dtype": "bf16"}, {"quantization": "4bit", "dtype": "bfloat16", "lora": {}}, ""),
    ("optimizer", {"name": "adamw", "lr": 1e-4}, {"training": {"optim": "adamw_torch", "learning_rate": 1e-4}}, ""),
    ("optimizer", {"type": "adamw", "params": {"lr": 1e-4}},
     {"training": {"optim": "adamw_torch", "learning_rate": 1e-4}}, ""),
    ("dtype", None, {}, "remove it"),
    ("system_prompt", "Be brief.", None, "write it in each row"),
    ("hyperparameters", {"colour": 2}, None, "training.colour: unknown key"),
    ("quantization", {"bits": 4}, {"quantization": "4bit", "lora": {}}, "write quantization: 4bit"),
    ("quantization", True, None, "4bit, or 8bit"),
    ("datasets", {"train": "/srv/data/d.jsonl", "validation": "/e.jsonl"}, {"eval_datasets": [{"path": "/e.jsonl"}]},
     "eval_datasets"),
    # axolotl
    ("load_in_4bit", True, {"quantization": "4bit", "lora": {}}, ""),
    ("load_in_4bit", False, {}, "remove it"),
    ("load_in_8bit", True, {"quantization": "8bit", "lora": {}}, ""),
    ("load_in_8bit", None, {}, "remove it"),
    ("adapter", "lora", {"lora": {}}, "write a lora: section"),
    ("adapter", "qlora", {"lora": {}, "quantization": "4bit"}, "quantization: 4bit"),
    ("adapter", "llama-adapter", None, "not supported yet"),
    ("adapter", "dora", {"lora.use_dora": True}, ""),
    ("lora_r", 32, {"lora.r": 32}, "write lora.r: 32"),
    ("lora_alpha", 16, {"lora.lora_alpha": 16}, "belongs under lora:"),
    ("lora_dropout", 0.05, {"lora.lora_dropout": 0.05}, ""),
    ("lora_target_linear", True, {"lora.target_modules": "all-linear"}, ""),
    ("lora_target_linear", None, {}, "remove it"),
    ("lora_target_modules", ["q_proj", "v_proj"], {"lora.target_modules": ["q_proj", "v_proj"]}, ""),
    ("lora_target_modules", [], {}, "remove it"),
    ("lora_modules_to_save", ["embed_tokens", "lm_head"], {"lora.modules_to_save": ["embed_tokens", "lm_head"]}, ""),
    ("peft_trainable_token_indices", [5, 9], {"lora.trainable_token_indices": [5, 9]}, ""),
    ("peft_trainable_token_indices", {"wte": [5]}, {"lora.trainable_token_indices": {"wte": [5]}}, ""),
    ("lora_target_parameters", ["mlp.experts.gate_up_proj"],
     {"lora.target_parameters": ["mlp.experts.gate_up_proj"]}, ""),
    ("lora_fan_in_fan_out", None, {}, "remove it"),
    ("lora_mlp_kernel", True, {}, "does not affect the result"),
    ("sequence_len", 4096, {"training.max_length": 4096}, "write training.max_length: 4096"),
    ("sequence_len", "long", None, "which takes an integer"),
    ("sample_packing", True, {"training.packing": True}, ""),
    ("sample_packing", False, {"training.packing": False}, ""),
    ("eval_sample_packing", False, {"training.eval_packing": False}, ""),
    ("pad_to_sequence_len", True, {}, "remove it"),
    ("micro_batch_size", 2, {"training.per_device_train_batch_size": 2}, ""),
    ("gradient_accumulation_steps", 4, {"training.gradient_accumulation_steps": 4}, "belongs under training:"),
    ("num_epochs", 4, {"training.num_train_epochs": 4}, ""),
    ("optimizer", "adamw_bnb_8bit", {"training.optim": "adamw_bnb_8bit"}, ""),
    ("optimizer", "adamw_hf", {"training.optim": "adamw_torch"}, ""),
    ("optimizer", "muon", None, "which takes one of"),
    ("lr_scheduler", "cosine", {"training.lr_scheduler_type": "cosine"}, ""),
    ("lr_scheduler", "one_cycle", None, "which takes one of"),
    ("learning_rate", 2e-4, {"training.learning_rate": 2e-4}, ""),
    ("cosine_min_lr_ratio", 0.1, {"training.lr_scheduler_type": "cosine_with_min_lr",
                                  "training.lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, ""),
    ("val_set_size", 0.05, {"eval_split": 0.05}, "write eval_split: 0.05"),
    ("val_set_size", 0, {}, "remove it"),
    ("val_set_size", 0.0, {}, "remove it"),
    ("val_set_size", 200, None, "divided by their number"),
    ("evals_per_epoch", 0, {}, "remove it"),
    ("evals_per_epoch", 4, {}, "there are no held-out rows"),
    ("saves_per_epoch", 1, {"training.save_strategy": "epoch"}, ""),
    ("saves_per_epoch", 2, None, "divided by 2"),
    ("warmup_ratio", 0.1, {"training.warmup_steps": 0.1}, "write training.warmup_steps: 0.1"),
    ("warmup_steps", 10, {"training.warmup_steps": 10}, ""),
    ("bf16", "auto", {}, "plans the precision"),
    ("bf16", True, {}, "dtype: auto computes in bfloat16"),
    ("bf16", False, {}, "remove it"),
    ("fp16", True, {"dtype": "float16"}, ""),
    ("fp16", None, {}, "remove it"),
    ("tf32", True, {}, "remove it"),
    ("fp8", True, None, "not supported yet"),
    ("fp8", False, {}, "remove it"),
    ("flash_attention", True, {"attn_implementation": "flash_attention_2"}, ""),
    ("flash_attention", False, {"attn_implementation": "auto"}, ""),
    ("sdp_attention", True, {"attn_implementation": "sdpa"}, ""),
    ("eager_attention", True, {"attn_implementation": "eager"}, ""),
    ("xformers_attention", None, {}, "remove it"),
    ("attn_implementation", "flex_attention", {"attn_implementation": "auto"}, ""),
    ("train_on_inputs", False, {}, "remove it"),
    ("train_on_inputs", True, None, "not supported yet"),
    ("roles_to_train", ["assistant"], {}, "remove it"),
    ("roles_to_train", ["user"], None, "not supported yet"),
    ("train_on_eos", "turn", {}, "remove it"),
    ("train_on_eos", "last", None, "not supported yet"),
    ("group_by_length", True, {"training.train_sampling_strategy": "group_by_length"}, ""),
    ("group_by_length", False, {}, "remove it"),
    ("chat_template", "llama3", {}, "remove it"),
    ("chat_template", "tokenizer_default", {}, "remove it"),
    ("chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}", None, "save the template to a file"),
    ("special_tokens", {"pad_token": "<|end_of_text|>"}, {}, "remove it"),
    ("tokens", ["<a>"], None, "not supported yet"),
    ("tokens", None, {}, "remove it"),
    ("model_type", "LlamaForCausalLM", {}, "remove it"),
    ("model_type", "AutoModelForSequenceClassification", None, "not supported yet"),
    ("tokenizer_type", "AutoTokenizer", {}, "remove it"),
    ("wandb_project", "mine", {"report_to": ["wandb"]}, "report_to: [wandb]"),
    ("wandb_project", None, {}, "remove it"),
    ("wandb_watch", None, {}, "remove it"),
    ("wandb_name", "first run", {"name": "first run"}, ""),
    ("use_tensorboard", True, {"report_to": ["tensorboard"]}, ""),
    ("use_tensorboard", False, {}, "remove it"),
    ("deepspeed", "deepspeed_configs/zero2.json", {}, "DeepSpeed"),
    ("fsdp", ["full_shard"], {}, "parallel decides"),
    ("fsdp_config", {"fsdp_version": 2}, {}, "parallel decides"),
    ("gradient_checkpointing", True, {"training.gradient_checkpointing": True}, ""),
    ("resume_from_checkpoint", None, {}, "remove it"),
    ("resume_from_checkpoint", True, {}, "remove it"),
    ("resume_from_checkpoint", "/x/checkpoint-5", None, "adapter: its directory"),
    ("rl", "dpo", None, "DPO is not supported yet"),
    ("rl", "grpo", None, "GRPO is not supported yet"),
    ("rl", "kto", None, "KTO is not supported yet"),
    ("rl", "orpo", None, "ORPO is not supported yet"),
    ("rl", None, {}, "remove it"),
    ("reward_model", True, None, "not supported yet"),
    ("plugins", ["axolotl.integrations.liger.LigerPlugin"], {}, "remove it"),
    ("liger_rope", True, {"training.use_liger_kernel": True}, ""),
    ("debug", None, {}, "remove it"),
    ("dataset_prepared_path", "last_run_prepared", {}, "remove it"),
    ("lora_model_dir", "/srv/out/adapter", {"adapter": "/srv/out/adapter"}, ""),
    ("lora_model_dir", None, {}, "remove it"),
    ("torch_dtype", "bfloat16", {"dtype": "bfloat16"}, ""),
    ("unfrozen_parameters", ["^lm_head"], None, "lora.finetune"),
    ("qat", {"weight_dtype": "int4"}, None, "not supported yet"),
    ("relora", True, None, "not supported yet"),
    ("push_dataset_to_hub", None, {}, "remove it"),
    # LLaMA-Factory
    ("stage", "sft", {}, "remove it"),
    ("stage", "pt", {}, "text rows"),
    ("stage", "rm", None, "reward modelling is not supported yet"),
    ("stage", "dpo", None, "DPO is not supported yet"),
    ("finetuning_type", "lora", {"lora": {}}, ""),
    ("finetuning_type", "full", {}, "full fine-tuning"),
    ("finetuning_type", "freeze", None, "not supported yet"),
    ("finetuning_type", "oft", None, "not supported yet"),
    ("lora_rank", 8, {"lora.r": 8}, ""),
    ("lora_target", "all", {"lora.target_modules": "all-linear"}, ""),
    ("lora_target", "q_proj,v_proj", {"lora.target_modules": ["q_proj", "v_proj"]}, ""),
    ("template", "llama3", {}, "remove it"),
    ("template", "/srv/t.jinja", {"chat_template": "/srv/t.jinja"}, ""),
    ("cutoff_len", 2048, {"training.max_length": 2048}, ""),
    ("max_samples", 1000, {"datasets.0.max_rows": 1000}, ""),
    ("quantization_bit", 4, {"quantization": "4bit", "lora": {}}, ""),
    ("quantization_bit", 8, {"quantization": "8bit", "lora": {}}, ""),
    ("quantization_bit", 3, None, "not supported yet"),
    ("quantization_method", "bnb", {}, "bitsandbytes"),
    ("quantization_method", "hqq", None, "not supported yet"),
    ("val_size", 0.1, {"eval_split": 0.1}, ""),
    ("do_train", True, {}, "remove it"),
    ("flash_attn", "fa2", {"attn_implementation": "flash_attention_2"}, ""),
    ("flash_attn", "disabled", {"attn_implementation": "auto"}, ""),
    ("flash_attn", "fa3", None, "honed has no 'fa3'"),
    ("pure_bf16", True, {"dtype": "bfloat16"}, ""),
    ("disable_gradient_checkpointing", True, {"training.gradient_checkpointing": False}, ""),
    ("disable_gradient_checkpointing", False, {"training.gradient_checkpointing": True}, ""),
    ("use_dft_loss", True, {"training.loss_type": "dft"}, ""),
    ("use_galore", True, None, "optim: galore_adamw"),
    ("use_badam", True, None, "not supported yet"),
    ("loraplus_lr_ratio", 16.0, None, "not supported yet"),
    ("pissa_init", True, {"lora.init_lora_weights": "pissa"}, ""),
    ("mask_history", True, None, "not supported yet"),
    ("mask_history", False, {}, "remove it"),
    ("freeze_vision_tower", True, {}, "remove it"),
    ("ddp_timeout", 180000000, {}, "remove it"),
    ("pref_beta", 0.1, None, "not supported yet"),
    ("rope_scaling", "yarn", None, "not supported yet"),
    ("export_dir", "saves/x", None, "kind: merge"),
    ("use_unsloth", True, {"backend": "unsloth"}, ""),
    ("overwrite_output_dir", True, {}, "remove it"),
    ("plot_loss", True, {}, "remove it"),
    ("train_mm_proj_only", True, {"lora": {"finetune_language_layers": False, "finetune_projector": True}}, ""),
    # TRL, transformers and Unsloth
    ("use_peft", True, {"lora": {}}, ""),
    ("use_peft", False, {}, "remove it"),
    ("peft_config", {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}, {"lora": {"r": 8, "lora_alpha": 16}}, ""),
    ("bnb_4bit_quant_type", "nf4", {}, "remove it"),
    ("quantization_config", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
     {"quantization": "4bit", "lora": {}}, ""),
    ("max_seq_length", 2048, {"training.max_length": 2048}, ""),
    ("dataset_text_field", "text", {}, "remove it"),
    ("dataset_text_field", "body", {"datasets.0.columns": {"text": "body"}}, ""),
    ("use_gradient_checkpointing", "unsloth", {"training.gradient_checkpointing": True}, ""),
    ("random_state", 3407, {"training.seed": 3407}, ""),
    ("report_to", "none", {}, "accepted"),
    ("push_to_hub", True, {}, "nothing to the hub"),
    ("hub_model_id", "me/m", {}, "nothing to the hub"),
    ("completion_only_loss", True, {}, "remove it"),
    ("completion_only_loss", False, None, "not supported yet"),
    ("assistant_only_loss", True, {}, "remove it"),
    ("train_on_responses_only", True, {}, "remove it"),
    ("full_finetuning", True, {}, "remove it"),
    ("evaluation_strategy", "steps", {"training.eval_strategy": "steps", "eval_split": 0.05}, ""),
    ("kind", "dpo", None, "DPO is not supported yet"),
    ("kind", "pretrain", {"kind": "sft"}, ""),
    ("quantization", 4, {"quantization": "4bit", "lora": {}}, ""),
    ("quantization", "nf4", {"quantization": "4bit", "lora": {}}, ""),
    ("quantization", False, {"quantization": "none"}, ""),
    ("dtype", "bf16", {"dtype": "bfloat16"}, ""),
    ("dtype", "torch.float16", {"dtype": "float16"}, ""),
    ("num_gpus", 2, {"resources.gpus": 2}, ""),
    ("num_gpus", 1, {}, "remove it"),
    ("nnodes", 2, {"resources.nodes": 2}, ""),
    ("nnodes", 1, {}, "remove it"),
    ("device_map", "auto", {}, "remove it"),
    ("hf_token", "hf_x", {}, "systemd"),
    # OpenAI
    ("n_epochs", "auto", {}, "remove it"),
    ("n_epochs", 3, {"training.num_train_epochs": 3}, ""),
    ("batch_size", "auto", {}, "remove it"),
    ("batch_size", 4, {"training.per_device_train_batch_size": 4}, ""),
    ("learning_rate_multiplier", 2.0, {}, "it multiplies a rate"),
    ("suffix", "support", {"name": "support"}, ""),
    ("metadata", {"team": "a"}, {}, "remove it"),
    ("hyperparameters", {"n_epochs": 2, "batch_size": "auto"}, {"training.num_train_epochs": 2}, ""),
    ("method", {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}},
     {"training.num_train_epochs": 2}, ""),
    ("hyperparameters", {"n_epochs": 2, "learning_rate_multiplier": 2},
     {"training.num_train_epochs": 2}, "learning_rate_multiplier: it multiplies a rate"),
    ("time", "04:30:00", {"time_limit_sec": 16200}, ""),
    ("time", "1-12", {"time_limit_sec": 129600}, ""),
    ("time", 90, {"time_limit_sec": 5400}, ""),
    ("time", "soon", None, "in seconds"),
    ("gres", "gpu:h100:1", {"resources.gpus": 1}, ""),
    ("gres", "gpu:8", {"resources.gpus": 8}, ""),
    ("mem", "64G", {}, "memory and CPU limits"),
    ("partition", "a100", {}, "resources.profile"),
    ("mail-user", "a@example.org", {"notify.mail": "a@example.org"}, ""),
    ("dependency", "afterok:12:13", {"depends_on": ["12", "13"]}, ""),
    ("dependency", "afterany:12", None, "waits for jobs that succeed"),
    ("lora", True, {"lora": {}}, "lora: {}"),
    ("datasets", "/srv/data/x.jsonl", {"datasets": [{"path": "/srv/data/x.jsonl"}]}, "path: /srv/data/x.jsonl"),
    ("base_model", "https://huggingface.co/Qwen/Qwen3-1.7B", {"base_model": "Qwen/Qwen3-1.7B"}, ""),
    ("base_model", "https://huggingface.co/Qwen/Qwen3-1.7B/tree/main", {"base_model": "Qwen/Qwen3-1.7B"}, ""),
    ("eval_datasets", None, {}, "accepted"),
    ("depends_on", None, {}, "accepted"),
    ("report_to", None, {}, "accepted"),
    ("method", {"type": "dpo"}, None, "DPO is not supported yet"),
    ("integrations", [{"type": "wandb", "wandb": {"project": "x"}}], {"report_to": ["wandb"]}, ""),
    ("validation_file", "/srv/data/v.jsonl", {"eval_datasets": [{"path": "/srv/data/v.jsonl"}]}, ""),
    ("validation_file", "file-abc123", None, "file at OpenAI"),
]  # fmt: skip


def settle(data: dict[str, Any], rounds: int = 3) -> dict[str, Any]:
    """Return the data after applying the checks' fixes until none is left."""
    for _ in range(rounds):
        found = problems(data)
        fix = {key: value for problem in reversed(found) for key, value in problem.fix.items()}
        if not fix:
            break
        data = mended(data, fix)
    return data


@pytest.mark.parametrize(("key", "value", "expected", "words"), VALUES, ids=lambda value: json.dumps(value)[:40])
def test_the_remedy_goes_by_the_value(key: str, value: Any, expected: dict[str, Any] | None, words: str) -> None:
    data = copy.deepcopy(LEAST) | {key: value}
    if words == "accepted":
        assert problems(data) == ()
        return
    found = problems(data)
    assert [problem.key for problem in found] == [key], found
    assert words in quote.show(found[0].hint)
    if expected is None:
        assert not found[0].fix
        return
    check_fix(data, found[0])
    wanted = copy.deepcopy(LEAST)
    for path, each in expected.items():
        wanted = mended(wanted, {path: each})
    assert settle(data) == wanted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"val_set_size": 0.1, "evals_per_epoch": 2, "num_epochs": 4}, {"eval_strategy": "steps", "eval_steps": 0.125}),
        ({"val_set_size": 0.1, "evals_per_epoch": 1, "num_epochs": 4}, {"eval_strategy": "epoch"}),
        ({"val_set_size": 0.1, "saves_per_epoch": 2, "num_epochs": 1}, {"save_strategy": "steps", "save_steps": 0.5}),
    ],
)
def test_evaluations_for_each_epoch_are_a_share_of_the_run(given: dict[str, Any], expected: dict[str, Any]) -> None:
    settled = settle(LEAST | given)
    assert problems(settled) == ()
    assert expected.items() <= settled["training"].items()


def test_adapters_take_bf16_as_their_dtype() -> None:
    assert settle(LEAST | {"lora_r": 8, "bf16": True}) == LEAST | {"lora": {"r": 8}, "dtype": "bfloat16"}


def test_what_the_file_says_in_honeds_own_words_is_not_overruled() -> None:
    data = LEAST | {"training": {"max_length": 512}, "max_seq_length": 2048}
    (problem,) = problems(data)
    assert problem.fix == {"max_seq_length": None}
    assert problem.hint == "remove it: training.max_length is also set, to another value"
    assert (
        problems(LEAST | {"training": {"max_length": 512}, "max_seq_length": 512})[0].fix["training.max_length"] == 512
    )


@pytest.mark.parametrize(
    ("value", "others", "expected"),
    [
        ("alpaca", {}, {"format": "alpaca"}),
        ("alpaca_chat.load_qa", {}, {}),
        ("chat_template", {}, {}),
        (
            "chat_template",
            {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}},
            {"format": "sharegpt"},
        ),
        ("chat_template", {"field_messages": "dialog"}, {"columns": {"messages": "dialog"}}),
        ("sharegpt", {"conversation": "chatml"}, {"format": "sharegpt"}),
        ("completion", {"field": "body"}, {"format": "text", "columns": {"text": "body"}}),
        ("completion", {"field": "text", "ds_type": "json"}, {"format": "text"}),
        (
            {"field_instruction": "q", "field_output": "a"},
            {},
            {"format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
        ),
    ],
)
def test_a_data_set_of_axolotl_keeps_its_meaning(value: Any, others: dict[str, Any], expected: dict[str, Any]) -> None:
    settled = settle({"base_model": "/m", "datasets": [{"path": "/d.jsonl", "type": value, **others}]})
    assert settled["datasets"] == [{"path": "/d.jsonl", **expected}]
    assert problems(settled) == ()


@pytest.mark.parametrize(
    "kind", ["chatml.intel", "orpo.chat_template", "input_output", {"format": "[INST]", "field": "x"}]
)
def test_what_honed_does_not_read_is_said_as_that(kind: Any) -> None:
    (problem,) = problems({"base_model": "/m", "datasets": [{"path": "/d.jsonl", "type": kind}]})
    assert "not supported yet" in problem.hint
    assert not problem.fix


def test_the_best_checkpoint_is_refused_once_with_all_that_it_needs() -> None:
    for training in (
        {"load_best_model_at_end": True},
        {"load_best_model_at_end": True, "save_steps": 50},
        {"load_best_model_at_end": True, "save_strategy": "no"},
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
        {"load_best_model_at_end": True, "eval_strategy": "no"},
        {"load_best_model_at_end": True, "eval_strategy": "no", "save_steps": 100},
        {"load_best_model_at_end": True, "save_strategy": "best"},
    ):
        data = LEAST | {"training": training}
        (problem,) = problems(data)
        settled = mended(data, problem.fix)
        assert problems(settled) == ()
        assert jobfile.validate(settled).eval_strategy != "no"
    held_out = LEAST | {"eval_split": 0.1}
    for training in (
        {"load_best_model_at_end": True, "save_steps": 50},
        {"load_best_model_at_end": True, "save_strategy": "steps"},
        {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "epoch"},
        {"load_best_model_at_end": True, "save_steps": 100, "eval_strategy": "steps", "eval_steps": 30},
        {"load_best_model_at_end": True, "save_strategy": "no"},
    ):
        data = held_out | {"training": training}
        (problem,) = problems(data)
        assert problems(mended(data, problem.fix)) == ()
    assert problems(held_out | {"training": {"load_best_model_at_end": True}}) == ()


AXOLOTL = {
    "base_model": "/srv/models/llama",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "lora_model_dir": None,
    "sequence_len": 4096,
    "sample_packing": True,
    "pad_to_sequence_len": True,
    "datasets": [{"path": "/srv/data/a.jsonl", "type": "alpaca"}],
    "dataset_prepared_path": "last_run_prepared",
    "val_set_size": 0.05,
    "output_dir": "/srv/out",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 4,
    "optimizer": "paged_adamw_32bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
    "wandb_project": None,
    "wandb_entity": None,
    "resume_from_checkpoint": None,
}
FACTORY = {
    "model_name_or_path": "/srv/models/llama",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "/srv/data/a.jsonl",
    "template": "llama3",
    "cutoff_len": 2048,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "/srv/out",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 500,
    "per_device_eval_batch_size": 1,
}
TRL = {
    "model_name_or_path": "/srv/models/qwen",
    "dataset_name": "/srv/data/a.jsonl",
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_length": 2048,
    "packing": True,
    "learning_rate": 2e-4,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 2,
    "gradient_checkpointing": True,
    "eval_strategy": "no",
    "output_dir": "/srv/out",
    "push_to_hub": True,
    "assistant_only_loss": True,
    "seed": 42,
}
UNSLOTH = {
    "model_name": "/srv/models/qwen",
    "max_seq_length": 2048,
    "load_in_4bit": True,
    "full_finetuning": False,
    "r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "bias": "none",
    "use_gradient_checkpointing": "unsloth",
    "random_state": 3407,
    "use_rslora": False,
    "loftq_config": None,
    "dataset_text_field": "text",
    "datasets": [{"path": "/srv/data/a.jsonl"}],
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "warmup_steps": 5,
    "max_steps": 60,
    "learning_rate": 2e-4,
    "fp16": False,
    "bf16": True,
    "logging_steps": 1,
    "optim": "adamw_8bit",
    "weight_decay": 0.01,
    "lr_scheduler_type": "linear",
    "seed": 3407,
    "output_dir": "/srv/out",
}
OPENAI = {
    "model": "/srv/models/qwen",
    "training_file": "/srv/data/a.jsonl",
    "validation_file": "/srv/data/v.jsonl",
    "suffix": "support",
    "seed": 7,
    "metadata": {"team": "a"},
    "method": {
        "type": "supervised",
        "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": "auto", "learning_rate_multiplier": "auto"}},
    },
}


@pytest.mark.parametrize(
    "given", [AXOLOTL, FACTORY, TRL, UNSLOTH, OPENAI], ids=["axolotl", "factory", "trl", "unsloth", "openai"]
)
def test_the_file_of_another_tool_is_taken_after_its_fixes_in_two_rounds(given: dict[str, Any]) -> None:
    settled = given
    for _ in range(2):
        found = problems(settled)
        assert all(problem.fix for problem in found), [str(problem) for problem in found if not problem.fix]
        settled = mended(settled, InvalidSpecError(found).fix)
    assert problems(settled) == ()


@pytest.mark.parametrize(
    ("given", "change", "expected"),
    [
        (
            AXOLOTL,
            {},
            {
                "quantization": "4bit",
                "lora.r": 32,
                "lora.target_modules": "all-linear",
                "training.max_length": 4096,
                "training.packing": True,
                "training.eval_steps": 0.0625,
                "training.save_strategy": "epoch",
                "eval_split": 0.05,
                "datasets.0.format": "alpaca",
            },
        ),
        (AXOLOTL, {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, {"quantization": "8bit"}),
        (
            AXOLOTL,
            {
                "adapter": None,
                "load_in_4bit": False,
                "lora_r": None,
                "lora_alpha": None,
                "lora_dropout": None,
                "lora_target_linear": None,
            },
            {"lora": None, "quantization": None, "training.learning_rate": 2e-4},
        ),
        (AXOLOTL, {"val_set_size": 0.0}, {"eval_split": None, "training.eval_strategy": None}),
        (AXOLOTL, {"bf16": True}, {"dtype": "bfloat16"}),
        (
            FACTORY,
            {},
            {
                "lora.r": 8,
                "base_model": "/srv/models/llama",
                "training.warmup_steps": 0.1,
                "datasets.0.path": "/srv/data/a.jsonl",
                "eval_split": 0.1,
                "report_to": "none",
            },
        ),
        (FACTORY, {"finetuning_type": "full", "lora_rank": None, "lora_target": None}, {"lora": None}),
        (FACTORY, {"stage": "pt"}, {"lora.r": 8}),
        (
            FACTORY,
            {"quantization_bit": 4, "flash_attn": "fa2"},
            {"quantization": "4bit", "attn_implementation": "flash_attention_2"},
        ),
        (TRL, {}, {"lora.target_modules": ["q_proj", "v_proj"], "training.packing": True, "training.seed": 42}),
        (TRL, {"load_in_4bit": True}, {"quantization": "4bit"}),
        (UNSLOTH, {}, {"lora.r": 16, "lora.bias": "none", "quantization": "4bit", "training.max_steps": 60}),
        (OPENAI, {}, {"training.num_train_epochs": 3, "name": "support", "eval_datasets.0.path": "/srv/data/v.jsonl"}),
    ],
)
def test_what_the_file_of_another_tool_asked_for_is_kept(
    given: dict[str, Any], change: dict[str, Any], expected: dict[str, Any]
) -> None:
    settled = settle(given | change)
    assert problems(settled) == ()
    assert {key: at(settled, as_path(key)) for key in expected} == expected


def test_no_hint_names_a_file_that_is_not_on_the_users_machine() -> None:
    for path in (ROOT / "daemon/honed").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not ("hint=" in line and "docs/" in line), f"{path}:{number}"


def test_a_whole_number_in_quotes_stays_whole_where_a_share_may_stand() -> None:
    settled = settle(LEAST | {"eval_split": 0.1, "training": {"eval_strategy": "steps", "eval_steps": "50"}})
    assert repr(settled["training"]["eval_steps"]) == "50"


def test_what_a_mended_key_makes_known_is_told_at_once() -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    lines = {("training",): 3, ("eval_split",): 4}
    with pytest.raises(InvalidSpecError) as caught:
        jobfile.validate(LEAST | {"eval_split": "10%", "training": best}, lines)
    assert {each.key for each in caught.value.problems} == {"eval_split", "training.metric_for_best_model"}
    assert problems(mended(LEAST | {"eval_split": "10%", "training": best}, caught.value.fix)) == ()
