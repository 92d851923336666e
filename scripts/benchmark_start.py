"""Benchmark of starts: CPU seconds of a cold worker by kind of job, and of honectl's verbs with 100 jobs.

    scripts/bench start [--runs 5] [--only worker|honectl|profile]

It prints rows for docs/benchmarks.md, and ends with status 1 if a verb takes more than it may. A worker trains one
step, so nearly all of its time is its start. CPU seconds are those of the process and its children, user and system;
other processes of the machine change them less than its clock. How long a verb is silent is measured in a terminal:
until the first text that it prints. The profile is that of a LoRA job's imports, each package without those that it
imports (`python -X importtime`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import demonstration
import plan_document
from benchmark_load import Honed

NUM_JOBS = 100
#: Packages that the profile shows.
NUM_PACKAGES = 12
#: Kinds of jobs: keys of the spec that make them.
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": {}},
    "QLoRA, 4 bits": {"lora": {}, "quantization": "4bit"},
    "full fine-tuning": {},
    "LoRA, vision model": {"lora": {}, "base_model": "vision"},
    "LoRA with Unsloth": {"lora": {}, "backend": "unsloth"},
}
#: Verbs; `{n}` is another job for each run.
VERBS = (
    "--version",
    "--job-numbers",
    "list",
    "list --json",
    "list --sort=-elapsed --filter state=queued",
    "show {n}",
    "logs {n}",
    "diff {n} 50",
    "compare {n} 50 51",
    "hold {n}",
    "release {n}",
    "cancel {n}",
    "check job.yaml",
    "submit job.yaml",
    "doctor",
)
#: CPU seconds that a verb may take, by its first word.
MAX_CPU_SEC = {
    "--version": 0.1,
    **dict.fromkeys(("--job-numbers", "list", "show", "logs", "hold", "release", "cancel"), 0.3),
}
#: Verbs that read models or data, and the seconds for which they may be silent.
READING = (
    "check job.yaml",
    "plan job.yaml",
    "preview job.yaml",
    "submit job.yaml",
    "rerun 50 --hold",
    "init --model model --data train.jsonl -o made-{n}.yaml",
    "doctor",
)
MAX_SILENT_SEC = 0.5


def cpu_sec(command: Sequence[str], environment: dict[str, str], cwd: Path, *, may_fail: bool = False) -> float:
    """Run a program and return its CPU seconds and those of its children."""
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and not may_fail:
        raise SystemExit(f"{' '.join(command)}\n{told.decode()}")
    return usage.ru_utime + usage.ru_stime


def silent_sec(command: Sequence[str], environment: dict[str, str], cwd: Path) -> float:
    """Run a program in a terminal and return the CPU seconds that it takes until it says something."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    environment = {**environment, "TERM": "xterm"}
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.read(ours, 1)
    times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    found = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    with contextlib.suppress(OSError):  # it has ended
        while os.read(ours, 4096):
            pass
    process.wait()
    os.close(ours)
    return found


def job(root: Path, keys: dict[str, Any]) -> Path:
    """Create a job's directory with its plan, as the daemon does."""
    from honed.inputs import basemodel
    from honed.plan import plan
    from honed.spec import jobfile
    from honed.spec.config import Config
    from honed.system import installed
    from honed.system.device import cpu

    directory = Path(tempfile.mkdtemp(prefix="job-", dir=root))
    model = root / keys.get("base_model", "model")
    parsed = jobfile.validate(
        {
            "backend": "transformers",
            "datasets": [{"path": str(root / "train.jsonl")}],
            "predictions": {"sample_frequency": "off"},
            "training": {"max_steps": 1, "per_device_train_batch_size": 8},
            **keys,
            "base_model": str(model),
        }
    )
    planned = plan.make(parsed, basemodel.inspect(model), cpu(), config=Config(), installed=installed.look())
    plan_document.write(directory, parsed, planned)
    return directory


def worker_environment() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def of_workers(root: Path, runs: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from zoo.vision import build_vision_checkpoint

    build_vision_checkpoint(root / "vision", "qwen2_5_vl")
    environment = worker_environment()
    print("| worker, one step | CPU s | range |\n|---|---|---|")
    for kind, keys in KINDS.items():
        found = []
        for _ in range(runs + 1):
            directory = job(root, keys)
            command = [sys.executable, "-m", "honed.worker", str(directory), "1"]
            found.append(cpu_sec(command, environment, directory))
        print(row(kind, found[1:]), flush=True)


def of_honectl(root: Path, runs: int) -> bool:
    """Print what the verbs take. Returns False if one takes more than it may."""
    is_within = True
    honed = Honed(root)
    honed.start()
    try:
        honectl = str(Path(sys.executable).with_name("honectl"))
        environment = {**os.environ, "HONED_ROOT": str(root)}
        subprocess.run([honectl, "pause"], check=True, stdout=subprocess.DEVNULL, env=environment)
        for number in range(NUM_JOBS):
            honed.drop(f"job{number}")
        honed.wait_for_arrivals()
        honed.drop("job")
        (honed.incoming / "job.yaml").rename(root / "job.yaml")
        print(f"\n| `honectl`, {NUM_JOBS} jobs | CPU s | range | at most |\n|---|---|---|---|")
        for verb in VERBS:
            commands = [[honectl, *verb.format(n=number).split()] for number in range(1, runs + 2)]
            found = [cpu_sec(command, environment, root, may_fail=verb == "doctor") for command in commands]
            limit = MAX_CPU_SEC.get(verb.split()[0])
            is_within = is_within and (limit is None or statistics.median(found[1:]) <= limit)
            name = f"`{verb.format(n='ID')}`"
            print(f"{row(name, found[1:])} {limit or ''} |", flush=True)
        print("\n| `honectl` in a terminal | CPU s until it says something | range | at most |\n|---|---|---|---|")
        for verb in READING:
            commands = [[honectl, *verb.format(n=number).split()] for number in range(runs + 1)]
            found = [silent_sec(command, environment, root) for command in commands]
            is_within = is_within and statistics.median(found[1:]) <= MAX_SILENT_SEC
            name = f"`{verb.format(n='N')}`"
            print(f"{row(name, found[1:])} {MAX_SILENT_SEC} |", flush=True)
    finally:
        honed.stop()
    return is_within


def of_imports(root: Path) -> None:
    directory = job(root, KINDS["LoRA"])
    command = [sys.executable, "-X", "importtime", "-m", "honed.worker", str(directory), "1"]
    done = subprocess.run(command, env=worker_environment(), cwd=directory, stderr=subprocess.PIPE, check=True)
    seconds: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for line in done.stderr.decode().splitlines():
        if found := re.fullmatch(r"import time: +(\d+) \| +\d+ \| +(\w+)(\.\S+)?", line):
            seconds[found[2]] += int(found[1]) / 1e6
            modules[found[2]] += 1
    total = sum(seconds.values())
    print(f"\n| imports of a LoRA worker, {modules.total()} modules | share | modules |\n|---|---|---|")
    shown = seconds.most_common(NUM_PACKAGES)
    for name, each in shown:
        print(f"| {name} | {each / total:.0%} | {modules[name]} |")
    rest = total - sum(each for _, each in shown)
    print(f"| {len(seconds) - len(shown)} others | {rest / total:.0%} | |")


def row(name: str, seconds: list[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=["worker", "honectl", "profile"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="honed-start-") as name:
        root = Path(name)
        demonstration.build(root)
        print(
            f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.runs} runs"
        )
        if options.only in {None, "worker"}:
            of_workers(root, options.runs)
        if options.only in {None, "profile"}:
            of_imports(root)
        if options.only in {None, "honectl"}:
            sys.exit(not of_honectl(root, options.runs))


if __name__ == "__main__":
    main()
