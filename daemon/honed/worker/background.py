"""Work ahead of a job's turn: it yields to other work, and is the first to go where memory runs out."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

#: Nice value, 0 to 19, of the session of a worker that works ahead, where the kernel groups processes by session
#: (sched(7)). It can return to 0 without a privilege, which a process's own nice value cannot.
SESSION_NICE = 19
SESSION_NICE_PATH = Path("/proc/self/autogroup")
#: Of all processes the kernel ends this one first: it costs the least.
MAX_OOM_SCORE_ADJ = "1000"
#: Seconds between two tries to return to the nice value 0: the kernel takes a few a second, of all users together.
RETRY_SEC = 0.5


def be_nice(value: int) -> bool:
    """Set the nice value of the session. Returns False if the kernel wants to be asked again later."""
    try:
        SESSION_NICE_PATH.write_text(str(value))
    except BlockingIOError:
        return False
    except OSError:
        pass  # a kernel without groups by session
    return True


def set_oom_score_adj(value: str) -> str:
    """Set how soon the kernel ends this process if memory runs out, and return what it was."""
    path = Path("/proc/self/oom_score_adj")
    before = "0"
    with contextlib.suppress(OSError):
        before = path.read_text()
        path.write_text(value)
    return before


class Background:
    """The state of a process that works ahead, from its creation to `end`."""

    def __init__(self) -> None:
        be_nice(SESSION_NICE)
        self._oom_score_adj = set_oom_score_adj(MAX_OOM_SCORE_ADJ)

    def end(self) -> None:
        """Be a process as any other again; a thread does what the kernel does not take at once."""
        set_oom_score_adj(self._oom_score_adj)
        if not be_nice(0):
            threading.Thread(target=_hurry, name="background", daemon=True).start()


def _hurry() -> None:
    while not be_nice(0):
        time.sleep(RETRY_SEC)
