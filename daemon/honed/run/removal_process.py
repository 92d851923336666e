"""The child that measures and removes files (`honed.job.removal`): one at a time, for many items, while others wait."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from typing import IO

from honed.job.job import Job
from honed.job.spool import Spool
from honed.job.tree import Count
from honed.run.process import DAEMON_VARIABLES, SECRET_VARIABLES
from honed.system import python
from honed.system.log import about

log = logging.getLogger(__name__)

#: Items for one child: the length of a command line is limited.
MAX_ITEMS = 2000
#: The item that removes cached rows.
OLD_ROWS = "rows:0"
#: Seconds before a failed removal is retried.
RETRY_SEC = 600.0


class Sizes:
    """Measured sizes; a job's size counts until its entry changes. `kind` names the items that measure it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[tuple[int, int], int] = {}  # number and revision → bytes

    def of(self, job: Job) -> int | None:
        """Return a job's bytes; None if they are unknown."""
        return self._known.get((job.id, job.revision))

    def put(self, job: Job, num_bytes: int) -> None:
        self._known[job.id, job.revision] = num_bytes

    def forget(self, job: Job) -> None:
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
        self.listeners: list[Callable[[str, int], None]] = []  #: get the kind of a removed item and its bytes

    # -- what is wanted -----------------------------------------------------------------------------------------------

    def want(self, item: str) -> None:
        """Have an item processed."""
        if item not in self._at_work:
            self._waiting[item] = None

    def measure(self, jobs: Iterable[Job], sizes: Sizes) -> bool:
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
            self._retry |= dict.fromkeys(items, self._clock() + RETRY_SEC)
        else:
            self._at_work = items
        for item in items:
            del self._waiting[item]

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        file = self._said
        assert file is not None
        if process.poll() is None:
            return
        said = {}
        file.seek(0)
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                said[data["item"]] = Count(data["num_bytes"], data["num_files"], data["problem"])
        file.close()
        items, self._at_work, self._process = self._at_work, [], None
        for item in items:
            self._settle(
                item, said.get(item, Count(problem=f"the removal process exited with status {process.returncode}"))
            )

    def _settle(self, item: str, done: Count) -> None:
        kind, _, number = item.partition(":")
        for sizes in (self.sizes, self.weights):
            if kind == sizes.kind:
                if (job := self._spool.job(int(number))) is not None:
                    sizes.put(job, done.num_bytes)
                return
        if item == OLD_ROWS:
            if done.problem:
                log.error("old encoded rows cannot be removed; retrying in %.0f min: %s", RETRY_SEC / 60, done.problem)
                self._retry[item] = self._clock() + RETRY_SEC
            return
        if done.num_bytes:
            for told in self.listeners:
                told(kind, done.num_bytes)
        earlier = self.done(item)
        self._done[item] = Count(earlier.num_bytes + done.num_bytes, earlier.num_files + done.num_files, done.problem)
        what = "its directory" if kind == "job" else "its old checkpoints"
        if done.problem:
            log.error(
                "job %s: %s cannot be removed; retrying in %.0f min: %s; as root, rm -r %s",
                number,
                what,
                RETRY_SEC / 60,
                done.problem,
                self._spool.files(int(number)).dir,
                extra=about(int(number)),
            )
            self._retry[item] = self._clock() + RETRY_SEC
        elif done.num_files:
            log.info(
                "job %s: removed %s, %d files, %d bytes",
                number,
                what,
                done.num_files,
                done.num_bytes,
                extra=about(int(number)),
            )
