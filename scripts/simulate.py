"""Fair share, simulated on the daemon's own code: Spool, Backlog, Shares, Placement, Selection and Preempting are the
real ones, and jobs only take time.

Ideal sharing gives every user with unfinished work their weight's share of all devices at each moment, and a user's
jobs in their order. A job may start later than ideally by as much as the longest job takes: a device that is taken is
not given back before its job ends.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from honed.daemon.availability import Availability
from honed.daemon.backfill import Choice
from honed.daemon.backlog import Backlog
from honed.daemon.dispatch import Selection
from honed.daemon.obstacles import Obstacles
from honed.daemon.placement import Placement
from honed.daemon.plans import Plans
from honed.daemon.preempting import Preempting
from honed.daemon.shares import Place, Shares, Use
from honed.job.database import Database
from honed.job.job import Attempt, Job, State, Stop
from honed.job.spool import Spool
from honed.job.usage import Usage
from honed.spec.config import Config
from honed.system import durable
from honed.system.clock import Moment
from honed.system.device import Device
from honed.system.layout import Layout

HOUR = 3600.0
#: Seconds that a job takes: from 10 minutes to 12 hours.
SHORTEST, LONGEST = 600.0, 12 * HOUR
NUM_DEVICES = 4
#: Points of the share by which a user may be off, or one longest job.
TOLERANCE = 0.05
USERS = (2001, 2002, 2003, 2004, 2005)
#: The classes and their ranks; jobs of the two higher ones preempt.
RANKS = {None: 0, "low": 0, "normal": 1, "urgent": 2}
PREEMPTING = ("normal", "urgent")
#: Seconds that every job runs before it may be preempted, and that a preemption costs: the checkpoint, and the start
#: from it.
MIN_RUN_SEC, CHECKPOINT_SEC, LOAD_SEC = 1800.0, 120.0, 180.0


@dataclass(frozen=True, eq=False)
class Task:
    """A job to come: its user, when it is submitted, and how long it takes; whole seconds."""

    uid: int
    at: float
    sec: float
    num_gpus: int = 1
    limit_sec: float | None = None  #: time_limit_sec
    eta_factor: float | None = None  #: of its own estimate to the truth; None if it makes none
    priority: int = 0
    job_class: str | None = None


@dataclass(frozen=True)
class Workload:
    """Jobs of five users with their weights."""

    name: str
    tasks: tuple[Task, ...]
    weights: dict[int, float]
    until: float  #: seconds up to which all users of `backlogged` have waiting jobs
    backlogged: tuple[int, ...] = USERS
    classes: tuple[str, ...] = ()


def length(chance: random.Random) -> float:
    return float(round(SHORTEST * (LONGEST / SHORTEST) ** chance.random()))


def always_backlogged(seed: int, weights: Sequence[float] = (1, 1, 1, 1, 1), *, days: int = 20) -> Workload:
    """Five users who always have waiting jobs; the first one writes a high priority into each file."""
    chance, tasks = random.Random(seed), []
    for uid, weight in zip(USERS, weights, strict=True):
        total, room = 0.0, 1.5 * NUM_DEVICES * days * 24 * HOUR * weight / sum(weights)
        while total < room:
            tasks.append(Task(uid, 0.0, length(chance), priority=100 if uid == USERS[0] else 0))
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
        tasks += [Task(rare, day * 24 * HOUR, length(chance)) for _ in range(chance.randint(2, 12))]
    return Workload("one user comes and goes", tuple(tasks), base.weights, base.until, USERS[:-1])


def workloads(seed: int) -> list[Workload]:
    return [always_backlogged(seed), always_backlogged(seed, (1, 1, 2, 3, 4)), one_comes_and_goes(seed)]


def urgent_ones_come(seed: int) -> Workload:
    """Five users who always have waiting jobs, and now and then an urgent one."""
    chance, base = random.Random(seed + 2000), always_backlogged(seed, days=10)
    tasks = [replace(task, job_class="normal", priority=0) for task in base.tasks]
    at = 0.0
    while (at := at + float(round(chance.expovariate(1 / (3 * HOUR))))) < base.until:
        tasks.append(Task(chance.choice(USERS), at, length(chance), job_class="urgent"))
    return replace(base, name="urgent jobs come", tasks=tuple(tasks), classes=("normal", "urgent"))


def three_classes(seed: int) -> Workload:
    """Three users with weights who always have waiting jobs of the lowest class, one with batches of the class above
    them, and one with urgent jobs."""
    chance, base = random.Random(seed + 3000), always_backlogged(seed, (1, 1, 1, 2, 3), days=10)
    tasks = [replace(task, job_class="low") for task in base.tasks if task.uid in USERS[2:]]
    for uid, name, most, every in ((USERS[0], "normal", 8, 16 * HOUR), (USERS[1], "urgent", 2, 5 * HOUR)):
        at = 0.0
        while (at := at + float(round(chance.expovariate(1 / every)))) < base.until:
            tasks += [Task(uid, at, length(chance), job_class=name) for _ in range(chance.randint(1, most))]
    classes = ("low", "normal", "urgent")
    return replace(base, name="three classes", tasks=tuple(tasks), backlogged=USERS[2:], classes=classes)


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A running job: `ends_at` is the time at which its device becomes free."""

    job: Job
    task: Task
    began: float
    ends_at: float

    now: Callable[[], float]
    can_resume = True

    @property
    def rank(self) -> int:
        return RANKS[self.task.job_class]

    @property
    def left_sec(self) -> float | None:
        """Seconds until it ends at the latest, as `Running.left_sec` tells."""
        if self.job.stop is not None:
            return self.ends_at - self.now()
        found, ran = [], self.now() - self.began
        if self.task.limit_sec is not None:
            found.append(self.task.limit_sec - sum(each.spent_sec for each in self.job.attempts[:-1]) - ran)
        if self.task.eta_factor is not None:
            found.append((self.ends_at - self.now()) * self.task.eta_factor)
        return max(0.0, min(found)) if found else None


class _Attempts:
    """Running jobs that only take time. A preempted one writes a checkpoint, and loads it when it resumes."""

    is_stopping = False

    def __init__(self, now: Callable[[], float], outcome: Outcome) -> None:
        self._now = now
        self._outcome = outcome
        self.running: dict[int, _Running] = {}
        self.of_job: dict[int, Task] = {}
        self._left: dict[Task, float] = {}  #: seconds of preempted jobs, with the loading of the checkpoint

    def devices_in_use(self) -> set[str]:
        return {key for each in self.running.values() for key in each.job.attempt.devices}

    def in_use(self) -> Iterator[Use]:
        for each in self.running.values():
            yield Use(each.job.uid, (self._now() - each.began) * each.task.num_gpus)

    def start(self, job: Job) -> None:
        task = self.of_job[job.id]
        self._outcome.starts.setdefault(task, self._now())
        self.running[job.id] = _Running(job, task, self._now(), self._now() + self._left.get(task, task.sec), self._now)

    def preempt(self, job_id: int, reason: str) -> None:
        """Stop a job for the one that the reason names, as `Attempts.preempt` does."""
        victim, now = self.running[job_id], self._now()
        self._outcome.shortest_run = min(self._outcome.shortest_run, now - victim.began)
        victim.job = replace(victim.job, stop=Stop.PREEMPT)
        self._left[victim.task] = victim.ends_at - now + LOAD_SEC
        victim.ends_at = now + CHECKPOINT_SEC
        by = self.of_job[int(reason.split()[1].rstrip(","))]
        self._outcome.preemptions.append((by, victim.task))


class _NoStaged:
    """Nothing is staged."""

    def is_ending(self, _job_id: int) -> bool:
        return False

    def is_stuck(self, _job_id: int) -> bool:
        return False


class _Nothing:
    """No plan is ever made again, as all devices are alike, and no job is edited."""

    class _None:
        numbers: frozenset[int] = frozenset()
        has_room = True

    replanning = _None()
    numbers = _None.numbers


@dataclass
class Outcome:
    """When each task started and ended, how much of the devices each user had, and who was preempted."""

    starts: dict[Task, float] = field(default_factory=dict)
    ends: dict[Task, float] = field(default_factory=dict)
    total: Counter[int] = field(default_factory=Counter)  #: uid → device-seconds
    used: dict[int, list[float]] = field(default_factory=lambda: {uid: [] for uid in USERS})  #: up to each full hour
    preemptions: list[tuple[Task, Task]] = field(default_factory=list)  #: which, and by which
    shortest_run: float = math.inf  #: seconds of a job before it was preempted
    longest_wait: float = 0.0  #: seconds of a job of a class that preempts, while a victim or a device was there for it

    @property
    def lost_sec(self) -> float:
        """The device-seconds that preemptions have cost."""
        return len(self.preemptions) * (CHECKPOINT_SEC + LOAD_SEC)


class PriorityOrder(Shares):
    """Plain priority order: the highest first, then by number, whoever it is."""

    def turn(self, place: Place, level: float) -> tuple[float, ...]:  # noqa: ARG002
        return (place.priority, place.job_id)


class Simulation:
    """The daemon's own queue and placement, with jobs that only take time. `preempts`: classes do."""

    def __init__(
        self,
        workload: Workload,
        directory: Path,
        shares_of: type[Shares],
        *,
        preempts: bool,
        num_devices: int = NUM_DEVICES,
    ) -> None:
        self.now = 0.0
        self.outcome = Outcome()
        self._until = workload.until
        self._classes = workload.classes
        layout, config = Layout(directory), _config(workload, preempts=preempts)
        for path in (layout.state_dir, layout.runtime_dir, layout.jobs_dir):
            durable.make_dir(path)
        self._layout = layout
        self._spool, self._database = Spool(layout), Database(layout.database_path)
        self._attempts: Any = _Attempts(lambda: self.now, self.outcome)
        self._shares = shares_of(Usage(layout.usage_path, now=lambda: self.now), lambda: config, self._attempts.in_use)
        self._spool.recover()
        self._shares.recover(self._spool.catalog)
        backlog = Backlog(self._spool, self._database, self._shares, has_room=lambda _job: True, clock=lambda: self.now)
        backlog.recover()
        gpus = [Device("cuda", f"GPU {n}", n, f"GPU-{n}", (9, 0), 80 * 2**30, 80 * 2**30) for n in range(num_devices)]
        availability = Availability(self._spool, lambda: config, now=lambda: self.now)
        placement = Placement(
            layout, lambda: config, self._attempts, availability, probe=lambda _gpus: gpus, clock=lambda: self.now
        )
        nothing: Any = _Nothing()
        plans = Plans(self._spool, backlog, placement, nothing, nothing)
        staged: Any = _NoStaged()
        fence: Any = SimpleNamespace(fault="")
        obstacles = Obstacles(
            self._spool, lambda: config, self._attempts, backlog, plans, placement, self._shares, fence
        )
        self._selection = Selection(
            self._spool, self._attempts, backlog, plans, placement, self._shares, staged, obstacles
        )
        self._preempting = Preempting(
            lambda: config,
            self._attempts,
            placement,
            self._shares,
            obstacles,
            self._selection.startable,
            now=lambda: Moment(self.now),
        )
        self._coming = deque(sorted(workload.tasks, key=lambda task: task.at))
        self._waiting: dict[Task, float] = {}  #: jobs in the queue, and from when they are timed

    def close(self) -> None:
        self._database.close()
        self._spool.close()

    def run(self) -> Outcome:
        """Run until the workload's time is over, or with preemption until all jobs have ended."""
        while self.now < self._until or (self._classes and (self._coming or self._waiting or self._attempts.running)):
            self._turn()
            due = [each.ends_at for each in self._attempts.running.values()]
            due += [self._coming[0].at] if self._coming else []
            due += [each.began + MIN_RUN_SEC for each in self._attempts.running.values()] if self._classes else []
            following = min((at for at in due if at > self.now), default=self._until)
            self._pass_time(following if self._classes else min(following, self._until))
        return self.outcome

    def _turn(self) -> None:
        while self._coming and self._coming[0].at <= self.now:
            self._submit(self._coming.popleft())
        for each in [each for each in self._attempts.running.values() if each.ends_at <= self.now]:
            self._end(each)
        for _ in range(2):  # the daemon's next pass sees what this one has started
            self._preempting.tend()
            self._selection.backfill.give_back(self._selection.startable())
            while chosen := self._selection.next_that_fits():
                self._start(chosen)
        self._watch()

    def _submit(self, task: Task) -> None:
        number = len(self._attempts.of_job) + 1
        self._attempts.of_job[number], self._waiting[task] = task, self.now
        if self._classes:
            files = self._layout.job(number)
            files.dir.mkdir()
            files.plan_path.write_text('{"spec": {"kind": "sft"}}')
        job = Job(number, f"n{number}", self.now, "a", task.uid, f"/o/{number}", task.priority)
        wants = {"job_class": task.job_class, "num_gpus": task.num_gpus, "time_limit_sec": task.limit_sec}
        durable.finish(self._spool.adding(replace(job, **wants)))

    def _start(self, choice: Choice) -> None:
        job, keys = choice.job, ",".join(each.key for each in choice.devices)
        attempt = Attempt(len(job.attempts) + 1, "transformers", self.now, device=keys, passed=choice.passed)
        self._attempts.start(self._spool.move(job, State.RUNNING, attempts=(*job.attempts, attempt)))
        task = self._attempts.of_job[job.id]
        since = self._waiting.pop(task)
        if task.job_class in PREEMPTING:
            self.outcome.longest_wait = max(self.outcome.longest_wait, self.now - since)
        for other in self._waiting:  # who came later and was first has taken what had become free for this one
            if RANKS[other.job_class] <= RANKS[task.job_class] and other.at < task.at:
                self._waiting[other] = max(self._waiting[other], self.now)

    def _end(self, running: _Running) -> None:
        del self._attempts.running[running.job.id]
        is_over = running.job.stop is None
        ended = running.job.with_attempt(
            ended_at=self.now,
            took_sec=self.now - running.began,
            outcome="succeeded" if is_over else "interrupted",
        )
        if is_over:
            self.outcome.ends[running.task] = self.now
        else:
            self._waiting[running.task] = self.now
        state = State.SUCCEEDED if is_over else State.QUEUED
        self._shares.charge([self._spool.move(running.job, state, attempts=ended.attempts, stop=None)])

    def _watch(self) -> None:
        """Time the waiting jobs for which there are enough devices without those of lower classes."""
        of_rank = Counter(each.rank for each in self._attempts.running.values())
        of_rank.update(RANKS[task.job_class] for task in self._waiting)
        for task in self._waiting:
            rank = RANKS[task.job_class]
            is_enough = sum(num for each, num in of_rank.items() if each >= rank) <= NUM_DEVICES
            self._waiting[task] = min(self._waiting[task], self.now) if is_enough else math.inf

    def _pass_time(self, until: float) -> None:
        """Let time pass, and note at each hour what every user has had."""
        num: Counter[int] = Counter()
        for each in self._attempts.running.values():
            num[each.job.uid] += each.task.num_gpus
        while self.now < until:
            hour = (self.now // HOUR + 1) * HOUR
            end = min(until, hour)
            for uid in USERS:
                self.outcome.total[uid] += num[uid] * (end - self.now)
                if end == hour and end <= self._until:
                    self.outcome.used[uid].append(self.outcome.total[uid])
            self.now = end


def _config(workload: Workload, *, preempts: bool) -> Config:
    classes = {
        name: {"rank": RANKS[name], "preempts": preempts and name in PREEMPTING, "min_run_sec": MIN_RUN_SEC}
        for name in workload.classes
    }
    users = {str(uid): {"weight": each} for uid, each in workload.weights.items()}
    return Config.model_validate({"users": users, "classes": classes})


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
    """Hold a run without classes against ideal sharing."""
    ideal = ideal_starts(workload, sorted(workload.tasks, key=lambda task: (task.at, -task.priority)))
    late = max(
        outcome.starts.get(task, workload.until) - start for task, start in ideal.items() if start < workload.until
    )
    return Finding(workload.name, *shares_off(workload, outcome), late, max(task.sec for task in workload.tasks))


def shares_off(workload: Workload, outcome: Outcome) -> tuple[float, float]:
    """Return `worst_off` and `last_off` of a Finding."""
    longest = max(task.sec for task in workload.tasks)
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
    return worst, last


def violations(workload: Workload, outcome: Outcome) -> list[str]:
    """Return what was wrong in a run with preemption; the waits apart."""
    found = []
    if shares_off(workload, outcome)[0] > TOLERANCE:
        found.append("a share is off")
    if num := len([task for task in workload.tasks if task not in outcome.ends]):
        found.append(f"{num} jobs have not finished")
    if outcome.shortest_run < MIN_RUN_SEC:
        found.append(f"a job was preempted after {outcome.shortest_run:.0f} s")
    pairs = set(outcome.preemptions)
    for by, victim in pairs:
        if RANKS[by.job_class] <= RANKS[victim.job_class]:
            found.append(f"a job of class {victim.job_class} was preempted by one of class {by.job_class}")
        if (victim, by) in pairs:
            found.append("two jobs have preempted each other")
    return found


def run(workload: Workload, *, shares_of: type[Shares] = Shares, preempts: bool = True) -> Outcome:
    """Simulate in a directory that is removed afterwards; in memory where there is such a place."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="honed-simulate-", dir=place) as directory:
        simulation = Simulation(workload, Path(directory), shares_of, preempts=preempts)
        try:
            return simulation.run()
        finally:
            simulation.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description="Hold honed's fair share against the ideal.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each workload (default: 3)")
    parser.add_argument("--write", type=Path, metavar="DOCS", help="draw DOCS/fair-share.svg")
    options = parser.parse_args()
    drawn: dict[str, Outcome] = {}
    is_right = all([_without_classes(options.seeds, drawn), _with_classes(options.seeds, drawn)])
    if options.write:
        (options.write / "fair-share.svg").write_text(drawing(drawn), encoding="utf-8")
    return 0 if is_right else 1


def _without_classes(num_seeds: int, drawn: dict[str, Outcome]) -> bool:
    """Run and print fair share and plain priority order; True if the first one is fair and the second is not."""
    print("| jobs | order | share off by, after 20 days | start later than ideally, at most | allowed |")
    print("|---|---|---|---|---|")
    is_right = True
    for seed in range(num_seeds):
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
                if workload.name == "always backlogged":
                    drawn.setdefault(name, outcome)
    return is_right


def _with_classes(num_seeds: int, drawn: dict[str, Outcome]) -> bool:
    """Run and print preemption and, on the same jobs, classes that do not preempt; True if only the first keeps the
    waits short, and all else is right in both."""
    allowed = MIN_RUN_SEC + CHECKPOINT_SEC
    print("\n| jobs | classes | share off by, after 10 days | wait | allowed | preemptions | lost device-hours |")
    print("|---|---|---|---|---|---|---|")
    problems = []
    for seed in range(num_seeds):
        for workload in (urgent_ones_come(seed), three_classes(seed)):
            for name, preempts in (("preempt", True), ("do not", False)):
                outcome = run(workload, preempts=preempts)
                off, lost = shares_off(workload, outcome)[1], outcome.lost_sec
                print(
                    f"| {workload.name}, seed {seed} | {name} | {100 * off:.1f} points"
                    f" | {outcome.longest_wait / 60:.0f} min | {allowed / 60:.0f} min | {len(outcome.preemptions)}"
                    f" | {lost / HOUR:.1f} of {sum(task.sec for task in workload.tasks) / HOUR:.0f} |",
                    flush=True,
                )
                problems += violations(workload, outcome)
                if (outcome.longest_wait <= allowed) != preempts or bool(outcome.preemptions) != preempts:
                    problems.append(f"seed {seed}: {workload.name}: jobs wait as if classes did not {name}")
                if preempts and workload.backlogged == USERS:
                    drawn.setdefault(f"fair share, {workload.name} and preempt", outcome)
    for each in problems:
        print(f"WRONG: {each}")
    return not problems


def drawing(outcomes: Mapping[str, Outcome]) -> str:
    """Return an SVG: each user's device-hours over the days, for each order side by side."""
    width, height, left, top = 420, 260, 50, 30
    colors = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(outcomes) * width} {height + 20}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for panel, (name, outcome) in enumerate(outcomes.items()):
        x0, days = panel * width + left, len(outcome.used[USERS[0]]) / 24
        most = max(values[-1] for each in outcomes.values() for values in each.used.values()) / HOUR
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
