"""honed's masks beside those of the training templates that come with TRL, turn by turn, as a table.

    python -m zoo.masks --write docs/masks.md      (from tests/)

TRL marks generated text with `{% generation %}` in copies of the models' own templates. honed uses the models' own
templates and finds the turns. Each cell compares the two for one template and one kind of conversation.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from honed.inputs.row import Example, fields
from honed.system.error import DatasetError
from honed.text.chat import ChatFormat
from honed.text.template import TEMPLATE_ERRORS, CallForm, Conversation, as_parts
from zoo.tokenizer import build_marked_tokenizer

#: The meaning of a letter in a cell.
REASONS: Mapping[str, str] = {
    "=": "the same text is trained",
    "b": "TRL trains the white space after what ends a turn, too: generation has stopped by then",
    "h": "TRL trains a part of the generation prompt, too, such as `<|start|>assistant` or `<think>`: it is given, and "
    "never generated",
    "p": "TRL trains what follows the end of the last turn, too: the eos after `<|end|>`, where generation has stopped",
    "c": "honed trains what the template writes after a call, too: `<|tool_response>`, at which generation stops",
    "t": "TRL's copy shows reasoning, or empty tags of it, where the model's own template leaves it out; the rest is "
    "the same",
    "–": "the template refuses such a conversation, and so does TRL's copy",
    "x": "the model's own template does not show what a turn says: honed leaves such rows out and counts them, TRL "
    "trains the end alone",
}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _told(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _called(*cities: str) -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "id": f"call0000{n}",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}"}}'},
        }
        for n, city in enumerate(cities, start=1)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _answered(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": text}


_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}

#: Rows as OpenAI has them.
CONVERSATIONS: Mapping[str, list[dict[str, Any]]] = {
    "one turn": [_user("The capital of France?"), _told("Paris.")],
    "many turns": [
        _user("Hi"),
        _told("Hello!"),
        _user("And of France?"),
        _told("Paris."),
        _user("Sure?"),
        _told("Yes."),
    ],
    "the user last": [_user("Hi"), _told("Hello!"), _user("Thanks")],
    "a call": [_user("Weather?"), _called("Paris"), _answered(1, "sunny"), _told("It is sunny.")],
    "a call last": [_user("Weather?"), _called("Paris")],
    "two calls": [
        _user("Weather?"),
        _called("Paris", "Rome"),
        _answered(1, "sunny"),
        _answered(2, "wet"),
        _told("Sunny, wet."),
    ],
    "reasoning": [_user("2+2?"), _told("It is 4.", reasoning_content="two and two")],
    "reasoning, many turns": [
        _user("2+2?"),
        _told("<think>\ntwo and two\n</think>\n\nIt is 4."),
        _user("3+3?"),
        _told("<think>\nthree and three\n</think>\n\nIt is 6."),
    ],
}


@dataclass(frozen=True)
class Compared:
    """The comparison for one template and one kind of conversation."""

    letters: str  #: keys of REASONS; "?" for unexplained differences
    ours: tuple[str, ...]  #: the trained texts, turn by turn
    theirs: tuple[str, ...]


def templates() -> list[str]:
    """Return the templates that have a marked copy, by name."""
    return sorted(path.stem.removesuffix("_training") for path in _directory().glob("*_training.jinja"))


def _directory() -> Path:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "chat_templates"


def source(name: str) -> str:
    return (_directory() / f"{name}.jinja").read_text(encoding="utf-8")


def chat_of(name: str) -> ChatFormat:
    return ChatFormat(build_marked_tokenizer(source(name)))


def example_of(kind: str) -> Example:
    messages = CONVERSATIONS[kind]
    has_tools = any(message.get("tool_calls") for message in messages)
    row = {"messages": messages} | ({"tools": [_TOOL]} if has_tools else {})
    return Example(**fields(row, "messages", None, has_chat_template=True, directories=None))


def compare(name: str, chat: ChatFormat, kind: str) -> Compared:
    example = example_of(kind)
    theirs = _marked(source(f"{name}_training"), chat, kind)
    try:
        conversation = Conversation(chat.renderer, example)
        encoded = chat.encode(example)
    except DatasetError:
        return Compared("–" if theirs is None else "x" if _is_poor(theirs, example) else "?", (), theirs or ())
    chat.check_trained(encoded.input_ids, encoded.labels, example)
    ours = tuple(conversation.text[a:b] for a, b in conversation.spans())
    if theirs is None:
        return Compared("?", ours, ())
    letters = {
        letter
        for n, i in enumerate(conversation.trained_indices)
        for letter in _explained(ours[n], theirs[n] if n < len(theirs) else "", conversation.asked(i), chat)
    }
    letters |= {"?"} if len(theirs) != len(ours) else set()
    return Compared("".join(letter for letter in [*REASONS, "?"] if letter in (letters or {"="})), ours, theirs)


def _marked(template: str, chat: ChatFormat, kind: str) -> tuple[str, ...] | None:
    """Return the turns marked by TRL's copy, for the first form of the row shown completely, else the first
    accepted."""
    example, tokenizer = example_of(kind), chat.tokenizer
    named = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    forms: list[list[Any]] = [
        example.messages,
        [as_parts(message) for message in example.messages],
        [CallForm(has_json=True, empty=None).of(message) for message in example.messages],
    ]
    found: list[tuple[str, ...]] = []
    for messages in forms:
        try:
            [text], [spans] = render_jinja_template(
                [messages], tools=example.tools, chat_template=template, return_assistant_tokens_mask=True, **named
            )
        except TEMPLATE_ERRORS:
            continue
        if all(str(m["content"] or "") in text for m in CONVERSATIONS[kind] if "<think>" not in str(m["content"])):
            found.append(tuple(text[a:b] for a, b in _joined(spans)))
    return next((turns for turns in found if not _is_poor(turns, example)), next(iter(found), None))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent blocks, and omit empty ones."""
    joined: list[tuple[int, int]] = []
    for a, b in spans:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return joined


def _is_poor(theirs: Sequence[str], example: Example) -> bool:
    """Tell whether a tool call lies outside the marked turns."""
    return any(
        not any(call["function"]["name"] in text for text in theirs)
        for message in example.messages
        for call in message.get("tool_calls") or []
    )


def _explained(ours: str, theirs: str, asked: str, chat: ChatFormat) -> Iterator[str]:
    """Yield the reasons why two trained texts of one turn differ; nothing where they are equal."""
    eos = chat.tokenizer.eos_token
    if theirs.startswith(ours) and theirs[len(ours) :].strip() == eos:
        yield "p"
        theirs = ours
    if theirs != theirs.rstrip() and ours == ours.rstrip():
        yield "b"
        theirs = theirs.rstrip()
    if (
        ours != theirs
        and (lead := _lead(theirs, asked, chat.renderer.probe.prompt_extra))
        and not ours.startswith(lead)
    ):
        yield "h"
        theirs = theirs[len(lead) :]
    if ours != theirs and ours.startswith(theirs) and re.fullmatch(r"<\|[a-z_]+>", ours[len(theirs) :]):
        yield "c"
        theirs = ours
    if ours != theirs and _without_reasoning(ours) == _without_reasoning(theirs):
        yield "t"
        theirs = ours
    if ours != theirs:
        yield "?"


def _lead(theirs: str, asked: str, extra: str) -> str:
    """Return the part of the generation prompt that a marked text begins with."""
    prompts = (asked, asked.removesuffix(extra))
    return next((theirs[:n] for n in range(len(theirs), 0, -1) if any(p.endswith(theirs[:n]) for p in prompts)), "")


def _without_reasoning(text: str) -> str:
    return re.sub(r"(<think>)?[^<]*</think>", "", text).strip()


def page() -> str:
    """Return docs/masks.md."""
    kinds = list(CONVERSATIONS)
    same: dict[tuple[str, ...], list[str]] = {}
    for name in templates():
        chat = chat_of(name)
        same.setdefault(tuple(compare(name, chat, kind).letters for kind in kinds), []).append(name)
    rows = [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in same.items()]
    used = {letter for row in rows for letter in row.partition("|")[2].partition("|")[2]}
    return "\n".join(
        [
            _INTRODUCTION,
            f"| Template | {' | '.join(kinds)} |",
            "|---|" + "---|" * len(kinds),
            *rows,
            "",
            *(f"- `{letter}`: {reason}." for letter, reason in REASONS.items() if letter in used),
            "",
        ]
    )


_INTRODUCTION = """\
# Masks beside TRL's training templates

<!-- Made by `python -m zoo.masks --write docs/masks.md`, in tests/; a test holds it against the code. -->

TRL ships copies of many models' chat templates in which what the assistant says is marked (`{% generation %}`). honed
trains through the model's own template and finds the turns in its rendering. This table compares the text that is
trained, turn by turn. Rows are OpenAI's: calls have their arguments as a string, and no content. A cell with several
letters has turns that differ in several ways.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, required=True)
    parser.parse_args().write.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
