"""honed-send's synchronisation of wandb's offline runs: each is passed to `wandb sync` until wandb reports it complete.

It runs in its own thread, so that neither it nor the deliveries wait for the other's endpoint. The key is a credential
or a file, and goes only to that child, in its environment. The child's exit status proves nothing: version 0.31 exits
with 0 if the key is rejected, and retries forever if the server answers 500. Proof is the file that it writes beside a
completely sent log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from honed.job import tree
from honed.send import child, wandb_runs
from honed.spec.config import ReportingConfig
from honed.system import installed, python, secret
from honed.system.backoff import Backoff
from honed.system.error import EnvironmentInvalidError
from honed.system.log import about
from honed.system.message import SEND_TROUBLE

log = logging.getLogger("honed.send.sender")

#: Seconds between checks for runs, and the timeout of one run.
POLL_SEC = 2.0
TIMEOUT_SEC = 600.0
#: Seconds before failed runs are retried, doubled each time up to the second value.
RETRY_SEC = (60.0, 3600.0)
#: The unit's credential that holds wandb's key.
CREDENTIAL = "honed.wandb-key"
#: The child's output, stored beside its copy of the run and in no log of ours, since it may repeat anything.
LOG_NAME = "honed.log"


class Syncer:
    """Background synchronisation of runs. `reporting` is called each time, so that a reload takes effect."""

    def __init__(self, path: Path, *, reporting: Callable[[], ReportingConfig]) -> None:
        self._path = path
        self._reporting = reporting
        self._must_end = threading.Event()
        self._is_last = threading.Event()
        self._wake = threading.Event()  #: set by either of the two events
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._said: str | None = None

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_sec: float) -> None:
        """Let it try all queued runs once more, for at most that long, and end."""
        self._is_last.set()
        self._wake.set()
        self._thread.join(timeout_sec)
        self.stop()

    def stop(self) -> None:
        """Stop it and its child now; queued runs are sent later."""
        self._must_end.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        backoff, not_before = Backoff(*RETRY_SEC), 0.0
        while not self._must_end.is_set():
            is_last = self._is_last.is_set()
            if is_last or time.monotonic() >= not_before:
                try:
                    trouble = self._send_all()
                except Exception:
                    log.exception("wandb: an unexpected error")
                    trouble = "see the journal"
                if trouble:
                    not_before = time.monotonic() + backoff.next_sec()
                else:
                    backoff.reset()
                    not_before = 0.0
                self._tell(trouble)
            if is_last:
                return
            self._wake.wait(POLL_SEC)

    def _send_all(self) -> str | None:
        """Send all queued runs. Returns the problem of the first that failed; the others are tried, too."""
        if not self._reporting().sync_wandb:
            return None
        first: str | None = None
        for run in wandb_runs.waiting(self._path):
            try:
                trouble = None if self._must_end.is_set() else self._send(run)
            except EnvironmentInvalidError as error:
                trouble = error.message
            first = first or (f"{run.name}: {trouble}" if trouble is not None else None)
        return first

    def _send(self, run: Path) -> str | None:
        """Send one run. The child works on a second copy, kept for the next try: wandb stores its progress there."""
        key = read_key(self._reporting())
        if installed.version("wandb") is None:
            return "wandb is not installed in honed-send's environment"
        work_dir = wandb_runs.synced_dir(self._path) / run.name
        if not work_dir.exists():
            made = work_dir.with_name(f".{run.name}.tmp")
            tree.remove(made)
            shutil.copytree(run, made / _run_name(work_dir))
            made.rename(work_dir)
        status = self._sync(work_dir, key)
        if status is None:
            return f"it did not finish within {TIMEOUT_SEC:.0f} s; see {work_dir / LOG_NAME}"
        if not wandb_runs.is_marked(work_dir / _run_name(work_dir)):
            return f"wandb sync exited with status {status}; see {work_dir / LOG_NAME}"
        wandb_runs.mark_synced(self._path, run.name, when=time.time())
        tree.remove(work_dir)
        log.info("sent to wandb: %s", run.name, extra=about(int(run.name.partition(".")[0])))
        return None

    def _sync(self, work_dir: Path, key: str) -> int | None:
        """Run `wandb sync` and return its exit status; None if it was stopped."""
        home = wandb_runs.synced_dir(self._path) / "home"
        environment = child.environment(
            HOME=str(home),
            **{f"WANDB_{name}_DIR": str(home) for name in ("CACHE", "CONFIG", "DATA")},
            WANDB_API_KEY=key,
            WANDB_ERROR_REPORTING="false",  # would go to wandb's makers
        )
        if (address := self._reporting().wandb_base_url) is not None:
            environment["WANDB_BASE_URL"] = address
        command = python.module("wandb", "sync", "--yes", str(work_dir / _run_name(work_dir)))
        deadline = time.monotonic() + TIMEOUT_SEC
        home.mkdir(exist_ok=True)
        with (work_dir / LOG_NAME).open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                cwd=work_dir,
                start_new_session=True,
            )
        try:
            while (status := process.poll()) is None and time.monotonic() < deadline and not self._must_end.wait(0.1):
                pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # wandb starts a server process beside it
            process.wait()
        return status

    def _tell(self, trouble: str | None) -> None:
        if trouble == self._said:
            return
        if trouble is not None:
            log.warning("not sent to wandb, retrying: %s", trouble, extra=about(message=SEND_TROUBLE))
        self._said = trouble


def read_key(reporting: ReportingConfig) -> str:
    """Return wandb's key. Raises EnvironmentInvalidError."""
    path = secret.credential(CREDENTIAL) or (Path(reporting.wandb_key_file) if reporting.wandb_key_file else None)
    if path is None:
        raise EnvironmentInvalidError(
            "there is no key for wandb", hint="set reporting.wandb_key_file, or create /etc/credstore/honed.wandb-key"
        )
    return secret.read(path, "key")


def _run_name(work_dir: Path) -> str:
    """Return the run's directory name: wandb skips a directory that is not called offline-run-…."""
    return work_dir.name.partition(".")[2]
