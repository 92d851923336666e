"""The encoded rows of a job's data sets: found in its cache, or read, encoded and written.

Rows of text are encoded by the processes of encoder.py. From the first row with images, videos or sounds on, rows are
encoded here, since their processor needs threads and memory of its own: each is decoded once, which finds broken files.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from honed.check.policy import Named
from honed.inputs import dataset
from honed.inputs.media import MediaError
from honed.inputs.row import Example
from honed.plan import prefix
from honed.spec.spec import DatasetSpec, JobSpec
from honed.system.error import DatasetError
from honed.text.chat import ChatFormat, Encoded, MediaCutError
from honed.text.template import where
from honed.worker.assignment import Assignment
from honed.worker.rows import cache, record
from honed.worker.rows import encoder as encoders
from honed.worker.rows.encoder import BATCH_ROWS, Encoder
from honed.worker.rows.record import Batch, Builder, Fate
from honed.worker.rows.table import Table, Writer
from honed.worker.stop import Stop

if TYPE_CHECKING:
    from honed.worker.rows.collator import Source
    from honed.worker.rows.processor import Processor

#: Rows whose media are decoded in parallel; Pillow, PyAV and torch let other threads run meanwhile.
NUM_THREADS = 4


@dataclass
class MediaRows:
    """State of rows with images, videos and sounds, beside their tokens, during encoding and training."""

    processor: Processor
    spec: JobSpec
    sources: list[Source] = field(default_factory=list)  #: of the rows to train on and of those held out


@dataclass
class Maker:
    """The encoded rows of a job's data sets, from its cache or made now."""

    assignment: Assignment
    chat: ChatFormat
    stop: Stop
    load_processor: Callable[[], Processor] | None
    warn: Callable[[str], None]
    hashes: Mapping[str, str]
    are_unchanged: Callable[[], bool]  #: False if a data file has changed since it was hashed
    is_ahead: bool = False  #: another job trains meanwhile
    media: MediaRows | None = None  #: None as long as all rows are text

    def name(self, datasets: Sequence[DatasetSpec]) -> str:
        """Return the name of the cache's entry for data sets."""
        return cache.key(self.assignment, self.chat, datasets, self.hashes)

    def table(self, datasets: Sequence[DatasetSpec]) -> Table:
        """Return the rows of the data sets, in order."""
        name, rows_dir = self.name(datasets), self.assignment.rows_dir
        shared_dir = self.assignment.shared_rows_dir
        cached = cache.find(rows_dir / name, self.stop.check, self.warn, shared_dir=shared_dir)
        if cached is not None:
            cached.counts = tuple(
                replace(count, path=str(item.path)) for count, item in zip(cached.counts, datasets, strict=True)
            )
            return cached
        reading = dataset.Reading(
            datasets,
            seed=self.assignment.seed,
            has_chat_template=bool(self.chat.tokenizer.chat_template),
            spill_dir=self.assignment.layout.media_dir,
        )
        writer = Writer(rows_dir)
        try:
            for blobs, batch in self._encoded(self._allowed(reading)):
                writer.write(blobs, batch)
            # Rows with media depend on more than the key tells, and so do files that have changed meanwhile.
            is_keyed = self.media is None and self.are_unchanged()
            return writer.finish(reading.counts, name if is_keyed else f"{cache.UNKEYED}-{name}")
        except BaseException:
            writer.discard()  # the disk may be full
            raise

    def _allowed(self, examples: Iterable[Example]) -> Iterator[Example]:
        model_type = self.assignment.plan.checkpoint.model_type
        for example in examples:
            prefix.check_row(model_type, where(example), len(example.trained_turns))
            for path in (path for media in example.media for path in media.paths):
                self.assignment.check_read(Named(f"datasets: {where(example)}", path, DatasetError))
            yield example

    def _encoded(self, examples: Iterator[Example]) -> Iterator[tuple[list[bytes], Batch]]:
        encoder = Encoder(self.chat, self.assignment.spec.training.cut_at)
        first: list[Example] = []  # the first row with media
        if self.media is None:
            blobs = _packed(examples, first, self.load_processor is not None)
            yield from encoders.batches(
                encoder, blobs, self.stop, num_processes=encoders.processes(is_ahead=self.is_ahead)
            )
        rest = itertools.chain(first, examples)
        if self.media is None and first and self.load_processor is not None:
            self.media = MediaRows(self.load_processor(), self.assignment.spec)
            processor = self.media.processor
            self.chat.places.expand_with(processor.expand, prompt_end=processor.prompt_end)
        if self.media is not None:
            yield from _with_media(rest, encoder, self.media, self.stop)


def _packed(examples: Iterator[Example], first: list[Example], may_have_media: bool) -> Iterator[bytes]:
    """Yield packed examples up to the first with media, which is put into `first`."""
    for example in examples:
        if example.media and may_have_media:
            first.append(example)
            return
        yield record.packed(example)


def _with_media(
    examples: Iterable[Example], encoder: Encoder, media: MediaRows, stop: Stop
) -> Iterator[tuple[list[bytes], Batch]]:
    """Encode rows of which some have media; these are decoded a few at a time."""
    builder, blobs = Builder(encoder.max_length), list[bytes]()
    for example, whole in _decoded(examples, encoder, media, stop):
        source = len(media.sources) if example.media else -1
        fate = builder.add(example, whole, source=source)
        if fate is Fate.KEPT and example.media:
            assert isinstance(whole, Encoded)
            media.sources.append(_source(example, whole))
        _refuse(example, record.cut_to(whole, encoder.max_length), media)
        blobs.append(record.packed(example))
        if len(blobs) >= BATCH_ROWS:
            yield blobs, builder.batch()
            blobs = []
    if blobs:
        yield blobs, builder.batch()


def _decoded(
    examples: Iterable[Example], encoder: Encoder, media: MediaRows, stop: Stop
) -> Iterator[tuple[Example, Encoded | DatasetError]]:
    """Yield every row, or the error that makes it unusable, in order."""
    waiting: deque[tuple[Example, Callable[[], Encoded | DatasetError]]] = deque()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="media") as pool:
        for example in examples:
            stop.check()
            waiting.append((example, _begin(example, encoder, media, pool)))
            if len(waiting) > 2 * NUM_THREADS:
                first, finish = waiting.popleft()
                yield first, finish()
        for first, finish in waiting:
            stop.check()
            yield first, finish()


def _begin(
    example: Example, encoder: Encoder, media: MediaRows, pool: ThreadPoolExecutor
) -> Callable[[], Encoded | DatasetError]:
    """Begin to encode a row in the pool; return a function that waits for it and returns the row."""
    if not example.media:
        return partial(encoder.encoded, example)
    try:
        rendered = encoder.chat.rendered(example)
    except DatasetError:
        return partial(encoder.encoded, example)
    processed = pool.submit(media.processor.expand, rendered.text, example.media)

    def finish() -> Encoded | DatasetError:
        try:
            return encoder.chat.finish(example, rendered, processed.result())
        except DatasetError as error:
            return error

    return finish


def _refuse(example: Example, cut: Encoded | DatasetError, media: MediaRows) -> None:
    """End the job because of an unusable row, where `media.broken` and `media.too_long` say so."""
    match cut:
        case MediaError() if media.spec.media.broken == "refuse":
            hint = "fix or delete it, or skip such rows: `media: {broken: drop}`"
            raise DatasetError(record.reason(example, cut), hint=hint)
        case MediaCutError() if media.spec.media.too_long == "refuse":
            raise DatasetError(record.reason(example, cut), hint=cut.hint)


def _source(example: Example, whole: Encoded) -> Source:
    from honed.worker.rows.collator import Source

    return Source(where(example), whole.rendered, example.media, len(whole.input_ids))
