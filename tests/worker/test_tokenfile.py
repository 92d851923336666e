"""The tokenizer that `check` reads from files alone equals transformers' own: texts, ids, masks, rejections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoTokenizer

from honed.inputs import basemodel
from honed.inputs.row import Example
from honed.system.error import DatasetError, ModelError
from honed.text import tokenfile
from honed.text.chat import ChatFormat
from zoo.template import TEMPLATES
from zoo.tokenizer import Kind, build_tokenizer
from zoo.vision import build_vision_checkpoint

CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2, "b": "zwei"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
USER, SAID = (
    {"role": "user", "content": "What is 2+2?\n"},
    {"role": "assistant", "content": " Vier! <think>no</think>é"},
)
ROWS: list[dict[str, Any]] = [
    {"kind": "messages", "messages": [USER, SAID]},
    {"kind": "messages", "messages": [{"role": "system", "content": "Be brief."}, USER, SAID, USER, SAID]},
    {"kind": "messages", "messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "two, two"}]},
    {
        "kind": "messages",
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "name": "add"},
            SAID,
        ],
        "tools": [TOOL],
    },
    {"kind": "messages", "messages": [SAID, USER]},
    {"kind": "prompt_completion", "prompt": "One, two, ", "completion": "three 日本"},
    {"kind": "text", "text": "Just a text.  With  spaces\n"},
]


def outcomes(tokenizer: Any, **kwargs: Any) -> list[Any]:
    chat = ChatFormat(tokenizer, chat_template_kwargs=kwargs)
    found: list[Any] = [sorted(chat.advice.notes()), chat.stop_token_ids, chat.renderer.probe]
    for row in ROWS:
        example = Example(**{"dataset_index": 0, "row_index": 0} | row)
        try:
            encoded = chat.encode(example)
        except (DatasetError, ModelError) as error:  # Llama's class loses the white space of a byte-level vocabulary
            found.append((type(error), error.message))
        else:
            found.append((encoded.input_ids, encoded.trained, encoded.turns, encoded.omitted, encoded.segments()))
    return found


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_files_alone_give_what_transformers_gives(tmp_path: Path, name: str, kind: Kind) -> None:
    build_tokenizer(name, kind=kind).save_pretrained(tmp_path)
    full = AutoTokenizer.from_pretrained(tmp_path)
    light = tokenfile.read(tmp_path, full.chat_template)
    assert light is not None
    assert light.counts
    assert (light.eos_token_id, light.bos_token_id) == (full.eos_token_id, full.bos_token_id)
    assert set(light.all_special_tokens) == set(full.all_special_tokens)
    for kwargs in TEMPLATES[name].kwargs:
        assert outcomes(light, **kwargs) == outcomes(full, **kwargs)


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and merges of the zoo's tokenizers, for classes that build the rest themselves."""
    made = json.loads(build_tokenizer("chatml").backend_tokenizer.to_str())["model"]
    return made["vocab"], [tuple(merge) for merge in made["merges"]]


@pytest.mark.parametrize(
    "name",
    ["Qwen2TokenizerFast", "GPT2TokenizerFast", "GemmaTokenizerFast", "LlamaTokenizerFast", "CohereTokenizerFast"],
)
def test_classes_of_their_own_give_what_their_files_say(tmp_path: Path, name: str) -> None:
    """transformers rebuilds the parts of these tokenizers instead of using those in tokenizer.json."""
    vocab, merges = _vocabulary()
    special = {token: len(vocab) + n for n, token in enumerate(("<s>", "</s>", "<unk>", "<pad>", "<|im_end|>"))}
    made = getattr(transformers, name)(
        vocab=vocab | special,
        merges=merges,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=["<|im_start|>"],
    )
    made.chat_template = TEMPLATES["chatml"].source
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == name.removesuffix("Fast")
    full, light = AutoTokenizer.from_pretrained(tmp_path), tokenfile.read(tmp_path, made.chat_template)
    assert light is not None
    assert light.counts
    assert outcomes(light) == outcomes(full)


def test_templates_that_trl_ships_are_rendered_alike(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    build_tokenizer("chatml").save_pretrained(tmp_path)
    full, light = AutoTokenizer.from_pretrained(tmp_path), tokenfile.read(tmp_path, None)
    templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
    assert len(templates) > 20
    for path in templates:
        source = path.read_text(encoding="utf-8")
        for row in ROWS[:5]:
            texts = []
            for tokenizer in (full, light):
                try:
                    text = tokenizer.apply_chat_template(
                        row["messages"],
                        tools=row.get("tools"),
                        tokenize=False,
                        add_generation_prompt=True,
                        chat_template=source,
                        strftime_now=lambda _form: "1 May 2026",
                    )
                except Exception as error:  # noqa: BLE001
                    text = f"{type(error).__name__}: {error}"
                texts.append(text)
            assert texts[0] == texts[1], path.name


@pytest.mark.parametrize("family", ["gemma3", "llava", "qwen2_vl", "idefics3"])
def test_places_of_media_are_known_from_files_alone(tmp_path: Path, family: str) -> None:
    path = build_vision_checkpoint(tmp_path / family, family)
    model = basemodel.inspect(path)
    full, light = AutoTokenizer.from_pretrained(path), tokenfile.read(path, model.chat_template)
    assert light is not None
    full.chat_template = model.chat_template  # as the worker has it
    places = ChatFormat(light).renderer.placeholders
    assert "image" in places
    assert places == ChatFormat(full).renderer.placeholders
