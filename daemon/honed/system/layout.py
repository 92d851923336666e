"""Paths of everything, below one prefix (`--root DIR`, or `HONED_ROOT`; `/` for the system's own instance).

etc/honed/honed.toml, honed.toml.d/*.toml      the administrator's configuration
etc/honed/hf-token                             the hub's token, where one is needed
var/spool/honed/                               the spool, see spool.py and arrival.py
var/lib/honed/honed.db                         SQLite, derived from the rest
var/lib/honed/jobs/<id>/                       everything of one job, see JobLayout
var/lib/honed/index.html                       all of them on a page, see report.py
var/lib/honed/outbox/                          metrics and predictions on their way out, see outbox.py
run/honed/control.sock                         honectl's way in
var/lib/honed/fetch/                           what is being fetched from the hub, see fetch.py
var/cache/honed/                               the model cache (HF_HOME)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The paths of one instance."""

    root: Path

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
        """The place of `submit --stage`'s copies of what the workers cannot reach. Not in the spool, which is closed
        to them."""
        return self.state_dir / "staged"

    @property
    def state_dir(self) -> Path:
        return self.root / "var/lib/honed"

    @property
    def database_path(self) -> Path:
        return self.state_dir / "honed.db"

    @property
    def jobs_dir(self) -> Path:
        return self.state_dir / "jobs"

    @property
    def index_path(self) -> Path:
        """A page over all jobs, with links to their reports."""
        return self.state_dir / "index.html"

    @property
    def outbox_dir(self) -> Path:
        """What waits for honed-send; see outbox.py."""
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


@dataclass(frozen=True)
class FetchLayout:
    """One fetch from the hub, by its number: that of the first arrival that waits for it.

    <n>.json             what is to be fetched                        (the daemon writes)
    <n>.progress.json    how far it is                                (the fetch writes, as all below)
    <n>.result.json      how it ended, written whole; absent if it died without a word
    <n>.lock             locked while it lives, with its process number
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


@dataclass(frozen=True)
class UserLayout(Layout):
    """One person's own instance, `--user`: where the XDG base directory specification says. Below `root`, which is
    $XDG_STATE_HOME/honed, lie the state, and the spool in spool/."""

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
    """The root of one's own instance; a program that is given it finds the rest by the same variables."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "honed"


def default_root() -> Path:
    """`HONED_ROOT`, or the system's own instance; an empty value is none."""
    return Path(os.environ.get("HONED_ROOT") or "/")


def of(root: Path) -> Layout:
    """The instance below a directory."""
    absolute = root.absolute()
    return UserLayout(absolute) if absolute == user_root() else Layout(absolute)


def _xdg(variable: str, default: str) -> Path:
    # A path that is not absolute is to be ignored, says the specification.
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default


@dataclass(frozen=True)
class JobLayout:
    """One job's directory; it never moves.

    spec.<suffix>              as dropped                                   (the daemon writes)
    plan.json                  what was decided before any model is loaded  (the daemon writes)
    adjustments.json           what a lack of memory has changed in its spec, see ladder.py  (the daemon writes)
    start.json                 what its unit is to start, where workers are units  (the daemon writes)
    checkpoints/checkpoint-N/  whole, as its MANIFEST.json says; see worker/train/checkpoint.py
                               (the worker writes, as all below)
    wandb/, tensorboard/, …    what report_to's trackers write
    trial/                     its trial, a job's directory in small        (see trial.py)
    media/                     images, videos and sounds that a data file holds, by their sha256
    output/                    the default output_dir
    report.html                how it went, on a page                       (a child of the daemon's writes)
    attempts/<n>/              events.jsonl, worker.log, result.json, and exit.json from the shim
    """

    dir: Path

    @property
    def spec_path(self) -> Path:
        """The spec as dropped; its suffix is its format. Raises FileNotFoundError where there is none.

        Only what the owner of the directory wrote: a worker of another user can write there, too.
        """
        owner = self.dir.stat().st_uid
        found = sorted(path for path in self.dir.glob("spec.*") if path.lstat().st_uid == owner)
        if not found:
            raise FileNotFoundError(self.dir / "spec.*")
        return found[0]

    @property
    def plan_path(self) -> Path:
        return self.dir / "plan.json"

    @property
    def adjustments_path(self) -> Path:
        return self.dir / "adjustments.json"

    @property
    def start_path(self) -> Path:
        """What the job's unit is to start; see jobunit.py."""
        return self.dir / "start.json"

    @property
    def checkpoints_dir(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def media_dir(self) -> Path:
        return self.dir / "media"

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


@dataclass(frozen=True)
class AttemptLayout:
    """One attempt's directory: one worker start, or two with a fallback (then events go on in the same file)."""

    dir: Path

    @property
    def events_path(self) -> Path:
        """Append-only, one JSON object a line; see event.py."""
        return self.dir / "events.jsonl"

    @property
    def log_path(self) -> Path:
        """The worker's stdout and stderr."""
        return self.dir / "worker.log"

    @property
    def result_path(self) -> Path:
        """What the worker says of its end, written whole; absent if it died without a word."""
        return self.dir / "result.json"

    @property
    def pulse_path(self) -> Path:
        """The phase that the worker is in; touched at each of its signs of life, see worker/pulse.py."""
        return self.dir / "pulse"

    @property
    def exit_path(self) -> Path:
        """The worker's exit status, written whole by the shim that waited for it; a unit's end adds to it."""
        return self.dir / "exit.json"
