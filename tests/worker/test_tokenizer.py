"""The worker's tokenizer gives the ids of the base model's own tokenizer.json, whatever class its config names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from honed.spec import jobfile
from honed.system.error import ModelError, SpecError
from honed.system.quote import show
from honed.text import tokenfile
from honed.worker.assignment import Assignment
from honed.worker.model import load, tokenizer
from honed.worker.preview import _Asked
from zoo.tokenizer import Kind, build_tokenizer

TEXTS = [
    tokenizer.TEXT,
    *tokenizer.TEXT.splitlines(keepends=True),
    "a b",
    " a  b\tc\n\n    d",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n Vier!<|im_end|>",
]


def base(
    place: Path, kind: Kind = "bytelevel", *, model_type: str = "llama", config: dict[str, Any] | None = None
) -> Path:
    """Make the files of a base model without weights, whose tokenizer_config.json has these keys, too."""
    build_tokenizer("chatml", kind=kind).save_pretrained(place)
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    written = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(written | (config or {})))
    return place


def loaded(place: Path, **keys: Any) -> tuple[Any, list[str]]:
    spec = jobfile.validate({"base_model": str(place), "datasets": [{"path": "/x.jsonl"}], **keys})
    told: list[str] = []
    return load.load_tokenizer(cast("Assignment", _Asked(spec, place)), warn=told.append), told


def ids(of: Any, text: str) -> list[int]:
    return list(of(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "qwen2", "starcoder2", "gpt_neox", "mistral", "gemma2", "phi3"]
)
@pytest.mark.parametrize(
    "name",
    [
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "Qwen2Tokenizer",
        "GemmaTokenizer",
        "GPTNeoXTokenizerFast",
        "CodeLlamaTokenizer",
        "T5Tokenizer",
        "TokenizersBackend",
        "PreTrainedTokenizerFast",
        "NoSuchTokenizer",
    ],
)
def test_ids_are_the_files_own_under_any_class(tmp_path: Path, kind: Kind, model_type: str, name: str) -> None:
    place = base(tmp_path, kind, model_type=model_type, config={"tokenizer_class": name})
    oracle = Tokenizer.from_file(str(place / "tokenizer.json"))
    found, told = loaded(place)
    for text in TEXTS:
        assert ids(found, text) == oracle.encode(text, add_special_tokens=False).ids
    light = tokenfile.read(place, found.chat_template)
    assert light is not None
    assert [light(text)["input_ids"] for text in TEXTS] == [found(text)["input_ids"] for text in TEXTS]
    assert light.eos_token_id == found.eos_token_id == oracle.token_to_id("<|im_end|>")
    if name in ("TokenizersBackend", "PreTrainedTokenizerFast", "NoSuchTokenizer") and model_type not in ("qwen2",):
        assert not told


def test_white_space_that_a_class_loses_is_said(tmp_path: Path) -> None:
    found, told = loaded(base(tmp_path, config={"tokenizer_class": "LlamaTokenizerFast"}))
    assert found.decode(ids(found, "a  b\n c")) == "a  b\n c"
    assert len(told) == 1
    assert "LlamaTokenizer, transformers' class for this tokenizer, gives other token ids" in told[0]
    assert "tokenizer.json is loaded as it is" in told[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_without_a_tokenizer_config_the_file_counts(tmp_path: Path, model_type: str) -> None:
    place = base(tmp_path, model_type=model_type)
    (place / "tokenizer_config.json").unlink()
    found, _ = loaded(place, training={"eos_token": "<|im_end|>"})
    oracle = Tokenizer.from_file(str(place / "tokenizer.json"))
    assert all(ids(found, text) == oracle.encode(text, add_special_tokens=False).ids for text in TEXTS)
    assert found.eos_token == "<|im_end|>"


def test_a_tokenizer_file_that_no_library_reads_is_refused(tmp_path: Path) -> None:
    place = base(tmp_path, config={"tokenizer_class": "LlamaTokenizerFast"})
    written = json.loads((place / "tokenizer.json").read_text())
    written["pre_tokenizer"] = {"type": "FromTheFuture"}
    (place / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match="the tokenizers library cannot read it"):
        loaded(place)
    light = tokenfile.read(place, None)
    assert light is not None
    assert "the tokenizers library cannot read it" in str(light.fault)


def test_the_jobs_end_token_is_that_of_check_and_worker(tmp_path: Path) -> None:
    place = base(tmp_path, config={"eos_token": "<|im_start|>", "pad_token": None})
    found, _ = loaded(place, training={"eos_token": "<|im_end|>"})
    light = tokenfile.read(place, found.chat_template, eos_token="<|im_end|>")
    assert light is not None
    assert light.eos_token == found.eos_token == found.pad_token == "<|im_end|>"
    assert light.eos_token_id == found.eos_token_id
    source = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    texts = [each.apply_chat_template(messages, chat_template=source, tokenize=False) for each in (light, found)]
    assert texts[0] == texts[1]
    assert "b<|im_end|>" in texts[0]


@pytest.mark.parametrize("token", ["<|im_end", "<|im_end|><|im_end|>", "no such token"])
def test_an_end_that_is_not_one_token_is_refused(tmp_path: Path, token: str) -> None:
    place = base(tmp_path)
    with pytest.raises(SpecError, match=r"training\.eos_token: .* is not a token"):
        loaded(place, training={"eos_token": token})
    with pytest.raises(SpecError, match=r"training\.eos_token: .* is not a token") as raised:
        tokenfile.read(place, None, eos_token=token)
    if token != "no such token":
        assert raised.value.fix == {"training.eos_token": "<|im_end|>"}


FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def beside(at: int) -> dict[str, tuple[dict[str, Any], str]]:
    """What tokenizer_config.json may have beside tokenizer.json, whose next free id is `at`, and what is said of it."""
    return {
        "a token more": (
            {"added_tokens_decoder": {str(at): {"content": "<|new|>", **FLAGS}}},
            f"adds '<|new|>' ({at})",
        ),
        "with another id": (
            {"added_tokens_decoder": {str(at + 5): {"content": "<|new|>", **FLAGS}}},
            f"transformers gives tokens other ids than tokenizer_config.json: '<|new|>' {at} instead of {at + 5}",
        ),
        "with an id that is taken": (
            {"added_tokens_decoder": {str(at - 1): {"content": "<|new|>", **FLAGS}}},
            f"'<|new|>' {at} instead of {at - 1}",
        ),
        "a word": ({"added_tokens_decoder": {str(at): {"content": "capital", **FLAGS}}}, "adds 'capital' ("),
        "other flags": (
            {"added_tokens_decoder": {str(at - 1): {"content": "<|im_end|>", **FLAGS, "lstrip": True}}},
            "changes '<|im_end|>' (lstrip)",
        ),
        "the end": ({"eos_token": "<|new|>"}, f"adds '<|new|>' ({at})"),
        "a named one": ({"extra_special_tokens": {"image_token": "<|new|>"}}, f"adds '<|new|>' ({at})"),
        "the older file": ({"older": {"<|new|>": at}}, f"adds '<|new|>' ({at})"),
        "nothing": ({}, ""),
        "shown or not": (
            {"added_tokens_decoder": {str(at - 1): {"content": "<|im_end|>", **FLAGS, "special": False}}},
            "",
        ),
    }


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
@pytest.mark.parametrize("sort", beside(0))
def test_tokens_of_the_config_alone_are_those_of_transformers(tmp_path: Path, sort: str, name: str) -> None:
    place = base(tmp_path, config={"tokenizer_class": name})
    keys, words = beside(Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab_size())[sort]
    settings = json.loads((place / "tokenizer_config.json").read_text()) | keys
    if (older := settings.pop("older", None)) is not None:
        (place / "added_tokens.json").write_text(json.dumps(older))
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = [*TEXTS, "a  <|new|> b<|im_end|>\n <|im_end|> c", "The capital of capitals"]
    found, told = loaded(place)
    light = tokenfile.read(place, found.chat_template)
    assert light is not None and light.counts
    expected = PreTrainedTokenizerFast.from_pretrained(place)
    for text in texts:
        assert ids(found, text) == ids(light, text) == ids(expected, text)
    assert (light.eos_token_id, light.pad_token_id) == (found.eos_token_id, found.pad_token_id)
    notes = [show(each) for each in told if "tokenizer_config.json" in each]
    assert [words in each for each in notes] == ([True] if words else [])
    assert [f"{place}: {show(light.note)}"] == notes if words else not light.note
