"""The gate of a staged worker: it was started ahead of its job's turn, and waits here until a device is its own.

    jobs/<id>/gate.json   {number, start, environment}     written by the daemon: this start may use the device now

Before the gate a worker imports, reads and encodes its data; nothing there may initialise CUDA, so any device of the
same kind will do. A worker that starts at its job's turn has no gate.

Hours may pass at the gate. If a file that was read before it changes meanwhile, the worker ends, and its job starts
without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path

from honed.job.ahead import MAX_BYTES, STAGED_VARIABLE, Pass
from honed.system import untrusted, usage
from honed.system.error import InterruptedRunError
from honed.system.layout import JobLayout
from honed.system.personpath import PersonPath
from honed.worker.background import Background

#: Seconds between looks at the gate: the device idles for half of it on average.
LOOK_INTERVAL_SEC = 0.05
#: Seconds between looks at it while the worker still prepares: its turn may come before it is ready.
HURRY_INTERVAL_SEC = 0.5
#: Seconds between looks at the files that were read before the gate.
FILES_INTERVAL_SEC = 15.0
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
        self._seen: dict[Path, tuple[int, ...]] = {}  # what tells each file's content from another, when it was read
        if self.is_closed:
            environment[NVML_CHECK] = "1"
            self._background = Background()
            self.watch([job.plan_path])  # it is read before the other files are known
            threading.Thread(target=self._hurry, name="gate", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """True until the worker has gone through."""
        return self._wanted is not None

    def wait(self) -> None:
        """Wait until the device is free, and take its environment. Raises what `beat` raises, and InterruptedRunError
        if a file has changed, the job was removed, or a library uses the device, which is still another job's."""
        look_at = 0.0
        if self.is_closed and _has_initialised_cuda():
            raise InterruptedRunError("a library has initialised CUDA ahead of the job's turn, so it is not staged")
        while self.is_closed:
            self._beat()
            own = self._pass()
            if own is not None or time.monotonic() >= look_at:
                self._check_files()
                look_at = time.monotonic() + FILES_INTERVAL_SEC
            if own is not None:
                self._environment.update(own.environment)
                self._wanted = None
                self._background.end()
            else:
                time.sleep(LOOK_INTERVAL_SEC)

    def watch(self, paths: Iterable[Path]) -> None:
        """Note the files that are read from now on: they must stay as they are."""
        self._seen = {path: _identity(path) for path in paths} | self._seen

    def _check_files(self) -> None:
        """Raise InterruptedRunError if a file has changed that was read."""
        for path, seen in self._seen.items():
            if _identity(path) != seen:
                raise InterruptedRunError(f"{path} has changed since it was read ahead of the job's turn")

    def _hurry(self) -> None:
        """Yield to other work no longer once the device waits for this worker."""
        while self.is_closed and self._pass() is None:
            time.sleep(HURRY_INTERVAL_SEC)
        if self.is_closed:
            self._background.hurry()

    def _pass(self) -> Pass | None:
        """Return the pass of this start, if honed wrote it: the job's user may write into its directory, too."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            owner = self._path.with_name("plan.json").stat().st_uid
            with open(untrusted.open_plain(PersonPath.own(self._path)), "rb") as file:  # noqa: PTH123 - a descriptor
                if os.fstat(file.fileno()).st_uid != owner:
                    return None
                read = Pass.from_json(file.read(MAX_BYTES))
            if (read.number, read.start) == self._wanted:
                return read
        return None


def _identity(path: Path) -> tuple[int, ...]:
    """Return what tells a file's content from another without reading it; nothing of one that is not there."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _has_initialised_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


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
