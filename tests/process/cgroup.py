"""A memory cgroup of its own for a test, of the version that this machine has."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from waiting import wait_for


@contextlib.contextmanager
def limited_to(num_bytes: int, name: str) -> Iterator[Path]:
    """The cgroup's directory; the pids in its `cgroup.procs` share that much memory. Skips without memory cgroups."""
    base = Path("/sys/fs/cgroup")
    is_first = (base / "memory").is_dir()
    made = (base / "memory" if is_first else base) / f"honed-{name}-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(num_bytes))
    except OSError as error:
        pytest.skip(f"needs a memory cgroup of its own: {error.strerror}")
    try:
        yield made
    except BaseException:
        for pid in (made / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        raise
    finally:
        wait_for(lambda: not (made / "cgroup.procs").read_text(), what="the end of its processes")
        made.rmdir()
