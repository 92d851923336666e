"""A page of one job or of several for honed-web, made by a short-lived process, so that a page of many megabytes costs
honed-web no memory afterwards, and a slow one delays nobody else. Each page is kept for a while and shared by all who
ask for it.

    python -m honed.page.report --root DIR --print ID
    python -m honed.page.comparison --root DIR ID ID…
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from honed.job.job import Job
from honed.page.place import Kind, turns
from honed.system import python
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger("honed.page.server")

#: Seconds for which a kept page is served, of an unfinished job and of a finished one.
RUNNING_SEC, FINAL_SEC = 3.0, 300.0
#: Seconds that making one page may take.
TIMEOUT_SEC = 60.0
#: Bytes of all kept pages.
MAX_KEPT_BYTES = 8 * 1024 * 1024
#: Variables of our environment that the process does not need.
_SECRETS = ("CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@dataclass(frozen=True)
class Made:
    """A finished page, with the revisions of the jobs that it shows."""

    page: bytes
    revisions: tuple[int, ...]
    made_at: float


class Pages:
    """Makes and keeps pages, one at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: OrderedDict[tuple[int, ...], Made] = OrderedDict()
        # First a turn among clients of one kind, then among the kinds: however many pages one kind waits for, another
        # waits for one of them.
        self._turns = turns(1)
        self._turn = asyncio.Lock()

    async def page(self, jobs: Sequence[Job], kind: Kind, *, num_all: int = 0) -> Made:
        """Return the page of a job, or of several, kept or new. Raises EnvironmentInvalidError if it cannot be made, or
        too many wait."""
        if (made := self._fresh(jobs)) is not None:
            return made
        async with self._turns[kind].one(), self._turn:
            return self._fresh(jobs) or self._keep(jobs, await self._make(jobs, num_all))

    def _fresh(self, jobs: Sequence[Job]) -> Made | None:
        made = self._kept.get(_numbers(jobs))
        seconds = FINAL_SEC if all(job.state.is_final for job in jobs) else RUNNING_SEC
        is_same = made is not None and made.revisions == tuple(job.revision for job in jobs)
        return made if is_same and made is not None and time.monotonic() - made.made_at < seconds else None

    async def _make(self, jobs: Sequence[Job], num_all: int) -> bytes:
        program = python.module(f"honed.page.{'report' if len(jobs) == 1 else 'comparison'}")
        options = ["--root", str(self._layout.root), *(["--print"] if len(jobs) == 1 else ["--of", str(num_all)])]
        numbers = [str(job.id) for job in jobs]
        environment = {key: value for key, value in os.environ.items() if key not in _SECRETS}
        process = await asyncio.create_subprocess_exec(
            *program,
            *options,
            *numbers,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TIMEOUT_SEC):
                page, _ = await process.communicate()
        except TimeoutError:
            log.error(  # noqa: TRY400
                "the page of job %s was not generated within %.0f s",
                ", ".join(numbers),
                TIMEOUT_SEC,
                extra=about(jobs[0] if len(jobs) == 1 else None),
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return page
        raise EnvironmentInvalidError(
            f"the page of job {', '.join(numbers)} could not be generated",
            hint="see the journal of honed-web; the API has the same data",
        )

    def _keep(self, jobs: Sequence[Job], page: bytes) -> Made:
        made = Made(page, tuple(job.revision for job in jobs), time.monotonic())
        self._kept.pop(_numbers(jobs), None)
        self._kept[_numbers(jobs)] = made
        while self._kept and sum(len(item.page) for item in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return made


def _numbers(jobs: Sequence[Job]) -> tuple[int, ...]:
    return tuple(job.id for job in jobs)
