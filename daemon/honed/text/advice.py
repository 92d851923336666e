"""Advice to the owners of rows: what a template does to them, and the settings that change it.

Settings of the job are tried on the row: what is advised has been seen to help.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from honed.inputs.row import Example
from honed.spec import variant as variants
from honed.system import quote
from honed.system.error import DatasetError
from honed.text import asking
from honed.text.asking import Mismatches
from honed.text.omission import REASONING_KEYS, WORDS, Kind, Omission, Tally
from honed.text.renderer import Renderers
from honed.text.template import Conversation
from honed.text.tokens import Tokens

#: Names in a template that are tried as arguments.
MAX_SWITCHES = 12
#: Advice where there is nothing more specific.
_ADVICE: dict[Kind, str] = {
    "reasoning": "use a template that shows it (`chat_template:`), or remove it from the rows",
    "answer": "some templates show either a turn's text or its calls: put each in its own turn",
    "tool_calls": "use a template that supports calls (`chat_template:`)",
    "tools": "use a template that supports tools (`chat_template:`), or remove the column",
    "system": "move that text to the beginning of the user's, or use another template (`chat_template:`)",
    "user": "`honectl preview` shows the rendered rows",
    "tool": "use a template that supports tool answers (`chat_template:`)",
    "name": "write the name in the content",
}


@dataclass(frozen=True)
class Advice:
    """Advice on rows under the templates of one job."""

    renderers: Renderers

    def notes(
        self, examples: Iterable[Example] = (), end_ids: Sequence[int] | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield notable facts about the template, or about its effect on these rows, each after its level.

        The level is warning, hint for what `check` alone warns of, or info where nothing is wrong. `end_ids` are the
        tokens at which the base model's answers end, where they are known.
        """
        renderer = self.renderers.own
        probe, eos = renderer.probe, renderer.tokenizer.eos_token
        if not probe.ends:
            yield (
                "warning",
                "the chat template does not end a turn with a token: the model will not learn to stop; use a "
                "template that does with `chat_template:`",
            )
        if probe.is_open_inside and (num_rows := sum(map(_trains_inside, examples))):
            yield (
                "warning",
                f"the chat template ends only a row's last turn with {_quoted(probe.ends[0])}, but earlier turns "
                f"with no token: in {num_rows} rows such turns do not teach the model to stop; use another template "
                "with `chat_template:`, or make each turn the last of a row",
            )
        if probe.between_calls and (num_rows := sum(map(_calls_together, examples))):
            yield (
                "warning",
                f"the chat template ends a turn with one call with {_quoted(probe.between_calls[0])}, but also puts "
                f"it between two calls of a turn, which {num_rows} rows have: answers will stop after the first; use "
                "another template with `chat_template:`",
            )
        if probe.unwritten:
            ends = " or ".join(map(_quoted, dict.fromkeys(filter(None, [probe.unwritten, probe.unwritten_call]))))
            yield (
                "info",
                "the chat template ends a turn only with the header of the next, and the last one with nothing: "
                f"honed adds {ends} there and trains it, so that the model learns to stop",
            )
        elif probe.ends and not probe.ends[0].endswith(eos or probe.ends[0]):
            yield _other_end(renderer.tokens, probe.ends[0], end_ids)

    def on_row(self, example: Example, omitted: Sequence[Omission]) -> str:
        """Return advice for a row of which the template leaves out some; settings are tried where possible."""
        advice: list[str] = []
        for kind in dict.fromkeys(item.kind for item in omitted):
            tried = {"reasoning": self._tried_reasoning, "system": self._tried_system}.get(kind)
            advice.append((tried(example) if tried else "") or f"{WORDS[kind]}: {_ADVICE[kind]}")
        return "; ".join(advice)

    def on_omissions(self, lost: Tally) -> str:
        """Return advice on all that rows lose."""
        return "; ".join(self.on_row(*lost.rows[kind]) for kind, _ in lost.kinds.most_common())

    def on_asking(self, mismatches: Mismatches) -> str:
        """Return advice on prompts that differ from training; settings are tried where possible."""
        if (example := mismatches.example) is None:
            return ""
        template = self.renderers.own.template
        for name in _switches(str(template)):
            for value in (True, False):
                if _asks_well(self.renderers.with_argument(name, value), example):
                    return (
                        f"set `chat_template_kwargs: {{{name}: {str(value).lower()}}}` to make prompts match the "
                        "training rows"
                    )
        path = variants.find(template)
        if (
            path
            and self.renderers.asking is None
            and _asks_well(self.renderers.training(path.read_text(encoding="utf-8")), example)
        ):
            return "set `training_chat_template: trl` to make the training rows match the prompts"
        return asking.ADVICE

    def _tried_reasoning(self, example: Example) -> str:
        """Return a change that makes the template, or its training variant, show the row's reasoning; else ""."""
        renderer, template = self.renderers.of(example), str(self.renderers.own.template)
        for name in _switches(template):
            for value in (True, False):
                if renderer.variant(kwargs={name: value}).shows("reasoning", example):
                    return f"set `chat_template_kwargs: {{{name}: {str(value).lower()}}}` to show the reasoning"
        for key, other, messages in _under_another_key(example.messages):
            if renderer.shows("reasoning", replace(example, messages=messages)):
                return f"the template reads reasoning from `{other}`: rename the messages' key `{key}`"
        path = variants.find(template)
        if path and renderer.variant(template=path.read_text(encoding="utf-8")).shows("reasoning", example):
            return (
                "set `training_chat_template: trl` to use TRL's training variant of the template, which shows the "
                "reasoning"
            )
        return ""

    def _tried_system(self, example: Example) -> str:
        if self.renderers.of(example).shows("system", replace(example, messages=_by_the_system(example.messages))):
            return "the template does not support the role developer: use the role `system` for those messages"
        return ""


def _other_end(tokens: Tokens, end: str, end_ids: Sequence[int] | None) -> tuple[str, str]:
    """Return a note on turns that end with another token than the tokenizer's eos."""
    says = f"turns end in {_quoted(end)}, but the tokenizer's eos token is {_quoted(tokens.tokenizer.eos_token)}"
    ids = tokens.ids(end)
    if len(ids) > 1 and getattr(tokens.tokenizer, "counts", True):
        return "warning", (
            f"turns end in {_quoted(end)}, which is not one token: neither predictions nor programs that read the "
            "output stop there; use another template with `chat_template:`"
        )
    if end_ids is None or set(ids) <= set(end_ids):
        return "info", f"{says}: both stop generation"
    return "hint", (
        f"{says}: predictions and the output's generation_config.json stop at both; for programs that read only the "
        f"tokenizer, set `training.eos_token: {_quoted(end)}`"
    )


def _asks_well(renderers: Renderers, example: Example) -> bool:
    """Return True if the row's prompt is as trained, and its last turn loses no reasoning."""
    try:
        renderer = renderers.of(example)
        conversation = Conversation(renderer, example)
        mismatch = renderers.mismatch(conversation, conversation.spans(), example)
    except DatasetError:
        return False
    lost = renderer.omitted(example, conversation.text)
    last = max(conversation.trained_indices)
    return mismatch is None and all((item.kind, item.message) != ("reasoning", last) for item in lost)


def _under_another_key(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield the messages with their reasoning moved to each other key that templates read: from, to, messages."""
    present = [key for key in REASONING_KEYS if any(message.get(key) for message in messages)]
    for key in present:
        for other in REASONING_KEYS:
            if other not in present:
                yield key, other, [{other if k == key else k: v for k, v in m.items()} for m in messages]


def _by_the_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the role developer replaced by system, which most templates know."""
    return [{**message, "role": "system"} if message["role"] == "developer" else dict(message) for message in messages]


def _switches(template: str) -> list[str]:
    """Return the names in a template that may be arguments about reasoning, the likeliest first."""
    named = re.findall(r"(?<![.'\"\w])[a-z_]*(?:think|reason)[a-z_]*(?![\w'\"(])", template)
    kept = [name for name in named if name not in REASONING_KEYS or name == "thinking"]  # as in DeepSeek-V3.1
    return [name for name, _ in Counter(kept).most_common(MAX_SWITCHES)]


def _trains_inside(example: Example) -> bool:
    return any(i + 1 < len(example.messages) for i in example.trained_turns)


def _calls_together(example: Example) -> bool:
    return any(len(example.messages[i].get("tool_calls") or []) > 1 for i in example.trained_turns)


def _quoted(text: str | None) -> str:
    return quote.mark(repr(text))
