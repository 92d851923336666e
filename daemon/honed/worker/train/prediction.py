"""Predictions for held-out examples: before training, during it, and at the end.

They are greedy unless the job asks for sampling, in batches of similar length padded on the left, without autocast
unless the job asks for it. They leave no trace in the run: mode, cache, and the random state of Python, NumPy and torch
are restored, so that the losses are those of a run without predictions.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from honed.inputs.media import Media
from honed.inputs.row import Example
from honed.job.out_of_memory import MEDIA_PREDICTION_BATCH_SIZE, PREDICTION_BATCH_SIZE
from honed.job.plan_file import Precision
from honed.plan.precision import HALF
from honed.spec.spec import SampleSpec
from honed.system.error import BY_CODE, HonedError, InternalError, said
from honed.text.chat import ChatFormat
from honed.worker import message
from honed.worker.cause import is_out_of_memory
from honed.worker.model import cast, division, generation
from honed.worker.model.dtypes import Rule
from honed.worker.rows import prefix
from honed.worker.rows.group import Groups
from honed.worker.rows.processor import Processor
from honed.worker.stop import Stop

message.carry(Media)


@message.carry
@dataclass(frozen=True)
class Question:
    """A prompt for the model, and the expected answer."""

    prompt: str  #: for people: `[image /srv/images/7.png]` in the place of an image
    input_ids: list[int]
    ground_truth: str
    text: str = ""  #: as rendered, beside media
    media: tuple[Media, ...] = ()
    groups: frozenset[str] = frozenset()  #: see rows/group.py

    @property
    def length(self) -> tuple[int, int]:
        """A measure of its length, for batches with little padding: its media, then its tokens or, with media, text."""
        return len(self.media), len(self.input_ids) or len(self.text)


@dataclass(frozen=True)
class Answers:
    """One round of predictions, with None for each that failed."""

    texts: list[str | None]
    fault: HonedError | None = None  #: of the first that failed
    unasked: frozenset[int] = frozenset()  #: places of the questions for which no time was left

    @property
    def num_failed(self) -> int:
        return sum(text is None for text in self.texts) - len(self.unasked)


def choose(
    examples: Sequence[Example],
    chat: ChatFormat,
    *,
    num_samples: int,
    seed: int,
    groups: Groups | None = None,
    group: str = "",
    evenly: bool = False,
) -> list[Question]:
    """Choose the same examples for the whole life of a job, in every attempt: of `group` if one is named, and with
    `evenly` as many of every data set, as far as it has them.
    """
    among = groups.indices(group) if groups is not None and group else range(len(examples))
    indices = random.Random(seed).sample(among, min(num_samples, len(among)))
    if evenly and groups is not None and len(groups.datasets) > 1:
        by_dataset: dict[int, list[int]] = {}
        for index in random.Random(seed).sample(among, len(among)):
            by_dataset.setdefault(int(groups.numbers[index]), []).append(index)
        turns = (index for turn in itertools.zip_longest(*by_dataset.values()) for index in turn if index is not None)
        indices = list(itertools.islice(turns, num_samples))
    asked = [examples[index] for index in sorted(indices)]
    return [
        replace(_question(example, chat), groups=groups.of(example) if groups is not None else frozenset())
        for example in asked
    ]


def _question(example: Example, chat: ChatFormat) -> Question:
    if not example.media:
        return Question(*chat.prompt(example))
    text, media, truth = chat.asked(example)
    return Question(chat.places.shown(text, media), [], truth, text, media)


def from_prompts(prompts: Sequence[str], chat: ChatFormat) -> list[Question]:
    """Make questions from the job's own prompts: a user's message if there is a chat template, else plain text."""
    questions = []
    for text in prompts:
        if chat.tokenizer.chat_template:
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "?"}]
            example = Example("messages", messages=messages)
        else:
            example = Example("prompt_completion", prompt=text, completion="?")
        prompt, input_ids, _ = chat.prompt(example)
        questions.append(Question(prompt, input_ids, ""))
    return questions


class Computing:
    """The dtypes in which predictions compute, and their autocast."""

    def __init__(self, precision: Precision, *, matches_autocast: bool) -> None:
        self.precision = precision
        self.dtype = cast.computed_dtype(precision)
        #: The dtype of the trainer's autocast, and below the same if predictions use that autocast.
        self._trainers_dtype = "bfloat16" if precision.bf16 else "float16" if precision.fp16 else None
        # FlashAttention takes no float32: weights that are trained in it need autocast, here as in training.
        is_wide_flash = precision.attn_implementation == "flash_attention_2" and precision.load_dtype == "float32"
        self._matched_dtype = self._trainers_dtype if matches_autocast or is_wide_flash else None

    @property
    def may_match(self) -> bool:
        """True if training has an autocast that predictions do not use."""
        return self._trainers_dtype is not None and self._matched_dtype is None

    def autocast(self, model: Any) -> Any:
        """Return the autocast for generation: off, or the trainer's if the job says match or FlashAttention needs it.

        It is on, as in training, where whole modules or biases are trained in float32 beside a half-precision base.
        LoRA layers bring the two dtypes together themselves, and a quantized layer computes in its own: neither needs
        autocast, and with another dtype than the model's it breaks the latter.
        """
        import torch

        if self._matched_dtype is not None:
            # The cache would keep a copy of every layer of a divided model beyond its own pass.
            kept = not division.is_divided(model)
            return torch.autocast(model.device.type, getattr(torch, self._matched_dtype), cache_enabled=kept)
        takes_half = self.precision.attn_implementation == "flash_attention_2"
        if takes_half and self.dtype not in HALF and self._trainers_dtype is not None:
            return torch.autocast(model.device.type, dtype=getattr(torch, self._trainers_dtype))
        dtype = getattr(torch, self.dtype)
        is_mixed = any(
            parameter.requires_grad and parameter.dtype != dtype and "lora_" not in name
            for name, parameter in model.named_parameters()
        )
        return torch.autocast(model.device.type, dtype=dtype if is_mixed else None, enabled=is_mixed)


@dataclass
class Batches:
    """Questions as batches for the model, padded on the left. A prompt that is cut is reported once."""

    tokenizer: Any
    dtype: str
    max_new_tokens: int
    processor: Processor | None
    warn: Callable[[str], None]
    _has_told_cut: bool = False

    def of(self, model: Any, questions: Sequence[Question]) -> dict[str, Any]:
        """Return the questions as one batch, padded on the left, on the model's device."""
        import torch

        room = _room(model, self.max_new_tokens)
        pad_id = self.tokenizer.pad_token_id
        if any(question.media for question in questions):
            return self._media_inputs(model, questions, room)
        self._tell_cut(questions, room)
        rows = [question.input_ids[-room:] for question in questions]
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        return {"input_ids": input_ids, "attention_mask": mask}

    def _media_inputs(self, model: Any, questions: Sequence[Question], room: int) -> dict[str, Any]:
        import torch

        from honed.worker.rows.collator import merge

        assert self.processor is not None
        self._tell_cut([question for question in questions if not question.media], room)
        rows = [
            self.processor.process(question.text, question.media).tensors
            if question.media
            else {"input_ids": torch.tensor([question.input_ids[-room:]])}
            for question in questions
        ]
        batch = merge(
            rows,
            self.processor.names_by_token,
            side="left",
            dtype=self.dtype,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in batch.items()}

    def _tell_cut(self, questions: Sequence[Question], room: int) -> None:
        longest = max((len(question.input_ids) for question in questions), default=0)
        if longest > room and not self._has_told_cut:
            self._has_told_cut = True
            self.warn(
                f"a prompt of {longest} tokens is truncated at its start: with an answer of {self.max_new_tokens} "
                f"tokens the model has only {room} positions left for it"
            )


def _room(model: Any, max_new_tokens: int) -> int:
    """Return the number of tokens that a prompt may have: in some families positions are learned, and limited."""
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    return max(int(limit) - max_new_tokens, 1)


@dataclass
class Faults:
    """Failures of predictions: the first of all is reported, the first of every round is kept."""

    warn: Callable[[str], None]
    may_match: bool  #: training has an autocast that predictions do not use
    first: HonedError | None = None  #: of this round
    _has_warned: bool = False
    _input_dtypes: dict[str, str] = field(default_factory=dict)  # of the last batch, by name

    def begin(self) -> None:
        """Begin a round."""
        self.first = None

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Note the dtypes of a batch that is about to be answered."""
        self._input_dtypes = {name: str(value.dtype) for name, value in inputs.items() if hasattr(value, "dtype")}

    def report(self, model: Any, error: Exception) -> None:
        import torch

        if self._has_warned:
            return
        self._has_warned = True
        dtypes = sorted({str(parameter.dtype) for parameter in model.parameters()})
        autocast = torch.is_autocast_enabled(model.device.type)
        inputs = ", ".join(f"{name} {dtype}" for name, dtype in self._input_dtypes.items()) or "no inputs yet"
        with contextlib.suppress(OSError):  # worker.log may lie on a disk that is full
            traceback.print_exception(error)
        self.warn(
            f"a prediction failed: {type(error).__name__}: {said(error)} (model {', '.join(dtypes)} on {model.device}; "
            f"{inputs}; autocast {'on' if autocast else 'off'}): {self._remedy(error)}"
        )

    def keep(self, error: Exception) -> None:
        """Keep the first failure of a round."""
        self.first = self.first or self._without_frames(error)

    def _without_frames(self, error: Exception) -> HonedError:
        """Return the error without its traceback, which holds on to tensors."""
        if isinstance(error, HonedError):
            return BY_CODE[error.code](error.said, hint=error.hint, fix=error.fix)
        words = said(error, is_brief=True)
        return InternalError(f"{type(error).__name__}: {words}".removesuffix(": "), hint=self._remedy(error))

    def _remedy(self, error: Exception) -> str:
        if isinstance(error, HonedError) and error.hint:
            return error.hint
        if is_out_of_memory(error):
            return "a smaller predictions.batch_size or predictions.max_new_tokens needs less memory"
        if _DTYPES.search(str(error)) and self.may_match:
            return "set `predictions: {autocast: match}` to use the autocast of training"
        return "its traceback is in worker.log (honectl logs --raw)"


#: Words in torch's messages about two dtypes that do not go together.
_DTYPES = re.compile(r"dtype|scalar ?type|BFloat16|Half", re.IGNORECASE)


class Predictor:
    """Generation of answers. The first failure is reported through `warn`, with the dtypes involved."""

    def __init__(
        self,
        chat: ChatFormat,
        precision: Precision,
        *,
        max_new_tokens: int,
        stop: Stop,
        warn: Callable[[str], None],
        processor: Processor | None = None,
        sample: SampleSpec | None = None,
        matches_autocast: bool = False,
        batch_size: int | None = None,
        has_ladder: bool = False,
        settings: Literal["greedy", "base"] = "greedy",
    ) -> None:
        #: True if the base model's own generation settings apply.
        self._is_bases = settings == "base"
        self._batch_size = batch_size
        #: True if the next attempt takes smaller batches where memory runs out in one.
        self._has_ladder = has_ladder
        self._sample = sample
        self._computing = Computing(precision, matches_autocast=matches_autocast)
        self._batches = Batches(chat.tokenizer, self._computing.dtype, max_new_tokens, processor, warn)
        self._faults = Faults(warn, self._computing.may_match)
        #: The trainer's optimizer, which may keep a part of the weights; None before there is one.
        self.optimizer: Callable[[], Any] = lambda: None
        self.rule: Rule | None = None  #: the dtypes in which full fine-tuning's weights are saved
        #: True once the time of the run is over: no further batch is asked.
        self.is_late: Callable[[], bool] = lambda: False
        self._tokenizer = chat.tokenizer
        self._stop_ids = chat.stop_token_ids
        self._max_new_tokens = max_new_tokens
        self._stop = stop
        self._generating: dict[str, Any] = {}  #: further arguments of `generate`

    @property
    def asks_several(self) -> bool:
        """False if questions are asked one at a time."""
        return self._batch_size != 1

    def ask_singly(self) -> None:
        """Ask questions one at a time from now on: padding would change it."""
        self._batch_size = 1

    def ask(self, model: Any, questions: Sequence[Question]) -> Answers:
        """Answer every question, with None for an answer that failed.

        Raises InterruptedRunError between batches once asked to stop, and the out-of-memory error of a batch of several
        where the job's ladder continues from there.
        """
        import torch

        texts: list[str | None] = [None] * len(questions)
        self._faults.begin()
        self._stop_ids = list(dict.fromkeys([*self._stop_ids, *generation.end_ids(model)]))
        with self._stop.phase("predict"), self._computing_as_saved(model):
            has_media = any(question.media for question in questions)
            size = self._batch_size or (MEDIA_PREDICTION_BATCH_SIZE if has_media else PREDICTION_BATCH_SIZE)
            order = list(range(len(questions)))
            if len(order) > size:  # the longest first: if memory runs out, then at once
                order.sort(key=lambda index: questions[index].length, reverse=True)
            unasked = frozenset[int]()
            for start in range(0, len(order), size):
                if self._is_over():
                    unasked = frozenset(order[start:])
                    break
                if self._sample is not None or self._is_bases:  # by position: samples are the same in every round
                    torch.manual_seed((self._sample.seed if self._sample is not None else 0) + start)
                indices = order[start : start + size]
                answers = self._ask_batch(model, [questions[index] for index in indices])
                for index, text in zip(indices, answers, strict=True):
                    texts[index] = text
        return Answers(texts, self._faults.first, unasked)

    @contextlib.contextmanager
    def _computing_as_saved(self, model: Any) -> Iterator[None]:
        import torch

        neutral = contextlib.nullcontext() if self._is_bases else generation.neutral(model)
        saved = cast.as_saved(model, self._computing.precision, self.rule, self.optimizer())
        with undisturbed(model), torch.no_grad(), saved, self._computing.autocast(model), neutral:
            yield

    def first_logits(self, model: Any, questions: Sequence[Question]) -> Any:
        """Return the logits of the two likeliest first tokens of every answer, in float32."""
        import torch
        from transformers import GenerationConfig

        with self._computing_as_saved(model):
            inputs = self._inputs(model, questions)
            config = GenerationConfig(
                max_new_tokens=2,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                pad_token_id=self._tokenizer.pad_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )
            output = model.generate(**inputs, generation_config=config, **self._generating)
        return torch.stack(output.logits, dim=1).float()

    def _is_over(self) -> bool:
        """Raise InterruptedRunError once asked to stop; return True once no time is left."""
        self._stop.check()
        return self.is_late()

    def _ask_batch(self, model: Any, questions: Sequence[Question]) -> list[str | None]:
        try:
            return self._generate(model, questions)
        except Exception as error:  # whatever it is, it must not cost the run
            # Single questions would work, too, but only after the same batch has failed in every round of the run.
            if self._has_ladder and len(questions) > 1 and is_out_of_memory(error):
                raise
            self._faults.report(model, error)
            if len(questions) == 1:
                self._faults.keep(error)
                return [None]
        return [answer for question in questions for answer in self._ask_batch(model, [question])]

    def _inputs(self, model: Any, questions: Sequence[Question]) -> dict[str, Any]:
        inputs = prefix.asked(model, self._batches.of(model, questions))
        if generation.stop_strings(model):  # generate searches for them in the text
            inputs["tokenizer"] = self._tokenizer
        return inputs

    def _generate(self, model: Any, questions: Sequence[Question]) -> list[str | None]:
        from transformers import GenerationConfig

        inputs = self._inputs(model, questions)
        self._faults.note(inputs)
        width = inputs["input_ids"].shape[1]
        config = GenerationConfig(
            max_new_tokens=self._max_new_tokens,
            **self._drawing(),
            use_cache=True,
            pad_token_id=self._tokenizer.pad_token_id,
            bos_token_id=self._tokenizer.bos_token_id,
            eos_token_id=self._stop_ids or None,
        )
        output = model.generate(**inputs, generation_config=config, **self._generating)
        return [self._decode(row) for row in output[:, width:].tolist()]

    def _drawing(self) -> dict[str, Any]:
        if (sample := self._sample) is None:
            return {} if self._is_bases else {"do_sample": False, "num_beams": 1}
        # transformers would take the 50 likeliest tokens alone.
        return {"do_sample": True, "temperature": sample.temperature, "top_p": sample.top_p, "top_k": 0, "num_beams": 1}

    def _decode(self, ids: list[int]) -> str:
        end = next((n for n, token in enumerate(ids) if token in self._stop_ids), len(ids))
        return str(self._tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Put the model in eval mode with its own forward; afterwards restore everything."""
    modes = [(module, module.training) for module in model.modules()]
    use_cache = getattr(model.config, "use_cache", None)
    # accelerate's autocast is not a context that could be left: it is inside the forward that it has put in the place
    # of the model's own.
    wrapped = model.__dict__.get("forward") if "_original_forward" in model.__dict__ else None
    with random_state_kept():
        try:
            model.eval()
            if wrapped is not None:
                model.forward = model._original_forward
            yield
        finally:
            if wrapped is not None:
                model.forward = wrapped
            if use_cache is not None:
                model.config.use_cache = use_cache
            for module, training in modes:
                module.training = training


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch afterwards."""
    import numpy as np
    import torch

    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
