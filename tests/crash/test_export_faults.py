"""Every file operation of an export is the last one, or fails: at its place is the output before it or the new one,
whole; and the next attempt leaves the new one and nothing else."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash import saves
from crash.saves import OUTPUT, Save
from honed.system.error import HonedError
from honed.worker import assignment

#: All that changes something, and what opens it. Python's own files write by themselves: see `Hits.open`.
OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "chmod", "sendfile")
KILLED = 9
FAULTS = {"KILL": None, **{name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES", "EROFS")}}
CASES = [(over, fault) for over in ("nothing", "an earlier one") for fault in FAULTS]
CASES += [("an earlier one, where names cannot be exchanged", fault) for fault in ("KILL", "ENOSPC")]


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


@pytest.mark.parametrize(("over", "fault"), CASES)
def test_an_export_hit_at_any_operation_leaves_a_whole_output_and_the_next_one_the_new(
    tmp_path: Path, over: str, fault: str
) -> None:
    can_exchange = "cannot" not in over
    # Killed between two renames an earlier attempt's output waits beside for the next attempt, which replaces it.
    before = {None if over == "nothing" else "before", *([None] if fault == "KILL" and not can_exchange else [])}
    at = 0
    while True:
        at += 1
        root = tmp_path / str(at)
        saves.prepare(root)
        output_dir = root / "out" / OUTPUT
        if over != "nothing":
            make(root, "before")
        was_hit = make_hit(root, "after", at=at, fault=FAULTS[fault], can_exchange=can_exchange)
        found = saves.output_word(output_dir)
        assert found == "after" or (was_hit and found in before), f"{fault} at operation {at}: {found}"
        make(root, "again")
        assert saves.output_word(output_dir) == "again"
        assert [path.name for path in output_dir.parent.iterdir()] == [OUTPUT]
        if not was_hit:
            break
    print(f"{fault} over {over}: {at - 1} operations")
    assert at > 40, "the faults were really met"
