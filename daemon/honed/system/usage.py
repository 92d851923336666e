"""The resource use of this process, as the standard metrics `process_*` have it, and the machine's free memory; from
/proc/self and /proc/meminfo, which every sandbox shows."""

from __future__ import annotations

import contextlib
import os
import resource
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


def available_bytes() -> int:
    """Return the memory of the machine that processes could still get; 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


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
