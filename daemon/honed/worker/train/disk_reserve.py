"""Disk space for checkpoints: checked before each is written, made by removing older ones, returned after a failure.

The newest whole checkpoint and the best are never removed, nor the one that was the best when the newest was made.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from honed.job import tree
from honed.job.progress import gib
from honed.system.error import DiskShortError
from honed.worker.train import checkpoint

#: Factor by which a checkpoint is assumed to exceed the last one, and bytes that are left to everybody else.
MARGIN, SPARE_BYTES = 1.1, 16 * 2**20
#: Bytes that an attempt reserves for its result.
RESERVE_BYTES = 64 * 1024
RESERVE = ".reserve"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
#: Messages of libraries that write files themselves, for a lack of space: safetensors is Rust.
_NO_ROOM_WORDS = ("No space left on device", "os error 28)", "Disk quota exceeded", "os error 122)")


def is_no_room(error: BaseException) -> bool:
    """Return whether an error of any library means that a disk was full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_ROOM
    return any(word in str(error) for word in _NO_ROOM_WORDS)


def needed_bytes(checkpoints_dir: Path, written_bytes: int) -> int:
    """Return the bytes for the next checkpoint: the size of the last, or of the tensors to write, and a margin."""
    whole = _whole(checkpoints_dir)
    size = size_of(whole[-1]) if whole else written_bytes
    return int(size * MARGIN) + SPARE_BYTES


def written_bytes(model: Any, optimizer: Any, *, is_whole: bool) -> int:
    """Return the bytes of a checkpoint's tensors: the weights (an adapter's trained ones) and the optimizer's state.

    Before its first step the optimizer has no state: two moments are assumed.
    """
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if is_whole or parameter.requires_grad
    )
    kept = [item for state in optimizer.state.values() for item in state.values() if hasattr(item, "element_size")]
    return weights + (sum(item.numel() * item.element_size() for item in kept) if kept else 2 * weights)


def size_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system for users other than root."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def make(checkpoints_dir: Path, num_bytes: int, *, keep: set[Path], log: Callable[[str], None]) -> None:
    """Ensure that so many bytes are free, by removing older checkpoints if necessary. Raises DiskShortError."""
    if free_bytes(checkpoints_dir) >= num_bytes:
        return
    for path in _spare(checkpoints_dir, keep):
        _give_up(path)
        log(f"removing {path.name}: the disk is almost full")
        if free_bytes(checkpoints_dir) >= num_bytes:
            return
    raise short(checkpoints_dir, num_bytes)


def short(checkpoints_dir: Path, num_bytes: int) -> DiskShortError:
    error = DiskShortError(
        f"{checkpoints_dir}: a checkpoint needs {gib(num_bytes)}, but only {gib(free_bytes(checkpoints_dir))} is free",
        hint="free disk space; the job then resumes automatically from its last checkpoint",
    )
    error.needed_bytes = num_bytes
    return error


def _give_up(path: Path) -> None:
    """Remove an older checkpoint, or the rest of one. A removal cut short does not look like a damaged checkpoint."""
    if path.name.startswith("checkpoint-"):
        with contextlib.suppress(OSError):
            path = path.rename(path.with_name(f".{path.name}.old"))
    tree.remove(path)


def _spare(checkpoints_dir: Path, keep: set[Path]) -> list[Path]:
    """Return what may be removed, the oldest first: leftovers, then whole checkpoints but the newest and `keep`."""
    leftovers = [*checkpoints_dir.glob(".checkpoint-*"), *checkpoints_dir.glob("checkpoint-*.damaged")]
    return [*sorted(leftovers), *(path for path in _whole(checkpoints_dir)[:-1] if path not in keep)]


def _whole(checkpoints_dir: Path) -> list[Path]:
    paths = [path for path in checkpoints_dir.glob("checkpoint-*") if (path / checkpoint.MANIFEST).is_file()]
    return sorted(paths, key=lambda path: int(path.name.rpartition("-")[2]) if path.name[-1].isdecimal() else -1)


class Reserve:
    """A few blocks on disk that are freed so that an attempt's result can be written when there is no other room."""

    def __init__(self, attempt_dir: Path) -> None:
        self._path = attempt_dir / RESERVE
        with contextlib.suppress(OSError):  # then there is no reserve
            fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, RESERVE_BYTES)
            finally:
                os.close(fd)

    def spend(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
