"""Checkpoints as they are found: each goes through the whole check, and is then either trained on for real or rejected.

Rejections come from the check, which imports no torch and reads no weights, and name the file and the remedy; or from
the worker before it reads weights, where only the libraries can tell.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from honed.check import preflight
from honed.check.checklist import Asked
from honed.spec import jobfile
from honed.spec.config import Config
from honed.system.device import cpu
from honed.system.error import HonedError, ModelError
from honed.system.layout import Layout
from honed.worker.model.config import load_config
from worker.conftest import Ended, WorkerJob
from zoo.model import build_checkpoint, write_facts

SHORT: dict[str, Any] = {
    "lora": {"r": 4},
    "training": {"max_steps": 1, "per_device_train_batch_size": 2},
    "predictions": {"sample_frequency": "off"},
}


class Found:
    """A checkpoint as it is found, and a job that trains on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base = path / "base"
        self.rows = write_facts(path / "facts.jsonl", 4)
        self.layout = Layout(path / "root")
        self.layout.jobs_dir.mkdir(parents=True)
        self.spec: dict[str, Any] = {}
        self.policy: dict[str, bool] = {}
        self.warnings: list[str] = []

    def build(self, family: str = "llama", **settings: Any) -> Path:
        return build_checkpoint(self.base, family, **settings)

    def edit(self, file: str, **keys: Any) -> None:
        """Set keys of a JSON file; None removes one."""
        path = self.base / file
        data = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    def train(self) -> Ended:
        """Run check, plan and worker as the daemon does. Raises HonedError where the check rejects the job."""
        return self.accept().run()

    def accept(self) -> WorkerJob:
        """Run the check, and make its plan. Raises HonedError where the check rejects the job."""
        spec_path = self.path / "job.json"
        document = {"base_model": str(self.base), "datasets": [{"path": str(self.rows)}], **SHORT, **self.spec}
        spec_path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
        config = Config.model_validate({"policy": self.policy})
        verdict = preflight.check(spec_path, Asked(self.layout, config=config, device=cpu(), job_id=1))
        self.warnings = verdict.warnings
        job_dir = self.layout.job(1).dir
        job_dir.mkdir()
        plan = {
            "job": {"id": 1, "name": "found", "user_id": "0", "instance": "/spool"},
            "date": "2026-11-29T12:00:00+00:00",
            "spec": verdict.spec.model_dump(mode="json"),
            "output_dir": str(verdict.output_dir),
            **verdict.plan.as_dict(),
        }
        (job_dir / "plan.json").write_text(json.dumps(plan))
        return WorkerJob(job_dir)


@pytest.fixture
def found(tmp_path: Path) -> Found:
    return Found(tmp_path)


# --- How they are found -----------------------------------------------------------------------------------------------


def without_model_type(a: Found) -> None:
    a.build("qwen3")
    a.edit("config.json", model_type=None)
    a.spec = {"model_type": "qwen3"}


def under_an_alias_and_quantized(a: Found) -> None:
    """A local Llama under a name that transformers does not know, to be loaded in 4 bits."""
    a.build("llama")
    a.edit("config.json", model_type="code_llama")
    a.spec = {"quantization": "4bit"}


def with_the_old_dtype_key(a: Found) -> None:
    a.build(dtype="bfloat16")
    a.edit("config.json", dtype=None, torch_dtype="bfloat16")


def stored_in_another_dtype_than_it_claims(a: Found) -> None:
    a.build(dtype="float16")
    a.edit("config.json", dtype="float32")


def in_shards(a: Found) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(a.build())
    (a.base / "model.safetensors").unlink()
    model.save_pretrained(a.base, max_shard_size="100KB")
    assert len(list(a.base.glob("model-*.safetensors"))) > 2


def in_shards_of_which_one_is_missing(a: Found) -> None:
    in_shards(a)
    min(a.base.glob("model-*.safetensors")).unlink()


def pickled(a: Found) -> None:
    a.build()
    torch.save(load_file(a.base / "model.safetensors"), a.base / "pytorch_model.bin")
    (a.base / "model.safetensors").unlink()


def pickled_and_allowed(a: Found) -> None:
    pickled(a)
    a.policy = {"pickle": True}


def with_tied_embeddings(a: Found) -> None:
    a.build(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(a.base / "model.safetensors")


def without_a_pad_token(a: Found) -> None:
    a.build()
    a.edit("tokenizer_config.json", pad_token=None)
    a.edit("config.json", pad_token_id=None)


def without_an_end_token(a: Found) -> None:
    a.build()
    a.edit("tokenizer_config.json", eos_token=None)


def without_a_chat_template(a: Found) -> None:
    a.build()
    (a.base / "chat_template.jinja").unlink()


def with_the_jobs_own_template(a: Found) -> None:
    a.build()
    shutil.move(a.base / "chat_template.jinja", a.path / "own.jinja")
    a.spec = {"chat_template": str(a.path / "own.jinja")}


def quantized(a: Found, **options: Any) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = build_checkpoint(a.path / "plain", "llama", dtype="bfloat16")
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(a.base)
    for file in [*plain.glob("tokenizer*"), *plain.glob("chat_template*")]:
        shutil.copy(file, a.base)


def already_in_4_bits_that_compute_in_another_dtype(a: Found) -> None:
    quantized(a, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)


def already_in_8_bits(a: Found) -> None:
    quantized(a, load_in_8bit=True)


def quantized_by(method: str) -> Callable[[Found], None]:
    def build(a: Found) -> None:
        a.build()
        a.edit("config.json", quantization_config={"quant_method": method, "bits": 4})

    return build


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_code_of_its_own(a: Found) -> None:
    a.build()
    (a.base / "own.py").write_text(OWN_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    a.edit("config.json", model_type="own_llama", architectures=["OwnForCausalLM"], auto_map=own)


def with_code_that_may_run(a: Found) -> None:
    with_code_of_its_own(a)
    a.spec, a.policy = {"trust_remote_code": True}, {"trust_remote_code": True}


def with_code_that_is_forbidden(a: Found) -> None:
    with_code_of_its_own(a)
    a.spec = {"trust_remote_code": True}


def with_an_adapter_to_go_on_from(
    a: Found, *, target_modules: tuple[str, ...] | list[str] = ("q_proj",), **shape: int
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    other = build_checkpoint(a.path / "other", "llama", **shape)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(target_modules), r=2)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(other), config).save_pretrained(a.path / "adapter")
    a.build()
    a.spec = {"adapter": str(a.path / "adapter"), "lora": None}


def with_an_adapter_of_another_model(a: Found) -> None:
    with_an_adapter_to_go_on_from(a, hidden_size=32)


def with_an_adapter_of_a_deeper_model(a: Found) -> None:
    with_an_adapter_to_go_on_from(a, num_layers=3)


def with_an_adapter_of_another_family(a: Found) -> None:
    """Phi-3 has q_proj, k_proj and v_proj fused in one."""
    with_an_adapter_to_go_on_from(a, target_modules=["q_proj", "o_proj"])
    shutil.rmtree(a.base)
    a.build("phi3", num_key_value_heads=2)


def with_an_adapter_that_lacks_a_layer(a: Found) -> None:
    with_an_adapter_to_go_on_from(a)
    weights = a.path / "adapter/adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if ".layers.1." not in name}
    save_file(kept, weights, metadata={"format": "pt"})


def named_by_its_adapter(a: Found) -> None:
    with_an_adapter_to_go_on_from(a)
    a.spec = {"base_model": a.spec["adapter"]}


def under_another_model_type(a: Found) -> None:
    a.build("qwen3")
    a.spec = {"model_type": "llama"}


def with_another_model_type_in_its_config(a: Found) -> None:
    """A checkpoint converted with a wrong model type: Llama's layers have no place for q_norm and k_norm."""
    a.build("qwen3")
    a.edit("config.json", model_type="llama", architectures=["LlamaForCausalLM"])


def with_weights_of_no_layer(a: Found) -> None:
    weights = a.build() / "model.safetensors"
    more = {"v_head.summary.weight": torch.ones(1, 64), "mtp.layers.0.fc.weight": torch.ones(4, 4)}
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(weights) | more | buffers, weights, metadata={"format": "pt"})


def with_a_mistyped_dtype(a: Found) -> None:
    a.build()
    a.edit("config.json", dtype="bfloat61")


def cut_short(a: Found) -> None:
    weights = a.build() / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def without_some_weights(a: Found) -> None:
    weights = a.build() / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})


def with_more_tokens_than_embeddings(a: Found) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(a.build())
    tokenizer.add_tokens([f"<extra{n}>" for n in range(40)])
    tokenizer.save_pretrained(a.base)


# --- What becomes of them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trains:
    """The expectation that the model is trained: its dtype, its quantization, and the messages."""

    dtype: str = "bfloat16"
    quantization: str = "none"
    says: tuple[str, ...] = field(default=())  #: in warnings, logs or audits


@dataclass(frozen=True)
class Refused:
    """The expectation that check or worker rejects the model: the code, the name in the message, and the remedy."""

    code: str
    names: str
    remedy: str
    by: str = "check"


TABLE: list[tuple[Callable[[Found], None], Trains | Refused]] = [
    (without_model_type, Trains()),
    (under_an_alias_and_quantized, Trains(quantization="4bit")),
    (with_the_old_dtype_key, Trains(says=("stores bfloat16",))),
    (stored_in_another_dtype_than_it_claims, Trains("float16", says=("says float32, but the weights are stored in",))),
    (in_shards, Trains()),
    (pickled_and_allowed, Trains(says=("the weights are pickled",))),
    (with_tied_embeddings, Trains()),
    (without_a_pad_token, Trains()),
    (with_the_jobs_own_template, Trains()),
    (already_in_4_bits_that_compute_in_another_dtype, Trains(quantization="4bit")),
    (already_in_8_bits, Trains(quantization="8bit")),
    (with_code_that_may_run, Trains()),
    (with_an_adapter_to_go_on_from, Trains()),
    (in_shards_of_which_one_is_missing, Refused("model_invalid", "model-00001-of-", "fetch this file again")),
    (pickled, Refused("model_invalid", "pytorch_model.bin: pickled", "save it with save_pretrained")),
    (without_a_chat_template, Refused("dataset_invalid", "the base model has none", "chat_template:")),
    (quantized_by("gptq"), Refused("model_invalid", "config.json: training gptq checkpoints", "quantization: 4bit")),
    (quantized_by("awq"), Refused("model_invalid", "config.json: training awq checkpoints", "quantization: 4bit")),
    (quantized_by("fp8"), Refused("model_invalid", "config.json: training fp8 checkpoints", "quantization: 4bit")),
    (with_code_of_its_own, Refused("model_invalid", "config.json: own_llama needs the", "policy.trust_remote_code")),
    (with_code_that_is_forbidden, Refused("spec_invalid", "trust_remote_code", "policy.trust_remote_code")),
    (with_an_adapter_of_another_model, Refused("model_invalid", "another base model", "set base_model")),
    (with_an_adapter_of_a_deeper_model, Refused("model_invalid", "has only 2 layers, counted", "set base_model")),
    (with_an_adapter_of_another_family, Refused("model_invalid", "0.self_attn.q_proj", "set base_model", by="worker")),
    (with_an_adapter_that_lacks_a_layer, Refused("model_invalid", "lacks weights", "set base_model", by="worker")),
    (under_another_model_type, Refused("spec_invalid", "model_type: llama, but", "remove model_type")),
    (with_another_model_type_in_its_config, Refused("model_invalid", "0.self_attn.k_norm", "architecture", "worker")),
    (with_weights_of_no_layer, Trains(says=("1 stored weights do not exist in the model and",))),
    (named_by_its_adapter, Refused("model_invalid", "an adapter (adapter_config.json", "write adapter: ")),
    (with_a_mistyped_dtype, Refused("model_invalid", "config.json: dtype: 'bfloat61'", "correct it there")),
    (cut_short, Refused("model_invalid", "model.safetensors: truncated", "fetch this file again")),
    (without_an_end_token, Refused("model_invalid", "no end token", "tokenizer_config.json", by="worker")),
    (without_some_weights, Refused("model_invalid", "layers.1.mlp.up_proj", "checkpoint is incomplete", by="worker")),
    (with_more_tokens_than_embeddings, Trains()),
]  # fmt: skip


@pytest.mark.parametrize(("how", "fate"), TABLE, ids=[f"{n}-{how.__name__}" for n, (how, _) in enumerate(TABLE)])
def test_each_loads_rightly_or_is_refused_before_any_weight_is_read(
    found: Found, how: Callable[[Found], None], fate: Trains | Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    how(found)
    capfd.readouterr()
    match fate:
        case Trains():
            check_trains(found, fate)
        case Refused(by="check"):
            with pytest.raises(HonedError) as refused:
                found.train()
            check_refused(refused.value.as_dict(), fate, found)
        case Refused():
            ended = found.train()
            check_refused(ended.result["error"], fate, found)
            assert not ended.of("audit")  # no model was loaded
            assert (
                "Loading weights" not in capfd.readouterr().err
            )  # transformers' message when it reads the first weight


def check_trains(found: Found, fate: Trains) -> None:
    ended = found.train()
    assert ended.status == 0, ended.result
    assert list(ended.losses) == [1]
    assert ended.losses[1] > 0
    assert ended.of("audit")[0]["mended"] == []  # it is loaded correctly, not repaired afterwards
    audit = ended.of("audit")[-1]
    assert (audit["model_dtype"], audit["config_dtype"]) == (fate.dtype, fate.dtype)
    assert audit["quantization"] == fate.quantization
    said = "\n".join([*found.warnings, *(item["message"] for item in ended.of("log"))])
    for words in fate.says:
        assert words in said


def check_refused(error: dict[str, str], fate: Refused, found: Found) -> None:
    assert error["code"] == fate.code
    assert fate.names in (error.get("evidence") or error["message"])
    assert fate.remedy in error["hint"]
    if fate.code == "model_invalid":
        assert str(found.path) in error["message"]


def test_what_transformers_alone_cannot_load_has_a_config_object_under_its_right_name(found: Found) -> None:
    """The loader of a quantized model reads model_type from a config object, never from a dict, whatever repairs it."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    for how, family in [(without_model_type, "qwen3"), (under_an_alias_and_quantized, "llama")]:
        shutil.rmtree(found.base, ignore_errors=True)
        how(found)
        with pytest.raises(ValueError, match=r"Unrecognized model|does not recognize this architecture"):
            AutoModelForCausalLM.from_pretrained(found.base)
        with pytest.raises(ValueError, match=r"Unrecognized model|does not recognize this architecture"):
            AutoConfig.from_pretrained(found.base)
        spec = jobfile.validate(
            {"base_model": str(found.base), "datasets": [{"path": str(found.rows)}], **found.spec, "lora": {}}
        )
        config = load_config(SimpleNamespace(spec=spec, base_model_path=found.base))
        assert isinstance(config, PreTrainedConfig)
        assert config.model_type == family


def test_the_families_without_sdpa_are_those_that_transformers_has_none_for() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    from honed.plan.precision import NO_SDPA

    def has_sdpa(name: str | tuple[str, ...]) -> bool:
        return bool(getattr(getattr(transformers, name if isinstance(name, str) else name[0]), "_supports_sdpa", False))

    assert {model_type for model_type, name in CAUSAL.items() if not has_sdpa(name)} == NO_SDPA


def test_every_model_that_transformers_calls_stateful_is_refused() -> None:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    from honed.plan.packing import RECURRENT

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    stateful = {
        model_type
        for model_type, name in itertools.chain.from_iterable(mapping.items() for mapping in mappings)
        if getattr(getattr(transformers, name if isinstance(name, str) else name[0]), "_is_stateful", False)
    }
    assert stateful <= RECURRENT
    assert len(stateful) > 20


def test_a_token_that_occurs_and_has_no_embedding_is_refused_before_the_first_step(found: Found) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found.build())
    job = found.accept()
    tokenizer.add_tokens([f"<extra{n}>" for n in range(40)], special_tokens=True)
    tokenizer.pad_token = "<extra39>"
    tokenizer.save_pretrained(found.base)
    with pytest.raises(ModelError) as raised:
        found.accept()
    assert "<extra39>" in raised.value.shown
    ended = job.run()  # the tokenizer has changed since its check
    assert ended.result["error"]["code"] == "model_invalid"
    assert "<extra39>" in ended.result["error"]["evidence"]
    assert ended.losses == {}
