"""Random jobs with real training, while every process is killed at random: see scripts/torture.

Two instances run beside each other. In the quiet one each kind of job trains once, undisturbed. In the other, the
daemon, the shims and the workers, staged ones among them, are killed, at random moments and at chosen ones
(during a checkpoint, during the export, after the result), the daemon's system calls fail, and users drop, cancel, hold
and release jobs. After the last kill it runs undisturbed until it is idle; then each dropped file must be exactly one
job or one rejection, and each job that succeeded must have the same losses, predictions and weights as in the quiet
one.

With `--ranks` each job trains on that many GPUs (which only NVML's place-holder knows: tests/gpus.py) with one rank for
each on the CPU, and single ranks are killed, asked to stop and frozen, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gpus
from honed.daemon.running import next_number
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.system.client import Client
from honed.system.error import HonedError
from honed.system.layout import Layout

CONFIG = """
[spool]
settle_sec = 0.3
rescan_interval_sec = 1
[jobs]
poll_interval_sec = 0.1
retry_delay_sec = 0
stage_min_available_bytes = 0
"""
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}
TRAINING = {
    "max_steps": 8,
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 5e-3,
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "gradient_checkpointing": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA, "training": {"gradient_accumulation_steps": 2}},
    "full": {"dtype": "float32"},
    "4bit": {"lora": LORA, "quantization": "4bit"},
}
#: Targets of the kills, in percent: mostly daemons, which restart quickly.
TARGETS = {"daemon": 65, "worker": 15, "shim": 10, "staged worker": 6, "staged shim": 4}
#: The same for jobs of several ranks, of each rank: killed, asked to stop, frozen.
RANK_TARGETS = {"daemon": 30, "shim": 16, "rank": 12, "stop of rank": 8, "freeze of rank": 7}
SIGNALS = {"stop of rank": signal.SIGTERM, "freeze of rank": signal.SIGSTOP}
#: Seconds without a sign of life after which a frozen rank is ended.
RANK_STALL = "stall_timeout_sec = 60\nmin_stall_timeout_sec = 5\n"
#: The same for a short run.
FEW_TARGETS = {"daemon": 60, "worker": 15, "shim": 10, "staged worker": 15}
MANY_KILLS = 200
#: Moments of an attempt at which a process is killed; `any` is a random one.
PHASES = ("any", "started", "step", "checkpoint", "export", "result")
CALLS = ("rename", "fsync", "fdatasync", "openat", "write", "pwrite64", "mkdir", "unlink", "ftruncate")
ERRORS = ("ENOSPC", "EIO", "EACCES", "EROFS")
#: Percentage of the daemon's starts with failing system calls.
ERROR_SHARE = 20
#: Maximum number of jobs waiting to be trained while kills remain.
MAX_BACKLOG = 2
#: Seconds within which a killed process must be gone.
DEATH_SEC = 60.0
#: Seconds within which the undisturbed rest must finish.
PEACE_SEC = 1800.0


@dataclass
class Dropped:
    """A file in incoming/, and the expected result."""

    name: str
    is_good: bool
    kind: str | None = None  #: of a training job: the kind whose result it must equal
    is_cancelled: bool = False  #: a cancel request was answered
    depends_on: str | None = None


@dataclass
class Tally:
    """Counters of the actions."""

    kills: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    verbs: collections.Counter[str] = field(default_factory=collections.Counter)
    num_starts: int = 0
    num_faulty_starts: int = 0
    num_errors: int = 0

    @property
    def num_kills(self) -> int:
        return self.kills.total()


class Instance:
    """One honed and its directory."""

    def __init__(self, root: Path, *, ranks: int) -> None:
        self.root = root
        self.layout = Layout(root)
        self.layout.config_path.parent.mkdir(parents=True)
        self.layout.config_path.write_text(CONFIG + (RANK_STALL if ranks > 1 else ""))
        self.environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.environment |= gpus.variables(root / "nvml", ranks) if ranks > 1 else {}
        self.incoming_dir = self.layout.spool_dir / "incoming"
        self.incoming_dir.mkdir(parents=True)
        self.client = Client(self.layout.control_path)
        self.process: subprocess.Popen[bytes] | None = None
        self.spool = Spool(self.layout, lock=False)
        self.log_path = root / "honed.log"

    def start(self, *arguments: str, before: tuple[str, ...] = ()) -> None:
        command = [*before, sys.executable, "-m", "honed.daemon.loop", "--root", str(self.root), *arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def daemon_pid(self) -> int | None:
        """Return the daemon's own pid, not that of strace in front of it."""
        if self.process is None or self.process.poll() is not None:
            return None
        # strace's first children test what it can do; the daemon's process is also named strace at first.
        is_traced = b"strace" in Path(f"/proc/{self.process.pid}/cmdline").read_bytes().split(b"\0")[0]
        for number in self._children(self.process.pid) if is_traced else [self.process.pid]:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
                if b"honed.daemon.loop" in words and words[0] != b"strace":
                    return number
        return None

    @staticmethod
    def _children(pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def drop(self, name: str, text: str) -> None:
        temporary = self.incoming_dir / f".{name}.tmp"
        temporary.write_text(text)
        temporary.rename(self.incoming_dir / name)

    def jobs(self) -> dict[int, Job]:
        return self.spool.all_jobs()

    def running(self) -> Job | None:
        return next(iter(self.spool.jobs(State.RUNNING)), None)

    def staged(self) -> Job | None:
        return next((job for job in self.spool.jobs(State.QUEUED) if job.staged_at is not None), None)

    def record(self, job: Job) -> dict[str, Any]:
        """Return the pids of a job's shim and worker, running or staged; empty if they are gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = next_number(job) if job.staged_at is not None else job.attempt.number
            attempt = self.layout.job(job.id).attempt(number)
            found = json.loads((attempt.dir / "lock").read_text())
            if str(self.root) in Path(f"/proc/{found['shim_pid']}/cmdline").read_text():
                return dict(found)
        return {}

    def strays(self) -> list[str]:
        """Return the processes that still belong to this instance."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and int(path.name) != os.getpid():
                    words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if str(self.root) in words:
                        found.append(f"{path.name}: {words}")
        return found


class Torture:
    """One run."""

    def __init__(
        self, directory: Path, *, seed: int, num_kills: int, minutes: float, kinds: list[str], ranks: int = 1
    ) -> None:
        """`kinds`: of jobs, each with the number that its seed goes by."""
        from zoo.model import build_checkpoint, write_facts

        self.random = random.Random(seed)
        self.num_kills = num_kills
        self.deadline = time.monotonic() + 60 * minutes
        self.tally = Tally()
        self.dropped: list[Dropped] = []
        self.model = build_checkpoint(directory / "model", "llama")
        self.data = write_facts(directory / "facts.jsonl", 12)
        self.ranks = ranks
        self.quiet = Instance(directory / "quiet", ranks=ranks)
        self.hit = Instance(directory / "hit", ranks=ranks)
        self.kinds = kinds
        shares = TARGETS if num_kills >= MANY_KILLS else FEW_TARGETS
        if ranks > 1:
            of_each = {name: share for name, share in RANK_TARGETS.items() if "rank" in name}
            shares = {name: share for name, share in RANK_TARGETS.items() if name not in of_each}
            shares |= {f"{name} {rank}": share for name, share in of_each.items() for rank in range(ranks)}
        self.shares = shares
        # A fixed number of each; a target of which none is running is kept for later.
        self.targets = [name for name, share in shares.items() for _ in range(-(-num_kills * share // 100))]
        self.random.shuffle(self.targets)
        self.unfinished_file: tuple[float, Any, str] | None = None
        self.trace_path = directory / "errors"
        self.has_strace = shutil.which("strace") is not None

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def spec(self, kind: str, **keys: Any) -> dict[str, Any]:
        name, _, number = kind.rpartition("-")
        settings = dict(KINDS[name])
        training = TRAINING | settings.pop("training", {}) | {"seed": 40 + int(number)}
        return {
            "base_model": str(self.model),
            "datasets": [{"path": str(self.data)}],
            "eval_split": 0.25,
            "training": training,
            "predictions": {"num_samples": 2, "max_new_tokens": 4},
            "backend": "transformers",
            "retry": {"max_attempts": 100},
            "resources": {"gpus": self.ranks},
            **settings,
            **keys,
        }

    def drop_something(self) -> None:
        """Drop a job file, sometimes one that trains, or an invalid file."""
        number = len(self.dropped) + 1
        waiting = [job for job in self.hit.jobs().values() if job.state in {State.QUEUED, State.RUNNING}]
        trained = [each for each in self.dropped if each.kind is not None]
        if len(trained) < len(self.kinds) or (len(waiting) < MAX_BACKLOG and self.random.random() < 0.5):
            kind = self.kinds[len(trained) % len(self.kinds)]
            before = trained[-1].name.split(".")[0] if trained and self.random.random() < 0.3 else None
            keys: dict[str, Any] = {"depends_on": [before]} if before else {}
            name = f"train{number}.json"
            self.dropped.append(Dropped(name, is_good=True, kind=kind, depends_on=before))
            text = json.dumps(self.spec(kind, name=f"train{number}", priority=self.random.randint(-2, 2), **keys))
            if self.unfinished_file is None and self.random.random() < 0.3:
                self.begin_file(name, text)
            else:
                self.hit.drop(name, text)
            return
        what = self.random.choice(["held", "held", "held", "unknown_key", "half", "nothing", "lost_model"])
        text, suffix = json.dumps(self.spec(self.kinds[0], priority=number % 3)), ""
        match what:
            case "held":
                suffix = ".hold"
            case "unknown_key":
                text = text.replace('"datasets"', '"datasets_of_mine"')
            case "half":
                text = text[: len(text) // 2]
            case "nothing":
                text = ""
            case "lost_model":
                text = text.replace(str(self.model), "/nowhere/at/all")
        name = f"{what}{number}{suffix}.json"
        self.dropped.append(Dropped(name, is_good=what == "held"))
        self.hit.drop(name, text)

    def begin_file(self, name: str, text: str) -> None:
        """Write half of a file under its own name; the rest follows later."""
        file = (self.hit.incoming_dir / name).open("w")
        file.write(text[: len(text) // 2])
        file.flush()
        self.unfinished_file = (time.monotonic() + self.random.uniform(0.2, 2.0), file, text[len(text) // 2 :])

    def end_file(self, *, now: bool = False) -> None:
        if self.unfinished_file is not None and (now or time.monotonic() >= self.unfinished_file[0]):
            _, file, rest = self.unfinished_file
            file.write(rest)
            file.close()
            self.unfinished_file = None

    def ask_something(self) -> None:
        """Release, cancel or hold a random job, as users would. Jobs still held at the end are cancelled."""
        jobs = list(self.hit.jobs().values())
        held = [job for job in jobs if job.state is State.HELD]
        trained = [job for job in jobs if job.state in {State.QUEUED, State.RUNNING}]
        choice = self.random.random()
        if choice < 0.5 and held:
            job = self.random.choice(held)
            self.ask("release" if job.name.startswith("train") else "cancel", job)
        elif choice < 0.6 and trained:
            self.ask("hold", self.random.choice(trained))

    def ask(self, verb: str, job: Job) -> None:
        with contextlib.suppress(HonedError):  # honed was killed meanwhile, or the job has another state by now
            self.hit.client.ask(verb, id=str(job.id))
            self.tally.verbs[verb] += 1
            if verb == "cancel":
                next(each for each in self.dropped if each.name == job.source).is_cancelled = True

    # -- kills --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon, sometimes with failing system calls."""
        self.tally.num_starts += 1
        if not self.has_strace or self.random.random() * 100 >= ERROR_SHARE:
            self.hit.start()
            return
        call, error = self.random.choice(CALLS), self.random.choice(ERRORS)
        # Python's own start makes hundreds of these calls before honed runs; few of the others.
        first = self.random.randint(*{"openat": (330, 700), "write": (1, 20), "pwrite64": (1, 60)}.get(call, (1, 12)))
        last = first + self.random.choice([0, 0, 3, 20])
        self.count_errors()
        self.tally.num_faulty_starts += 1
        self.hit.start(
            before=(
                "strace",
                "-qq",
                "-o",
                str(self.trace_path),
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:error={error}:when={first}..{last}",
            )
        )

    def count_errors(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.tally.num_errors += self.trace_path.read_text(errors="replace").count("(INJECTED)")
            self.trace_path.unlink()

    def phase_is_there(self, phase: str, job: Job) -> bool:
        attempt = self.hit.layout.job(job.id).attempt(job.attempt.number)
        match phase:
            case "started":
                return attempt.events_path.exists()
            case "step":
                with contextlib.suppress(OSError):
                    return b'"event": "step"' in attempt.events_path.read_bytes()
                return False
            case "checkpoint":
                return (self.hit.layout.job(job.id).checkpoints_dir / ".new").exists()
            case "export":
                return (self.hit.layout.job(job.id).dir / ".output.tmp").exists()
            case "result":
                return attempt.result_path.exists()
            case _:
                return True

    def kill(self) -> None:
        """Kill one target at the chosen moment, or a little later if that moment does not come."""
        target = self.targets[0]
        is_of_job = (
            target in {"worker", "shim"} or "rank" in target or (target == "daemon" and self.random.random() < 0.1)
        )
        phase = self.random.choice(PHASES) if is_of_job else "any"
        patience = self.random.choice([0.1, 0.5, 1.0, 2.0]) * self.random.random() if phase == "any" else 20.0
        deadline = time.monotonic() + patience
        is_there = False
        while time.monotonic() < deadline and not is_there:
            self.end_file()
            time.sleep(0.01 if phase == "any" else 0.002)
            if phase != "any":
                if not self.hit.is_up:
                    self.start()
                with contextlib.suppress(OSError):
                    is_there = (job := self.hit.running()) is not None and self.phase_is_there(phase, job)
        if not is_there:
            phase = "any"
        pid = self.pid_of(target)
        if pid is None:
            self.targets.append(self.targets.pop(0))
            return
        with contextlib.suppress(ProcessLookupError):  # it ended by itself: kill another of its kind later
            os.kill(pid, SIGNALS.get(target.rstrip(" 0123456789"), signal.SIGKILL))
            self.tally.kills[target, phase] += 1
            self.targets.pop(0)
        if target == "daemon" and self.hit.process is not None:
            self.hit.process.wait(DEATH_SEC)

    def pid_of(self, target: str) -> int | None:
        if target == "daemon":
            return self.hit.daemon_pid()
        job = self.hit.staged() if target.startswith("staged") else self.hit.running()
        if "rank" in target:
            pids = self.hit.record(job).get("worker_pids") if job is not None else None
            return int(pids[int(target.rpartition(" ")[2])]) if pids else None
        pid = self.hit.record(job).get(f"{target.rpartition(' ')[2]}_pid") if job is not None else None
        return pid if isinstance(pid, int) else None

    def run(self) -> list[str]:
        """Run everything; return the violated guarantees."""
        for kind in self.kinds:
            self.quiet.drop(f"{kind}.json", json.dumps(self.spec(kind, name=kind)))
        self.quiet.start("--drain")
        told_at = 0.0
        while self.tally.num_kills < self.num_kills and time.monotonic() < self.deadline:
            if not self.hit.is_up:
                self.start()
            if self.random.random() < 0.6 or len(self.dropped) < len(self.kinds):
                self.drop_something()
            if self.random.random() < 0.5:
                self.ask_something()
            self.kill()
            if time.monotonic() - told_at > 60:
                told_at = time.monotonic()
                states = collections.Counter(job.state.value for job in self.hit.jobs().values())
                print(f"{self.tally.num_kills} kills, {len(self.dropped)} files, {dict(states)}", flush=True)
        return self.make_peace()

    def make_peace(self) -> list[str]:
        """Let the instance finish undisturbed, then check all of it."""
        self.end_file(now=True)
        if (pid := self.hit.daemon_pid()) is not None:
            os.kill(pid, signal.SIGKILL)
        assert self.hit.process is not None
        self.hit.process.wait()
        self.count_errors()
        self.hit.start()
        deadline = time.monotonic() + PEACE_SEC
        while held := [job for job in self.hit.jobs().values() if job.state is State.HELD or self.is_unsettled()]:
            for job in [job for job in held if job.state is State.HELD]:
                self.ask("release" if job.name.startswith("train") else "cancel", job)
            if time.monotonic() > deadline:
                return [f"not settled: {[job.source for job in held]}"]
            time.sleep(0.2)
        assert self.hit.process is not None
        while not (is_over := self.is_over()) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.hit.process.send_signal(signal.SIGTERM)
        found = [] if is_over else ["it does not come to its end"]
        if (status := self.hit.process.wait(60)) != 0:
            found.append(f"honed ends with {status}")
        assert self.quiet.process is not None
        if self.quiet.process.wait(PEACE_SEC) != 0:
            found.append("the quiet instance did not end well")
        return found + self.violations()

    def is_unsettled(self) -> bool:
        """Tell whether a dropped file is neither a job nor rejected yet."""
        rejected = {path.name.removesuffix(".reason") for path in self.hit.spool.rejected_dir.glob("*.reason")}
        known = {job.source for job in self.hit.jobs().values()} | rejected
        return any(each.name not in known for each in self.dropped)

    def is_over(self) -> bool:
        jobs = self.hit.jobs().values()
        for job in [job for job in jobs if job.state is State.HELD]:  # depends on a job that was cancelled
            self.ask("release", job)
        return all(job.state.is_final for job in jobs)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        spool = self.hit.spool
        jobs = list(self.hit.jobs().values())
        found = [f"a process is left: {words}" for words in self.hit.strays()]
        places = collections.Counter(path.stem for state in State for path in spool.state_dir(state).iterdir())
        found += [f"job {number} lies in {count} places" for number, count in places.items() if count > 1]
        found += [
            f"left in the spool: {path}"
            for place in (spool.incoming_dir, spool.claimed_dir)
            for path in place.iterdir()
        ]
        found += [f"hidden: {path}" for path in spool.dir.rglob(".*")]
        refused = [path.name.removesuffix(".reason") for path in spool.rejected_dir.glob("*.reason")]
        fates = collections.Counter([job.source for job in jobs] + refused)
        for each in self.dropped:
            if fates[each.name] != 1:
                found.append(f"{each.name}: {fates[each.name]} jobs and refusals")
            if (each.name in refused) == each.is_good:
                found.append(f"{each.name}: {'refused' if each.is_good else 'accepted'}")
        by_source = {job.source: job for job in jobs}
        for each in self.dropped:
            if each.is_good and (job := by_source.get(each.name)) is not None:
                found += [f"job {job.id} ({job.name}): {words}" for words in self.faults_of(each, job, by_source)]
        return found + self.database_faults()

    def faults_of(self, each: Dropped, job: Job, by_source: dict[str, Job]) -> Iterator[str]:
        if each.kind is None or each.is_cancelled:
            if job.state is not State.CANCELLED:
                yield f"was cancelled, and is {job.state}"
            return
        if job.state is not State.SUCCEEDED:
            yield f"is {job.state}: {job.error}"
            return
        outcomes = [attempt.outcome for attempt in job.attempts]
        if outcomes.count("succeeded") != 1 or outcomes[-1] != "succeeded":
            yield f"its attempts ended {outcomes}"
        quiet = next(other for other in self.quiet.jobs().values() if other.name == each.kind)
        for what, ours, theirs in zip(
            ("losses", "predictions", "weights"),
            self.product(self.hit, job),
            self.product(self.quiet, quiet),
            strict=True,
        ):
            if ours != theirs:
                yield f"{what} of {each.kind} are not the undisturbed run's: {ours} and not {theirs}"
        directory = self.hit.layout.job(job.id).dir
        for path in directory.glob(".output*"):
            yield f"left beside its output: {path.name}"
        if each.depends_on is not None:
            before = by_source[f"{each.depends_on}.json"]
            if (before.attempt.ended_at or 0) > job.attempts[0].started_at:
                yield f"it started before {before.name} had ended"

    def product(self, instance: Instance, job: Job) -> tuple[Any, Any, str]:
        """Return every reported loss by step, the predictions, and a hash of the weights."""
        db = sqlite3.connect(f"file:{instance.layout.database_path}?mode=ro", uri=True)
        figures = "SELECT step, name, value FROM metrics WHERE job_id = ? AND name IN ('loss', 'eval_loss')"
        losses = sorted(set(db.execute(figures, (job.id,))))
        texts = "SELECT step, sample_index, prediction FROM training_predictions WHERE job_id = ?"
        predictions = sorted(db.execute(texts, (job.id,)))
        db.close()
        weights = [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(job.output_dir).glob("*.safetensors"))
        ]
        return losses, predictions, str(weights)

    def database_faults(self) -> list[str]:
        """Describe the differences between honed.db and a rebuilt one."""
        from crash.scene import dump
        from honed.daemon.rebuild import rebuild
        from honed.job.database import Database

        copy = self.hit.root / "again.db"
        again = Database(copy)
        rebuild(again, self.hit.spool, self.hit.layout)
        again.close()
        ours, theirs = dump(self.hit.layout.database_path), dump(copy)
        return [
            f"honed.db: {table}: {sorted(ours[table] ^ theirs[table], key=str)[:6]}"
            for table in theirs
            if ours[table] != theirs[table]
        ]

    def end(self) -> None:
        """Kill all remaining processes."""
        for instance in (self.quiet, self.hit):
            for job in filter(None, (instance.running(), instance.staged())):
                record = instance.record(job)
                for pid in [*record.values(), *record.get("worker_pids", [])]:
                    if isinstance(pid, int) and pid > 2:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            if instance.process is not None and instance.process.poll() is None:
                if (pid := instance.daemon_pid()) is not None:
                    os.kill(pid, signal.SIGKILL)
                instance.process.wait()

    def table(self, violations: list[str], seconds: float) -> str:
        tally, jobs = self.tally, list(self.hit.jobs().values())
        states = collections.Counter(job.state.value for job in jobs)
        num_refused = len(list(self.hit.spool.rejected_dir.glob("*.reason")))
        rows: dict[str, Any] = {
            "files dropped": len(self.dropped),
            "jobs": f"{len(jobs)} ({_words(states)})",
            "refusals": num_refused,
            "kill -9" if self.ranks == 1 else "killed, asked to stop or frozen": tally.num_kills,
        }
        for target in self.shares:
            phases = {phase: count for (name, phase), count in sorted(tally.kills.items()) if name == target}
            rows[f"of the {target}" if target in TARGETS else target] = f"{sum(phases.values())} ({_words(phases)})"
        rows |= {
            "starts of the daemon": tally.num_starts,
            "with failing system calls": f"{tally.num_faulty_starts} ({tally.num_errors} calls failed)",
            "asked meanwhile": _words(tally.verbs),
            "attempts": sum(len(job.attempts) for job in jobs),
            "of them staged before": sum(each.staged_at is not None for job in jobs for each in job.attempts),
            "workers staged": sum(job.num_staged for job in jobs),
            "minutes": f"{seconds / 60:.1f}",
            "promises broken": len(violations),
        }
        return "\n".join(["| Torture | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="kill for no longer than this")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="of jobs; by default all")
    parser.add_argument("--seeds", type=int, default=1, help="how many jobs of each kind differ by their own seed")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each job, each on a GPU of its own")
    parser.add_argument("--keep", type=Path, help="a new directory for it all, kept for a look")
    options = parser.parse_args()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="honed-torture-")))
        directory.mkdir(exist_ok=True)
        kinds = [f"{kind}-{number}" for number in range(options.seeds) for kind in options.kinds]
        torture = Torture(
            directory,
            seed=options.seed,
            num_kills=options.kills,
            minutes=options.minutes,
            kinds=kinds,
            ranks=options.ranks,
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
