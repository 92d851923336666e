"""Different templates for rows and for predictions, and template arguments set by a row itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

from honed.inputs.row import convert
from honed.spec import variant
from honed.system.error import DatasetError
from honed.text.chat import ChatFormat
from worker.conftest import MakeJob
from zoo.shipped import SHIPPED, SHIPPED_DIR, build_shipped, source

TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "three and three"},
]


def text_of(chat: ChatFormat, **row: Any) -> str:
    segments = chat.encode(convert({"messages": TURNS, **row}, "messages")).segments()
    return "".join(f"⟦{part['text']}⟧" if part["trained"] else part["text"] for part in segments)


@pytest.mark.parametrize("name", [name for name in SHIPPED if (SHIPPED_DIR / f"{name}_training.jinja").exists()])
def test_the_variant_is_the_one_that_trl_takes(name: str) -> None:
    found = variant.find(source(name))
    assert found is not None
    assert get_training_chat_template(build_shipped(name)) == found.read_text(encoding="utf-8")


def test_rows_have_the_variant_and_questions_the_bases_own() -> None:
    base = ChatFormat(build_shipped("qwen3"))
    chat = ChatFormat(build_shipped("qwen3"), rows_template=source("qwen3_training"))
    row = convert({"messages": TURNS}, "messages")
    assert "⟦<think>\ntwo and two\n</think>\n\n4<|im_end|>⟧" in text_of(chat)
    assert "two and two" not in text_of(base)
    assert chat.prompt(row) == base.prompt(row)
    assert set(base.stop_token_ids) <= set(chat.stop_token_ids)
    encoded = chat.encode(row)
    assert encoded.omitted == ()
    chat.check_trained(encoded.input_ids, encoded.labels, row)
    assert "training_chat_template: trl" in base.advice.on_row(row, base.encode(row).omitted)


def test_a_job_with_trls_variant_trains_on_all_reasoning_and_exports_the_bases_template(
    make_job: MakeJob, tmp_path: Path
) -> None:
    template = tmp_path / "qwen3_5_nothink.jinja"
    template.write_text(source("qwen3_5_nothink"), encoding="utf-8")
    keys = {"chat_template": str(template), "lora": {"r": 4}, "training": {"max_steps": 1}}
    job = make_job("qwen3", rows=[{"messages": TURNS}] * 2, training_chat_template="trl", **keys)
    ended = job.run()
    assert ended.status == 0, ended.result
    [example] = ended.of("example")
    trained = [part["text"] for part in example["segments"] if part["trained"]]
    assert trained[0].startswith("two and two\n</think>\n\n4<|im_end|>")
    assert ended.of("data")[0]["omitted"]["num_rows"] == 0
    assert ended.of("data")[0]["num_asked_otherwise"] == 2  # this template's prompt contains empty reasoning
    [told] = [each for each in ended.messages("warning") if "differs from the training rows in 2 of 2 rows" in each]
    assert "`chat_template_kwargs: {enable_thinking: true}` to make prompts match" in told
    assert all("two and two" not in row["prompt"] for each in ended.of("predictions") for row in each["rows"])
    assert AutoTokenizer.from_pretrained(job.output_dir).chat_template == source("qwen3_5_nothink")


def test_a_rows_own_arguments_go_before_the_jobs() -> None:
    chat = ChatFormat(build_shipped("qwen3_6"), chat_template_kwargs={"preserve_thinking": False})
    assert "two and two" not in text_of(chat)
    own = {"preserve_thinking": True, "other": None}
    assert "⟦two and two\n</think>\n\n4" in text_of(chat, chat_template_kwargs=own).replace("⟦<think>\n", "⟦")
    assert "two and two" in text_of(chat, chat_template_kwargs='{"preserve_thinking": true}')
    assert "two and two" not in text_of(chat)
    row = convert({"messages": TURNS, "chat_template_kwargs": own}, "messages")
    encoded = chat.encode(row)
    chat.check_trained(encoded.input_ids, encoded.labels, row)
    assert "two and two" in chat.prompt(row)[0]


@pytest.mark.parametrize(
    ("value", "said"),
    [("yes", "must be an object, this is a string"), ({"tokenize": True}, "has `tokenize`, which cannot")],
)
def test_a_rows_arguments_that_are_none_leave_it_out(value: Any, said: str) -> None:
    with pytest.raises(DatasetError, match=said):
        convert({"messages": TURNS, "chat_template_kwargs": value}, "messages")
