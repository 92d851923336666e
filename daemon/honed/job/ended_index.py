"""The ended jobs in brief, in one file, so that a start does not read fifty thousand entries.

    var/lib/honed/ended.index     a line about the file, lines of jobs, a line with the checksum of all before

It only saves time: a job in it counts if its entry is still the file that it was made from, and had been so for a
moment; every other entry is read. It is written anew once it differs in more than a share of the jobs. Nothing is lost
with it; so it is not synced, and a damaged one, or one of another honed, is begun anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from honed.job.brief import UNKNOWN, Brief, Listed
from honed.job.damaged import begun_anew
from honed.job.job import State, SweepName

log = logging.getLogger(__name__)

#: The share of the ended jobs in which the file may differ: 250 of 50,000 are read within some milliseconds.
MAX_BEHIND = 0.005
#: Jobs of one line, which is written and read at once.
NUM_PER_LINE = 100

#: Seconds in which a file system may give two changes the same time.
TICK_SEC = 2.0

#: The version is raised when a field gets another meaning.
_FORMAT = {"version": 1, "fields": list(Brief._fields)}
_NOTHING: tuple[float, dict[int, Brief]] = (0.0, {})
_STATES = {state.value: state for state in State}


class EndedIndex:
    """The file, and how many entries it lacks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.until = 0.0  #: entries that have changed since then count as changed; seconds since the epoch
        self.num_behind = 0  #: jobs in which it differs from those that are there

    def read(self) -> dict[int, Brief]:
        """Return what the file has, by number; nothing if there is none, a damaged one, or another honed's. Raises
        OSError for a fault of the machine."""
        self.until, briefs = begun_anew(self._path, _parsed) or _NOTHING
        return briefs

    def compare(self, known: dict[int, Brief], jobs: Collection[Listed]) -> None:
        """Count in how many jobs the file differs from those that are there; `known` is what was read."""
        num_same = sum(known.get(job.id) is job for job in jobs)
        num_ended = sum(job.state.is_final for job in jobs)
        self.num_behind = len(known) + num_ended - 2 * num_same

    def tend(self, jobs: Iterable[Listed]) -> Iterator[None]:
        """Write the file anew if it differs in many jobs, a bite at a time. After an error it is as it was: the next
        call tries again."""
        ended, num_behind = [job for job in jobs if isinstance(job, Brief)], self.num_behind
        if num_behind > MAX_BEHIND * len(ended):
            try:
                yield from _written(self._path, ended)
            except OSError as error:
                log.warning("%s: not written, so the next start reads the ended jobs' entries: %s", self._path, error)
            else:
                self.num_behind -= num_behind


def _parsed(content: bytes) -> tuple[float, dict[int, Brief]]:
    if not content:  # after a power cut
        return _NOTHING
    *lines, checksum, rest = content.split(b"\n")
    if rest or int(checksum) != zlib.crc32(content[: -len(checksum) - 1]):
        raise ValueError("it is not whole")
    head = json.loads(lines[0])
    if {**head, "began": None} != {**_FORMAT, "began": None}:
        return _NOTHING
    return head["began"] - TICK_SEC, {brief.id: brief for line in lines[1:] for brief in map(_brief, json.loads(line))}


def _brief(raw: list[Any]) -> Brief:
    brief = Brief(*raw)
    return brief._replace(
        name=sys.intern(brief.name),
        state=_STATES[brief.state],
        outcome=brief.outcome and sys.intern(brief.outcome),
        sweep=brief.sweep and SweepName(*brief.sweep),
    )


def _written(path: Path, jobs: Iterable[Brief]) -> Iterator[None]:
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    known = (job for job in jobs if job.identity != UNKNOWN)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)  # it has everybody's jobs
    with os.fdopen(fd, "wb") as file:
        checksum = 0
        head = {**_FORMAT, "began": os.fstat(file.fileno()).st_mtime}  # by the clock of its file system
        for data in itertools.chain([head], _batches(known)):
            line = json.dumps(data).encode() + b"\n"
            checksum = zlib.crc32(line, checksum)
            file.write(line)
            yield
        file.write(f"{checksum}\n".encode())
    os.replace(temporary, path)  # noqa: PTH105


def _batches(jobs: Iterator[Brief]) -> Iterator[list[Brief]]:
    while batch := list(itertools.islice(jobs, NUM_PER_LINE)):
        yield batch
