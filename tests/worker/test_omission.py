"""Row content that its template omits: found, counted, reported with a remedy; rows with nothing trained are
skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from honed.inputs.row import convert
from honed.text.asking import Mismatches
from honed.text.chat import ChatFormat
from honed.text.omission import SilencedError
from worker.conftest import MakeJob
from zoo.shipped import SHIPPED, build_shipped
from zoo.template import TEMPLATES
from zoo.tokenizer import build_tokenizer

CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}},
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


QUESTIONS = [user("2+2?"), assistant("<think>\nA\n</think>\n\n4"), user("3+3?"), assistant("<think>\nB\n</think>\n\n6")]
CALLED = [
    user("Weather?"),
    assistant("I look.", tool_calls=[CALL]),
    {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"sky": "\\u263c\\n"}'},
    assistant("Sunny"),
]


def lost(name: str, messages: list[dict[str, Any]], **columns: Any) -> list[tuple[str, int | None, str]]:
    encoded = ChatFormat(build_shipped(name)).encode(convert({"messages": messages, **columns}, "messages"))
    return [(each.kind, each.message, each.text) for each in encoded.omitted]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("llama3", [user("2+2?"), assistant("4", reasoning_content="two")], [("reasoning", 1, "two")]),
        ("qwen3", [user("2+2?"), assistant("4", reasoning_content="two")], []),
        ("qwen3", [user("2+2?"), assistant("4", reasoning="two")], [("reasoning", 1, "two")]),
        ("qwen3", [user("2+2?"), assistant("4", reasoning="two", reasoning_content="two")], []),
        ("qwen3", QUESTIONS, [("reasoning", 1, "A")]),
        ("qwen3_training", QUESTIONS, []),
        ("deepseek_r1_distill", QUESTIONS, [("reasoning", 1, "A"), ("reasoning", 3, "B")]),
        ("deepseek_r1_distill_training", QUESTIONS, []),
        ("qwen2_5", QUESTIONS, []),
        (
            "qwen2_5",
            [{"role": "developer", "content": "Be kind."}, user("Hi"), assistant("Ho")],
            [("system", 0, "Be kind.")],
        ),
        (
            "deepseek_r1_distill",
            [
                {"role": "system", "content": "Short."},
                {"role": "system", "content": "Long."},
                user("Hi"),
                assistant("Ho"),
            ],
            [("system", 0, "Short.")],
        ),
        ("qwen3", [user("Hi", name="Alice"), assistant("Ho")], [("name", 0, "Alice")]),
        ("llama3_2", CALLED, [("answer", 1, "I look.")]),
        ("qwen3", CALLED, []),
        ("llama3", CALLED, [("tool_calls", 1, text) for text in ("get_weather", "city", "Paris", "days")]),
    ],
)
def test_what_a_template_leaves_out_is_found(name: str, messages: list[dict[str, Any]], expected: list[Any]) -> None:
    assert lost(name, messages) == expected


def test_tools_without_a_place_are_found() -> None:
    assert lost("llama3", [user("Hi"), assistant("Ho")], tools=TOOLS) == [("tools", None, "get_weather")]
    assert lost("qwen3", [user("Hi"), assistant("Ho")], tools=TOOLS) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_missed_where_all_is_shown(name: str) -> None:
    """Markup, escapes, white space, equal and short texts: templates trim some, and must not take others for tags."""
    odd = 'It is <div class="a">ok</div> & "q" \\n <b>x</b>'
    for texts in (("yes", "yes", "yes", "yes"), ("4", " lead 🎉 \n", "<i>4</i>", odd), ("a\n\n\nb", odd, "</p>", "]")):
        messages = [user(texts[0]), assistant(texts[1]), user(texts[2]), assistant(texts[3])]
        assert lost(name, messages) == []


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_plain_row_loses_nothing_under_any_family(name: str) -> None:
    chat = ChatFormat(build_tokenizer(name))
    assert chat.encode(convert({"messages": [user("What? "), assistant("Yes.")]}, "messages")).omitted == ()


def test_a_text_that_is_cut_is_found_in_rows_that_look_like_whole_ones() -> None:
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("{{- m.content if", "{{- m.content[:60] if")
    chat = ChatFormat(tokenizer)
    rows = [convert({"messages": [user("Why?"), assistant(text)]}, "messages") for text in ("So.", "So it is. " * 9)]
    assert [[each.kind for each in chat.encode(row).omitted] for row in rows] == [[], ["answer"]]


def test_a_row_of_which_only_the_end_would_be_trained_is_no_row() -> None:
    chat = ChatFormat(build_shipped("deepseek_r1_distill"))
    with pytest.raises(SilencedError, match="leaves out all text of message 2, from the assistant"):
        chat.encode(convert({"messages": [user("2+2?"), assistant("<think>\nfour\n</think>")]}, "messages"))
    # An answer that consists of a tag alone counts as an answer.
    row = convert({"messages": [user("2+2?"), assistant("<think>\nfour\n</think>[SEARCH]")]}, "messages")
    encoded = chat.encode(row)
    assert "[SEARCH]" in encoded.turns[0]
    assert [each.kind for each in encoded.omitted] == ["reasoning"]
    # An answer that is empty in the row is meant, and so is a call without words.
    chat.encode(convert({"messages": [user("Hi"), assistant(""), user("Well?"), assistant("Ho")]}, "messages"))
    chat = ChatFormat(build_shipped("qwen3"))
    chat.encode(convert({"messages": [user("Hi"), assistant("", tool_calls=[CALL])]}, "messages"))


@pytest.mark.parametrize(
    ("name", "messages", "helps"),
    [
        ("qwen3_6", QUESTIONS, "`chat_template_kwargs: {preserve_thinking: true}`"),
        ("qwen3", [user("Hi"), assistant("Ho", thinking="hm")], "from `reasoning_content`: rename the messages' key"),
        ("gemma3", [user("Hi"), assistant("Ho", thinking="hm")], "reasoning: use a template that shows it"),
        ("qwen3", [{"role": "developer", "content": "Short."}, user("Hi"), assistant("Ho")], "the role `system`"),
    ],
)
def test_what_helps_is_tried(name: str, messages: list[dict[str, Any]], helps: str) -> None:
    chat, row = ChatFormat(build_shipped(name)), convert({"messages": messages}, "messages")
    assert helps in chat.advice.on_row(row, chat.encode(row).omitted)


@pytest.mark.parametrize(
    ("name", "messages", "parts", "helps"),
    [
        ("qwen3", QUESTIONS, None, ""),
        ("qwen3_5_think", QUESTIONS, None, ""),
        ("qwen3_5_nothink", [user("Hi"), assistant("Ho")], None, ""),  # empty reasoning is part of the turn
        ("qwen3_5_nothink", QUESTIONS, ("<think>\n\n</think>\n\n", "<think>\nB\n"), "{enable_thinking: true}"),
        ("qwen3_5_think", [*QUESTIONS, user("So?")], ("assistant\n<think>\n", "assistant\n6"), "template: trl"),
        (
            "nemotron_3_nano",
            [user("Hi"), assistant("Ho")],
            ("<think>\n", "<think></think>Ho"),
            "{enable_thinking: false}",
        ),
        ("nemotron_3_nano", QUESTIONS, None, ""),
        ("deepseek_r1_distill", [user("Hi"), assistant("Ho")], ("<think>\n", "<｜Assistant｜>Ho"), "use a template"),
        (
            "diffusion_gemma",
            [*CALLED[:1], assistant("", tool_calls=[CALL]), *CALLED[2:]],
            ("<tool_response|>", "<tool_response|><|turn>model\nSunny"),
            "use a template",
        ),
    ],
)
def test_a_prompt_that_is_not_what_stands_before_the_last_turn_is_found(
    name: str, messages: list[dict[str, Any]], parts: tuple[str, str] | None, helps: str
) -> None:
    chat, row = ChatFormat(build_shipped(name)), convert({"messages": messages}, "messages")
    found, mismatch = Mismatches(), chat.encode(row).mismatch
    found.add("row 1", mismatch, row)
    if parts is None:
        assert mismatch is None
        assert found.message(1, chat.advice.on_asking(found)) == ""
        return
    assert mismatch is not None
    assert mismatch.asked.endswith(parts[0])
    assert parts[1] in mismatch.trained
    assert helps in found.message(1, chat.advice.on_asking(found))


def test_rows_that_lose_something_are_counted_and_told_before_training(make_job: MakeJob) -> None:
    thought = {"messages": [user("2+2?"), assistant("4", reasoning_content="two and two")]}
    plain = {"messages": [user("3+3?"), assistant("6")]}
    silenced = {"messages": [user("Hi"), assistant("", reasoning_content="hm"), user("Well?"), assistant("Ho")]}
    rows = [thought, thought, silenced, *[plain] * 9]
    ended = make_job("llama", rows=rows, lora={"r": 4}, training={"max_steps": 1}).run()
    assert ended.status == 0, ended.result
    [data] = ended.of("data")
    assert data["omitted"] == {"num_rows": 2, "kinds": {"reasoning": 2}}
    assert (data["num_train"], data["num_silenced"], data["num_dropped"]) == (11, 1, 1)
    warned = "\n".join(ended.messages("warning"))
    assert "leaves out parts of 2 of 11 rows: reasoning in 2 (the first: data set 1, row 1, message 2: 'two" in warned
    assert "`chat_template:`" in warned
    assert "1 row is skipped; the first: data set 1, row 3: the chat template leaves out all" in warned
    refused = make_job("llama", rows=[silenced, silenced, *[plain] * 9], lora={"r": 4}).run()
    assert refused.result["error"]["code"] == "dataset_invalid"
    assert "2 of 11 rows would train an empty answer" in refused.result["error"]["message"]


def test_one_silenced_row_of_a_few_that_are_held_out_refuses_no_job(make_job: MakeJob, tmp_path: Path) -> None:
    silenced = {"messages": [user("Hi"), assistant("", reasoning_content="hm"), user("Well?"), assistant("Ho")]}
    plain = [{"messages": [user(f"{n}+{n}?"), assistant(str(2 * n))]} for n in range(12)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [silenced, *plain[9:]]))
    ended = make_job(
        "llama",
        rows=plain[:9],
        eval_datasets=[{"path": str(tmp_path / "held.jsonl")}],
        lora={"r": 4},
        training={"max_steps": 1},
    ).run()
    assert ended.status == 0, ended.result
    [data] = ended.of("data")
    assert (data["num_train"], data["num_eval"], data["num_silenced"]) == (9, 3, 1)
