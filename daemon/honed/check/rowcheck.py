"""A job's first rows, rendered by the chat template and counted as by the worker, before any model is loaded.

    template, tokenizer.json ──► tokenfile ──► chat.ChatFormat.encode ──► rows refused, left out, cut off

The template is the only code of the checkpoint that runs, in a sandbox. If the checkpoint's files are ambiguous, no
row is rendered or refused here: the worker encodes every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from honed.check import datacheck, templatecheck
from honed.check.policy import Named, Policy
from honed.inputs import basemodel, dataset, modality
from honed.inputs.basemodel import BaseModelInfo
from honed.inputs.datadir import files_of
from honed.inputs.media import PLURAL
from honed.inputs.row import Example
from honed.plan import parameter
from honed.spec import kind
from honed.spec.media import Kind
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system import quote
from honed.system.error import DatasetError, ModelError
from honed.text.asking import Mismatches
from honed.text.omission import MAX_SILENCED_SHARE, SILENCED_HINT, SilencedError, Tally

if TYPE_CHECKING:
    from honed.text.chat import ChatFormat, Encoded

#: Rows of a data set that are rendered, at most.
NUM_ROWS = 48
#: Characters of one rendered row, and of all together. In the total a row counts once per turn of the assistant,
#: since it is rendered again for every turn: this many take about half a second.
MAX_CHARS, MAX_WORK = 200_000, 250_000


@dataclass
class _Looked:
    """The results of rendering one data set's first rows."""

    encoded: list[Encoded] = field(default_factory=list)
    refused: list[DatasetError] = field(default_factory=list)
    lost: Tally = field(default_factory=Tally)  #: content that the template omits
    mismatches: Mismatches = field(default_factory=Mismatches)  #: turns whose prompt differs from training

    @property
    def num_rows(self) -> int:
        return len(self.encoded) + len(self.refused)


def check(
    job_spec: JobSpec, model: BaseModelInfo | None, rights: Policy, *, cache: datacheck.Cache | None = None
) -> list[str]:
    """Return warnings. Raises DatasetError, which names the data set, if none of its first rows can be trained on, and
    ModelError for a template or a tokenizer with which no row can be."""
    if model is None or not kind.of(job_spec).trains or job_spec.trust_remote_code:
        return []
    from honed.text.chat import ChatFormat  # noqa: PLC0415  (most checks end before they need jinja2)
    from honed.text.tokenfile import read  # noqa: PLC0415

    tokenizer = read(model.path, templatecheck.source(job_spec, model), eos_token=job_spec.training.eos_token)
    if tokenizer is None:
        return []
    try:
        warnings = list(_check(job_spec, model, rights, ChatFormat.of(job_spec, tokenizer), cache))
    except (MemoryError, RecursionError) as error:
        short = "memory" if isinstance(error, MemoryError) else "depth"
        raise ModelError(
            f"{_template(job_spec, model)}: rendering the first rows needs more {short} than a check may use",
            hint="use another template with chat_template:",
        ) from error
    if tokenizer.fault is not None:
        raise tokenizer.fault
    return [*([f"{model.path}: {tokenizer.note}"] if tokenizer.note else []), *warnings]


def _template(job_spec: JobSpec, model: BaseModelInfo) -> str:
    if job_spec.training_chat_template is not None:
        return f"training_chat_template: {job_spec.training_chat_template}"
    return f"chat_template: {job_spec.chat_template}" if job_spec.chat_template else f"{model.path}: the chat template"


def _check(
    job_spec: JobSpec, model: BaseModelInfo, rights: Policy, chat: ChatFormat, cache: datacheck.Cache | None
) -> Iterator[str]:
    notes: dict[str, None] = {}
    for key, item in job_spec.each_dataset():
        if item.is_missing:
            continue
        paths = files_of(item)
        done = _key(job_spec, model, chat, datacheck.identity(item, paths, rights)[0])
        if cache is None or (warnings := cache.rendered(done)) is None:
            try:
                warnings = _look(job_spec, model, chat, item, rights)
            except DatasetError as error:
                raise DatasetError(f"{key}: {error.said}", hint=error.hint, fix=error.fix) from error
            if cache is not None and datacheck.identity(item, paths, rights)[1]:
                cache.remember(done, warnings)
        yield from (f"{key}: {text}" for text in warnings[0])
        notes |= dict.fromkeys(warnings[1])
    yield from (f"{_template(job_spec, model)}: {text}" for text in notes)


def _look(
    job_spec: JobSpec, model: BaseModelInfo, chat: ChatFormat, data_spec: DatasetSpec, rights: Policy
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the warnings about a data set's first rows, and the notes about the template that renders them."""
    inspection = dataset.inspect(
        data_spec, num_rows=NUM_ROWS, permit=lambda path: rights.check_read(Named("a row", path, DatasetError))
    )
    _check_places(chat, data_spec, {facts.kind for row in inspection.attached for facts in row.media})
    examples = _examples(inspection)
    seen = _encoded(chat, examples)
    warnings = list(_row_warnings(job_spec, chat, data_spec, seen))
    _check_ids(model, chat, seen)
    is_rendered = any(example.kind == "messages" for example in examples)
    if is_rendered and job_spec.training.eos_token is not None:
        chat.require_end(job_spec.training.eos_token)
    noted = chat.advice.notes(examples, basemodel.end_ids(model.path)) if is_rendered else ()
    notes = [text for level, text in noted if level in ("warning", "hint")]
    return tuple(warnings), tuple(notes)


def _check_places(chat: ChatFormat, data_spec: DatasetSpec, kinds: set[Kind]) -> None:
    """Raise DatasetError for images, videos or sounds for which the template has no placeholder."""
    if not kinds or not chat.tokenizer.counts:
        return
    if lacking := sorted(kinds - chat.renderer.placeholders.keys()):
        raise DatasetError(
            f"{data_spec.path}: rows with {PLURAL[lacking[0]]}, but the chat template has no placeholder for them",
            hint="the base model or its template does not support them: use another template with chat_template:",
        )


def _examples(inspection: dataset.Inspection) -> list[Example]:
    """Return the first rows, up to MAX_WORK, without rows with media: a processor decides how these are encoded."""
    taken: list[Example] = []
    work = 0
    for example in inspection.examples:
        num_chars = _num_chars(example)
        work += num_chars * max(1, len(example.trained_turns))
        if taken and work > MAX_WORK:
            break
        taken += [example] if num_chars <= MAX_CHARS else []
    return taken


def _num_chars(example: Example) -> int:
    texts = [str(message.get("content") or "") for answer in example.answers for message in answer.messages]
    return sum(map(len, [example.prompt, example.completion, example.text, *texts]))


def _encoded(chat: ChatFormat, examples: Sequence[Example]) -> _Looked:
    from honed.text.template import where  # noqa: PLC0415

    seen = _Looked()
    for example in examples:
        if example.kind == "messages":
            chat.renderer.require_template()
        try:
            row = chat.encode(example)
        except DatasetError as error:
            seen.refused.append(error)
            continue
        seen.encoded.append(row)
        seen.lost.add(where(example), row.omitted, example)
        seen.mismatches.add(where(example), row.mismatch, example)
    return seen


def _row_warnings(job_spec: JobSpec, chat: ChatFormat, data_spec: DatasetSpec, seen: _Looked) -> Iterator[str]:
    """Yield warnings about the encoded rows. Raises DatasetError if none of the rows can be trained on."""
    if not seen.num_rows:
        return
    first = f"the first {seen.num_rows} rows" if seen.num_rows > 1 else "the first row"
    if seen.refused and not seen.encoded:
        raise DatasetError(
            f"{data_spec.path}: none of {first} can be trained on: {seen.refused[0].said}", hint=seen.refused[0].hint
        )
    if seen.refused:
        yield (
            f"{data_spec.path}: {len(seen.refused)} of {first} cannot be trained on and are skipped; the first: "
            f"{seen.refused[0].said}"
        )
    if sum(isinstance(error, SilencedError) for error in seen.refused) > MAX_SILENCED_SHARE * seen.num_rows:
        yield f"{data_spec.path}: if more than a tenth of all rows are affected, the job is rejected: {SILENCED_HINT}"
    if lost := seen.lost.message(len(seen.encoded)):
        yield f"{data_spec.path}: {lost}; {chat.advice.on_omissions(seen.lost)}"
    if asked := seen.mismatches.message(len(seen.encoded), chat.advice.on_asking(seen.mismatches)):
        yield f"{data_spec.path}: {asked}"
    cut_at = job_spec.training.cut_at
    if cut_at is None or not chat.tokenizer.counts:
        return
    cut_off = [row for row in seen.encoded if not row.truncate(cut_at).num_predicted]
    cut = [row for row in seen.encoded if row.longest > cut_at]
    longest = max((row.longest for row in seen.encoded), default=0)
    if len(cut_off) == len(seen.encoded):
        raise DatasetError(
            f"{data_spec.path}: nothing in {first} is trained on: the assistant's text begins after token {cut_at}, "
            "where training.max_length truncates",
            hint=f"increase training.max_length: the longest of these rows has {longest} tokens",
            fix={"training.max_length": longest},
        )
    if cut_off:
        yield (
            f"{data_spec.path}: {len(cut_off)} of {first} are skipped: all trained text is after token {cut_at}, where "
            f"training.max_length truncates; the longest has {longest} tokens"
        )
    elif 2 * len(cut) > len(seen.encoded):
        yield (
            f"{data_spec.path}: {len(cut)} of {first} are truncated to training.max_length ({cut_at} tokens), and the "
            f"rest is not trained on; the longest has {longest} tokens"
        )


def _check_ids(model: BaseModelInfo, chat: ChatFormat, seen: _Looked) -> None:
    """Raise ModelError if a row has a token without a row in the embeddings."""
    tokenizer, limit = chat.tokenizer, _num_embeddings(model)
    if limit is None or not tokenizer.counts:
        return
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id} - {None}
    used |= {max(row.input_ids) for row in seen.encoded if row.input_ids}
    if used and max(used) >= limit:
        token = quote.mark(repr(tokenizer.convert_ids_to_tokens(max(used))))
        raise ModelError(
            f"{model.path}: token {token} has the id {max(used)}, but the embeddings have only {limit} rows",
            hint="the tokenizer belongs to another model, or tokens were added to it without resizing the model",
        )


def _num_embeddings(model: BaseModelInfo) -> int | None:
    """Return the number of rows of the language model's embeddings; None if the header does not show it for sure."""
    sizes = {
        item.shape[0]
        for item in parameter.parameters(model)
        if item.role == "embedding"
        and modality.part(item.module) == "language"
        and len(item.shape) == 2
        and item.module.rpartition(".")[2] in ("embed_tokens", "wte", "embed_in", "word_embeddings")
    }
    return sizes.pop() if len(sizes) == 1 and not model.is_quantized else None


def _key(job_spec: JobSpec, model: BaseModelInfo, chat: ChatFormat, rows: bytes) -> bytes:
    """Return a digest of everything that the result depends on."""
    facts = (
        rows,
        str(model.path),
        chat.tokenizer.chat_template,
        chat.renderer.template,
        job_spec.chat_template_kwargs,
        job_spec.training.cut_at,
        _num_embeddings(model),
        chat.tokenizer.identity,
        basemodel.end_ids(model.path),
    )
    return hashlib.sha256(repr(facts).encode(errors="surrogateescape")).digest()
