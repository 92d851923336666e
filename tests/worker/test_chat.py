"""Masks: for every template and both kinds of tokenizer, what is trained is the assistant's turns and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer
from zoo.template import TEMPLATES, Template
from zoo.tokenizer import build_tokenizer

from honed.chat import IGNORED, ChatFormat, Encoded, trained_share
from honed.dataset import Example
from honed.error import DatasetError, MaskError

KINDS = ("bytelevel", "metaspace")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
_TOKENIZERS: dict[tuple[str, str], Any] = {}


def tokenizer_of(name: str, kind: str) -> Any:
    if (name, kind) not in _TOKENIZERS:
        _TOKENIZERS[name, kind] = build_tokenizer(name, kind=kind)
    return _TOKENIZERS[name, kind]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "abc123def", "function": {"name": name, "arguments": arguments}}


def example(*messages: dict[str, Any], tools: list[Any] | None = None) -> Example:
    return Example("messages", messages=list(messages), tools=tools)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "single": [user("What is the capital of France?"), assistant("Paris.")],
    "very short": [user("2+2"), assistant("4")],
    "many turns": [
        user("Who are you?"), assistant("A careful assistant."), user("What is two and two?"), assistant("4"),
        user("And the capital of Germany?"), assistant("Berlin, of course."),
    ],
    "system": [system("Answer in one word."), user("Capital of France?"), assistant("Paris")],
    "system, many turns": [
        system("Be brief."), user("Hello there"), assistant("hello!"), user("bye"), assistant("Bye.\n\nSee you."),
    ],
    "unicode": [user("Wie heißt 🙂?"), assistant("🙂 heißt Lächeln; 日本語 мир 👩‍👩‍👧 é"), user("日本"), assistant("🙂")],
    "white space around": [user("  hello\n"), assistant("  hello there \n\n"), user("again"), assistant("\n\nyes\t")],
    "the user's words": [user("Paris"), assistant("Paris"), user("Paris"), assistant("Paris")],
    "code": [user("f?"), assistant("def f(x):\n    return x + 1\n\n\nf(1)"), user("no"), assistant("- a\n- b\n")],
    "punctuation first": [user("quote!"), assistant('"Hi," he said.'), user("tag"), assistant("<b>bold</b>")],
    "markers in the text": [user("Say </s> or [INST]"), assistant("I can say <|im_end|> and go on."), user("ok"), assistant("Yes.")],
}  # fmt: skip
REASONED: dict[str, list[dict[str, Any]]] = {
    "reasoning of the last turn": [user("2+2?"), assistant("4", reasoning_content="two and two\nmake four")],
    "reasoning of earlier turns": [
        user("2+2?"), assistant("4", reasoning_content="easy"), user("3+3?"), assistant("6", reasoning_content="easy too"),
    ],
    "reasoning inside the content": [
        user("2+2?"), assistant("<think>\nhm\n</think>\n\n4"), user("3+3?"), assistant("<think>\nhm, so\n</think>\n\n6"),
    ],
    "reasoning once": [user("2+2?"), assistant("4", reasoning_content="sum"), user("thanks"), assistant("welcome")],
}  # fmt: skip
INLINE = {"reasoning inside the content"}
CALLED: dict[str, list[dict[str, Any]]] = {
    "a call and its answer": [
        user("What is 2+2?"), assistant("", tool_calls=[call("add", a=2, b=2)]), tool('{"sum": 4}'), assistant("It is 4."),
    ],
    "a call ends the row": [user("What is 2+2?"), assistant("", tool_calls=[call("add", a=2, b=2)])],
    "calls in many turns": [
        user("2+2"), assistant("", tool_calls=[call("add", a=2, b=2)]), tool("4"), assistant("4"),
        user("3+3"), assistant("", tool_calls=[call("add", a=3, b=3)]), tool("6"), assistant("6"),
    ],
}  # fmt: skip


def cases() -> Iterator[Any]:
    for template in TEMPLATES.values():
        conversations = dict(CONVERSATIONS)
        if template.takes_reasoning:
            conversations |= REASONED
        elif template.name == "deepseek_r1":
            conversations |= {name: REASONED[name] for name in INLINE}
        if template.takes_tools:
            conversations |= CALLED
        for name, messages in conversations.items():
            for kwargs in template.kwargs:
                yield pytest.param(template, messages, kwargs, id=f"{template.name}-{name}-{kwargs or ''}")


def trained_texts(encoded: Encoded) -> list[str]:
    return [segment["text"] for segment in encoded.segments() if segment["trained"]]


def joined(turns: Sequence[str], texts: Sequence[str]) -> list[str]:
    """The turns as runs: where a template writes two of them side by side, they are one."""
    runs = list(turns)
    for n, text in enumerate(texts):
        while len(runs) > len(texts) and n + 1 < len(runs) and runs[n].strip() != text.strip():
            runs[n : n + 2] = [runs[n] + runs[n + 1]]
    return runs


def assert_trained(chat: ChatFormat, encoded: Encoded, turns: Sequence[str]) -> None:
    """The trained runs are the turns. A token that reaches over an end may take white space along, and no more."""
    assert list(encoded.turns) == list(turns)
    assert len(encoded.input_ids) == len(encoded.trained)
    ids = encoded.input_ids
    bounds, start = [], None
    for n, is_trained in enumerate([*encoded.trained, False]):
        if is_trained and start is None:
            start = n
        if not is_trained and start is not None:
            bounds.append((start, n))
            start = None
    texts = trained_texts(encoded)
    turns = joined(turns, texts)
    assert len(texts) == len(turns), texts
    for text, turn, (a, b) in zip(texts, turns, bounds, strict=True):
        assert text.strip() == turn.strip()
        decoded = chat.tokenizer.decode(ids[a:b])
        assert "".join(decoded.replace("▁", " ").split()) == "".join(turn.replace("▁", " ").split())
        front, _, back = text.partition(turn) if turn in text else ("?", "", "?")
        assert not front.strip() and not back.strip(), (text, turn)
        if front:
            assert len(encoded._pieces(a + 1, b)) - len(back) < len(turn)
        if back:
            assert len(encoded._pieces(a, b - 1)) - len(front) < len(turn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("template", "messages", "kwargs"), cases())
def test_what_is_trained_is_the_assistants_turns(
    template: Template, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], kind: str
) -> None:
    chat = ChatFormat(tokenizer_of(template.name, kind), chat_template_kwargs=kwargs)
    row = example(*messages, tools=[ADD] if any(m.get("tool_calls") for m in messages) else None)
    encoded = chat.encode(row)
    assert_trained(chat, encoded, template.turns(messages, kwargs))
    chat.check_trained(encoded.input_ids, encoded.labels, row)


# --- conversations that nobody thought of ---------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["a", "4", "Paris", " ", "\n", "\n\n", "\t", "  ", ".", ":", '"', "é", "🙂", "日本", "<", ">", "|", "[", "{", "}", "don't",
     "<think>", "</think>", "<think>\n", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "[/INST]", "[INST]", "Assistant:",
     "User: ", "<end_of_turn>\n", "<|end|>", "assistant", "The capital of France"]
)  # fmt: skip
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn, *, any_order: bool) -> list[dict[str, Any]]:
    messages = [system(draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(TEXTS)))
        messages += [assistant(draw(TEXTS)) for _ in range(draw(st.integers(1, 2 if any_order else 1)))]
    return messages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_conversation_is_masked_exactly_or_refused_by_name(name: str, kind: str, data: st.DataObject) -> None:
    template = TEMPLATES[name]
    messages = data.draw(conversations(any_order=template.takes_any_order))
    kwargs = data.draw(st.sampled_from(template.kwargs))
    chat = ChatFormat(tokenizer_of(name, kind), chat_template_kwargs=kwargs)
    turns = template.turns(messages, kwargs)
    try:
        encoded = chat.encode(example(*messages))
    except DatasetError as error:
        # A turn of which the template shows nothing, or one that a token of other words reaches into.
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        hidden = [a for a in answers if "</think>" in a and not a.split("</think>")[-1].strip()]
        assert hidden or not any(turn.strip() for turn in turns), error
        return
    assert_trained(chat, encoded, turns)
    chat.check_trained(encoded.input_ids, encoded.labels, example(*messages))
