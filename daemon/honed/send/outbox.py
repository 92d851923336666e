"""The outbox: metrics and predictions queued for an HTTP endpoint until honed-send has delivered them.

    var/lib/honed/outbox/
        <number>.jsonl      rows, one per line; the daemon appends to the last file and removes delivered files
        lost.json           the number of rows that were not stored
        sender/             honed-send's own directory; it writes nothing else
            cursor.json     the position up to which all rows are delivered or set aside
            trouble.json    the problem that prevents delivery
            lock            held by the one process that delivers
            refused/        rows that the endpoint rejected, with its response

Each file has one writer, so neither side waits for the other, and either can be killed at any time. A row is durable
here before its event counts as read: a daemon that dies in between writes it again, under the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from honed.job.database import answers, figures, place, timestamp
from honed.job.event import Event, Reading
from honed.job.job import Job
from honed.system import durable
from honed.system.log import about
from honed.system.message import ROWS_LOST

log = logging.getLogger(__name__)

#: Bytes after which a new file is started: delivered rows are removed file by file.
SEGMENT_BYTES = 4 * 1024 * 1024
#: Lost rows between two log messages.
COMPLAIN_EVERY_ROWS = 10_000


class Position(NamedTuple):
    """A position in the outbox. The bytes of a deleted file count as delivered."""

    segment: int
    offset: int


@dataclass(frozen=True)
class Row:
    """One line of the outbox, and the position of its end."""

    data: dict[str, Any]
    end: Position
    num_bytes: int

    @property
    def key(self) -> str:
        return str(self.data["idempotency_key"])


def rows(job: Job, event: Event, environment: Mapping[str, str] = os.environ) -> list[dict[str, object]]:
    """Return the rows to send for an event; empty for most kinds.

    A row's key depends only on the event as the worker wrote it, so a row that is sent again has the same key, and an
    evaluation that is repeated at the same step has another. JOB_ID and JOB_USER_ID are set by a platform that runs
    honed for one job.
    """
    step, epoch = place(event)
    common = {
        "job_id": environment.get("JOB_ID") or str(job.id),
        "user_id": environment.get("JOB_USER_ID") or str(job.uid),
        "honed_job": job.id,
        "attempt": job.attempt.number,
        "step": step,
        "epoch": epoch,
        "created_at": timestamp(event.time),
    }

    def key(name: str | int) -> str:
        what = [job.id, job.submitted_at, job.attempt.number, event.kind, event.time, step, name]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    metrics: list[dict[str, object]] = [
        {"kind": "metric", "idempotency_key": key(name), **common, "name": name, "value": value}
        for name, value in figures(event).items()
    ]
    predictions: list[dict[str, object]] = [
        {"kind": "prediction", "idempotency_key": key(answer["sample_index"]), **common, **answer}
        for answer in answers(event)
    ]
    return metrics + predictions


class Outbox:
    """The daemon's side of the outbox. `max_bytes` limits the queued bytes; further rows are counted and not stored."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._current: Path | None = (
            None  # created with the first row: an earlier daemon's file may end in a partial line
        )
        self._num_lost = 0  # since rows could last be stored
        self._num_complained = 0
        self._why_lost = ""

    def put(self, job: Job, reading: Reading) -> int:
        """Store the rows of the latest attempt's events durably. Returns how many could not be stored (limit or disk).

        It waits for the disk only. A row that cannot be stored does not affect the job.
        """
        lines = [_line(row) for event in reading.events for row in rows(job, event)]
        if not lines:
            return 0
        try:
            self._tidy()
            if num_waiting_bytes(self.path) + sum(map(len, lines)) > self.max_bytes:
                self._why_lost = f"it has reached reporting.max_outbox_bytes ({self.max_bytes})"
                return len(lines)
            self._append(b"".join(lines))
        except OSError as error:
            self._why_lost = str(error)
            return len(lines)
        if self._num_lost:
            log.warning("%s: there is space again, after %d rows were discarded", self.path, self._num_lost)
            self._num_lost = self._num_complained = 0
        return 0

    def lose(self, num_rows: int) -> None:
        """Count and log rows that were not stored, once their events are counted as read and will not come again."""
        if not num_rows:
            return
        self._num_lost += num_rows
        with contextlib.suppress(OSError):  # the disk is full: the log has the number
            path = self.path / "lost.json"
            durable.write_json(path, {"num_rows": num_lost(self.path) + num_rows}, mode=0o640)
        if not self._num_complained or self._num_lost - self._num_complained >= COMPLAIN_EVERY_ROWS:
            self._num_complained = self._num_lost
            log.error(
                "%s: %s: discarded %d rows for the metrics API. They are in honed.db, but will not be sent; is "
                "honed-send delivering?",
                self.path,
                self._why_lost,
                self._num_lost,
                extra=about(message=ROWS_LOST),
            )

    def _append(self, data: bytes) -> None:
        if self._current is None or self._current.stat().st_size >= SEGMENT_BYTES:
            self._begin()
        assert self._current is not None
        fd = os.open(self._current, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        before = os.fstat(fd).st_size
        try:
            durable.write_all(fd, data)
            os.fdatasync(fd)
        except OSError:
            # A partial line must not run into the next one; and honed-send reads whole lines only.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, before)
            self._current = None
            raise
        finally:
            os.close(fd)

    def _begin(self) -> None:
        make_dirs(self.path)
        number = max([*segments(self.path), read_cursor(self.path).segment, 0]) + 1
        path = self.path / f"{number}.jsonl"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640))
        durable.sync_dir(self.path)
        self._current = path

    def _tidy(self) -> None:
        done = read_cursor(self.path).segment
        for number, path in segments(self.path).items():
            if number < done and path != self._current:
                path.unlink(missing_ok=True)


def _line(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"


# -- what both sides read ----------------------------------------------------------------------------------------------


def make_dirs(path: Path) -> None:
    durable.make_dir(path, mode=0o750)
    for directory in (sender_dir(path), refused_dir(path)):
        durable.make_dir(directory, mode=0o750)


def sender_dir(path: Path) -> Path:
    return path / "sender"


def refused_dir(path: Path) -> Path:
    return sender_dir(path) / "refused"


def segments(path: Path) -> dict[int, Path]:
    """Return the files of rows by number, in order."""
    files = {int(item.stem): item for item in path.glob("*.jsonl") if item.stem.isdecimal()}
    return dict(sorted(files.items()))


def num_waiting_bytes(path: Path) -> int:
    """Return the number of bytes that are not delivered yet."""
    done = read_cursor(path)
    total = 0
    for number, segment in segments(path).items():
        with contextlib.suppress(FileNotFoundError):
            if number >= done.segment:
                total += max(0, segment.stat().st_size - (done.offset if number == done.segment else 0))
    return total


def num_lost(path: Path) -> int:
    """Return the number of rows that were ever lost."""
    return _count(_read_json(path / "lost.json").get("num_rows"))


def read_cursor(path: Path) -> Position:
    """Return the position up to which all rows are delivered; the start if there is no cursor."""
    data = _read_json(sender_dir(path) / "cursor.json")
    return Position(_count(data.get("segment")), _count(data.get("offset")))


def write_cursor(path: Path, position: Position) -> None:
    durable.write_json(sender_dir(path) / "cursor.json", position._asdict(), mode=0o640)


def read_trouble(path: Path) -> str | None:
    """Return the problem that last prevented honed-send from delivering."""
    trouble = _read_json(sender_dir(path) / "trouble.json").get("trouble")
    return None if trouble is None else str(trouble)


def write_trouble(path: Path, trouble: str | None) -> None:
    durable.write_json(sender_dir(path) / "trouble.json", {"trouble": trouble}, mode=0o640)


def read(path: Path, position: Position, *, max_rows: int, max_bytes: int) -> tuple[list[Row], Position, int]:
    """Read the rows after a position up to the limits; a row larger than `max_bytes` is returned alone.

    Returns the rows, the position after them and all lines skipped with them, and the number of invalid lines: a power
    cut leaves partial lines, or NULs.
    """
    rows: list[Row] = []
    num_bytes = num_bad = 0
    for line, end in _lines(path, position):
        row = _parse(line, end)
        if row is not None and rows and (len(rows) >= max_rows or num_bytes + row.num_bytes > max_bytes):
            break
        position = end
        if row is None:
            num_bad += bool(line.strip(b"\0\n\t "))
            continue
        rows.append(row)
        num_bytes += row.num_bytes
    return rows, position, num_bad


def _lines(path: Path, position: Position) -> Iterator[tuple[bytes, Position]]:
    """Yield whole lines with the position of their end. A partial line counts once a later file shows it is final."""
    # List the files first: the end of a file that has a successor in this list is final.
    numbers = [number for number in segments(path) if number >= position.segment]
    for number in numbers:
        offset = position.offset if number == position.segment else 0
        with contextlib.suppress(FileNotFoundError), (path / f"{number}.jsonl").open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n") and number == numbers[-1]:
                    return
                offset += len(line)
                yield line, Position(number, offset)
        if number != numbers[-1]:
            yield b"", Position(number + 1, 0)


def _parse(line: bytes, end: Position) -> Row | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or "idempotency_key" not in data or "kind" not in data:
        return None
    return Row(data, end, len(line))


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that the other side writes; empty if it does not exist or was lost by the disk.
    Raises OSError if the machine prevents reading it: by a cursor that seems to be at the start, the next file would
    get a number before the real one, and nobody would send its rows."""
    try:
        data = durable.read(path)
    except OSError as error:
        if durable.fault_at_persons(error):
            raise
        return {}
    return durable.json_object(lambda: data)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0  # no file has more
