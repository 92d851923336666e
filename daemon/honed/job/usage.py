"""Use of the devices by every user, durable apart from jobs: a prune or a rebuilt database does not lower it.

    var/lib/honed/usage.jsonl    a line for every attempt that has ended, with its user's level after it; appended

A user's level is the device-seconds that their jobs have taken, divided by their weight. It only grows: users are
compared by it. A user who comes back is raised to the floor: the lowest level of those who are there, or were there
last. Time in which nothing was asked for is not saved up. Lines older than MAX_AGE_SEC are dropped at the next start,
levels and the floor are kept.
"""

from __future__ import annotations

import collections
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from honed.job.ahead import NO_DEVICE_KEY
from honed.job.catalog import Catalog
from honed.job.damaged import begun_anew, is_of_item
from honed.job.job import Attempt, Job
from honed.system import durable

log = logging.getLogger(__name__)

#: Seconds for which attempts are remembered, by the time of their end: the longest window of fair_share.window_sec.
MAX_AGE_SEC = 30 * 86400.0
#: Attempts by which the duration of the next one is estimated, and the estimate without any, in seconds.
NUM_RECENT = 20
TYPICAL_SEC = 600.0


#: The "user" whose level is the floor.
_FLOOR = -1


class _Line(TypedDict):
    uid: int
    level: float
    ended_at: NotRequired[float]  # seconds since the epoch; this and the rest only where an attempt has ended
    sec: NotRequired[float]  # device-seconds
    job: NotRequired[int]
    attempt: NotRequired[int]


class Usage:
    """The use of the devices of one instance. `now` is seconds since the epoch.

    Each attempt counts once, although its entry and its line are two files: what a crash leaves out is added at the
    next start (`catch_up`).
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time, is_ours: bool = True) -> None:
        """`is_ours`: False for a reader, who leaves the file as it is."""
        self._path = path
        self._is_ours = is_ours
        self._now = now
        self._levels: dict[int, float] = {}
        self._ended: dict[int, deque[tuple[float, float]]] = collections.defaultdict(deque)  # (ended_at, seconds)
        self._counted: set[tuple[int, int]] = set()  # (job, attempt)
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._unwritten: list[_Line] = []
        self._is_new = True
        self._read()

    # -- what was used ------------------------------------------------------------------------------------------------

    @property
    def typical_sec(self) -> float:
        """Estimate of the device-seconds of an attempt: the mean of the last ones."""
        return sum(self._recent) / len(self._recent) if self._recent else TYPICAL_SEC

    def level(self, uid: int) -> float:
        """Return a user's device-seconds, divided by their weight; see the module."""
        return self._levels.get(uid, 0.0)

    def used_sec(self, uid: int, window_sec: float) -> float:
        """Return the device-seconds of a user's attempts that have ended, so far as they lie in the window."""
        since, total = self._now() - window_sec, 0.0
        for ended_at, sec in reversed(self._ended.get(uid, ())):
            if ended_at <= since:
                break
            total += min(sec, ended_at - since)
        return total

    @property
    def floor(self) -> float:
        """The level to which users are raised who come back; it never falls."""
        return self.level(_FLOOR)

    @floor.setter
    def floor(self, level: float) -> None:
        self.raise_to(level, [_FLOOR])

    # -- what is added ------------------------------------------------------------------------------------------------

    def charge(self, job: Job, weight: float) -> None:
        """Count the attempts of a job that have ended and were not counted yet; `flush` writes them."""
        self._charge_all(job, weight)

    def raise_to(self, level: float, uids: Iterable[int]) -> None:
        """Raise these users to a level, if theirs is lower; `flush` writes it."""
        for uid in uids:
            if self.level(uid) < level:
                self._add({"uid": uid, "level": level})

    def catch_up(self, jobs: Catalog, weight_of: Callable[[int], float]) -> None:
        """Count what a crash has left out, and where there was no file, all attempts that are known: those change no
        level, or else users without a history would come before all others for a long time. Raises OSError."""
        since = self._now() - MAX_AGE_SEC
        for item in jobs:
            numbers = range(1, item.last_ended + 1) if item.last_ended_at >= since else ()
            if all((item.id, number) in self._counted for number in numbers):  # mostly, and before anything is read
                continue
            try:
                job = jobs.get(item.id)
            except OSError as error:
                if not is_of_item(error):
                    raise
                log.error("job %d (%s): not charged until its entry can be read: %s", item.id, item.name, error)  # noqa: TRY400
                continue
            if job is not None:
                self._charge_all(job, weight_of(job.uid) if not self._is_new else None)
        if self._is_new:
            self._unwritten.append({"uid": _FLOOR, "level": self.floor})  # so that there is a file
        self.flush()
        self._is_new = False

    def _charge_all(self, job: Job, weight: float | None) -> None:
        for attempt in job.attempts:
            self._charge(job, attempt, weight)

    def _charge(self, job: Job, attempt: Attempt, weight: float | None) -> None:
        ended_at = attempt.ended_at
        if ended_at is None or (job.id, attempt.number) in self._counted or self._now() - ended_at > MAX_AGE_SEC:
            return
        sec = 0.0 if attempt.device == NO_DEVICE_KEY else attempt.spent_sec * max(1, job.num_gpus)
        level = self.level(job.uid) + (sec / weight if weight is not None else 0.0)
        line: _Line = {"uid": job.uid, "level": level, "ended_at": ended_at, "sec": sec, "job": job.id}
        self._add({**line, "attempt": attempt.number})

    def _add(self, line: _Line) -> None:
        self._apply(line)
        self._unwritten.append(line)

    def _apply(self, line: _Line) -> None:
        uid = line["uid"]
        self._levels[uid] = line["level"]
        if "job" in line and (key := (line["job"], line["attempt"])) not in self._counted:
            self._counted.add(key)
            ended = self._ended[uid]
            ended.append((line["ended_at"], line["sec"]))
            while line["ended_at"] - ended[0][0] > MAX_AGE_SEC:
                ended.popleft()
            if line["sec"]:
                self._recent.append(line["sec"])

    # -- the file -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what was added. Raises OSError; what was not written then is written by the next call."""
        if not self._unwritten:
            return
        data = b"".join(map(_bytes, self._unwritten))
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                if os.write(fd, data) != len(data):
                    raise OSError(28, os.strerror(28), str(self._path))
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        self._unwritten.clear()

    def _lines(self) -> list[bytes] | None:
        """Return the file's lines; None if there is none. A damaged one is begun anew, if it is ours."""
        if self._is_ours:
            return begun_anew(self._path, _split)
        try:
            return _split(durable.read(self._path))
        except FileNotFoundError:
            return None

    def _read(self) -> None:
        lines = self._lines()
        if lines is None:
            return
        self._is_new = False
        since, num_bad, kept = self._now() - MAX_AGE_SEC, 0, []
        for line in _parsed(lines):
            if line is None:
                num_bad += 1
                continue
            self._apply(line)
            if line.get("ended_at", 0.0) > since:
                kept.append(line)
        if not self._is_ours:
            return
        if num_bad:
            log.warning("%s: %d damaged lines were left out", self._path, num_bad)
        if num_bad or len(lines) > 2 * (len(kept) + len(self._levels)):
            last: list[_Line] = [{"uid": uid, "level": level} for uid, level in self._levels.items()]
            durable.write(self._path, b"".join(map(_bytes, [*kept, *last])))


def _split(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _bytes(line: _Line) -> bytes:
    return (json.dumps(line) + "\n").encode()


def _parsed(lines: list[bytes]) -> Iterator[_Line | None]:
    """Yield what a line says, None for a damaged one; whole files are parsed at once, in half the time."""
    items: Iterable[Any]
    try:
        whole = json.loads(b"[" + b",".join(lines) + b"]")
        items = whole if len(whole) == len(lines) else map(_loads, lines)
    except (ValueError, RecursionError):
        items = map(_loads, lines)
    for raw, text in zip(items, lines, strict=True):
        try:
            yield _line(raw, text)
        except (ValueError, KeyError, TypeError, OverflowError):
            yield None


def _loads(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(raw: Any, text: bytes) -> _Line:
    """Check a line. Raises ValueError, KeyError or TypeError."""
    line: _Line = {"uid": int(raw["uid"]), "level": float(raw["level"])}
    if not text.endswith(b"\n") or not math.isfinite(line["level"]):
        raise ValueError("cut off, or not a number")
    if "job" not in raw:
        return line
    ended_at, sec = float(raw["ended_at"]), float(raw["sec"])
    return {**line, "ended_at": ended_at, "sec": sec, "job": int(raw["job"]), "attempt": int(raw["attempt"])}
