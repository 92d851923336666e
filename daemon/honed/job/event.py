"""Events from the worker to the daemon: lines of JSON, appended to `attempts/<n>/events.jsonl`.

Each line is an object with `event` (its kind) and `time` (seconds since the epoch). The kinds and their keys:

    started      pid, versions {package: version}, backend
    stage        stage: trial? prepare data staged? load audit mask baseline train export; of a merge: prepare merge
                 export; of an evaluation: prepare data staged? load audit mask evaluate
    log          level (error warning info debug), message, evidence?, code?    for the journal, except the evidence:
                 the message with its quotes from the job's files, for those who may read the job
    audit        when (loaded adapted built resumed restored), model_dtype, config_dtype, embedding_dtype, quantization,
                 counts [{role, dtype, device, num_parameters}], mended [text]    the loaded model
    data         num_train, num_eval, num_truncated, num_dropped, num_silenced, num_unusable, lengths {width, counts},
                 num_twice (training rows equal to an earlier one), num_in_both (held out and also trained on),
                 omitted {num_rows, kinds {kind: rows}} (left out by the chat template),
                 num_asked_otherwise (rows whose prompt differs from the text before their last turn),
                 datasets [{num_rows, num_taken, num_bad}], eval_datasets, …     how the rows were used
    rows         entries [key]: encoded rows in the job's rows/ (not those with media), shared [key]: those of them that
                 an earlier job of the user encoded
    example      segments [{text, trained}]                            the first example, masked
    memory       when (built trained), weights_bytes, adapter_bytes, gradient_bytes?, optimizer_bytes?: of the tensors
                 actually allocated; device_peak_bytes?, resident_peak_bytes?
    step         step, num_steps, epoch, eta_sec?, and the step's metrics by their names: loss, learning_rate?,
                 grad_norm?, mean_token_accuracy?, …
    evaluation   step, epoch, metrics {name: value}
    samples      rows [{sample_index, thumbnails [base64 of a JPEG]}]   media in the prompts of predictions
    predictions  step, epoch, num_failed, rows [{sample_index, prompt, ground_truth, prediction}], scores {name: value}
    guard        step, epoch, metric, line (the minimum; null before training), num_failed,
                 scores {name: value}
    worse        found [text]    metrics that got worse during training, where no guard forbids it
    trial        verdict (learns learns_slowly does_not_learn), loss_before, loss_after, whole_sec, peak_bytes, …: see
                 trial.py
    checkpoint   step, path, num_bytes
    adjusted     steps [{attempt, text, changes}]            settings changed because memory ran out
    resumed      step, path                                  events of later steps are repeated
    started_over reason                                      all events are repeated; only after an attempt that had
                 begun
    fallback     from, to, reason
    artifact     name (output_dir merged report), path, num_bytes (what is below)
    finished     outcome, step, metrics

Readers skip unknown kinds and keys. A worker may die in the middle of a line, and a power cut may leave a tail of NULs:
lines that do not parse are counted and otherwise ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.system import quote, untrusted
from honed.system.personpath import PersonPath

#: Phase of a rank that has ended before the others.
ENDED = "ended"
#: Bytes. A longer line is not one of our events; it is skipped, so that garbage cannot fill the daemon's memory.
MAX_LINE_BYTES = 4 * 1024 * 1024
#: Bytes that one attempt can have written: no worker's account makes a counter useless.
MAX_WRITTEN_BYTES = 2**50
#: Bytes read at once, at most: they hold the longest line.
MAX_READ_BYTES = 8 * 1024 * 1024
#: Bytes that the daemon's loop reads at once, if they hold a whole line: some milliseconds of work.
BITE_BYTES = 64 * 1024
#: Nesting depth of lists and objects in an event; ours have five levels. Python parses some hundred, but code that
#: later serializes or walks them fails at fewer.
MAX_DEPTH = 50
#: Seconds since the epoch (the year 9999): larger values are not times.
MAX_TIME = 253_000_000_000


@dataclass(frozen=True)
class Event:
    """One line from the worker."""

    kind: str
    time: float  #: seconds since the epoch
    data: dict[str, Any]


#: Keys of a `step` event that are no metrics; all others are.
STEP_KEYS = frozenset({"step", "num_steps", "epoch", "eta_sec"})
#: Lines kept in the worker's memory while the disk is full.
MAX_WAITING_LINES = 2000


def has_begun(path: Path) -> bool:
    """Return True if an attempt's events say that it had a model, and so that it may have reported the run's course;
    also if they cannot be read. The caller must be its worker's user: see untrusted.py."""
    try:
        with path.open("rb") as lines:
            return any(b'"stage": "baseline"' in line for line in lines)
    except FileNotFoundError:
        return False
    except OSError:
        return True


class EventWriter:
    """The worker's side: an event is one `write` to a descriptor opened for appending."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None,
    ) -> None:
        """Open the file; every event is also passed to `on_event` once it is written."""
        self._on_event = on_event
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._clock = clock
        # If a crash or a full disk left a partial line, it must not swallow our next one.
        self._is_cut = os.fstat(self._fd).st_size > 0
        self._waiting: deque[bytes] = deque()  # lines not written because the disk is full
        self._num_lost = 0

    def emit(self, kind: str, /, **data: Any) -> None:
        """Append one event. NaN and infinity are written as null, since JSON cannot represent them."""
        line = json.dumps(_finite({"event": kind, "time": self._clock(), **data}), ensure_ascii=False, default=str)
        self._write(line.encode(errors="replace") + b"\n")
        self._on_event(kind, data)

    def log(self, level: str, message: str, *, evidence: str = "", **data: Any) -> None:
        """Emit a log event. Quotes from the job's files are hidden in its message and kept in its evidence."""
        hidden, whole = quote.hide(message), evidence or quote.show(message)
        self.emit("log", level=level, message=hidden, **({"evidence": whole} if whole != hidden else {}), **data)

    def close(self) -> None:
        """Sync and close the file; report the number of unwritten lines on stderr, which is the worker's log."""
        self._flush()
        with contextlib.suppress(OSError):  # the log may be on the same disk
            if self._waiting:
                print(
                    f"honed: {len(self._waiting) + self._num_lost} events were not written: the disk is full",
                    file=sys.stderr,
                    flush=True,
                )
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)

    def _write(self, line: bytes) -> None:
        """Write lines in order and keep them while the disk is full: a lost line must not end the run."""
        if len(self._waiting) >= MAX_WAITING_LINES:
            self._num_lost += 1
            return
        self._waiting.append(line)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                if self._is_cut:
                    os.write(self._fd, b"\n")
                    self._is_cut = False
                line = self._waiting[0]
                self._is_cut = os.write(self._fd, line) < len(line)
                if self._is_cut:
                    continue  # the disk is full: the next write raises
                self._waiting.popleft()
            if self._num_lost:
                num_lost, self._num_lost = self._num_lost, 0
                self.log("warning", f"{num_lost} events were lost: the disk was full")
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


@dataclass(frozen=True)
class Reading:
    """The result of one pass over the file."""

    events: list[Event]
    offset: int  #: bytes; start of the next pass
    num_bad: int  #: lines that are not events
    is_last: bool = False  #: the file had no more bytes


def read(path: PersonPath, offset: int, *, end: int | None = None, num_bytes: int = MAX_READ_BYTES) -> Reading:
    """Read the complete lines between `offset` and `end`, of at most `num_bytes` if these hold a whole line. A last
    line without a newline waits for the next pass.

    Raises OSError if the path is not a regular file.
    """
    try:
        with open(untrusted.open_plain(path), "rb") as file:  # noqa: PTH123 - of a descriptor
            file.seek(offset)
            limit = MAX_READ_BYTES if end is None else min(MAX_READ_BYTES, end - offset)
            data = file.read(min(num_bytes, limit))
            is_last = len(data) < min(num_bytes, limit)
            if b"\n" not in data and len(data) == num_bytes < limit:
                data += file.read(limit - num_bytes)
    except FileNotFoundError:
        return Reading([], offset, 0)
    num_bytes = data.rfind(b"\n") + 1
    if num_bytes == 0:
        # No newline in all that was read: if that is longer than any event, it is garbage and is skipped.
        too_long = len(data) >= MAX_READ_BYTES
        return Reading([], offset + len(data) if too_long else offset, int(too_long))
    parsed = [_parse(line) for line in data[:num_bytes].split(b"\n") if line.strip()]
    events = [event for event in parsed if event is not None]
    return Reading(events, offset + num_bytes, num_bad=len(parsed) - len(events), is_last=is_last)


def _parse(line: bytes) -> Event | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    kind, when = data.pop("event", None), data.pop("time", None)
    if not isinstance(kind, str) or isinstance(when, bool) or not isinstance(when, int | float):
        return None
    if not 0 <= when <= MAX_TIME:  # False for NaN
        return None
    try:
        return Event(encodable(kind), float(when), encodable(data))
    except ValueError:
        return None


@dataclass(frozen=True)
class Written:
    """Bytes that an attempt has written, by its own account."""

    checkpoints: int = 0
    outputs: int = 0  #: in its output directory, with what is below it


def written_bytes(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Written:
    """Return the sums of these events, as (kind, data)."""
    sums = {"checkpoint": 0, "output_dir": 0}
    for kind, data in events:
        key = str(data.get("name")) if kind == "artifact" else kind
        num_bytes = data.get("num_bytes")
        if key in sums and type(num_bytes) is int and num_bytes > 0:
            sums[key] = min(MAX_WRITTEN_BYTES, sums[key] + num_bytes)
    return Written(*sums.values())


def step_metrics(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a `step` event, whatever their names and values are."""
    return {name: value for name, value in data.items() if name not in STEP_KEYS}


def items(data: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at this key of an event; empty if the value is not a list."""
    return value if isinstance(value := data.get(key), list) else []


def encodable(value: Any, *, depth: int = 0) -> Any:
    """Return the value with lone surrogates replaced, which JSON can carry but UTF-8 (log, database) cannot, and NaN
    and infinity, which standard JSON lacks, as None. Raises ValueError if it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {encodable(key): encodable(item, depth=depth + 1) for key, item in value.items()}
        case list():
            return [encodable(item, depth=depth + 1) for item in value]
        case _:
            return value
