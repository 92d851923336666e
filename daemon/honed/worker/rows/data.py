"""Conversion of the job's data sets to token ids and labels, with every row accounted for."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from honed.check.policy import Named
from honed.inputs import dataset
from honed.inputs.census import Census
from honed.inputs.datadir import files_of
from honed.inputs.media import MediaError
from honed.inputs.row import Example
from honed.job.shape import Segment
from honed.job.trial import NUM_ROWS
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system import quote
from honed.system.error import DatasetError, ModelError
from honed.text.asking import Mismatches
from honed.text.chat import ChatFormat, Encoded, MediaCutError
from honed.text.omission import MAX_SILENCED_SHARE, SILENCED_HINT, SilencedError, Tally
from honed.text.template import where
from honed.worker.assignment import Assignment
from honed.worker.stop import Stop

if TYPE_CHECKING:
    from honed.worker.rows.collator import Source
    from honed.worker.rows.processor import Processor

#: Rows whose media are decoded in parallel; Pillow, PyAV and torch let other threads run meanwhile.
NUM_THREADS = 4
#: Maximum number of bins in the histogram of the rows' lengths.
NUM_BINS = 40
#: Unusable files that are named; the rest is counted.
MAX_NAMED = 5


@dataclass
class Rows:
    """Rows ready for training or evaluation."""

    dataset: Any  #: datasets.Dataset with input_ids and labels; beside media, `source`: the number of a Source, or -1
    examples: list[Example]  #: as long as the dataset
    truncated: list[bool]
    by_ids: dict[int, int] = field(repr=False)  #: hash of a row's token ids -> its index
    first_segments: list[Segment]  #: the first row
    num_tokens: int = 0
    num_trained_tokens: int = 0
    longest: int = 0  #: tokens of the longest row, as trained on
    num_truncated: int = 0
    longest_uncut: int = 0  #: tokens of the longest row that could be encoded, before truncation
    num_dropped: int = 0  #: skipped rows: nothing was left to train on after truncation, or the template refuses them
    num_cut_off: int = 0  #: skipped because all that would be trained on was cut off
    first_dropped: str = ""
    num_broken: int = 0  #: skipped because a file is missing or cannot be read
    broken: list[str] = field(default_factory=list)  #: the first few, each with its file and its fault
    num_too_long: int = 0  #: skipped because a part of their media would have been cut off
    too_long: list[str] = field(default_factory=list)  #: the first few
    num_silenced: int = 0  #: skipped because the template leaves out all that a turn says
    first_silenced: str = ""
    lost: Tally = field(default_factory=Tally)  #: parts of the other rows that the template leaves out
    mismatches: Mismatches = field(default_factory=Mismatches)  #: rows whose prompt differs from training

    def place(self, input_ids: Sequence[int]) -> int | None:
        return self.by_ids.get(hash(tuple(input_ids)))

    def drop(self, reason: str) -> None:
        self.num_dropped += 1
        self.first_dropped = self.first_dropped or reason


@dataclass
class MediaRows:
    """State of rows with images, videos and sounds, beside their tokens, during encoding and training."""

    processor: Processor
    spec: JobSpec
    sources: list[Source] = field(default_factory=list)  #: of the rows to train on and of those held out


@dataclass(frozen=True)
class Data:
    """All data that the run trains on, and is measured with."""

    train: Rows
    held_out: Rows | None
    counts: dict[str, object]  #: as in the event `data`
    hashes: dict[str, str]  #: sha256 of each file, as it was when it was read
    media: MediaRows | None  #: None where all rows are text
    read: tuple[dataset.Counts, ...]  #: of each data set, including those held out
    num_dropped: int  #: skipped, of the rows to train on and of those held out
    first_dropped: str
    advice: str = ""  #: for rows of which the template leaves out parts
    advice_on_asking: str = ""  #: for rows whose prompt differs from training
    trained: Census = field(default_factory=Census)  #: of the rows to train on, as they were read
    measured: Census = field(default_factory=Census)  #: of those held out

    @property
    def longest(self) -> int:
        """Tokens of the longest row, as it is trained on or evaluated."""
        return max(rows.longest for rows in (self.train, self.held_out) if rows is not None)

    def told(self) -> list[str]:
        """Return messages for the owner about rows that cannot be used, are skipped, or lose parts."""
        both = [rows for rows in (self.train, self.held_out) if rows is not None]
        broken, num_broken = [text for rows in both for text in rows.broken], sum(rows.num_broken for rows in both)
        too_long, num_too_long = [text for rows in both for text in rows.too_long], sum(r.num_too_long for r in both)
        told = [
            f"{each.path}: {each.num_bad} of {each.num_rows} rows cannot be used: {_listed(each.bad, each.num_bad)}"
            for each in self.read
            if each.num_bad
        ]
        told += self.trained.told_orders()
        told += [f"held out: {each}" for each in self.measured.told_orders()]
        if self.trained.has_many_twice:
            told.append(f"{self.trained.num_twice} of {self.trained.num_rows} training rows repeat an earlier row")
        if num_in_both := self.measured.num_in(self.trained):
            told.append(
                f"{num_in_both} of {self.measured.num_rows} held-out rows are also trained on: the metrics measure "
                "memorization"
            )
        num_shown = sum(len(rows.examples) for rows in both)
        if lost := sum((rows.lost for rows in both), Tally()).told(num_shown):
            told.append(f"{lost}; {self.advice}")
        if asked := sum((rows.mismatches for rows in both), Mismatches()).told(num_shown, self.advice_on_asking):
            told.append(asked)
        if self.num_dropped:
            num_cut_off = sum(rows.num_cut_off for rows in both)
            longer = (
                f"; {num_cut_off} of them because they are too long: increase training.max_length"
                if num_cut_off
                else ""
            )
            told.append(f"{self.num_dropped} rows are skipped; the first: {self.first_dropped}{longer}")
        num_cut, num_rows = sum(r.num_truncated for r in both), sum(len(r.examples) + r.num_dropped for r in both)
        if 2 * num_cut > num_rows:
            told.append(
                f"{num_cut} of {num_rows} rows are truncated after training.max_length tokens, and the rest is not "
                f"learned; the longest has {max(rows.longest_uncut for rows in both)}"
            )
        if num_broken:
            told.append(f"{num_broken} rows have an unusable file: {_listed(broken, num_broken)}")
        if num_too_long:
            told.append(
                f"{num_too_long} rows are skipped because truncation would cut their images, videos or sounds: "
                + _listed(too_long, num_too_long)
            )
        return told


def build(
    assignment: Assignment, chat: ChatFormat, stop: Stop, load_processor: Callable[[], Processor] | None = None
) -> Data:
    """Read, mix, split and encode the data. Raises DatasetError if nothing is left to train on.

    The processor is loaded if a row has media, and takes part in `chat` from then on.
    """
    spec = assignment.spec
    has_template = bool(chat.tokenizer.chat_template)
    for each in [*spec.datasets, *spec.eval_datasets]:
        for file in _files(each):
            assignment.check_read(Named("datasets", file, DatasetError))
    hashes = {str(file): sha256(file) for each in [*spec.datasets, *spec.eval_datasets] for file in _files(each)}

    def load(datasets: Sequence[DatasetSpec]) -> dataset.Mixture:
        found = dataset.load(
            datasets, seed=assignment.seed, has_chat_template=has_template, spill_dir=assignment.layout.media_dir
        )
        for example in found.examples:
            for path in (path for media in example.media for path in media.paths):
                assignment.check_read(Named(f"datasets: {where(example)}", path, DatasetError))
        return found

    mixture = load(spec.datasets)
    examples, held_out = list(mixture.examples), []
    eval_counts: list[dataset.Counts] = []
    if spec.eval_datasets:
        eval_mixture = load(spec.eval_datasets)
        held_out, eval_counts = list(eval_mixture.examples), eval_mixture.counts
    elif spec.eval_split:
        together = assignment.plan.splits_by_meaning
        examples, held_out = dataset.split(examples, spec.eval_split, assignment.seed, together=together)
    trained, measured = (Census.of((example, where(example)) for example in rows) for rows in (examples, held_out))
    max_length = spec.training.cut_at
    media = None
    if load_processor is not None and any(example.media for example in [*examples, *held_out]):
        media = MediaRows(load_processor(), spec)
        chat.places.expand_with(media.processor.expand)
    train = encode(examples, chat, max_length, stop, media)
    evaluated = encode(held_out, chat, max_length, stop, media) if held_out else None
    both = [rows for rows in (train, evaluated) if rows is not None]
    _check_silenced(both)
    if not train.examples:
        raise DatasetError(
            f"no row is left to train on, of {len(examples)}"
            + (f"; the first: {train.first_dropped}" if train.first_dropped else ""),
            hint=_hint(train),
        )
    if evaluated is not None and not evaluated.examples:
        split = "" if spec.eval_datasets else " that eval_split holds out"
        raise DatasetError(
            f"no row is left to evaluate on, of {len(held_out)}{split}; the first: {evaluated.first_dropped}",
            hint=_hint(evaluated) + (", or a larger eval_split" if split else ""),
        )
    read = (*mixture.counts, *eval_counts)
    num_dropped = sum(rows.num_dropped for rows in both)
    first_dropped = next((rows.first_dropped for rows in both if rows.num_dropped), "")
    mismatches = sum((rows.mismatches for rows in both), Mismatches())
    counts: dict[str, object] = {
        "num_train": len(train.examples),
        "num_eval": len(evaluated.examples) if evaluated else 0,
        "num_truncated": sum(rows.num_truncated for rows in both),
        "num_dropped": num_dropped,
        "num_silenced": sum(rows.num_silenced for rows in both),
        "omitted": sum((rows.lost for rows in both), Tally()).as_dict(),
        "num_asked_otherwise": mismatches.num_rows,
        "num_unusable": sum(count.num_bad for count in read),
        "num_twice": trained.num_twice,
        "num_in_both": measured.num_in(trained),
        "num_tokens": train.num_tokens,
        "num_trained_tokens": train.num_trained_tokens,
        "lengths": lengths(map(len, train.dataset["input_ids"])),
        "datasets": [_counts(count) for count in mixture.counts],
        "eval_datasets": [_counts(count) for count in eval_counts],
    }
    if media is not None:
        counts["num_media"] = sum(len(source.media) for source in media.sources)
        counts["num_broken"] = sum(rows.num_broken for rows in both)
        counts["num_too_long"] = sum(rows.num_too_long for rows in both)
    if assignment.is_trial:
        size, packed = spec.training.per_device_train_batch_size, spec.training.packing and spec.training.max_length
        train = few(train, size=size, seed=assignment.seed, num_tokens=size * packed if packed else None)
        evaluated = None
        counts["trial"] = {"num_rows": len(train.examples), "num_tokens": train.num_tokens}
    advice = chat.advice.on_omissions(sum((rows.lost for rows in both), Tally()))
    on_asking = chat.advice.on_asking(mismatches)
    return Data(
        train, evaluated, counts, hashes, media, read, num_dropped, first_dropped, advice, on_asking, trained, measured
    )


def _hint(rows: Rows) -> str:
    """Return advice for the case that every row was skipped."""
    if rows.num_broken * 2 > rows.num_dropped:
        return "put the files at the paths in the rows, or set their directory with `media_dir`"
    if rows.num_silenced * 2 > rows.num_dropped:
        return SILENCED_HINT
    if rows.num_too_long * 2 > rows.num_dropped:
        return "increase training.max_length, reduce pixels and frames (`media:`), or shorten the sounds"
    return "increase training.max_length, or use rows with text of the assistant"


def _check_silenced(both: Sequence[Rows]) -> None:
    """Raise DatasetError if the template hides what too many rows are to teach.

    Training and held-out rows count together: few may be held out, and one of them is a small share of all.
    """
    num_rows = sum(len(rows.examples) + rows.num_dropped for rows in both)
    num_silenced = sum(rows.num_silenced for rows in both)
    if num_silenced > MAX_SILENCED_SHARE * num_rows:
        first = next(rows.first_silenced for rows in both if rows.num_silenced)
        raise DatasetError(
            f"{num_silenced} of {num_rows} rows would train an empty answer; the first: {first}",
            hint=SILENCED_HINT,
        )


def few(rows: Rows, *, size: int, seed: int, num_tokens: int | None = None) -> Rows:
    """Return the rows of a trial: the longest and some others, repeated until they fill a batch.

    The batch has `size` rows, or `num_tokens` tokens where rows are packed. Each row comes once before any comes again.
    """
    lengths = [len(ids) for ids in rows.dataset["input_ids"]]
    longest = lengths.index(max(lengths))
    others = [place for place in range(len(lengths)) if place != longest]
    drawn = random.Random(seed).sample(others, min(NUM_ROWS - 1, len(others)))
    chosen = sorted([longest, *drawn])
    if num_tokens is not None:
        size = num_tokens * len(chosen) // sum(lengths[place] for place in chosen)
    places = (chosen * -(-size // len(chosen)))[: max(size, len(chosen))]
    made = rows.dataset.select(places)
    return replace(
        rows,
        dataset=made,
        examples=[rows.examples[place] for place in places],
        truncated=[rows.truncated[place] for place in places],
        by_ids={hash(tuple(ids)): number for number, ids in enumerate(made["input_ids"])},
        num_tokens=sum(lengths[place] for place in places),
    )


def lengths(numbers: Iterable[int]) -> dict[str, int | list[int]]:
    """Return a histogram of row lengths: `counts` of bins that are `width` wide, the first of which begins at 0."""
    found = list(numbers)
    width = max(1, -(-(max(found) + 1) // NUM_BINS))
    counts = [0] * (max(found) // width + 1)
    for number in found:
        counts[number // width] += 1
    return {"width": width, "counts": counts}


def check_ids(data: Data, tokenizer: Any, num_embeddings: int, base_model_path: Path) -> None:
    """Raise ModelError if a token that occurs has no row in the embeddings.

    A tokenizer may know more tokens than its model, as long as nobody uses them: Gemma 3's and CodeLlama's do.
    """
    used = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id} - {None}
    for rows in (data.train, data.held_out):
        used |= {max(ids) for ids in rows.dataset["input_ids"]} if rows is not None else set()
    if max(used) >= num_embeddings:
        token = quote.mark(repr(tokenizer.convert_ids_to_tokens(max(used))))
        raise ModelError(
            f"{base_model_path}: token {token} has the id {max(used)}, but the embeddings have only {num_embeddings} "
            "rows",
            hint="the tokenizer belongs to another model, or tokens were added without resizing the embeddings",
        )


def encode(
    examples: Sequence[Example], chat: ChatFormat, max_length: int | None, stop: Stop, media: MediaRows | None = None
) -> Rows:
    """Encode rows to at most `max_length` token ids and labels. A row with nothing left to learn is skipped."""
    from datasets import Dataset

    columns: dict[str, list[Any]] = {"input_ids": [], "labels": []} | ({"source": []} if media else {})
    rows = Rows(None, [], [], {}, [])
    for example, whole in _encoded(examples, chat, stop, media):
        cut = whole if isinstance(whole, DatasetError) else _cut(whole, max_length)
        if isinstance(cut, DatasetError):
            _drop(rows, example, cut, media)
            continue
        assert isinstance(whole, Encoded)
        is_cut = len(cut.input_ids) < len(whole.input_ids)
        rows.num_truncated += is_cut
        rows.longest_uncut = max(rows.longest_uncut, len(whole.input_ids))
        if not any(cut.trained[1:]):  # the first token is never predicted
            rows.num_cut_off += is_cut
            rows.drop(f"{where(example)}: nothing to train on in its first {max_length} tokens")
            continue
        rows.by_ids[hash(tuple(cut.input_ids))] = len(rows.examples)
        rows.first_segments = rows.first_segments or cut.segments()
        rows.examples.append(example)
        rows.truncated.append(is_cut)
        rows.num_tokens += len(cut.input_ids)
        rows.longest = max(rows.longest, len(cut.input_ids))
        rows.num_trained_tokens += sum(cut.trained[1:])
        rows.lost.add(where(example), cut.omitted, example)
        rows.mismatches.add(where(example), cut.mismatch, example)
        # A row's images may be thousands of tokens: four bytes for each, not a Python list's thirty-six.
        columns["input_ids"].append(array("i", cut.input_ids) if media else cut.input_ids)
        columns["labels"].append(array("i", cut.labels) if media else cut.labels)
        if media:
            columns["source"].append(_add_source(media, example, whole))
    rows.dataset = _compact(columns) if media else Dataset.from_dict(columns)
    return rows


def _encoded(
    examples: Iterable[Example], chat: ChatFormat, stop: Stop, media: MediaRows | None
) -> Iterator[tuple[Example, Encoded | DatasetError]]:
    """Yield each row, or the error that makes it unusable, in order; those with media are decoded a few at a time."""
    if media is None:
        for example in examples:
            stop.check()
            yield example, _try(example, chat, partial(chat.encode, example))
        return
    waiting: deque[tuple[Example, Callable[[], Encoded]]] = deque()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="media") as pool:
        for example in examples:
            stop.check()
            waiting.append((example, _begin(example, chat, media, pool)))
            if len(waiting) > 2 * NUM_THREADS:
                first, finish = waiting.popleft()
                yield first, _try(first, chat, finish)
        for first, finish in waiting:
            stop.check()
            yield first, _try(first, chat, finish)


def _begin(example: Example, chat: ChatFormat, media: MediaRows, pool: ThreadPoolExecutor) -> Callable[[], Encoded]:
    """Begin to encode a row in the pool; return a function that waits for it and returns the row."""
    if not example.media:
        return partial(chat.encode, example)
    try:
        rendered = chat.rendered(example)
    except DatasetError as error:
        return partial(_raise, error)
    processed = pool.submit(media.processor.expand, rendered.text, example.media)
    return lambda: chat.finish(example, rendered, processed.result())


def _raise(error: DatasetError) -> Encoded:
    raise error


def _try(example: Example, chat: ChatFormat, finish: Callable[[], Encoded]) -> Encoded | DatasetError:
    try:
        return finish()
    except DatasetError as error:
        if example.kind == "messages":
            chat.renderer.require_template()  # where no conversation can be rendered at all, that is the error
        return error


def _cut(whole: Encoded, max_length: int | None) -> Encoded | DatasetError:
    try:
        return whole.truncate(max_length)
    except MediaCutError as error:
        return error


def _drop(rows: Rows, example: Example, error: DatasetError, media: MediaRows | None) -> None:
    """Skip a row, or end the job because of it, as `media.broken` and `media.too_long` say."""
    place = where(example)
    reason = error.said if error.said.startswith(place) else f"{place}: {error.said}"
    match error:
        case MediaError() if media is not None:
            if media.spec.media.broken == "refuse":
                raise DatasetError(reason, hint="fix or delete it, or skip such rows: `media: {broken: drop}`")
            rows.num_broken += 1
            rows.broken += [reason] if len(rows.broken) < MAX_NAMED else []
        case MediaCutError() if media is not None:
            if media.spec.media.too_long == "refuse":
                raise DatasetError(reason, hint=error.hint)
            rows.num_too_long += 1
            rows.too_long += [f"{reason} ({error.hint})"] if len(rows.too_long) < MAX_NAMED else []
        case SilencedError():
            rows.num_silenced += 1
            rows.first_silenced = rows.first_silenced or reason
    rows.drop(reason)


def _listed(named: Sequence[str], number: int) -> str:
    return "; ".join(named) + (f"; and {number - len(named)} more" if number > len(named) else "")


def _add_source(media: MediaRows, example: Example, whole: Encoded) -> int:
    from honed.worker.rows.collator import Source

    if not example.media:
        return -1
    media.sources.append(Source(where(example), whole.rendered, example.media, len(whole.input_ids)))
    return len(media.sources) - 1


def _compact(columns: dict[str, list[Any]]) -> Any:
    import numpy as np
    from datasets import Dataset, Features, Sequence, Value

    kinds = Features(input_ids=Sequence(Value("int32")), labels=Sequence(Value("int32")), source=Value("int32"))
    numbers = {name: [np.frombuffer(each, "int32") for each in columns[name]] for name in ("input_ids", "labels")}
    return Dataset.from_dict(columns | numbers, features=kinds)


def _counts(count: dataset.Counts) -> dict[str, int]:
    return {"num_rows": count.num_rows, "num_taken": count.num_taken, "num_bad": count.num_bad}


def _files(each: Any) -> list[Path]:
    return list(files_of(each))


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
