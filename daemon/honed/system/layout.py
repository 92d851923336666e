"""Paths of everything, below one prefix (`--root DIR`, or `HONED_ROOT`; `/` for the system's own instance).

etc/honed/honed.toml, honed.toml.d/*.toml      the administrator's configuration
etc/honed/hf-token                             the hub's token, if one is needed
var/spool/honed/                               the spool, see spool.py and arrival.py
var/lib/honed/honed.db                         SQLite, derived from the rest
var/lib/honed/jobs/<id>/                       everything of one job, see JobLayout
var/lib/honed/rows/<uid>/                      encoded rows that a user's jobs share, see row_cache.py
var/lib/honed/index.html                       a page with all jobs, see report.py
var/lib/honed/counters.json                    counters for Prometheus, see counters.py
var/lib/honed/outbox/                          metrics and predictions to be sent, see outbox.py
run/honed/control.sock                         the control socket for honectl
var/lib/honed/fetch/                           running fetches from the hub, see fetch.py
var/cache/honed/                               the model cache (HF_HOME)
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

#: Suffixes of job files.
SPEC_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


class Layout(NamedTuple):
    """The paths of one instance."""

    root: Path

    @property
    def is_of_system(self) -> bool:
        """True for the system's own instance, false for one of `--root DIR` or `--user`."""
        return self.root == Path("/")

    @property
    def config_path(self) -> Path:
        return self.root / "etc/honed/honed.toml"

    @property
    def config_dropin_dir(self) -> Path:
        return self.root / "etc/honed/honed.toml.d"

    @property
    def token_path(self) -> Path:
        return self.root / "etc/honed/hf-token"

    @property
    def spool_dir(self) -> Path:
        return self.root / "var/spool/honed"

    @property
    def staged_dir(self) -> Path:
        """Copies by `submit --stage` of files closed to workers. Not in the spool, which workers cannot enter."""
        return self.state_dir / "staged"

    @property
    def state_dir(self) -> Path:
        return self.root / "var/lib/honed"

    @property
    def usage_path(self) -> Path:
        return self.state_dir / "usage.jsonl"

    @property
    def database_path(self) -> Path:
        return self.state_dir / "honed.db"

    @property
    def counters_path(self) -> Path:
        """Counters and histograms; see counters.py."""
        return self.state_dir / "counters.json"

    @property
    def jobs_dir(self) -> Path:
        return self.state_dir / "jobs"

    @property
    def rows_dir(self) -> Path:
        """Encoded rows, by user; see row_cache.py."""
        return self.state_dir / "rows"

    @property
    def index_path(self) -> Path:
        """A page with all jobs, with links to their reports."""
        return self.state_dir / "index.html"

    @property
    def outbox_dir(self) -> Path:
        """The queue of honed-send; see outbox.py."""
        return self.state_dir / "outbox"

    @property
    def runtime_dir(self) -> Path:
        return self.root / "run/honed"

    @property
    def control_path(self) -> Path:
        return self.runtime_dir / "control.sock"

    @property
    def cache_dir(self) -> Path:
        return self.root / "var/cache/honed"

    def fetch(self, number: int) -> FetchLayout:
        return FetchLayout(self.state_dir / "fetch", number)

    def job(self, job_id: int) -> JobLayout:
        return JobLayout(self.jobs_dir / str(job_id))


class FetchLayout(NamedTuple):
    """One fetch from the hub, by its number: that of the first arrival that waits for it.

    <n>.json             the request                                  (written by the daemon)
    <n>.progress.json    the progress                                 (written by the fetch, as all below)
    <n>.result.json      the result, written atomically; absent if it died without one
    <n>.lock             locked while it runs, with its process number
    """

    dir: Path
    number: int

    @property
    def request_path(self) -> Path:
        return self.dir / f"{self.number}.json"

    @property
    def progress_path(self) -> Path:
        return self.dir / f"{self.number}.progress.json"

    @property
    def result_path(self) -> Path:
        return self.dir / f"{self.number}.result.json"

    @property
    def lock_path(self) -> Path:
        return self.dir / f"{self.number}.lock"


class UserLayout(Layout):
    """A user's own instance (`--user`), in the places of the XDG base directory specification. State and spool (spool/)
    are below `root`, which is $XDG_STATE_HOME/honed.
    """

    @property
    def config_path(self) -> Path:
        return _xdg("XDG_CONFIG_HOME", ".config") / "honed/honed.toml"

    @property
    def config_dropin_dir(self) -> Path:
        return self.config_path.with_name("honed.toml.d")

    @property
    def spool_dir(self) -> Path:
        return self.root / "spool"

    @property
    def state_dir(self) -> Path:
        return self.root

    @property
    def runtime_dir(self) -> Path:
        directory = os.environ.get("XDG_RUNTIME_DIR", "")
        return Path(directory) / "honed" if directory.startswith("/") else self.root / "run"

    @property
    def cache_dir(self) -> Path:
        return _xdg("XDG_CACHE_HOME", ".cache") / "honed"


def user_root() -> Path:
    """Return the root of a user's own instance; a program that gets it finds the other paths by the same variables."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "honed"


def default_root() -> Path:
    """Return `HONED_ROOT` if it is not empty, else the system's own instance."""
    return Path(os.environ.get("HONED_ROOT") or "/")


def of(root: Path) -> Layout:
    """Return the layout of the instance below a directory."""
    absolute = root.absolute()
    return UserLayout(absolute) if absolute == user_root() else Layout(absolute)


def _xdg(variable: str, default: str) -> Path:
    # The specification requires that a relative path is ignored.
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default


class JobLayout(NamedTuple):
    """One job's directory; it never moves.

    spec.<suffix>              the job file as submitted                     (written by the daemon)
    plan.json                  decisions made before any model is loaded     (written by the daemon)
    adjustments.json           changes to its spec for want of memory, see out_of_memory.py  (written by the daemon)
    entry.json                 its entry when its worker was started last, see corrupt.py  (written by the daemon)
    start.json                 the start parameters of its unit, where workers are units  (written by the daemon)
    gate.json                  lets its staged worker use the device; see ahead.py  (written by the daemon)
    checkpoints/checkpoint-N/  complete if it has a MANIFEST.json; see worker/train/checkpoint.py
                               (written by the worker, as all below)
    wandb/, tensorboard/, …    output of the trackers in report_to
    trial/                     its trial, laid out like a job's directory    (see trial.py)
    media/                     images, videos and sounds extracted from a data file, by their sha256
    rows/                      its rows, encoded or links to its user's, until it succeeds; see worker/rows/table.py
    output/                    the default output_dir
    report.html                the report                                    (written by a child of the daemon)
    attempts/<n>/              events.jsonl, worker.log, result.json, and exit.json from the shim
    """

    dir: Path

    @property
    def spec_path(self) -> Path:
        """The spec as submitted; its suffix is its format. Raises FileNotFoundError if there is none.

        Only files of the directory's owner count: a worker of another user can write there, too.
        """
        owner = self.dir.stat().st_uid
        for suffix in SPEC_SUFFIXES:  # not by a listing: it can have any number of names
            with contextlib.suppress(FileNotFoundError):
                if (path := self.dir / f"spec{suffix}").lstat().st_uid == owner:
                    return path
        raise FileNotFoundError(self.dir / "spec.*")

    @property
    def plan_path(self) -> Path:
        return self.dir / "plan.json"

    @property
    def adjustments_path(self) -> Path:
        return self.dir / "adjustments.json"

    @property
    def entry_path(self) -> Path:
        """A copy of the job's entry; see corrupt.py."""
        return self.dir / "entry.json"

    @property
    def start_path(self) -> Path:
        """The start parameters of the job's unit; see jobunit.py."""
        return self.dir / "start.json"

    @property
    def gate_path(self) -> Path:
        """Lets a staged worker use the device; see ahead.py."""
        return self.dir / "gate.json"

    @property
    def checkpoints_dir(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def media_dir(self) -> Path:
        return self.dir / "media"

    @property
    def rows_dir(self) -> Path:
        return self.dir / "rows"

    @property
    def output_dir(self) -> Path:
        return self.dir / "output"

    @property
    def report_path(self) -> Path:
        return self.dir / "report.html"

    @property
    def attempts_dir(self) -> Path:
        return self.dir / "attempts"

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(self.attempts_dir / str(number))


class AttemptLayout(NamedTuple):
    """One attempt's directory: one worker start, or two with a fallback (then events continue in the same file)."""

    dir: Path

    @property
    def events_path(self) -> Path:
        """The events, append-only, one JSON object per line; see event.py."""
        return self.dir / "events.jsonl"

    @property
    def log_path(self) -> Path:
        """The worker's stdout and stderr."""
        return self.dir / "worker.log"

    @property
    def result_path(self) -> Path:
        """The worker's result, written atomically; absent if it died without one."""
        return self.dir / "result.json"

    @property
    def pulse_path(self) -> Path:
        """The worker's current phase; touched at each sign of life, see worker/pulse.py."""
        return self.pulse_of(0)

    def pulse_of(self, rank: int) -> Path:
        """The same of one of several ranks, numbered over all nodes."""
        return self.dir / (f"pulse.{rank}" if rank else "pulse")

    def alive_of(self, rank: int) -> Path:
        """Written while the process of one of several ranks runs; see worker/parallel.py."""
        return self.dir / "ranks" / f"alive.{rank}"

    @property
    def exit_path(self) -> Path:
        """The worker's exit status, written atomically by the shim that waited for it; a unit's end adds to it."""
        return self.dir / "exit.json"
