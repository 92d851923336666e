"""File systems that are mounted in a tree, also one that never answers, as a user's own server can."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_DETACH = 2

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs root and /dev/fuse"
)


@contextlib.contextmanager
def mounted(place: Path, kind: str = "tmpfs", options: str = "size=64k") -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"test", os.fsencode(place), kind.encode(), ctypes.c_ulong(0), options.encode()):
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    fd = os.open(place, os.O_PATH | os.O_CLOEXEC)  # the mount, wherever it is moved with its directory
    try:
        yield
    finally:
        libc.umount2(f"/proc/self/fd/{fd}".encode(), _MNT_DETACH)
        os.close(fd)


@contextlib.contextmanager
def hanging(place: Path) -> Iterator[None]:
    """Mount a file system over a directory or a file whose server never answers."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    mode = "40000" if place.is_dir() else "100000"
    options = f"fd={fd},rootmode={mode},user_id=0,group_id=0,allow_other"
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mounted(place, "fuse", options))
            stack.callback(os.close, fd)  # first: who waits for an answer gets an error, and the mount can go
            yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
