"""The outbox: metrics and predictions on their way to an HTTP endpoint, until honed-send has delivered them.

    var/lib/honed/outbox/
        <number>.jsonl      rows, a line each; the daemon appends to the last, and removes those that are delivered
        lost.json           how many rows found no room
        sender/             honed-send's own; it writes nothing else
            cursor.json     up to where everything is delivered or set aside
            trouble.json    what keeps it from delivering
            lock            one at a time delivers
            refused/        rows that the other side will not take, with its answer

Each file has one writer, so neither side waits for the other, and either can be killed at any time. A row is durable
here before its event counts as read: a daemon that dies in between writes it once more, under the same key.
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

#: Bytes after which a new file is begun: what is delivered is removed by the file.
SEGMENT_BYTES = 4 * 1024 * 1024
#: Rows that find no room between two complaints.
COMPLAIN_EVERY_ROWS = 10_000


class Position(NamedTuple):
    """A place in the outbox. Bytes of a file that is gone count as delivered."""

    segment: int
    offset: int


@dataclass(frozen=True)
class Row:
    """One line of the outbox, and where it ends."""

    data: dict[str, Any]
    end: Position
    num_bytes: int

    @property
    def key(self) -> str:
        return str(self.data["idempotency_key"])


def rows(job: Job, event: Event, environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """What the other side gets to know of an event; nothing of most kinds.

    The key is the row's own: it depends on nothing but the event as the worker wrote it, so a row that is sent again
    has the same one, and an evaluation that is made again at the same step another. JOB_ID and JOB_USER_ID are the
    names that a platform which runs honed for one job has given it.
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

    metrics = [
        {"kind": "metric", "idempotency_key": key(name), **common, "name": name, "value": value}
        for name, value in figures(event).items()
    ]
    predictions = [
        {"kind": "prediction", "idempotency_key": key(answer["sample_index"]), **common, **answer}
        for answer in answers(event)
    ]
    return metrics + predictions


class Outbox:
    """The daemon's end. `max_bytes` is the most that waits there; what comes after that is counted and dropped."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._current: Path | None = (
            None  # begun with the first row: a file of an earlier daemon may end in half a line
        )
        self._num_lost = 0  # since there was room
        self._num_complained = 0
        self._why_lost = ""

    def put(self, job: Job, reading: Reading) -> int:
        """Store the rows of the latest attempt's events, durably. Returns how many found no room, or no disk.

        It waits for the disk and for nothing else. What cannot be stored harms no job.
        """
        lines = [_line(row) for event in reading.events for row in rows(job, event)]
        if not lines:
            return 0
        try:
            self._tidy()
            if num_waiting_bytes(self.path) + sum(map(len, lines)) > self.max_bytes:
                self._why_lost = f"it holds reporting.max_outbox_bytes ({self.max_bytes})"
                return len(lines)
            self._append(b"".join(lines))
        except OSError as error:
            self._why_lost = str(error)
            return len(lines)
        if self._num_lost:
            log.warning("%s: there is room again, after %d rows that were dropped", self.path, self._num_lost)
            self._num_lost = self._num_complained = 0
        return 0

    def lose(self, num_rows: int) -> None:
        """Count rows that were not stored, once their events are counted and will not come again; and say so."""
        if not num_rows:
            return
        self._num_lost += num_rows
        with contextlib.suppress(OSError):  # a full disk: the log says it
            path = self.path / "lost.json"
            durable.write_json(path, {"num_rows": num_lost(self.path) + num_rows}, mode=0o640)
        if not self._num_complained or self._num_lost - self._num_complained >= COMPLAIN_EVERY_ROWS:
            self._num_complained = self._num_lost
            log.error(
                "%s: %s: %d rows for the metrics API are dropped. They are in honed.db, and will not be sent; "
                "is honed-send delivering?",
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
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fdatasync(fd)
        except OSError:
            # Half a line must not run into the next one; and honed-send reads whole lines only.
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
        """Remove what is delivered."""
        done = read_cursor(self.path).segment
        for number, path in segments(self.path).items():
            if number < done and path != self._current:
                path.unlink(missing_ok=True)


def _line(row: dict[str, Any]) -> bytes:
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
    """The files of rows by number, in order."""
    found = {int(each.stem): each for each in path.glob("*.jsonl") if each.stem.isdecimal()}
    return dict(sorted(found.items()))


def num_waiting_bytes(path: Path) -> int:
    """Bytes that are not delivered yet."""
    done = read_cursor(path)
    total = 0
    for number, each in segments(path).items():
        with contextlib.suppress(FileNotFoundError):
            if number >= done.segment:
                total += max(0, each.stat().st_size - (done.offset if number == done.segment else 0))
    return total


def num_lost(path: Path) -> int:
    """Rows that found no room, ever."""
    return _count(_read_json(path / "lost.json").get("num_rows"))


def read_cursor(path: Path) -> Position:
    """Up to where all is delivered; the very beginning where nobody has said."""
    data = _read_json(sender_dir(path) / "cursor.json")
    return Position(_count(data.get("segment")), _count(data.get("offset")))


def write_cursor(path: Path, position: Position) -> None:
    durable.write_json(sender_dir(path) / "cursor.json", position._asdict(), mode=0o640)


def read_trouble(path: Path) -> str | None:
    """What keeps honed-send from delivering, as it last knew."""
    trouble = _read_json(sender_dir(path) / "trouble.json").get("trouble")
    return None if trouble is None else str(trouble)


def write_trouble(path: Path, trouble: str | None) -> None:
    durable.write_json(sender_dir(path) / "trouble.json", {"trouble": trouble}, mode=0o640)


def read(path: Path, position: Position, *, max_rows: int, max_bytes: int) -> tuple[list[Row], Position, int]:
    """The rows after a position, as many as fit; one that alone is larger comes alone.

    Returns the rows, the position after them and what is passed over with them, and how many lines are no rows: a power
    cut leaves half a line, or NULs.
    """
    found: list[Row] = []
    num_bytes = num_bad = 0
    for line, end in _lines(path, position):
        row = _parse(line, end)
        if row is not None and found and (len(found) >= max_rows or num_bytes + row.num_bytes > max_bytes):
            break
        position = end
        if row is None:
            num_bad += bool(line.strip(b"\0\n\t "))
            continue
        found.append(row)
        num_bytes += row.num_bytes
    return found, position, num_bad


def _lines(path: Path, position: Position) -> Iterator[tuple[bytes, Position]]:
    """Whole lines with where they end. Half a line counts once a later file shows that nobody will finish it."""
    # The list first: what is at the end of a file that has a successor here is the end of it.
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
    """What the other side has written; nothing where it has not, or a disk lost it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**63 else 0  # more no file has
