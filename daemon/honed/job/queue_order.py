"""Order in which queued jobs start, as far as it is known now.

    class ── rank ──► users by their share ──► the first of the user's own jobs, by priority, then by number

Each start raises its user's share, by what an attempt mostly takes: so jobs of several users alternate. Jobs that wait
for more than a device come last.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import NamedTuple

from honed.job.catalog import Catalog
from honed.job.entitlement import Entitlements, class_of
from honed.job.job import Job, State
from honed.job.usage import Usage
from honed.spec.config import Config


class Place(NamedTuple):
    """A job's place among its user's jobs: the lowest is first."""

    rank: int  #: of its class, negative
    priority: int  #: negative
    job_id: int


def place_of(config: Config, job: Job) -> Place:
    """Return a job's place among its user's jobs."""
    return Place(-class_of(config, job.job_class).rank, -job.priority, job.id)


def turn_of(config: Config, place: Place, level: float) -> tuple[float, ...]:
    """Return the order between users' jobs, the lowest one starts: `place` of a job, `level` of its user."""
    if config.fair_share.priority_across_users:
        return (place.rank, place.priority, level, place.job_id)
    return (place.rank, level, place.job_id)


def by_turns(
    places: Mapping[int, Iterator[Place]],
    levels: Mapping[int, float],
    turn: Callable[[Place, float], tuple[float, ...]],
    *,
    but: Container[int] = (),
    spends: Callable[[int], float] | None = None,
) -> Iterator[Place]:
    """Yield the places of all users, each user's in their order; no user without any. `levels`: of these users. `but`:
    users who are left out; it may grow meanwhile. `spends`: what a start adds to its user's level."""
    level = dict(levels)
    heap = [(turn(place := next(of_user), level[uid]), place, uid) for uid, of_user in places.items()]
    heapify(heap)
    while heap:
        _, place, uid = heappop(heap)
        if uid in but:
            continue
        yield place
        level[uid] += spends(uid) if spends is not None else 0.0
        if (following := next(places[uid], None)) is not None:
            heappush(heap, (turn(following, level[uid]), following, uid))


def expected(usage_path: Path, config: Config, jobs: Catalog) -> Iterator[Job]:
    """Yield the queued jobs in the order in which a honed that is not running would start them: by the shares that it
    has written last."""
    usage, entitlements = Usage(usage_path, is_ours=False), Entitlements(lambda: config)
    queued = list(jobs.unfinished(State.QUEUED))
    ready = [job for job in queued if not (job.is_deferred or _waits(job, jobs))]
    places: dict[int, list[Place]] = {}
    for job in ready:
        places.setdefault(job.uid, []).append(place_of(config, job))
    levels = {uid: max(usage.level(uid), usage.floor) for uid in places}
    for job in jobs.unfinished(State.RUNNING):
        if job.uid in levels:
            levels[job.uid] += usage.typical_sec / entitlements.weight(job.uid)
    order = by_turns(
        {uid: iter(sorted(own)) for uid, own in places.items()},
        levels,
        lambda place, level: turn_of(config, place, level),
        spends=lambda uid: usage.typical_sec / entitlements.weight(uid),
    )
    for place in order:
        if (other := jobs.get(place.job_id)) is not None:
            yield other
    known = {job.id for job in ready}
    yield from (job for job in queued if job.id not in known)


def _waits(job: Job, jobs: Catalog) -> bool:
    """Return True if a job depends on another one, by its number since it was accepted, that has not succeeded."""
    numbers = (int(reference) for reference in job.depends_on if reference.isdecimal())
    return any((other := jobs.listed(number)) is not None and other.state is not State.SUCCEEDED for number in numbers)
