"""Jobs for one to eight GPUs on a server of eight, simulated on the daemon's own placement; see simulate.py.

Held against two references: the same jobs without those that came after a job for eight GPUs, which it must not start
later than by one checkpoint's time; and strict order of arrival, whose utilisation it must reach.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import simulate
from simulate import CHECKPOINT_SEC, HOUR, LOAD_SEC, Outcome, Shares, Simulation, Task, Workload

NUM_GPUS, USER = 8, simulate.USERS[0]
#: GPUs of a job, and how many jobs of ten want so many.
SIZES = (1,) * 5 + (2,) * 2 + (4,) * 2 + (8,)


def mix(seed: int, num_jobs: int = 50) -> list[Task]:
    """Return jobs of one user: some have a time limit of up to three times what they take, some an estimate that is up
    to 40 % off, some neither."""
    chance, tasks, at = random.Random(seed), [], 0.0
    load = chance.uniform(0.7, 1.3)
    for _ in range(num_jobs):
        sec, size = simulate.length(chance), chance.choice(SIZES)
        kind = chance.random()
        limit = float(round(sec * chance.uniform(1.0, 3.0))) if kind < 0.6 else None
        factor = chance.uniform(0.7, 1.4) if 0.4 < kind < 0.8 else None
        tasks.append(Task(USER, at, sec, size, limit, factor, job_class="low"))
        at += float(round(chance.expovariate(load * NUM_GPUS / (2.5 * 2.75 * HOUR))))
    return tasks


def run(tasks: list[Task]) -> Outcome:
    """Simulate until all jobs have ended."""
    workload = Workload("mix", tuple(tasks), {USER: 1.0}, tasks[-1].at, (USER,), classes=("low",))
    with tempfile.TemporaryDirectory(prefix="honed-simulate-", dir="/dev/shm") as directory:
        simulation = Simulation(workload, Path(directory), Shares, preempts=False, num_devices=NUM_GPUS)
        try:
            return simulation.run()
        finally:
            simulation.close()


def in_order(tasks: list[Task]) -> dict[Task, float]:
    """Return when each job ends in strict order of arrival: none starts before an earlier one."""
    queue, running, ends, now = deque(tasks), list[tuple[float, int]](), dict[Task, float](), 0.0
    free = NUM_GPUS
    while queue:
        head = queue[0]
        now = max(now, head.at)
        for end, size in [each for each in running if each[0] <= now]:
            running.remove((end, size))
            free += size
        if free < head.num_gpus:
            now = min(running)[0]
            continue
        queue.popleft()
        free -= head.num_gpus
        ends[head] = now + head.sec
        running.append((ends[head], head.num_gpus))
    return ends


@dataclass(frozen=True)
class Finding:
    """One mix."""

    latest: float  #: seconds by which a job for all GPUs started later than without the jobs after it
    used: float  #: share of the GPUs' time in which jobs trained, until the last one came
    used_in_order: float  #: the same in strict order of arrival
    mean_wait: float  #: seconds
    mean_wait_in_order: float
    num_preempted: int


def judge(tasks: list[Task]) -> Finding:
    """Hold one mix against both references."""
    found = run(tasks)
    late = [0.0]
    for place, task in enumerate(tasks):
        if task.num_gpus == NUM_GPUS:
            alone = run(tasks[: place + 1])
            late.append(found.starts[task] - alone.starts[task])
    ends = in_order(tasks)
    hour = len(found.used[USER])
    lost = sum((CHECKPOINT_SEC + LOAD_SEC) * victim.num_gpus for _, victim in found.preemptions)
    used = found.used[USER][-1] - lost
    used_in_order = sum(
        task.num_gpus * max(0.0, min(end, hour * HOUR) - (end - task.sec)) for task, end in ends.items()
    )
    waits = [found.starts[task] - task.at for task in tasks]
    waits_in_order = [ends[task] - task.sec - task.at for task in tasks]
    return Finding(
        max(late),
        used / NUM_GPUS / hour / HOUR,
        used_in_order / NUM_GPUS / hour / HOUR,
        sum(waits) / len(tasks),
        sum(waits_in_order) / len(tasks),
        len(found.preemptions),
    )


def drawing(findings: list[Finding]) -> str:
    """Return an SVG with a point for each mix: utilisation, and mean wait, against those in order of arrival."""
    size, left, top = 260, 60, 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (size + 100)} {size + 90}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    panels = (
        ("utilisation", 1.0, "%", [(each.used_in_order, each.used) for each in findings]),
        ("mean wait, hours", 0.0, "", [(each.mean_wait_in_order / HOUR, each.mean_wait / HOUR) for each in findings]),
    )
    for panel, (name, whole, unit, points) in enumerate(panels):
        x0, most = left + panel * (size + 100), whole or max(map(max, points))
        parts.append(f'<text x="{x0}" y="20" font-weight="bold">{name}</text>')
        parts.append(f'<text x="{x0}" y="{top + size + 35}">in order of arrival</text>')
        parts.append(f'<text x="{x0 + 6}" y="{top + 12}">honed</text>')
        parts.append(f'<path d="M{x0},{top + size} h{size} M{x0},{top + size} v{-size}" stroke="black" fill="none"/>')
        parts.append(f'<path d="M{x0},{top + size} l{size},{-size}" stroke="#999" stroke-dasharray="4"/>')
        for tick in range(5):
            at, value = size * tick / 4, most * tick / 4
            label = f"{100 * value:.0f}%" if unit else f"{value:.0f}"
            parts.append(f'<text x="{x0 + at:.0f}" y="{top + size + 15}" text-anchor="middle">{label}</text>')
            parts.append(f'<text x="{x0 - 5}" y="{top + size - at + 4:.0f}" text-anchor="end">{label}</text>')
        for there, here in points:
            cx, cy = x0 + size * there / most, top + size - size * here / most
            parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="#2471a3" fill-opacity="0.6"/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the placement of jobs for several GPUs against two references.")
    parser.add_argument("--seeds", type=int, default=100, help="mixes of jobs (default: 100)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these mixes alone")
    parser.add_argument("--jobs", type=int, default=50, help="jobs of each mix (default: 50)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="draw DOCS/several-gpus.svg")
    options = parser.parse_args()
    findings = []
    for seed in options.only or range(options.seeds):
        found = judge(mix(seed, options.jobs))
        findings.append(found)
        print(
            f"seed {seed}: at most {found.latest:.0f} s later; used {found.used:.1%}, in order "
            f"{found.used_in_order:.1%}; waits {found.mean_wait / HOUR:.2f} h, in order "
            f"{found.mean_wait_in_order / HOUR:.2f} h; {found.num_preempted} gave their GPUs back",
            flush=True,
        )
    if options.write:
        (options.write / "several-gpus.svg").write_text(drawing(findings), encoding="utf-8")
    late = [each for each in findings if each.latest > CHECKPOINT_SEC]
    low = [each for each in findings if each.used < each.used_in_order - 1e-9]
    print(f"{len(findings)} mixes: {len(late)} with a job that started too late, {len(low)} with a lower utilisation")
    return 1 if late or low else 0


if __name__ == "__main__":
    sys.exit(main())
