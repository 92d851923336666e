"""A real daemon in a directory of its own, with a real child process that misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpus
import warm
from honed.job import query, refusals
from honed.job.job import Job, State
from honed.job.refusals import Reason
from honed.job.spool import Spool
from honed.system.client import Client
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from waiting import DEADLINE_SEC, wait_for
from zoo import plain

HERE = Path(__file__).parent
#: Files are picked up soon after they were dropped, and no job is rehearsed, which takes 6 s of CPU time: see
#: test_rehearsed_jobs.py.
SOON = "[spool]\nsettle_sec = 0.1\nrehearsal_cpu_sec = 0\n"


#: CLOCK_REALTIME_COARSE, which the kernel takes the times of files from, at the least.
_FILE_CLOCK = 5


def is_alive(pid: int) -> bool:
    """Return True if a process has not ended; one that nobody has waited for yet has."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def command_of(pid: int) -> bytes:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children_of(pid: int) -> list[int]:
    """Return the children of a process and its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return sorted(found)


@dataclass(frozen=True)
class Beside:
    """A honectl that runs beside a test, and all that it has written."""

    process: warm.Popen
    path: Path

    @property
    def said(self) -> str:
        return self.path.read_text()


class Instance:
    """One honed and its directory."""

    command: tuple[str, ...] = (sys.executable, str(HERE / "fakehoned.py"))
    #: True if the daemon and its children start with their imports done; never the case in namespaces of their own.
    is_warm = True
    popen: type[warm.Popen] = warm.Popen  #: what starts them then
    _dropped_at_ns = 0  # the time of the last file that was dropped

    def __init__(self, root: Path) -> None:
        warm.address(self.popen.kind)
        self.layout = Layout(root)
        self.root = root
        self.incoming_dir = self.layout.spool_dir / "incoming"
        self.incoming_dir.mkdir(parents=True)
        self.model = plain.write_base_model(root / "model")
        self.dataset = plain.write_dataset(root / "rows.jsonl")
        self.client = Client(self.layout.control_path)
        self.process: subprocess.Popen[bytes] | warm.Popen | None = None
        self.log_path = root / "honed.log"
        self.environment = dict(os.environ)
        self.configure("")

    def configure(self, text: str) -> None:
        """Write honed.toml; without [spool] in it, that of `SOON` follows."""
        self.layout.config_path.parent.mkdir(parents=True, exist_ok=True)
        self.layout.config_path.write_text(text if "[spool]" in text else f"{text}\n{SOON}")

    def start(self, *arguments: str) -> None:
        """Start the daemon and wait until it is ready. It takes the files that were dropped in their order."""
        with self.log_path.open("ab") as file:
            num_ready = self.log.count(" ready: ")
            command = [*self.command, str(self.root), *arguments]
            if self.is_warm and self.command[0] == sys.executable:
                popen, environment = self.popen, self.environment
            else:
                popen, environment = subprocess.Popen, warm.without(self.environment)
            self.process = popen(command, stdout=file, stderr=file, env=environment)
        wait_for(
            lambda: self.log.count(" ready: ") > num_ready or self.process.poll() is not None,
            what="ready",
            account=self.account,
        )

    def drain(self) -> int:
        """Run the daemon until nothing is left to do. Returns its exit status."""
        self.start("--drain")
        return self.wait()

    def wait(self, *, deadline_sec: float = 2 * DEADLINE_SEC) -> int:
        assert self.process is not None
        return self.process.wait(timeout=deadline_sec)

    def kill(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(timeout=DEADLINE_SEC)

    def helpers(self) -> list[int]:
        """Return the preflight helpers, oldest first; `is_warm` must be false."""
        assert self.process is not None
        return [pid for pid in children_of(self.process.pid) if b"honed.check.preflight" in command_of(pid)]

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill(signal.SIGTERM)

    def end(self) -> None:
        """Kill all processes of the instance that are left."""
        for job in list(self.spool.jobs(State.RUNNING)):
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads((self.layout.job(job.id).attempt(job.attempt.number).dir / "lock").read_text())
                for key in ("worker_pid", "shim_pid"):
                    os.kill(record[key], signal.SIGKILL)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def index(self) -> str:
        """The page of all jobs, empty before it is made."""
        return self.layout.index_path.read_text() if self.layout.index_path.exists() else ""

    @property
    def spool(self) -> Spool:
        return Spool(self.layout, lock=False)

    def drop(self, file: str, /, **keys: Any) -> Path:
        """Drop a job as `mv` does: written beside the spool, then renamed into it. A honed that is running may take
        files that come together in another order; see `arrive`."""
        temporary = self.incoming_dir / f".{file}.tmp"
        temporary.write_text(json.dumps(plain.spec(self.model, self.dataset, **keys)))
        return self.put(temporary, f"{file}.json")

    def put(self, hidden: Path, name: str) -> Path:
        """Name a file of incoming/ that honed overlooks so that it sees it, later than all before."""
        wait_for(lambda: time.clock_gettime_ns(_FILE_CLOCK) > self._dropped_at_ns, what="the next time of a file")
        path = hidden.rename(self.incoming_dir / name)
        self._dropped_at_ns = time.clock_gettime_ns(_FILE_CLOCK)
        return path

    def arrive(self, file: str, /, **keys: Any) -> Job:
        """Drop a job and wait until honed, which is running, has accepted it: jobs that come one at a time have numbers
        in their order."""
        known = self.spool.all_jobs().keys()
        self.drop(file, **keys)

        def accepted() -> Job | None:
            assert f"{file}.json" not in self.rejected(), self.account()
            return next((job for number, job in self.spool.all_jobs().items() if number not in known), None)

        return wait_for(accepted, what=f"{file} accepted", account=self.account)

    def go(self, name: str) -> None:
        """Let a job go on that has `until` as its name: it makes its steps and waits for this before the last one."""
        job = self.job(name)
        assert job is not None
        (self.layout.job(job.id).dir / "go").touch()

    def job(self, name: str) -> Job | None:
        found = [job for job in self.spool.all_jobs().values() if job.name == name]
        return max(found, key=lambda job: (job.id, job.revision), default=None)

    def wait_state(self, name: str, *states: State, deadline_sec: float = DEADLINE_SEC) -> Job:
        def reached() -> Job | None:
            job = self.job(name)
            return job if job is not None and job.state in states else None

        what = f"{name} {' or '.join(states)}"
        return wait_for(reached, deadline_sec, what=what, account=self.account)

    def account(self) -> str:
        """Return the spool's entries, the rejections and the end of the daemon's log, for a test that fails."""
        facts = [f"{state}/{file}" for state, file in self.entries()]
        facts += [f"rejected/{file}: {reason}" for file, reason in self.rejected().items()]
        facts += [f"honed's exit status: {self.process and self.process.poll()}"]
        return "\n".join([*facts, *self.log.splitlines()[-30:]])

    def starts(self, job: Job) -> list[str]:
        """A line for each start of the job's worker: attempt, backend, visible devices."""
        path = self.layout.job(job.id).dir / "starts.txt"
        return path.read_text().splitlines() if path.exists() else []

    def rejected(self) -> dict[str, str]:
        """Return the reason for each rejected file, by its name."""
        directory = self.layout.spool_dir / "rejected"
        return {path.name.removesuffix(".reason"): path.read_text() for path in directory.glob("*.reason")}

    def kept(self, name: str) -> Path:
        """Return where a rejected file is kept."""
        reason = self.reason(name)
        assert reason.kept_path is not None
        return Path(str(reason.kept_path))

    def reason(self, name: str) -> Reason:
        """Return why a file was rejected."""
        reason = refusals.read(PersonPath.of(self.layout.spool_dir / f"rejected/{name}.reason", 1))
        assert reason is not None
        return reason

    def honectl(
        self, *arguments: str, check: bool = False, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run honectl to its end. `env` replaces the tests' environment."""
        command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(self.root), *arguments]
        return warm.run(command, env=env, timeout=DEADLINE_SEC, check=check)

    @contextlib.contextmanager
    def beside(self, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Beside]:
        """Run honectl beside the test, to its end."""
        command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(self.root), *arguments]
        with tempfile.NamedTemporaryFile() as output:
            process = warm.Popen(command, stdout=output, stderr=output, env=env)
            try:
                yield Beside(process, Path(output.name))
                process.wait(DEADLINE_SEC)
            finally:
                if process.poll() is None:
                    process.kill()

    def show(self, reference: str) -> dict[str, Any]:
        shown: dict[str, Any] = query.show(self.spool, self.layout, reference)
        return shown

    def entries(self) -> list[tuple[str, str]]:
        """Return (state, file) of every entry."""
        return [(state.value, path.name) for state in State for path in (self.layout.spool_dir / state).glob("*.json")]


def said_on_terminal(instance: Instance, columns: int, *arguments: str) -> str:
    """Return all that honectl writes on a terminal of so many columns."""
    controller, side = pty.openpty()
    command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(instance.root), *arguments]
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    process = warm.Popen(command, stdout=side, stderr=side, env=environment)
    os.close(side)
    said = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(controller, 1 << 16):
            said += part
    process.wait(DEADLINE_SEC)
    os.close(controller)
    return said.decode()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    made = Instance(tmp_path)
    yield made
    made.end()


class RealInstance(Instance):
    """The real daemon with the real worker, whose processes start with their libraries imported."""

    command = (sys.executable, str(HERE / "realhoned.py"))

    def __init__(self, root: Path) -> None:
        warm.address("worker")
        super().__init__(root)


class ColdInstance(Instance):
    """The real daemon with the real worker, started as an installation starts them."""

    command = (sys.executable, "-m", "honed.daemon.loop", "--root")
    is_warm = False


class RankInstance(Instance):
    """The real daemon on a machine with two GPUs, by its NVML's word, and the real worker with its ranks on the CPU."""

    command = (sys.executable, str(HERE / "rankedhoned.py"))
    is_warm = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.environment |= gpus.variables(root / "nvml", 2) | {"HONED_TEST_RANKS": warm.address("ranks")}

    def pids(self, job: Job) -> list[int]:
        """Return the processes of the ranks of a job's attempt; the shim's last."""
        record = json.loads((self.layout.job(job.id).attempt(job.attempt.number).dir / "lock").read_text())
        return [*record["worker_pids"], record["shim_pid"]]


@pytest.fixture
def ranked(tmp_path: Path) -> Iterator[RankInstance]:
    made = RankInstance(tmp_path)
    yield made
    made.end()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealInstance]:
    made = RealInstance(tmp_path)
    yield made
    made.end()


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdInstance]:
    made = ColdInstance(tmp_path)
    yield made
    made.end()
