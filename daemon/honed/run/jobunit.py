"""Programs that a job's unit calls: honed-job@ID.service starts with `honed-job-start ID` and ends with `honed-job-end
ID`.

The daemon writes jobs/<id>/start.json before it asks systemd to start the unit:

    number, start        the attempt, and the number of its start
    backend              for the worker
    environment          {name: value}, for the worker
    watchdog_sec         seconds without progress after which systemd ends the worker
    stop_timeout_sec     seconds that a worker has to write its checkpoint when asked to stop

Both run as the workers' user. The first becomes the shim (shim.py). The second runs after every end, also while honed
is down, and adds systemd's facts to exit.json; if the shim was killed, it writes exit.json itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job import tree
from honed.run.runner import read_exit_record, read_lock_record
from honed.system import durable, python, untrusted
from honed.system.clock import Moment
from honed.system.layout import JobFiles, Layout
from honed.system.personpath import PersonPath

#: Mode of the workers' directories: the daemon, a member of their group, must read and remove them.
DIRECTORY_MODE = 0o770


@dataclass(frozen=True)
class Start:
    """The content of start.json."""

    number: int
    start: int
    backend: str
    environment: dict[str, str]
    watchdog_sec: float
    stop_timeout_sec: float

    def write(self, job: JobFiles) -> None:
        """Write start.json durably and atomically."""
        untrusted.write_plain(job.start_path, durable.as_json(self.__dict__), mode=0o640)


def read(job: JobFiles) -> Start:
    """Read start.json. Raises ValueError or OSError if there is no valid one."""
    raw = json.loads(untrusted.read_plain(job.start_path))
    try:  # by hand: pydantic's import would delay the start of every unit by a tenth of a second
        return Start(
            number=int(raw["number"]),
            start=int(raw["start"]),
            backend=str(raw["backend"]),
            environment={str(name): str(value) for name, value in raw["environment"].items()},
            watchdog_sec=float(raw["watchdog_sec"]),
            stop_timeout_sec=float(raw["stop_timeout_sec"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a start file written by honed: {error!r}") from error


def start(job: JobFiles, *, command: Sequence[str] | None = None) -> str:
    """Become the shim of the worker that start.json describes. Returns only on failure, with the reason."""
    try:
        wanted = read(job)
    except (OSError, ValueError) as error:
        return f"{job.start_path}: {error}; only honed starts jobs: use `honectl release` or `honectl requeue`"
    attempt = job.attempt(wanted.number)
    try:
        durable.make_dir(Path(str(attempt.dir)), mode=DIRECTORY_MODE)
        os.chdir(job.place)
        worker = [*(command or python.module("honed.worker")), str(job.dir), str(wanted.number)]
        shim = python.bare(Path(__file__).with_name("shim.py"), "--relay")
        environment = {
            **os.environ,
            **wanted.environment,
            "HONED_WATCHDOG_SEC": f"{wanted.watchdog_sec:g}",
            "HONED_STOP_TIMEOUT_SEC": f"{wanted.stop_timeout_sec:g}",
        }
        os.execve(
            shim[0],
            [*shim, str(attempt.dir), str(wanted.start), *worker, "--backend", wanted.backend],
            environment,
        )
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def end(job: JobFiles, environment: Mapping[str, str], *, system_state: str = "") -> dict[str, Any]:
    """Record in exit.json what systemd passes to ExecStopPost= in the environment. Returns the new exit.json.

    Raises OSError or ValueError if there is no start to record it for.
    """
    wanted = read(job)
    attempt = job.attempt(wanted.number)
    record = read_exit_record(attempt, wanted.start)
    if record is not None and "service_result" in record:
        return record  # somebody started the unit by hand after its end: the shim did nothing
    how, what = environment.get("EXIT_CODE", ""), environment.get("EXIT_STATUS", "")
    if record is None:
        lock, ended = read_lock_record(attempt, wanted.start), Moment.now()
        record = {
            "start": wanted.start,
            "status": int(what) if how == "exited" and what.isdecimal() else None,
            "signal": _signal_number(what) if how in {"killed", "dumped"} else None,
            "ended_at": ended.wall,
            "ended_monotonic": ended.monotonic,
            "boot_id": ended.boot_id,
            "was_asked": lock.get("was_asked", False),
            "ran": bool(lock),
        }
    record |= {
        "service_result": environment.get("SERVICE_RESULT", ""),
        "exit_code": how,
        "exit_status": what,
        "invocation_id": environment.get("INVOCATION_ID", ""),
        "system_state": system_state,
    }
    durable.make_dir(Path(str(attempt.dir)), mode=DIRECTORY_MODE)
    untrusted.write_plain(attempt.exit_path, durable.as_json(record))
    return record


def _signal_number(name: str) -> int | None:
    """Return the number of a signal in systemd's spelling: KILL, ABRT."""
    try:
        return int(signal.Signals[f"SIG{name}"])
    except KeyError:
        return None


def start_main() -> int:
    """Run the `honed-job-start` command."""
    python.protect()
    print(f"<3>{start(_job())}", file=sys.stderr)
    return 78  # EX_CONFIG


def end_main() -> int:
    """Run the `honed-job-end` command."""
    # The daemon, a member of the group, must be able to remove what the worker created below its job's directory:
    # directories made by tempfile, for one, are closed to everybody but their owner.
    tree.open_up(_job().place)
    try:
        end(_job(), os.environ, system_state=_system_state())
    except (OSError, ValueError) as error:
        print(f"<3>the end of the job could not be recorded: {error}", file=sys.stderr)
        return 1
    return 0


def _job() -> JobFiles:
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        print(f"usage: {Path(sys.argv[0]).name} ID (called by honed-job@ID.service)", file=sys.stderr)
        raise SystemExit(2)
    return JobFiles(PersonPath(Layout(Path("/")).jobs_dir / sys.argv[1], is_own=True))


def _system_state() -> str:
    """Return systemd's state, `stopping` in a shutdown: the daemon may be gone by then. Empty if it does not answer."""
    from honed.system.dbus import BusError, Systemd  # noqa: PLC0415 - a start does not need it

    try:
        return Systemd().system_state()
    except BusError:
        return ""
