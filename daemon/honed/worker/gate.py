"""The gate of a staged worker: it was started ahead of its job's turn, and waits here until a device is its own.

    jobs/<id>/gate.json   {number, start, environment}     written by the daemon: this start may use the device now

Before the gate a worker imports, reads and encodes its data; nothing there may initialise CUDA, so the device can still
be another one of the same kind than the one that it was staged for. A worker that starts at its job's turn has no gate.

Hours may pass at the gate. If a file that was read before it changes meanwhile, the worker begins again, in place: the
process executes itself, before its turn as a staged worker and after it as one that was not. The files are looked at
by a thread: one on a network that does not answer keeps nobody at the gate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

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
#: Seconds for which a worker whose turn has come waits for the last look at them.
MAX_LOOK_SEC = 10.0
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
        again: Callable[[Mapping[str, str]], NoReturn] | None = None,
        kept: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the gate. `beat` is called while the worker waits, and may raise to end it. `again` begins the
        process again, with this environment and what it has taken out of that (`kept`)."""
        start = environment.pop(STAGED_VARIABLE, "")
        self._path = job.gate_path
        self._wanted = (attempt, int(start)) if start else None
        self._staged = {STAGED_VARIABLE: start}
        self._environment = environment
        self._beat = beat
        self._again = again or _execute
        self._kept = kept or {}
        self._paths: list[Path] = []
        self._seen: Mapping[Path, tuple[int, ...]] = {}  # as the files were when they were read
        #: As they were at the last look, if they had changed.
        self._changed: Mapping[Path, tuple[int, ...]] | None = None
        self._look: _Look | None = None  # the one that is under way
        if self.is_closed:
            environment[NVML_CHECK] = "1"
            self._background = Background()
            threading.Thread(target=self._hurry, name="gate", daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """True until the worker has gone through."""
        return self._wanted is not None

    def wait(self, *, warn: Callable[[str], None] = lambda _text: None) -> None:
        """Wait until the device is free, and take its environment. Raises what `beat` raises, and InterruptedRunError
        if a library uses the device already: it is still another job's."""
        look_at = 0.0
        if self.is_closed and _has_initialised_cuda():
            raise InterruptedRunError("a library has initialised CUDA ahead of the job's turn, so it is not staged")
        while self.is_closed:
            self._beat()
            self._check_wanted()
            if (found := self._pass()) is not None:
                self._environment.update(found.environment)
                self._wanted = None
                self._background.end()
                self._look_last(warn)
            elif time.monotonic() >= look_at:
                if (now := self._seen_now(LOOK_INTERVAL_SEC)) is not None:
                    self._check_files(now, self._staged)
                    look_at = time.monotonic() + FILES_INTERVAL_SEC
            else:
                time.sleep(LOOK_INTERVAL_SEC)

    def watch(self, paths: Iterable[Path]) -> None:
        """Note the files that are read from now on: they must stay as they are."""
        if self.is_closed:
            self._paths = list(paths)
            self._seen = _Look(self._paths).identities()

    def _seen_now(self, max_sec: float) -> Mapping[Path, tuple[int, ...]] | None:
        """Return the files as they are; None if the look at them is still under way after so many seconds."""
        if self._look is None:
            self._look = _Look(self._paths)
            self._look.start()
        self._look.join(max_sec)
        if self._look.is_alive():
            return None
        found, self._look = self._look.found, None
        return found

    def _look_last(self, warn: Callable[[str], None]) -> None:
        """Begin again if a file has changed, as far as that is known soon."""
        until = time.monotonic() + MAX_LOOK_SEC
        # The one that is under way may have begun before a change.
        num_looks = (1 if self._look is None else 2) if self._paths else 0
        while num_looks and (self._look is None or time.monotonic() < until):
            self._beat()
            if (now := self._seen_now(LOOK_INTERVAL_SEC)) is not None:
                self._check_files(now, {})
                num_looks -= 1
        if num_looks and self._look is not None:
            warn(
                f"{self._look.at}: its file system has not answered for {MAX_LOOK_SEC:g} s: the run goes on without "
                "knowing whether the file has changed since it was read"
            )

    def _check_files(self, now: Mapping[Path, tuple[int, ...]], staged: Mapping[str, str]) -> None:
        """Begin again if a file has changed that was read; `staged`: the variables of a worker that waits again. As
        long as it waits it begins again only when the files have not changed for a while."""
        changed = sorted(path for path in {*now, *self._seen} if now.get(path) != self._seen.get(path))
        is_over = not staged or now == self._changed
        self._changed = now
        if changed and is_over:
            print(f"{changed[0]} has changed: the worker begins again", file=sys.stderr, flush=True)
            self._wanted = None
            self._background.end()
            self._again({**self._environment, **self._kept, **staged})

    def _hurry(self) -> None:
        """Yield to other work no longer once the device waits for this worker."""
        while self.is_closed and self._pass() is None:
            time.sleep(HURRY_INTERVAL_SEC)
        if self.is_closed:
            self._background.hurry()

    def _check_wanted(self) -> None:
        """Raise InterruptedRunError once the job's directory is gone: nobody would ever open the gate."""
        if not self._path.with_name("plan.json").exists():
            raise InterruptedRunError("the job was removed")

    def _pass(self) -> Pass | None:
        """Return the pass of this start, if honed wrote it: the job's user may write into its directory, too."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            owner = self._path.with_name("plan.json").stat().st_uid
            with open(untrusted.open_plain(PersonPath.own(self._path)), "rb") as file:  # noqa: PTH123 - a descriptor
                if os.fstat(file.fileno()).st_uid != owner:
                    return None
                found = Pass.from_json(file.read(MAX_BYTES))
            if (found.number, found.start) == self._wanted:
                return found
        return None


class _Look(threading.Thread):
    """A look at files, beside who waits for it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(name="files", daemon=True)
        self._paths = paths
        self.at: Path | None = None  #: the file that is looked at
        self.found: dict[Path, tuple[int, ...]] = {}

    def run(self) -> None:
        self.found = self.identities()

    def identities(self) -> dict[Path, tuple[int, ...]]:
        """Return what tells each file's content from another without reading it; without files that are not there."""
        found: dict[Path, tuple[int, ...]] = {}
        for path in self._paths:
            self.at = path
            with contextlib.suppress(OSError):
                info = path.stat()
                found[path] = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        return found


def _execute(environment: Mapping[str, str]) -> NoReturn:
    """Execute this process's program again."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))


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
