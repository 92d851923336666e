"""The base model's generation settings: ignored in predictions unless the job asks, and unchanged in the output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from honed.text.chat import ChatFormat
from honed.worker.model import generation
from honed.worker.train import prediction
from worker.conftest import MakeJob
from worker.test_prediction_state import predictor_of

#: Each setting alone changes a tiny model's output, or prevents it.
LEAKS: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(300)),
    "forced_eos_token_id": 7,
    "bad_words_ids": [[each] for each in range(300)],
    "prompt_lookup_num_tokens": 3,
    "exponential_decay_length_penalty": (1, 50.0),
    "sequence_bias": [[[each], -50.0] for each in range(300)],
    "watermarking_config": {"bias": 50.0},
    "guidance_scale": 3.0,
    "penalty_alpha": 0.6,
}
#: An unused temperature, which transformers does not save again.
CONTRADICTORY = {
    "temperature": 0.6,
    "repetition_penalty": 1.5,
    "eos_token_id": [1, 2],
    "transformers_version": "4.31.0",
}


def test_every_setting_that_transformers_knows_is_sorted() -> None:
    known = set(vars(GenerationConfig()))
    assert known - generation.KEPT - generation.NEUTRAL == set(), "is it kept, or does it shape the choice of tokens?"
    assert not generation.KEPT & generation.NEUTRAL


@pytest.fixture(scope="module")
def parts(checkpoint_of: Callable[..., Path]) -> tuple[Any, ChatFormat, list[str | None]]:
    """A model, its chat format, and its output without any settings."""
    path = checkpoint_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    chat = ChatFormat(AutoTokenizer.from_pretrained(path))
    return model, chat, ask(model, chat)


def ask(model: Any, chat: ChatFormat, **keys: Any) -> list[str | None]:
    told: list[str] = []
    answers = predictor_of(chat, told, **keys).ask(model, prediction.from_prompts(["One", "Two and three"], chat))
    assert told == []
    return answers.texts


@pytest.mark.parametrize("name", LEAKS)
def test_greedy_answers_are_the_likeliest_tokens_whatever_the_base_ships(
    parts: tuple[Any, ChatFormat, list[str | None]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model, chat, plain = parts
    config = model.get_base_model().generation_config
    monkeypatch.setattr(config, name, LEAKS[name])
    assert ask(model, chat) == plain
    assert getattr(config, name) == LEAKS[name]


def test_a_job_may_ask_for_the_bases_own_settings(
    parts: tuple[Any, ChatFormat, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chat, plain = parts
    config = model.get_base_model().generation_config
    monkeypatch.setattr(config, "repetition_penalty", 1.5)
    assert ask(model, chat, settings="base") != plain
    monkeypatch.setattr(config, "do_sample", True)
    drawn = ask(model, chat, settings="base")
    torch.manual_seed(99)
    assert ask(model, chat, settings="base") == drawn, "the same draws in each round"


def test_an_answer_ends_at_the_bases_stop_strings(
    parts: tuple[Any, ChatFormat, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chat, plain = parts
    assert plain[0] is not None
    monkeypatch.setattr(model.get_base_model().generation_config, "stop_strings", [plain[0][:3]])
    assert len(str(ask(model, chat)[0])) < len(plain[0])


@pytest.mark.parametrize("settings", ["greedy", "base"])
def test_an_answer_ends_at_each_of_the_bases_end_tokens(
    parts: tuple[Any, ChatFormat, list[str | None]], monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    model, chat, plain = parts
    config = model.get_base_model().generation_config
    monkeypatch.setattr(config, "eos_token_id", 7)
    assert generation.end_ids(model) == [7]
    everything = list(range(len(chat.tokenizer)))
    monkeypatch.setattr(config, "eos_token_id", everything)
    assert ask(model, chat, settings=settings) == ["", ""] != plain
    assert config.eos_token_id == everything


@pytest.mark.parametrize("name", ["plain", "contradictory"])
def test_a_model_trained_whole_keeps_the_bases_settings(
    make_job: MakeJob, checkpoint_of: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint_of("llama"), base)
    shipped = CONTRADICTORY if name == "contradictory" else CONTRADICTORY | {"do_sample": True}
    (base / generation.FILE).write_text(json.dumps(shipped))
    job = make_job(model=base, training={"max_steps": 1, "save_steps": 1}, eval_split=0.2)
    ended = job.run()
    assert ended.status == 0, ended.result
    written = json.loads((job.output_dir / generation.FILE).read_text())
    ends = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    assert written == shipped | {"eos_token_id": [1, 2, *ends]}  # an answer must end where the trained turns do
