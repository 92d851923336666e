"""The daemon's end of the reports: which pages are due, and one child at a time that makes them.

The loop never waits for the child. A report is made when its job's state changes, and periodically while the job runs.
A child that fails or hangs costs a page, and is logged once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import islice

from honed.job.job import Job
from honed.run.process import DAEMON_VARIABLES, SECRET_VARIABLES
from honed.spec.config import PolicyConfig
from honed.system import python
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds between two reports of a running job; and the minimum interval as a multiple of the last reports' duration,
#: so that reports take a twentieth of one core at most.
INTERVAL_SEC = 20.0
REST = 20
#: Seconds that a child may take, for all reports that are due; and seconds for the last one when the daemon ends.
TIMEOUT_SEC = 300.0
FINISH_SEC = 20.0
#: Seconds between looks at a child.
CHILD_POLL_SEC = 0.5
#: Jobs in one child, so that a command line has an end.
MAX_JOBS = 500
#: Queued jobs whose order the child gets: as many as the index shows.
MAX_INDEX_JOBS = 200
#: Due jobs from which on pages are no longer made at once; and the pause then, as a multiple of the child's duration.
FLOOD = 20
FLOOD_REST = 4


class Reporter:
    """Runs the children that make reports. `clock` is monotonic seconds."""

    def __init__(
        self, layout: Layout, queue: Callable[[], Iterator[Job]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`queue` returns the queued jobs in the order in which they start, for the index."""
        self._layout = layout
        self._queue = queue
        self._clock = clock
        self._due: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._at_work: set[int] = set()
        self._began = 0.0
        self._rest_until = 0.0
        self._running_due_at = 0.0
        self._has_failed = False

    def tend(self, *, moved: set[int], running: set[int], policy: PolicyConfig) -> None:
        """Make reports: of jobs whose state has changed at once, of running jobs periodically."""
        now = self._clock()
        self._due |= moved
        if now >= self._running_due_at:
            self._due |= running
            self._running_due_at = now + INTERVAL_SEC
        if self._process is not None:
            self._look(now)
        if self._process is None and self._due and now >= self._rest_until:
            self._start(now, policy, running)

    def patience(self) -> float:
        """Return the seconds until there is something to do, if nothing changes meanwhile."""
        if self._process is not None:
            return CHILD_POLL_SEC
        return max(self._rest_until - self._clock(), 0.0) if self._due else math.inf

    def finish(self, policy: PolicyConfig) -> None:
        """Make the due reports before the daemon ends, within FINISH_SEC."""
        deadline = self._clock() + FINISH_SEC
        while self._process is not None or self._due:
            if self._process is None:
                self._start(self._clock(), policy)
            if self._process is None:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(deadline - self._clock(), 0.0))
            self._look(self._clock())
            if self._process is not None:
                log.warning("the last reports were not finished in time")
                self._end()
                return
            if self._has_failed:
                return

    def _start(self, now: float, policy: PolicyConfig, running: Set[int] = frozenset()) -> None:
        # In a flood, first the jobs that run or have just changed: the others are mostly queued, with little to read.
        self._at_work = set(sorted(self._due, key=lambda job_id: (job_id not in running, job_id))[:MAX_JOBS])
        self._due -= self._at_work
        self._began = now
        command = python.module(
            "honed.page.report",
            "--root",
            str(self._layout.root),
            "--admin-group",
            policy.admin_group,
            *(["--shared"] if policy.share_results else []),
            *_queue_options(list(islice(self._queue(), MAX_INDEX_JOBS))),
            *map(str, sorted(self._at_work)),
        )
        hidden = {*DAEMON_VARIABLES, *SECRET_VARIABLES}
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        except OSError as error:
            self._fail(now, str(error))

    def _look(self, now: float) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is None and now - self._began < TIMEOUT_SEC:
            return
        if status is None:
            self._end()
        self._process = None
        is_flood = len(self._due) + len(self._at_work) > FLOOD
        self._rest_until = now + (FLOOD_REST if is_flood else 1) * (now - self._began)
        self._running_due_at = max(self._running_due_at, now + REST * (now - self._began))
        if status != 0:
            self._fail(now, f"it ended with status {status}" if status is not None else "it hung")
        else:
            self._has_failed, self._at_work = False, set()

    def _fail(self, now: float, why: str) -> None:
        if not self._has_failed:
            log.warning("reports could not be written: %s; retrying every %.0f s", why, INTERVAL_SEC)
        self._has_failed = True  # the existing pages stay
        self._due |= self._at_work
        self._at_work = set()
        self._rest_until = max(self._rest_until, now + INTERVAL_SEC)

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one in an unanswered system call may linger
            self._process.wait(1.0)
        self._process = None


def _queue_options(jobs: Sequence[Job]) -> list[str]:
    numbers = ",".join(str(job.id) for job in jobs)
    ahead = ",".join(str(job.id) for job in jobs if job.staged_at is not None)
    return [*([f"--queue={numbers}"] if numbers else []), *([f"--ahead={ahead}"] if ahead else [])]
