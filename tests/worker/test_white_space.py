"""White space counts: what a tokenizer or a template takes of a row's is an error, and what they may change is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaTokenizerFast

from honed.inputs.row import Example
from honed.system.error import MaskError, ModelError
from honed.text.chat import ChatFormat
from honed.text.span import lost_space
from zoo.template import TEMPLATES
from zoo.tokenizer import Kind, build_tokenizer

SAID = "The capital\tof France\n\n    is  Paris, on\nthe Seine"
ROWS = [
    {"kind": "messages", "messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": SAID}]},
    {"kind": "prompt_completion", "prompt": "a b: ", "completion": SAID},
    {"kind": "text", "text": SAID},
]


def example(**keys: Any) -> Example:
    return Example(**{"dataset_index": 0, "row_index": 0} | keys)


@pytest.mark.parametrize(
    ("said", "shown", "lost"),
    [
        ("a b", "a b", None),
        (" a b ", "a b", None),
        ("a b", "ab", "a b"),
        ("a b", "a  b", None),  # by the tokenizer below
        ("a\tb", "a b", "a\tb"),
        ("a\n\nb", "a\nb", "a\n\nb"),
        ("a b c", "a b", None),  # cut off
        ("a\u2581b", "a b", None),
        ("<think>\na\n</think>\n\nb c", "<think>a</think>b c", None),
        ("<think>\na\n</think>\n\nb c", "<think>a</think>bc", "b c"),
        ("a <|x|> b", "a<|x|>b", None),
        ("a x", "b x", None),  # other letters: nothing to compare
    ],
)
def test_white_space_is_compared_letter_by_letter(said: str, shown: str, lost: str | None) -> None:
    place = lost_space(said, shown, ["<|x|>"], lambda _before, gap, _after: "  " if gap == " " else gap)
    assert (None if place is None else said[place[0] - 1 : place[1] + 1]) == lost


@pytest.fixture
def gluing(tmp_path: Path) -> ChatFormat:
    """A byte-level tokenizer whose class has put Metaspace in the place of its pre-tokenizer."""
    build_tokenizer("chatml").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatFormat(LlamaTokenizerFast.from_pretrained(tmp_path))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["kind"])
def test_a_tokenizer_that_loses_white_space_encodes_no_row(gluing: ChatFormat, row: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="loses the white space"):
        gluing.encode(example(**row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["kind"])
def test_the_mask_check_finds_lost_white_space(gluing: ChatFormat, row: dict[str, Any]) -> None:
    whole = ChatFormat(build_tokenizer("chatml"))
    encoded = whole.encode(example(**row))
    whole.check_trained(encoded.input_ids, encoded.labels, example(**row))
    glued = json.loads(json.dumps(row).replace(json.dumps(SAID), json.dumps("".join(SAID.split()))))
    spoilt = whole.encode(example(**glued))
    with pytest.raises(MaskError, match="white space"):
        whole.check_trained(spoilt.input_ids, spoilt.labels, example(**row))


@pytest.mark.parametrize("change", [" ", "\n", "\t", "    "])
def test_a_template_that_changes_white_space_is_found(change: str) -> None:
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = (
        TEMPLATES["chatml"]
        .source.replace("message.content", f"(message.content | replace({change!r}, ''))")
        .replace("m.content", f"(m.content | replace({change!r}, ''))")
        .replace("message['content']", f"(message['content'] | replace({change!r}, ''))")
    )
    assert "replace(" in tokenizer.chat_template
    chat, row = ChatFormat(tokenizer), example(**ROWS[0])
    encoded = chat.encode(row)
    with pytest.raises(MaskError, match="white space"):
        chat.check_trained(encoded.input_ids, encoded.labels, row)


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_keeps_white_space(name: str, kind: Kind) -> None:
    for kwargs in TEMPLATES[name].kwargs:
        chat = ChatFormat(build_tokenizer(name, kind=kind), chat_template_kwargs=kwargs)
        for keys in ROWS:
            row = example(**keys)
            encoded = chat.encode(row)
            chat.check_trained(encoded.input_ids, encoded.labels, row)
            cut = encoded.truncate(len(encoded.input_ids) - 4)
            chat.check_trained(cut.input_ids, cut.labels, row, is_truncated=True)
