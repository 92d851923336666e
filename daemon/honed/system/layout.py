"""Paths of everything, below one prefix (`--root DIR`, or `HONED_ROOT`; `/` for the system's own instance).

etc/honed/honed.toml, honed.toml.d/*.toml      the administrator's configuration
etc/honed/hf-token                             the hub's token, if one is needed
var/spool/honed/                               the spool, see spool.py and arrival.py
var/lib/honed/honed.db                         SQLite, derived from the rest
var/lib/honed/jobs/<id>/                       everything of one job, see JobFiles and JobLayout
var/lib/honed/rows/<uid>/                      encoded rows that a user's jobs share, see row_cache.py
var/lib/honed/index.html                       a page with all jobs, see report.py
var/lib/honed/ended.index                      the ended jobs in brief, see ended_index.py
var/lib/honed/counters.json                    counters for Prometheus, see counters.py
var/lib/honed/outbox/                          metrics and predictions to be sent, see outbox.py
run/honed/control.sock                         the control socket for honectl
var/lib/honed/fetch/                           running fetches from the hub, see fetch.py
var/cache/honed/                               the model cache (HF_HOME)
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from honed.system.personpath import PersonPath

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
    def left_path(self) -> Path:
        """What could not be removed; see leftover.py."""
        return self.state_dir / "left.json"

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
    def ended_path(self) -> Path:
        """The ended jobs in brief; see ended_index.py."""
        return self.state_dir / "ended.index"

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
        """A job's directory, for programs that run as its worker."""
        return JobLayout(self.jobs_dir / str(job_id))

    def files(self, job_id: int) -> JobFiles:
        """A job's directory, for programs that have more permissions than its worker."""
        return JobFiles(PersonPath(self.jobs_dir / str(job_id), is_own=self.is_of_one_user))

    @property
    def is_of_one_user(self) -> bool:
        """True for a user's own instance, where nobody has more permissions than the workers."""
        return False


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
    def is_of_one_user(self) -> bool:
        return True

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


#: A path below a job's directory: a `Path` for the programs that run as its worker, a `PersonPath` for all others.
P = TypeVar("P", Path, PersonPath)


class _Place(Generic[P]):
    """A directory with files of known names."""

    dir: P

    def __init__(self, dir: P) -> None:  # noqa: A002 - as the attribute
        self.dir = dir

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place) and bool(self.dir == other.dir)

    def __hash__(self) -> int:
        return hash(self.dir)


class _Job(_Place[P]):
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

    @property
    def plan_path(self) -> P:
        return self.dir / "plan.json"

    @property
    def adjustments_path(self) -> P:
        return self.dir / "adjustments.json"

    @property
    def entry_path(self) -> P:
        """A copy of the job's entry; see corrupt.py."""
        return self.dir / "entry.json"

    @property
    def start_path(self) -> P:
        """The start parameters of the job's unit; see jobunit.py."""
        return self.dir / "start.json"

    @property
    def gate_path(self) -> P:
        """Lets a staged worker use the device; see ahead.py."""
        return self.dir / "gate.json"

    @property
    def checkpoints_dir(self) -> P:
        return self.dir / "checkpoints"

    @property
    def media_dir(self) -> P:
        return self.dir / "media"

    @property
    def rows_dir(self) -> P:
        return self.dir / "rows"

    @property
    def output_dir(self) -> P:
        return self.dir / "output"

    @property
    def report_path(self) -> P:
        return self.dir / "report.html"

    @property
    def attempts_dir(self) -> P:
        return self.dir / "attempts"


class _Attempt(_Place[P]):
    """One attempt's directory: one worker start, or two with a fallback (then events continue in the same file)."""

    @property
    def events_path(self) -> P:
        """The events, append-only, one JSON object per line; see event.py."""
        return self.dir / "events.jsonl"

    @property
    def log_path(self) -> P:
        """The worker's stdout and stderr."""
        return self.dir / "worker.log"

    @property
    def result_path(self) -> P:
        """The worker's result, written atomically; absent if it died without one."""
        return self.dir / "result.json"

    @property
    def lock_path(self) -> P:
        """Locked by the shim, with its process number and its worker's."""
        return self.dir / "lock"

    @property
    def pulse_path(self) -> P:
        """The worker's current phase; touched at every sign of life, see worker/pulse.py."""
        return self.pulse_of(0)

    def pulse_of(self, rank: int) -> P:
        """The same of one of several ranks, numbered over all nodes."""
        return self.dir / (f"pulse.{rank}" if rank else "pulse")

    def alive_of(self, rank: int) -> P:
        """Written while the process of one of several ranks runs; see worker/parallel.py."""
        return self.dir / "ranks" / f"alive.{rank}"

    @property
    def paused_path(self) -> P:
        """The seconds in which the shim could not run, and the worker neither; absent without any."""
        return self.dir / "paused"

    @property
    def exit_path(self) -> P:
        """The worker's exit status, written atomically by the shim that waited for it; a unit's end adds to it."""
        return self.dir / "exit.json"


class AttemptLayout(_Attempt[Path]):
    """An attempt's directory, for its worker."""


class AttemptFiles(_Attempt[PersonPath]):
    """An attempt's directory, for the programs that have more permissions than its worker."""


class JobLayout(_Job[Path]):
    """A job's directory, for its worker."""

    @property
    def spec_path(self) -> Path:
        """The spec as submitted; see `JobFiles.spec_path`."""
        return Path(str(JobFiles(PersonPath(self.dir, is_own=True)).spec_path))

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(self.attempts_dir / str(number))


class JobFiles(_Job[PersonPath]):
    """A job's directory, for the programs that have more permissions than its worker.

    They are the daemon's, but the worker can create in it what is not there yet, and replace what is its own.
    """

    @property
    def place(self) -> Path:
        """The directory itself, which only the daemon can replace: to be made, measured, given away and removed."""
        return self.dir.root

    @property
    def owner(self) -> int:
        """The user whose files in it are honed's. Raises OSError."""
        from honed.system import untrusted  # noqa: PLC0415 - completion of a command line needs no more than the paths

        return untrusted.info(self.dir).st_uid

    @property
    def spec_path(self) -> PersonPath:
        """The spec as submitted; its suffix is its format. Raises FileNotFoundError if there is none.

        Only files of the directory's owner count: a worker of another user can write there, too.
        """
        from honed.system import untrusted  # noqa: PLC0415 - completion of a command line needs no more than the paths

        owner = self.owner
        for suffix in SPEC_SUFFIXES:  # not by a listing: it can have any number of names
            with contextlib.suppress(FileNotFoundError):
                if untrusted.info(path := self.dir / f"spec{suffix}").st_uid == owner:
                    return path
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.dir / "spec.*"))

    def attempt(self, number: int) -> AttemptFiles:
        return AttemptFiles(self.attempts_dir / str(number))
