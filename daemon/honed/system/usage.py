"""The resource use of this process, as the standard metrics `process_*` have it, and the memory that is left: of the
machine, and below the limits of control groups; from /proc and /sys/fs/cgroup, which every sandbox shows."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import TypedDict

#: Fields of /proc/self/stat behind the command, from 0: see proc_pid_stat(5).
_START_TICKS, _VIRTUAL_BYTES, _RESIDENT_PAGES = 19, 20, 21


class Usage(TypedDict):
    """The resource use of a process."""

    cpu_seconds: float  #: user and system time
    start_time_seconds: float  #: since the epoch
    resident_memory_bytes: int
    virtual_memory_bytes: int
    open_fds: int
    max_fds: int


def available_bytes(group: str = "", *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that processes of a control group could still get; 0 if that is not known.

    `group`: its path in cgroup2, where it exists; else this process's own.
    """
    left = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
    if not group or not (sysfs / group).is_dir():
        group = ""
        with contextlib.suppress(OSError):
            lines = (proc / "self/cgroup").read_text().splitlines()
            group = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    parts = Path(group).parts
    return min([left, *(_left_below(sysfs.joinpath(*parts[:depth])) for depth in range(1, len(parts) + 1))])


def _left_below(group: Path) -> int:
    """Return what a control group's own limit leaves, very much without one; cache that can be reclaimed is free."""
    with contextlib.suppress(OSError, ValueError):
        limits = [(group / name).read_text().strip() for name in ("memory.max", "memory.high")]
        limit = min((int(item) for item in limits if item != "max"), default=None)
        if limit is not None:
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            return max(0, limit - used)
    return sys.maxsize


def usage() -> Usage:
    """Return the resource use of this process. Raises OSError where there is no /proc."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return {
        "cpu_seconds": times.user + times.system,
        "start_time_seconds": round(time.time() - age, 2),
        "resident_memory_bytes": int(fields[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE"),
        "virtual_memory_bytes": int(fields[_VIRTUAL_BYTES]),
        "open_fds": len(os.listdir("/proc/self/fd")) - 1,  # noqa: PTH208 - one is that of the listing
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }
