"""Fair share, simulated on the daemon's own code: Spool, Backlog, Shares, Placement and Selection are the real ones,
and jobs only take time.

Ideal sharing gives every user with unfinished work their weight's share of all devices at each moment, and a user's
jobs in their order. A job may start later than ideally by as much as the longest job takes: a device that is taken is
not given back before its job ends.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.daemon.availability import Availability
from honed.daemon.backlog import Backlog
from honed.daemon.dispatch import Selection
from honed.daemon.placement import Placement
from honed.daemon.plans import Plans
from honed.daemon.shares import Place, Shares, Use
from honed.job.database import Database
from honed.job.job import Attempt, Job, State
from honed.job.spool import Spool
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import durable
from honed.system.device import Device
from honed.system.layout import Layout

HOUR = 3600.0
#: Seconds that a job takes: from 10 minutes to 12 hours.
SHORTEST, LONGEST = 600.0, 12 * HOUR
NUM_DEVICES = 4
#: Points of the share by which a user may be off, or one longest job.
TOLERANCE = 0.05
USERS = (2001, 2002, 2003, 2004, 2005)


@dataclass(frozen=True)
class Task:
    """A job to come: its user, when it is submitted, and how long it takes; seconds."""

    uid: int
    at: float
    sec: float
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Jobs of five users with their weights."""

    name: str
    tasks: tuple[Task, ...]
    weights: dict[int, float]
    until: float  #: seconds up to which all users of `backlogged` have waiting jobs
    backlogged: tuple[int, ...] = USERS


def _length(chance: random.Random) -> float:
    return SHORTEST * (LONGEST / SHORTEST) ** chance.random()


def always_backlogged(seed: int, weights: Sequence[float] = (1, 1, 1, 1, 1)) -> Workload:
    """Five users who always have waiting jobs; the first one writes a high priority into each file."""
    chance, tasks, days = random.Random(seed), [], 20
    for uid, weight in zip(USERS, weights, strict=True):
        total, room = 0.0, 1.5 * NUM_DEVICES * days * 24 * HOUR * weight / sum(weights)
        while total < room:
            tasks.append(Task(uid, 0.0, _length(chance), priority=100 if uid == USERS[0] else 0))
            total += tasks[-1].sec
    chance.shuffle(tasks)
    name = "always backlogged" if len(set(weights)) == 1 else "always backlogged, weights 1 to 4"
    return Workload(name, tuple(tasks), dict(zip(USERS, map(float, weights), strict=True)), days * 24 * HOUR)


def one_comes_and_goes(seed: int) -> Workload:
    """Four users who always have waiting jobs, and one who submits a few on some days."""
    base = always_backlogged(seed)
    chance, rare = random.Random(seed + 1000), USERS[-1]
    tasks = [task for task in base.tasks if task.uid != rare]
    for day in sorted(chance.sample(range(2, 19), 6)):
        tasks += [Task(rare, day * 24 * HOUR, _length(chance)) for _ in range(chance.randint(2, 12))]
    return Workload("one user comes and goes", tuple(tasks), base.weights, base.until, USERS[:-1])


def workloads(seed: int) -> list[Workload]:
    return [always_backlogged(seed), always_backlogged(seed, (1, 1, 2, 3, 4)), one_comes_and_goes(seed)]


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    job: Job
    began: float


class _Attempts:
    """Running jobs that only take time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.running: dict[int, _Running] = {}

    def devices_in_use(self) -> set[str]:
        return {each.job.attempt.device or "" for each in self.running.values()}

    def in_use(self) -> Iterator[Use]:
        for each in self.running.values():
            yield Use(each.job.uid, self._now() - each.began)


class _Replanning:
    """No plan is ever made again: all devices are alike."""

    class _None:
        numbers: frozenset[int] = frozenset()
        has_room = True

    replanning = _None()


@dataclass
class Outcome:
    """When each task started, and how much of the devices each user had."""

    starts: dict[Task, float] = field(default_factory=dict)
    total: Counter[int] = field(default_factory=Counter)  #: uid → device-seconds
    used: dict[int, list[float]] = field(default_factory=dict)  #: uid → device-seconds up to the end of each hour


class PriorityOrder(Shares):
    """Plain priority order: the highest first, then by number, whoever it is."""

    def turn(self, place: Place, level: float) -> tuple[float, ...]:  # noqa: ARG002
        return (place.priority, place.job_id)


def simulate(workload: Workload, directory: Path, *, shares_of: type[Shares] = Shares) -> Outcome:
    """Run a workload until its time is over."""
    clock = [0.0]
    layout = Layout(directory)
    for path in (layout.state_dir, layout.runtime_dir, layout.jobs_dir):
        durable.make_dir(path)
    config = Config.model_validate({"users": {str(uid): {"weight": each} for uid, each in workload.weights.items()}})
    spool, database = Spool(layout), Database(layout.database_path)
    attempts: Any = _Attempts(lambda: clock[0])
    shares = shares_of(Usage(layout.usage_path, now=lambda: clock[0]), lambda: config, attempts.in_use)
    shares.recover([])
    spool.recover()
    backlog = Backlog(spool, database, shares, has_room=lambda _job: True, clock=lambda: clock[0])
    backlog.recover()
    gpus = [Device("cuda", f"GPU {n}", n, f"GPU-{n}", (9, 0), 80 * 2**30, 80 * 2**30) for n in range(NUM_DEVICES)]
    availability = Availability(spool, lambda: config, now=lambda: clock[0])
    placement = Placement(
        layout, lambda: config, attempts, availability, probe=lambda _gpus: gpus, clock=lambda: clock[0]
    )
    acceptance: Any = _Replanning()
    selection = Selection(
        spool, lambda: config, attempts, backlog, Plans(spool, backlog, placement, acceptance), placement, shares
    )
    outcome, tasks = Outcome(used={uid: [] for uid in USERS}), sorted(workload.tasks, key=lambda task: task.at)
    coming, ends, of_job = iter(tasks), list[tuple[float, int]](), dict[int, Task]()
    following = next(coming, None)
    number = 0
    try:
        while clock[0] < workload.until:
            while following is not None and following.at <= clock[0]:
                number += 1
                of_job[number] = following
                job = Job(number, f"n{number}", clock[0], "a", following.uid, f"/o/{number}", following.priority)
                durable.finish(spool.adding(job))
                following = next(coming, None)
            while ends and ends[0][0] <= clock[0]:
                _end(heapq.heappop(ends)[1], spool, attempts, shares, clock[0])
            while len(attempts.running) < NUM_DEVICES and (chosen := selection.next_that_fits()) is not None:
                job, device = chosen
                attempt = Attempt(1, "transformers", clock[0], device=device.uuid)
                attempts.running[job.id] = _Running(spool.move(job, State.RUNNING, attempts=(attempt,)), clock[0])
                outcome.starts[of_job[job.id]] = clock[0]
                heapq.heappush(ends, (clock[0] + of_job[job.id].sec, job.id))
            due = [ends[0][0]] * bool(ends) + ([following.at] if following is not None else [])
            _pass_time(min([*due, workload.until]), clock, outcome, attempts)
    finally:
        database.close()
        spool.close()
    return outcome


def _end(number: int, spool: Spool, attempts: Any, shares: Shares, now: float) -> None:
    running = attempts.running.pop(number)
    ended = running.job.with_attempt(ended_at=now, took_sec=now - running.began, outcome="succeeded")
    shares.charge([spool.move(running.job, State.SUCCEEDED, attempts=ended.attempts)])


def _pass_time(until: float, clock: list[float], outcome: Outcome, attempts: Any) -> None:
    """Let time pass, and note at each hour what every user has had."""
    num = Counter(each.job.uid for each in attempts.running.values())
    while clock[0] < until:
        hour = (len(outcome.used[USERS[0]]) + 1) * HOUR
        end = min(until, hour)
        for uid in USERS:
            outcome.total[uid] += num[uid] * (end - clock[0])
            if end == hour:
                outcome.used[uid].append(outcome.total[uid])
        clock[0] = end


# -- ideal sharing -----------------------------------------------------------------------------------------------------


def ideal_starts(workload: Workload, order: Sequence[Task]) -> dict[Task, float]:
    """Return when each task starts under ideal sharing; `order` is that of each user's own tasks.

    A user's work is a fluid: it gets the weight's share of all devices among the users with work at that moment.
    """
    todo = {uid: [task for task in order if task.uid == uid] for uid in USERS}
    left: dict[int, float] = {}
    starts: dict[Task, float] = {}
    now = 0.0
    while any(todo.values()) or left:
        for uid, tasks in todo.items():
            if uid not in left and tasks and tasks[0].at <= now:
                task = tasks.pop(0)
                starts[task], left[uid] = now, task.sec
        coming = min((tasks[0].at for uid, tasks in todo.items() if tasks and uid not in left), default=float("inf"))
        if not left:
            now = coming
            continue
        total = sum(workload.weights[uid] for uid in left)
        rates = {uid: NUM_DEVICES * workload.weights[uid] / total for uid in left}
        step = min([*(left[uid] / rates[uid] for uid in left), coming - now])
        now += step
        left = {uid: sec for uid in left if (sec := left[uid] - rates[uid] * step) > 1e-6}
    return starts


# -- findings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """How far one run was from ideal sharing."""

    workload: str
    worst_off: float  #: by which a backlogged user's share was off at the end of a day; 0 for one longest job or less
    last_off: float  #: the same at the end of the last day, however small
    latest: float  #: seconds by which a job started later than ideally
    allowed: float  #: seconds

    @property
    def is_fair(self) -> bool:
        return self.worst_off <= TOLERANCE and self.latest <= self.allowed


def judge(workload: Workload, outcome: Outcome) -> Finding:
    """Hold a run against ideal sharing."""
    longest = max(task.sec for task in workload.tasks)
    ideal = ideal_starts(workload, sorted(workload.tasks, key=lambda task: (task.at, -task.priority)))
    late = max(
        outcome.starts.get(task, workload.until) - start for task, start in ideal.items() if start < workload.until
    )
    worst, last = 0.0, 0.0
    total = sum(workload.weights[uid] for uid in workload.backlogged)
    for day in range(1, int(workload.until / HOUR / 24) + 1):
        hour = day * 24 - 1
        of_backlogged, last = sum(outcome.used[uid][hour] for uid in workload.backlogged), 0.0
        for uid in workload.backlogged:
            off = abs(outcome.used[uid][hour] - of_backlogged * workload.weights[uid] / total)
            last = max(last, off / of_backlogged)
            if off > longest:
                worst = max(worst, off / of_backlogged)
    return Finding(workload.name, worst, last, late, longest)


def run(workload: Workload, *, shares_of: type[Shares] = Shares) -> Outcome:
    """Simulate in a directory that is removed afterwards; in memory where there is such a place."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="honed-simulate-", dir=place) as directory:
        return simulate(workload, Path(directory), shares_of=shares_of)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description="Hold honed's fair share against the ideal.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each workload (default: 3)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="draw DOCS/fair-share.svg")
    options = parser.parse_args()
    print("| jobs | order | share off by, after 20 days | start later than ideally, at most | allowed |")
    print("|---|---|---|---|---|")
    is_right, drawn = True, []
    for seed in range(options.seeds):
        for workload in workloads(seed):
            for name, shares_of in (("fair share", Shares), ("priority", PriorityOrder)):
                outcome = run(workload, shares_of=shares_of)
                found = judge(workload, outcome)
                print(
                    f"| {found.workload}, seed {seed} | {name} | {100 * found.last_off:.1f} points"
                    f" | {found.latest / HOUR:.1f} h | {found.allowed / HOUR:.1f} h |",
                    flush=True,
                )
                is_right &= found.is_fair == (shares_of is Shares)  # and plain priority is seen to be unfair
                if seed == 0 and workload.name == "always backlogged":
                    drawn.append((name, outcome))
    if options.write:
        (options.write / "fair-share.svg").write_text(drawing(drawn), encoding="utf-8")
    return 0 if is_right else 1


def drawing(outcomes: Sequence[tuple[str, Outcome]]) -> str:
    """Return an SVG: each user's device-hours over the days, for each order side by side."""
    width, height, left, top = 420, 260, 50, 30
    colors = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(outcomes) * width} {height + 20}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for panel, (name, outcome) in enumerate(outcomes):
        x0, days = panel * width + left, len(outcome.used[USERS[0]]) / 24
        most = max(values[-1] for each in outcomes for values in each[1].used.values()) / HOUR
        parts.append(f'<text x="{x0}" y="18" font-weight="bold">{name}</text>')
        for tick in range(0, int(days) + 1, 5):
            x = x0 + (width - left - 20) * tick / days
            parts.append(f'<text x="{x:.0f}" y="{height + 12}" text-anchor="middle">day {tick}</text>')
        for tick in range(5):
            hours, y = most * tick / 4, height - (height - top) * tick / 4
            parts.append(f'<line x1="{x0}" x2="{x0 + width - left - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 4}" y="{y + 4:.0f}" text-anchor="end">{hours:.0f}</text>')
        for color, (uid, values) in zip(colors, outcome.used.items(), strict=True):
            points = " ".join(
                f"{x0 + (width - left - 20) * hour / len(values):.1f},"
                f"{height - (height - top) * values[hour] / HOUR / most:.1f}"
                for hour in range(0, len(values), 4)
            )
            parts.append(f'<polyline fill="none" stroke="{color}" points="{points}"><title>{uid}</title></polyline>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    sys.exit(main())
