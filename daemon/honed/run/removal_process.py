"""The child that measures and removes files (`honed.job.removal`): one at a time, for many items, while others wait.

A failed item is tried again after 5 s, then ever later, up to 10 min. A child that shows no progress is given up, with
the item that it was at: a file system that hangs may keep it for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import IO

from honed.job.brief import Listed
from honed.job.spool import Spool
from honed.job.tree import Count
from honed.run.process import DAEMON_VARIABLES, SECRET_VARIABLES
from honed.system import python
from honed.system.backoff import Backoff
from honed.system.log import about

log = logging.getLogger(__name__)

#: Items for one child: the length of a command line is limited.
MAX_ITEMS = 2000
#: The items that remove cached rows, and what could not be removed before.
OLD_ROWS, LEFT = "rows:0", "left:0"
#: Seconds before a failed removal is retried, the first time and at most.
RETRY_SEC, MAX_RETRY_SEC = 5.0, 600.0
#: Seconds without a sign of progress after which a child is given up.
STALL_SEC = 120.0
_OF_JOB = {"job": "its directory", "checkpoints": "its old checkpoints", "copies": "its staged copies"}


class Sizes:
    """Measured sizes; a job's size counts until its entry changes. `kind` names the items that measure it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[tuple[int, int], int] = {}  # number and revision → bytes

    def of(self, job: Listed) -> int | None:
        """Return a job's bytes; None if they are unknown."""
        return self._known.get((job.id, job.revision))

    def put(self, job: Listed, num_bytes: int) -> None:
        self._known[job.id, job.revision] = num_bytes

    def forget(self, job: Listed) -> None:
        self._known.pop((job.id, job.revision), None)

    def by_number(self) -> dict[int, int]:
        """Return all known sizes: {number: bytes}."""
        return {number: size for (number, _revision), size in self._known.items()}


class RemovalProcess:
    """At most one child, and the items that wait for it, in order. `clock` is monotonic seconds."""

    def __init__(self, spool: Spool, *, clock: Callable[[], float]) -> None:
        self._spool = spool
        self._clock = clock
        self.sizes = Sizes("measure")  #: of jobs' directories
        self.weights = Sizes("weigh")  #: of their checkpoints
        self._waiting: dict[str, None] = {}
        self._at_work: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # the child's output, read when it has ended
        self._done: dict[str, Count] = {}
        self._retry: dict[str, float] = {}  # failed items, and when they are tried again
        self._backoffs: dict[str, Backoff] = {}  # of the items that have failed
        self._progress = (0, 0.0)  # bytes of the child's output, and when they came
        self.listeners: list[Callable[[str, int], None]] = []  #: get the kind of a removed item and its bytes

    # -- what is wanted -----------------------------------------------------------------------------------------------

    def want(self, item: str) -> None:
        """Have an item processed."""
        if item not in self._at_work:
            self._waiting[item] = None

    def measure(self, jobs: Iterable[Listed], sizes: Sizes) -> bool:
        """Have all unknown sizes measured. Returns True if any size is unknown."""
        missing = [job for job in jobs if sizes.of(job) is None]
        for job in missing:
            self.want(f"{sizes.kind}:{job.id}")
        return bool(missing)

    def is_pending(self, item: str) -> bool:
        """Return True if an item waits, or the child works on it."""
        return item in self._waiting or item in self._at_work

    def done(self, item: str) -> Count:
        """Return what has been removed for an item."""
        return self._done.get(item, Count())

    def forget(self, item: str) -> None:
        """Forget what has been removed for an item: it is going to be removed anew."""
        self._done.pop(item, None)

    # -- the child ----------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def is_busy(self) -> bool:
        """True if a child is to be started at once."""
        return bool(self._waiting) and self._process is None

    @property
    def due_at(self) -> float:
        """The time of the next retry."""
        return min(self._retry.values(), default=math.inf)

    def tend(self, now: float) -> None:
        """Take the results of a child that has ended, and start the next one."""
        for item, due in list(self._retry.items()):
            if now >= due:
                del self._retry[item]
                self.want(item)
        if self._process is not None:
            self._reap(self._process)
        if self._process is None and self._waiting:
            self._start()

    def close(self) -> None:
        """Kill the child: the next start finds its unfinished work."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None

    def _start(self) -> None:
        items = list(self._waiting)[:MAX_ITEMS]
        root = str(self._spool.layout.root)
        command = python.module("honed.job.removal", "--root", root, *items)
        hidden = {*DAEMON_VARIABLES, *SECRET_VARIABLES}
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._said, env=environment, start_new_session=True
            )
        except OSError as error:
            log.warning("nothing can be removed: %s", error)
            for item in items:
                self._try_later(item)
        else:
            self._at_work, self._progress = items, (0, self._clock())
        for item in items:
            del self._waiting[item]

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        file = self._said
        assert file is not None
        is_over = process.poll() is not None
        if not is_over and not self._is_stalled(file):
            return
        counts = {}
        file.seek(0)
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                counts[data["item"]] = Count(data["num_bytes"], data["num_files"], data["problem"], data["is_left"])
        file.close()
        items, self._at_work, self._process = self._at_work, [], None
        why = f"the removal process exited with status {process.returncode}"
        if not is_over:
            process.kill()  # not waited for: what hangs in the kernel does not end
            why = f"no progress for {STALL_SEC:.0f} s: does a file system hang?"
        missing = [item for item in items if item not in counts]
        for item in items:
            if item in counts or is_over or item == missing[0]:
                self._settle(item, counts.get(item, Count(problem=why)))
            else:
                self.want(item)

    def _is_stalled(self, file: IO[bytes]) -> bool:
        num_bytes, now = os.fstat(file.fileno()).st_size, self._clock()
        if num_bytes != self._progress[0]:
            self._progress = (num_bytes, now)
        return now - self._progress[1] > STALL_SEC

    def _settle(self, item: str, done: Count) -> None:
        kind, _, number = item.partition(":")
        for sizes in (self.sizes, self.weights):
            if kind == sizes.kind:
                if (job := self._spool.listed(int(number))) is not None:
                    sizes.put(job, done.num_bytes)
                return
        if done.num_bytes and kind in {"job", "checkpoints"}:
            for listener in self.listeners:
                listener(kind, done.num_bytes)
        if kind in {"job", "checkpoints"}:  # honectl asks for these
            earlier = self.done(item)
            self._done[item] = replace(earlier.plus(done), problem=done.problem)
        if done.problem:
            self._log_failure(item, done)
            if done.is_left:
                self._backoffs.pop(LEFT, None)
            self._try_later(LEFT if done.is_left else item)
        else:
            self._backoffs.pop(item, None)
            self._tell(item, done)

    def _try_later(self, item: str) -> None:
        backoff = self._backoffs.setdefault(item, Backoff(RETRY_SEC, MAX_RETRY_SEC))
        self._retry[item] = self._clock() + backoff.next_sec()

    def _tell(self, item: str, done: Count) -> None:
        kind, _, number = item.partition(":")
        if not done.num_files:
            return
        if kind not in _OF_JOB:
            log.info("removed %s, %d files", "what was left" if item == LEFT else "old encoded rows", done.num_files)
            return
        job = self._spool.listed(int(number))
        log.info(
            "job %s%s: removed %s, %d files, %d bytes",
            number,
            f" ({job.name})" if job is not None else "",
            _OF_JOB[kind],
            done.num_files,
            done.num_bytes,
            extra=about(int(number)),
        )

    def _log_failure(self, item: str, done: Count) -> None:
        """Log that an item failed, the first time."""
        kind, _, number = item.partition(":")
        if item == LEFT or item in self._backoffs:
            log.debug("%s cannot be removed yet: %s", item, done.problem)
            return
        what = f"job {number}: {_OF_JOB[kind]}" if kind in _OF_JOB else "old encoded rows"
        log.error(
            "%s cannot be removed; it is tried again, and honectl doctor says what is left: %s",
            what,
            done.problem,
            extra=about(int(number) or None),
        )
