"""Jobs that TRL's chunked loss cannot train, and rows longer than a model's positions: the real libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from honed.inputs import basemodel
from honed.inputs.row import convert
from honed.plan import plan, position
from honed.system.device import Device
from honed.text.chat import ChatFormat
from honed.worker import assignment as assignments
from worker.conftest import MakeJob, WorkerJob

HEAD: dict[str, Any] = {"lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]}, "training": {"max_steps": 1}}
SMOOTHED: dict[str, Any] = {
    "lora": {"r": 4},
    "dtype": "float32",
    "predictions": {"sample_frequency": "off"},
    "training": {"max_steps": 1, "label_smoothing_factor": 0.1},
}


def test_an_adapter_on_the_head_trains_and_is_gone_on_from_with_the_plain_loss(make_job: MakeJob) -> None:
    first = make_job("llama", **HEAD)
    assert first.run().status == 0
    again = make_job("llama", adapter=str(first.output_dir), training={"max_steps": 1})
    assert again.run().status == 0
    gpu = Device("cuda", "GPU 0", 0, "GPU-0", (9, 0), 80 * 2**30, 80 * 2**30)
    for job in (first, again):
        spec = assignments.read(job.dir, 1).spec
        adapter = basemodel.inspect_adapter(Path(spec.adapter)) if spec.adapter else None
        assert plan.choose_loss(spec, basemodel.inspect(Path(spec.base_model)), gpu, adapter).type == "nll"


def test_labels_are_smoothed_by_the_plain_loss(make_job: MakeJob) -> None:
    job = make_job("llama", **SMOOTHED, num_rows=2)  # one batch, in float32: the same on any processor
    ended = job.run()
    assert ended.status == 0, ended.result
    assert ended.losses[1] == pytest.approx(smoothed(job, 0.1), abs=1e-4), ended.result
    assert abs(smoothed(job, 0.1) - smoothed(job, 0.0)) > 1e-3, "else the test could not tell"


def smoothed(job: WorkerJob, factor: float) -> float:
    """Return the loss of a job's rows from its base model's logits: a new adapter changes nothing yet."""
    base = job.plan["spec"]["base_model"]
    chat = ChatFormat(AutoTokenizer.from_pretrained(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    losses: list[torch.Tensor] = []
    for line in (job.dir / "facts.jsonl").read_text().splitlines():
        row = chat.encode(convert(json.loads(line), "messages"))
        ids, trained = torch.tensor([row.input_ids]), torch.tensor(row.trained[1:])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)[trained]
        chosen = scores.gather(-1, ids[0, 1:][trained][:, None])[:, 0]
        losses += [-(1 - factor) * chosen - factor * scores.mean(-1)]
    return float(torch.cat(losses).mean())


#: What makes each family with a table of positions small, and MPT's 32 long.
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 4}
_OPT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": _GPT,
    "gpt-sw3": _GPT,
    "gpt_bigcode": _GPT,
    "openai-gpt": _GPT,
    "ctrl": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "codegen": _GPT | {"rotary_dim": 4, "n_ctx": 32},
    "gpt_neo": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "opt": _OPT | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "biogpt": _OPT | {"intermediate_size": 32},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 32},
}


@pytest.mark.parametrize("family", sorted(position.TABLED))
def test_a_family_with_a_table_of_positions_fails_past_its_end(family: str) -> None:
    limit = {} if family == "mpt" else {"max_position_embeddings": 32}
    config = AutoConfig.for_model(family, vocab_size=64, **(TINY[family] | limit))
    assert position.positions(config.to_dict()) == 32
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(33)[None]
    with torch.no_grad():
        model(input_ids=ids[:, :32], use_cache=False)
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids, use_cache=False)


def test_rows_beyond_the_table_end_the_job_before_the_first_step(make_job: MakeJob) -> None:
    answer = "Paris is the capital. " * 60
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": answer}]} for n in "ab"
    ]
    ended = make_job("gpt2", rows=rows, lora={"r": 4}).run()
    assert ended.result["error"]["code"] == "dataset_invalid"
    assert "but the model has only 256 positions" in ended.result["error"]["message"]
    assert ended.losses == {}
