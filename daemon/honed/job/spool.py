"""The spool: the directory that holds a job's entry is the job's state. Only this module moves entries.

    incoming/ claimed/ rejected/ seq                          files that are not jobs (yet): see arrival.py
    queued/ held/ running/ succeeded/ failed/ cancelled/      one entry <id>.json per job
    pruned/         <id>.<state>.json: the last entry of a job whose directory is being removed, or is gone
    corrupt/        <id>.<state>.json: a damaged entry, see corrupt.py
    ended/          <id>: the notification of this job's end is pending, see notification.py
    paused          exists while no jobs are started
    lock            locked by the daemon that owns this spool

Each change has one commit point, a rename, and is durable before the next one starts. A move writes the new entry
beside the old one, renames it into the new directory, then removes the old one: a crash in between leaves two copies,
of which recovery keeps the higher revision. (Just renaming the old entry between directories is not enough: on btrfs
both names can survive a power cut.) Directories are listed by path: there, a long-lived descriptor shows stale lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from honed.job import lock as locks
from honed.job.brief import UNKNOWN, Brief, Listed, brief, identity_of
from honed.job.catalog import Catalog
from honed.job.corrupt import Corrupt, keep_copy
from honed.job.damaged import is_of_item, passed_over, twice
from honed.job.ended_index import EndedIndex
from honed.job.job import MOVES, Job, State
from honed.system import durable
from honed.system.durable import Steps
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import JobFiles, Layout
from honed.system.log import about
from honed.system.message import ENTRY_DAMAGED
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Is called with an entry that cannot be read, and why.
Damaged = Callable[[Path, ValueError | OSError], None]
#: Entries that recovery reads between two signs of life.
NUM_BETWEEN_SIGNS = 200


class Entries:
    """The entries as they are on disk, for readers beside the daemon and for recovery.

    During a move an entry exists in two directories: the newer copy counts. It may also move into a directory that was
    already listed, so `all`, `ids` and `get` list them twice.
    """

    def __init__(self, layout: Layout) -> None:
        self._dir = layout.spool_dir
        self.ended_index = EndedIndex(layout.ended_path)
        #: Is called with an ended entry that cannot be read when it is asked for, and why.
        self.when_damaged: Damaged = _log_damaged

    def directory(self, state: State) -> Path:
        return self._dir / state.value

    def path(self, job_id: int, state: State) -> Path:
        return self.directory(state) / f"{job_id}.json"

    def of(self, state: State) -> Iterator[Job]:
        """Yield the readable entries of a state, by number."""
        for path in self._paths(state):
            if (job := read_entry(path, state)) is not None:
                yield job

    def all(self) -> dict[int, Job]:
        """Return every job once, by number."""
        jobs: dict[int, Job] = {}
        read: set[Path] = set()
        for _ in range(2):  # the second round has what moved in the first, to a place that was read before
            for state in State:
                for path in self._paths(state):
                    if path in read:
                        continue
                    job = read_entry(path, state)
                    if job is not None or os.path.lexists(path):  # a damaged entry is reported once
                        read.add(path)
                    if job is not None and (job.id not in jobs or job.revision > jobs[job.id].revision):
                        jobs[job.id] = job
        return dict(sorted(jobs.items()))

    def ids(self) -> set[int]:
        """Return the numbers of all entries without reading them."""
        return {int(path.stem) for _ in range(2) for state in State for path in self._paths(state)}

    def get(self, job_id: int) -> Job | None:
        """Return one job, in whatever state it is."""
        places = [(self.path(job_id, state), state) for _ in range(2) for state in State]
        jobs = [job for path, state in places if (job := read_entry(path, state)) is not None]
        return max(jobs, key=lambda job: job.revision, default=None)

    def _paths(self, state: State) -> list[Path]:
        numbered = [path for path in self.directory(state).glob("*.json") if path.stem.isdecimal()]
        return sorted(numbered, key=lambda path: int(path.stem))

    def recovered(self, damaged: Damaged, alive: Callable[[], None]) -> Catalog:
        """Return every job once; if an interrupted move left two copies, the older one is removed. An ended one that is
        in the index is not read. `damaged` is called for every entry that is none, `alive` on the way."""
        known = self.ended_index.read()
        newest: dict[int, Listed] = {}
        identities: dict[int, int] = {}
        for state in State:
            for number, (job, identity) in enumerate(self._recovered(state, known, damaged)):
                if number % NUM_BETWEEN_SIGNS == 0:
                    alive()
                other = newest.get(job.id)
                if other is None or job.revision > other.revision:
                    newest[job.id], identities[job.id] = job, identity
                if other is not None:
                    older = other if newest[job.id] is job else job
                    log.warning("job %d: removed its older copy in %s", older.id, older.state)
                    self.path(older.id, older.state).unlink()
                    durable.sync_dir(self.directory(older.state))
        self.ended_index.compare(known, newest.values())
        ended = (job.id for job in newest.values() if isinstance(job, Job) and job.state.is_final)
        return Catalog(newest.values(), load=self.load, identities={number: identities[number] for number in ended})

    def _recovered(self, state: State, known: Mapping[int, Brief], damaged: Damaged) -> Iterator[tuple[Listed, int]]:
        """Yield the jobs in a state's directory, with the identities of their entries; removing temporary files of
        crashed writers."""
        directory = self.directory(state)
        is_known = bool(known) and state.is_final
        for name in names_in(directory):
            if name.startswith(".") and name.endswith(".tmp"):
                with passed_over(directory / name):
                    (directory / name).unlink(missing_ok=True)
            elif name.endswith(".json") and name[:-5].isdecimal():
                brief = known.get(int(name[:-5])) if is_known else None
                if brief is not None and brief.state is state and self._is_as_known(brief, f"{directory}/{name}"):
                    yield brief, brief.identity
                elif (read := _read(str(directory), name, state, damaged)) is not None:
                    yield read

    def load(self, ended: Brief) -> Job | None:
        """Read an ended job's entry; None if it is gone, or damaged and set aside. Raises OSError if it cannot be read:
        then nothing is set aside, since of a disk that reads nothing for a moment those would be all jobs."""
        problems: list[ValueError | OSError] = []
        path = self.path(ended.id, ended.state)
        job = read_entry(path, ended.state, lambda _path, problem: problems.append(problem))
        for problem in problems:
            if isinstance(problem, OSError):
                raise problem
            self.when_damaged(path, problem)
        if job is None and not problems:
            log.warning("job %d (%s): its entry %s is gone", ended.id, ended.name, path, extra=about(ended.id))
        return job

    def _is_as_known(self, brief: Brief, path: str) -> bool:
        try:
            info = os.stat(path)  # noqa: PTH116 - of 50,000 entries, Path objects would take a third of the time
        except OSError:
            return False
        return brief.identity == identity_of(info) and info.st_ctime < self.ended_index.until

    def brief(self, job: Job) -> Brief:
        """Return an ended job, whose entry was just written, in brief."""
        self.ended_index.num_behind += 1
        try:
            return brief(job, identity_of(self.path(job.id, job.state).stat()))
        except OSError:
            return brief(job, UNKNOWN)


class Pruned:
    """The last entries of pruned jobs, as far as they are still remembered."""

    def __init__(self, spool_dir: Path) -> None:
        self.dir = spool_dir / "pruned"
        self._names: dict[str, str] = {}  # of the jobs, by the names of their files, which are not rewritten

    def path(self, job_id: int, state: State) -> Path:
        return self.dir / f"{job_id}.{state}.json"

    def _paths(self) -> list[Path]:
        if not self.dir.is_dir():
            return []
        return [path for path in self.dir.iterdir() if path.name.partition(".")[0].isdecimal()]

    def _places(self, job_id: int) -> list[Path]:
        return [self.path(job_id, state) for state in State if state.is_final]

    def ids(self) -> set[int]:
        """Return the numbers of these jobs."""
        return {int(path.name.partition(".")[0]) for path in self._paths()}

    def has(self, job_id: int) -> bool:
        return any(path.exists() for path in self._places(job_id))

    def get(self, reference: int | str) -> Job | None:
        """Return a job by its number, or the newest one with this name."""
        paths = self._places(int(reference)) if str(reference).isdecimal() else self._named(str(reference))
        jobs = [job for path in paths if (job := _read_pruned(path)) is not None]
        return max(
            (job for job in jobs if reference in {job.id, job.name, str(job.id)}), key=lambda job: job.id, default=None
        )

    def read_names(self) -> Iterator[None]:
        """Learn the names of these jobs, one at a time: one of an unknown name may be any of ten thousand."""
        for path in self._paths():
            if path.name not in self._names and (job := _read_pruned(path)) is not None:
                self._names[path.name] = job.name
            yield

    def _named(self, name: str) -> list[Path]:
        """Return the paths of the jobs of this name. Each is read for its name once: any unknown name is asked for."""
        paths, known = {path.name: path for path in self._paths()}, self._names
        names = {item: known[item] for item in paths.keys() & known.keys()}
        for item in paths.keys() - names.keys():
            if (job := _read_pruned(paths[item])) is not None:
                names[item] = job.name
        self._names = names
        return [path for item, path in paths.items() if names.get(item) == name]

    def forget(self, job_ids: set[int]) -> None:
        """Delete the last entries of jobs of which nothing else is left."""
        for path in self._paths():
            if int(path.name.partition(".")[0]) in job_ids:
                path.unlink(missing_ok=True)


class Spool:
    """One instance's spool, locked for the life of this object if `lock` is true, or a function that takes its lock."""

    def __init__(self, layout: Layout, *, lock: bool | Callable[[Path], int] = True) -> None:
        self.layout = layout
        self.dir = layout.spool_dir
        self.incoming_dir = self.dir / "incoming"
        self.claimed_dir = self.dir / "claimed"
        self.rejected_dir = self.dir / "rejected"
        #: The same for what lies in them, which people made.
        self.incoming, self.rejected = PersonPath(self.incoming_dir), PersonPath(self.rejected_dir)
        self.pruned = Pruned(self.dir)
        self.ended_dir = self.dir / "ended"
        self.corrupt = Corrupt(self.dir)
        self.entries = Entries(layout)
        #: True if every job's end is reported, whatever its spec says.
        self.tells_every_end = False
        for path in (self.incoming_dir, self.claimed_dir, self.rejected_dir, *map(self.state_dir, State)):
            durable.make_dir(path)
        durable.make_dir(layout.jobs_dir)
        if lock:  # a reader may not create them
            durable.make_dir(self.pruned.dir)
            durable.make_dir(self.ended_dir)
        take_lock = lock if callable(lock) else _take_lock
        self._lock_fd = take_lock(self.dir / "lock") if lock else None
        self._catalog: Catalog | None = None
        self._begun: dict[int, int] = {}  # revisions whose write failed and may be on disk anyway

    def close(self) -> None:
        """Release the lock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def catalog(self) -> Catalog:
        """All jobs, in memory. Only the spool's owner has it, after recovery."""
        assert self._catalog is not None
        return self._catalog

    def all(self) -> Catalog:
        """Return all jobs; a reader other than the daemon gets the entries as they are at this moment."""
        return self._catalog if self._catalog is not None else Catalog(self.all_jobs().values())

    def state_dir(self, state: State) -> Path:
        return self.entries.directory(state)

    # -- entries ------------------------------------------------------------------------------------------------------

    def adding(self, job: Job) -> Steps[None]:
        """Yield the steps that add a new entry. Their rename is the commit: a crash before it leaves no job."""
        temporary = yield from durable.writing_beside(self.entries.path(job.id, job.state), job.to_json())
        temporary.rename(self.entries.path(job.id, job.state))
        yield [self.state_dir(job.state)]
        self.note(job)

    def note(self, job: Job) -> None:
        """Update the catalog, if there is one, with an entry that is already on disk."""
        if self._catalog is not None:
            self._catalog.put(job, self.entries.brief(job) if job.state.is_final else None)

    def jobs(self, state: State) -> Iterator[Job]:
        """Iterate over the jobs in a state, by number: one that is not final, where there is a catalog. An unreadable
        entry is logged and skipped."""
        if self._catalog is not None:
            yield from sorted(self._catalog.unfinished(state), key=lambda job: job.id)
            return
        yield from self.entries.of(state)

    def with_worker(self) -> Iterator[Job]:
        """Yield the jobs that have a worker: those that run, and those whose workers wait for their turns."""
        for state in (State.RUNNING, State.QUEUED):
            for job in self._catalog.unfinished(state) if self._catalog is not None else self.entries.of(state):
                if state is State.RUNNING or job.staged_at is not None:
                    yield job

    def all_jobs(self) -> Mapping[int, Listed]:
        """Return every job once, by number, also while the daemon moves entries beside this reader."""
        if self._catalog is not None:
            return {job.id: job for job in sorted(self._catalog, key=attrgetter("id"))}
        return self.entries.all()

    def job(self, job_id: int) -> Job | None:
        """Return one job, in whatever state it is; of two copies the newer. Raises OSError if the machine prevents
        reading an ended one's entry; a damaged one is set aside."""
        return self.entries.get(job_id) if self._catalog is None else self._catalog.get(job_id)

    def listed(self, job_id: int) -> Listed | None:
        """Return one job, or what is in memory of it."""
        return self.entries.get(job_id) if self._catalog is None else self._catalog.listed(job_id)

    def named(self, name: str) -> list[Listed]:
        """Return the jobs with this name, oldest first."""
        if self._catalog is not None:
            return self._catalog.named(name)
        return [job for job in self.all_jobs().values() if job.name == name]

    def update(self, job: Job, **changes: Any) -> Job:
        """Change an entry in its current state."""
        with self._changed(job, job.state, changes) as changed:
            durable.write(self.entries.path(job.id, job.state), changed.to_json())
        return changed

    def annotate(self, job: Job, **changes: Any) -> Job:
        """Change an entry but keep its modification time, because the job itself did not change."""
        path = self.entries.path(job.id, job.state)
        with self._changed(job, job.state, changes) as changed:
            temporary = durable.write_beside(path, changed.to_json())
            with contextlib.suppress(FileNotFoundError):  # a move that failed half-way may have removed it
                before = path.stat()
                os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))
            temporary.rename(path)
            durable.sync_dir(path.parent)
        return changed

    def move(self, job: Job, to: State, **changes: Any) -> Job:
        """Move an entry to another state and change it; asserts that the move is allowed."""
        assert to in MOVES[job.state], f"a job cannot move from {job.state} to {to}"
        changes.setdefault("staged_at", None)  # its turn does not come, or has come
        if to.is_final:
            changes["ends"] = (*job.ends, changes.get("outcome", job.outcome) or to.value)
        with self._changed(job, to, changes) as moved:
            if to.is_final and (self.tells_every_end or job.notify):
                durable.write(self.ended_dir / str(job.id), f"{moved.revision}\n".encode())
            old, new = self.entries.path(job.id, job.state), self.entries.path(job.id, to)
            durable.write_beside(old, moved.to_json()).rename(new)
            durable.sync_dir(new.parent)
            old.unlink(missing_ok=True)
            durable.sync_dir(old.parent)
        return moved

    @contextlib.contextmanager
    def _changed(self, job: Job, to: State, changes: Mapping[str, Any]) -> Iterator[Job]:
        """Yield the new entry, with a revision above that of every copy on disk, including those of failed changes."""
        failed = self._begun.get(job.id)
        revision = max(job.revision, failed or 0) + 1
        self._begun[job.id] = revision
        changed = dataclasses.replace(job, state=to, revision=revision, **changes)
        old = self._catalog.listed(job.id) if self._catalog is not None else None
        if to is State.RUNNING and isinstance(old, Job) and old.attempts != changed.attempts:
            keep_copy(self.files(job.id), changed)
        if self._catalog is not None:
            self._catalog.hold(job)
        yield changed
        if failed is not None:  # the failed change may have left a copy in a third directory
            for path in [self.entries.path(job.id, state) for state in State if state is not to]:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    durable.sync_dir(path.parent)
        del self._begun[job.id]
        self.note(changed)

    def is_changing(self, job_id: int) -> bool:
        """Return True if a change of an entry has failed half-way: the next one completes it."""
        return job_id in self._begun

    # -- pruned -------------------------------------------------------------------------------------------------------

    def changed_at(self, job: Listed) -> float:
        """Return when an entry last changed, in seconds since the epoch. Raises FileNotFoundError if it is gone."""
        return self.entries.path(job.id, job.state).stat().st_mtime

    def prune(self, *jobs: Listed) -> None:
        """Prune finished jobs. The rename of an entry is the commit: a crash before it changes nothing. Afterwards
        other code removes the job's directory and rows, retrying until that is done.
        """
        for job in jobs:
            assert job.state.is_final
            if job.id in self._begun and (whole := self.job(job.id)) is not None:
                self.annotate(whole)  # complete a failed change first: a copy of the entry may be in a third directory
            self.entries.path(job.id, job.state).rename(self.pruned.path(job.id, job.state))
            if self._catalog is not None:
                self._catalog.drop(job.id)
        self.finish_prune(*jobs)

    def finish_prune(self, *jobs: Listed) -> None:
        """Make the renames of pruned entries durable, and forget the marks of their ends."""
        for directory in [self.pruned.dir, *{self.state_dir(job.state) for job in jobs}]:
            durable.sync_dir(directory)
        for job in jobs:
            (self.ended_dir / str(job.id)).unlink(missing_ok=True)

    # -- pause --------------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return (self.dir / "paused").exists()

    def pause(self, paused: bool) -> None:
        """Stop starting jobs, or start them again; survives a restart."""
        path = self.dir / "paused"
        if paused:
            durable.write(path, b"")
        else:
            path.unlink(missing_ok=True)
            durable.sync_dir(self.dir)

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self, alive: Callable[[], None] = lambda: None) -> list[tuple[Path, ValueError | OSError]]:
        """Finish what a crash interrupted: unfinished moves and temporary files. Returns the entries that cannot be
        read, and why; recovery.py deals with them. `alive` is called on the way. Raises OSError for a fault of the
        machine: an entry that is passed over would be a job that is lost until the next start."""
        for place in (".", "edits", "corrupt"):
            for path in self.dir.glob(f"{place}/.*.tmp"):
                with passed_over(path):
                    path.unlink(missing_ok=True)
        self._catalog = None
        self._drop_pruned_copies()
        damaged: list[tuple[Path, ValueError | OSError]] = []

        def note(path: Path, problem: ValueError | OSError) -> None:
            if not is_of_item(problem):
                raise problem
            damaged.append((path, problem))

        self._catalog = self.entries.recovered(note, alive)
        return damaged

    def _drop_pruned_copies(self) -> None:
        """Remove entries of pruned jobs from the state directories: a power cut can leave both names of a rename."""
        pruned = {f"{number}.json" for number in self.pruned.ids()}
        for directory in map(self.state_dir, State) if pruned else ():
            for name in pruned.intersection(names_in(directory)):
                with passed_over(directory / name):
                    (directory / name).unlink()
                    durable.sync_dir(directory)

    def files(self, job_id: int) -> JobFiles:
        return self.layout.files(job_id)


def _take_lock(path: Path) -> int:
    if (fd := locks.take(path)) is not None:
        return fd
    holder = locks.holder(path)
    who = "another honed instance" if holder.is_daemon else holder.words
    raise EnvironmentInvalidError(
        f"{path.parent}: {who} uses this spool", hint="stop it, or run this one with a different --root"
    )


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; with ten thousand files, Path objects would take longer than reading them."""
    return os.listdir(directory)  # noqa: PTH208


#: Bytes read at once; most entries have less.
_ENTRY_BYTES = 65536


def _log_damaged(path: Path, problem: ValueError | OSError) -> None:
    number = path.name.partition(".")[0]
    job_id = int(number) if number.isdecimal() else None
    log.error("%s: damaged entry: %s", path, problem, extra=about(job_id, ENTRY_DAMAGED))


def read_entry(path: Path, state: State, damaged: Damaged = _log_damaged) -> Job | None:
    """Read an entry; None if it is gone, or cannot be read, which is reported to `damaged`."""
    read = _read(str(path.parent), path.name, state, damaged)
    return read[0] if read is not None else None


def _read(directory: str, name: str, state: State, damaged: Damaged) -> tuple[Job, int] | None:
    """Read an entry as `read_entry` does, with the identity of its file. Of 50,000 entries, Path objects would take a
    third of the time."""
    try:
        content, identity = twice(lambda: _content(f"{directory}/{name}"))
        job = Job.from_json(content, state)
        if not name.startswith(f"{job.id}."):
            raise ValueError(f"it has the number of job {job.id}")
    except FileNotFoundError:
        return None
    except ValueError as error:
        damaged(Path(directory, name), error)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a user made up the name
            damaged(Path(directory, name), error)
    else:
        return job, identity
    return None


def _content(path: str) -> tuple[bytes, int]:
    """Return the bytes of a file, without the buffers of a file object, and its identity."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        identity = identity_of(os.fstat(fd))
        content = os.read(fd, _ENTRY_BYTES)
        while more := os.read(fd, _ENTRY_BYTES):
            content += more
        return content, identity
    finally:
        os.close(fd)


def _read_pruned(path: Path) -> Job | None:
    try:
        return read_entry(path, State(path.name.split(".")[1]))
    except (ValueError, IndexError):
        return None
