"""The plan: backend, memory and warnings."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs import basemodel
from honed.inputs.basemodel import BaseModelInfo
from honed.plan import plan
from honed.plan.plan import Plan
from honed.spec import jobfile
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.error import BackendError
from honed.system.installed import Installed
from zoo import family, plain

GIB = 2**30
H100 = Device("cuda", "NVIDIA H100", 0, "GPU-0", (9, 0), 80 * GIB, 80 * GIB)
T4 = Device("cuda", "Tesla T4", 0, "GPU-0", (7, 5), 16 * GIB, 16 * GIB)
P100 = Device("cuda", "Tesla P100", 0, "GPU-0", (6, 0), 16 * GIB, 16 * GIB)
CPU = Device("cpu", "a processor", total_bytes=24 * GIB, free_bytes=20 * GIB)
MPS = Device("mps", "Apple GPU", total_bytes=24 * GIB, free_bytes=20 * GIB)

STOCK = Installed({"torch": "2.13.0", "unsloth": None, "unsloth_zoo": None}, frozenset({"torch"}))
WITH_UNSLOTH = Installed(
    {"torch": "2.13.0", "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9"},
    frozenset({"torch", "unsloth", "unsloth_zoo"}),
)


@pytest.fixture
def model(tmp_path: Path) -> BaseModelInfo:
    return basemodel.inspect(plain.write_base_model(tmp_path / "model"))


def make(
    model: BaseModelInfo, device: Device = CPU, here: Installed = STOCK, *, full: bool = False, **keys: Any
) -> Plan:
    tuning = {} if full else {"lora": {"r": 4}}
    job = jobfile.validate({"base_model": "/m", "datasets": [{"path": "/d.jsonl"}], **tuning, **keys})
    return plan.make(job, model, device, config=Config(), installed=here)


@pytest.mark.parametrize(
    ("device", "here", "keys", "backend", "reason"),
    [
        (H100, WITH_UNSLOTH, {}, "unsloth", "is installed"),
        (H100, STOCK, {}, "transformers", "not installed"),
        (P100, WITH_UNSLOTH, {}, "transformers", "compute capability 7.0"),
        (CPU, WITH_UNSLOTH, {}, "transformers", "no faster"),
        (MPS, WITH_UNSLOTH, {}, "transformers", "Apple"),
        (CPU, WITH_UNSLOTH, {"backend": "unsloth"}, "unsloth", "as the job asks"),
        (H100, WITH_UNSLOTH, {"backend": "transformers"}, "transformers", "as the job asks"),
    ],
)
def test_the_backend_is_chosen_with_a_reason(
    model: BaseModelInfo, device: Device, here: Installed, keys: dict[str, Any], backend: str, reason: str
) -> None:
    found = make(model, device, here, **keys).backend
    assert found.name == backend
    assert reason in found.reasons[0]


@pytest.mark.parametrize(
    ("device", "here", "keys", "why"),
    [
        (H100, STOCK, {}, "not installed"),
        (CPU, WITH_UNSLOTH, {"quantization": "8bit"}, "in 16 bits"),
        (CPU, WITH_UNSLOTH, {"dtype": "float16"}, "in bfloat16 instead of the planned float16"),
        (CPU, WITH_UNSLOTH, {"full": True}, "only adapters"),
    ],
)
def test_unsloth_by_name_is_refused_where_it_would_do_something_else(
    model: BaseModelInfo, device: Device, here: Installed, keys: dict[str, Any], why: str
) -> None:
    with pytest.raises(BackendError, match=why):
        make(model, device, here, backend="unsloth", **keys)


@pytest.mark.parametrize(
    ("device", "family", "keys", "why"),
    [
        (H100, "qwen3", {"dtype": "float32"}, "computes float32 models in half precision"),
        (H100, "qwen3", {"dtype": "float32", "full": True}, "computes float32 models in half precision"),
        (H100, "qwen3", {"dtype": "float32", "quantization": "4bit"}, "computes float32 models in half precision"),
        (T4, "gemma2", {"dtype": "auto"}, "computes float32 models in half precision"),
        (H100, "gemma2", {"dtype": "float16"}, "known to overflow"),
        (H100, "llama", {"lora": {"modules_to_save": ["lm_head", "q_proj"]}}, "modules_to_save has q_proj"),
        (H100, "llama", {"lora": {"target_modules": ["q_proj", "embed_tokens"]}}, "trains embed_tokens in full"),
        (H100, "qwen3", {}, ""),
        (H100, "qwen3", {"quantization": "4bit"}, ""),
        (T4, "llama", {"dtype": "float16"}, ""),
        (T4, "llama", {"dtype": "float16", "full": True}, ""),
        (H100, "llama", {"lora": {"modules_to_save": ["lm_head", "embed_tokens", "model.norm"]}}, ""),
        (H100, "llama", {"lora": {"trainable_token_indices": [3]}}, "with transformers alone"),
        (H100, "granite", {"lora": {"modules_to_save": ["q_proj"]}}, ""),  # its class for all other families takes any
    ],
)
def test_unsloth_is_sent_nothing_that_it_would_change_on_a_gpu(
    model: BaseModelInfo, device: Device, family: str, keys: dict[str, Any], why: str
) -> None:
    given = replace(model, model_type=family)
    found = make(given, device, WITH_UNSLOTH, **keys).backend
    assert (found.name == "unsloth") == (not why)
    assert why in found.reasons[0]
    if why:
        with pytest.raises(BackendError, match=why):
            make(given, device, WITH_UNSLOTH, backend="unsloth", **keys)


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth")
def test_what_the_plan_knows_of_unsloth_is_what_its_code_says() -> None:
    found = importlib.util.find_spec("unsloth")
    assert found is not None
    assert found.origin is not None
    models = Path(found.origin).parent / "models"
    chosen = re.findall(r'\n        (?:el)?if model_type == "(\w+)":', (models / "loader.py").read_text())
    assert set(chosen) == plan.UNSLOTH_FAMILIES
    allowed = "Only 'lm_head', 'embed_tokens' and \"\n" + " " * 24 + '"normalization layers'
    assert allowed in (models / "llama.py").read_text()


def test_what_may_not_fit_is_warned_about(model: BaseModelInfo) -> None:
    large = replace(model, tensors=(), num_parameters=12 * 10**9, stored_dtypes={"bfloat16": 12 * 10**9})
    found = make(large, H100, full=True)
    assert not found.memory.fits
    assert any(warning.startswith("memory: ") for warning in found.warnings)


@pytest.mark.parametrize(
    ("name", "quantization", "is_told"),
    [("mixtral", "4bit", True), ("mixtral", "8bit", True), ("mixtral", "none", False), ("llama", "4bit", False)],
)
def test_experts_that_quantization_leaves_wide_are_told_with_their_bytes(
    name: str,
    quantization: str,
    is_told: bool,
    tmp_path: Path,
) -> None:
    mixture = basemodel.inspect(family.write(tmp_path / name, name))
    words = [each for each in make(mixture, quantization=quantization).warnings if "leaves the experts in" in each]
    assert len(words) == is_told
    for each in words:
        assert re.search(rf"{quantization} leaves the experts in \w+, [\d.]+ \w+ of [\d.]+ \w+ of weights", each)


def test_a_config_that_contradicts_the_weights_is_told(model: BaseModelInfo) -> None:
    model.config["dtype"] = "bfloat16"
    assert any("says bfloat16, but the weights are stored in float32" in warning for warning in make(model).warnings)


def test_the_plan_has_the_published_shape_and_is_json(model: BaseModelInfo) -> None:
    made = json.loads(json.dumps(make(model).as_dict()))
    assert set(made["backend"]) == {"name", "reasons"}
    assert set(made["precision"]) >= {
        "load_dtype",
        "compute_dtype",
        "bf16",
        "fp16",
        "quantization",
        "attn_implementation",
        "adapter_dtype",
        "reasons",
    }
    assert set(made["memory"]) == {
        "weights_bytes",
        "adapter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "total_bytes",
        "available_bytes",
        "fits",
        "batch_size",
        "length",
        "paged_bytes",
        "media",
        "num_media_tokens",
        "tower_bytes",
        "num_frames",
        "num_pixels",
        "exchange_bytes",
        "num_ranks",
    }
    num_parameters = 4 * 64 + 3 * 128 + 2 * 32 * 8 + 3 * 8
    assert made["checkpoint"]["num_parameters"] == num_parameters
    assert made["checkpoint"]["stored_dtypes"] == {"float32": num_parameters}
    assert made["base_model_path"] == str(model.path)
    assert made["warnings"] == []
