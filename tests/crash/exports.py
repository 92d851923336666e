"""An export of which every operation is the last one, or fails, one after the other: `python exports.py DIRECTORY OVER
FAULT` prints a line of JSON, what was wrong at which operation and how many there are. It forks for each, so it is a
small process."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash import saves
from crash.saves import OUTPUT, Save
from honed.system.error import HonedError
from honed.worker import assignment

#: All that changes something, and what opens it. Python's own files write by themselves: see `Hits.open`.
OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "chmod", "sendfile")
KILLED = 9
EARLIER, NOT_EXCHANGED = "an earlier one", "an earlier one, where names cannot be exchanged"
FAULTS = {"KILL": None, **{name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES", "EROFS")}}


class Hits:
    """In this process the n-th operation is the last one, or fails."""

    def __init__(self, at: int, fault: int | None) -> None:
        self.num_seen = 0
        self._at, self._fault = at, fault

    def count(self) -> None:
        self.num_seen += 1
        if self.num_seen == self._at:
            if self._fault is None:
                os._exit(KILLED)
            raise OSError(self._fault, os.strerror(self._fault))

    def plant(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._wrap(getattr(os, name)))
        io.open = shutil.open = self.open  # type: ignore[assignment,attr-defined]
        ctypes.CDLL = self._wrap(ctypes.CDLL)  # type: ignore[assignment,misc]  # for what Python has no name for

    def _wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **keys: Any) -> Any:
            self.count()
            return operation(*arguments, **keys)

        return faulty

    def open(self, path: Path, mode: str = "r", _size: int = -1, *how: Any, **named: Any) -> Any:
        """As Python's, but that what it writes is counted, too."""
        hits = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                hits.count()
                return super().write(data)

        self.count()
        raw = File(path, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *how, **named)


def make(root: Path, word: str) -> None:
    saves.save_output(assignment.read(saves.job_layout(root).dir, 1), Save(OUTPUT, word))


def make_hit(root: Path, word: str, *, at: int, fault: int | None, can_exchange: bool) -> bool:
    """The same in a process of its own, hit at the n-th operation. Returns whether there was an n-th."""
    pid = os.fork()
    if pid == 0:
        if not can_exchange:
            ctypes.CDLL = lambda _name: object()  # type: ignore[assignment,misc]  # a C library without renameat2
        hits = Hits(at, fault)
        job = assignment.read(saves.job_layout(root).dir, 1)
        hits.plant()
        try:
            saves.save_output(job, Save(OUTPUT, word))
        except (OSError, HonedError):
            pass
        finally:
            os._exit(0 if hits.num_seen < at else KILLED)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def violations(directory: Path, over: str, fault: str) -> tuple[dict[int, str], int]:
    """What was wrong at which operation, and how many there are."""
    can_exchange = over != NOT_EXCHANGED
    # Killed between two renames an earlier attempt's output waits beside for the next attempt, which replaces it.
    before = {None if over == "nothing" else "before", *([None] if fault == "KILL" and not can_exchange else [])}
    wrong: dict[int, str] = {}
    at, was_hit = 0, True
    while was_hit:
        at += 1
        root = directory / str(at)
        saves.prepare(root)
        output_dir = root / "out" / OUTPUT
        if over != "nothing":
            make(root, "before")
        was_hit = make_hit(root, "after", at=at, fault=FAULTS[fault], can_exchange=can_exchange)
        found = saves.output_word(output_dir)
        if found != "after" and (not was_hit or found not in before):
            wrong[at] = f"the output is {found}"
        make(root, "again")
        again, there = saves.output_word(output_dir), sorted(path.name for path in output_dir.parent.iterdir())
        if again != "again" or there != [OUTPUT]:
            wrong[at] = f"the next attempt's is {again}, and there are {there}"
    return wrong, at - 1


if __name__ == "__main__":
    print(json.dumps(violations(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
