"""Benchmark of many jobs: the cost of a queue of 100, 1,000 and 10,000 jobs, and whether drops slow down a training
job.

    scripts/bench load [--sizes 100,1000,10000] [--minutes 10] [--dir DIR]
    scripts/bench load --booted N      as root: N drops of a user's compared with N of root's, in a booted systemd
    scripts/bench load --beside N      as root: one file of a user's beside N of another's, in a booted systemd
    scripts/bench load --ended N       the start with N ended jobs: CPU seconds until READY=1, and memory

It prints rows for docs/benchmarks.md. `--minutes 0` skips the training, `--sizes ""` the queue. The instance is created
in DIR: syncing the disk takes most of the time to accept a job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import demonstration

from honed.job.job import Attempt, Job, State
from honed.system.client import Client
from honed.system.layout import Layout

IDLE_SEC = 20.0
DROPS_PER_MINUTE = 1000
#: Seconds with drops, and without drops before them: these pairs are compared.
WINDOW_SEC = 30.0
DROPS_PER_WINDOW = round(DROPS_PER_MINUTE * WINDOW_SEC / 60)
JOB = """\
name: {name}
base_model: {dir}/model
dtype: float32
lora: {{r: 16, lora_alpha: 32}}
datasets: [{{path: {dir}/train.jsonl}}]
predictions: {{sample_frequency: off}}
training:
  max_steps: {steps}
  per_device_train_batch_size: 8
  learning_rate: 1.0e-5
  gradient_checkpointing: false
  save_steps: 100000
"""


class Honed:
    """A daemon in its own directory, started and stopped as systemd does it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = Layout(root)
        self.incoming = self.layout.spool_dir / "incoming"
        self.queued = self.layout.spool_dir / "queued"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start the daemon. Returns the seconds until READY=1."""
        with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(f"{name}/notify")
            environment = {**os.environ, "NOTIFY_SOCKET": f"{name}/notify", "HF_HUB_OFFLINE": "1"}
            with (self.root / "honed.log").open("ab") as log:
                began = time.perf_counter()
                command = [sys.executable, "-m", "honed.daemon.loop", "--root", str(self.root)]
                self.process = subprocess.Popen(command, stderr=log, env=environment)
                while b"READY=1" not in listener.recv(65536):
                    pass
                return time.perf_counter() - began

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait()

    def drop(self, name: str, *, steps: int = 20) -> None:
        temporary = self.incoming / f".{name}.tmp"
        temporary.write_text(JOB.format(name=name, dir=self.root, steps=steps))
        temporary.rename(self.incoming / f"{name}.yaml")

    def num_on_their_way(self) -> int:
        return sum(len(list((self.layout.spool_dir / place).iterdir())) for place in ("incoming", "claimed"))

    def wait_for_arrivals(self) -> None:
        while self.num_on_their_way():
            time.sleep(0.1)
        if refused := list((self.layout.spool_dir / "rejected").glob("*.reason")):
            raise SystemExit(refused[0].read_text())

    def cpu_sec(self) -> float:
        """Return the CPU seconds of the daemon itself."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def time_honectl(self, *arguments: str) -> float:
        command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(self.root), *arguments]
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began


@contextmanager
def instance(directory: Path | None) -> Iterator[Honed]:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="honed-load-", dir=directory))
    try:
        demonstration.build(root)
        made = Honed(root)
        made.incoming.mkdir(parents=True)
        yield made
        if made.process is not None and made.process.poll() is None:
            made.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


# -- ended jobs -------------------------------------------------------------------------------------------------------


def ended_job(number: int, root: Path) -> Job:
    """Return an ended job of one of 20 users: every second one has had two attempts, every tenth starts from another
    job's output, and every third is of a sweep and is told of."""
    began = time.time() - 86400.0 * 30 + number
    state = (State.SUCCEEDED, State.SUCCEEDED, State.SUCCEEDED, State.FAILED, State.CANCELLED)[number % 5]
    attempts = tuple(
        Attempt(
            each,
            "transformers",
            began + each,
            ended_at=began + each + 0.5,
            outcome="killed" if each < 1 + number % 2 else state.value,
            step=100,
            device=f"GPU-{number % 8:08x}-0000-0000-0000-000000000000",
            started_monotonic=1000.0 + number,
            boot_id="00000000-0000-0000-0000-000000000000",
            took_sec=0.5,
            checkpoint_bytes=2**20,
            output_bytes=2**20,
        )
        for each in range(1, 2 + number % 2)
    )
    job = Job(
        number,
        f"experiment-{number % 700}",
        began,
        f"experiment-{number}.yaml",
        2000 + number % 20,
        str(root / f"outputs/{number}"),
        revision=5,
        attempts=attempts,
        outcome=state.value,
        model=str(root / "model"),
        data=(str(root / "train.jsonl"),),
        arrived_at=began,
        ends=(state.value,),
        state=state,
    )
    if number % 10 == 0:
        before = f"experiment-{(number - 1) % 700}"
        job = replace(job, depends_on=(before,), inputs={before: number - 1})
    if number % 3 == 0:
        values = {"training.learning_rate": 1e-4, "lora.r": 16}
        group = {
            "id": max(1, number // 30 * 30),
            "name": "sweep",
            "file": "sweep.yaml",
            "values": values,
            "halving": None,
        }
        job = replace(job, group=group, notify={"mail": "a@example.org", "states": ["failed"]})  # type: ignore[arg-type]
    return job


def measure_ended(honed: Honed, num_jobs: int) -> None:
    """Print what the start takes beside many ended jobs: with a database that is made, one that is there, twice."""
    for number in range(1, num_jobs + 1):
        job = ended_job(number, honed.root)
        path = honed.layout.spool_dir / job.state.value / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(job.to_json())
        for attempt in job.attempts:
            events = honed.layout.job(number).attempt(attempt.number).events_path
            events.parent.mkdir(parents=True)
            events.write_text('{"event": "started", "time": 1, "pid": 1, "versions": {}, "backend": "transformers"}\n')
    print(
        f"| start with {num_jobs:,} ended jobs | s until READY=1 | CPU s | MiB | MiB when idle |\n|---|---|---|---|---|"
    )
    for what in ("its database is made", "again", "again"):
        took = honed.start()
        cpu, resident = honed.cpu_sec(), honed.resident_mib()
        wait_until_quiet(honed)
        print(f"| {what} | {took:.1f} | {cpu:.2f} | {resident:.0f} | {honed.resident_mib():.0f} |", flush=True)
        honed.stop()


# -- the queue --------------------------------------------------------------------------------------------------------


def measure_queue(honed: Honed, sizes: list[int]) -> None:
    """Fill a paused queue and measure at each size; a tenth of the jobs is cancelled, so that some are finished."""
    (honed.layout.spool_dir / "paused").touch()
    honed.start()
    print(
        "| jobs | accepted each ms | meanwhile `status` answers ms (worst) | resident MiB | idle, of a core"
        " | `list` s | `list --json` s | restart to READY s |\n|---|---|---|---|---|---|---|---|"
    )
    num_jobs = 0
    for size in sizes:
        began = time.perf_counter()
        for number in range(num_jobs, size):
            honed.drop(f"job-{number}")
        answers = []
        while honed.num_on_their_way():
            answers.append(time_status(honed))
            time.sleep(0.2)
        honed.wait_for_arrivals()
        accepted = (time.perf_counter() - began) / (size - num_jobs)
        client = Client(honed.layout.control_path)
        for number in range(num_jobs, size, 10):
            client.ask("cancel", id=f"job-{number}")
        num_jobs = size
        wait_until_quiet(honed)
        before = honed.cpu_sec()
        time.sleep(IDLE_SEC)
        idle = (honed.cpu_sec() - before) / IDLE_SEC
        resident = honed.resident_mib()
        short, whole = ([honed.time_honectl("list", *more) for _ in range(5)] for more in ([], ["--json"]))
        ready = []
        for _ in range(3):
            honed.stop()
            ready.append(honed.start())
        median = statistics.median
        print(
            f"| {size:,} | {accepted * 1000:.1f} | {median(answers) * 1000:.0f} ({max(answers) * 1000:.0f})"
            f" | {resident:.1f} | {idle:.2%} | {median(short):.2f} | {median(whole):.2f} | {median(ready):.2f} |",
            flush=True,
        )


def time_status(honed: Honed) -> float:
    began = time.perf_counter()
    Client(honed.layout.control_path).ask("status")
    return time.perf_counter() - began


def wait_until_quiet(honed: Honed) -> None:
    """Wait until the jobs' pages are written."""
    assert honed.process is not None
    children = Path(f"/proc/{honed.process.pid}/task/{honed.process.pid}/children")
    while True:
        if not any("honed.page.report" in command_of(pid) for pid in children.read_text().split()):
            before = honed.cpu_sec()
            time.sleep(3)
            if honed.cpu_sec() - before < 0.1:
                return
        time.sleep(1)


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


# -- beside training --------------------------------------------------------------------------------------------------


def measure_training(honed: Honed, minutes: float) -> None:
    """Measure the step times of one job, alternately with drops and without."""
    honed.start()
    honed.drop("training", steps=10_000_000)
    honed.wait_for_arrivals()
    (entry,) = honed.queued.parent.glob("*/1.json")
    events = honed.layout.job(int(entry.stem)).attempt(1).events_path
    while not steps_of(events, 0.0):
        time.sleep(0.5)
    time.sleep(10)
    ratios: list[float] = []
    quiet_steps: list[float] = []
    cpu = 0.0
    for _ in range(max(1, round(minutes * 60 / WINDOW_SEC))):
        began = time.time()
        time.sleep(WINDOW_SEC)
        quiet = steps_of(events, began)
        began, cpu_before = time.time(), honed.cpu_sec()
        for index in range(DROPS_PER_WINDOW):
            time.sleep(max(0.0, began + index * 60 / DROPS_PER_MINUTE - time.time()))
            honed.drop(f"beside-{len(ratios)}-{index}")
        with_drops = steps_of(events, began)
        cpu += honed.cpu_sec() - cpu_before
        ratios.append(statistics.median(with_drops) / statistics.median(quiet))
        left = honed.num_on_their_way()
        print(f"pair {len(ratios)}: {ratios[-1]:.3f}; {left} not accepted yet", file=sys.stderr, flush=True)
        honed.wait_for_arrivals()
        quiet_steps += quiet
    num_queued = len(list(honed.queued.iterdir()))
    Client(honed.layout.control_path).ask("cancel", id="training")
    step_ms, median = statistics.median(quiet_steps) * 1000, statistics.median(ratios)
    print(
        f"\nbeside training, {len(ratios)} pairs of {WINDOW_SEC:.0f} s: {num_queued:,} jobs dropped and accepted, "
        f"{DROPS_PER_MINUTE} a minute; a step takes {step_ms:.1f} ms without drops; with drops {median:.3f} times as "
        f"long ({min(ratios):.3f}-{max(ratios):.3f}, pair by pair); the daemon took "
        f"{cpu / len(ratios) / WINDOW_SEC:.1%} of a core"
    )


def steps_of(events: Path, since: float) -> list[float]:
    """Return the seconds between consecutive steps since `since`."""
    if not events.exists():
        return []
    times = []
    for line in events.read_bytes().splitlines():
        told = json.loads(line) if b'"step"' in line and line.endswith(b"}") else {}
        if told.get("event") == "step" and told["time"] >= since:
            times.append(told["time"])
    return [later - earlier for earlier, later in pairwise(times)]


# -- as whom they are checked ------------------------------------------------------------------------------------------

#: Drops files from inside the machine and waits until all are accepted; prints the seconds.
DROP_MANY = """
import json, os, sys, time
name, count, spec = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
incoming = "/var/spool/honed/incoming"
began = time.time()
for number in range(count):
    with open(f"{incoming}/.{name}-{number}", "w") as file:
        json.dump({**spec, "name": f"{name}-{number}"}, file)
    os.rename(f"{incoming}/.{name}-{number}", f"{incoming}/{name}-{number}.json")
print(time.time() - began)
"""


def measure_checks(num_files: int, *, num_rounds: int = 3) -> None:
    """Compare the times to check a user's files, by a unit with their permissions, and root's, by a child of honed."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/system")]
    from machine import CHECKOUT, ENVIRONMENT, Machine

    from waiting import wait_for
    from zoo import plain

    with Machine() as machine:
        machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
        machine.add_user("anna", "honed-submit")
        plain.write_base_model(machine.host_path("/srv/model"))
        plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
        machine.run("systemctl", "enable", "--now", "honed")
        machine.run("honectl", "pause")
        spec = json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl")))
        spool = machine.host_path("/var/spool/honed")
        took: dict[str, list[float]] = {"anna": [], "root": []}
        for number in range(num_rounds):
            for user, times in took.items():
                began, size = time.perf_counter(), num_files // num_rounds
                machine.run("python3", "-c", DROP_MANY, f"{user}-{number}", str(size), spec, user=user)
                wait_for(
                    lambda: not any(any((spool / place).iterdir()) for place in ("incoming", "claimed")),
                    what="arrivals",
                    deadline_sec=3600,
                )
                times.append((time.perf_counter() - began) / size)
        refused = list((spool / "rejected").glob("*.reason"))
        assert not refused, refused[0].read_text()
    for user, times in took.items():
        print(
            f"| {user} | {len(times) * (num_files // num_rounds):,} | "
            f"{1000 * statistics.median(times):.1f} ({1000 * min(times):.1f}-{1000 * max(times):.1f}) |"
        )
    ratios = [mine / roots for mine, roots in zip(*took.values(), strict=True)]
    print(f"a person's, of root's: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


# -- beside a flood ----------------------------------------------------------------------------------------------------

NUM_SLOW = 50


def measure_beside(num_files: int) -> None:
    """Compare, beside a flood, the seconds from the drop to the acceptance of another user's only file and of the
    flooding user's own next one: that is what everybody would wait in order of arrival."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/system")]
    from machine import CHECKOUT, ENVIRONMENT, Machine
    from slowdata import LEASE_SEC, slow_data

    from waiting import wait_for
    from zoo import plain

    with Machine() as machine:
        machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
        for user in ("anna", "berta", "carl", "dora"):
            machine.add_user(user, "honed-submit")
        plain.write_base_model(machine.host_path("/srv/model"))
        plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
        machine.write(
            "/etc/honed/honed.toml", f"[spool]\npreflight_timeout_sec = {LEASE_SEC - 5}\n"
        )  # carl's are refused
        machine.run("systemctl", "enable", "--now", "honed")
        machine.run("honectl", "pause")
        spool = machine.host_path("/var/spool/honed")

        def drop(user: str, name: str, count: int, path: str = "/srv/rows.jsonl") -> None:
            spec = json.dumps(plain.spec(Path("/srv/model"), Path(path)))
            machine.run("python3", "-c", DROP_MANY, name, str(count), spec, user=user)

        def num_queued() -> int:
            return len(list((spool / "queued").glob("*.json")))

        def tell(user: str) -> None:
            """Print how long a user's only file has waited as soon as it is queued: the flood takes minutes."""
            uid = int(machine.run("id", "-u", user))

            def found() -> dict[str, Any] | None:
                entries = (json.loads(path.read_bytes()) for path in (spool / "queued").glob("*.json"))
                return next((each for each in entries if each["uid"] == uid), None)

            job = wait_for(found, what=f"{user}'s file")
            assert job is not None
            waited = job["submitted_at"] - job["arrived_at"]
            print(f"{user}: {waited:.2f} s; {num_queued():,} queued, load {os.getloadavg()[0]:.1f}", flush=True)

        drop("anna", "flood", num_files)
        begun = [num_queued()]
        drop("berta", "berta", 1)
        drop("anna", "anna", 1)
        tell("berta")
        with slow_data(machine, "carl", "/srv/rows.jsonl", NUM_SLOW) as paths:
            for number, path in enumerate(paths):
                drop("carl", f"carl{number}", 1, path)
            carl = machine.run("id", "-u", "carl").strip()
            machine.wait_property(f"honed-check@{carl}.service", "ActiveState", "active")
            begun.append(num_queued())
            drop("dora", "dora", 1)
            drop("anna", "annas-next", 1)
            tell("dora")
            wait_for(lambda: num_queued() >= num_files + 4, what="arrivals", deadline_sec=3600)
        entries = [json.loads(path.read_bytes()) for path in (spool / "queued").glob("*.json")]
    took = {entry["name"]: entry["submitted_at"] - entry["arrived_at"] for entry in entries}
    beside = ("a flood", f"the same, and {NUM_SLOW} slow data sets of a third user")
    for what, num, pair in zip(beside, begun, (("berta-0", "anna-0"), ("dora-0", "annas-next-0")), strict=True):
        own, flooding = (took[name] for name in pair)
        left = num_files - num
        print(f"| {what} | {left:,} | {own:.2f} | {flooding:.1f} | {own / flooding:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--booted", type=int, metavar="N")
    parser.add_argument("--beside", type=int, metavar="N")
    parser.add_argument("--ended", type=int, metavar="N")
    options = parser.parse_args()
    if options.beside:
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        measure_beside(options.beside)
        return
    if options.ended:
        print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        with instance(options.dir) as honed:
            measure_ended(honed, options.ended)
        return
    if options.booted:
        measure_checks(options.booted)
        return
    sizes = [int(size) for size in options.sizes.split(",") if size]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if sizes:
        with instance(options.dir) as honed:
            measure_queue(honed, sizes)
    if options.minutes > 0:
        with instance(options.dir) as honed:
            measure_training(honed, options.minutes)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
