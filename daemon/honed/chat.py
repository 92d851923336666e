"""From a row to token ids and the mask over them: what the model is asked to learn, and nothing else.

Trained are the assistant's turns as the chat template renders them, each with its end token. Templates say nothing of
where a turn lies, so it is found by rendering:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nHello<|im_end|>\\n
    asked    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n                 up to the turn, with the prompt
    turn                                                             [..........................................]

Where the shorter renderings begin the whole one, that settles it. Where they do not (a template that drops earlier
reasoning, or treats the last turn in its own way), each message is found in the whole conversation by rendering it
again with just that message exchanged for a mark. A turn that cannot be found is an error of that row, never a guess.

The tokenizer comes in as an argument; neither torch nor transformers is imported here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from jinja2.exceptions import TemplateError

from honed.dataset import Example
from honed.error import DatasetError, MaskError

IGNORED = -100  #: the label of a token that is not trained on

#: What stands in for a message while it is looked for: they differ in their first letter and in their last, so that
#: a message's own text can run on with one of them by chance, not with both.
_MARKS = ("Qx7markKz0v", "Wj3signBn8u")
_USER_MARK = "Uy5askedDf2t"

#: Rows whose boundaries are computed both ways, from offsets and from token prefixes, before offsets are believed.
_NUM_OFFSET_TRIALS = 8

#: What a template may raise on a conversation that it does not take.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

_Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """One row as token ids, with what is trained on."""

    input_ids: list[int]
    trained: list[bool]  #: as long as input_ids
    turns: tuple[str, ...]  #: the trained texts as rendered, in order
    _pieces: Callable[[int, int], str] = field(repr=False, compare=False)  #: the text of tokens [a, b)

    @property
    def labels(self) -> list[int]:
        return [
            token if is_trained else IGNORED for token, is_trained in zip(self.input_ids, self.trained, strict=True)
        ]

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    def segments(self) -> list[dict[str, Any]]:
        """The row's text in pieces, trained and not."""
        return [{"text": self._pieces(a, b), "trained": is_trained} for a, b, is_trained in _runs(self.trained)]

    def truncate(self, max_length: int | None) -> Encoded:
        """The row's first `max_length` tokens, as the trainer keeps them."""
        if max_length is None or len(self.input_ids) <= max_length:
            return self
        return replace(self, input_ids=self.input_ids[:max_length], trained=self.trained[:max_length])


@dataclass(frozen=True)
class _Probe:
    """What a template does around a turn, learned from a conversation of marks."""

    ends: tuple[str, ...]  #: what ends a turn; empty where nothing does
    header: str  #: what opens a turn after the generation prompt's part of the user's tail; may be empty
    ignores_prompt: bool  #: add_generation_prompt changes nothing, and `header` was learned from a whole turn
    fronts: tuple[
        tuple[str, str], ...
    ]  #: (between the user's text and the turn, between there and the assistant's text)
    trail: str  #: what follows the end of the last turn
    backs: tuple[str, ...]  #: between the assistant's text and the end of its turn, white space left out
    prompt_extra: str  #: what the generation prompt adds that a rendered turn does not begin with


class ChatFormat:
    """Rows to token ids and masks, with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._cached_probe: _Probe | None = None
        self._takes_parts = False  # whether the template wants content as a list of parts, as those for images do
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        self._num_trials = 0
        self._bos_ids = self._leading_ids()
        self._eos_id: int | None = tokenizer.eos_token_id

    # --- rows ------------------------------------------------------------------------------------------------------

    def encode(self, example: Example) -> Encoded:
        """The whole row, untruncated. Raises DatasetError for a row that the template refuses or hides."""
        match example.kind:
            case "messages":
                return self._encode_messages(example)
            case "prompt_completion":
                return self._encode_plain(example.prompt + example.completion, example, len(example.prompt))
            case "text":
                return self._encode_plain(example.text, example, 0)

    def encode_all(self, examples: Iterable[Example]) -> tuple[list[Encoded], list[tuple[Example, DatasetError]]]:
        """The rows that can be trained on, in order, and those that cannot, each with its reason."""
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
        """What the model is asked for a prediction: the text, its token ids, and the ground truth."""
        match example.kind:
            case "messages":
                text, truth = self._ask(example)
                return text, self._ids(text), truth
            case "prompt_completion":
                return example.prompt, self._with_bos(self._ids(example.prompt)), example.completion
            case "text":
                asked, truth = _halve(example.text)
                return asked, self._with_bos(self._ids(asked)), truth

    def require_template(self) -> None:
        """Raises DatasetError where conversations cannot be rendered at all, whatever the row."""
        self._probe  # noqa: B018

    # --- what a person, or generation, should know --------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Facts about the template that deserve a warning."""
        probe, eos = self._probe, self.tokenizer.eos_token
        found = []
        if probe.prompt_extra.strip():
            found.append(
                f"the chat template's generation prompt ends in {probe.prompt_extra!r}, which the turns that are "
                "trained on do not begin with; chat_template_kwargs may turn it off"
            )
        if not probe.ends:
            found.append("the chat template ends a turn with no token: the model will not learn to stop")
        elif not probe.ends[0].endswith(eos or probe.ends[0]):
            found.append(
                f"turns end in {probe.ends[0]!r}, and the tokenizer's eos token is {eos!r}: both stop generation"
            )
        return found

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens at which generation stops: eos and, where it is one token, what ends a turn."""
        ids = [] if self._eos_id is None else [self._eos_id]
        if self._has_template:
            ends = [self._ids(end) for end in self._probe.ends]
            ids += [end[0] for end in ends if len(end) == 1]
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
        """Raises MaskError, with decoded evidence, unless what is trained on is what the row's assistant says.

        It looks at the decoded tokens and at the row, not at how the mask was made. `placeholder_ids` are those of
        images, video and audio. Labels are as the model takes them: not shifted, -100 where nothing is learned.
        """
        _Check(self, list(input_ids), list(labels), example, is_truncated, frozenset(placeholder_ids)).run()

    # --- conversations -----------------------------------------------------------------------------------------------

    def _encode_messages(self, example: Example) -> Encoded:
        conversation = _Conversation(self, example)
        spans = conversation.spans()
        return self._encode_spans(conversation.text, spans, example)

    def _ask(self, example: Example) -> tuple[str, str]:
        conversation = _Conversation(self, example)
        last = max(conversation.trained_indices)
        message = example.messages[last]
        truth = message.get("content") or ""
        if truth and last:
            return conversation.asked(last), truth
        start, end = conversation.spans()[-1]
        return conversation.text[:start] if not last else conversation.asked(last), truth or conversation.text[
            start:end
        ]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """The template's text. Raises one of `_TEMPLATE_ERRORS` where it refuses."""
        given = [_as_parts(message) for message in messages] if self._takes_parts else list(messages)
        rendered: str = self.tokenizer.apply_chat_template(
            given, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._kwargs
        )
        return rendered

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def _probe(self) -> _Probe:
        if self._cached_probe is None:
            if not self._has_template:
                raise DatasetError(
                    "the rows are conversations, and the model's tokenizer has no chat template",
                    hint="name one with `chat_template:` (a file), or train on prompt/completion or text rows",
                )
            try:
                self._cached_probe = self._learn()
            except _TEMPLATE_ERRORS as error:
                raise DatasetError(
                    f"the chat template cannot render a question and its answer: {error}",
                    hint="name another one with `chat_template:`",
                ) from error
        return self._cached_probe

    def _learn(self) -> _Probe:
        try:
            return _learn(self)
        except _TEMPLATE_ERRORS as error:
            self._takes_parts = True
            try:
                return _learn(self)
            except _TEMPLATE_ERRORS:
                self._takes_parts = False
                raise error from None

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _encode_plain(self, text: str, example: Example, start: int) -> Encoded:
        """A text that is trained from `start` on, with bos as the tokenizer adds it, and eos."""
        if not text[start:].strip():
            raise DatasetError(f"{_where(example)}: there is nothing to train on")
        body = self._encode_spans(text, [(start, len(text))], example)
        bos = [] if body.input_ids[: len(self._bos_ids)] == self._bos_ids else self._bos_ids
        has_eos = self._eos_id is None or body.input_ids[-1] == self._eos_id
        eos = [] if self._eos_id is None or has_eos else [self._eos_id]
        texts = [self._decode(bos), *[""] * (len(bos) - 1)] if bos else []

        def pieces(a: int, b: int) -> str:
            inner = body._pieces(max(a - len(bos), 0), max(min(b - len(bos), len(body.input_ids)), 0))
            ending = self._decode(eos) if b > len(bos) + len(body.input_ids) else ""
            return "".join(texts[a:b]) + inner + ending

        return Encoded(
            input_ids=[*bos, *body.input_ids, *eos],
            trained=[*[example.kind == "text"] * len(bos), *body.trained, *[True] * len(eos)],
            turns=(text[start:] + (self.tokenizer.eos_token if eos else ""),),
            _pieces=pieces,
        )

    def _encode_spans(self, text: str, spans: Sequence[_Span], example: Example) -> Encoded:
        found = self._tokenize(text, spans) or self._tokenize_apart(text, spans)
        ids, trained, pieces = found
        if not any(trained):
            raise DatasetError(f"{_where(example)}: there is nothing to train on")
        return Encoded(ids, trained, tuple(text[a:b] for a, b in spans), pieces)

    def _tokenize(self, text: str, spans: Sequence[_Span]) -> tuple[list[int], list[bool], Any] | None:
        """Ids and mask of the text tokenized as one; None where a token reaches from a turn into other words."""
        ids, ends = self._ids_and_ends(text)
        if ends is None:
            ranges = [self._range_by_prefix(text, ids, span) for span in spans]
        else:
            ranges = [_range_by_offset(text, ends, span) for span in spans]
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
        """Offsets that say other than the tokens do: believed no more, unless they account for the text by decoding."""
        ids = self._ids(text)
        cuts = [n for n in range(0, len(ids), max(1, len(ids) // 16)) if n and ends[n - 1] != ends[n]]
        if all(_squeeze(self._decode(ids[:n])) == _squeeze(text[: ends[n - 1]]) for n in cuts):
            return ends
        self._has_offsets = False
        return None

    def _tokenize_apart(self, text: str, spans: Sequence[_Span]) -> tuple[list[int], list[bool], Any]:
        """Ids and mask with the text cut at the turns' ends first, as generation meets it: prompt, then answer."""
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
            return lambda a, b: self._decode(ids[a:b])
        return lambda a, b: text[ends[a - 1] if a else 0 : ends[b - 1] if b < len(ends) else len(text)] if b else ""

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _ids_and_ends(self, text: str) -> tuple[list[int], list[int] | None]:
        """Token ids, and where in the text each ends; no ends where the tokenizer cannot tell, or tells nonsense."""
        if not self._has_offsets:
            return self._ids(text), None
        batch = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return batch["input_ids"], _ends(text, batch["offset_mapping"])

    def _range_by_prefix(self, text: str, ids: list[int], span: _Span) -> _Span | None:
        """The tokens of a span, found by tokenizing what comes before its ends."""
        start, before, _ = self._boundary(text, ids, span[0])
        end, _, after = self._boundary(text, ids, span[1])
        if before.strip() or (after.strip() and end < len(ids)):
            return None
        return start, end + (1 if after and end < len(ids) else 0)

    def _boundary(self, text: str, ids: list[int], position: int) -> tuple[int, str, str]:
        """(n, before, after): tokens [0, n) end at or before a position; token n reaches across it with these texts."""
        prefix = self._ids(text[:position])
        n = _common(prefix, ids)
        if n == len(prefix):
            return n, "", ""
        target = len(self._decode(prefix))
        while n < len(ids) and len(self._decode(ids[: n + 1])) <= target:
            n += 1
        before = self._decode(prefix)[len(self._decode(ids[:n])) :]
        return n, before, self._decode(ids[: n + 1])[target:] if before else ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _leading_ids(self) -> list[int]:
        """What the tokenizer puts before any text by itself: bos, or nothing."""
        bare, full = self._ids("a"), self.tokenizer("a")["input_ids"]
        return next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._bos_ids)] == self._bos_ids else [*self._bos_ids, *ids]


class _Conversation:
    """One rendered conversation, and where its turns lie in it."""

    def __init__(self, chat: ChatFormat, example: Example) -> None:
        self._chat, self._example, self._probe = chat, example, chat._probe
        self._messages, self._tools = example.messages, example.tools
        first = example.num_prompt_messages
        self.trained_indices = [i for i, m in enumerate(self._messages) if m["role"] == "assistant" and i >= first]
        if not self.trained_indices:
            raise self._error("no turn of the assistant to train on")
        try:
            self.text = chat.render(self._messages, self._tools)
        except _TEMPLATE_ERRORS as error:
            raise self._error(f"the chat template refuses the conversation: {error}") from error
        self._regions: dict[int, _Span | None] = {}

    def spans(self) -> list[_Span]:
        """The characters of each trained turn, in order, apart from each other."""
        spans = [self._begun(i) or self._searched(i) for i in self.trained_indices]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise self._error("the chat template does not keep the assistant's turns apart")
        return spans

    def asked(self, i: int) -> str:
        """What the model sees when it is to write message i."""
        try:
            text = self._chat.render(self._messages[:i], self._tools, prompt=True)
        except _TEMPLATE_ERRORS as error:
            raise self._error(f"the chat template refuses the conversation before message {i + 1}: {error}") from error
        return text + self._probe.header if self._probe.ignores_prompt else text

    def _begun(self, i: int) -> _Span | None:
        """Turn i where shorter renderings begin the whole one; None where they do not."""
        try:
            asked = self._chat.render(self._messages[:i], self._tools, prompt=True)
            is_last = i == len(self._messages) - 1
            told = self.text if is_last else self._chat.render(self._messages[: i + 1], self._tools)
        except _TEMPLATE_ERRORS:
            return None
        told = told.removesuffix(self._probe.trail)
        start = len(asked)
        if self._probe.header.strip() and self.text.startswith(self._probe.header, start):
            start += len(self._probe.header)
        end = max((told.rfind(end, start) + len(end) for end in self._probe.ends if end in told[start:]), default=0)
        if not end or not self.text.startswith(asked) or not (is_last or self.text.startswith(told[:end])):
            return None
        return (start, end) if _shows(self.text[start:end], self._messages[i]) else None

    def _searched(self, i: int) -> _Span:
        """Turn i, found by what changes in the whole rendering when a message does."""
        region = self._region(i)
        if region is None or (region[0] == region[1] and _has_words(self._messages[i])):
            raise self._error(f"the chat template does not show message {i + 1}, which is the assistant's")
        start, end = self._start(i, region[0]), region[1]
        others = [self._region(k) for k in range(i + 1, len(self._messages))]
        limit = min((other[0] for other in others if other and other[0] >= end), default=len(self.text))
        stops = [(self.text.find(mark, end, limit), len(mark)) for mark in self._probe.ends]
        at, length = min((stop for stop in stops if stop[0] >= 0), default=(end, 0))
        return start, at + length

    def _start(self, i: int, content_start: int) -> int:
        """Where turn i starts: after what the generation prompt has in common with the rendering, there."""
        base, tail, shared = 0, "", 0
        if i and (before := self._region(i - 1)) and before[1] <= content_start:
            base, tail = before[1], self._tail_after(i - 1)
            shared = _common(tail, self.text[base:content_start])
        if tail and shared == len(tail):
            return base + shared
        # What only a part of the prompt has in common may be chance: a header learned before goes first.
        for header in _headers(self._probe):
            at = self.text.rfind(header, base, content_start)
            if at >= 0:
                return at + len(header)
        if not tail and not self._probe.header.strip():  # nothing opens a turn, so it begins with what leads its words
            leads = [lead for _, lead in self._probe.fronts if self.text[:content_start].endswith(lead)]
            return content_start - max(map(len, leads), default=0)
        if not tail:
            raise self._error(f"the beginning of message {i + 1}, the assistant's, cannot be found in the rendering")
        return base + shared

    def _tail_after(self, k: int) -> str:
        """What follows message k's words where the assistant is asked to go on; empty where that is refused."""
        told = self._try([*self._messages[:k], *_marked(self._messages[k], _MARKS[0])], prompt=True)
        if not told or _MARKS[0] not in told:
            return ""
        return _after(told, _MARKS[0]) + (self._probe.header if self._probe.ignores_prompt else "")

    def _region(self, k: int) -> _Span | None:
        """Where message k's own words lie in the rendering; None where the template does not show them."""
        if k not in self._regions:
            self._regions[k] = self._find(k)
        return self._regions[k]

    def _find(self, k: int) -> _Span | None:
        head, tail = len(self.text), len(self.text)
        for mark in _MARKS:
            changed = self._try([*self._messages[:k], *_marked(self._messages[k], mark), *self._messages[k + 1 :]])
            if not changed or mark not in changed:
                return None
            head = min(head, _common(changed, self.text))
            tail = min(tail, _common(changed[::-1], self.text[::-1]))
        return head, max(head, len(self.text) - tail)

    def _try(self, messages: list[Any], *, prompt: bool = False) -> str | None:
        try:
            return self._chat.render(messages, self._tools, prompt=prompt)
        except _TEMPLATE_ERRORS:
            return None

    def _error(self, what: str) -> DatasetError:
        return DatasetError(f"{_where(self._example)}: {what}", hint="`honectl preview` shows how rows are rendered")


# --- the check -------------------------------------------------------------------------------------------------------

#: Characters, white space left out, from which on words of the user in a trained text are no accident.
_MIN_FOREIGN = 12


@dataclass
class _Check:
    """One row's labels against what its assistant says, by decoding."""

    chat: ChatFormat
    ids: list[int]
    labels: list[int]
    example: Example
    is_truncated: bool
    placeholder_ids: frozenset[int]

    def run(self) -> None:
        self._check_tokens()
        runs = [(a, b) for a, b, is_trained in _runs([label != IGNORED for label in self.labels]) if is_trained]
        match self.example.kind:
            case "messages":
                self._check_turns(runs)
            case "prompt_completion":
                self._check_completion(runs)
            case "text":
                self._check_whole()

    def _check_tokens(self) -> None:
        tokenizer, trained = self.chat.tokenizer, [n for n, label in enumerate(self.labels) if label != IGNORED]
        if len(self.ids) != len(self.labels):
            raise self._error(f"there are {len(self.ids)} tokens and {len(self.labels)} labels")
        if not trained:
            raise self._error("nothing is trained on")
        if wrong := [n for n in trained if self.labels[n] != self.ids[n]]:
            raise self._error("the labels are not the row's own tokens", wrong[0])
        forbidden = self.placeholder_ids | _placeholder_ids(tokenizer)
        said = str([m.get("content") for m in self.example.messages]) + self.example.completion + self.example.text
        if self._pads_otherwise and tokenizer.pad_token not in said:
            forbidden |= {tokenizer.pad_token_id}
        if wrong := [n for n in trained if self.ids[n] in forbidden]:
            raise self._error(
                f"{self.chat._decode([self.ids[wrong[0]]])!r}, which nobody says, is trained on", wrong[0]
            )
        twice = [n for n in trained[1:] if self.ids[n] == self.ids[n - 1] == tokenizer.pad_token_id]
        if twice and tokenizer.pad_token not in said:
            raise self._error("padding is trained on", twice[0])

    @property
    def _pads_otherwise(self) -> bool:
        """Whether padding has a token of its own, which ends nothing."""
        pad_id = self.chat.tokenizer.pad_token_id
        ends = [self.chat.tokenizer.eos_token_id] if self.example.kind != "messages" else self.chat.stop_token_ids
        return pad_id is not None and pad_id not in ends

    # --- conversations

    def _check_turns(self, runs: list[_Span]) -> None:
        messages = self.example.messages
        first = self.example.num_prompt_messages
        awaited = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        for n, run in enumerate(runs):
            if not awaited:
                raise self._error("more is trained on than the assistant's turns", run[0])
            is_cut = self.is_truncated and n == len(runs) - 1
            turns = self._match(run, awaited, is_cut=is_cut, is_alone=len(runs) - n >= len(awaited))
            awaited = awaited[len(turns) :]
            self._check_edges(run, messages[turns[0]].get("content") or "", is_cut=is_cut)
        if awaited and not self.is_truncated:
            raise self._error(f"message {awaited[0] + 1}, the assistant's, is not trained on")

    def _match(self, run: _Span, awaited: list[int], *, is_cut: bool, is_alone: bool) -> list[int]:
        """The messages that one run of trained tokens holds, in order; at least one."""
        text, at, matched = _squeeze(self._text(*run)), 0, list[int]()
        ends = [_squeeze(end) for end in self.chat._probe.ends]
        rest, told = "", 0
        for i in awaited[:1] if is_alone else awaited:
            message = self.example.messages[i]
            found = self._place(text, at, i, is_cut=is_cut)
            if found is None:
                break
            if matched and found[0] == found[1] and not any(end in text[at:] for end in ends):
                break  # it says nothing, and nothing is left of this run: it has one of its own
            if not matched or not _is_simple(message):
                self._check_front(text[at : found[0]], i, run)
            rest += text[at : found[0]]
            told = found[1]
            at = told + next((len(end) for end in ends if text.startswith(end, told)), 0)
            matched.append(i)
        if not matched:
            raise self._error(
                f"message {awaited[0] + 1}, the assistant's, is not trained on as it is said: "
                f"{_shorten(self.example.messages[awaited[0]].get('content') or '')!r} is not in the trained text",
                run[0],
            )
        self._check_back(text[told:], matched[-1], run)
        self._check_foreign(rest + "\n" + text[told:], run)
        return matched

    def _place(self, text: str, at: int, i: int, *, is_cut: bool) -> _Span | None:
        """Where a run holds message i's words, [start, end); in one that is cut off, a beginning of them will do."""
        message = self.example.messages[i]
        content = _squeeze(message.get("content") or "")
        words = [content, _squeeze((message.get("content") or "").split("</think>")[-1])]
        names = [_squeeze(call.get("function", call)["name"]) for call in message.get("tool_calls") or []]
        for word in words if content else names[:1] or [""]:
            if word in text[at:]:
                start = text.index(word, at)
                called = [text.find(name, start + len(word)) + len(name) for name in names if name in text[start:]]
                if len(called) == len(names) or is_cut or not content:
                    return start, max([start + len(word), *called])
        if not is_cut:
            return None
        fronts = ["", *[_squeeze(lead) for _, lead in self.chat._probe.fronts]]
        bare = [text[at:].removeprefix(front) for front in fronts]
        if any(front.startswith(text[at:]) for front in fronts) or any(
            word.startswith(part) or part.startswith(word) for word in words for part in bare
        ):
            return at, len(text)
        return None if _is_simple(message) else (at, len(text))

    def _check_front(self, front: str, i: int, run: _Span) -> None:
        """What is trained before a message's words: the template's marks of a turn, nothing of what comes before."""
        probe = self.chat._probe
        leads = {_squeeze(lead) for _, lead in probe.fronts}
        if not front or front in leads:
            return
        message = self.example.messages[i]
        openings = {_squeeze(opening) for opening, _ in probe.fronts} | {_squeeze(probe.header)}
        asked = _squeeze((self.example.messages[i - 1].get("content") or "") if i else "")
        # After the reasoning, a template may open the answer in the way in which it opens a turn.
        if any(opening and opening in front.partition(_reasoning(message) or "\n")[0] for opening in openings):
            raise self._error("the header of a turn is trained on", run[0])
        if asked and _is_simple(self.example.messages[i]) and asked.endswith(front):
            raise self._error(
                f"the end of message {i}, the {self.example.messages[i - 1]['role']}'s, is trained on", run[0]
            )

    def _check_back(self, back: str, i: int, run: _Span) -> None:
        """What is trained after a message's words: its end, once, and nothing after it."""
        said = _squeeze("".join(m.get("content") or "" for m in self.example.messages if m["role"] == "assistant"))
        ends = [_squeeze(end) for end in self.chat._probe.ends if _squeeze(end) not in said]
        if not back or back in self.chat._probe.backs or back in ends:
            return
        if any(back.find(end) not in (-1, len(back) - len(end)) for end in ends if end):
            raise self._error(f"more is trained on than message {i + 1} and its end token", run[1] - 1)

    def _check_foreign(self, rest: str, run: _Span) -> None:
        """The trained text apart from the assistant's words must not hold anyone else's."""
        probe = self.chat._probe
        own = _squeeze(str([m for m in self.example.messages if m["role"] == "assistant"]))
        own += "".join(map(_squeeze, [*probe.ends, *probe.backs, *(part for front in probe.fronts for part in front)]))
        for i, message in enumerate(self.example.messages):
            words = _squeeze(message.get("content") or "")
            if message["role"] != "assistant" and len(words) >= _MIN_FOREIGN and words in rest and words not in own:
                raise self._error(f"message {i + 1}, the {message['role']}'s, is trained on", run[0])

    def _check_edges(self, run: _Span, content: str, *, is_cut: bool) -> None:
        """The run's two ends: the header before it whole and untrained, its own front whole, its end token trained."""
        before, text, after = self._text(0, run[0]), self._text(*run), self._text(run[1], len(self.ids))
        first, last = self._text(run[0], run[0] + 1), self._text(run[1] - 1, run[1])
        ends = self.chat._probe.ends
        for form in (str, _despace):
            openings = [form(opening) for opening, _ in self.chat._probe.fronts if opening]
            is_opened = any(form(before).endswith(opening) for opening in openings)
            for opening, lead in [(form(o), form(lead)) for o, lead in self.chat._probe.fronts]:
                over = _overlap(form(before), form(text), opening)
                if over == len(opening) and not (opening.isspace() and not form(content).startswith(opening)):
                    over = 0  # words that read like a header, or one that `_check_front` has seen
                if over and not is_opened and not (opening[-over:].isspace() and len(form(first)) > over):
                    raise self._error(f"{opening[-over:]!r}, of the header of the turn, is trained on", run[0])
                is_late = opening and lead and form(before).endswith(opening + lead)
                late = 0 if is_late else _overlap(form(before), form(text), opening + lead)
                if is_late or (opening and 0 < late < len(lead)):
                    raise self._error(f"the front of the turn, {lead[: len(lead) - late]!r}, is not trained on", run[0])
        ended = [end for end in ends if _squeeze(text).endswith(_squeeze(end))]
        if ended and not last.strip():
            raise self._error("what follows the end token is trained on", run[1] - 1)
        if not ended and not is_cut and any(_overlap(_squeeze(text), _squeeze(after), _squeeze(end)) for end in ends):
            raise self._error("the end token of the turn is not trained on", run[1] - 1)

    # --- the other kinds

    def _check_completion(self, runs: list[_Span]) -> None:
        text, wanted = _squeeze(self._text(*runs[0])), _squeeze(self.example.completion)
        eos = _squeeze(self.chat.tokenizer.eos_token or "")
        is_whole = text in (wanted + eos, wanted)
        if len(runs) > 1 or not (is_whole or (self.is_truncated and (wanted + eos).startswith(text))):
            raise self._error("the trained text is not the completion", runs[0][0])
        if text == wanted and eos and not wanted.endswith(eos) and not self.is_truncated:
            raise self._error("the end token after the completion is not trained on", runs[0][1] - 1)

    def _check_whole(self) -> None:
        tokenizer = self.chat.tokenizer
        outside = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
        for n, label in enumerate(self.labels):
            if label == IGNORED and self.ids[n] not in outside:
                raise self._error("a text row is trained on whole, and a part of it is masked", n)

    # --- evidence

    def _text(self, a: int, b: int) -> str:
        """The text of tokens [a, b), as it stands in the row's."""
        return self.chat._decode(self.ids[:b])[len(self.chat._decode(self.ids[:a])) :]

    def _error(self, what: str, at: int | None = None) -> MaskError:
        """With the row around token `at`, what is trained on between ⟦ and ⟧."""
        around = range(max(0, (at or 0) - 24), min(len(self.ids), len(self.labels), (at or 0) + 24))
        shown = ""
        for a, b, is_trained in _runs([self.labels[n] != IGNORED for n in around]):
            text = self.chat._decode(self.ids[around[0] + a : around[0] + b])
            shown += f"⟦{text}⟧" if is_trained else text
        return MaskError(
            f"{_where(self.example)}: {what}; trained between ⟦⟧: {_shorten(shown, 600)!r}",
            hint="this would teach the model other things than the data says; report it with the chat template",
        )


def _placeholder_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that stand for images, video and audio, as far as the tokenizer names them."""
    names = (
        f"{kind}_token{which}" for kind in ("image", "video", "audio", "vision_bos", "vision_eos") for which in ("_id",)
    )
    ids = {getattr(tokenizer, name, None) for name in names}
    return frozenset(token for token in ids if isinstance(token, int))


def _is_simple(message: Mapping[str, Any]) -> bool:
    """Whether a message is its content, without reasoning or calls around it."""
    has_more = any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning", "thinking"))
    return not has_more and "</think>" not in (message.get("content") or "")


def _reasoning(message: Mapping[str, Any]) -> str:
    """What a message thinks, white space left out, whichever way it is written down."""
    named = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), "")
    inside, _, answer = (message.get("content") or "").rpartition("</think>")
    return _squeeze(str(named) or (inside.removeprefix("<think>") if answer != message.get("content") else ""))


def _overlap(before: str, after: str, text: str) -> int:
    """How many of `text`'s last characters lie in `after`, where `text` lies across the two; 0 where it does not."""
    return next((n for n in range(1, len(text) + 1) if after.startswith(text[-n:]) and before.endswith(text[:-n])), 0)


def _despace(text: str) -> str:
    return text.replace(" ", "").replace("▁", "")


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length // 2] + " … " + text[-length // 2 :]


# --- learning a template ---------------------------------------------------------------------------------------------


def _learn(chat: ChatFormat) -> _Probe:
    """Render a question and an answer of marks, and see what comes around them."""
    mark, user = _MARKS[0], {"role": "user", "content": _USER_MARK}
    answer = {"role": "assistant", "content": mark}
    whole = chat.render([user, answer])
    if mark not in whole or _USER_MARK not in whole:
        raise ValueError("it leaves out what the user or the assistant says")
    told = _after(chat.render([user]), _USER_MARK)
    asked = _after(chat.render([user], prompt=True), _USER_MARK)
    between = _after(whole, _USER_MARK).split(mark)[0]
    ignores_prompt = told == asked
    if ignores_prompt and between.startswith(asked) and between[len(asked) :].strip():
        # A space that leads the answer is part of it: that is how it is tokenized.
        asked = asked + between[len(asked) :].rstrip(" ")
    fronts = [_front(asked, between)]
    try:
        middle = chat.render([user, answer, {"role": "user", "content": _MARKS[1]}])
    except _TEMPLATE_ERRORS:
        middle = ""
    if mark in middle:
        fronts.append(_front(asked, _after(middle, _USER_MARK).split(mark)[0]))
    front = fronts[0][0]
    header = front[_common(front, told) :]
    ends = _learn_ends(chat, whole, middle, told)
    tails = [_squeeze(_after(whole, mark)), _squeeze(_after(middle, mark)) if mark in middle else ""]
    tail = _after(whole, mark)
    return _Probe(
        ends=ends,
        trail=tail[tail.find(ends[0]) + len(ends[0]) :] if ends else "",
        backs=tuple(
            {tail[: tail.find(end) + len(end)] for tail in tails for end in map(_squeeze, ends) if end in tail}
        ),
        header=header,
        ignores_prompt=ignores_prompt and bool(header),
        fronts=tuple(dict.fromkeys(fronts)),
        prompt_extra=asked[len(front) :],
    )


def _front(asked: str, between: str) -> tuple[str, str]:
    n = _common(asked, between)
    return between[:n], between[n:]


def _learn_ends(chat: ChatFormat, whole: str, middle: str, told: str) -> tuple[str, ...]:
    """What ends a turn: the last one, one in the middle, and a call of a tool, which templates may tell apart."""
    added = _added_tokens(chat.tokenizer)
    tail = _after(whole, _MARKS[0])
    first = _first_of(added, tail) or tail.strip()
    if not first:
        return ()
    eos = chat.tokenizer.eos_token or ""
    if tail.partition(first)[2].startswith(eos):  # a turn of several parts ends in two tokens, the second of them eos
        first += eos
    ends = [first]
    if middle and first not in (inner := _after(middle, _MARKS[0]).split(_MARKS[1])[0]):
        other = _first_of(added, inner)
        if other and other == _first_of(added, told):  # ends the user's turn too, so it is not a header
            ends.append(other)
    call = {"type": "function", "id": "call00001", "function": {"name": _MARKS[0], "arguments": {"a": _MARKS[0]}}}
    try:
        called = chat.render(
            [{"role": "user", "content": _USER_MARK}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
    except _TEMPLATE_ERRORS:
        return tuple(ends)
    tail = _after(called, _MARKS[0]) if _MARKS[0] in called else first
    if not any(end in tail for end in ends) and (last := _first_of(added, tail)):
        ends.append(last)
    return tuple(ends)


def _added_tokens(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)


def _first_of(tokens: Iterable[str], text: str) -> str:
    found = [(text.find(token), -len(token), token) for token in tokens if token.strip() and token in text]
    return min(found)[2] if found else ""


def _headers(probe: _Probe) -> list[str]:
    """What opens a turn, the longest first: as in the last turn, and as in one before it."""
    shared = len(probe.fronts[0][0]) - len(probe.header)
    found = {probe.header, *[front[shared:] for front, _ in probe.fronts]}
    return sorted((header for header in found if header.strip()), key=len, reverse=True)


def _as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def _marked(message: Mapping[str, Any], mark: str) -> list[dict[str, Any]]:
    """The message with its words, and the calls that it makes, exchanged for a mark."""
    marked = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        marked["content"] = mark
    if calls:
        marked["tool_calls"] = [_marked_call(call, mark) for call in calls]
    return [marked]


def _marked_call(call: Mapping[str, Any], mark: str) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = dict.fromkeys(function.get("arguments") or {}, mark) or {mark: mark}
    changed = {**function, "name": mark, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _shows(turn: str, message: Mapping[str, Any]) -> bool:
    """Whether a rendered turn holds the message's words, as they are."""
    content = (message.get("content") or "").strip()
    calls = message.get("tool_calls") or []
    return content in turn and all(call.get("function", call)["name"] in turn for call in calls)


def _has_words(message: Mapping[str, Any]) -> bool:
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


# --- texts, tokens ---------------------------------------------------------------------------------------------------


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The length of what two sequences begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _after(text: str, mark: str) -> str:
    return text[text.rfind(mark) + len(mark) :]


def _squeeze(text: str) -> str:
    """Without white space; SentencePiece's decoders write a space for `▁`, even in `<｜end▁of▁sentence｜>`."""
    return "".join(text.replace("▁", " ").split())


def _runs(trained: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for n in range(1, len(trained) + 1):
        if n == len(trained) or trained[n] != trained[start]:
            yield start, n, trained[start]
            start = n


def _ends(text: str, offsets: Sequence[_Span]) -> list[int] | None:
    """Where each token ends; None unless the tokens account for the whole text, white space aside, in order."""
    ends: list[int] = []
    previous = 0
    for start, end in offsets:
        if end < previous or start > end or (start > previous and not text[previous:start].isspace()):
            return None
        ends.append(end)
        previous = end
    return ends if previous <= len(text) and not text[previous:].strip() else None


def _range_by_offset(text: str, ends: list[int], span: _Span) -> _Span | None:
    """The tokens of a span. A token that reaches beyond it belongs to it if all that it takes along is white space."""
    first, last = bisect_right(ends, span[0]), bisect_right(ends, span[1])
    before = text[ends[first - 1] if first else 0 : span[0]]
    beyond = last < len(ends) and (ends[last - 1] if last else 0) < span[1]
    after = text[span[1] : ends[last]] if beyond else ""
    if before.strip() or after.strip():
        return None
    return first, last + (1 if beyond else 0)


def _halve(text: str) -> tuple[str, str]:
    """A text cut at the white space nearest its middle."""
    middle = len(text) // 2
    gaps = [n for n, char in enumerate(text) if char.isspace() and text[:n].strip() and text[n:].strip()]
    cut = min(gaps, key=lambda n: abs(n - middle), default=middle)
    return text[:cut], text[cut:].strip()


def _where(example: Example) -> str:
    return f"data set {example.dataset_index + 1}, row {example.row_index + 1}"


def trained_share(labels: Iterable[Sequence[int]]) -> float:
    """Which part of a batch's tokens is trained on, padding counted as not."""
    rows = [list(row) for row in labels]
    total = sum(map(len, rows))
    return sum(label != IGNORED for row in rows for label in row) / total if total else 0.0
