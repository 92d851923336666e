"""A loaded base model has what its files have, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from honed.system.error import ModelError
from honed.worker.model import verify

QUANTIZED = {
    "none": None,
    "4bit": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
    "8bit": BitsAndBytesConfig(load_in_8bit=True),
}
#: As the module names it, renamed and turned round (Conv1D), with fused experts.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gpt_neox": {},
    "gpt2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Return other numbers of the same form: as if the tensor had been left as it was initialised."""
    return (
        tensor + 0.3 if tensor.is_floating_point() else torch.roll(tensor, 37 if tensor.dtype == torch.uint8 else 1, 0)
    )


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_that_is_not_the_file_s_is_named(
    family: str, quantization: str, checkpoint_of: Callable[..., Path]
) -> None:
    directory = checkpoint_of(family, hidden_size=128, dtype="bfloat16", **FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=QUANTIZED[quantization]
    )
    parameters = dict(model.named_parameters())
    assert len(verify.check(model, directory).samples) >= len(parameters)
    for name, parameter in parameters.items():
        was, parameter.data = parameter.data, spoil(parameter.data)
        with pytest.raises(ModelError, match=r"after loading, [0-9]+ of [0-9]+ tensors differ") as caught:
            verify.check(model, directory)
        parameter.data = was
        assert name.split(".")[-1] in caught.value.message or "experts" in name or "embed_out" in caught.value.message


@pytest.mark.parametrize("spread", ["heavy tails", "scales of rows", "an outlier column"])
def test_a_quantized_matrix_of_any_spread_is_near_its_file_s_and_far_from_another(spread: str) -> None:
    import bitsandbytes

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator)
    match spread:
        case "heavy tails":
            weight = weight / torch.randn(3, 256, 512, generator=generator).square().mean(0).sqrt()
        case "scales of rows":
            weight = weight * torch.randn(256, 1, generator=generator).exp()
        case _:
            weight[:, 7] *= 20
    weight = (0.02 * weight).bfloat16()
    matrix = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to("cpu")

    def rows(wanted: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        return lambda start, end: wanted[start:end].float()

    assert verify._is_near_4bit(matrix, rows(weight))
    assert verify._is_near_4bit(matrix, rows(torch.roll(weight, 1, 0))) is False


def test_a_matrix_that_the_family_stores_fused_is_loaded_in_4_bits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("hrm_text", vocab_size=96, num_key_value_heads=2, head_dim=32, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QUANTIZED["4bit"])
    assert verify.check(model, tmp_path).samples


def test_a_padding_row_that_the_loader_sets_to_zero_is_put_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    latent = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
    heads = {"qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 60}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("youtu", vocab_size=96, **sizes, **latent, **heads))
    with torch.no_grad():
        row = model.get_input_embeddings().weight[60].uniform_().clone()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.get_input_embeddings().weight[60].any()  # as transformers 5.17 leaves it
    verify.check(loaded, tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight[60], row)
