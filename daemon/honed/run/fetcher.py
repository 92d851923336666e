"""The daemon's side of fetching (fetch.py): arrivals that wait for a model or data set, fetched once for all of
them.

    want ── var/lib/honed/fetch/<n>.json ──► a process with --request n ──► <n>.result.json ── poll

It never blocks. A fetch that dies without a result is restarted and resumes; after the daemon died, it resumes when its
arrival asks for it again. A FetchRunner starts the process; it shares nothing but files with the daemon, so that a
service manager can start it as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

from honed.run.process import DAEMON_VARIABLES
from honed.run.snapshot import FetchProgress, Missing
from honed.spec.config import Config
from honed.system import durable, python
from honed.system.backoff import Backoff
from honed.system.clock import awake_time
from honed.system.error import EnvironmentInvalidError, HonedError, from_dict
from honed.system.layout import FetchLayout, Layout

log = logging.getLogger(__name__)

#: Delay in seconds before a fetch that died is restarted, doubled for every death without progress, and its maximum.
FIRST_DELAY_SEC = 1.0
MAX_DELAY_SEC = 60.0
#: Consecutive deaths without progress after which a fetch fails.
MAX_DEATHS = 5
#: Seconds for which a fetch is seen to go on after its deadline before it is killed.
DEADLINE_GRACE_SEC = 120.0
#: Seconds between two log lines about one fetch.
LOG_INTERVAL_SEC = 60.0
#: Seconds that the processes have to end when the daemon stops, and again where it has to kill them.
CLOSE_TIMEOUT_SEC, KILLED_TIMEOUT_SEC = 3.0, 1.0
#: Environment variables that a fetch must not inherit: a token comes from a file.
SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class FetchRunner(Protocol):
    """A way to start fetches on this machine. A started fetch reads `<number>.json` and nothing else."""

    def start(self, number: int) -> None:
        """Start a fetch. Raises OSError if it cannot be started."""

    def is_running(self, number: int) -> bool:
        """Tell whether a fetch is running, whoever started it."""

    def stop(self, number: int, *, at_once: bool = False) -> None:
        """Ask a fetch to end; fetched files are kept. Does nothing if it is not running."""

    def close(self) -> None:
        """Clean up when the daemon ends."""


class ProcessFetchRunner:
    """Fetches as processes of the daemon's user, every one in its own session; they end with the daemon."""

    def __init__(self, layout: Layout, *, command: Sequence[str] | None = None) -> None:
        self._layout = layout
        self._command = list(command or python.module("honed.inputs.fetch", "--root", str(layout.root)))
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        left_out = {*DAEMON_VARIABLES, *SECRET_VARIABLES} - {"JOURNAL_STREAM"}  # its output goes to the daemon's
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
                with contextlib.suppress(subprocess.TimeoutExpired):  # in a call that a dead server holds
                    child.wait(timeout=KILLED_TIMEOUT_SEC)


@dataclass
class _Fetch:
    """One model or data set to fetch; its number is that of the first arrival that waits for it."""

    number: int
    missing: Missing
    request: dict[str, Any]
    waiting: set[int] = field(default_factory=set)
    is_started: bool = False
    not_before: float = 0.0
    num_deaths: int = 0
    num_bytes_at_death: int = -1
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_DELAY_SEC, MAX_DELAY_SEC))
    progress: FetchProgress = field(default_factory=FetchProgress)
    logged_at: float = 0.0
    over_since: float | None = None  #: when its deadline was first seen to be over, by the daemon's clock

    @property
    def is_over(self) -> bool:
        """True after its deadline: what did not pass for its process does not count."""
        deadline: float = self.request["deadline"]
        return awake_time() > deadline + self.progress.get("paused_sec", 0.0)

    @property
    def name(self) -> str:
        return f"{self.missing.repo_id} at {self.missing.revision}"

    @property
    def key(self) -> tuple[Any, ...]:
        return (*(self.request[key] for key in ("repo_id", "revision", "pickle", "code")), *astuple(self.missing)[2:])


@dataclass(frozen=True)
class Fetched:
    """The result of a fetch for one arrival that waited for it; `error` is set if the fetch failed."""

    number: int
    error: HonedError | None


class Fetcher:
    """The fetches of one instance. A `number` is that of an arrival or job and is never reused."""

    def __init__(
        self, layout: Layout, config: Config, runner: FetchRunner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._layout = layout
        self.config = config
        self._runner = runner
        self._clock = clock
        self._dir = layout.fetch(0).dir
        self._fetches: dict[int, _Fetch] = {}
        self.listeners: list[Callable[[str, int], None]] = []  #: get a type of repository and the bytes received for it
        durable.make_dir(self._dir)

    @property
    def is_busy(self) -> bool:
        return bool(self._fetches)

    def recover(self, numbers: Collection[int]) -> None:
        """Adopt fetches that an earlier daemon started; stop and remove those whose number is not in `numbers`."""
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
                    keys = {item.name: request[item.name] for item in fields(Missing) if item.name in request}
                    fetch = _Fetch(number, Missing(**keys), request, is_started=True)
                    self._fetches[number] = fetch
                continue  # its deadline still applies when it is requested again
            self._runner.stop(number)
            self._count(number, (request or {}).get("repo_type"))
            self._remove_files(number)

    def want(self, number: int, missing: Missing) -> None:
        """Request a fetch; `poll` reports its result for this number."""
        self.leave(number)
        policy = self.config.policy
        request = {**asdict(missing), "pickle": policy.pickle, "code": policy.trust_remote_code}
        fetch = _Fetch(number, missing, request)
        for other in self._fetches.values():
            if other.key == fetch.key:
                other.waiting.add(number)
                return
        if (replaced := self._fetches.get(number)) is not None:  # started by an earlier daemon under another policy
            self._runner.stop(number)
            self._forget(replaced)
        fetch.waiting.add(number)
        self._fetches[number] = fetch

    def leave(self, number: int) -> None:
        """Cancel the request of this number; a fetch for which nobody waits is stopped."""
        for fetch in list(self._fetches.values()):
            if number in fetch.waiting:
                fetch.waiting.discard(number)
                if not fetch.waiting:
                    self._runner.stop(fetch.number)
                    self._forget(fetch)

    def poll(self) -> list[Fetched]:
        """Return the fetches that ended since the last call, and start those that may start."""
        ended = []
        for fetch in list(self._fetches.values()):
            if not fetch.is_started:
                continue
            if reported := _read(self._layout.fetch(fetch.number).progress_path):
                fetch.progress = cast("FetchProgress", reported)
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

    def progress(self, number: int) -> FetchProgress:
        """Return the reported progress of the fetch that this number waits for; empty before it starts."""
        return next((fetch.progress for fetch in self._fetches.values() if number in fetch.waiting), FetchProgress())

    def status(self, *, is_named: bool = True) -> list[str]:
        """Return a short text per fetch."""
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
            self._count(fetch.number, fetch.missing.repo_type)  # of a process that ended while honed was down
            self._layout.fetch(fetch.number).result_path.unlink(missing_ok=True)
            self._write_request(fetch)
            log.info("fetches %s, for %s", fetch.name, _numbers(fetch.waiting))
            try:
                self._runner.start(fetch.number)
            except OSError as error:
                log.error("the fetch of %s could not be started: %s", fetch.name, error)  # noqa: TRY400
                fetch.not_before = now + MAX_DELAY_SEC
            else:
                fetch.is_started, fetch.logged_at = True, now

    def _write_request(self, fetch: _Fetch) -> None:
        """Write the request. Its deadline counts from its first start, across deaths and restarts of the daemon."""
        path, deadline = self._layout.fetch(fetch.number).request_path, awake_time() + self.config.hub.fetch_timeout_sec
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
            done, of = progress["bytes"] / 2**30, progress["of"] / 2**30
            log.info("fetching %s: %.1f of %.1f GiB", fetch.name, done, of)
        if not fetch.is_over:
            fetch.over_since = None
        elif fetch.over_since is None:
            fetch.over_since = now
        elif now - fetch.over_since > DEADLINE_GRACE_SEC:
            self._runner.stop(fetch.number, at_once=True)

    def _died(self, fetch: _Fetch) -> HonedError | None:
        """Schedule a restart of a fetch that died without a result; return an error if that is pointless. Raises
        OSError if the request cannot be written; then the death is not counted yet."""
        if paused_sec := fetch.progress.get("paused_sec", 0.0):  # the next process counts its own
            request = fetch.request | {"deadline": fetch.request["deadline"] + paused_sec}
            durable.write_json(self._layout.fetch(fetch.number).request_path, request)
            fetch.request, fetch.progress["paused_sec"] = request, 0.0
        num_bytes = fetch.progress.get("bytes", 0)
        if num_bytes > fetch.num_bytes_at_death:
            fetch.num_deaths = 0
            fetch.backoff.reset()
        fetch.num_deaths += 1
        fetch.num_bytes_at_death = num_bytes
        if fetch.is_over or fetch.num_deaths >= MAX_DEATHS:
            return EnvironmentInvalidError(
                f"{fetch.missing.key}: {fetch.name} could not be fetched: the fetch process died {fetch.num_deaths} "
                "times",
                hint="see the journal; submit the job again to continue: files fetched so far are kept",
            )
        self._count(fetch.number, fetch.missing.repo_type)
        delay = fetch.backoff.next_sec()
        log.warning("the fetch of %s died without an error message; retrying in %.0f s", fetch.name, delay)
        fetch.is_started, fetch.not_before = False, self._clock() + delay
        return None

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.number]
        self._count(fetch.number, fetch.missing.repo_type)
        self._remove_files(fetch.number)

    def _count(self, number: int, repo_type: object) -> None:
        path = self._layout.fetch(number).progress_path
        received = (_read(path) or {}).get("received")
        path.unlink(missing_ok=True)
        if isinstance(received, int) and received > 0 and isinstance(repo_type, str):
            for listener in self.listeners:
                listener(repo_type, received)

    def _remove_files(self, number: int) -> None:
        files = self._layout.fetch(number)
        for path in (files.request_path, files.progress_path, files.result_path, files.lock_path):
            path.unlink(missing_ok=True)


def is_locked(files: FetchLayout) -> bool:
    """Tell whether a fetch is running, by its lock."""
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


def _share(progress: FetchProgress) -> str:
    return f" {progress['bytes'] / progress['of']:.0%}" if progress.get("of") else ""


def _numbers(numbers: Collection[int]) -> str:
    return ("job " if len(numbers) == 1 else "jobs ") + ", ".join(map(str, sorted(numbers)))
