"""One instance with a few dropped files, a honed that is hit at one of its system calls, and what must hold after."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import warm
from crash import traced
from honed.daemon.rebuild import rebuild
from honed.job import refusals
from honed.job.arrival import Arrivals
from honed.job.counters import Counters
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.system.layout import Layout
from zoo import plain

HERE = Path(__file__).parent
#: The file operations that can fail or be the last one: what Python and SQLite call for them.
CALLS = (
    "openat",
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "rename",
    "renameat2",
    "link",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
    "ftruncate",
    "close",
)
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS")
KILL = "KILL"
#: Seconds that one honed may take for three tiny jobs; far more than it needs.
DEADLINE_SEC = 300.0
GOOD, BAD = ("plain.json", "dies.json"), ("half.json",)
#: Of the good ones this came over the control socket, from a user whose no file is.
HANDED, SUBMITTER = "plain.json", 12345
CONFIG = """
[spool]
settle_sec = 0
rescan_interval_sec = 0.2
[jobs]
poll_interval_sec = 0.02
retry_delay_sec = 0
"""


@dataclass(frozen=True)
class Point:
    """The n-th call of one kind that a process makes on one path, as `strace -P -e inject` counts them. It makes others
    in between as the clock and the processes of the machine will."""

    call: str
    number: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.call} {self.number} ({self.path})"


@dataclass(frozen=True)
class Hit:
    """A fault at a point: KILL, or the name of an error."""

    point: Point
    fault: str

    def arguments(self, root: Path) -> tuple[str, ...]:
        """strace's."""
        what = "signal=SIGKILL" if self.fault == KILL else f"error={self.fault}"
        injection = f"inject={self.point.call}:{what}:when={self.point.number}"
        path = str(root / self.point.path)
        return ("-qq", "-o", "/dev/null", "-P", path, "-e", f"trace={self.point.call}", "-e", injection)

    def __str__(self) -> str:
        return f"{self.fault} at {self.point}"


class Scene:
    """An instance below `root`."""

    def __init__(self, root: Path, *, mutant: str | None = None, is_staging: bool = False) -> None:
        """`mutant`: the bug that is planted in its honed; see mutants.py. `is_staging`: the second job is
        staged while the first one runs."""
        self.root = root
        self.layout = Layout(root)
        self.is_staging = is_staging
        self.mutant = mutant
        self.variables = {"HONED_TEST_STAGING": "1"} if is_staging else {}
        self.log_path = root / "log"

    def prepare(self) -> None:
        """Three files, two jobs and one that is half a file: two in incoming/, dropped a while ago, and one that was
        taken over the control socket by a honed that had only just begun."""
        incoming_dir = self.layout.spool_dir / "incoming"
        incoming_dir.mkdir(parents=True)
        model = plain.write_base_model(self.root / "model")
        dataset = plain.write_dataset(self.root / "rows.jsonl")
        text = json.dumps(plain.spec(model, dataset))
        spool = Spool(self.layout, lock=False)
        Arrivals(spool).submit(HANDED, text.encode(), SUBMITTER)
        for place in [*filter(Path.is_dir, spool.dir.iterdir()), self.layout.jobs_dir]:
            if not any(place.iterdir()) and place != incoming_dir:
                place.rmdir()
        for seconds, name in enumerate(sorted({*GOOD, *BAD} - {HANDED})):
            path = incoming_dir / name
            path.write_text(text if name in GOOD else text[:20])
            os.utime(path, (seconds, seconds))  # so that each has the same number in each run
        self.layout.config_path.parent.mkdir(parents=True)
        self.layout.config_path.write_text(f"{CONFIG}stage_ahead = {str(self.is_staging).lower()}\n")

    def honed(self, *, tracer: Sequence[str] = (), shim_hit: Sequence[str] = ()) -> int | None:
        """Run honed until nothing is left to do, under strace with the arguments `tracer`. Returns its exit status;
        None where it did not come to an end.

        `shim_hit`: what its first shim is run under strace with.
        """
        command = [sys.executable, str(HERE / "quickhoned.py"), str(self.root), "--drain"]
        variables = traced.environment(mutant=self.mutant, tracer=tracer) | self.variables
        if shim_hit:
            variables |= {
                "HONED_TEST_HIT": " ".join(shim_hit),
                "HONED_TEST_PYTHON": sys.executable,
                "HONED_TEST_ROOT": str(self.root),
            }
        with self.log_path.open("ab") as log:
            process = warm.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
            try:
                return process.wait(DEADLINE_SEC)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None

    def points(self, *, shim: bool = False) -> list[Point]:
        """The system calls on files of this instance that an undisturbed honed, or its first shim, makes, in order."""
        trace_path = self.root.with_name(f"{self.root.name}.trace")
        arguments = ("-q", "-y", "-o", str(trace_path), "-e", f"trace={','.join(CALLS)}")
        status = self.honed(shim_hit=arguments) if shim else self.honed(tracer=arguments)
        assert status == 0, self.log
        return counted(trace_path, self.root)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # -- what must hold ---------------------------------------------------------------------------------------------

    def violations(self, *, may_be_unreadable: bool = False) -> list[str]:
        """What is wrong once nothing is left to do; nothing, if honed keeps its word. With `may_be_unreadable` one
        dropped file may be refused as any that honed may not read is. Which one is not certain: the calls before it
        are not the same in each run.
        """
        found = []
        spool = Spool(self.layout, lock=False)
        entries = [(state, path) for state in State for path in sorted(spool.state_dir(state).iterdir())]
        jobs = [job for state in State for job in spool.jobs(state)]
        found += [f"hidden: {path}" for path in sorted(spool.dir.rglob(".*"))]
        places = collections.Counter(path.name for _, path in entries)
        found += [f"{count} entries of one number: {name}" for name, count in places.items() if count > 1]
        found += [f"not an entry: {path}" for _, path in entries if path.name not in {f"{job.id}.json" for job in jobs}]
        reasons = [reason for path in refusals.listed(spool.rejected) if (reason := refusals.read(path))]
        refused = [reason.file for reason in reasons]
        kept = {spool.rejected / path.name for path in spool.rejected_dir.iterdir() if path.suffix != ".reason"}
        found += [f"no reason: {path.name}" for path in kept - {reason.kept_path for reason in reasons}]
        found += [f"not kept: {reason.file}" for reason in reasons if reason.kept_path not in kept]
        numbers = collections.Counter(reason.number for reason in reasons)
        found += [f"{count} refusals of arrival {number}" for number, count in numbers.items() if count > 1]
        fates = collections.Counter([job.source for job in jobs] + refused)
        for name in (*GOOD, *BAD):
            if fates[name] != 1:
                found.append(f"{name}: {fates[name]} jobs and refusals")
            if name in refused and may_be_unreadable and self._is_unreadable(spool, name):
                may_be_unreadable = False
            elif (name in refused) != (name in BAD):
                found.append(f"{name}: {'refused' if name in refused else 'accepted'}")
        found += [
            f"job {job.id} ({job.name}) is user {job.uid}'s"
            for job in jobs
            if job.uid != (SUBMITTER if job.source == HANDED else os.getuid())
        ]
        for job in jobs:
            if job.state is not State.SUCCEEDED:
                found.append(f"job {job.id} ({job.name}) is {job.state}: {job.error}")
            succeeded = [attempt.number for attempt in job.attempts if self._has_succeeded(job, attempt.number)]
            if succeeded != [job.attempt.number if job.attempts else 0]:
                found.append(f"job {job.id} ({job.name}): of its attempts succeeded {succeeded}")
        found += [f"left in incoming/: {path.name}" for path in spool.incoming_dir.iterdir()]
        found += [f"left in claimed/: {path.name}" for path in spool.claimed_dir.iterdir()]
        known = {str(job.id) for job in jobs}
        found += [f"of no job: {path}" for path in self.layout.jobs_dir.iterdir() if path.name not in known]
        return found + self.counter_faults(jobs, len(refused)) + self.database_faults(spool)

    def costs(self) -> list[str]:
        """The attempts that faults of honed and its machine have cost; one that dies by itself costs one."""
        jobs = [job for state in State for job in Spool(self.layout, lock=False).jobs(state)]
        allowed = {"plain.json": 0, "dies.json": 1}
        return [f"{job.name}: {job.num_failures} failures" for job in jobs if job.num_failures > allowed[job.source]]

    @staticmethod
    def _is_unreadable(spool: Spool, name: str) -> bool:
        return f"{name}: honed cannot read it" in (spool.rejected_dir / f"{name}.reason").read_text()

    def _has_succeeded(self, job: Job, number: int) -> bool:
        path = self.layout.job(job.id).attempt(number).result_path
        return path.exists() and json.loads(path.read_bytes())["outcome"] == "succeeded"

    def counter_faults(self, jobs: Sequence[Job], num_refused: int) -> list[str]:
        """Counters that differ from the entries; the last write may have failed, and is then made up for at a start."""
        spool = Spool(self.layout)
        spool.recover()
        counters = Counters(self.layout.counters_path, spool)
        counters.recover()
        spool.close()
        ours = {name: sum(values.values()) for name, values in counters._values["counters"].items()}
        theirs = {
            "honed_jobs_finished_total": sum(job.state.is_final for job in jobs),
            "honed_jobs_rejected_total": num_refused,
            "honed_attempts_finished_total": sum(each.ended_at is not None for job in jobs for each in job.attempts),
        }
        return [f"{name}: {ours[name]} and not {count}" for name, count in theirs.items() if ours[name] != count]

    def database_faults(self, spool: Spool) -> list[str]:
        """How honed.db differs from the one that is made anew from the spool and the jobs' directories."""
        copy = self.root / "again.db"
        copy.unlink(missing_ok=True)
        again = Database(copy)
        rebuild(again, spool, self.layout)
        again.close()
        ours, theirs = dump(self.layout.database_path), dump(copy)
        for suffix in ("", "-wal", "-shm"):
            copy.with_name(copy.name + suffix).unlink(missing_ok=True)
        return [f"honed.db: {table}: {ours[table] ^ theirs[table]}" for table in theirs if ours[table] != theirs[table]]

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def counted(trace_path: Path, root: Path) -> list[Point]:
    """The calls in a trace that are on files of the instance below `root`."""
    traced.wait_for_end(trace_path)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    found = []
    for line in trace_path.read_text(errors="replace").splitlines():
        if match := re.match(r"(\w+)\((.*)\) += ", line):
            paths = re.findall(rf"{re.escape(str(root))}/((?:var|run)/[^\"<>]*)", match[2])
            counts.update((match[1], path) for path in {*paths})
            found += [Point(match[1], counts[match[1], path], path) for path in paths[:1]]
    return found


def dump(path: Path) -> dict[str, frozenset[tuple[object, ...]]]:
    """The rows of each table; their number tells two that are the same apart."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {}
    for table in tables:
        rows = collections.Counter(db.execute(f"SELECT * FROM {table}"))
        found[table] = frozenset((*row, count) for row, count in rows.items())
    db.close()
    return found


def try_hit(
    directory: Path,
    hit: Hit,
    *,
    mutant: str | None = None,
    shim: bool = False,
    is_staging: bool = False,
) -> list[str]:
    """One cell of the matrix: honed or its first shim is hit once; honed is started again where it died of that."""
    name = re.sub(r"\W+", "-", str(hit))
    scene = Scene(directory / name, mutant=mutant, is_staging=is_staging)
    scene.prepare()
    arguments = hit.arguments(scene.root)
    status = scene.honed(shim_hit=arguments) if shim else scene.honed(tracer=arguments)
    found = [f"it hangs after {hit}"] if status is None else []
    if status != 0:
        again = scene.honed()
        found += [f"started again it ends with {again}"] if again != 0 else []
    may_be_unreadable = hit.fault == "EACCES" and hit.point.call == "openat"
    try:
        found += scene.violations(may_be_unreadable=may_be_unreadable)
        found += [] if shim else scene.costs()
    except Exception as error:  # noqa: BLE001 - a spool that cannot even be read is the gravest violation
        found.append(f"cannot be looked at: {error!r}")
    if found:
        (directory / "failed").mkdir(exist_ok=True)
        shutil.copy(scene.log_path, directory / "failed" / f"{scene.root.name}.log")
    scene.clear()
    return found


def points_of(
    directory: Path, *, mutant: str | None = None, shim: bool = False, is_staging: bool = False
) -> list[Point]:
    """The points of an undisturbed run, which must break nothing, whatever bug is planted: else any fault would do."""
    scene = Scene(directory / "undisturbed", mutant=mutant, is_staging=is_staging)
    scene.prepare()
    found = scene.points(shim=shim)
    assert scene.violations() == []
    scene.clear()
    return found


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """So many of them, evenly, from the first on."""
    return list(points) if count >= len(points) else [points[len(points) * index // count] for index in range(count)]
