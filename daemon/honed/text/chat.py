"""Conversion of a row to token ids, with a mask over the tokens that the model is trained on.

Trained are the assistant's turns as the chat template renders them, each with its end token. Templates do not report
where a turn lies, so rendering locates it:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nHello<|im_end|>\\n
    asked    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n                 up to the turn, with the prompt
    turn                                                             [..........................................]

Where the shorter renderings are prefixes of the whole one, they give the turn. Where they are not (a template that
omits earlier reasoning, or treats the last turn specially), every message is found in the whole conversation by
rendering it again with only that message replaced by a mark. A turn that is not located is an error of the row, never
a guess.

The tokenizer is an argument; neither torch nor transformers is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from honed.inputs.media import Media
from honed.inputs.message import words
from honed.inputs.row import Example
from honed.job.shape import Segment
from honed.spec import variant as variants
from honed.system import quote
from honed.system.error import DatasetError, SpecError
from honed.text import maskcheck
from honed.text.advice import Advice
from honed.text.asking import Mismatch
from honed.text.expansion import Expanded, Place, carry
from honed.text.maskcheck import IGNORED
from honed.text.omission import SILENCED_HINT, Omission, OmittedRow, SilencedError, said_in_tags
from honed.text.places import Expand, Places
from honed.text.renderer import Renderer, Renderers
from honed.text.span import Span, runs_of
from honed.text.template import Conversation, added_tokens, where
from honed.text.tokens import Pieces, Tokens

if TYPE_CHECKING:
    from honed.spec.spec import JobSpec

__all__ = ["IGNORED", "ChatFormat", "Encoded", "MediaCutError", "Rendered", "trained_share"]

_PROCESSOR_HINT = "`honectl preview` shows the row; the base model's processor may not match its tokenizer"


class PreviewRow(TypedDict):
    """One row of `preview`, as it is trained on."""

    row: int  #: in its data set, from 1
    dataset: str
    num_tokens: int
    num_trained: int
    is_truncated: bool  #: by max_length
    segments: list[Segment]
    omitted: list[OmittedRow]


@dataclass(frozen=True)
class Encoded:
    """One row as token ids, with the mask of trained tokens."""

    input_ids: list[int]
    trained: list[bool]  #: as long as input_ids
    turns: tuple[str, ...]  #: the trained texts as rendered, in order
    _pieces: Pieces = field(repr=False, compare=False)  #: the text of tokens [a, b)
    rendered: str = ""  #: of a row with media: its text before the processor expands it
    media_end: int = 0  #: images, videos and sounds lie in the tokens before this one
    _shown: tuple[tuple[str, str], ...] = field(
        default=(), repr=False, compare=False
    )  #: per image, video or sound: its text, and the label that people see
    omitted: tuple[Omission, ...] = field(default=(), compare=False)  #: parts of the row that the template leaves out
    mismatch: Mismatch | None = field(default=None, compare=False)  #: of its last turn's prompt with training
    answers: tuple[Encoded, ...] = ()  #: of a row with several, each alone; the fields above have them end to end

    @classmethod
    def joined(cls, answers: Sequence[Encoded]) -> Encoded:
        """Return the answers of one row as one sequence, which `answers` divides again."""
        return cls(
            [token for answer in answers for token in answer.input_ids],
            [is_trained for answer in answers for is_trained in answer.trained],
            tuple(turn for answer in answers for turn in answer.turns),
            answers[0]._pieces,
            omitted=tuple(dict.fromkeys(item for answer in answers for item in answer.omitted)),
            mismatch=answers[0].mismatch,  # the prompt is that of all
            answers=tuple(answers),
        )

    @property
    def longest(self) -> int:
        """Tokens of its longest answer: a model sees one at a time."""
        return max((len(answer.input_ids) for answer in self.answers), default=len(self.input_ids))

    @property
    def num_predicted(self) -> int:
        """Tokens that are trained on; the first of a sequence is never predicted. 0 if that is so of any answer."""
        if self.answers:
            numbers = [answer.num_predicted for answer in self.answers]
            return sum(numbers) if all(numbers) else 0
        return sum(self.trained[1:])

    @property
    def labels(self) -> list[int]:
        return [
            token if is_trained else IGNORED for token, is_trained in zip(self.input_ids, self.trained, strict=True)
        ]

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    def segments(self) -> list[Segment]:
        """Return the row's text in pieces, trained and not, with an image's tokens as `[image 12×9 tokens]`."""
        if self.answers:
            return [piece for answer in self.answers for piece in answer.segments()]
        pieces, shown = list[Segment](), list(self._shown)
        for a, b, is_trained in runs_of(self.trained):
            text, at = self._pieces(a, b), 0
            while shown and (start := text.find(shown[0][0], at)) >= 0:
                written, seen = shown.pop(0)
                text, at = text[:start] + seen + text[start + len(written) :], start + len(seen)
            pieces.append({"text": text, "trained": is_trained})
        return pieces

    def truncate(self, max_length: int | None) -> Encoded:
        """Cut the row to its first `max_length` tokens, as trainers do. Raises MediaCutError if that cuts media."""
        if max_length is None or self.longest <= max_length:
            return self
        if self.answers:
            return self.joined([answer.truncate(max_length) for answer in self.answers])
        if max_length < self.media_end:
            raise MediaCutError(
                f"its images, videos and sounds extend to token {self.media_end}, but it is truncated after "
                f"{max_length}",
                hint="increase training.max_length, or reduce pixels and frames (`media:`)",
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


class ChatFormat:
    """Conversion of rows with one tokenizer and its chat template, and a processor where rows have media.

    tokens      the tokenizer: token ids, and masks over spans of a text
    renderers   the template, with the job's and the rows' arguments: texts, and what they show
    places      the places of media in those texts, and the processor
    advice      settings that change what a template does to rows
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        date: datetime | None = None,
        expand: Expand | None = None,
        rows_template: str | None = None,
    ) -> None:
        """Set up the conversion. Templates that ask for today's date get `date`; None leaves that to the clock.

        `rows_template` renders the rows alone: prompts are rendered with the tokenizer's own template.
        """
        self.tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        own = Renderers(Renderer(Tokens(tokenizer), template, chat_template_kwargs or {}, date))
        self.renderers = own if rows_template is None else own.training(rows_template)
        self.renderer = self.renderers.own
        self.tokens = self.renderer.tokens
        self.places = Places(self.renderer, expand)
        self.advice = Advice(self.renderers)

    @classmethod
    def of(cls, job_spec: JobSpec, tokenizer: Any, *, date: datetime | None = None) -> ChatFormat:
        """Create the ChatFormat of a job. Raises SpecError if the job's template for rows does not exist."""
        rows_template = variants.read(job_spec.training_chat_template, getattr(tokenizer, "chat_template", None))
        return cls(
            tokenizer, chat_template_kwargs=job_spec.chat_template_kwargs, date=date, rows_template=rows_template
        )

    def encode(self, example: Example) -> Encoded:
        """Encode the whole row, untruncated. Raises DatasetError for a row that the template refuses or hides."""
        if example.others:
            return Encoded.joined([self.encode(answer) for answer in example.answers])
        match example.kind:
            case "messages" if example.media:
                rendered = self.rendered(example)
                return self.finish(example, rendered, self.places.expand(rendered.text, example.media))
            case "messages":
                rendered = self.rendered(example)
                tokens = self.renderers.of(example).tokens
                return _masked(tokens, rendered.text, rendered.spans, example, rendered)
            case "prompt_completion":
                return self._encode_plain(example.prompt + example.completion, example, len(example.prompt))
            case "text":
                return self._encode_plain(example.text, example, 0)

    def prompt(self, example: Example) -> tuple[str, list[int], str]:
        """Return the prompt of a prediction as text and as token ids, and the ground truth, the row's first answer."""
        match example.kind:
            case "messages" if example.media:
                text, media, truth = self.asked(example)
                return self.places.shown(text, media), self.places.expand(text, media).input_ids, truth
            case "messages":
                text, truth = _asked(self.renderers.asker(example), example)
                return text, self.tokens.ids(text), truth
            case "prompt_completion":
                return example.prompt, self.tokens.with_bos(self.tokens.ids(example.prompt)), example.completion
            case "text":
                asked, truth = _halve(example.text)
                return asked, self.tokens.with_bos(self.tokens.ids(asked)), truth

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens at which generation stops: eos, and every end of a turn that is one token.

        An end after which an answer that begins with reasoning continues is not among them.
        """
        return self.renderers.stop_token_ids()

    def require_end(self, token: str) -> None:
        """Raise SpecError if the template ends turns, and none with this token, which the job names as their end."""
        ends = self.renderers.own.probe.ends
        if ends and not any(end.endswith(token) for end in ends):
            raise SpecError(
                f"training.eos_token: {quote.mark(repr(token))} does not end the turns of the chat template, which end "
                f"in {quote.mark(repr(ends[0]))}",
                hint="name the token with which the template ends turns, remove the key, or use another template with "
                "chat_template:",
                fix={"training.eos_token": ends[0] if len(self.tokens.ids(ends[0])) == 1 else None},
            )

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
        renderer, eos_id = self.renderers.of(example), self.tokenizer.eos_token_id
        maskcheck.check(
            renderer,
            list(input_ids),
            list(labels),
            example,
            is_truncated=is_truncated,
            placeholder_ids=frozenset(placeholder_ids),
            end_ids=self.renderers.stop_token_ids(renderer) if example.kind == "messages" else [eos_id],
        )

    # --- conversations -----------------------------------------------------------------------------------------------

    def rendered(self, example: Example) -> Rendered:
        """Render a conversation, before a processor expands its media. Raises DatasetError, as `encode` does."""
        renderer = self.renderers.of(example)
        conversation = Conversation(renderer, example)
        places = self.places.check(conversation.text, example.media, example) if example.media else ()
        omitted, spans = _omitted(renderer, conversation, example), conversation.spans()
        mismatch = self.renderers.mismatch(conversation, spans, example)
        text = conversation.text
        if example.media:
            text, spans = self.places.with_ended_prompt(text, spans)
        return Rendered(text, tuple(spans), places, omitted, mismatch)

    def finish(self, example: Example, rendered: Rendered, expanded: Expanded) -> Encoded:
        """Encode a rendered row from the text and tokens that the processor made of it. Raises DatasetError."""
        try:
            carried = carry(rendered.text, rendered.places, expanded.text, added_tokens(self.tokenizer))
        except ValueError as error:
            raise DatasetError(f"{where(example)}: {error}", hint=_PROCESSOR_HINT) from error
        masked = self.tokens.mask(expanded.text, carried.spans(rendered.spans))
        if masked is None:
            raise DatasetError(
                f"{where(example)}: a token contains both trained and masked text",
                hint=_PROCESSOR_HINT,
            )
        ids, trained, pieces = masked
        if ids != expanded.input_ids:
            raise DatasetError(
                f"{where(example)}: the processor and the tokenizer produce different tokens",
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
            media_end=len(self.tokens.ids(expanded.text[: carried.places[-1].end])),
            _shown=tuple(self.places.labels(expanded, carried.places)),
            omitted=rendered.omitted,
            mismatch=rendered.mismatch,
        )

    def asked(self, example: Example) -> tuple[str, tuple[Media, ...], str]:
        """Return the rendered prompt of a prediction, the media in it, and the ground truth."""
        text, truth = _asked(self.renderers.asker(example), example)
        media = example.media[: len(self.places.of(text))]
        self.places.check(text, media, example)
        return self.places.with_end(text) if media else text, media, truth

    def _encode_plain(self, text: str, example: Example, start: int) -> Encoded:
        """Encode a text that is trained from `start` on, with bos as the tokenizer adds it, and eos."""
        if not text[start:].strip():
            raise DatasetError(f"{where(example)}: there is nothing to train on")
        bos_ids, eos_id, decode = self.tokens.bos_ids, self.tokens.eos_id, self.tokens.decode
        body = _masked(self.tokens, text, [(start, len(text))], example)
        bos = [] if body.input_ids[: len(bos_ids)] == bos_ids else bos_ids
        has_eos = eos_id is None or body.input_ids[-1] == eos_id
        eos = [] if eos_id is None or has_eos else [eos_id]
        texts = [decode(bos), *[""] * (len(bos) - 1)] if bos else []

        def pieces(a: int, b: int) -> str:
            inner = body._pieces(max(a - len(bos), 0), max(min(b - len(bos), len(body.input_ids)), 0))
            ending = decode(eos) if b > len(bos) + len(body.input_ids) else ""
            return "".join(texts[a:b]) + inner + ending

        return Encoded(
            input_ids=[*bos, *body.input_ids, *eos],
            trained=[*[example.kind == "text"] * len(bos), *body.trained, *[True] * len(eos)],
            turns=(text[start:] + (self.tokenizer.eos_token if eos else ""),),
            _pieces=pieces,
        )


def _masked(
    tokens: Tokens, text: str, spans: Sequence[Span], example: Example, rendered: Rendered | None = None
) -> Encoded:
    ids, trained, pieces = tokens.mask(text, spans) or tokens.mask_apart(text, spans)
    if True not in trained:
        raise DatasetError(f"{where(example)}: there is nothing to train on")
    turns = tuple(text[a:b] for a, b in spans)
    if rendered is None:
        return Encoded(ids, trained, turns, pieces)
    return Encoded(ids, trained, turns, pieces, omitted=rendered.omitted, mismatch=rendered.mismatch)


def _omitted(renderer: Renderer, conversation: Conversation, example: Example) -> tuple[Omission, ...]:
    """Return the parts of the row that the template leaves out. Raises SilencedError if a trained turn is empty."""
    omissions = renderer.omitted(example, conversation.text)
    for i in conversation.trained_indices if omissions else ():
        if renderer.is_silenced(example, i, omissions) and not said_in_tags(conversation.shown(i)):
            raise SilencedError(
                f"{where(example)}: the chat template leaves out all text of message {i + 1}, from the assistant, so "
                "only its end would be trained",
                hint=SILENCED_HINT,
            )
    return tuple(omissions)


def _asked(renderer: Renderer, example: Example) -> tuple[str, str]:
    """Return the prompt of the row's last turn, and the turn's words."""
    conversation = Conversation(renderer, example)
    last = max(conversation.trained_indices)
    truth = words(example.messages[last])
    if truth and last:
        return conversation.asked(last), truth
    start, end = conversation.spans()[-1]
    return conversation.text[:start] if not last else conversation.asked(last), truth or conversation.text[start:end]


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
