"""Every job of a spool, in memory, as its entries have it: the daemon's, who alone moves entries.

Read from the entries once, at start, and changed with each commit of a move. So what is asked of all jobs (a name, the
order of the list, whose an output directory is) costs the same whether there are ten or ten thousand of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from honed.job.job import Job, State

#: In the list running jobs come first, then the queue in its order, what is held, and the rest, newest first.
_RANKS = {State.RUNNING: 0, State.QUEUED: 1, State.HELD: 2}
_ENDED = len(_RANKS)

#: A job's place in the list.
Key = tuple[int, int, int]


def key(job: Job) -> Key:
    """A job's place in the list of all."""
    rank = _RANKS.get(job.state, _ENDED)
    return (rank, -job.id, 0) if rank == _ENDED else (rank, -job.priority, job.id)


class Catalog:
    """The newest word on each job. `put` and `drop` follow a change that is durable already."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._jobs = {job.id: job for job in jobs}
        self._order = sorted((*key(job), job.id) for job in self._jobs.values())
        self._num = Counter(job.state for job in self._jobs.values())
        self._named: dict[str, list[int]] = {}
        for job in self._jobs.values():
            self._named.setdefault(job.name, []).append(job.id)
        # Of jobs that are not over; sorted, so that those below a directory lie side by side.
        self._outputs: dict[str, tuple[int, ...]] = {}
        for job in self._jobs.values():
            if not job.state.is_final:
                self._outputs[job.output_dir] = (*self._outputs.get(job.output_dir, ()), job.id)
        self._output_dirs = sorted(self._outputs)
        self._reserved: dict[int, Job] = {}
        self._listeners: list[Callable[[Job | None, Job | None], None]] = []

    def listen(self, told: Callable[[Job | None, Job | None], None]) -> None:
        """Have each change told: the job before it, and after it; None where there was or is none."""
        self._listeners.append(told)

    def put(self, job: Job) -> None:
        """A new job, or one that has changed."""
        self._change(self._jobs.get(job.id), job)

    def drop(self, job_id: int) -> None:
        """A job whose entry is gone."""
        self._change(self._jobs.get(job_id), None)

    def _change(self, old: Job | None, new: Job | None) -> None:
        if old is not None:
            del self._jobs[old.id]
            self._num[old.state] -= 1
            del self._order[bisect_left(self._order, (*key(old), old.id))]
            self._rename(old, is_there=False)
            self.give_back(old)
        if new is not None:
            self._jobs[new.id] = new
            self._num[new.state] += 1
            insort(self._order, (*key(new), new.id))
            self._rename(new, is_there=True)
            if not new.state.is_final:
                self.reserve(new)
                del self._reserved[new.id]
        for told in self._listeners:
            told(old, new)

    def _rename(self, job: Job, *, is_there: bool) -> None:
        numbers = self._named.setdefault(job.name, [])
        if is_there:
            insort(numbers, job.id)
            return
        numbers.remove(job.id)
        if not numbers:
            del self._named[job.name]

    # -- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """In no order that means anything."""
        return iter(self._jobs.values())

    def get(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    def num(self, state: State) -> int:
        return self._num[state]

    def named(self, name: str) -> list[Job]:
        """The jobs of that name, oldest first."""
        return [self._jobs[number] for number in self._named.get(name, ())]

    def newest(self) -> Iterator[Job]:
        """From the highest number down; ends where the caller has seen enough."""
        return (self._jobs[number] for number in sorted(self._jobs, reverse=True))

    def ordered(self, after: int | None = None) -> Iterator[Job]:
        """In the order of the list, from the start or from behind that job; nothing may change meanwhile."""
        start = 0
        if after is not None and (job := self._jobs.get(after)) is not None:
            start = bisect_left(self._order, (*key(job), job.id)) + 1
        return (self._jobs[each[3]] for each in islice(self._order, start, None))

    def of_state(self, state: State) -> Iterator[Job]:
        """In the order of the list."""
        rank = _RANKS.get(state, _ENDED)
        first = bisect_left(self._order, (rank,))
        last = bisect_left(self._order, (rank + 1,))
        found = (self._jobs[each[3]] for each in islice(self._order, first, last))
        return found if rank < _ENDED else (job for job in found if job.state is state)

    def ended(self) -> Iterator[Job]:
        """Those that are over, newest first."""
        return (self._jobs[each[3]] for each in islice(self._order, bisect_left(self._order, (_ENDED,)), None))

    # -- output directories -------------------------------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """Its output directory is that job's until it is over, or given back: also of one that is no entry yet."""
        self._reserved[job.id] = job
        owners = self._outputs.get(job.output_dir, ())
        if not owners:
            insort(self._output_dirs, job.output_dir)
        self._outputs[job.output_dir] = (*(number for number in owners if number != job.id), job.id)

    def give_back(self, job: Job) -> None:
        """It has become no entry, or it is over."""
        self._reserved.pop(job.id, None)
        owners = self._outputs.get(job.output_dir, ())
        left = tuple(number for number in owners if number != job.id)
        if left:
            self._outputs[job.output_dir] = left
        elif owners:
            del self._outputs[job.output_dir]
            del self._output_dirs[bisect_left(self._output_dirs, job.output_dir)]

    def owner_of(self, path: str) -> Job | None:
        """A job that is not over and writes to that directory, into it, or above it. Absolute, without a link in it,
        as output directories are when a job is accepted."""
        place = path
        while place not in self._outputs and place != "/":
            place = place.rpartition("/")[0] or "/"
        if place not in self._outputs:
            place = next(iter(self._output_dirs[(at := bisect_left(self._output_dirs, f"{path}/")) : at + 1]), "")
            if not place.startswith(f"{path}/"):
                return None
        number = self._outputs[place][0]
        return self._reserved.get(number) or self._jobs.get(number)
