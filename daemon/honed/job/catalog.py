"""In-memory index of all jobs of a spool. Only the daemon, which alone moves entries, keeps one.

It is read from the entries once at start and updated at every commit. A query over all jobs (a name, the order of the
list, the owner of an output directory) therefore does not get slower with the number of jobs. Of ended jobs it has what
such queries ask for (brief.py), and reads an entry when the whole job is asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from honed.job.brief import Brief, Listed, brief
from honed.job.job import Job, State

#: The list shows running jobs first, then the queue, then held jobs, then finished jobs, newest first. Here
#: the queue is ordered by priority and number; queue_order.py knows in which order it starts.
_RANKS = {State.RUNNING: 0, State.QUEUED: 1, State.HELD: 2}
_ENDED = len(_RANKS)
_UNSTARTED = (State.QUEUED, State.HELD)
#: Ended jobs that are kept whole: those that were loaded or have ended last.
MAX_RECENT = 256

#: A job's place in the list.
Key = tuple[int, int, int]


def key(job: Listed) -> Key:
    """Return a job's position in the list of all jobs."""
    rank = _RANKS.get(job.state, _ENDED)
    return (rank, -job.id, 0) if rank == _ENDED else (rank, -job.priority, job.id)


class Catalog:
    """The latest entry of every job. Call `put` and `drop` only after the change is durable.

    `load` returns the whole job of one in brief, None if its entry is gone; where all are whole, it is not called.
    `identities`: of the entries of ended jobs that are whole, until `shorten`.
    """

    def __init__(
        self,
        jobs: Iterable[Listed] = (),
        *,
        load: Callable[[Brief], Job | None] = lambda _brief: None,
        identities: Mapping[int, int] | None = None,
    ) -> None:
        self._jobs = {job.id: job for job in jobs}
        self._load = load
        self._identities = dict(identities or {})
        self._recent: dict[int, Job] = {}  # whole jobs of ones in brief, the latest at the end
        self._changing: dict[int, Job] = {}  # the same, of those whose change may have failed
        self._order = sorted((*key(job), job.id) for job in self._jobs.values())
        self._num = Counter(job.state for job in self._jobs.values())
        self._num_queued = Counter(job.uid for job in self._jobs.values() if job.state in _UNSTARTED)
        self._named: dict[str, list[int]] = {}
        for job in self._jobs.values():
            self._named.setdefault(job.name, []).append(job.id)
        # Jobs that are not finished; sorted, so that paths below one directory are adjacent.
        self._outputs: dict[str, tuple[int, ...]] = {}
        for job in self._jobs.values():
            if not job.state.is_final:
                self._outputs[job.output_dir] = (*self._outputs.get(job.output_dir, ()), job.id)
        self._output_dirs = sorted(self._outputs)
        self._reserved: dict[int, Job] = {}
        self._listeners: list[Callable[[Listed | None, Job | None], None]] = []

    def listen(self, listener: Callable[[Listed | None, Job | None], None]) -> None:
        """Register a callback for every change: it gets the job before and after; None where there was or is none."""
        self._listeners.append(listener)

    def put(self, job: Job, kept: Brief | None = None) -> None:
        """Add a new job or replace a changed one; `kept` is what is kept of it, if not the whole."""
        self._change(self._jobs.get(job.id), job, kept)

    def drop(self, job_id: int) -> None:
        """Remove a job whose entry is gone."""
        self._change(self._jobs.get(job_id), None, None)

    def _change(self, old: Listed | None, new: Job | None, kept: Brief | None) -> None:
        if old is not None:
            del self._jobs[old.id]
            self._recent.pop(old.id, None)
            self._changing.pop(old.id, None)
            self._identities.pop(old.id, None)
            self._num[old.state] -= 1
            self._num_queued[old.uid] -= old.state in _UNSTARTED
            del self._order[bisect_left(self._order, (*key(old), old.id))]
            self._rename(old, is_there=False)
            self.give_back(old)
        if new is not None:
            self._jobs[new.id] = kept or new
            if kept is not None:
                self._keep(new)
            self._num[new.state] += 1
            self._num_queued[new.uid] += new.state in _UNSTARTED
            insort(self._order, (*key(new), new.id))
            self._rename(new, is_there=True)
            if not new.state.is_final:
                self.reserve(new)
                del self._reserved[new.id]
        for listener in self._listeners:
            listener(old, new)

    def _rename(self, job: Listed, *, is_there: bool) -> None:
        numbers = self._named.setdefault(job.name, [])
        if is_there:
            insort(numbers, job.id)
            return
        numbers.remove(job.id)
        if not numbers:
            del self._named[job.name]

    def _keep(self, job: Job) -> None:
        self._recent[job.id] = job
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def hold(self, job: Job) -> None:
        """Keep a job whole until its change is made: if that fails, nobody knows what its entry says."""
        if job.state.is_final:
            self._changing[job.id] = job

    def shorten(self) -> Iterator[None]:
        """Keep in brief the ended jobs that a start has read, a job at a time: the start needs most of them whole."""
        while self._identities:
            number, identity = self._identities.popitem()
            if isinstance(job := self._jobs[number], Job):
                self._jobs[number] = brief(job, identity)
            yield

    # -- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Listed]:
        """Iterate over the jobs of now, in no particular order."""
        return iter(list(self._jobs.values()))

    def get(self, job_id: int) -> Job | None:
        """Return a job. Raises OSError if the machine prevents reading an ended one's entry."""
        live = self._jobs.get(job_id)
        if not isinstance(live, Brief):
            return live
        if (job := self._changing.get(job_id) or self._recent.get(job_id)) is None:
            if (job := self._load(live)) is None:
                self.drop(job_id)
            else:
                self._keep(job)
        return job

    def listed(self, job_id: int) -> Listed | None:
        """Return a job, or what is kept of it: nothing is read."""
        return self._jobs.get(job_id)

    def uid_of(self, job_id: int) -> int | None:
        return job.uid if (job := self._jobs.get(job_id)) is not None else None

    def num(self, state: State) -> int:
        return self._num[state]

    def num_queued(self, uid: int) -> int:
        """Return the number of a user's queued and held jobs."""
        return self._num_queued[uid]

    def named(self, name: str) -> list[Listed]:
        """Return the jobs with this name, oldest first."""
        return [self._jobs[number] for number in self._named.get(name, ())]

    def newest(self) -> Iterator[Listed]:
        """Iterate over all jobs, highest number first."""
        return (self._jobs[number] for number in sorted(self._jobs, reverse=True) if number in self._jobs)

    def ordered(self, after: int | None = None) -> Iterator[Listed]:
        """Iterate in list order, from the start or after the job `after`. The order is that of now; each job is as it
        is when it is reached, and one that is gone is left out. So do the next two."""
        start = 0
        if after is not None and (job := self._jobs.get(after)) is not None:
            start = bisect_left(self._order, (*key(job), job.id)) + 1
        return self._each(self._order[start:])

    def _each(self, order: list[tuple[int, int, int, int]]) -> Iterator[Listed]:
        return (job for *_, number in order if (job := self._jobs.get(number)) is not None)

    def of_state(self, state: State) -> Iterator[Listed]:
        """Iterate over the jobs in a state, in list order."""
        rank = _RANKS.get(state, _ENDED)
        first = bisect_left(self._order, (rank,))
        last = bisect_left(self._order, (rank + 1,))
        jobs = self._each(self._order[first:last])
        return jobs if rank < _ENDED else (job for job in jobs if job.state is state)

    def unfinished(self, state: State) -> Iterator[Job]:
        """Iterate over the jobs in a state that is not final, in list order."""
        return (job for job in self.of_state(state) if isinstance(job, Job))

    def ended(self) -> Iterator[Listed]:
        """Iterate over finished jobs, newest first."""
        return self._each(self._order[bisect_left(self._order, (_ENDED,)) :])

    # -- output directories -------------------------------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """Reserve a job's output directory until it finishes or `give_back` is called; it may have no entry yet."""
        self._reserved[job.id] = job
        owners = self._outputs.get(job.output_dir, ())
        if not owners:
            insort(self._output_dirs, job.output_dir)
        self._outputs[job.output_dir] = (*(number for number in owners if number != job.id), job.id)

    def give_back(self, job: Listed) -> None:
        """Release the output directory of a job that got no entry or has finished."""
        self._reserved.pop(job.id, None)
        owners = self._outputs.get(job.output_dir, ())
        left = tuple(number for number in owners if number != job.id)
        if left:
            self._outputs[job.output_dir] = left
        elif owners:
            del self._outputs[job.output_dir]
            del self._output_dirs[bisect_left(self._output_dirs, job.output_dir)]

    def owner_of(self, path: str) -> Listed | None:
        """Return an unfinished job whose output directory is this path, contains it, or lies below it. The path must be
        absolute and without symbolic links, as output directories are when a job is accepted.
        """
        place = path
        while place not in self._outputs and place != "/":
            place = place.rpartition("/")[0] or "/"
        if place not in self._outputs:
            place = next(iter(self._output_dirs[(at := bisect_left(self._output_dirs, f"{path}/")) : at + 1]), "")
            if not place.startswith(f"{path}/"):
                return None
        number = self._outputs[place][0]
        return self._reserved.get(number) or self._jobs.get(number)
