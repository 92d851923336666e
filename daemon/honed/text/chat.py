"""Conversion of a row to token ids, with a mask over the tokens that the model is trained on.

Trained are the assistant's turns as the chat template renders them, each with its end token. Templates do not report
where a turn lies, so it is found by rendering:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nHello<|im_end|>\\n
    asked    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n                 up to the turn, with the prompt
    turn                                                             [..........................................]

Where the shorter renderings are prefixes of the whole one, they give the turn. Where they are not (a template that
omits earlier reasoning, or treats the last turn specially), each message is found in the whole conversation by
rendering it again with only that message replaced by a mark. A turn that cannot be found is an error of that row, never
a guess.

The tokenizer is an argument; neither torch nor transformers is imported here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Any

from honed.inputs.media import Media
from honed.inputs.row import Example, words
from honed.spec import variant as variants
from honed.spec.media import Kind
from honed.system import quote
from honed.system.error import DatasetError, said
from honed.text import asking
from honed.text.asking import Mismatch, Mismatches
from honed.text.expansion import Expanded, Place, carry, find_places
from honed.text.maskcheck import IGNORED, Check
from honed.text.omission import (
    SILENCED_HINT,
    Finder,
    Omission,
    SilencedError,
    Tally,
    advice,
    by_the_system,
    said_in_tags,
    switches,
    under_another_key,
)
from honed.text.span import Span, common, range_by_offset, runs_of, squeeze, token_ends
from honed.text.template import (
    TEMPLATE_ERRORS,
    CallForm,
    Conversation,
    Probe,
    added_tokens,
    as_parts,
    learn,
    learn_calls,
    learn_placeholders,
    where,
)

if TYPE_CHECKING:
    from honed.spec.spec import JobSpec

__all__ = ["IGNORED", "ChatFormat", "Encoded", "MediaCutError", "Rendered", "trained_share"]

_A_KIND: dict[Kind, str] = {"image": "an image", "video": "a video", "audio": "sound"}
_PROCESSOR_HINT = (
    "`honectl preview` shows the row; the base model's processor may be of another kind than its tokenizer"
)

#: Different chat_template_kwargs of rows for which a ChatFormat is cached.
MAX_VARIANTS = 32
#: Rows whose boundaries are computed both ways, from offsets and from token prefixes, before offsets are trusted.
_NUM_OFFSET_TRIALS = 8


@dataclass(frozen=True)
class Encoded:
    """One row as token ids, with the mask of trained tokens."""

    input_ids: list[int]
    trained: list[bool]  #: as long as input_ids
    turns: tuple[str, ...]  #: the trained texts as rendered, in order
    _pieces: Callable[[int, int], str] = field(repr=False, compare=False)  #: the text of tokens [a, b)
    rendered: str = ""  #: of a row with media: its text before the processor expands it
    media_end: int = 0  #: images, videos and sounds lie in the tokens before this one
    _shown: tuple[tuple[str, str], ...] = field(
        default=(), repr=False, compare=False
    )  #: for each image, video or sound: its text, and the label that people see
    omitted: tuple[Omission, ...] = field(default=(), compare=False)  #: parts of the row that the template leaves out
    mismatch: Mismatch | None = field(default=None, compare=False)  #: of its last turn's prompt with training

    @property
    def labels(self) -> list[int]:
        return [
            token if is_trained else IGNORED for token, is_trained in zip(self.input_ids, self.trained, strict=True)
        ]

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    def segments(self) -> list[dict[str, Any]]:
        """Return the row's text in pieces, trained and not, with an image's tokens as `[image 12×9 tokens]`."""
        found, shown = [], list(self._shown)
        for a, b, is_trained in runs_of(self.trained):
            text, at = self._pieces(a, b), 0
            while shown and (start := text.find(shown[0][0], at)) >= 0:
                written, seen = shown.pop(0)
                text, at = text[:start] + seen + text[start + len(written) :], start + len(seen)
            found.append({"text": text, "trained": is_trained})
        return found

    def truncate(self, max_length: int | None) -> Encoded:
        """Cut the row to its first `max_length` tokens, as trainers do. Raises MediaCutError if that cuts media."""
        if max_length is None or len(self.input_ids) <= max_length:
            return self
        if max_length < self.media_end:
            raise MediaCutError(
                f"its images, videos and sounds reach to token {self.media_end}, and it is cut after {max_length}",
                hint="a longer training.max_length, or fewer pixels and frames (`media:`)",
            )
        return replace(self, input_ids=self.input_ids[:max_length], trained=self.trained[:max_length])


class MediaCutError(DatasetError):
    """A row that truncation would cut inside an image, a video or a sound."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as its template renders it."""

    text: str
    spans: tuple[Span, ...]  #: the trained parts
    places: tuple[Place, ...]  #: the places of its media
    omitted: tuple[Omission, ...] = ()  #: parts of the row that the template leaves out
    mismatch: Mismatch | None = None  #: of its last turn's prompt with training


#: A processor's side of a row: expands a rendered text and its media, in order of occurrence.
Expand = Callable[[str, Sequence[Media]], Expanded]


class ChatFormat:
    """Conversion of rows with one tokenizer and its chat template, and a processor where rows have media."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        date: datetime | None = None,
        expand: Expand | None = None,
    ) -> None:
        """Set up the conversion. Templates that ask for today's date get `date`; None leaves that to the clock."""
        self.tokenizer = tokenizer
        self.template = getattr(tokenizer, "chat_template", None)
        self.expand = expand
        self._kwargs = dict(chat_template_kwargs or {})
        self._date = date
        self._cached_probe: Probe | None = None
        self._finder: Finder | None = None
        self._variants: dict[str, ChatFormat] = {}  # by the arguments of a row
        self._base: ChatFormat | None = None  # asks the model, where only rows use another template
        self._call_form = CallForm()
        self._takes_parts = False  # True if the template wants content as a list of parts, as those for images do
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._num_trials = 0
        self._bos_ids = self._leading_ids()
        self._eos_id: int | None = tokenizer.eos_token_id

    @classmethod
    def of(cls, job_spec: JobSpec, tokenizer: Any, *, date: datetime | None = None) -> ChatFormat:
        """Create the ChatFormat of a job. Raises SpecError if the job's template for rows does not exist."""
        chat = cls(tokenizer, chat_template_kwargs=job_spec.chat_template_kwargs, date=date)
        rows_template = variants.read(job_spec.training_chat_template, chat.template)
        return chat if rows_template is None else chat.training(rows_template)

    # --- rows ------------------------------------------------------------------------------------------------------

    def encode(self, example: Example) -> Encoded:
        """Encode the whole row, untruncated. Raises DatasetError for a row that the template refuses or hides."""
        match example.kind:
            case "messages" if example.media:
                rendered = self.rendered(example)
                return self.finish(example, rendered, self._expanded(rendered.text, example.media))
            case "messages":
                return self._encode_messages(example)
            case "prompt_completion":
                return self._encode_plain(example.prompt + example.completion, example, len(example.prompt))
            case "text":
                return self._encode_plain(example.text, example, 0)

    def encode_all(self, examples: Iterable[Example]) -> tuple[list[Encoded], list[tuple[Example, DatasetError]]]:
        """Return the rows that can be trained on, in order, and those that cannot, each with its error."""
        good: list[Encoded] = []
        bad: list[tuple[Example, DatasetError]] = []
        for example in examples:
            if example.kind == "messages":
                self.require_template()
            try:
                good.append(self.encode(example))
            except DatasetError as error:
                bad.append((example, error))
        return good, bad

    def prompt(self, example: Example) -> tuple[str, list[int], str]:
        """Return the prompt of a prediction as text and as token ids, and the ground truth."""
        match example.kind:
            case "messages" if example.media:
                text, media, truth = self.asked(example)
                return self.shown(text, media), self._expanded(text, media).input_ids, truth
            case "messages":
                text, truth = self._asker(example)._ask(example)
                return text, self._ids(text), truth
            case "prompt_completion":
                return example.prompt, self._with_bos(self._ids(example.prompt)), example.completion
            case "text":
                asked, truth = _halve(example.text)
                return asked, self._with_bos(self._ids(asked)), truth

    def require_template(self) -> None:
        """Raise DatasetError if conversations cannot be rendered at all, whatever the row."""
        self.probe  # noqa: B018

    # --- rows with images, videos or sounds -------------------------------------------------------------------------

    def rendered(self, example: Example) -> Rendered:
        """Render a row with media, before the processor expands it. Raises DatasetError, as `encode` does."""
        chat = self._of(example)
        conversation = Conversation(chat, example)
        places = self._check_places(conversation.text, example.media, example)
        omitted, spans = chat._omitted(conversation, example), conversation.spans()
        mismatch = self._mismatch(conversation, spans, example)
        return Rendered(conversation.text, tuple(spans), places, omitted, mismatch)

    def finish(self, example: Example, rendered: Rendered, expanded: Expanded) -> Encoded:
        """Encode a rendered row from the text and tokens that the processor made of it. Raises DatasetError."""
        try:
            carried = carry(rendered.text, rendered.places, expanded.text, added_tokens(self.tokenizer))
        except ValueError as error:
            raise DatasetError(f"{where(example)}: {error}", hint=_PROCESSOR_HINT) from error
        found = self._tokenize(expanded.text, carried.spans(rendered.spans))
        if found is None:
            raise DatasetError(
                f"{where(example)}: a token reaches from the assistant's words into what is not trained on",
                hint=_PROCESSOR_HINT,
            )
        ids, trained, pieces = found
        if ids != expanded.input_ids:
            raise DatasetError(
                f"{where(example)}: the processor makes other tokens of the row than its tokenizer does",
                hint=_PROCESSOR_HINT,
            )
        if not any(trained):
            raise DatasetError(f"{where(example)}: there is nothing to train on")
        return Encoded(
            ids,
            trained,
            tuple(rendered.text[a:b] for a, b in rendered.spans),
            pieces,
            rendered=rendered.text,
            media_end=len(self._ids(expanded.text[: carried.places[-1].end])),
            _shown=tuple(self._labels(expanded, carried.places)),
            omitted=rendered.omitted,
            mismatch=rendered.mismatch,
        )

    def asked(self, example: Example) -> tuple[str, tuple[Media, ...], str]:
        """Return the rendered prompt of a prediction, the media in it, and the ground truth."""
        text, truth = self._asker(example)._ask(example)
        media = example.media[: len(self.places(text))]
        self._check_places(text, media, example)
        return text, media, truth

    def places(self, text: str) -> list[Place]:
        """Return the places of media in a text that the template rendered."""
        return find_places(text, self.placeholders)

    def shown(self, text: str, media: Sequence[Media]) -> str:
        """Return a rendered text for people, with `[image /srv/images/7.png]` in place of each medium."""
        pieces, at = [], 0
        for place, each in zip(self.places(text), self._ordered(text, media), strict=True):
            pieces += [text[at : place.start], f"[{each.kind} {each.place}]"]
            at = place.end
        return "".join([*pieces, text[at:]])

    def _ordered(self, text: str, media: Sequence[Media]) -> list[Media]:
        """Return the media in the order in which the template shows them: it may put all of a kind first."""
        rest = list(media)
        return [
            rest.pop(next((n for n, each in enumerate(rest) if each.kind == place.kind), 0))
            for place in self.places(text)
        ]

    def _check_places(self, text: str, media: Sequence[Media], example: Example) -> tuple[Place, ...]:
        places = self.places(text)
        for kind in dict.fromkeys(each.kind for each in media):
            if kind not in self.placeholders:
                raise DatasetError(
                    f"{where(example)}: the chat template has no place for {_A_KIND[kind]}",
                    hint="the base model, or its template, does not take them",
                )
        given, found = Counter(each.kind for each in media), Counter(place.kind for place in places)
        if given != found:
            counted = " and ".join(f"{n} of kind {kind}" for kind, n in sorted(found.items())) or "none"
            written = quote.aside(f" {', '.join(map(repr, self.placeholders.values()))}")
            raise DatasetError(
                f"{where(example)}: it has {sum(given.values())} images, videos and sounds, and rendered it has "
                f"places for {counted}: words that read like one of the template's{written} count as one",
                hint="write such words in another way",
            )
        return tuple(places)

    @cached_property
    def placeholders(self) -> dict[Kind, str]:
        """Texts that the template writes in place of an image, a video or a sound, for the kinds that it supports."""
        self.require_template()
        return learn_placeholders(self)

    def _expanded(self, text: str, media: Sequence[Media]) -> Expanded:
        if self.expand is None:
            raise DatasetError(
                "the rows have images, videos or sounds, and the base model has no processor for them",
                hint="train a vision or audio model on them, with its processor's files",
            )
        return self.expand(text, media)

    def _labels(self, expanded: Expanded, places: Sequence[Place]) -> Iterator[tuple[str, str]]:
        """Yield the text of each place, and the label that people see instead."""
        tokens = re.compile("|".join(map(re.escape, added_tokens(self.tokenizer))) or r"(?!)")
        seen: Counter[Kind] = Counter()
        for place in places:
            text = expanded.text[place.start : place.end]
            counted = Counter(tokens.findall(text)).most_common(1)
            num_tokens = counted[0][1] if counted else len(self._ids(text))
            grids = expanded.grids.get(place.kind, ())
            size = _grid(grids[seen[place.kind]], num_tokens) if seen[place.kind] < len(grids) else ""
            seen[place.kind] += 1
            yield text, f"[{place.kind} {size or num_tokens} tokens]"

    # --- what a person, or generation, should know --------------------------------------------------------------------

    def notes(self, examples: Iterable[Example] = ()) -> list[tuple[str, str]]:
        """Return notable facts about the template, or about its effect on these rows, each after its level.

        The level is warning, or info where nothing is wrong.
        """
        probe, eos = self.probe, self.tokenizer.eos_token
        found = []
        if not probe.ends:
            sentence = (
                "the chat template ends a turn with no token: the model will not learn to stop; name a template that "
                "does with `chat_template:`"
            )
            found.append(("warning", sentence))
        if probe.is_open_inside and (num_rows := sum(map(_trains_inside, examples))):
            sentence = (
                f"the chat template ends only a row's last turn with {_quoted(probe.ends[0])}, and those before it "
                f"with no token: in {num_rows} rows such turns do not teach the model to stop; name another template "
                "with `chat_template:`, or make each turn the last of a row"
            )
            found.append(("warning", sentence))
        if probe.between_calls and (num_rows := sum(map(_calls_together, examples))):
            sentence = (
                f"the chat template ends a turn of one call with {_quoted(probe.between_calls[0])}, and puts that "
                f"between two calls of a turn, too, as {num_rows} rows have them: answers stop after the first; name "
                "another template with `chat_template:`"
            )
            found.append(("warning", sentence))
        if probe.unwritten:
            ends = " or ".join(map(_quoted, dict.fromkeys(filter(None, [probe.unwritten, probe.unwritten_call]))))
            sentence = (
                f"the chat template ends a turn only with the mark of the next, and a last one with nothing: {ends} is "
                "added there and trained, so that the model learns to stop"
            )
            found.append(("info", sentence))
        elif probe.ends and not probe.ends[0].endswith(eos or probe.ends[0]):
            sentence = (
                f"turns end in {_quoted(probe.ends[0])}, and the tokenizer's eos token is {_quoted(eos)}: both stop "
                "generation"
            )
            found.append(("info", sentence))
        return found

    def advice(self, example: Example, omitted: Sequence[Omission]) -> str:
        """Return advice for a row of which the template leaves out some; settings are tried where possible."""
        found: dict[str, str] = {}
        for kind in dict.fromkeys(each.kind for each in omitted):
            tried = {"reasoning": self._tried_reasoning, "system": self._tried_system}.get(kind)
            found[kind] = (tried(example) if tried else "") or advice([kind])
        return "; ".join(found.values())

    def advice_on(self, lost: Tally) -> str:
        """Return advice on all that rows lose."""
        return "; ".join(self.advice(*lost.rows[kind]) for kind, _ in lost.kinds.most_common())

    def advice_on_asking(self, found: Mismatches) -> str:
        """Return advice on prompts that differ from training; settings are tried where possible."""
        if (example := found.example) is None:
            return ""
        for name in switches(str(self.template)):
            for value in (True, False):
                if self._with(name, value)._asks_well(example):
                    return (
                        f"`chat_template_kwargs: {{{name}: {str(value).lower()}}}` has the prompt ask as the rows "
                        "are trained"
                    )
        path = variants.find(self.template)
        if path and self._base is None and self.training(path.read_text(encoding="utf-8"))._asks_well(example):
            return "`training_chat_template: trl` has the rows trained as the prompt asks"
        return asking.ADVICE

    def _with(self, name: str, value: bool) -> ChatFormat:
        """Return a copy with one more of the job's chat_template_kwargs."""
        made = self.variant(kwargs={name: value})
        made._base = None if self._base is None else self._base.variant(kwargs={name: value})
        return made

    def _asks_well(self, example: Example) -> bool:
        """Return True if the row's prompt is as trained, and its last turn loses no reasoning."""
        try:
            chat = self._of(example)
            conversation = Conversation(chat, example)
            mismatch = self._mismatch(conversation, conversation.spans(), example)
        except DatasetError:
            return False
        lost = chat._found(example, conversation.text)
        last = max(conversation.trained_indices)
        return mismatch is None and all((each.kind, each.message) != ("reasoning", last) for each in lost)

    def _tried_reasoning(self, example: Example) -> str:
        """Return a change that makes the template, or its training variant, show the row's reasoning; else ""."""
        chat, template = self._of(example), str(self.template)
        for name in switches(template):
            for value in (True, False):
                if chat.variant(kwargs={name: value})._shows("reasoning", example):
                    return (
                        f"`chat_template_kwargs: {{{name}: {str(value).lower()}}}` has the template show the reasoning"
                    )
        for key, other, messages in under_another_key(example.messages):
            if chat._shows("reasoning", replace(example, messages=messages)):
                return f"the template reads reasoning from `{other}`: rename the messages' key `{key}`"
        path = variants.find(template)
        if path and chat.variant(template=path.read_text(encoding="utf-8"))._shows("reasoning", example):
            return (
                "`training_chat_template: trl` takes TRL's training variant of the template, which shows the reasoning"
            )
        return ""

    def _tried_system(self, example: Example) -> str:
        if self._of(example)._shows("system", replace(example, messages=by_the_system(example.messages))):
            return "the template knows no developer: give those messages the role `system`"
        return ""

    def _shows(self, kind: str, example: Example) -> bool:
        """Return True if the template renders the row and leaves out nothing of that kind."""
        text = self.try_render(example.messages, example.tools)
        found = Finder(self.try_render).find(example.messages, example.tools, text or "")
        return text is not None and all(each.kind != kind for each in found)

    def variant(self, *, kwargs: Mapping[str, Any] | None = None, template: str | None = None) -> ChatFormat:
        """Return a copy with more arguments for the template, or with another template."""
        made = copy(self)
        made.template = template or self.template
        made._kwargs = {**self._kwargs, **(kwargs or {})}
        made._cached_probe, made._finder, made._takes_parts, made._variants = None, None, False, {}
        made.__dict__.pop("placeholders", None)
        return made

    def training(self, template: str) -> ChatFormat:
        """Return a copy that renders only rows with another template: the model's prompts stay as before."""
        made = self.variant(template=template)
        made._base = self
        return made

    def _of(self, example: Example) -> ChatFormat:
        """Return the ChatFormat with the row's own arguments for the template."""
        if not example.chat_template_kwargs:
            return self
        key = json.dumps(example.chat_template_kwargs, sort_keys=True, default=str)
        if key not in self._variants:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = self.variant(kwargs=example.chat_template_kwargs)
        return self._variants[key]

    def _asker(self, example: Example) -> ChatFormat:
        """Return the ChatFormat for prompts: with the base's own template, unless that refuses the row."""
        if self._base is not None:
            asker = self._base._of(example)
            if asker.try_render(example.messages, example.tools) is not None:
                return asker
        return self._of(example)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens at which generation stops: eos, and each end of a turn that is one token.

        An end after which an answer that begins with reasoning continues is not among them.
        """
        ids = [] if self._eos_id is None else [self._eos_id]
        if self._has_template:
            ends = [self._ids(end) for end in self.probe.ends if end not in self.probe.inner]
            ids += [end[0] for end in ends if len(end) == 1]
        ids += self._base.stop_token_ids if self._base is not None else []
        return list(dict.fromkeys(ids))

    # --- the check before the first step -----------------------------------------------------------------------------

    def check_trained(
        self,
        input_ids: Sequence[int],
        labels: Sequence[int],
        example: Example,
        *,
        is_truncated: bool = False,
        placeholder_ids: Iterable[int] = (),
    ) -> None:
        """Raise MaskError, with decoded evidence, unless the trained text is what the row's assistant says.

        The check uses the decoded tokens and the row, not the way in which the mask was made. `placeholder_ids` are
        those of images, video and audio. Labels are as the model takes them: not shifted, -100 where nothing is
        learned.
        """
        Check(self._of(example), list(input_ids), list(labels), example, is_truncated, frozenset(placeholder_ids)).run()

    # --- conversations -----------------------------------------------------------------------------------------------

    def _encode_messages(self, example: Example) -> Encoded:
        chat = self._of(example)
        conversation = Conversation(chat, example)
        omitted = chat._omitted(conversation, example)
        spans = conversation.spans()
        mismatch = self._mismatch(conversation, spans, example)
        return replace(chat._encode_spans(conversation.text, spans, example), omitted=omitted, mismatch=mismatch)

    def _mismatch(self, conversation: Conversation, spans: Sequence[Span], example: Example) -> Mismatch | None:
        """Return how the prompt of the row's last turn differs from the text that precedes the turn in training."""
        last, (start, _), asker = max(conversation.trained_indices), spans[-1], self._asker(example)
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

    def _omitted(self, conversation: Conversation, example: Example) -> tuple[Omission, ...]:
        """Return the parts of the row that the template leaves out. Raises SilencedError if a trained turn is empty."""
        found = self._found(example, conversation.text)
        for i in conversation.trained_indices if found else ():
            assert self._finder is not None
            is_silenced = self._finder.is_silenced(example.messages, example.tools, i, found)
            if is_silenced and not said_in_tags(conversation.shown(i)):
                raise SilencedError(
                    f"{where(example)}: the chat template leaves out all that message {i + 1}, the assistant's, says, "
                    "and its end alone would be trained",
                    hint=SILENCED_HINT,
                )
        return tuple(found)

    def left_out(self, example: Example, i: int) -> set[str]:
        """Return the kinds of message i's texts that the template leaves out, wholly or in part."""
        text = self.try_render(example.messages, example.tools)
        return set() if text is None else {each.kind for each in self._found(example, text) if each.message == i}

    def _found(self, example: Example, text: str) -> list[Omission]:
        if self._finder is None:
            self._finder = Finder(self.try_render)
        return self._finder.find(example.messages, example.tools, text)

    def try_render(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> str | None:
        """Return the template's text; None where it refuses."""
        try:
            self.require_template()  # this also learns the form of messages that the template takes
            return self.render(messages, tools)
        except (DatasetError, *TEMPLATE_ERRORS):
            return None

    def _ask(self, example: Example) -> tuple[str, str]:
        conversation = Conversation(self, example)
        last = max(conversation.trained_indices)
        truth = words(example.messages[last])
        if truth and last:
            return conversation.asked(last), truth
        start, end = conversation.spans()[-1]
        return conversation.text[:start] if not last else conversation.asked(last), truth or conversation.text[
            start:end
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the template's text, with the last turn's end if it lacks that. Raises one of `TEMPLATE_ERRORS`."""
        text = self._render(messages, tools, self._call_form, prompt=prompt)
        probe, is_told = self._cached_probe, bool(messages) and messages[-1]["role"] == "assistant"
        return probe.close(text, messages[-1]) if probe is not None and is_told and not prompt else text

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

    @property
    def _has_template(self) -> bool:
        return bool(self.template)

    @property
    def probe(self) -> Probe:
        if self._cached_probe is None:
            if not self._has_template:
                raise DatasetError(
                    "the rows are conversations, and the model's tokenizer has no chat template",
                    hint="name one with `chat_template:` (a file), or train on prompt/completion or text rows",
                )
            try:
                self._cached_probe = self._learn()
            except TEMPLATE_ERRORS as error:
                raise DatasetError(
                    f"the chat template cannot render a question and its answer: {said(error)}",
                    hint="name another one with `chat_template:`",
                ) from error
        return self._cached_probe

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

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _encode_plain(self, text: str, example: Example, start: int) -> Encoded:
        """Encode a text that is trained from `start` on, with bos as the tokenizer adds it, and eos."""
        if not text[start:].strip():
            raise DatasetError(f"{where(example)}: there is nothing to train on")
        body = self._encode_spans(text, [(start, len(text))], example)
        bos = [] if body.input_ids[: len(self._bos_ids)] == self._bos_ids else self._bos_ids
        has_eos = self._eos_id is None or body.input_ids[-1] == self._eos_id
        eos = [] if self._eos_id is None or has_eos else [self._eos_id]
        texts = [self.decode(bos), *[""] * (len(bos) - 1)] if bos else []

        def pieces(a: int, b: int) -> str:
            inner = body._pieces(max(a - len(bos), 0), max(min(b - len(bos), len(body.input_ids)), 0))
            ending = self.decode(eos) if b > len(bos) + len(body.input_ids) else ""
            return "".join(texts[a:b]) + inner + ending

        return Encoded(
            input_ids=[*bos, *body.input_ids, *eos],
            trained=[*[example.kind == "text"] * len(bos), *body.trained, *[True] * len(eos)],
            turns=(text[start:] + (self.tokenizer.eos_token if eos else ""),),
            _pieces=pieces,
        )

    def _encode_spans(self, text: str, spans: Sequence[Span], example: Example) -> Encoded:
        found = self._tokenize(text, spans) or self._tokenize_apart(text, spans)
        ids, trained, pieces = found
        if not any(trained):
            raise DatasetError(f"{where(example)}: there is nothing to train on")
        return Encoded(ids, trained, tuple(text[a:b] for a, b in spans), pieces)

    def _tokenize(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool], Any] | None:
        """Return ids and mask of the text tokenized as one; None if a token reaches from a turn into other words."""
        ids, ends = self._ids_and_ends(text)
        if ends is None:
            ranges = [self._range_by_prefix(text, ids, span) for span in spans]
        else:
            ranges = [range_by_offset(text, ends, span) for span in spans]
            if self._num_trials < _NUM_OFFSET_TRIALS:
                self._num_trials += 1
                if ranges != [self._range_by_prefix(text, ids, span) for span in spans]:
                    ends = self._distrust(text, ends)
                    ranges = [self._range_by_prefix(text, ids, span) for span in spans]
        if any(found is None for found in ranges):
            return None
        trained = [False] * len(ids)
        for found in ranges:
            assert found is not None
            trained[slice(*found)] = [True] * (found[1] - found[0])
        return ids, trained, self._pieces(text, ids, ends)

    def _distrust(self, text: str, ends: list[int]) -> list[int] | None:
        """Keep offsets that contradict the tokens if they account for the text by decoding; else distrust all."""
        ids = self._ids(text)
        cuts = [n for n in range(0, len(ids), max(1, len(ids) // 16)) if n and ends[n - 1] != ends[n]]
        if all(squeeze(self.decode(ids[:n])) == squeeze(text[: ends[n - 1]]) for n in cuts):
            return ends
        self._has_offsets = False
        return None

    def _tokenize_apart(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool], Any]:
        """Return ids and mask with the text cut at the turns' ends first, as in generation: prompt, then answer."""
        ids: list[int] = []
        trained: list[bool] = []
        cuts = [0, *[cut for span in spans for cut in span], len(text)]
        for n, (a, b) in enumerate(pairwise(cuts)):
            part = self._ids(text[a:b])
            ids += part
            trained += [n % 2 == 1] * len(part)
        return ids, trained, self._pieces(text, ids, None)

    def _pieces(self, text: str, ids: list[int], ends: list[int] | None) -> Callable[[int, int], str]:
        if ends is None:
            return lambda a, b: self.decode(ids[a:b])
        return lambda a, b: text[ends[a - 1] if a else 0 : ends[b - 1] if b < len(ends) else len(text)] if b else ""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _ids_and_ends(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return token ids and the end of each in the text; no ends where the tokenizer's offsets are unusable."""
        if not self._has_offsets:
            return self._ids(text), None
        batch = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return batch["input_ids"], token_ends(text, batch["offset_mapping"])

    def _range_by_prefix(self, text: str, ids: list[int], span: Span) -> Span | None:
        """Return the tokens of a span, found by tokenizing the text before its start and before its end."""
        start, before, _ = self._boundary(text, ids, span[0])
        end, _, after = self._boundary(text, ids, span[1])
        if before.strip() or (after.strip() and end < len(ids)):
            return None
        return start, end + (1 if after and end < len(ids) else 0)

    def _boundary(self, text: str, ids: list[int], position: int) -> tuple[int, str, str]:
        """Return (n, before, after): tokens [0, n) end by the position, and token n crosses it with these texts."""
        prefix = self._ids(text[:position])
        n = common(prefix, ids)
        if n == len(prefix):
            return n, "", ""
        target = len(self.decode(prefix))
        while n < len(ids) and len(self.decode(ids[: n + 1])) <= target:
            n += 1
        before = self.decode(prefix)[len(self.decode(ids[:n])) :]
        return n, before, self.decode(ids[: n + 1])[target:] if before else ""

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _leading_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before any text: bos, or nothing."""
        bare, full = self._ids("a"), self.tokenizer("a")["input_ids"]
        return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._bos_ids)] == self._bos_ids else [*self._bos_ids, *ids]


def _grid(patches: Sequence[int], num_tokens: int) -> str:
    """Return frames, columns and rows of tokens, if patches are merged in squares; empty where that does not add up."""
    frames, rows, columns = patches
    side = isqrt(max(frames * rows * columns // max(num_tokens, 1), 1))
    if frames * rows * columns != num_tokens * side * side:
        return ""
    return "×".join(map(str, [*([frames] if frames > 1 else []), columns // side, rows // side]))


def _trains_inside(example: Example) -> bool:
    """Return True if a trained turn is not the row's last message."""
    return any(i + 1 < len(example.messages) for i in example.trained_turns)


def _calls_together(example: Example) -> bool:
    """Return True if a trained turn has more than one call."""
    return any(len(example.messages[i].get("tool_calls") or []) > 1 for i in example.trained_turns)


def _quoted(text: str | None) -> str:
    """Quote words of a template or a tokenizer."""
    return quote.mark(repr(text))


def _halve(text: str) -> tuple[str, str]:
    """Split a text at the white space nearest its middle."""
    middle = len(text) // 2
    gaps = [n for n, char in enumerate(text) if char.isspace() and text[:n].strip() and text[n:].strip()]
    cut = min(gaps, key=lambda n: abs(n - middle), default=middle)
    return text[:cut], text[cut:].strip()


def trained_share(labels: Iterable[Sequence[int]]) -> float:
    """Return the share of a batch's tokens that is trained on; padding counts as not trained."""
    rows = [list(row) for row in labels]
    total = sum(map(len, rows))
    return sum(label != IGNORED for row in rows for label in row) / total if total else 0.0
