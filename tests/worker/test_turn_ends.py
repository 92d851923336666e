"""The end of a turn is trained wherever a template puts it, and calls are rendered as the template expects them;
compared with TRL's training templates, whose sources come from the installed package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.inputs.row import Example, fields
from honed.system import quote
from honed.system.error import DatasetError, MaskError
from honed.text.chat import IGNORED, ChatFormat
from zoo import masks
from zoo.tokenizer import build_marked_tokenizer

PAGE = Path(__file__).parents[2] / "docs/masks.md"
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": '{"a":2, "b": [1]}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
TOLD: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def row(messages: list[dict[str, Any]]) -> Example:
    return Example(**fields({"messages": messages}, "messages", None, has_chat_template=True, directories=None))


def trained(chat: ChatFormat, messages: list[dict[str, Any]]) -> list[str]:
    """Return the trained texts, once the independent check has passed them."""
    encoded = chat.encode(row(messages))
    chat.check_trained(encoded.input_ids, encoded.labels, row(messages))
    return [segment["text"] for segment in encoded.segments() if segment["trained"]]


@pytest.fixture(scope="module")
def glm() -> ChatFormat:
    return masks.chat_of("glm4moe")


def test_masks_are_trls_or_differ_for_a_reason_that_the_page_tells() -> None:
    """`python -m zoo.masks --write ../docs/masks.md`, in tests/, rebuilds the page."""
    page = masks.page()
    cells = [line for line in page.splitlines() if line.startswith("|")]
    listed = [name for line in cells[2:] for name in line.split("|")[1].strip().split(", ")]
    assert sorted(listed) == sorted(masks.templates())
    assert len(listed) >= 29
    assert not [line for line in cells if "?" in line]
    assert page == PAGE.read_text(encoding="utf-8")


# --- the next turn's mark as the end ---------------------------------------------------------------------------------


def test_a_turn_that_the_next_ones_mark_ends_is_trained_with_it(glm: ChatFormat) -> None:
    told = ["\n<think></think>\nHello!<|user|>", "\n<think></think>\n4<|user|>"]
    assert trained(glm, TOLD) == told
    called, answer = trained(glm, CALLED)
    assert called.endswith("</arg_value>\n</tool_call><|observation|>")
    assert answer.endswith("It is 4.<|user|>")
    assert trained(glm, CALLED[:2]) == [called]
    assert trained(glm, [*TOLD[:2], {"role": "system", "content": "Be brief."}, *TOLD[2:]])[0].endswith("<|system|>")
    names = [glm.tokenizer.decode([token]) for token in glm.stop_token_ids]
    assert set(names) >= {"<|user|>", "<|observation|>", "<|endoftext|>"}
    [(level, said)] = glm.advice.notes()
    assert level == "info"
    assert "honed adds '<|user|>' or '<|observation|>' there and trains it" in quote.show(said)


def test_between_two_turns_of_the_assistant_nothing_is_trained(glm: ChatFormat) -> None:
    one, two = trained(glm, [TOLD[0], TOLD[1], TOLD[3]])
    assert (one, two) == ("\n<think></think>\nHello!", "\n<think></think>\n4<|user|>")
    called, _ = trained(glm, [*CALLED[:2], CALLED[3]])
    assert called.endswith("</arg_value>\n</tool_call>")


def without_last(labels: list[int], *, run: int) -> list[int]:
    """Return the labels without the last trained token of a run."""
    ends = [n for n, label in enumerate(labels) if label != IGNORED and [*labels, IGNORED][n + 1] == IGNORED]
    return [IGNORED if n == ends[run] else label for n, label in enumerate(labels)]


@pytest.mark.parametrize("is_learned", [True, False], ids=["", "with ends that are not known"])
@pytest.mark.parametrize("messages", [TOLD, CALLED], ids=["turns", "a call"])
def test_the_check_sees_an_end_that_is_not_trained(messages: list[dict[str, Any]], is_learned: bool) -> None:
    chat = masks.chat_of("glm4moe")
    example = row(messages)
    encoded = chat.encode(example)
    if not is_learned:  # as if the template had been misread
        chat.renderer._cached_probe = replace(chat.renderer.probe, ends=(), unwritten="", unwritten_call="")
    if is_learned or messages is TOLD:  # else `</tool_call>`, a token, might be the end
        with pytest.raises(MaskError, match="the end"):
            chat.check_trained(encoded.input_ids, without_last(encoded.labels, run=0), example)
    # The end of a call as it used to be trained: up to its last argument.
    text = chat.tokenizer.decode(encoded.input_ids)
    for cut in ("Hello!", "[1]"):
        if cut in text:
            first = len(chat.tokenizer(text[: text.index(cut) + len(cut)], add_special_tokens=False)["input_ids"])
            second = encoded.labels.index(IGNORED, first + 1)
            labels = [IGNORED if first <= n < second else label for n, label in enumerate(encoded.labels)]
            with pytest.raises(MaskError, match="the end"):
                chat.check_trained(encoded.input_ids, labels, example)


@pytest.mark.parametrize("messages", [TOLD, TOLD[:2], CALLED, CALLED[:2]])
def test_the_check_sees_a_row_that_lacks_its_last_end(glm: ChatFormat, messages: list[dict[str, Any]]) -> None:
    encoded = glm.encode(row(messages))
    with pytest.raises(MaskError, match="the row ends without the end token of a turn"):
        glm.check_trained(encoded.input_ids[:-1], encoded.labels[:-1], row(messages))


def test_an_end_that_stands_between_two_calls_is_told_where_rows_have_such() -> None:
    chat, one = masks.chat_of("deepseek_r1_distill"), row(CALLED)
    two = row([CALLED[0], {**CALLED[1], "tool_calls": [CALL, {**CALL, "id": "call00002"}]}])
    assert [said for _, said in chat.advice.notes([one]) if "calls" in said] == []
    [(level, said)] = chat.advice.notes([one, two])
    assert level == "warning"
    assert "'<｜tool▁call▁end｜>', but also puts it between two calls of a turn, which 1 rows have" in quote.show(said)
    assert not list(masks.chat_of("deepseekv3").advice.notes([two]))


def test_turns_that_have_an_end_only_as_the_last_are_told_where_rows_have_several() -> None:
    alpaca = (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content }}"
        "{{ eos_token if loop.last and m.role == 'assistant' else '\n\n' }}{% endfor %}"
        "{{ '### assistant:\n' if add_generation_prompt }}"
    )
    chat = ChatFormat(build_marked_tokenizer(alpaca))
    assert trained(chat, TOLD) == ["Hello!", "4<|endoftext|>"]
    assert not list(chat.advice.notes([row(TOLD[:2])]))
    [(level, said)] = chat.advice.notes([row(TOLD), row(TOLD[:2])])
    assert level == "warning"
    assert "ends only a row's last turn with '<|endoftext|>'" in quote.show(said)
    assert "in 1 rows such turns" in said


BETWEEN = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ ' ' + m.content }}"
    "{% if not loop.last %}{{ '</s>' }}{% endif %}{% endif %}{% endfor %}"
)
LAST = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ '<|endoftext|>' }}{% endif %}{# <|user|> #}"
)
MARKS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{# <|user|> <|assistant|> #}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "turns"),
    [
        pytest.param(BETWEEN, [" Hello!</s>", " 4</s>"], id="eos between turns alone"),
        pytest.param(LAST, ["Hello!<|user|>", "4<|endoftext|>"], id="eos after the last alone"),
        pytest.param(MARKS, ["Hello!<|user|>", "4<|user|>"], id="marks of roles alone"),
    ],
)
def test_each_turn_has_an_end_wherever_the_template_has_one(source: str, turns: list[str]) -> None:
    chat = ChatFormat(build_marked_tokenizer(source))
    assert trained(chat, TOLD) == turns
    example = row(TOLD)
    encoded = chat.encode(example)
    for run in (0, 1):
        with pytest.raises(MaskError, match="end"):
            chat.check_trained(encoded.input_ids, without_last(encoded.labels, run=run), example)
    stops = {
        chat.tokenizer.convert_tokens_to_ids(turn.rpartition(">")[0].rpartition("<")[2].join("<>")) for turn in turns
    }
    assert stops <= set(chat.stop_token_ids)


def test_what_follows_a_call_in_gemma_4_is_where_generation_stops() -> None:
    chat = ChatFormat(build_marked_tokenizer(masks.source("gemma4")))
    called, answer = trained(chat, CALLED)
    assert called.endswith("}<tool_call|><|tool_response>")
    assert answer == "It is 4.<turn|>"
    assert chat.tokenizer.convert_tokens_to_ids("<|tool_response>") in chat.stop_token_ids


# --- calls as a template takes them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_calls_of_openais_rows_are_rendered_as_they_are_written(name: str, content: str | None) -> None:
    chat = masks.chat_of(name)
    turn = {key: value for key, value in CALLED[1].items() if content != "absent" or key != "content"}
    turn |= {} if content == "absent" else {"content": content}
    called, answer = trained(chat, [CALLED[0], turn, *CALLED[2:]])
    assert 'add\n```json\n{"a":2, "b": [1]}\n```<｜tool▁call▁end｜>' in called
    assert answer == "It is 4.<｜end▁of▁sentence｜>"
    given = json.loads(json.dumps(CALLED[1]))
    given["tool_calls"][0]["function"]["arguments"] = {"a": "ä"}
    assert '```json\n{"a": "ä"}\n```' in trained(chat, [CALLED[0], given, *CALLED[2:]])[0]


def test_several_calls_of_one_turn_are_trained_to_their_common_end() -> None:
    other = json.loads(json.dumps(CALL))
    other["function"]["name"] = "multiply"
    both = [CALLED[0], {**CALLED[1], "tool_calls": [CALL, other]}, CALLED[2], CALLED[2], CALLED[3]]
    for name in ("deepseekv3", "deepseek_r1_distill"):
        called, _ = trained(masks.chat_of(name), both)
        assert called.endswith("<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>")


SAID_AND_CALLED = [CALLED[0], {**CALLED[1], "content": "I compute it."}, *CALLED[2:]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", 'I compute it.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [1]}}\n</tool_call>'),
        ("llama3_2", '{"name": "add", "parameters": {"a": 2, "b": [1]}}'),
        ("gptoss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": [1]}'),
        ("llama3", "I compute it."),
        ("deepseek_r1_distill", "I compute it."),
        ("qwen2_5_vl", "I compute it."),
    ],
)
def test_a_turn_of_words_and_calls_is_trained_as_its_template_shows_it(name: str, expected: str) -> None:
    """Many templates show only one of the two. The other is counted as omitted, which does not end the job."""
    chat = ChatFormat(build_marked_tokenizer(masks.source(name)))
    called, answer = trained(chat, SAID_AND_CALLED)
    assert any(called == expected + end for end in chat.renderer.probe.ends)
    assert "It is 4." in answer
    assert bool(chat.encode(row(SAID_AND_CALLED)).omitted) == (name != "qwen3")


def test_calls_that_are_shown_before_the_turns_words_are_checked_in_that_order() -> None:
    chat = ChatFormat(build_marked_tokenizer(masks.source("gemma4")))
    assert trained(chat, SAID_AND_CALLED[:2]) == [
        "<|tool_call>call:add{a:2,b:[1]}<tool_call|>I compute it.<|tool_response>"
    ]
    # Where tools answer, their answers stand between the two.
    with pytest.raises(DatasetError, match="writes message 3, from the tool, into the middle of message 2"):
        chat.encode(row(SAID_AND_CALLED))


def test_a_call_whose_reasoning_is_dropped_later_ends_before_the_tools_answer() -> None:
    """gpt-oss takes the name of the answering tool from the call, so a call with another name changes both."""
    chat = masks.chat_of("gptoss")
    for called in ({**CALLED[1], "thinking": "add them"}, SAID_AND_CALLED[1]):
        first, _ = trained(chat, [CALLED[0], called, *CALLED[2:]])
        assert first.endswith('{"a": 2, "b": [1]}<|call|>')


def test_what_closes_reasoning_as_well_does_not_stop_generation() -> None:
    """gpt-oss ends its analysis like an earlier turn: stopping there, no prediction would reach the answer."""
    chat = masks.chat_of("gptoss")
    reasoned = [CALLED[0], {"role": "assistant", "content": "4", "thinking": "two and two"}]
    assert "<|end|>" in trained(chat, reasoned)[0]
    assert "<|end|>" in chat.renderer.probe.ends
    assert chat.tokenizer.convert_ids_to_tokens(chat.stop_token_ids) == ["<|return|>", "<|call|>"]


def test_a_template_that_prints_arguments_gets_json_and_one_that_makes_json_an_object() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "<tool_call>{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    )
    printed = ChatFormat(build_marked_tokenizer(source.replace("ARGUMENTS", "{{ c.function.arguments }}")))
    assert trained(printed, CALLED)[0] == '<tool_call>add {"a":2, "b": [1]}</tool_call><|im_end|>'
    made = ChatFormat(build_marked_tokenizer(source.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")))
    assert trained(made, CALLED)[0] == '<tool_call>add {"a": 2, "b": [1]}</tool_call><|im_end|>'
