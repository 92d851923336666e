"""Benchmark of staging: how long the device waits between two jobs, with and without it, and beside `trl sft`.

    scripts/bench staging [--jobs 3] [--steps 1500] [--short 20] [--threads 1]
    scripts/bench staging --booted --jobs 0      as root: jobs as units, in a booted systemd
    scripts/bench staging --large [--rows 200000] [--jobs 2] [--steps 400]
    scripts/bench staging --pairs 4 [--steps 400]

`--jobs` jobs of `--steps` steps are dropped at once, each longer than the staging of the next: the gap goes from the
last step of one to the first step of the next, with export and exit. Then `--short` jobs of 20 steps, and as many
`trl sft` one after another; with `--booted` these jobs are units. Each process trains on `--threads` threads, so that a
core is left, as beside a GPU.

`--large`: with a model of 1 GB in float32 and `--rows` rows; the time in which the model is loaded is given, too.

`--pairs`: what staging costs the job that trains. In each pair a job trains once alone and once while the next one is
staged, in turns which of them first; the steps beside the worker that prepares are compared with the same steps of the
job alone, and with the later steps of their own job, beside a worker that waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark
import demonstration

#: Seconds for all jobs of a round.
DEADLINE_SEC = 3600.0
#: The order within a pair: with staging first, and without first.
ORDERS = ((True, False), (False, True))
PREDICTIONS_OFF = "predictions: {sample_frequency: off}\n"
LARGE_JOB = """\
base_model: {dir}/model
dtype: float32
lora: {{r: 8}}
datasets: [{{path: {dir}/large.jsonl}}]
predictions: {{sample_frequency: off}}
training:
  max_steps: {steps}
  per_device_train_batch_size: 1
  max_length: 160
  gradient_checkpointing: false
"""


@dataclass(frozen=True)
class Run:
    """One job's times, seconds since the epoch."""

    steps: list[float]
    load_sec: float
    staged: tuple[float, float] | None  #: when its worker was started ahead, and when it waited

    @classmethod
    def read(cls, spool: Path, attempt: Path) -> Run:
        lines = (attempt / "events.jsonl").read_text().splitlines()
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        stages = {each["stage"]: each["time"] for each in events if each["event"] == "stage"}
        entry = json.loads((spool / f"succeeded/{attempt.parent.parent.name}.json").read_text())
        staged_at = entry["attempts"][0].get("staged_at")
        return cls(
            [each["time"] for each in events if each["event"] == "step"],
            stages["audit"] - stages["load"],
            (staged_at, stages["staged"]) if staged_at is not None and "staged" in stages else None,
        )

    @property
    def begun(self) -> float:
        """The begin of the first step, if that took as long as the others."""
        return self.steps[0] - self.median_sec(range(len(self.steps) - 1))

    def during(self, window: tuple[float, float]) -> list[int]:
        """Return the indexes of the steps that lie within a time."""
        return [at for at, (a, b) in enumerate(itertools.pairwise(self.steps)) if window[0] <= a and b <= window[1]]

    def median_sec(self, indexes: Sequence[int]) -> float:
        """Return the median duration of these steps."""
        return statistics.median(self.steps[at + 1] - self.steps[at] for at in indexes)


class Round:
    """Some jobs of one instance, dropped at once."""

    def __init__(self, root: Path, job: str, *, num_jobs: int, is_staging: bool) -> None:
        self.root = root
        self.num_jobs = num_jobs
        self.job = job
        config = root / "etc/honed/honed.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(f"[jobs]\nstage_ahead = {str(is_staging).lower()}\n")

    @contextmanager
    def running(self) -> Iterator[None]:
        with benchmark.running_honed(self.root):
            yield

    def log(self) -> str:
        return (self.root / "honed.log").read_text()[-3000:]

    def run(self) -> tuple[float, list[Run]]:
        """Return the seconds from the drop to the end of the last job, and the jobs in their order."""
        spool = self.root / "var/spool/honed"
        with self.running():
            before = {path.name for path in (spool / "succeeded").glob("*.json")}
            started = time.perf_counter()
            for number in range(self.num_jobs):
                path = spool / f"incoming/.job{number}.yaml"
                path.write_text(self.job)
                path.rename(spool / "incoming" / path.name.removeprefix("."))
            while len(done := {path.name for path in (spool / "succeeded").glob("*.json")} - before) < self.num_jobs:
                if any((spool / "failed").glob("*.json")) or any((spool / "rejected").glob("*.reason")):
                    raise SystemExit(self.log())
                if time.perf_counter() - started > DEADLINE_SEC:
                    raise SystemExit("the jobs do not end")
                time.sleep(0.02)
            took_sec = time.perf_counter() - started
        jobs = self.root / "var/lib/honed/jobs"
        numbers = sorted(int(name.removesuffix(".json")) for name in done)
        return took_sec, [Run.read(spool, jobs / f"{number}/attempts/1") for number in numbers]


class BootedRound(Round):
    """The same in a booted systemd, on an installed honed: the jobs are units."""

    def __init__(self, machine: Any, job: str, *, num_jobs: int, is_staging: bool) -> None:
        super().__init__(machine.host_path("/"), job, num_jobs=num_jobs, is_staging=is_staging)
        self.machine = machine

    @contextmanager
    def running(self) -> Iterator[None]:
        self.machine.run("systemctl", "start", "honed")
        try:
            yield
        finally:
            self.machine.run("systemctl", "stop", "honed")

    def log(self) -> str:
        return str(self.machine.run("journalctl", "--unit=honed", "--no-pager"))[-3000:]


def gaps(runs: Sequence[Run]) -> list[float]:
    """Return the seconds from the end of each job's last step to the begin of the next one's first."""
    return [later.begun - earlier.steps[-1] for earlier, later in itertools.pairwise(runs)]


def gap_row(name: str, seconds: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f}–{max(seconds):.2f} |"


def slowed(staged: Sequence[Run], plain: Sequence[Run]) -> list[float]:
    """Return by which factors steps beside which the next job is staged are longer than the same steps of the same job
    of a round without staging."""
    found = []
    for beside, next_one, same in zip(staged, staged[1:], plain, strict=False):
        indexes = beside.during(next_one.staged) if next_one.staged is not None else []
        if indexes:
            found.append(beside.median_sec(indexes) / same.median_sec(indexes))
    return found


def pairs(options: argparse.Namespace) -> None:
    print("\n| pair | beside preparing / alone | beside preparing / later | beside waiting / alone | steps beside |")
    print("|---|---|---|---|---|")
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
        root = Path(place)
        demonstration.build(root)
        job = job_of(root, options.steps)
        for number in range(options.pairs):
            runs: dict[bool, list[Run]] = {}
            for is_staging in ORDERS[number % 2]:
                _, runs[is_staging] = Round(root, job, num_jobs=1 + is_staging, is_staging=is_staging).run()
            (beside, next_one), (alone,) = runs[True], runs[False]
            if next_one.staged is None:
                raise SystemExit("the next job was not staged: more --steps are needed")
            during = beside.during(next_one.staged)
            later = range(during[-1] + 1, len(beside.steps) - 1) if during else range(0)
            if not later:
                raise SystemExit("the next job was not ready before the end: more --steps are needed")
            found.append(
                (
                    beside.median_sec(during) / alone.median_sec(during),
                    beside.median_sec(during) / beside.median_sec(later),
                    beside.median_sec(later) / alone.median_sec(later),
                )
            )
            print(f"| {number + 1} | {' | '.join(f'{each:.3f}' for each in found[-1])} | {len(during)} |", flush=True)
    print(f"| median | {' | '.join(f'{statistics.median(each):.3f}' for each in zip(*found, strict=True))} | |")


def job_of(root: Path, steps: int) -> str:
    return benchmark.JOB.format(dir=root, steps=steps, batch=benchmark.BATCH, rank=benchmark.RANK)


def build_large(root: Path, num_rows: int) -> None:
    """Write a model of 1 GB with random weights, its tokenizer, and rows of about 1 kB."""
    import benchmark_rows
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    benchmark_rows.build_model(root / "model")
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(root / "model")),
        hidden_size=1280,
        intermediate_size=3840,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    print(f"     {model.num_parameters():,} parameters, {num_rows:,} rows", flush=True)
    model.save_pretrained(root / "model")
    benchmark_rows.write(root / "large.jsonl", "prompt-completion", num_rows)


def large(options: argparse.Namespace) -> None:
    print(
        f"\n| {options.jobs} jobs, {options.rows:,} rows, a model of 1 GB: last step to the next first | s | loads, s |"
    )
    print("|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
        root = Path(place)
        build_large(root, options.rows)
        job = LARGE_JOB.format(dir=root, steps=options.steps)
        for name, is_staging in (("staged", True), ("not staged", False)):
            _, runs = Round(root, job, num_jobs=options.jobs, is_staging=is_staging).run()
            loads = ", ".join(f"{run.load_sec:.2f}" for run in runs[1:])
            print(f"| {name} | {', '.join(f'{gap:.2f}' for gap in gaps(runs))} | {loads} |", flush=True)


def small(options: argparse.Namespace) -> None:
    print(f"\n| {options.jobs} jobs of {options.steps} steps: last step to the next first | median s | range |")
    print("|---|---|---|")
    rounds: dict[str, list[Run]] = {}
    for name, is_staging in (
        ("staged", True),
        ("not staged", False),
        ("staged, with predictions before and after training", True),
    ):
        with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
            root = Path(place)
            demonstration.build(root)
            job = job_of(root, options.steps)
            if "predictions" in name:
                job = job.replace(PREDICTIONS_OFF, "") + "eval_split: 0.1\n"
            _, rounds[name] = Round(root, job, num_jobs=options.jobs, is_staging=is_staging).run()
            print(gap_row(name, gaps(rounds[name])), flush=True)
    if factors := slowed(rounds["staged"], rounds["not staged"]):
        print(
            f"\nSteps beside which the next job is staged take {statistics.median(factors):.3f} times as long "
            f"({min(factors):.3f}–{max(factors):.3f}; {len(factors)} jobs)."
        )


def short(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
        root = Path(place)
        demonstration.build(root)
        if options.booted:
            ours = short_booted(options)
        else:
            ours, _ = Round(root, job_of(root, benchmark.STEPS), num_jobs=options.short, is_staging=True).run()
        theirs = sum(benchmark.time_trl(root, number) for number in range(options.short))
    print(f"\n| {options.short} jobs of {benchmark.STEPS} steps | s |\n|---|---|")
    print(f"| honed, staged{', units' if options.booted else ''} | {ours:.1f} |")
    print(f"| `trl sft`, one after another | {theirs:.1f} |")
    print(f"| ratio | {ours / theirs:.2f} |")


def short_booted(options: argparse.Namespace) -> float:
    """Return the seconds that the short jobs take as units."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests/system")]
    from machine import CHECKOUT, ENVIRONMENT, Machine

    with Machine() as machine:
        machine.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)
        directory = machine.host_path("/srv/bench")
        directory.mkdir()
        demonstration.build(directory)
        machine.run("chmod", "-R", "a+rX", "/srv/bench")
        job = job_of(Path("/srv/bench"), benchmark.STEPS)
        took_sec, _ = BootedRound(machine, job, num_jobs=options.short, is_staging=True).run()
    return took_sec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--short", type=int, default=20, help="jobs of 20 steps; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--booted", action="store_true", help="the short jobs are units, in a booted systemd")
    parser.add_argument("--large", action="store_true", help="a model of 1 GB and many rows")
    parser.add_argument("--rows", type=int, default=200_000, help="with --large")
    parser.add_argument("--pairs", type=int, default=0, help="what staging costs the job that trains")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = benchmark.ENVIRONMENT["OMP_NUM_THREADS"] = str(options.threads)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one round of each")
    if options.large or options.pairs:
        large(options) if options.large else pairs(options)
        return
    if options.jobs:
        small(options)
    if options.short:
        short(options)


if __name__ == "__main__":
    main()
