"""The gate of a staged worker: it was started ahead of its job's turn, and waits here until a device is its own.

    jobs/<id>/gate.json   {number, start, environment}     written by the daemon: this start may use the device now

Before the gate a worker imports, reads and encodes its data; nothing there may initialise CUDA, so the device can still
be another one of the same kind than the one that it was staged for. A worker that starts at its job's turn has no gate.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

from honed.job.ahead import STAGED_VARIABLE, Pass
from honed.system import usage
from honed.system.error import InterruptedRunError
from honed.system.layout import JobLayout
from honed.worker.background import MAX_OOM_SCORE_ADJ, SESSION_NICE, be_nice, set_oom_score_adj

#: Seconds between looks at the gate: the device idles for half of it on average.
LOOK_INTERVAL_SEC = 0.05
#: Seconds between looks at it while the worker still prepares: its turn may come before it is ready.
HURRY_INTERVAL_SEC = 0.5
#: Share of the available memory up to which the weights are read ahead into the page cache.
MAX_READ_SHARE = 0.5
#: Has torch ask NVML whether there is a GPU, and not initialise CUDA for that.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Gate:
    """The gate of one start of a worker; open from the beginning if the worker was not staged."""

    def __init__(
        self,
        job: JobLayout,
        attempt: int,
        environment: MutableMapping[str, str] = os.environ,
        *,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the gate. `beat` is called while the worker waits, and may raise to end it."""
        start = environment.pop(STAGED_VARIABLE, "")
        self._path = job.gate_path
        self._wanted = (attempt, int(start)) if start else None
        self._environment = environment
        self._beat = beat
        if self.is_closed:
            environment[NVML_CHECK] = "1"
            be_nice(SESSION_NICE)
            self._oom_score_adj = set_oom_score_adj(MAX_OOM_SCORE_ADJ)
            threading.Thread(target=self._hurry, name="gate", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """True until the worker has gone through."""
        return self._wanted is not None

    def wait(self) -> None:
        """Wait until the device is free, and take its environment. Raises what `beat` raises."""
        while self.is_closed:
            self._beat()
            self._check_wanted()
            if (found := self._pass()) is not None:
                self._environment.update(found.environment)
                self._wanted = None
                be_nice(0)
                set_oom_score_adj(self._oom_score_adj)
            else:
                time.sleep(LOOK_INTERVAL_SEC)

    def _hurry(self) -> None:
        """Yield to other work no longer once the device waits for this worker."""
        while self.is_closed and self._pass() is None:
            time.sleep(HURRY_INTERVAL_SEC)
        while not be_nice(0):  # the kernel takes a few such wishes a second, of all users together
            time.sleep(HURRY_INTERVAL_SEC)

    def _check_wanted(self) -> None:
        """Raise InterruptedRunError once the job's directory is gone: nobody would ever open the gate."""
        if not self._path.with_name("plan.json").exists():
            raise InterruptedRunError("the job was removed")

    def _pass(self) -> Pass | None:
        with contextlib.suppress(OSError, ValueError):
            found = Pass.from_json(self._path.read_bytes())
            if (found.number, found.start) == self._wanted:
                return found
        return None


def read_ahead(model_dir: Path) -> int:
    """Have the kernel read a model's weights into the page cache, as far as memory is there. Returns the bytes."""
    left = int(usage.available_bytes() * MAX_READ_SHARE)
    num_bytes = 0
    for path in _weights(model_dir):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                if num_bytes + size > left:
                    break
                os.posix_fadvise(fd, 0, size, os.POSIX_FADV_WILLNEED)
                num_bytes += size
            finally:
                os.close(fd)
    return num_bytes


def _weights(model_dir: Path) -> Iterator[Path]:
    for pattern in ("*.safetensors", "*.bin"):
        yield from sorted(model_dir.glob(pattern))
