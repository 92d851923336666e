"""Work ahead of a job's turn: it yields to other work, and is the first to go where memory runs out.

The kernel shares processors between sessions where no cgroup has a share of its own (sched_autogroup in sched(7)), and
between processes within such a cgroup. So a worker that works ahead lowers its session, which always may return, and
its processes too, if they may return: honed-job@.service allows it by `LimitNICE=`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import threading
import time
from pathlib import Path

#: Nice value, 0 to 19, of a session and of its processes while they work ahead.
NICE = 19
SESSION_NICE_PATH = Path("/proc/self/autogroup")
#: Of all processes the kernel ends this one first: it costs the least.
MAX_OOM_SCORE_ADJ = "1000"
#: Seconds between two tries to return to the nice value 0: the kernel takes a few a second, of all users together.
RETRY_SEC = 0.5
#: The lowest priority of the class "best effort": ioprio_set(2).
IO_PRIORITY = (2 << 13) | 7
#: Numbers of ioprio_set and ioprio_get, for which the C library has no function.
IO_CALLS = {"x86_64": (251, 252), "aarch64": (30, 31)}
WHO_PROCESS = 1
CAP_SYS_NICE = 23


class Background:
    """The state of a process that works ahead, with its children, from its creation to `end`."""

    def __init__(self) -> None:
        self._oom_score_adj = _set_oom_score_adj(MAX_OOM_SCORE_ADJ)
        self._io_priority = _call_io(1, WHO_PROCESS)
        now = os.getpriority(os.PRIO_PROCESS, 0)
        limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
        self._nice = now if may_return_to(now, limit, _capabilities()) else None
        self._set(IO_PRIORITY, max(now, NICE))
        _be_nice(NICE)

    def hurry(self) -> None:
        """Yield to other work no longer. A thread does what the kernel does not take at once."""
        self._set(self._io_priority, self._nice)
        if not _be_nice(0):
            threading.Thread(target=_return, name="background", daemon=True).start()

    def _set(self, io_priority: int | None, nice: int | None) -> None:
        """Set the priorities of this process and its descendants, of those that could be set back."""
        for task in _tasks():
            if self._io_priority is not None and io_priority is not None:
                _call_io(0, WHO_PROCESS, io_priority, task=task)
            if self._nice is not None and nice is not None:
                # It may be gone, or the limit may have changed: the worker is slow then, and right.
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, task, nice)

    def end(self) -> None:
        """Be a process as any other again."""
        _set_oom_score_adj(self._oom_score_adj)
        self.hurry()


def _be_nice(value: int) -> bool:
    """Set the nice value of the session. Returns False if the kernel wants to be asked again later."""
    try:
        SESSION_NICE_PATH.write_text(str(value))
    except BlockingIOError:
        return False
    except OSError:
        pass  # a kernel without groups by session
    return True


def _return() -> None:
    while not _be_nice(0):
        time.sleep(RETRY_SEC)


def may_return_to(nice: int, limit: int, capabilities: int) -> bool:
    """Return whether the kernel lets a process with this soft RLIMIT_NICE and these effective capabilities, a bit each,
    lower its nice value to this one: setpriority(2), getrlimit(2)."""
    return limit == resource.RLIM_INFINITY or limit >= 20 - nice or bool(capabilities >> CAP_SYS_NICE & 1)


def _capabilities() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    return 0


def _tasks() -> list[int]:
    """Return the threads of this process and of its descendants. Those that begin later inherit from them."""
    task_ids: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        with contextlib.suppress(OSError, ValueError):  # one that has ended
            for task in Path(f"/proc/{ahead.pop()}/task").iterdir():
                task_ids.append(int(task.name))
                with contextlib.suppress(OSError):  # a kernel without this file
                    ahead += map(int, (task / "children").read_text().split())
    return task_ids


def _call_io(which: int, who: int, *priority: int, task: int = 0) -> int | None:
    """Call ioprio_set (0) or ioprio_get (1) for a thread, this one by default; None where that is not possible."""
    if (numbers := IO_CALLS.get(platform.machine())) is None:
        return None
    answer = int(ctypes.CDLL(None, use_errno=True).syscall(numbers[which], who, task, *priority))
    return None if answer < 0 else answer


def _set_oom_score_adj(value: str) -> str:
    """Set how soon the kernel ends this process if memory runs out, and return what it was."""
    path = Path("/proc/self/oom_score_adj")
    before = "0"
    with contextlib.suppress(OSError):
        before = path.read_text()
        path.write_text(value)
    return before
