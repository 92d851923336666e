"""One step on a small model: what the libraries refuse is found, with a remedy; what is the small model's fault refuses
nothing."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from honed.check import rehearsal as checks
from honed.job.plan_file import Checkpoint, PlanFile
from honed.run import rehearsed
from honed.spec.config import Config
from honed.spec.spec import JobSpec
from honed.worker import rehearsal, remedy
from honed.worker.assignment import Assignment
from worker.conftest import plan_job
from zoo import families
from zoo.paligemma import build_paligemma
from zoo.vision import build_vision_checkpoint, write_pictures

ADAPTER = {"load_dtype": "bfloat16", "compute_dtype": None, "bf16": True, "fp16": False, "adapter_dtype": "float32"}
CHECKPOINT = asdict(Checkpoint(0, 0, "", {}, 0, None, (), None, False, False, False))
REST = {"quantization": "none", "attn_implementation": "eager", "reasons": {}}


def seeing_job(place: Path, family: str, **keys: Any) -> Assignment:
    """A job on a vision model with its processor; the weights are not used."""
    base = place / "model"
    if not base.exists():
        build_paligemma(base) if family == "paligemma" else build_vision_checkpoint(base, family)
    return _assignment(place, {"base_model": str(base), "datasets": [{"path": "/rows.jsonl"}], "lora": {}, **keys})


def job(place: Path, family: str, *, is_real: bool = False, **keys: Any) -> Assignment:
    """A job on a family's config.json; no weights are needed. `is_real`: with the sizes that transformers gives it."""
    from transformers import AutoConfig

    _, settings = families.FAMILIES[family]
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    whole: dict[str, Any] = {"vocab_size": families.VOCABULARY, **ids, **settings}
    if "text_config" in settings:
        text = {"vocab_size": families.VOCABULARY, **ids, **settings["text_config"]}
        whole = {**ids, **settings, "text_config": text}
    AutoConfig.for_model(family, **({} if is_real else whole)).save_pretrained(place / "model")
    return _assignment(
        place, {"base_model": str(place / "model"), "datasets": [{"path": "/rows.jsonl"}], "lora": {}, **keys}
    )


def _assignment(place: Path, document: dict[str, Any]) -> Assignment:
    spec = JobSpec.model_validate({key: value for key, value in document.items() if value is not None})
    precision = {**ADAPTER, **REST, "quantization": spec.quantization}
    if spec.quantization != "none":
        precision["compute_dtype"] = "bfloat16"
    if spec.lora is None:
        precision |= {"load_dtype": "float32", "bf16": "dtype" in document, "adapter_dtype": None}
    plan = {"precision": precision, "base_model_path": str(place / "model"), "parallel": {"mode": "none"}}
    return rehearsal._assignment(spec.model_dump(mode="json"), {**plan, "checkpoint": CHECKPOINT}, place)


REFUSED = {
    "dropout on experts": ("mixtral", {"lora": {"lora_dropout": 0.1}}, "lora.lora_dropout"),
    "DoRA on experts": ("qwen3_moe", {"lora": {"use_dora": True}}, "lora.use_dora"),
    "PiSSA on experts": ("olmoe", {"lora": {"init_lora_weights": "pissa"}}, "lora.init_lora_weights"),
    "PiSSA under 4 bit": (
        "llama",
        {"lora": {"init_lora_weights": "pissa"}, "quantization": "4bit"},
        "lora.init_lora_weights",
    ),
    "mamba": ("falcon_mamba", {"lora": {"exclude_modules": ["x_proj"]}}, "lora.exclude_modules"),
    "granite": ("granitemoe", {}, "training.router_aux_loss_coef"),
    "in full": ("granitemoeshared", {"lora": None}, "training.router_aux_loss_coef"),
    "jetmoe": ("jetmoe", {}, "training.gradient_checkpointing"),
    "routers": ("phimoe", {}, "lora.exclude_modules"),
    "autocast": ("dbrx", {"lora": None, "dtype": "auto"}, "dtype"),
    "lost names": ("laguna", {"lora": {"target_modules": "all-linear"}}, "lora.exclude_modules"),
    "two at once": ("mixtral", {"lora": {"lora_dropout": 0.1, "use_dora": True}}, "lora.use_dora"),
}


@pytest.mark.parametrize("sort", REFUSED)
def test_what_a_library_refuses_is_refused_with_a_remedy_that_passes(tmp_path: Path, sort: str) -> None:
    family, keys, key = REFUSED[sort]
    tried = job(tmp_path, family, **keys)
    answer = rehearsal.rehearse(tried)
    assert answer.outcome == "refused" and answer.error is not None
    assert key in answer.error.fix and "Error: " in answer.error.message and not answer.error.evidence
    mended = rehearsal._Small(tried, None).of(remedy.edited(tried.spec, answer.error.fix))
    assert rehearsal.rehearse(mended.job).outcome == "passed"


def test_tokens_that_a_small_model_does_not_have_are_rehearsed_with_others(tmp_path: Path) -> None:
    tokens = {"embed_tokens": [130_000, 131_000], "lm_head": [130_000]}
    tried = job(tmp_path, "apertus", is_real=True, lora={"trainable_token_indices": tokens})
    assert rehearsal.rehearse(tried).outcome == "passed"


def test_tokens_of_a_head_with_a_bias_are_refused(tmp_path: Path) -> None:
    answer = rehearsal.rehearse(job(tmp_path, "modernbert-decoder", lora={"trainable_token_indices": [3]}))
    assert answer.error is not None and answer.error.fix == {"lora.trainable_token_indices": None}


#: Sorts whose remedy is followed in a real worker by default, one of each part of the job file.
FOLLOWED = ("PiSSA under 4 bit", "mamba", "granite", "jetmoe")


@pytest.mark.parametrize(
    "sort",
    [pytest.param(sort, marks=[] if sort in FOLLOWED else pytest.mark.exhaustive) for sort in REFUSED],
)
def test_a_job_trains_with_the_remedy_as_it_is_told(tmp_path: Path, sort: str) -> None:
    family, keys, _ = REFUSED[sort]
    refused = rehearsal.rehearse(job(tmp_path / "small", family, **keys)).error
    assert refused is not None
    spec = remedy.edited(job(tmp_path / "spec", family, **keys).spec, refused.fix)
    document = spec.model_dump(mode="json", exclude_unset=True)
    base = families.build(tmp_path / "base", family)
    rows = families.write_rows(tmp_path / "rows.jsonl", 4)
    training = document.pop("training", {}) | {"max_steps": 1, "per_device_train_batch_size": 4}
    document |= {"base_model": str(base), "datasets": [{"path": str(rows)}], "training": training}
    ended = plan_job(tmp_path, document | {"backend": "transformers"}).run()
    assert ended.status == 0, ended.messages("error")
    assert ended.of("step")


@pytest.mark.parametrize("family", ["paligemma", "gemma3", "qwen2_5_vl", "idefics3", "qwen2_5_omni_thinker"])
def test_a_row_with_an_image_is_tried(tmp_path: Path, family: str) -> None:
    assert rehearsal.see(seeing_job(tmp_path, family)) == rehearsal.Answer("passed")
    wide = seeing_job(tmp_path, family, lora={"finetune_vision_layers": True}, quantization="4bit")
    assert rehearsal.see(wide) == rehearsal.Answer("passed")


def test_what_only_an_image_shows_is_refused_with_a_remedy_that_trains(tmp_path: Path) -> None:
    """A bias of the vision encoder's LayerNorm, in float32 beside its weight in bfloat16, which only a GPU computes."""
    keys: dict[str, Any] = {"lora": {"finetune_vision_layers": True, "bias": "all"}, "dtype": "bfloat16"}
    tried = seeing_job(tmp_path, "gemma3", **keys)
    assert rehearsal.rehearse(tried) == rehearsal.Answer("passed")
    answer = rehearsal.see(tried)
    assert answer.outcome == "refused" and answer.error is not None and answer.error.fix == {"lora.bias": None}
    gpu = replace(tried, plan=PlanFile({**tried.plan.document, "device": {"kind": "cuda", "name": "a GPU"}}))
    unsure = rehearsal.see(gpu)
    assert unsure.outcome == "passed" and "on this machine's CPU" in unsure.why

    rows = write_pictures(tmp_path / "rows.jsonl", 4)
    training = {"max_steps": 1, "per_device_train_batch_size": 4}
    document = {"base_model": str(tried.base_model_path), "datasets": [{"path": str(rows)}], "training": training}
    document |= {"backend": "transformers", "predictions": {"sample_frequency": "off"}}
    for name, spec in (("as it is", tried.spec), ("mended", remedy.edited(tried.spec, answer.error.fix))):
        (tmp_path / name).mkdir()
        lora = spec.model_dump(mode="json", exclude_unset=True)["lora"]
        ended = plan_job(tmp_path / name, document | {"lora": lora, "dtype": "bfloat16"}).run()
        assert (ended.status == 0) == (name == "mended"), ended.messages("error")


def test_an_image_that_the_small_model_does_not_take_refuses_nothing_and_is_said(tmp_path: Path) -> None:
    tried = seeing_job(tmp_path, "gemma3")
    file = tried.base_model_path / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_seq_length": 6}))
    answer = rehearsal.see(tried)
    assert answer.outcome == "passed" and "tokens: 6, features: 4" in answer.why
    file.unlink()
    answer = rehearsal.see(tried)
    assert answer.outcome == "passed" and "neither preprocessor_config.json nor" in answer.why


QUICK = ["llama", "gemma3", "jamba", "deepseek_v3", "qwen3_next", "nemotron_h", "qwen2_vl"]
MORE = sorted(families.FAMILIES.keys() - set(QUICK))


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_a_family_of_real_size_is_made_small_or_nothing_is_refused(tmp_path: Path, family: str) -> None:
    """An adapter on attention alone, without checkpoints and balancing, meets no fault of any family."""
    training = {"gradient_checkpointing": False, "router_aux_loss_coef": 0}
    lora = {"r": 64, "target_modules": r".*\.(q_proj|k_proj|v_proj|o_proj|in_proj|query_key_value|qkv_proj)"}
    answer = rehearsal.rehearse(job(tmp_path, family, is_real=True, lora=lora, training=training))
    if family in QUICK:
        assert answer.outcome == "passed", answer
    no_linear_layer = ("not found in the base model", "is not supported. Currently, only")  # zaya's qkv_proj
    assert answer.outcome != "refused" or any(words in str(answer.error) for words in no_linear_layer)


def test_a_family_that_cannot_be_made_small_is_no_reason_to_refuse(tmp_path: Path) -> None:
    answer = rehearsal.rehearse(job(tmp_path, "gemma3n_text"))
    assert answer.outcome == "unknown" and "full_attention" in answer.why


def test_a_small_model_keeps_each_kind_of_layer_and_the_proportions(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from honed.worker.model import shrink

    small = shrink.shrunk(AutoConfig.for_model("jamba"))
    assert set(small.layers_block_type) == set(AutoConfig.for_model("jamba").layers_block_type)
    whole = AutoConfig.for_model("mixtral")
    small = shrink.shrunk(whole)
    assert small.hidden_size < whole.hidden_size / 8 and small.num_local_experts == shrink.NUM_EXPERTS
    assert small.hidden_size / small.num_attention_heads == whole.hidden_size / whole.num_attention_heads


def test_the_program_answers_within_its_limits_or_the_job_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    class Planned:
        def as_dict(self) -> dict[str, Any]:
            precision, model = {**ADAPTER, **REST}, str(tmp_path / "model")
            plan = {"precision": precision, "base_model_path": model, "parallel": {"mode": "none"}}
            return {**plan, "checkpoint": CHECKPOINT}

    spec = job(tmp_path, "granitemoe").spec
    config = Config.model_validate({"spool": {"rehearsal_cpu_sec": 1}})
    answer, _ = checks._run(spec, Planned(), config)  # type: ignore[arg-type]
    assert answer.outcome == "unknown" and "it took more than" in answer.why  # of CPU time, or by the clock
    assert not [*(tmp_path / "tmp").glob("honed-*")]
    with monkeypatch.context() as without_room:
        without_room.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
        answer, is_lasting = checks._run(spec, Planned(), config)  # type: ignore[arg-type]
        assert answer.outcome == "unknown" and "did not start: No such file" in answer.why and not is_lasting
    config = Config.model_validate({"spool": {"rehearsal_cpu_sec": 120}})
    answer, is_lasting = checks._run(spec, Planned(), config)  # type: ignore[arg-type]
    assert is_lasting and answer.error is not None
    assert answer.error.fix == {"training.router_aux_loss_coef": 0}


def test_answers_are_kept_whole_and_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsed, "MAX_KEPT", 3)
    for number in range(5):
        rehearsed.write(tmp_path / "1000", rehearsed.Kept(f"{number:064x}", rehearsed.Rehearsed("passed")))
    assert len(list((tmp_path / "1000").iterdir())) == 3
    assert rehearsed.read(tmp_path / "1000", f"{4:064x}") == rehearsed.Rehearsed("passed")
    (tmp_path / "1000" / f"{4:064x}.json").write_text(json.dumps({"outcome": "refused"}))
    assert rehearsed.read(tmp_path / "1000", f"{4:064x}") is None
