"""Rendering of conversations by a chat template, and the choice of the template for a row.

rows                     the job's template, or the one named for training
a row with arguments     the same, with the row's own chat_template_kwargs
prompts                  the base model's template, unless it refuses the row
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import Any

from honed.inputs.row import Example
from honed.spec.media import Kind
from honed.system.error import DatasetError, said
from honed.text import asking
from honed.text.asking import Mismatch
from honed.text.omission import Finder, Omission
from honed.text.span import Span
from honed.text.template import (
    TEMPLATE_ERRORS,
    CallForm,
    Conversation,
    Probe,
    as_parts,
    learn,
    learn_calls,
    learn_placeholders,
)
from honed.text.tokens import Tokens

#: Different chat_template_kwargs of rows for which a Renderer is cached.
MAX_VARIANTS = 32


class Renderer:
    """One chat template with its arguments, and what was learned of it."""

    def __init__(self, tokens: Tokens, template: Any, kwargs: Mapping[str, Any], date: datetime | None) -> None:
        """Set up the rendering. Templates that ask for today's date get `date`; None leaves that to the clock."""
        self.tokens, self.tokenizer = tokens, tokens.tokenizer
        self.template = template
        self._kwargs = dict(kwargs)
        self._date = date
        self._cached_probe: Probe | None = None
        self._finder = Finder(self.try_render)
        self._call_form = CallForm()
        self._takes_parts = False  # True if the template wants content as a list of parts, as those for images do

    def variant(self, *, kwargs: Mapping[str, Any] | None = None, template: str | None = None) -> Renderer:
        """Return a renderer with more arguments for the template, or with another template."""
        return Renderer(copy(self.tokens), template or self.template, {**self._kwargs, **(kwargs or {})}, self._date)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the template's text, with the last turn's end if it lacks that. Raises one of `TEMPLATE_ERRORS`."""
        text = self._render(messages, tools, self._call_form, prompt=prompt)
        probe, ends_in_answer = self._cached_probe, bool(messages) and messages[-1]["role"] == "assistant"
        return probe.close(text, messages[-1]) if probe is not None and ends_in_answer and not prompt else text

    def try_render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        """Return the template's text; None where it refuses."""
        try:
            self.require_template()  # this also learns the form of messages that the template takes
            return self.render(messages, tools)
        except (DatasetError, *TEMPLATE_ERRORS):
            return None

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, call_form: CallForm, *, prompt: bool = False
    ) -> str:
        """Return the template's text as it is, even if the end of the last turn is missing."""
        given = [call_form.of(message) for message in messages]
        given = [as_parts(message) for message in given] if self._takes_parts else given
        more = dict(self._kwargs)
        if self._date is not None and "strftime_now" in str(self.template):
            # A template's variable overrides the global that transformers sets, whichever backend is imported.
            more = {"strftime_now": self._date.strftime, **more}
        if self.template != self.tokenizer.chat_template:
            more["chat_template"] = self.template
        rendered: str = self.tokenizer.apply_chat_template(
            given, tools=tools, tokenize=False, add_generation_prompt=prompt, **more
        )
        return rendered

    # --- what the template shows -------------------------------------------------------------------------------------

    def omitted(self, example: Example, text: str) -> list[Omission]:
        """Return the parts of the row that its rendering leaves out."""
        return self._finder.find(example.messages, example.tools, text)

    def is_silenced(self, example: Example, i: int, omitted: Sequence[Omission]) -> bool:
        """Return True if the template leaves out all that message i says."""
        return self._finder.is_silenced(example.messages, example.tools, i, omitted)

    def left_out(self, example: Example, i: int) -> set[str]:
        """Return the kinds of message i's texts that the template leaves out, wholly or in part."""
        text = self.try_render(example.messages, example.tools)
        return set() if text is None else {item.kind for item in self.omitted(example, text) if item.message == i}

    def shows(self, kind: str, example: Example) -> bool:
        """Return True if the template renders the row and leaves out nothing of that kind."""
        text = self.try_render(example.messages, example.tools)
        omissions = Finder(self.try_render).find(example.messages, example.tools, text or "")
        return text is not None and all(item.kind != kind for item in omissions)

    # --- what is learned of the template -----------------------------------------------------------------------------

    def require_template(self) -> None:
        """Raise DatasetError if conversations cannot be rendered at all, whatever the row."""
        self.probe  # noqa: B018

    @property
    def probe(self) -> Probe:
        if self._cached_probe is None:
            if not self.template:
                raise DatasetError(
                    "the rows are conversations, but the model's tokenizer has no chat template",
                    hint="set one with `chat_template:` (a file), or use prompt/completion or text rows",
                )
            try:
                self._cached_probe = self._learn()
            except TEMPLATE_ERRORS as error:
                raise DatasetError(
                    f"the chat template cannot render a question and its answer: {said(error)}",
                    hint="use another one with `chat_template:`",
                ) from error
        return self._cached_probe

    @cached_property
    def placeholders(self) -> dict[Kind, str]:
        """Texts that the template writes in place of an image, a video or a sound, for the kinds that it supports."""
        self.require_template()
        return learn_placeholders(self)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens at which generation stops: eos, and every end of a turn that is one token.

        An end after which an answer that begins with reasoning continues is not among them.
        """
        ids = [] if self.tokens.eos_id is None else [self.tokens.eos_id]
        if self.template:
            ends = [self.tokens.ids(end) for end in self.probe.ends if end not in self.probe.inner]
            ids += [end[0] for end in ends if len(end) == 1]
        return ids

    def _learn(self) -> Probe:
        try:
            return self._learn_form()
        except TEMPLATE_ERRORS as error:
            self._takes_parts = True
            try:
                return self._learn_form()
            except TEMPLATE_ERRORS:
                self._takes_parts = False
                raise error from None

    def _learn_form(self) -> Probe:
        self._call_form = learn_calls(lambda messages, form: self._render(messages, None, form))
        return learn(self)


class Renderers:
    """The renderers of a job: its own, one per set of a row's arguments, and those of prompts."""

    def __init__(self, own: Renderer, asking: Renderers | None = None) -> None:
        self.own = own
        self.asking = asking  #: asks the model, where only rows use another template
        self._variants: dict[str, Renderer] = {}  # by the arguments of a row

    def training(self, template: str) -> Renderers:
        """Return renderers that use another template for rows only: the model's prompts stay as before."""
        return Renderers(self.own.variant(template=template), self)

    def with_argument(self, name: str, value: bool) -> Renderers:
        """Return renderers with one more of the job's chat_template_kwargs."""
        return Renderers(self.own.variant(kwargs={name: value}), self.asking and self.asking.with_argument(name, value))

    def of(self, example: Example) -> Renderer:
        """Return the renderer with the row's own arguments for the template."""
        if not example.chat_template_kwargs:
            return self.own
        key = json.dumps(example.chat_template_kwargs, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = self.own.variant(kwargs=example.chat_template_kwargs)
        return self._variants[key]

    def asker(self, example: Example) -> Renderer:
        """Return the renderer for prompts: with the base's own template, unless that refuses the row."""
        if self.asking is not None:
            asker = self.asking.of(example)
            if asker.try_render(example.messages, example.tools) is not None:
                return asker
        return self.of(example)

    def stop_token_ids(self, renderer: Renderer | None = None) -> list[int]:
        """Return the tokens at which generation stops, after rows of that renderer and after prompts."""
        ids = (renderer or self.own).stop_token_ids
        return list(dict.fromkeys([*ids, *(self.asking.stop_token_ids() if self.asking is not None else [])]))

    def mismatch(self, conversation: Conversation, spans: Sequence[Span], example: Example) -> Mismatch | None:
        """Return how the prompt of the row's last turn differs from the text that precedes the turn in training."""
        last, (start, _), asker = max(conversation.trained_indices), spans[-1], self.asker(example)
        if not last:
            return None
        if asker.template == conversation.template and conversation.is_begun(last):  # the prompt begins the whole row
            return None
        try:
            asked = asker.render(example.messages[:last], example.tools, prompt=True)
        except TEMPLATE_ERRORS:
            return None  # reported when a prediction renders the prompt
        asked += asker.probe.header if asker.probe.ignores_prompt else ""
        if asker.template == conversation.template:
            return asking.compare(asked, conversation.text, start)
        return asking.compare_tails(asked, conversation.text, start, asking.said_before(example.messages, last))
