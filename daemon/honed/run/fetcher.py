"""The daemon's end of fetching (fetch.py): arrivals that wait for a model or data set, each fetched once for all
of them.

    want ── var/lib/honed/fetch/<n>.json ──► a process with --request n ──► <n>.result.json ── poll

It waits for nothing. A fetch that dies without a word is started again and goes on; so is one whose daemon died, when
its arrival asks for it again. What starts the process is a FetchRunner; the files are all that it and the daemon share,
so that a service manager can start it as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from honed.run.process import DAEMON_VARIABLES
from honed.run.snapshot import Missing
from honed.spec.config import Config
from honed.system import durable
from honed.system.clock import boot_time
from honed.system.error import EnvironmentInvalidError, HonedError, from_dict
from honed.system.layout import FetchLayout, Layout

log = logging.getLogger(__name__)

#: Seconds before a fetch that died is started again, doubled for each death that brought nothing; and the longest.
FIRST_DELAY_SEC = 1.0
MAX_DELAY_SEC = 60.0
#: Deaths in a row, without a byte more, after which it is given up.
MAX_DEATHS = 5
#: Seconds after its deadline at which a fetch that does not end by itself is killed.
DEADLINE_GRACE_SEC = 120.0
#: Seconds between two lines of the log about one fetch.
LOG_INTERVAL_SEC = 60.0
#: Seconds that the processes have to end when the daemon does.
CLOSE_TIMEOUT_SEC = 3.0
#: What a fetch must not inherit: a token comes from a file.
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class FetchRunner(Protocol):
    """What knows how fetches are started on this machine. What it starts reads `<number>.json` and nothing else."""

    def start(self, number: int) -> None:
        """Start one. Raises OSError where it cannot be started."""

    def is_running(self, number: int) -> bool:
        """Whether it lives, whoever started it."""

    def stop(self, number: int, *, at_once: bool = False) -> None:
        """Ask it to end; what it has fetched stays. Nothing where it does not live."""

    def close(self) -> None:
        """The daemon ends."""


class ProcessFetchRunner:
    """Fetches as processes of the daemon's user, each in its own session; they end with the daemon."""

    def __init__(self, layout: Layout, *, command: Sequence[str] | None = None) -> None:
        self._layout = layout
        self._command = list(command or [sys.executable, "-P", "-m", "honed.inputs.fetch", "--root", str(layout.root)])
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        left_out = {*DAEMON_VARIABLES, *SECRET_VARIABLES} - {"JOURNAL_STREAM"}  # its lines go where the daemon's do
        self._children[number] = subprocess.Popen(
            [*self._command, "--request", str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={key: value for key, value in os.environ.items() if key not in left_out},
            start_new_session=True,
        )

    def is_running(self, number: int) -> bool:
        child = self._children.get(number)
        if child is not None and child.poll() is None:
            return True
        self._children.pop(number, None)
        return is_locked(self._layout.fetch(number))

    def stop(self, number: int, *, at_once: bool = False) -> None:
        child, files = self._children.get(number), self._layout.fetch(number)
        pid = child.pid if child is not None and child.poll() is None else None
        if pid is None and is_locked(files):
            with contextlib.suppress(OSError, ValueError):
                pid = int(files.lock_path.read_bytes())
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if at_once else signal.SIGTERM)

    def close(self) -> None:
        for number in list(self._children):
            self.stop(number)
        deadline = time.monotonic() + CLOSE_TIMEOUT_SEC
        for child in self._children.values():
            try:
                child.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


@dataclass
class _Fetch:
    """One model or data set; its number is that of the first arrival that waits for it."""

    number: int
    missing: Missing
    request: dict[str, Any]
    waiting: set[int] = field(default_factory=set)
    is_started: bool = False
    not_before: float = 0.0
    num_deaths: int = 0
    num_bytes_at_death: int = -1
    progress: dict[str, Any] = field(default_factory=dict)
    logged_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.missing.repo_id} at {self.missing.revision}"

    @property
    def key(self) -> tuple[Any, ...]:
        return (*(self.request[key] for key in ("repo_id", "revision", "pickle", "code")), *astuple(self.missing)[2:])


@dataclass(frozen=True)
class Fetched:
    """The end of a fetch, for one of those that waited for it; `error` where it is not there."""

    number: int
    error: HonedError | None


class Fetcher:
    """The fetches of one instance. `number`s are those of arrivals and jobs, which are never given twice."""

    def __init__(
        self, layout: Layout, config: Config, runner: FetchRunner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self.config = config
        self._runner = runner
        self._clock = clock
        self._dir = layout.fetch(0).dir
        self._fetches: dict[int, _Fetch] = {}
        durable.make_dir(self._dir)

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    def recover(self, numbers: Collection[int]) -> None:
        """Take over what an earlier daemon started; `numbers` has who may ask for it again, the rest is dropped."""
        for path in self._dir.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        for number in sorted({int(path.name.split(".")[0]) for path in self._dir.glob("[0-9]*")}):
            request = _read(self._layout.fetch(number).request_path)
            if request and number in numbers and not self._layout.fetch(number).result_path.exists():
                if self._runner.is_running(number) and {*request} >= {
                    "repo_id",
                    "revision",
                    "pickle",
                    "code",
                    "deadline",
                }:
                    said = {each.name: request[each.name] for each in fields(Missing) if each.name in request}
                    fetch = _Fetch(number, Missing(**said), request, is_started=True)
                    self._fetches[number] = fetch
                continue  # its deadline holds when it is asked for again
            self._runner.stop(number)
            self._remove_files(number)

    def want(self, number: int, missing: Missing) -> None:
        """Have it fetched; `poll` tells this number of the end."""
        self.leave(number)
        policy = self.config.policy
        request = {**asdict(missing), "pickle": policy.pickle, "code": policy.trust_remote_code}
        fetch = _Fetch(number, missing, request)
        for other in self._fetches.values():
            if other.key == fetch.key:
                other.waiting.add(number)
                return
        if (replaced := self._fetches.get(number)) is not None:  # of an earlier daemon, under another policy
            self._runner.stop(number)
            self._forget(replaced)
        fetch.waiting.add(number)
        self._fetches[number] = fetch

    def leave(self, number: int) -> None:
        """Nothing is wanted for this number any more; a fetch for which nobody waits is ended."""
        for fetch in list(self._fetches.values()):
            if number in fetch.waiting:
                fetch.waiting.discard(number)
                if not fetch.waiting:
                    self._runner.stop(fetch.number)
                    self._forget(fetch)

    def poll(self) -> list[Fetched]:
        """The ends since the last call; starts what may start."""
        ended = []
        for fetch in list(self._fetches.values()):
            if not fetch.is_started:
                continue
            fetch.progress = _read(self._layout.fetch(fetch.number).progress_path) or fetch.progress
            if self._runner.is_running(fetch.number):
                self._look_after(fetch)
                continue
            result = _read(self._layout.fetch(fetch.number).result_path)
            error = from_dict(result["error"]) if result and not result["ok"] else None
            if result is None:
                error = self._died(fetch)
                if error is None:
                    continue
            if error is None:
                log.info("fetched %s", fetch.name)
            ended += [Fetched(number, error) for number in sorted(fetch.waiting)]
            self._forget(fetch)
        self._start_next()
        return ended

    def progress(self, number: int) -> dict[str, Any]:
        """Progress of the fetch that this number waits for, in the fetch's own words; nothing before it is started."""
        return next((fetch.progress for fetch in self._fetches.values() if number in fetch.waiting), {})

    def status(self, *, is_named: bool = True) -> list[str]:
        """A few words on each fetch."""
        return [
            f"fetching {fetch.missing.repo_id if is_named else f'a {fetch.missing.what}'}{_share(fetch.progress)}"
            for fetch in self._fetches.values()
        ]

    def close(self) -> None:
        self._runner.close()

    def _start_next(self) -> None:
        now = self._clock()
        for fetch in sorted(self._fetches.values(), key=lambda fetch: fetch.number):
            started = [other for other in self._fetches.values() if other.is_started]
            is_taken = any(
                (other.missing.repo_id, other.missing.repo_type) == (fetch.missing.repo_id, fetch.missing.repo_type)
                for other in started
            )
            if fetch.is_started or is_taken or len(started) >= self.config.hub.max_fetches or now < fetch.not_before:
                continue
            self._layout.fetch(fetch.number).result_path.unlink(missing_ok=True)
            self._write_request(fetch)
            log.info("fetches %s, for %s", fetch.name, _numbers(fetch.waiting))
            try:
                self._runner.start(fetch.number)
            except OSError as error:
                log.error("the fetch of %s cannot be started: %s", fetch.name, error)  # noqa: TRY400
                fetch.not_before = now + MAX_DELAY_SEC
            else:
                fetch.is_started, fetch.logged_at = True, now

    def _write_request(self, fetch: _Fetch) -> None:
        """Its time runs from its first start, through deaths and restarts of the daemon."""
        path, deadline = self._layout.fetch(fetch.number).request_path, boot_time() + self.config.hub.fetch_timeout_sec
        if "deadline" in fetch.request:
            return
        old = _read(path) or {}
        is_same = all(old.get(key) == value for key, value in fetch.request.items())
        fetch.request["deadline"] = min(deadline, old.get("deadline", deadline)) if is_same else deadline
        durable.write_json(path, fetch.request)

    def _look_after(self, fetch: _Fetch) -> None:
        now, progress = self._clock(), fetch.progress
        if now - fetch.logged_at >= LOG_INTERVAL_SEC and progress.get("of"):
            fetch.logged_at = now
            done, of = (progress[key] / 2**30 for key in ("bytes", "of"))
            log.info("fetching %s: %.1f of %.1f GiB", fetch.name, done, of)
        if boot_time() > fetch.request["deadline"] + DEADLINE_GRACE_SEC:
            self._runner.stop(fetch.number, at_once=True)

    def _died(self, fetch: _Fetch) -> HonedError | None:
        """After an end without a word: once more, a little later. Returns the error where that is of no use."""
        num_bytes = fetch.progress.get("bytes", 0)
        fetch.num_deaths = fetch.num_deaths + 1 if num_bytes <= fetch.num_bytes_at_death else 1
        fetch.num_bytes_at_death = num_bytes
        if boot_time() > fetch.request["deadline"] or fetch.num_deaths >= MAX_DEATHS:
            return EnvironmentInvalidError(
                f"{fetch.missing.key}: {fetch.name} could not be fetched: the fetch died {fetch.num_deaths} times",
                hint="see the journal; drop the job again to go on: what was fetched is kept",
            )
        delay = min(FIRST_DELAY_SEC * 2 ** (fetch.num_deaths - 1), MAX_DELAY_SEC)
        log.warning("the fetch of %s died without a word; it goes on in %.0f s", fetch.name, delay)
        fetch.is_started, fetch.not_before = False, self._clock() + delay
        return None

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.number]
        self._remove_files(fetch.number)

    def _remove_files(self, number: int) -> None:
        files = self._layout.fetch(number)
        for path in (files.request_path, files.progress_path, files.result_path, files.lock_path):
            path.unlink(missing_ok=True)


def is_locked(files: FetchLayout) -> bool:
    """Whether a fetch lives, by its lock."""
    try:
        fd = os.open(files.lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _share(progress: dict[str, Any]) -> str:
    return f" {progress['bytes'] / progress['of']:.0%}" if progress.get("of") else ""


def _numbers(numbers: Collection[int]) -> str:
    return ("job " if len(numbers) == 1 else "jobs ") + ", ".join(map(str, sorted(numbers)))
