"""A job's page for honed-web, made by a short-lived process, so that a page of many megabytes costs honed-web no memory
afterwards, and a slow one delays nobody else. Each page is kept for a while and shared by all who ask for it.

    python -m honed.page.report --root DIR --print ID
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass

from honed.job.job import Job
from honed.page.place import Kind, turns
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout

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
    """A finished page, with the revision of the job that it shows."""

    page: bytes
    revision: int
    made_at: float


class Pages:
    """Makes and keeps pages, one at a time."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: OrderedDict[int, Made] = OrderedDict()
        # First a turn among clients of one kind, then among the kinds: however many pages one kind waits for, another
        # waits for one of them.
        self._turns = turns(1)
        self._turn = asyncio.Lock()

    async def page(self, job: Job, kind: Kind) -> Made:
        """Return a job's page, kept or new. Raises EnvironmentInvalidError if it cannot be made, or too many wait."""
        if (made := self._fresh(job)) is not None:
            return made
        async with self._turns[kind].one(), self._turn:
            return self._fresh(job) or self._keep(job, await self._make(job))

    def _fresh(self, job: Job) -> Made | None:
        made = self._kept.get(job.id)
        seconds = FINAL_SEC if job.state.is_final else RUNNING_SEC
        is_fresh = made is not None and made.revision == job.revision and time.monotonic() - made.made_at < seconds
        return made if is_fresh else None

    async def _make(self, job: Job) -> bytes:
        # -P: modules in the current directory are not ours.
        program = [sys.executable, "-P", "-m", "honed.page.report"]
        options = ["--root", str(self._layout.root), "--print", str(job.id)]
        environment = {key: value for key, value in os.environ.items() if key not in _SECRETS}
        process = await asyncio.create_subprocess_exec(
            *program,
            *options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(TIMEOUT_SEC):
                page, _ = await process.communicate()
        except TimeoutError:
            log.error("the page of job %d was not generated within %.0f s", job.id, TIMEOUT_SEC)  # noqa: TRY400
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return page
        raise EnvironmentInvalidError(
            f"the page of job {job.id} could not be generated",
            hint="see the journal of honed-web; the API has the same data",
        )

    def _keep(self, job: Job, page: bytes) -> Made:
        made = Made(page, job.revision, time.monotonic())
        self._kept.pop(job.id, None)
        self._kept[job.id] = made
        while self._kept and sum(len(each.page) for each in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)
        return made
