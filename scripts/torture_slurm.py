"""Random jobs on two virtual Slurm nodes, while all that they depend on fails at random: see scripts/torture --slurm.

honed is stopped and killed, the controller is killed and started again, nodes are lost, workers and shims are killed;
sbatch reports a failure after it has submitted, or before; starts are submitted a second time; users cancel, hold and
release jobs, with honed and behind its back; jobs reach their time limit. The workers train nothing. After the last
fault all runs undisturbed; then each dropped file must be one job in a final state that its faults explain, no start
may have begun twice, and no job may have had two workers at a time whose ends were not recorded.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "process"), str(TESTS / "cluster")]

from nodes import Cluster, ClusterInstance, why_not  # noqa: E402

from honed.job.job import Job, State  # noqa: E402

CONFIG = """
[slurm]
gpu_bytes = 85899345920
max_jobs = 4
[jobs]
time_limit_grace_sec = 1
stop_timeout_sec = 20
poll_interval_sec = 0.1
[spool]
settle_sec = 0.1
rescan_interval_sec = 1
"""
#: How often each fault is made, in relation to the others. A lost node takes Slurm ten seconds to notice.
FAULTS = {
    "honed killed": 16,
    "honed stopped": 8,
    "controller killed": 10,
    "node lost": 6,
    "sbatch late": 12,
    "sbatch failed": 8,
    "duplicate start": 12,
    "worker killed": 8,
    "shim killed": 8,
    "cancelled": 6,
    "held": 8,
    "scancel": 6,
    "time limit": 6,
}
#: A sbatch that fails as a file beside it says, once.
SBATCH = """#!/bin/sh
case "$*" in *--test-only*) exec /usr/bin/sbatch "$@";; esac
mode=$(cat {mode} 2>/dev/null); rm -f {mode}
[ "$mode" = failed ] && {{ echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; }}
/usr/bin/sbatch "$@" || exit
[ "$mode" = late ] && {{ echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; }}
exit 0
"""
#: Steps of jobs, ten in a second, and how many jobs are not finished at a time, while faults are left.
NUM_STEPS, MAX_WAITING = (5, 20, 60, 120), 5
#: The same of a short run, and the faults that it leaves out: Slurm takes long to notice them.
NUM_STEPS_SHORT, MAX_WAITING_SHORT, LONG_FAULTS = (5, 20), 3, {"node lost", "time limit"}
#: Seconds for the undisturbed rest, and those of a short run.
PEACE_SEC, PEACE_SEC_SHORT = 600.0, 150.0
FINAL = {State.SUCCEEDED, State.FAILED, State.CANCELLED}


class Torture:
    """One run."""

    def __init__(self, directory: Path, *, seed: int, num_faults: int, minutes: float, is_short: bool = False) -> None:
        self.random = random.Random(seed)
        self.deadline = time.monotonic() + 60 * minutes
        self.made: collections.Counter[str] = collections.Counter()
        self.dropped: dict[str, set[State]] = {}  #: names, and the states in which each may end
        self.num_steps = NUM_STEPS_SHORT if is_short else NUM_STEPS
        self.max_waiting = MAX_WAITING_SHORT if is_short else MAX_WAITING
        self.peace_sec = PEACE_SEC_SHORT if is_short else PEACE_SEC
        kinds = FAULTS if not is_short else {name: 1 for name in FAULTS if name not in LONG_FAULTS}
        shares = sum(kinds.values())
        self.faults = [name for name, share in kinds.items() for _ in range(-(-num_faults * share // shares))]
        self.random.shuffle(self.faults)
        self.faults = self.faults[:num_faults]
        self.cluster = Cluster(directory / "cluster")
        self.cluster.dir.mkdir()
        (directory / "honed").mkdir()
        self.hit = ClusterInstance(directory / "honed", self.cluster)
        self.hit.configure(CONFIG)
        self.hit.pretend_cuda()
        self.mode_path = directory / "sbatch-mode"
        (directory / "bin").mkdir()
        sbatch = directory / "bin/sbatch"
        sbatch.write_text(SBATCH.format(mode=self.mode_path))
        sbatch.chmod(0o755)
        self.hit.environment["PATH"] = f"{sbatch.parent}:{self.hit.environment['PATH']}"

    def run(self) -> list[str]:
        """Run everything; return the violated guarantees."""
        self.cluster.up()
        self.hit.start()
        told_at = time.monotonic()
        while self.faults and time.monotonic() < self.deadline:
            while len(self.unfinished()) < self.max_waiting:
                self.drop()
            time.sleep(self.random.choice([0.0, 0.2, 1.0, 2.5]))
            fault = self.faults.pop(0)
            if self.make(fault):
                self.made[fault] += 1
            else:
                self.faults.append(fault)
            if time.monotonic() - told_at > 30:
                told_at = time.monotonic()
                self.cluster.mend()  # Slurm drains a node whose processes it could not kill in time
                print(f"{self.made.total()} faults, {len(self.dropped)} jobs dropped", flush=True)
        return self.make_peace()

    def unfinished(self) -> list[str]:
        jobs = {job.name: job for job in self.hit.spool.all_jobs().values()}
        refused = {f"{name.rpartition('.')[2]}.json" for name in self.dropped} & self.hit.rejected().keys()
        return [
            name
            for name in self.dropped
            if f"{name.rpartition('.')[2]}.json" not in refused and (name not in jobs or jobs[name].state not in FINAL)
        ]

    def drop(self, *, time_limit_sec: float | None = None) -> None:
        number = len(self.dropped) + 1
        what = "slow-2000" if time_limit_sec else f"slow-{self.random.choice(self.num_steps)}"
        nodes = 2 if self.random.random() < 0.3 else 1
        name = f"{what}.n{number}"
        self.dropped[name] = {State.FAILED} if time_limit_sec else {State.SUCCEEDED}
        limit = {"time_limit_sec": time_limit_sec} if time_limit_sec else {}
        self.hit.drop(f"n{number}", name=name, resources={"nodes": nodes}, retry={"max_attempts": 100}, **limit)

    # -- faults -------------------------------------------------------------------------------------------------------

    def make(self, fault: str) -> bool:
        """Make a fault. Returns False if there is nothing that it could hit now."""
        jobs = [job for job in self.hit.spool.jobs(State.RUNNING) if job.attempts]
        job = self.random.choice(jobs) if jobs else None
        match fault:
            case "honed killed" | "honed stopped":
                self.hit.kill(signal.SIGKILL if fault == "honed killed" else signal.SIGTERM)
                time.sleep(self.random.choice([0.0, 1.0, 5.0]))
                self.hit.start()
            case "controller killed":
                self.cluster.kill("slurmctld")
                time.sleep(self.random.choice([0.5, 3.0, 8.0]))
                self.cluster.start("slurmctld")
            case "node lost":
                self.cluster.kill(f"slurmd-node{self.random.choice([1, 2])}")
                time.sleep(self.random.choice([1.0, 15.0]))
                self.cluster.mend()
            case "sbatch late" | "sbatch failed":
                self.mode_path.write_text(fault.partition(" ")[2])
                self.drop()
            case "time limit":
                self.drop(time_limit_sec=2)
            case "duplicate start":
                return job is not None and self.duplicate(job)
            case "worker killed" | "shim killed":
                return job is not None and self.kill(job, fault.partition(" ")[0])
            case "cancelled":
                return job is not None and self.ask("cancel", job, State.CANCELLED)
            case "held":
                return job is not None and self.ask("hold", job) and self.release(job)
            case "scancel":
                return job is not None and self.withdraw(job) and self.release(job)
        return True

    def duplicate(self, job: Job) -> bool:
        """Submit a start once more, as a lost answer would."""
        files = self.hit.layout.job(job.id)
        script = files.attempt(job.attempt.number).dir / "slurm.sh"
        with contextlib.suppress(OSError, ValueError, KeyError):
            name = json.loads(files.start_path.read_bytes())["name"]
            command = ["/usr/bin/sbatch", f"--job-name={name}", "--no-requeue", f"--nodes={job.num_nodes}"]
            command += ["--ntasks-per-node=1", "--gpus-per-node=1", "--output=/dev/null", str(script)]
            done = subprocess.run(command, env=self.cluster.environment, capture_output=True, check=False, timeout=60)
            return done.returncode == 0
        return False

    def kill(self, job: Job, what: str) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((self.hit.layout.job(job.id).attempt(job.attempt.number).dir / "lock").read_text())
            pid = int(record[f"{what}_pid"])
            if str(self.hit.root) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def ask(self, verb: str, job: Job, *states: State) -> bool:
        if self.hit.honectl(verb, str(job.id)).returncode:
            return False
        self.dropped[job.name] |= set(states)
        return True

    def withdraw(self, job: Job) -> bool:
        try:
            name = json.loads(self.hit.layout.job(job.id).start_path.read_bytes())["name"]
        except (OSError, ValueError, KeyError):
            return False
        command = ["scancel", f"--name={name}"]
        subprocess.run(command, env=self.cluster.environment, capture_output=True, check=False, timeout=60)
        return True

    def release(self, job: Job) -> bool:
        """Release a job that becomes held, as it does unless it ends first."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = self.hit.spool.all_jobs().get(job.id)
            if now is not None and now.state is State.HELD:
                self.hit.honectl("release", str(job.id))
                return True
            if now is not None and now.state in FINAL:
                return True
            if now is not None and now.attempts and now.attempt.number > job.attempt.number:
                return True  # the attempt ended in another way first
            time.sleep(0.2)
        return True

    # -- the end ------------------------------------------------------------------------------------------------------

    def make_peace(self) -> list[str]:
        """Let all finish undisturbed, then check it."""
        self.mode_path.unlink(missing_ok=True)
        self.cluster.mend()
        deadline = time.monotonic() + self.peace_sec
        while self.unfinished() and time.monotonic() < deadline:
            for job in self.hit.spool.jobs(State.HELD):
                self.hit.honectl("release", str(job.id))
            self.cluster.mend()
            time.sleep(1)
        return list(self.violations())

    def violations(self) -> list[str]:
        jobs, found = list(self.hit.spool.all_jobs().values()), []
        by_name = collections.Counter(job.name for job in jobs)
        for name, states in self.dropped.items():
            if by_name[name] != 1:
                found.append(f"{name}: {by_name[name]} jobs")
            for job in jobs:
                # A time limit may end a job that was cancelled, and one that was asked to stop may finish first.
                if job.name == name and job.state not in states | ({State.SUCCEEDED} & states):
                    found.append(f"{name}: {job.state}, {job.outcome}, {job.error}")
        for job in jobs:
            files = self.hit.layout.job(job.id)
            if (twice := files.dir / "twice.txt").exists():
                found.append(f"{job.name}: {twice.read_text()}")
            path = files.dir / "rank-0.txt"
            begun = [json.loads(line)["HONED_FENCE"] for line in path.read_text().splitlines()] if path.exists() else []
            found += [f"{job.name}: {start} began {times} times" for start, times in _repeated(begun)]
        found += [f"rejected: {name}: {why}" for name, why in self.hit.rejected().items()]
        return found

    def end(self) -> None:
        self.hit.end()
        self.cluster.down()

    def table(self, violations: list[str], seconds: float) -> str:
        jobs = list(self.hit.spool.all_jobs().values())
        states = collections.Counter(job.state.value for job in jobs)
        rows = {
            "faults": self.made.total(),
            **dict(sorted(self.made.items())),
            "jobs": f"{len(jobs)} ({', '.join(f'{count} {name}' for name, count in sorted(states.items()))})",
            "of them on two nodes": sum(job.num_nodes > 1 for job in jobs),
            "attempts": sum(len(job.attempts) for job in jobs),
            "minutes": f"{seconds / 60:.1f}",
            "promises broken": len(violations),
        }
        return "\n".join(
            ["| Torture on Slurm | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
        )


def _repeated(values: list[str]) -> list[tuple[str, int]]:
    return [(value, times) for value, times in collections.Counter(values).items() if times > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="make faults for no longer than this")
    parser.add_argument("--short", action="store_true", help="short jobs, and no faults that Slurm notices late")
    parser.add_argument("--keep", type=Path, help="a new directory for it all, kept for a look")
    options = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left running
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="honed-torture-")))
        directory.mkdir(exist_ok=True)
        torture = Torture(
            directory,
            seed=options.seed,
            num_faults=options.faults,
            minutes=options.minutes,
            is_short=options.short,
        )
        stack.callback(torture.end)
        violations = torture.run()
        print(torture.table(violations, time.monotonic() - began))
        for words in violations:
            print(f"BROKEN: {words}")
        if violations:
            print("\n".join(torture.hit.log_path.read_text(errors="replace").splitlines()[-40:]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
