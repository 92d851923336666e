"""Room for checkpoints: looked for before each is written, made where there is too little, and given back where one
could not be finished.

What is removed are older checkpoints: never the newest whole one, never the best.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honed.job.progress import gib
from honed.system.error import DiskShortError
from honed.worker.train import checkpoint

#: How much more than the last one a checkpoint is taken to need, and bytes that are left to everybody else.
MARGIN, SPARE_BYTES = 1.1, 16 * 2**20
#: Bytes that an attempt keeps for the word on its end.
RESERVE_BYTES = 64 * 1024
RESERVE = ".reserve"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: The same, from libraries that write files themselves: safetensors is Rust.
_NO_ROOM_WORDS = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)")


def is_no_room(error: BaseException) -> bool:
    """Whether a disk was full, whoever says so."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_ROOM
    return any(word in str(error) for word in _NO_ROOM_WORDS)


def needed_bytes(checkpoints_dir: Path, written_bytes: int) -> int:
    """What the next checkpoint takes: as much as the last; the first, the tensors that are written."""
    whole = _whole(checkpoints_dir)
    size = size_of(whole[-1]) if whole else written_bytes
    return int(size * MARGIN) + SPARE_BYTES


def written_bytes(model: Any, optimizer: Any, *, is_whole: bool) -> int:
    """Bytes of a checkpoint's tensors: the weights, of an adapter those that are trained, and what the optimizer keeps.

    Before its first step it has nothing yet: two moments are taken to be written.
    """
    weights = sum(each.numel() * each.element_size() for each in model.parameters() if is_whole or each.requires_grad)
    kept = [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "element_size")]
    return weights + (sum(each.numel() * each.element_size() for each in kept) if kept else 2 * weights)


def size_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """Free bytes of the file system, for one who is not root."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def make(checkpoints_dir: Path, num_bytes: int, *, keep: set[Path], tell: Callable[[str], None]) -> None:
    """See to it that so many bytes are free, older checkpoints given up for them. Raises DiskShortError."""
    if free_bytes(checkpoints_dir) >= num_bytes:
        return
    for path in _spare(checkpoints_dir, keep):
        _give_up(path)
        tell(f"{path.name} is removed: the disk is filling up")
        if free_bytes(checkpoints_dir) >= num_bytes:
            return
    raise short(checkpoints_dir, num_bytes)


def short(checkpoints_dir: Path, num_bytes: int) -> DiskShortError:
    error = DiskShortError(
        f"{checkpoints_dir}: a checkpoint needs {gib(num_bytes)}, and {gib(free_bytes(checkpoints_dir))} are free",
        hint="make room; the job goes on by itself from its last checkpoint once there is enough",
    )
    error.needed_bytes = num_bytes
    return error


def _give_up(path: Path) -> None:
    """Remove an older checkpoint, or what is left of one; cut short, it does not look like one that was damaged."""
    if path.name.startswith("checkpoint-"):
        with contextlib.suppress(OSError):
            path = path.rename(path.with_name(f".{path.name}.old"))
    shutil.rmtree(path, ignore_errors=True)


def _spare(checkpoints_dir: Path, keep: set[Path]) -> list[Path]:
    """What may go, the oldest first: leftovers, then whole ones that are neither the newest nor the best."""
    leftovers = [*checkpoints_dir.glob(".checkpoint-*"), *checkpoints_dir.glob("checkpoint-*.damaged")]
    return [*sorted(leftovers), *(path for path in _whole(checkpoints_dir)[:-1] if path not in keep)]


def _whole(checkpoints_dir: Path) -> list[Path]:
    """Those that say that they are whole, the oldest first."""
    found = [path for path in checkpoints_dir.glob("checkpoint-*") if (path / checkpoint.MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]) if path.name[-1].isdecimal() else -1)


class Reserve:
    """A few blocks that are given up when the word on an attempt's end finds no other room."""

    def __init__(self, attempt_dir: Path) -> None:
        self._path = attempt_dir / RESERVE
        with contextlib.suppress(OSError):  # then there is none
            fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
            finally:
                os.close(fd)

    def spend(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
