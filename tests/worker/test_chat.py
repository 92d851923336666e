"""Masks: for every template and both kinds of tokenizer, exactly the assistant's turns are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from honed.inputs.dataset import Example
from honed.inputs.message import words
from honed.system.error import DatasetError, MaskError
from honed.text.chat import IGNORED, ChatFormat, Encoded, trained_share
from honed.text.tokens import Tokens
from told import refused
from zoo.template import TEMPLATES, Template
from zoo.tokenizer import build_tokenizer

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
    "unicode": [
        user("Wie heißt 🙂?"), assistant("🙂 heißt Lächeln; 日本語 мир 👩‍👩‍👧 é"), user("日本"), assistant("🙂"),
    ],
    "white space around": [user("  hello\n"), assistant("  hello there \n\n"), user("again"), assistant("\n\nyes\t")],
    "the user's words": [user("Paris"), assistant("Paris"), user("Paris"), assistant("Paris")],
    "code": [user("f?"), assistant("def f(x):\n    return x + 1\n\n\nf(1)"), user("no"), assistant("- a\n- b\n")],
    "punctuation first": [user("quote!"), assistant('"Hi," he said.'), user("tag"), assistant("<b>bold</b>")],
    "markers in the text": [
        user("Say </s> or [INST]"), assistant("I can say <|im_end|> and go on."), user("ok"), assistant("Yes."),
    ],
}  # fmt: skip
REASONED: dict[str, list[dict[str, Any]]] = {
    "reasoning of the last turn": [user("2+2?"), assistant("4", reasoning_content="two and two\nmake four")],
    "reasoning of earlier turns": [
        user("2+2?"),
        assistant("4", reasoning_content="easy"),
        user("3+3?"),
        assistant("6", reasoning_content="easy too"),
    ],
    "reasoning inside the content": [
        user("2+2?"),
        assistant("<think>\nhm\n</think>\n\n4"),
        user("3+3?"),
        assistant("<think>\nhm, so\n</think>\n\n6"),
    ],
    "reasoning once": [user("2+2?"), assistant("4", reasoning_content="sum"), user("thanks"), assistant("welcome")],
}
INLINE = {"reasoning inside the content"}
CALLED: dict[str, list[dict[str, Any]]] = {
    "a call and its answer": [
        user("What is 2+2?"),
        assistant("", tool_calls=[call("add", a=2, b=2)]),
        tool('{"sum": 4}'),
        assistant("It is 4."),
    ],
    "a call ends the row": [user("What is 2+2?"), assistant("", tool_calls=[call("add", a=2, b=2)])],
    "calls in many turns": [
        user("2+2"),
        assistant("", tool_calls=[call("add", a=2, b=2)]),
        tool("4"),
        assistant("4"),
        user("3+3"),
        assistant("", tool_calls=[call("add", a=3, b=3)]),
        tool("6"),
        assistant("6"),
    ],
}


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
    """Return the turns as runs: two that a template renders without text between them are one run."""
    runs = list(turns)
    for n, text in enumerate(texts):
        while len(runs) > len(texts) and n + 1 < len(runs) and runs[n].strip() != text.strip():
            runs[n : n + 2] = [runs[n] + runs[n + 1]]
    return runs


def assert_trained(chat: ChatFormat, encoded: Encoded, turns: Sequence[str]) -> None:
    """Check that the trained runs are the turns. A token that crosses an end may add white space, but nothing more."""
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
    [
        "a",
        "4",
        "Paris",
        " ",
        "\n",
        "\n\n",
        "\t",
        "  ",
        ".",
        ":",
        '"',
        "é",
        "🙂",
        "日本",
        "<",
        ">",
        "|",
        "[",
        "{",
        "}",
        "don't",
        "<think>",
        "</think>",
        "<think>\n",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "</s>",
        "[/INST]",
        "[INST]",
        "Assistant:",
        "User: ",
        "<end_of_turn>\n",
        "<|end|>",
        "assistant",
        "The capital of France",
    ]
)
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
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_conversation_is_masked_exactly_or_refused_by_name(name: str, kind: str, data: st.DataObject) -> None:
    template = TEMPLATES[name]
    messages = data.draw(conversations(any_order=template.takes_any_order))
    kwargs = data.draw(st.sampled_from(template.kwargs))
    if "enable_thinking" in kwargs:  # a thought of nothing but white space may be the prompt's or the turn's
        assume(not any(re.search(r"(^|<think>)\s*</think>", message["content"]) for message in messages))
    chat = ChatFormat(tokenizer_of(name, kind), chat_template_kwargs=kwargs)
    turns = template.turns(messages, kwargs)
    try:
        encoded = chat.encode(example(*messages))
    except DatasetError as error:
        # A turn that the template does not show, or one that shares a token with other text.
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        hidden = [a for a in answers if "</think>" in a and not a.split("</think>")[-1].replace("<think>", "").strip()]
        assert hidden or not any(turn.strip() for turn in turns), error
        return
    assert_trained(chat, encoded, turns)
    chat.check_trained(encoded.input_ids, encoded.labels, example(*messages))


# --- orders of roles that are out of the ordinary --------------------------------------------------------------------

UNUSUAL: dict[str, list[dict[str, Any]]] = {
    "the assistant begins": [assistant("Hello! How can I help?"), user("2+2"), assistant("4")],
    "the assistant alone": [assistant("Once upon a time.")],
    "two answers in a row": [user("2+2"), assistant("4"), assistant("It is four."), user("bye"), assistant("Bye.")],
    "two questions in a row": [user("2+2?"), user("Well?"), assistant("4")],
    "the user has the last word": [user("2+2?"), assistant("4"), user("Thanks")],
    "a system prompt in the middle": [user("Hi"), assistant("Hi."), system("Be rude."), user("Hi"), assistant("What?")],
    "an empty answer before": [user("Hi"), assistant(""), user("Hello?"), assistant("Yes.")],
    "one long conversation": [message for n in range(12) for message in (user(f"{n}+1"), assistant(str(n + 1)))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", UNUSUAL)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_roles_out_of_the_usual_order_are_masked_exactly_or_refused_in_the_templates_words(
    template: Template, order: str, kind: str
) -> None:
    messages = UNUSUAL[order]
    chat = ChatFormat(tokenizer_of(template.name, kind))
    try:
        encoded = chat.encode(example(*messages))
    except DatasetError as error:
        assert "the chat template rejects the conversation: " in error.message
        assert not template.takes_any_order or (template.name, order) == ("mistral", "a system prompt in the middle")
        return
    assert_trained(chat, encoded, template.turns(messages, {}))
    chat.check_trained(encoded.input_ids, encoded.labels, example(*messages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_calls_of_tools_are_trained_with_the_words_beside_them_and_answers_of_tools_are_not(
    name: str, kind: str
) -> None:
    messages = [
        system("Use the tools."),
        user("2+2 and 3+3?"),
        assistant(
            "Let me see.", tool_calls=[call("add", a=2, b=2), call("add", a=3, b=3)], reasoning_content="two sums"
        ),
        tool("4"),
        tool("6"),
        assistant("4 and 6."),
        user("And 1+1?"),
        assistant("", tool_calls=[call("add", a=1, b=1)]),
        tool("2"),
        assistant("2"),
    ]
    chat = ChatFormat(tokenizer_of(name, kind))
    row = example(*messages, tools=[ADD])
    encoded = chat.encode(row)
    assert_trained(chat, encoded, TEMPLATES[name].turns(messages, {}))
    chat.check_trained(encoded.input_ids, encoded.labels, row)


def test_of_a_prompt_given_as_messages_the_assistants_turns_are_not_trained() -> None:
    chat = ChatFormat(tokenizer_of("chatml", "bytelevel"))
    messages = [user("Hi"), assistant("Hello."), user("2+2?"), assistant("4")]
    row = replace(example(*messages), num_prompt_messages=3)
    encoded = chat.encode(row)
    assert trained_texts(encoded) == ["4<|im_end|>"]
    chat.check_trained(encoded.input_ids, encoded.labels, row)
    everything = chat.encode(example(*messages))
    with pytest.raises(MaskError):
        chat.check_trained(everything.input_ids, everything.labels, row)


# --- turns of weight 0 -----------------------------------------------------------------------------------------------

WEIGHED: dict[str, tuple[list[dict[str, Any]], tuple[int, ...]]] = {
    "the first": ([user("Who?"), assistant("Nobody knows."), user("2+2?"), assistant("4")], (1,)),
    "the last": ([user("Who?"), assistant("Nobody knows."), user("2+2?"), assistant("4")], (3,)),
    "one in the middle": (
        [user("a?"), assistant("A."), user("b?"), assistant("B, as I said."), user("c?"), assistant("C.")],
        (3,),
    ),
    "the same words": ([user("Yes?"), assistant("yes"), user("Yes?"), assistant("yes")], (1,)),
    "the same words at the end": ([user("Yes?"), assistant("yes"), user("Yes?"), assistant("yes")], (3,)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("name", WEIGHED)
def test_a_turn_of_weight_0_is_not_trained_and_the_check_knows(template: Template, name: str, kind: str) -> None:
    messages, untrained = WEIGHED[name]
    chat = ChatFormat(tokenizer_of(template.name, kind))
    row = example(*messages)
    everything, weighed = chat.encode(row), chat.encode(replace(row, untrained=untrained))
    assert weighed.input_ids == everything.input_ids
    turns = template.turns(messages, {})
    kept = [turn for i, turn in zip(row.trained_turns, turns, strict=True) if i not in untrained]
    assert_trained(chat, weighed, kept)
    row = replace(row, untrained=untrained)
    chat.check_trained(weighed.input_ids, weighed.labels, row)
    assert words(row.messages[row.trained_turns[-1]]) == chat.prompt(row)[2]
    wrong = [IGNORED if t else label for t, label in zip(weighed.trained, everything.labels, strict=True)]
    for labels in (everything.labels, wrong):  # with the turn of weight 0, and with that turn instead of the others
        with refused(MaskError, "⟦"):
            chat.check_trained(weighed.input_ids, labels, row)


def test_a_row_of_weight_0_alone_is_refused_as_one_row() -> None:
    chat = ChatFormat(tokenizer_of("chatml", "bytelevel"))
    rows = [example(user("a"), assistant("b")), replace(example(user("a"), assistant("b")), untrained=(1,))]
    chat.encode(rows[0])
    with pytest.raises(DatasetError, match="all of them have weight 0"):
        chat.encode(rows[1])


def test_a_call_of_weight_0_that_the_template_cannot_show_costs_nothing() -> None:
    chat = ChatFormat(tokenizer_of("gemma", "bytelevel"))
    row = example(user("a"), assistant("", tool_calls=[call("add", a=1)]), user("b"), assistant("c"))
    with pytest.raises(DatasetError, match="message 2"):
        chat.encode(row)
    assert trained_texts(chat.encode(replace(row, untrained=(1,)))) == ["c<end_of_turn>"]


@pytest.mark.parametrize("template", [t for t in TEMPLATES.values() if not t.takes_tools], ids=lambda t: t.name)
def test_a_turn_that_the_template_does_not_show_is_an_error_that_names_it(template: Template) -> None:
    chat = ChatFormat(tokenizer_of(template.name, "bytelevel"))
    row = example(user("2+2"), assistant("", tool_calls=[call("add", a=2, b=2)]))
    with pytest.raises(DatasetError, match=r"data set 1, row 1: .*message 2"):
        chat.encode(row)


def test_one_bad_row_is_counted_beside_the_good_ones() -> None:
    chat = ChatFormat(tokenizer_of("gemma", "bytelevel"))
    rows = [
        example(user("a"), assistant("b")),
        example(user("a"), user("b"), assistant("c")),
        example(user("a"), assistant("b")),
    ]
    chat.encode(rows[0])
    with pytest.raises(DatasetError) as caught:
        chat.encode(rows[1])
    assert "must alternate" in caught.value.shown
    chat.encode(rows[2])


def test_without_a_chat_template_conversations_ask_for_one() -> None:
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = None
    chat = ChatFormat(tokenizer)
    with pytest.raises(DatasetError) as caught:
        chat.encode(example(user("a"), assistant("b")))
    assert "chat_template:" in caught.value.hint
    assert chat.encode(Example("text", text="Just words.")).num_trained
    assert chat.stop_token_ids == [tokenizer.eos_token_id]


def test_a_template_that_wants_content_in_parts_gets_it() -> None:
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}{%- for part in m.content -%}"
        "{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    encoded = ChatFormat(tokenizer).encode(example(user("Hi"), assistant("Hello.")))
    assert trained_texts(encoded) == ["Hello.<|im_end|>"]


def test_a_turn_that_the_template_changes_and_takes_no_other_words_for_is_an_error_that_names_it() -> None:
    """Where a turn is not in the rendering as it was written, it is found by other words in its place."""
    tokenizer = build_tokenizer("chatml")
    tokenizer.chat_template = (
        "{%- for m in messages -%}"
        "{%- if m.role == 'assistant' and messages[0].role == 'system' and m.content not in messages[0].content -%}"
        "{{- raise_exception('not one of the classes') -}}{%- endif -%}"
        "{{- '<|im_start|>' + m.role + '\\n' + (m.content[:1] | upper) + m.content[1:] + '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    chat = ChatFormat(tokenizer)
    with pytest.raises(DatasetError, match="does not show message 3, which is from the assistant"):
        chat.encode(example(system("yes or no"), user("2 > 1?"), assistant("yes")))
    assert trained_texts(chat.encode(example(user("2 > 1?"), assistant("yes")))) == ["Yes<|im_end|>"]


# --- tokenizers that cannot say where a token lies -------------------------------------------------------------------


class WithoutOffsets:
    """A real tokenizer whose offsets are missing, or wrong by two."""

    def __init__(self, tokenizer: Any, *, lies: bool) -> None:
        self._tokenizer, self._lies, self.is_fast = tokenizer, lies, lies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, *, return_offsets_mapping: bool = False, **more: Any) -> Any:
        if not return_offsets_mapping:
            return self._tokenizer(text, **more)
        assert self._lies, "a slow tokenizer raises NotImplementedError here"
        batch = self._tokenizer(text, return_offsets_mapping=True, **more)
        last = len(text)
        batch["offset_mapping"] = [
            (min(a + 2, last), min(b + 2, last)) if a else (a, b + 2) for a, b in batch["offset_mapping"]
        ]
        return batch


@pytest.mark.parametrize("lies", [False, True], ids=["none", "wrong"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_without_offsets_the_mask_is_the_same(template: Template, kind: str, lies: bool) -> None:
    tokenizer = tokenizer_of(template.name, kind)
    right = ChatFormat(tokenizer)
    chat = ChatFormat(WithoutOffsets(tokenizer, lies=lies))
    for messages in CONVERSATIONS.values():
        row = example(*messages)
        assert (chat.encode(row).input_ids, chat.encode(row).trained) == (
            right.encode(row).input_ids,
            right.encode(row).trained,
        )


def test_a_tokenizer_in_pure_python_is_masked_exactly() -> None:
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = TEMPLATES["no_prompt"].source
    chat = ChatFormat(tokenizer)
    for messages in CONVERSATIONS.values():
        row = example(*messages)
        encoded = chat.encode(row)
        assert trained_texts(encoded) == TEMPLATES["no_prompt"].turns(messages, {})
        chat.check_trained(encoded.input_ids, encoded.labels, row)


# --- rows without turns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama2", "llama3", "chatml", "chatml_plain"])
def test_of_prompt_and_completion_the_completion_and_the_end_are_trained(name: str, kind: str) -> None:
    tokenizer = tokenizer_of(name, kind)
    chat = ChatFormat(tokenizer)
    row = Example("prompt_completion", prompt="What is 2+2? Answer:", completion=" 4, of course")
    encoded = chat.encode(row)
    assert trained_texts(encoded) == [" 4, of course" + tokenizer.eos_token]
    assert encoded.input_ids.count(tokenizer.bos_token_id) <= 1 + (tokenizer.bos_token_id == tokenizer.eos_token_id)
    plain = tokenizer(row.prompt + row.completion)["input_ids"]
    assert encoded.input_ids == [*plain, tokenizer.eos_token_id]
    chat.check_trained(encoded.input_ids, encoded.labels, row)


def test_a_completion_that_would_melt_into_its_prompt_is_tokenized_apart() -> None:
    tokenizer = tokenizer_of("chatml", "bytelevel")
    row = Example("prompt_completion", prompt="The ans", completion="wer is 4")
    chat = ChatFormat(tokenizer)
    encoded = chat.encode(row)
    assert tokenizer.decode(encoded.input_ids) == "The answer is 4" + tokenizer.eos_token
    assert tokenizer.decode([i for i, t in zip(encoded.input_ids, encoded.trained, strict=True) if t]).startswith(
        "wer is 4"
    )
    chat.check_trained(encoded.input_ids, encoded.labels, row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama2", "chatml"])
def test_text_is_trained_whole_with_bos_as_the_tokenizer_adds_it(name: str, kind: str) -> None:
    tokenizer = tokenizer_of(name, kind)
    chat = ChatFormat(tokenizer)
    row = Example("text", text="Paris is the capital of France. 🙂")
    encoded = chat.encode(row)
    assert all(encoded.trained)
    assert encoded.input_ids == [*tokenizer(row.text)["input_ids"], tokenizer.eos_token_id]
    chat.check_trained(encoded.input_ids, encoded.labels, row)
    with pytest.raises(MaskError, match="masked"):
        chat.check_trained(encoded.input_ids, [IGNORED, IGNORED, IGNORED, *encoded.labels[3:]], row)


# --- what the model is asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prediction_is_asked_for_with_what_training_saw_before_the_turn(template: Template, kind: str) -> None:
    chat = ChatFormat(tokenizer_of(template.name, kind))
    row = example(user("Who are you?"), assistant("A careful assistant."), user("2+2?"), assistant("4"))
    text, ids, truth = chat.prompt(row)
    encoded = chat.encode(row)
    start = len(encoded.trained) - next(n for n, t in enumerate(reversed(encoded.trained)) if t)
    while start and encoded.trained[start - 1]:
        start -= 1
    assert truth == "4"
    if template.name == "deepseek_r1":  # its prompt goes on with what turns do not begin with
        assert text.endswith("<think>\n")
        assert ids[:start] == encoded.input_ids[:start]
        assert "<think>" in str(encoded.mismatch)
    else:
        assert encoded.mismatch is None
        assert ids == encoded.input_ids[:start]


def test_predictions_of_other_kinds_of_rows() -> None:
    chat = ChatFormat(tokenizer_of("llama2", "metaspace"))
    text, ids, truth = chat.prompt(Example("prompt_completion", prompt="Q: 2+2? A:", completion=" 4"))
    assert (text, truth) == ("Q: 2+2? A:", " 4")
    assert ids == chat.tokenizer("Q: 2+2? A:")["input_ids"]
    text, _, truth = chat.prompt(Example("text", text="Paris is the capital of France."))
    assert (text, truth) == ("Paris is the", "capital of France.")
    text, _, truth = ChatFormat(tokenizer_of("chatml", "bytelevel")).prompt(example(assistant("Once upon a time.")))
    assert text.endswith("<|im_start|>assistant\n")
    assert truth == "Once upon a time."


def test_chat_template_kwargs_count_in_training_and_in_predictions() -> None:
    tokenizer = tokenizer_of("qwen3", "bytelevel")
    row = example(user("2+2?"), assistant("4"))
    thinking = ChatFormat(tokenizer)
    plain = ChatFormat(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert trained_texts(thinking.encode(row)) == ["<think>\n\n</think>\n\n4<|im_end|>"]
    assert trained_texts(plain.encode(row)) == ["4<|im_end|>"]
    assert thinking.prompt(row)[0].endswith("assistant\n")
    assert plain.prompt(row)[0].endswith("</think>\n\n")


def test_generation_stops_at_the_end_of_a_turn_and_at_eos() -> None:
    llama3 = ChatFormat(tokenizer_of("llama3", "bytelevel"))
    names = [llama3.tokenizer.decode([token]) for token in llama3.stop_token_ids]
    assert names == ["<|end_of_text|>", "<|eot_id|>"]
    [(level, note)] = llama3.advice.notes()
    assert (level, "<|eot_id|>" in note) == ("info", True)
    [(level, note)] = ChatFormat(tokenizer_of("words", "bytelevel")).advice.notes()
    assert (level, "will not learn to stop" in note) == ("warning", True)
    assert not list(ChatFormat(tokenizer_of("chatml", "bytelevel")).advice.notes())


# --- the check before the first step ---------------------------------------------------------------------------------

PLANTED = [
    user("What is the capital of France, please?"),
    assistant("It is Paris, of course."),
    user("And of Germany?"),
    assistant("Berlin."),
]


def shifted(labels: list[int], ids: list[int], by: int) -> list[int]:
    """Return the same mask, `by` tokens later."""
    trained = [n for n, label in enumerate(labels) if label != IGNORED]
    moved = {n + by for n in trained if 0 <= n + by < len(ids)}
    return [ids[n] if n in moved else IGNORED for n in range(len(ids))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("by", [-9, -5, -3, -2, -1, 1, 2, 3, 5, 9])
def test_a_mask_that_is_shifted_is_caught(template: Template, kind: str, by: int) -> None:
    chat = ChatFormat(tokenizer_of(template.name, kind))
    for messages in (PLANTED, PLANTED[:2], [system("Answer in a word."), user("2+2?"), assistant("4")]):
        row = example(*messages)
        encoded = chat.encode(row)
        labels = shifted(encoded.labels, encoded.input_ids, by)
        said = [chat.tokenizer.decode([i for i in each if i != IGNORED]).strip() for each in (labels, encoded.labels)]
        if said[0] == said[1]:  # only a lone `▁` of SentencePiece's was lost, no visible text
            continue
        with refused(MaskError, "⟦"):
            chat.check_trained(encoded.input_ids, labels, row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_wrong_masks_are_caught_with_decoded_evidence(template: Template, kind: str) -> None:
    chat = ChatFormat(tokenizer_of(template.name, kind))
    row = example(*PLANTED)
    encoded = chat.encode(row)
    ids, labels = encoded.input_ids, encoded.labels
    trained = [n for n, label in enumerate(labels) if label != IGNORED]

    def said(wrong: list[int], *, is_truncated: bool = False) -> str:
        with pytest.raises(MaskError) as caught:
            chat.check_trained(ids, wrong, row, is_truncated=is_truncated)
        assert "chat_template:" in caught.value.hint
        assert "trained between ⟦⟧: " in caught.value.evidence
        assert "⟦" not in caught.value.message
        return caught.value.message

    assert "nothing" in said([IGNORED] * len(ids))
    said(list(ids))  # the prompt, too
    said([IGNORED] * (trained[0] + 3) + labels[trained[0] + 3 :])  # the front of an answer cut off
    said([IGNORED] * (trained[0] + 3) + labels[trained[0] + 3 :], is_truncated=True)
    said([*labels[1:], IGNORED])  # labels shifted as the loss does it by itself
    said([IGNORED, *labels[:-1]])
    said([*labels[: trained[-1]], *[IGNORED] * (len(ids) - trained[-1])])  # the end token left out
    said(labels[: len(labels) // 2] + [IGNORED] * (len(labels) - len(labels) // 2))  # the second answer left out
    only_prompt = [token if label == IGNORED else IGNORED for token, label in zip(ids, labels, strict=True)]
    said(only_prompt)
    # The length of a prompt that was tokenized by itself, without what comes before it: the rest is trained on.
    alone = len(chat.tokenizer("And of Germany?", add_special_tokens=False)["input_ids"])
    said([IGNORED] * alone + ids[alone:])


def test_placeholders_and_padding_must_not_be_trained() -> None:
    tokenizer = build_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    chat = ChatFormat(tokenizer)
    row = example(user("What is this?"), assistant("A cat."))
    encoded = chat.encode(row)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    where = encoded.trained.index(True)
    ids = [*encoded.input_ids[:where], *[image] * 3, *encoded.input_ids[where:]]
    labels = [*encoded.labels[:where], *[image] * 3, *encoded.labels[where:]]
    with refused(MaskError, "image_pad"):
        chat.check_trained(ids, labels, row, placeholder_ids=[image])
    pad = tokenizer.pad_token_id
    chat.check_trained([*encoded.input_ids, pad, pad], [*encoded.labels, IGNORED, IGNORED], row)
    with pytest.raises(MaskError):
        chat.check_trained([*encoded.input_ids, pad, pad], [*encoded.labels, pad, pad], row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_row_that_is_cut_off_may_end_early_but_not_start_late(template: Template, kind: str) -> None:
    chat = ChatFormat(tokenizer_of(template.name, kind))
    row = example(*PLANTED)
    whole = chat.encode(row)
    first = whole.trained.index(True)
    for length in range(first + 1, len(whole.input_ids)):
        cut = whole.truncate(length)
        assert "".join(segment["text"] for segment in cut.segments()) in "".join(s["text"] for s in whole.segments())
        chat.check_trained(cut.input_ids, cut.labels, row, is_truncated=True)
    cut = whole.truncate(first + 6)
    with pytest.raises(MaskError):
        chat.check_trained(cut.input_ids, [IGNORED] * (first + 2) + cut.labels[first + 2 :], row, is_truncated=True)


def test_the_share_of_what_is_trained() -> None:
    assert trained_share([[IGNORED, 1, 2, IGNORED], [IGNORED, IGNORED, IGNORED, 3]]) == 3 / 8
    assert trained_share([]) == 0


def test_a_cut_may_go_through_a_character_of_several_tokens() -> None:
    chat = ChatFormat(tokenizer_of("chatml", "bytelevel"))
    for row in (
        example(user("And?"), assistant("Wie heißt 🙂?")),
        Example("prompt_completion", prompt="a ", completion="🙂 ß"),
    ):
        encoded = chat.encode(row)
        for length in range(encoded.trained.index(True) + 1, len(encoded.input_ids)):
            short = encoded.truncate(length)
            chat.check_trained(short.input_ids, short.labels, row, is_truncated=True)


# --- the tokenizer's backend -----------------------------------------------------------------------------------------

SENTENCES = [f"What is {n}? It is said to be {n * n}, at least." for n in range(20)]


def masked(tokens: Tokens, text: str) -> tuple[list[int], list[bool]]:
    found = tokens.mask(text, [(len(text) - 10, len(text))])
    assert found is not None
    return found[:2]


def test_the_backend_makes_the_tokens_and_masks_of_its_tokenizer() -> None:
    tokenizer = build_tokenizer("chatml")
    tokens = Tokens(tokenizer)
    for text in SENTENCES:
        assert masked(tokens, text) == masked(Tokens(tokenizer), text)  # a new one asks the tokenizer


def test_truncation_and_padding_of_an_earlier_call_do_not_apply() -> None:
    tokenizer = build_tokenizer("chatml")
    tokens = Tokens(tokenizer)
    whole = [masked(tokens, text) for text in SENTENCES]
    tokenizer(SENTENCES[0], truncation=True, max_length=2, padding="max_length")
    assert [masked(tokens, text) for text in SENTENCES] == whole


def test_a_tokenizer_with_code_of_its_own_is_asked_itself() -> None:
    class Lower(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text.lower() if isinstance(text, str) else text, *args, **kwargs)

    plain = build_tokenizer("chatml")
    tokens = Tokens(Lower(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token))
    for text in SENTENCES:
        assert masked(tokens, text)[0] == plain(text.lower(), add_special_tokens=False)["input_ids"]
