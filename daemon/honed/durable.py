"""Files that survive a power cut: written whole beside, synced, renamed, and the directory synced."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, data: bytes, *, mode: int = 0o644) -> Path:
    """Write `data` to a hidden file beside `path`, synced; the caller renames it. Returns the hidden file's path."""
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    return temporary


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`: after a crash there is the old file or the new one, never a part."""
    write_beside(path, data, mode=mode).rename(path)
    sync_dir(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    write(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode(), mode=mode)


def make_dir(path: Path, *, mode: int = 0o755) -> None:
    """Make a directory and the missing ones above it, each durable in its parent."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(mode=mode, exist_ok=True)
        sync_dir(directory.parent)
