"""wandb's offline runs: workers write them without network access, and honed-send synchronises them.

    jobs/<id>/wandb/offline-run-…/run-….wandb     written by the worker
    outbox/wandb/<id>.offline-run-…/run-….wandb   the daemon's copy, kept until it is synchronised
    outbox/sender/wandb/<id>.offline-run-….json   honed-send's mark that it is; kept, so that no run is sent twice

Runs are copied because honed-send cannot see any job's directory, and because a worker could still change the original.
Only wandb's own log is copied: it contains the metrics, the configuration and the summary. `wandb sync` follows the
log, and uploads files that it names: a log that names files outside the run is not sent, or its author could have
honed-send upload anything that it can read. (Tried with wandb 0.31: the `local_path` of an artifact's entry is
uploaded from anywhere. Its only reader of such logs is in its Go program, so the records are read here.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from honed.job import tree
from honed.job.brief import Listed
from honed.job.job import State
from honed.send import outbox
from honed.system import durable, untrusted
from honed.system.layout import JobFiles, Layout
from honed.system.log import about
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Bytes of a run's log; a step takes some hundred. Larger logs are not sent.
MAX_BYTES = 64 * 1024 * 1024
#: Bytes of the copies of one user's runs that wait for honed-send: with hard links, its logs cost their author nothing.
MAX_USER_BYTES = 8 * MAX_BYTES
#: Bytes that each of them counts at least.
MIN_BYTES = 256 * 1024
#: Seconds of a turn in which runs are copied; and parts of a log that are checked before the next look at the clock.
BITE_SEC = 0.02
_PARTS = 1000
#: Seconds between two looks for room, of which there is more once runs have been sent.
ROOM_SEC = 10.0
_RUN = re.compile(r"offline-run-[0-9]{8}_[0-9]{6}-([a-z0-9]{1,64})")


class Collector:
    """The daemon's side: copies the runs of jobs that are not running, and removes copies that are synchronised.

    Their authors choose what is in a log, and how many there are: logs are checked for a moment at a time, and one
    user's copies have limited room. What has no room is copied once others have been sent.
    """

    def __init__(
        self,
        layout: Layout,
        pruned: Callable[[int], Listed | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pruned` returns the pruned job of a number."""
        self._layout = layout
        self._pruned = pruned
        self._clock = clock
        self._due: set[int] | None = None  #: jobs whose runs are still to be copied; None: all jobs
        self._without_room: set[int] = set()
        self._room_at = 0.0  # when it is looked for next
        self._under_way: Iterator[None] | None = None
        self._rests_until = clock()
        self._owners: dict[int, int | None] = {}  # of the jobs whose copies wait, by number

    def patience(self) -> float:
        """Return the seconds until `tend` goes on with what is under way."""
        return math.inf if self._under_way is None else max(0.0, self._rests_until - self._clock())

    def tend(self, *, moved: set[int], job_of: Callable[[int], Listed | None], is_wanted: bool) -> None:
        """Copy for a moment the runs of jobs whose state changed; of all jobs at first, and when synchronising is
        switched on again.

        Raises OSError if the disk accepts none; they stay due.
        """
        if not is_wanted:
            self._due = self._under_way = None
            return
        path = self._layout.outbox_dir
        if self._due is None:
            outbox.make_dirs(path)
            for directory in (runs_dir(path), synced_dir(path)):
                durable.make_dir(directory, mode=0o750)
            with contextlib.suppress(FileNotFoundError):
                moved = {int(item.name) for item in self._layout.jobs_dir.iterdir() if item.name.isdecimal()}
            self._due = set()
        self._due |= moved
        is_room_due = bool(self._without_room) and self._clock() >= self._room_at
        if not (self._due or self._under_way is not None or is_room_due):
            return
        if (began := self._clock()) < self._rests_until:
            return
        self._under_way = self._under_way or self._collecting(self._due, job_of)
        try:
            for _ in self._under_way:
                if (now := self._clock()) >= began + BITE_SEC:
                    self._rests_until = now + (now - began)  # as long as it took: meanwhile the loop sleeps
                    return
        except BaseException:
            self._under_way = None  # begun anew
            raise
        self._under_way, self._room_at = None, self._clock() + ROOM_SEC
        for run in runs_dir(path).iterdir():
            if is_synced(path, run.name):
                tree.remove(run)
                self._due |= self._without_room
                self._without_room = set()

    def _collecting(self, due: set[int], job_of: Callable[[int], Listed | None]) -> Iterator[None]:
        """Copy the runs of the jobs that are due, a piece at a time."""
        while due:
            due.discard(job_id := min(due))
            job = job_of(job_id)
            try:
                if job is not None and job.state is not State.RUNNING:
                    yield from self._collect(job, job_of)
            except BaseException:
                due.add(job_id)
                raise
            yield

    def _room_of(self, uid: int, job_of: Callable[[int], Listed | None]) -> int:
        """Return the bytes of copies that a user may still have."""
        copies = runs_dir(self._layout.outbox_dir).glob("[0-9]*/run-*.wandb")
        job_ids = {path: int(path.parent.name.partition(".")[0]) for path in copies}
        self._owners = {number: self._owner_of(number, job_of) for number in set(job_ids.values())}
        theirs = [path for path, number in job_ids.items() if self._owners[number] == uid]
        return MAX_USER_BYTES - sum(max(path.stat().st_size, MIN_BYTES) for path in theirs)

    def _owner_of(self, number: int, job_of: Callable[[int], Listed | None]) -> int | None:
        """Return the user of a job, a pruned one too; None if nobody knows."""
        if number in self._owners:
            return self._owners[number]
        job = job_of(number) or self._pruned(number)
        return job.uid if job is not None else None

    def _collect(self, job: Listed, job_of: Callable[[int], Listed | None]) -> Iterator[None]:
        for run in _runs_of(self._layout.files(job.id)):
            yield
            name = f"{job.id}.{run.name}"
            match = _RUN.fullmatch(run.name)
            if match is None or is_synced(self._layout.outbox_dir, name):
                continue
            target = runs_dir(self._layout.outbox_dir) / name
            if target.exists():
                continue
            try:
                data = untrusted.read_plain(run / f"run-{match[1]}.wandb", max_bytes=MAX_BYTES)
                yield from checking(data)
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                log.warning(
                    "job %d (%s): its wandb run stays in %s: %s",
                    job.id,
                    job.name,
                    run,
                    why,
                    extra=about(job),
                )
                continue
            if len(data) > self._room_of(job.uid, job_of):
                self._without_room.add(job.id)
                return
            made = target.with_name(f".{target.name}.tmp")
            tree.remove(made)
            durable.make_dir(made, mode=0o750)
            durable.write(made / f"run-{match[1]}.wandb", data, mode=0o640)
            made.rename(target)
            durable.sync_dir(target.parent)
            log.info("job %d (%s): its wandb run waits for honed-send", job.id, job.name, extra=about(job))


def _runs_of(files: JobFiles) -> list[PersonPath]:
    with contextlib.suppress(OSError):
        directory = files.dir / "wandb"
        return [directory / name for name in sorted(untrusted.names_in(directory)) if _RUN.fullmatch(name)]
    return []


# -- wandb's log ------------------------------------------------------------------------------------------------------

#: Bytes of the file's header, of a block, and of a record's header: checksum, length, and part type.
_HEAD, _BLOCK, _RECORD_HEAD = 7, 32768, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
#: Fields of wandb's Record that hold metrics, settings or marks: num, history, summary, output, config, files, stats,
#: telemetry, metric, output_raw, control, run, exit, uuid, final, header, footer, preempting, environment, _info.
#: Excluded are artifacts, TensorBoard's directories and requests, which name files to be read.
_FIGURES = {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 18, 19, 20, 21, 22, 23, 26, 200}
_FILES = 6


def checking(data: bytes) -> Iterator[None]:
    """Check a log, a piece at a time. Raises ValueError if it is not wandb's, or contains more than a run's metrics."""
    if data[:4] != b":W&B":
        raise ValueError("it is not a wandb log")
    num = 0
    for record in _records(data):
        for field, value in _fields(record or b""):
            if field not in _FIGURES:
                raise ValueError(f"its log has a record of kind {field}, which is not a metric")
            if field == _FILES and (b".." in value or b"//" in value):
                raise ValueError("its log refers to a file outside the run")
            if (num := num + 1) % _PARTS == 0:
                yield
        if (num := num + 1) % _PARTS == 0 or record is None:
            yield


def _records(data: bytes) -> Iterator[bytes | None]:
    """Yield the records of a log in LevelDB's format, and None after many parts of one. A crash leaves a partial record
    at the end."""
    place, parts = _HEAD, list[bytes]()
    while place + _RECORD_HEAD.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _RECORD_HEAD.size:
            place += left
            continue
        _, size, kind = _RECORD_HEAD.unpack_from(data, place)
        if not _FULL <= kind <= _LAST or (kind in (_FULL, _FIRST)) != (not parts) or size > left - _RECORD_HEAD.size:
            raise ValueError("its log is damaged")
        place += _RECORD_HEAD.size
        parts.append(data[place : place + size])
        place += size
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts.clear()
        elif len(parts) % _PARTS == 0:
            yield None


def _fields(record: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, value) of the fields of a protobuf message; the value only for length-delimited fields."""
    place = 0
    try:
        while place < len(record):
            tag, place = _number(record, place)
            size = 0
            match tag & 7:
                case 0:
                    _, place = _number(record, place)
                case 1:
                    place += 8
                case 2:
                    size, place = _number(record, place)
                case 5:
                    place += 4
                case _:
                    raise ValueError("its log is damaged")
            yield tag >> 3, record[place : place + size]
            place += size
    except IndexError:
        raise ValueError("its log is damaged") from None
    if place != len(record):
        raise ValueError("its log is damaged")


def _number(record: bytes, place: int) -> tuple[int, int]:
    """Decode a base-128 varint, least significant bits first; return it and the position after it."""
    value = shift = 0
    while True:
        byte = record[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place
        if shift > 63:
            raise ValueError("its log is damaged")


# -- what both sides read ---------------------------------------------------------------------------------------------


def runs_dir(path: Path) -> Path:
    """Return the directory of the daemon's copies in the outbox."""
    return path / "wandb"


def synced_dir(path: Path) -> Path:
    return outbox.sender_dir(path) / "wandb"


def waiting(path: Path) -> Iterator[Path]:
    """Yield the runs that are not synchronised yet, oldest job first."""
    with contextlib.suppress(FileNotFoundError):
        names = [item.name for item in runs_dir(path).iterdir() if not item.name.startswith(".")]
        for name in sorted(names, key=lambda name: (int(name.partition(".")[0]), name)):
            if not is_synced(path, name):
                yield runs_dir(path) / name


def is_synced(path: Path, name: str) -> bool:
    return (synced_dir(path) / f"{name}.json").exists()


def mark_synced(path: Path, name: str, *, when: float) -> None:
    durable.make_dir(synced_dir(path), mode=0o750)
    data = json.dumps({"run": name, "synced_at": when}).encode()
    durable.write(synced_dir(path) / f"{name}.json", data + b"\n", mode=0o640)


def is_marked(run: Path) -> bool:
    """Tell whether wandb marked all of a run's log as sent. Its exit status is 0 even if the key is rejected."""
    return any(log_path.with_name(f"{log_path.name}.synced").exists() for log_path in run.glob("run-*.wandb"))
