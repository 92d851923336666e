"""A loaded base model has what its files have, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

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
    assert verify.check(model, directory) >= len(parameters)
    for name, parameter in parameters.items():
        was, parameter.data = parameter.data, spoil(parameter.data)
        with pytest.raises(ModelError, match=r"after loading, [0-9]+ of [0-9]+ tensors differ") as caught:
            verify.check(model, directory)
        parameter.data = was
        assert name.split(".")[-1] in caught.value.message or "experts" in name or "embed_out" in caught.value.message
