"""wandb's offline runs on their way out: what a worker has written without network, honed-send synchronises.

    jobs/<id>/wandb/offline-run-…/run-….wandb     the worker's
    outbox/wandb/<id>.offline-run-…/run-….wandb   a copy of the daemon's, until it is synchronised
    outbox/sender/wandb/<id>.offline-run-….json   honed-send's word that it is; it stays, so that none is sent twice

A copy, since honed-send sees no job's directory, and what a worker can still change is not sent. Of a run wandb's own
log is taken and nothing else: the figures, the configuration and the summary are in it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from honed import durable, foreign, outbox
from honed.job import Job, State
from honed.layout import Layout
from honed.log import about

log = logging.getLogger(__name__)

#: Bytes of a run's log; a step takes some hundred. What is larger stays where it is.
MAX_BYTES = 64 * 1024 * 1024
_RUN = re.compile(r"offline-run-[0-9]{8}_[0-9]{6}-([a-z0-9]{1,64})")


class Collector:
    """The daemon's end: copies the runs of jobs that do not run, and removes the copies that are synchronised."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._due: set[int] | None = None  #: None: all jobs that there are

    def tend(self, *, moved: set[int], job_of: Callable[[int], Job | None], is_wanted: bool) -> None:
        """Take over the runs of jobs whose state has changed; of all jobs at first, and when it is wanted anew."""
        if not is_wanted:
            self._due = None
            return
        path = self._layout.outbox_dir
        if self._due is None:
            outbox.make_dirs(path)
            for directory in (runs_dir(path), synced_dir(path)):
                durable.make_dir(directory, mode=0o750)
            with contextlib.suppress(FileNotFoundError):
                moved = {int(each.name) for each in self._layout.jobs_dir.iterdir() if each.name.isdecimal()}
        elif not moved:
            return
        self._due = moved
        for job_id in sorted(self._due):
            job = job_of(job_id)
            if job is not None and job.state is not State.RUNNING:
                self._collect(job)
        for run in runs_dir(path).iterdir():
            if is_synced(path, run.name):
                shutil.rmtree(run, ignore_errors=True)

    def _collect(self, job: Job) -> None:
        for run in sorted((self._layout.job(job.id).dir / "wandb").glob("offline-run-*")):
            name = f"{job.id}.{run.name}"
            found = _RUN.fullmatch(run.name)
            if found is None or is_synced(self._layout.outbox_dir, name):
                continue
            target = runs_dir(self._layout.outbox_dir) / name
            if target.exists():
                continue
            try:
                data = foreign.read_plain(run / f"run-{found[1]}.wandb", max_bytes=MAX_BYTES)
            except OSError as error:
                log.warning("job %d (%s): its wandb run stays where it is, in %s: %s", job.id, job.name, run,
                            error.strerror, extra=about(job))  # fmt: skip
                continue
            made = target.with_name(f".{target.name}.tmp")
            shutil.rmtree(made, ignore_errors=True)
            durable.make_dir(made, mode=0o750)
            durable.write(made / f"run-{found[1]}.wandb", data, mode=0o640)
            made.rename(target)
            durable.sync_dir(target.parent)
            log.info("job %d (%s): its wandb run waits for honed-send", job.id, job.name, extra=about(job))


# -- what both sides read ---------------------------------------------------------------------------------------------


def runs_dir(path: Path) -> Path:
    """In the outbox, what the daemon has copied."""
    return path / "wandb"


def synced_dir(path: Path) -> Path:
    return outbox.sender_dir(path) / "wandb"


def waiting(path: Path) -> Iterator[Path]:
    """The runs that are not synchronised yet, oldest job first."""
    with contextlib.suppress(FileNotFoundError):
        names = [each.name for each in runs_dir(path).iterdir() if not each.name.startswith(".")]
        for name in sorted(names, key=lambda name: (int(name.partition(".")[0]), name)):
            if not is_synced(path, name):
                yield runs_dir(path) / name


def is_synced(path: Path, name: str) -> bool:
    return (synced_dir(path) / f"{name}.json").exists()


def mark_synced(path: Path, name: str, *, when: float) -> None:
    durable.make_dir(synced_dir(path), mode=0o750)
    data = json.dumps({"run": name, "synced_at": when}).encode()
    durable.write(synced_dir(path) / f"{name}.json", data + b"\n", mode=0o640)


def is_marked(run: Path) -> bool:
    """Whether wandb says that all of a run's log is sent. Its exit status is 0 for a key that is refused, too."""
    return any(log_path.with_name(f"{log_path.name}.synced").exists() for log_path in run.glob("run-*.wandb"))
