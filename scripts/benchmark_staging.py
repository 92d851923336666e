"""Benchmark of staging: how long the device waits between two jobs, with and without it, and beside `trl sft`.

    scripts/bench staging [--jobs 3] [--steps 400] [--short 20] [--threads 1]

`--jobs` jobs of `--steps` steps are dropped at once, each longer than the staging of the next: the gap goes from the
last step of one to the first step of the next, with export and exit. Then `--short` jobs of 20 steps, and as many
`trl sft` one after another. Each process trains on `--threads` threads, so that a core is left, as beside a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import benchmark
import demonstration

#: Seconds for all jobs of a round.
DEADLINE_SEC = 1800.0


class Round:
    """Some jobs of one instance, dropped at once."""

    def __init__(self, root: Path, *, num_jobs: int, steps: int, is_staging: bool, extra: str = "") -> None:
        self.root = root
        self.num_jobs = num_jobs
        self.job = benchmark.JOB.format(dir=root, steps=steps, batch=benchmark.BATCH, rank=benchmark.RANK) + extra
        config = root / "etc/honed/honed.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(f"[jobs]\nstage_ahead = {str(is_staging).lower()}\n")

    def run(self) -> tuple[float, list[float]]:
        """Return the seconds from the drop to the end of the last job, and the gaps between their steps."""
        spool = self.root / "var/spool/honed"
        with benchmark.running_honed(self.root):
            before = {path.name for path in (spool / "succeeded").glob("*.json")}
            started = time.perf_counter()
            for number in range(self.num_jobs):
                path = self.root / f"job{number}.yaml"
                path.write_text(self.job)
                path.rename(spool / "incoming" / path.name)
            while len(done := {path.name for path in (spool / "succeeded").glob("*.json")} - before) < self.num_jobs:
                if any((spool / "failed").glob("*.json")) or any((spool / "rejected").glob("*.reason")):
                    raise SystemExit((self.root / "honed.log").read_text()[-3000:])
                if time.perf_counter() - started > DEADLINE_SEC:
                    raise SystemExit("the jobs do not end")
                time.sleep(0.02)
            took_sec = time.perf_counter() - started
        runs = sorted(self._steps(int(name.removesuffix(".json"))) for name in done)
        return took_sec, [later[0] - earlier[1] for earlier, later in itertools.pairwise(runs)]

    def _steps(self, job_id: int) -> tuple[float, float]:
        """Return the times of a job's first and last step."""
        path = self.root / f"var/lib/honed/jobs/{job_id}/attempts/1/events.jsonl"
        times = [each["time"] for each in map(json.loads, path.read_text().splitlines()) if each["event"] == "step"]
        return times[0], times[-1]


def gap_row(name: str, gaps: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(gaps):.2f} | {min(gaps):.2f}–{max(gaps):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--short", type=int, default=20, help="jobs of 20 steps; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = benchmark.ENVIRONMENT["OMP_NUM_THREADS"] = str(options.threads)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one round of each")
    print(f"\n| {options.jobs} jobs of {options.steps} steps: last step to the next first | median s | range |")
    print("|---|---|---|")
    predictions = "eval_split: 0.1\n"
    for name, is_staging, extra in (
        ("staged", True, ""),
        ("not staged", False, ""),
        ("staged, with predictions before and after training", True, predictions),
    ):
        with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
            root = Path(place)
            demonstration.build(root)
            made = Round(root, num_jobs=options.jobs, steps=options.steps, is_staging=is_staging, extra=extra)
            if extra:
                made.job = made.job.replace("predictions: {sample_frequency: off}\n", "")
            print(gap_row(name, made.run()[1]), flush=True)
    if options.short:
        with tempfile.TemporaryDirectory(prefix="honed-bench-") as place:
            root = Path(place)
            demonstration.build(root)
            ours, _ = Round(root, num_jobs=options.short, steps=benchmark.STEPS, is_staging=True).run()
            theirs = sum(benchmark.time_trl(root, number) for number in range(options.short))
        print(f"\n| {options.short} jobs of {benchmark.STEPS} steps | s |\n|---|---|")
        print(f"| honed, staged | {ours:.1f} |\n| `trl sft`, one after another | {theirs:.1f} |")
        print(f"| ratio | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
