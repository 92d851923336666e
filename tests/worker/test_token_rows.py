"""Single tokens that are trained beside an adapter: their vectors change, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from honed.inputs import basemodel
from honed.plan import parameter
from honed.system.error import ModelError
from honed.worker.model import token_rows
from worker.conftest import MakeJob, StopAtStep
from worker.test_merge import TOKENS, merge_to
from worker.test_placing import attached
from zoo import families

QUIET = {"predictions": {"sample_frequency": "off"}}
#: How tokens are named: of the input embedding; with a head that follows it; and of a head with weights of its own.
ASKED: dict[str, tuple[str, Any, list[int]]] = {
    "embedding": ("llama", [427, 270], []),
    "tied": ("gemma2", [427, 270], [427, 270]),
    "apart": ("llama", {"embed_tokens": [270], "lm_head": [270, 427]}, [270, 427]),
}


def opened(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def check_rows(base: Any, merged: Any, ids: Sequence[int], dtype: torch.dtype) -> None:
    """Check that these rows of a merged table are others than the base's, and all others its very bits."""
    others = [row for row in range(len(base)) if row not in ids]
    assert torch.equal(merged[others], base[others].to(dtype).float())
    assert all(not torch.equal(merged[row], base[row].to(dtype).float()) for row in ids)


@pytest.mark.parametrize("case", ASKED)
def test_the_vectors_of_the_named_tokens_alone_are_trained(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    family, asked, in_head = ASKED[case]
    base = checkpoint_of(family)
    job = make_job(
        family,
        lora={"r": 4, "trainable_token_indices": asked},
        save_merged="bfloat16",
        **QUIET,
        dtype="float32",
        training={"max_steps": 4, "learning_rate": 2e-2},
    )
    assert job.run(stop=StopAtStep(job.events_path(1), 3)).result["outcome"] == "interrupted"
    ended = job.run(2)
    assert ended.status == 0, ended.result
    assert ended.of("resumed")[0]["step"] == 3
    assert not [each for each in ended.messages("warning") if "as planned" in each]
    saved = load_file(job.output_dir / "adapter_model.safetensors")
    assert sum(each.numel() for each in saved.values()) == job.plan["checkpoint"]["num_trained"]
    assert "single trained tokens" in (job.output_dir / "README.md").read_text()
    before, after = opened(base), opened(job.output_dir / "merged")
    ids = asked if isinstance(asked, list) else asked["embed_tokens"]
    check_rows(before.get_input_embeddings().weight, after.get_input_embeddings().weight, ids, torch.bfloat16)
    check_rows(before.get_output_embeddings().weight, after.get_output_embeddings().weight, in_head, torch.bfloat16)
    merge_to(base, job.output_dir, tmp_path / "merged")
    with torch.no_grad():
        expected = opened(tmp_path / "merged")(TOKENS).logits
        by_peft = peft.PeftModel.from_pretrained(before, job.output_dir).eval()(TOKENS).logits
    torch.testing.assert_close(by_peft, expected, atol=1e-5, rtol=1e-5)


def test_tokens_are_trained_beside_a_quantized_base_and_continued(make_job: MakeJob) -> None:
    first = make_job(
        "llama",
        lora={"r": 4, "trainable_token_indices": [270]},
        quantization="4bit",
        **QUIET,
        training={"max_steps": 1},
    )
    assert first.run().status == 0
    again = make_job("llama", adapter=str(first.output_dir), quantization="4bit", **QUIET, training={"max_steps": 2})
    ended = again.run()
    assert ended.status == 0, ended.result
    rows = [load_file(each.output_dir / "adapter_model.safetensors") for each in (first, again)]
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert not torch.equal(rows[0][name], rows[1][name]) and rows[1][name].shape[0] == 1


def test_tokens_of_which_nothing_is_learned_are_named(make_job: MakeJob, checkpoint_of: Callable[..., Path]) -> None:
    pad = AutoConfig.from_pretrained(checkpoint_of("llama")).pad_token_id
    job = make_job("llama", lora={"trainable_token_indices": [270, 3, pad]}, **QUIET, training={"max_steps": 1})
    ended = job.run()
    assert ended.status == 0, ended.result
    said = [each for each in ended.messages("warning") if each.startswith("lora.trainable_token_indices")]
    assert len(said) == 2
    assert f"2 of 3 tokens occur in no training row: 3, {pad}" in said[0]
    assert f"{pad} is the padding token" in said[1]


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("gemma3n_text", [3, 7]),
        ("gpt_neox", {"embed_in": [3], "lm_head": [5, 6]}),
        ("llava", {"language_model.embed_tokens": [3]}),
        ("paligemma", [3, 4]),
        ("opt", {"embed_tokens": [3], "lm_head": [3]}),
        ("gpt2", {"wte": [3], "wpe": [1, 2]}),
    ],
)
def test_the_trained_tokens_are_counted(tmp_path: Path, family: str, asked: Any) -> None:
    path = families.build(tmp_path / family, family)
    model, spec = attached(path, {"target_modules": ["q_proj", "c_attn", "dense"], "trainable_token_indices": asked})
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameter.trained(spec, basemodel.inspect(path)).num_parameters == trained


def test_a_head_that_computes_more_than_a_product_is_refused(tmp_path: Path) -> None:
    """peft leaves out the bias of a head that is tied, and computes another model before the first step."""
    path = families.build(tmp_path / "model", "modernbert-decoder")
    model = opened(path)
    options = peft.LoraConfig(r=2, target_modules=["Wo"], trainable_token_indices=[3])
    with pytest.raises(ModelError, match="decoder computes more"):
        token_rows.check(peft.get_peft_model(model, options))


def test_a_head_that_is_tied_although_its_config_denies_it_is_refused(checkpoint_of: Callable[..., Path]) -> None:
    model = opened(checkpoint_of("gemma2"))
    model.config.tie_word_embeddings = False
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3])
    with pytest.raises(ModelError, match="shares the embedding's weights"):
        token_rows.check(peft.get_peft_model(model, options))
