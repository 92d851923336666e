"""Merges of real tiny models: the output gives the logits of base plus adapter, in one dtype throughout."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer

from honed.inputs import basemodel
from honed.job.plan_file import Precision
from honed.plan import plan
from honed.spec import export as exports
from honed.spec import jobfile
from honed.spec.config import Config
from honed.system.device import cpu
from honed.system.error import InterruptedRunError, ModelError, PrecisionError
from honed.worker import assignment
from honed.worker.model import likeness, merge, written
from honed.worker.model.writer import WRITERS, Writer
from honed.worker.stop import Stop
from worker.conftest import INSTALLED, MakeJob, WorkerJob
from zoo.vision import FAMILIES, build_vision_checkpoint

#: The beginning of what is said of models that were not compared as a whole.
LAYERS = "compared with base and adapter, layer by layer: the logits differ by"
TOKENS = torch.arange(3, 40).reshape(1, -1)
MIXTRAL = {"template": "mistral", "num_local_experts": 4}
QWEN3_MOE = {
    "template": "qwen3",
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
#: Families, and the ways in which an adapter is more than two matrices beside a weight.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "rslora": ("qwen3", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}}),
    "dora": ("mistral", {"use_dora": True}),
    "dora, tied": ("gemma2", {"use_dora": True}),
    "conv1d, biases": ("gpt2", {"bias": "all"}),
    "conv1d, dora": ("gpt2", {"use_dora": True}),
    "embeddings": ("qwen3", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "embeddings, tied": ("gemma2", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embeddings, dora": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "trained tokens": ("qwen3", {"trainable_token_indices": [7, 9]}),
    "trained tokens, both tied": ("gemma2", {"trainable_token_indices": [7, 9]}),
    "a head of its own, tied": ("gemma2", {"modules_to_save": ["lm_head"]}),
    "saved modules": ("llama", {"modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "bias of lora": ("llama", {"lora_bias": True, "model": {"attention_bias": True, "mlp_bias": True}}),
    "pissa": ("llama", {"init_lora_weights": "pissa"}),
    "olora": ("llama", {"init_lora_weights": "olora"}),
    "fused projections": ("phi3", {}),
    "neox": ("gpt_neox", {}),
    "experts": ("qwen3_moe", {"model": QWEN3_MOE}),
    "experts and a router": ("mixtral", {"use_rslora": True, "model": MIXTRAL}),
    "experts in part": ("mixtral", {"target_modules": ["q_proj", "w2"], "model": MIXTRAL}),
    "experts left out": ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"], "model": QWEN3_MOE}),
}


def adapter_for(base: Path, directory: Path, *, kind: Any = AutoModelForCausalLM, **options: Any) -> Path:
    """Save an adapter as if it had been trained: all its weights are changed."""
    model = kind.from_pretrained(base, dtype=torch.float32)
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **(defaults | options)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(TOKENS).logits.float())


def side_by_side(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(peft.PeftModel.from_pretrained(model, adapter))


def whole(directory: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return logits(model)


def stored_dtypes(directory: Path) -> set[torch.dtype]:
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    return found


def merge_to(base: Path, adapter: Path, target: Path, dtype: str = "float32", **options: Any) -> merge.Merged:
    return merge.merge(base, adapter, target, dtype=dtype, config=AutoConfig.from_pretrained(base), **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_merged_model_gives_the_logits_of_base_plus_adapter(
    way: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    family, options = WAYS[way]
    options = dict(options)
    base = checkpoint_of(family, **options.pop("model", {}))
    adapter = adapter_for(base, tmp_path / "adapter", **options)
    merged = merge_to(base, adapter, tmp_path / "merged")
    expected = side_by_side(base, adapter)
    torch.testing.assert_close(whole(tmp_path / "merged"), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole(base), expected, atol=1e-3), "the adapter does something"
    assert merged.is_untied == ("tied" in way and "dora" not in way and "both" not in way)
    AutoTokenizer.from_pretrained(tmp_path / "merged")


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_every_parameter_is_in_the_asked_dtype_and_so_says_its_config(
    family: str, dtype: str, tolerance: float, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of(family)
    adapter = adapter_for(base, tmp_path / "adapter")
    merge_to(base, adapter, tmp_path / "merged", dtype)
    assert stored_dtypes(tmp_path / "merged") == {getattr(torch, dtype)}
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    torch.testing.assert_close(whole(tmp_path / "merged"), side_by_side(base, adapter), atol=tolerance, rtol=tolerance)


def test_a_sharded_base_becomes_a_sharded_model_of_bounded_files(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    single = checkpoint_of("qwen3")
    model = AutoModelForCausalLM.from_pretrained(single, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    AutoTokenizer.from_pretrained(single).save_pretrained(tmp_path / "base")
    assert (tmp_path / "base/model.safetensors.index.json").exists()
    adapter = adapter_for(tmp_path / "base", tmp_path / "adapter")
    merged = merge_to(tmp_path / "base", adapter, tmp_path / "merged", max_shard_bytes=200_000)
    assert merged.num_shards > 2
    sizes = [path.stat().st_size for path in (tmp_path / "merged").glob("*.safetensors")]
    assert len(sizes) == merged.num_shards
    assert max(sizes) < 210_000
    torch.testing.assert_close(
        whole(tmp_path / "merged"), side_by_side(tmp_path / "base", adapter), atol=1e-5, rtol=1e-5
    )


def test_names_of_another_time_are_found_and_kept(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint_of("gpt2")
    adapter = adapter_for(base, tmp_path / "adapter")
    expected = side_by_side(base, adapter)
    old = shutil.copytree(base, tmp_path / "old")
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(base / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256).tril()  # as the hub's gpt2 has it
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    merge_to(old, adapter, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_sees_keeps_its_eyes(family: str, tmp_path: Path) -> None:
    base = build_vision_checkpoint(tmp_path / "base", family)
    adapter = adapter_for(
        base, tmp_path / "adapter", kind=AutoModelForMultimodalLM, target_modules=["q_proj", "o_proj"]
    )
    merge_to(base, adapter, tmp_path / "merged", "bfloat16")
    assert stored_dtypes(tmp_path / "merged") == {torch.bfloat16}
    merge_to(base, adapter, tmp_path / "whole")
    model = AutoModelForMultimodalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(peft.PeftModel.from_pretrained(model, adapter))
    merged, info = AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_that_is_stored_quantized_is_merged_whole(
    bits: int, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import BitsAndBytesConfig

    plain = checkpoint_of("llama")
    how = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(plain).save_pretrained(tmp_path / "base")
    adapter = adapter_for(plain, tmp_path / "adapter")
    merge_to(tmp_path / "base", adapter, tmp_path / "merged")
    assert stored_dtypes(tmp_path / "merged") == {torch.float32}
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    if bits == 4:  # bitsandbytes' own product on a CPU is of bfloat16's precision, and 8-bit layers round their inputs
        quantized = quantized.dequantize()
    beside = logits(peft.PeftModel.from_pretrained(quantized, adapter))
    tolerance = 1e-4 if bits == 4 else 0.05
    torch.testing.assert_close(whole(tmp_path / "merged"), beside, atol=tolerance, rtol=tolerance)
    ended = merge_job(tmp_path / "job", tmp_path / "base", adapter, dtype="bfloat16").run()
    assert any(LAYERS in each for each in ended.messages("info"))


def test_what_does_not_belong_together_is_refused_by_name(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    llama, wide = checkpoint_of("llama"), checkpoint_of("llama", hidden_size=96)
    adapter = adapter_for(llama, tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"does not match LlamaForCausalLM.*q_proj"):
        merge_to(wide, adapter, tmp_path / "wide")
    with pytest.raises(ModelError, match="adapter"):
        merge_to(checkpoint_of("gpt2"), adapter, tmp_path / "other")
    with pytest.raises(ModelError, match="pissa_niter"):
        merge_to(llama, adapter_for(llama, tmp_path / "niter", init_lora_weights="pissa_niter_4"), tmp_path / "n")


def test_a_parameter_beyond_float16_is_named(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    base = shutil.copytree(checkpoint_of("llama"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = adapter_for(base, tmp_path / "adapter")
    with pytest.raises(PrecisionError, match=r"model\.norm\.weight: up to 1e\+06, which float16 cannot hold"):
        merge_to(base, adapter, tmp_path / "merged", "float16")
    merge_to(base, adapter, tmp_path / "merged", "bfloat16")


# --- Dtypes, names, and what was trained on ---------------------------------------------------------------------------


def deepseek(directory: Path) -> Path:
    """A mixture of experts whose routers choose by float32 biases that bfloat16 has no numbers for."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 6.8 + 0.25 * torch.rand(tensors[name].shape)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_the_class_or_the_base_keeps_wider_stays_so(dtype: str, tmp_path: Path) -> None:
    base = deepseek(tmp_path / "base")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=["q_b_proj", "o_proj"])
    merged = merge_to(base, adapter, tmp_path / "merged", dtype)
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[bias], after[bias]), "bit for bit"
    wide = {name for name, each in after.items() if each.dtype != getattr(torch, dtype)}
    assert wide == ({bias, "model.norm.weight"} if dtype != "float32" else set())
    assert ("in float32 " + bias in str(merged)) == bool(wide), str(merged)


def test_layers_that_share_weights_are_stored_apart_where_the_adapter_makes_them_differ(tmp_path: Path) -> None:
    """Zamba2's blocks: its config unties them all, the head too, which then must be stored as well."""
    from transformers import Zamba2Config

    torch.manual_seed(0)
    config = Zamba2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_state=8,
        n_mamba_heads=2,
        mamba_headdim=32,
        mamba_ngroups=1,
        chunk_size=8,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        adapter_rank=4,
    )
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    assert merge_to(base, adapter, tmp_path / "merged").is_untied
    torch.testing.assert_close(whole(tmp_path / "merged"), side_by_side(base, adapter), atol=1e-5, rtol=1e-5)


def test_weights_that_the_class_ignores_and_the_config_declares_are_kept(tmp_path: Path) -> None:
    """Heads for several tokens; with a float32 A_log, as linear attention has it."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        mtp_num_hidden_layers=1,
    )
    base = tmp_path / "base"
    Qwen3_5ForCausalLM(config).bfloat16().save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    tensors = load_file(base / "model.safetensors")
    logs = {name: each.float() + 1e-4 for name, each in tensors.items() if name.endswith("A_log")}
    heads = {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.randn(32).bfloat16()}
    save_file({**tensors, **logs, **heads}, base / "model.safetensors", metadata={"format": "pt"})
    adapter = adapter_for(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    merge_to(base, adapter, tmp_path / "merged", "float16")
    after = load_file(tmp_path / "merged/model.safetensors")
    assert logs
    for name, each in {**logs, **heads}.items():
        assert each.dtype == after[name].dtype
        assert torch.equal(each, after[name])


@pytest.mark.parametrize("bits", [4, 8])
def test_olora_under_quantization_is_merged_onto_what_it_was_trained_on(
    bits: int, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import BitsAndBytesConfig

    base = checkpoint_of("llama", dtype="bfloat16")
    how = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )

    def quantized() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=torch.bfloat16)

    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": "olora"}
    trained = peft.get_peft_model(quantized(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    trained.save_pretrained(tmp_path / "adapter")
    precision = Precision(
        load_dtype="bfloat16",
        compute_dtype="bfloat16",
        bf16=True,
        fp16=False,
        adapter_dtype="float32",
        quantization=f"{bits}bit",
        attn_implementation="sdpa",
        reasons={},
    )
    manifest = {"plan": {"precision": asdict(precision)}}
    (tmp_path / "adapter/honed.json").write_text(json.dumps(manifest))
    merge_to(base, tmp_path / "adapter", tmp_path / "merged")
    stored = load_file(tmp_path / "merged/model.safetensors")
    layer = trained.base_model.model.model.layers[0].self_attn.q_proj
    inputs = torch.eye(layer.in_features)
    weight = layer.get_base_layer().weight
    if bits == 4:
        from bitsandbytes.functional import dequantize_4bit

        begun = dequantize_4bit(weight.data, weight.quant_state).float()
    else:
        state = layer.get_base_layer()
        state(inputs.bfloat16())  # takes the new weight's scales
        scales = state.state.SCB if weight.SCB is None else weight.SCB
        begun = weight.data.float() * scales[:, None] / 127
    expected = begun + layer.get_delta_weight("default").float()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(stored[name], expected, atol=1e-5, rtol=1e-5)
    plain = load_file(base / "model.safetensors")[name].float()
    assert not torch.allclose(stored[name], plain, atol=1e-2)


# --- The second computation -------------------------------------------------------------------------------------------


def wrong_scale(part: Any, *_: Any, **__: Any) -> None:
    for name in part.scaling:
        part.get_base_layer().weight.data += 1.02 * part.get_delta_weight(name)


def nothing(*_: Any, **__: Any) -> None:
    return None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [wrong_scale, nothing])
def test_a_merge_that_is_wrong_is_found_while_it_is_written(
    wrong: Any, dtype: str, checkpoint_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint_of("llama")
    adapter = adapter_for(base, tmp_path / "adapter")
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", wrong)
    with pytest.raises(ModelError, match=r"down_proj.weight: .* is not base plus adapter: up to .* apart"):
        merge_to(base, adapter, tmp_path / "merged", dtype)


def test_a_tensor_of_the_adapter_that_nothing_was_made_of_is_named(
    checkpoint_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint_of("llama")
    adapter = adapter_for(base, tmp_path / "adapter", modules_to_save=["norm"])
    parts = merge._parts
    monkeypatch.setattr(
        merge, "_parts", lambda *given: (each for each in parts(*given) if "layers.1.mlp.down_proj" not in each[0])
    )
    with pytest.raises(ModelError, match=r"lacks what the adapter trained: .*layers\.1\.mlp\.down_proj"):
        merge_to(base, adapter, tmp_path / "merged")


def test_a_file_that_is_not_what_was_written_is_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that loses a write: the header is whole, and each merged tensor was right in memory."""
    base = checkpoint_of("llama")
    adapter = adapter_for(base, tmp_path / "adapter")
    write = merge._write

    def lossy(target: Path, *given: Any) -> Any:
        digests = write(target, *given)
        with (target / "model.safetensors").open("r+b") as file:
            file.seek(-64, 2)
            file.write(bytes(32))
        return digests

    monkeypatch.setattr(merge, "_write", lossy)
    with pytest.raises(ModelError, match="does not have on disk what was written: model"):
        merge_to(base, adapter, tmp_path / "merged")


def test_a_written_model_that_its_own_config_does_not_make_is_refused(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of("qwen3_moe", **QWEN3_MOE)
    for key, value, fault in (
        ("num_experts", 4, None),
        ("num_experts", 5, "another shape than its own config requires: model.layers.0.mlp.gate"),
        ("num_hidden_layers", 3, "lacks tensors that its own config requires: model.layers.2"),
        ("num_hidden_layers", 1, "has tensors that its own config has no place for: model.layers.1"),
    ):
        other = AutoConfig.from_pretrained(base, **{key: value})
        empty = merge.skeleton(other, "float32", trust_remote_code=False)
        with pytest.raises(ModelError, match=fault) if fault else contextlib.nullcontext():
            written.check(base, empty, [])


# --- Jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{}, {"quantization": "4bit"}, {"dtype": "bfloat16"}])
def test_a_training_job_leaves_a_merged_checkpoint_beside_its_adapter(make_job: MakeJob, way: dict[str, Any]) -> None:
    job = make_job(lora={"r": 4}, save_merged="bfloat16", **way)
    ended = job.run()
    assert ended.status == 0, ended.result
    merged = Path(ended.result["artifacts"]["merged"])
    assert merged == job.output_dir / "merged"
    assert stored_dtypes(merged) == {torch.bfloat16}
    assert any("merged: compared with base and adapter: " in message for message in ended.messages("info"))
    base = Path(job.plan["base_model_path"])
    torch.testing.assert_close(whole(merged), side_by_side(base, job.output_dir), atol=0.05, rtol=0.05)


def test_an_export_is_an_entry_and_a_writer_and_one_that_fails_costs_no_other(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lists(_job: object, _export: object, output_dir: Path, target: Path, _progress: object) -> list[str]:
        target.mkdir()
        (target / "names.txt").write_text(" ".join(path.name for path in output_dir.iterdir()))
        return ["names.txt: added"]

    def fails(_job: object, _export: object, _output_dir: Path, target: Path, _progress: object) -> list[str]:
        target.mkdir()
        raise OSError("no room")

    entries = {name: exports.Export(name, "save_merged", "a list", "", 0, False) for name in ("broken", "names")}
    monkeypatch.setattr(exports, "EXPORTS", (entries["broken"], *exports.EXPORTS, entries["names"]))
    monkeypatch.setitem(WRITERS, "broken", Writer(fails, lambda *_given, **_more: ""))
    monkeypatch.setitem(WRITERS, "names", Writer(lists, lambda written, *_given, **_more: f"listed in {written.name}"))
    job = make_job(lora={"r": 4}, save_merged="bfloat16", training={"max_steps": 1})
    ended = job.run()
    assert "OSError" in ended.result["error"]["message"]
    assert {item["name"] for item in ended.of("artifact")} == {"output_dir", "merged", "names"}
    assert "adapter_model.safetensors" in (job.output_dir / "names/names.txt").read_text()
    assert (job.output_dir / "merged/model.safetensors").exists()
    assert not (job.output_dir / "broken").exists()
    assert {"output: names/names.txt: added", "output: names: listed in names"} <= set(ended.messages("info"))


def test_every_export_has_a_writer() -> None:
    assert set(WRITERS) == {item.name for item in exports.EXPORTS}


def change_config(directory: Path, **keys: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_a_merged_model_that_computes_something_else_is_refused(
    quantization: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors are right and have their places, but its config.json is of another function."""
    job = make_job("llama", lora={"r": 4}, save_merged="bfloat16", quantization=quantization)
    merge_as_it_is = merge.merge

    def wrong(base: Path, adapter: Path, target: Path, **given: Any) -> merge.Merged:
        merged = merge_as_it_is(base, adapter, target, **given)
        change_config(target, rms_norm_eps=0.02)
        return merged

    monkeypatch.setattr(merge, "merge", wrong)
    ended = job.run()
    assert ended.result["error"]["code"] == "model_invalid"
    assert "is not base plus adapter: its logits differ by" in ended.result["error"]["message"]
    assert (job.output_dir / "adapter_model.safetensors").exists()
    assert not (job.output_dir / "merged").exists()


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_models_that_do_not_fit_the_planned_memory_are_compared_layer_by_layer(
    make_job: MakeJob, quantization: str
) -> None:
    job = make_job(lora={"r": 4}, save_merged="bfloat16", training={"max_steps": 1}, quantization=quantization)
    job.change_plan(memory=job.plan["memory"] | {"activation_bytes": 2**20})
    ended = job.run()
    assert ended.status == 0, ended.result
    assert len([each for each in ended.messages("info") if LAYERS in each]) == 1
    assert LAYERS in (job.output_dir / "README.md").read_text()


def test_models_of_which_a_layer_does_not_fit_are_not_compared(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likeness, "MIN_ROOM_BYTES", 0)
    job = make_job(lora={"r": 4}, save_merged="bfloat16", training={"max_steps": 1})
    job.change_plan(memory=job.plan["memory"] | {"activation_bytes": 2**20})
    ended = job.run()
    assert ended.status == 0, ended.result
    told = [each for each in ended.messages("info") if "not compared with base and adapter" in each]
    assert len(told) == 1 and "that takes 2 MiB of memory, and 1 MiB is planned; layer by layer it takes" in told[0]
    assert "not compared with base and adapter" in (job.output_dir / "README.md").read_text()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("wrong", ["a config", "a tensor", "another adapter"])
def test_a_merge_that_is_too_large_is_compared_layer_by_layer(
    family: str, wrong: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of(family, **(QWEN3_MOE if family == "qwen3_moe" else {}))
    adapter = adapter_for(base, tmp_path / "adapter", modules_to_save=["norm"])
    job = merge_job(tmp_path / "job", base, adapter, dtype="bfloat16")
    job.change_plan(memory=job.plan["memory"] | {"activation_bytes": 0})
    assert any(LAYERS in each for each in job.run().messages("info"))
    merged = job.output_dir
    if wrong == "a config":
        change_config(merged, **({"hidden_act": "relu"} if family == "llama" else {"rms_norm_eps": 0.02}))
    elif wrong == "a tensor":
        tensors = load_file(merged / "model.safetensors")
        tensors["model.layers.1.self_attn.o_proj.weight"].neg_()
        save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    else:
        weights = load_file(adapter / "adapter_model.safetensors")
        save_file({name: 2 * each for name, each in weights.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="not base plus adapter: its logits differ"):
        likeness.compare(merged, assignment.read(job.dir, 1))


@pytest.mark.parametrize("way", WAYS)
def test_each_kind_of_adapter_is_compared_layer_by_layer(
    way: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    family, options = WAYS[way]
    options = dict(options)
    base = checkpoint_of(family, **options.pop("model", {}))
    adapter = adapter_for(base, tmp_path / "adapter", **options)
    job = merge_job(tmp_path / "job", base, adapter, dtype="float32")
    job.change_plan(memory=job.plan["memory"] | {"activation_bytes": 0})
    told = job.run().messages("info")[-1]
    assert (LAYERS in told) == (way not in ("pissa", "olora")), told


def test_a_merge_of_a_divided_model_is_compared_layer_by_layer(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of("llama")
    job = merge_job(tmp_path / "job", base, adapter_for(base, tmp_path / "adapter"), dtype="bfloat16")
    assert job.run().status == 0
    job.change_plan(parallel={**job.plan["parallel"], "mode": "fsdp"})
    assert LAYERS in likeness.compare(job.output_dir, assignment.read(job.dir, 1))


def test_a_comparison_layer_by_layer_can_be_stopped(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint_of("llama")
    job = merge_job(tmp_path / "job", base, adapter_for(base, tmp_path / "adapter"), dtype="bfloat16")
    job.change_plan(memory=job.plan["memory"] | {"activation_bytes": 0})
    assert job.run().status == 0
    stop = Stop()
    stop.is_set = True
    with pytest.raises(InterruptedRunError):
        likeness.compare(job.output_dir, assignment.read(job.dir, 1), beat=stop.check)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_is_compared_with_base_and_adapter_side_by_side(
    family: str, dtype: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of(family, **(QWEN3_MOE if family == "qwen3_moe" else {}))
    adapter = adapter_for(base, tmp_path / "adapter", init_lora_weights="pissa" if family == "llama" else True)
    job = merge_job(tmp_path / "job", base, adapter, dtype=dtype)
    assert any("compared with base and adapter: the logits" in each for each in job.run().messages("info"))
    merged = job.output_dir
    change_config(merged, **({"hidden_act": "relu"} if family == "llama" else {"rms_norm_eps": 0.02}))
    with pytest.raises(ModelError, match="not base plus adapter: its logits differ"):
        likeness.compare(merged, assignment.read(job.dir, 1))


def merge_job(directory: Path, base: Path, adapter: Path, **keys: Any) -> WorkerJob:
    """A function that makes a merge with its plan, ready for the worker."""
    directory.mkdir(exist_ok=True)
    spec = jobfile.validate({"kind": "merge", "base_model": str(base), "adapter": str(adapter), **keys})
    planned = plan.make(
        spec,
        basemodel.inspect(base),
        cpu(),
        config=Config(),
        installed=INSTALLED,
        adapter=basemodel.inspect_adapter(adapter),
    )
    contents = {
        "job": {"id": 1, "name": "merged", "user_id": "1000", "instance": "/spool"},
        "date": "2026-11-29T12:00:00+00:00",
        "spec": spec.model_dump(mode="json") | {"adapter": "job:stage1"},
        "adapter_path": str(adapter),
        "output_dir": str(directory / "output"),
        **planned.as_dict(),
    }
    (directory / "plan.json").write_text(json.dumps(contents))
    return WorkerJob(directory)


def test_a_merge_job_tells_its_story_and_leaves_a_whole_checkpoint(
    checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = checkpoint_of("llama")
    adapter = adapter_for(base, tmp_path / "adapter")
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    job = merge_job(tmp_path / "job", base, adapter, dtype="bfloat16", chat_template=str(template))
    for attempt in (1, 2):  # the second takes the place of the first
        ended = job.run(attempt)
        assert (ended.status, ended.result["outcome"]) == (0, "succeeded"), ended.result
    assert [item["stage"] for item in ended.of("stage")] == ["prepare", "merge", "export"]
    assert any("tensors changed, all in bfloat16, one file" in message for message in ended.messages("info"))
    assert ended.of("step")[-1]["step"] == ended.of("step")[-1]["num_steps"]
    assert ended.result["artifacts"] == {"output_dir": str(job.output_dir)}
    assert stored_dtypes(job.output_dir) == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(job.output_dir).chat_template == "{{ messages }}"
    manifest = json.loads((job.output_dir / "honed.json").read_text())
    assert (manifest["spec"]["adapter"], manifest["plan"]["adapter_path"]) == ("job:stage1", str(adapter))
    assert str(adapter) in (job.output_dir / "README.md").read_text()


def test_a_merge_that_is_stopped_or_too_slow_leaves_nothing(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    base = checkpoint_of("llama")
    adapter = adapter_for(base, tmp_path / "adapter")
    job = merge_job(tmp_path / "job", base, adapter, dtype="bfloat16")
    stop = Stop()
    stop.is_set = True
    assert job.run(1, stop=stop).result["outcome"] == "interrupted"
    late = merge_job(tmp_path / "late", base, adapter, dtype="bfloat16", time_limit_sec=1e-6)
    assert late.run(1).result["error"]["code"] == "time_limit"
    for directory in (job.dir, late.dir):
        assert sorted(path.name for path in directory.iterdir()) == ["attempts", "plan.json"]
    assert job.run(2).status == 0


def test_an_adapter_is_kept_where_its_merge_fails(make_job: MakeJob, tmp_path: Path, checkpoint_of: Any) -> None:
    base = shutil.copytree(checkpoint_of("llama"), tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1] = 1e6  # of a token that no row has
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    job = make_job(model=base, lora={"r": 4}, save_merged="float16", dtype="float32")
    ended = job.run()
    assert ended.result["error"]["code"] == "precision_mismatch"
    assert ended.result["artifacts"] == {"output_dir": str(job.output_dir)}
    assert (job.output_dir / "adapter_model.safetensors").exists()
    assert not (job.output_dir / "merged").exists()
