"""The spool: where a job's entry lies is the state the job is in. This module alone moves entries.

    incoming/       people drop `name.yaml` (.yml .json .toml); a leading dot: not yet
    claimed/<id>/   an arrival that is being checked, under its own name
    queued/ held/ running/ succeeded/ failed/ cancelled/      one entry <id>.json per job
    rejected/       what was refused, as it was dropped, and <file>.reason
    pruned/         <id>.<state>.json: the last entry of a job whose directory is being removed, or is gone
    ended/          <id>: this job's end has yet to be told, see notification.py
    seq             the last number given to an arrival
    paused          there while starting of jobs is paused
    lock            locked by the daemon that owns this spool

Each change has one commit point, one rename, and is durable before the next thing happens. A move writes the new entry
beside the old one, renames it into the new place, then removes the old: a crash between leaves two copies, of which
recovery keeps the higher revision. (A rename between directories alone would not do: on btrfs both names can survive
a power cut.) Directories are listed by path: a long-lived descriptor shows stale lists there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed import access, durable
from honed.catalog import Catalog
from honed.durable import Steps, finish
from honed.error import EnvironmentInvalidError, HonedError, SpecError
from honed.job import MOVES, Job, State
from honed.layout import JobLayout, Layout
from honed.log import about
from honed.message import ENTRY_DAMAGED

log = logging.getLogger(__name__)

SPEC_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
#: How editors and copiers name what is not finished yet; such a file is left alone until it gets its own name.
UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".filepart", ".swp", ".swx", "~")
#: `name.hold.yaml` is accepted into held/.
HOLD_SUFFIX = ".hold"
MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Claim:
    """An arrival that was taken out of incoming/ under a number of its own."""

    id: int
    path: Path  #: claimed/<id>/<name>

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_held(self) -> bool:
        return Path(self.path.stem).suffix == HOLD_SUFFIX

    @property
    def title(self) -> str:
        """The job's name where its spec gives none: the file's, without its suffixes."""
        return self.path.stem.removesuffix(HOLD_SUFFIX)


@dataclass(frozen=True)
class Copy:
    """The bytes of a claimed file, read once through a descriptor into an inode of honed's own."""

    path: Path  #: jobs/<id>/spec.<suffix>
    uid: int


class Spool:
    """One instance's spool, locked for the life of this object when `lock` is true."""

    def __init__(self, layout: Layout, *, lock: bool = True) -> None:
        self._layout = layout
        self.dir = layout.spool_dir
        self.incoming_dir = self.dir / "incoming"
        self.claimed_dir = self.dir / "claimed"
        self.rejected_dir = self.dir / "rejected"
        self.pruned_dir = self.dir / "pruned"
        self.ended_dir = self.dir / "ended"
        #: Whether somebody wants to know of every job's end, whatever its spec says.
        self.tells_every_end = False
        for path in (self.incoming_dir, self.claimed_dir, self.rejected_dir, *map(self.state_dir, State)):
            durable.make_dir(path)
        durable.make_dir(layout.jobs_dir)
        if lock:  # an older honed has not made them, and a reader may not
            durable.make_dir(self.pruned_dir)
            durable.make_dir(self.ended_dir)
        self._lock_fd = self._take_lock() if lock else None
        self._catalog: Catalog | None = None
        self._left_over: set[Path] = set()  # directories of refused arrivals that could not be removed yet
        self._begun: dict[int, int] = {}  # revisions that failed on their way to the disk, and may lie there
        #: Whether workers are another user than we, who then shares nothing by accident.
        self._has_workers_user = access.workers_user(layout.root) is not None

    def _take_lock(self) -> int:
        fd = os.open(self.dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise EnvironmentInvalidError(
                f"{self.dir}: another honed owns this spool", hint="stop it, or give this one its own --root"
            ) from None
        return fd

    def close(self) -> None:
        """Give the lock back."""
        if self._lock_fd is not None:
            self._clear_away()
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def catalog(self) -> Catalog:
        """All jobs, in memory: of the spool's owner alone, once it has recovered."""
        assert self._catalog is not None
        return self._catalog

    def all(self) -> Catalog:
        """Every job; for a reader beside the daemon, as the entries are at this moment."""
        return self._catalog if self._catalog is not None else Catalog(self.all_jobs().values())

    @property
    def root(self) -> Path:
        """The prefix of the instance whose spool this is."""
        return self._layout.root

    @property
    def layout(self) -> Layout:
        return self._layout

    def state_dir(self, state: State) -> Path:
        return self.dir / state.value

    def _entry_path(self, job_id: int, state: State) -> Path:
        return self.state_dir(state) / f"{job_id}.json"

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def arrivals(self) -> list[Path]:
        """What lies in incoming/ and is meant to be taken, in order of arrival."""
        found = []
        with os.scandir(self.incoming_dir) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(UNFINISHED_SUFFIXES):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    # The change time, since a rename sets it and leaves the others.
                    found.append((entry.stat(follow_symlinks=False).st_ctime_ns, entry.name))
        return [self.incoming_dir / name for _, name in sorted(found)]

    def claim(self, arrival: Path) -> Claim | None:
        """Take an arrival under a new number; None where it is gone. A crash leaves it in incoming/ or in claimed/.

        Raises PermissionError for a directory of somebody else's: a rename changes its `..`, which is theirs to write.
        """
        return finish(self._claiming(arrival, self._next_id()))

    def claim_all(self, arrivals: Sequence[Path]) -> list[Claim | Exception | None]:
        """As claim, many at once; what went wrong with one stands in its place. Numbers may stay unused."""
        first = self._next_id(len(arrivals)) if arrivals else 0
        return durable.finish_all([self._claiming(path, first + index) for index, path in enumerate(arrivals)])

    def _claiming(self, arrival: Path, job_id: int) -> Steps[Claim | None]:
        place = self.claimed_dir / str(job_id)
        place.mkdir(mode=0o700)
        try:
            yield [self.claimed_dir]
            arrival.rename(place / arrival.name)
        except FileNotFoundError:
            place.rmdir()
            return None
        except OSError:
            place.rmdir()
            raise
        yield [place]
        yield [self.incoming_dir]
        return Claim(job_id, place / arrival.name)

    def _next_id(self, count: int = 1) -> int:
        """The first of so many numbers that were never given before and never will be again, durable before they are
        used."""
        path = self.dir / "seq"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except ValueError:
            raise EnvironmentInvalidError(
                f"{path}: not a number",
                hint=f"write the highest job number ever used into it: at least {self._max_id()}",
            ) from None
        job_id = max(last, self._max_id() if last == 0 else 0) + 1
        durable.write(path, f"{job_id + count - 1}\n".encode())
        return job_id

    def _max_id(self) -> int:
        numbers = [int(path.name) for path in self._layout.jobs_dir.iterdir() if path.name.isdecimal()]
        numbers += [int(path.name.partition(".")[0]) for path in self._pruned_paths()]
        return max([*numbers, *self.all_jobs()], default=0)

    def copy(self, claim: Claim, *, max_bytes: int, is_shared: bool = False, admin_group: str = "") -> Copy:
        """Read a claimed file once, into jobs/<id>/. Raises SpecError for what is not a plain file of a sane size.

        The person who dropped it may still hold it open: whatever they write from now on changes nothing.
        """
        return finish(self._copying(claim, max_bytes=max_bytes, is_shared=is_shared, admin_group=admin_group))

    def copy_all(
        self, claims: Sequence[Claim], *, max_bytes: int, is_shared: bool = False, admin_group: str = ""
    ) -> list[Copy | Exception]:
        """As copy, many at once; what went wrong with one stands in its place."""
        return durable.finish_all(
            [
                self._copying(claim, max_bytes=max_bytes, is_shared=is_shared, admin_group=admin_group)
                for claim in claims
            ]
        )

    def _copying(self, claim: Claim, *, max_bytes: int, is_shared: bool, admin_group: str) -> Steps[Copy]:
        if claim.path.suffix not in SPEC_SUFFIXES:
            raise SpecError(
                f"{claim.name!r}: not a job file's name", hint="a job file ends in .yaml, .yml, .json or .toml"
            )
        if not claim.name.isprintable():
            raise SpecError(f"{claim.name!r}: a name with control characters", hint="rename the file and drop it again")
        if stat.S_ISCHR(mode := claim.path.lstat().st_mode) or stat.S_ISBLK(mode):
            # Not even opened: opening alone makes some devices act.
            raise SpecError(f"{claim.name}: a device", hint="drop the file itself")
        try:
            fd = os.open(claim.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _dropper_fault(claim, error) or error from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise SpecError(
                    f"{claim.name}: not a plain file", hint="drop the file itself, not a pipe or a directory"
                )
            if info.st_nlink != 1:
                raise SpecError(f"{claim.name}: a hard link to another file", hint="drop a copy: cp, not ln")
            data = _read_at_most(fd, max_bytes + 1)
        finally:
            os.close(fd)
        if len(data) > max_bytes:
            raise SpecError(
                f"{claim.name}: larger than {max_bytes} bytes", hint="a job file names data; it does not hold it"
            )
        directory = self._layout.job(claim.id).dir
        if self._has_workers_user:
            yield from durable.making_dir(
                directory, mode=0o1770
            )  # sticky: the workers leave our spec and plan in it alone
            administrators = access.group_id(admin_group)
            access.open_job_dir(directory, info.st_uid, is_shared=is_shared, administrators=administrators)
        else:
            yield from durable.making_dir(directory)
        yield from durable.writing(directory / f"spec{claim.path.suffix}", data)
        return Copy(directory / f"spec{claim.path.suffix}", info.st_uid)

    def admit(self, job: Job, claim: Claim, plan: dict[str, Any]) -> Job:
        """Accept a claimed arrival. The rename of its entry is the commit: before it, nothing happened."""
        return finish(self._admitting(job, claim, plan))

    def admit_all(self, accepted: Sequence[tuple[Job, Claim, dict[str, Any]]]) -> list[Job | Exception]:
        """As admit, many at once; what went wrong with one stands in its place."""
        return durable.finish_all([self._admitting(*each) for each in accepted])

    def _admitting(self, job: Job, claim: Claim, plan: dict[str, Any]) -> Steps[Job]:
        yield from durable.writing(self._layout.job(job.id).plan_path, durable.as_json(plan))
        yield [self._layout.jobs_dir]
        temporary = yield from durable.writing_beside(self._entry_path(job.id, job.state), job.to_json())
        temporary.rename(self._entry_path(job.id, job.state))
        yield [self.state_dir(job.state)]
        if self._catalog is not None:
            self._catalog.put(job)
        with contextlib.suppress(FileNotFoundError):  # what a crash leaves of it is dropped by recovery
            claim.path.unlink()
            claim.path.parent.rmdir()
        return job

    def reject(self, claim: Claim, reason: str) -> Path:
        """Refuse a claimed arrival: its file goes to rejected/ as it was dropped, the reason beside it (first)."""
        target = self.rejected_dir / claim.name
        if os.path.lexists(target) or len(os.fsencode(claim.name)) + len(".reason") + len("..tmp") > MAX_NAME_BYTES:
            stem = os.fsdecode(os.fsencode(claim.path.stem)[:180]).encode(errors="replace").decode()
            target = self.rejected_dir / f"{stem}.{claim.id}{claim.path.suffix[:16]}"
        reason_path = target.with_name(target.name + ".reason")
        durable.write(reason_path, reason.encode(errors="replace"))
        if self._has_workers_user:
            access.let_read(reason_path, claim.path.lstat().st_uid)
        claim.path.rename(target)
        try:
            durable.sync_dir(self.rejected_dir)
            durable.sync_dir(claim.path.parent)
        finally:
            self._left_over |= {claim.path.parent, self._layout.job(claim.id).dir}
            self._clear_away()
        return target

    def _clear_away(self) -> None:
        """Remove the directories of refused arrivals; those that stay are tried again with the next, and at the end."""
        for path in list(self._left_over):
            if path.parent == self.claimed_dir:
                with contextlib.suppress(OSError):
                    path.rmdir()
            else:
                shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                self._left_over.discard(path)

    def accepted(self, claim: Claim) -> Job | None:
        """The job that a claimed arrival has become already: what came after its entry's rename had failed."""
        job = self._job_on_disk(claim.id)
        if job is not None:
            if claim.path.exists():  # else the entry was durable before it was removed
                durable.sync_dir(self.state_dir(job.state))
            with contextlib.suppress(OSError):  # the next start removes what is left
                self._drop(claim)
            if self._catalog is not None:
                self._catalog.put(job)
        return job

    def _drop(self, claim: Claim) -> None:
        with contextlib.suppress(FileNotFoundError):
            claim.path.unlink()
            durable.sync_dir(claim.path.parent)
        with contextlib.suppress(FileNotFoundError):
            claim.path.parent.rmdir()

    def claims(self, *, but: Container[int] = (), limit: int | None = None) -> list[Claim]:
        """What was claimed and has neither been accepted nor refused, `but` for these numbers; at most so many."""
        found: list[Claim] = []
        for number in sorted(int(name) for name in _names_in(self.claimed_dir) if name.isdecimal()):
            place = self.claimed_dir / str(number)
            if limit is not None and len(found) >= limit:
                break
            if number not in but and place.is_dir():
                found += [Claim(number, path) for path in place.iterdir()]
        return found

    # -- entries ------------------------------------------------------------------------------------------------------

    def jobs(self, state: State) -> Iterator[Job]:
        """The jobs in a state, by number; an entry that cannot be read is logged and passed over."""
        if self._catalog is not None:
            yield from sorted(self._catalog.of_state(state), key=lambda job: job.id)
            return
        for path in self._entries(state):
            if (job := read_entry(path, state)) is not None:
                yield job

    def all_jobs(self) -> dict[int, Job]:
        """Every job once, by number, also for a reader beside whom the daemon moves entries.

        In the middle of a move an entry lies in two places: the newer one counts. And it may move behind the reader's
        back into a place already looked at: so the places are looked at twice.
        """
        if self._catalog is not None:
            return {job.id: job for job in sorted(self._catalog, key=lambda job: job.id)}
        found: dict[int, Job] = {}
        places = {(path, place) for _ in range(2) for place in State for path in self._entries(place)}
        for path, state in places:
            job = read_entry(path, state)
            if job is not None and (job.id not in found or job.revision > found[job.id].revision):
                found[job.id] = job
        return dict(sorted(found.items()))

    def ids(self) -> set[int]:
        """The numbers of all entries, without a look into them."""
        return {int(path.stem) for _ in range(2) for state in State for path in self._entries(state)}

    def _entries(self, state: State) -> list[Path]:
        numbered = [path for path in self.state_dir(state).glob("*.json") if path.stem.isdecimal()]
        return sorted(numbered, key=lambda path: int(path.stem))

    def job(self, job_id: int) -> Job | None:
        """One job, wherever it lies; of two copies the newer."""
        if self._catalog is not None:
            return self._catalog.get(job_id)
        return self._job_on_disk(job_id)

    def _job_on_disk(self, job_id: int) -> Job | None:
        places = [(self._entry_path(job_id, state), state) for _ in range(2) for state in State]  # as in all_jobs
        found = [job for path, state in places if (job := read_entry(path, state)) is not None]
        return max(found, key=lambda job: job.revision, default=None)

    def named(self, name: str) -> list[Job]:
        """The jobs of that name, oldest first."""
        if self._catalog is not None:
            return self._catalog.named(name)
        return [job for job in self.all_jobs().values() if job.name == name]

    def update(self, job: Job, **changes: Any) -> Job:
        """Change an entry where it lies."""
        with self._changed(job, job.state, changes) as changed:
            durable.write(self._entry_path(job.id, job.state), changed.to_json())
        return changed

    def annotate(self, job: Job, **changes: Any) -> Job:
        """As update, and the entry stays as old as it was: nothing has happened to the job."""
        path = self._entry_path(job.id, job.state)
        with self._changed(job, job.state, changes) as changed:
            temporary = durable.write_beside(path, changed.to_json())
            with contextlib.suppress(FileNotFoundError):  # a move that failed half-way may have taken it away
                before = path.stat()
                os.utime(temporary, ns=(before.st_atime_ns, before.st_mtime_ns))
            temporary.rename(path)
            durable.sync_dir(path.parent)
        return changed

    def move(self, job: Job, to: State, **changes: Any) -> Job:
        """Move an entry to another state, changed on the way; asserts that there is such a move."""
        assert to in MOVES[job.state], f"no move from {job.state} to {to}"
        with self._changed(job, to, changes) as moved:
            if to.is_final and (self.tells_every_end or job.notify):
                durable.write(self.ended_dir / str(job.id), f"{moved.revision}\n".encode())
            old, new = self._entry_path(job.id, job.state), self._entry_path(job.id, to)
            durable.write_beside(old, moved.to_json()).rename(new)
            durable.sync_dir(new.parent)
            old.unlink(missing_ok=True)
            durable.sync_dir(old.parent)
        return moved

    @contextlib.contextmanager
    def _changed(self, job: Job, to: State, changes: dict[str, Any]) -> Iterator[Job]:
        """The entry as it is to be: newer than all that may lie on the disk, of changes that failed half-way, too."""
        failed = self._begun.get(job.id)
        revision = max(job.revision, failed or 0) + 1
        self._begun[job.id] = revision
        changed = dataclasses.replace(job, state=to, revision=revision, **changes)
        yield changed
        if failed is not None:  # it may have left a copy in a third place
            for path in [self._entry_path(job.id, state) for state in State if state is not to]:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    durable.sync_dir(path.parent)
        del self._begun[job.id]
        if self._catalog is not None:
            self._catalog.put(changed)

    def not_in(self, states: dict[int, str]) -> Iterator[Job]:
        """The jobs that lie elsewhere than `states` say, or are unknown to them."""
        for state in State:
            for job in self.jobs(state):
                if states.get(job.id) != state:
                    yield job

    # -- pruned -------------------------------------------------------------------------------------------------------

    def changed_at(self, job: Job) -> float:
        """Seconds since the epoch: since when an entry is as it is. Raises FileNotFoundError where it is not there."""
        return self._entry_path(job.id, job.state).stat().st_mtime

    def prune(self, *jobs: Job) -> None:
        """Give finished jobs up. The rename of an entry is the commit: before it, nothing happened; after it, the job's
        directory and its rows are removed by somebody, however often that has to be begun."""
        for job in jobs:
            assert job.state.is_final
            if job.id in self._begun:  # first what failed half-way: a copy of it may lie in a third place
                self.annotate(job)
            self._entry_path(job.id, job.state).rename(self.pruned_dir / f"{job.id}.{job.state}.json")
            if self._catalog is not None:
                self._catalog.drop(job.id)
        for directory in [self.pruned_dir, *{self.state_dir(job.state) for job in jobs}]:
            durable.sync_dir(directory)
        for job in jobs:
            (self.ended_dir / str(job.id)).unlink(missing_ok=True)

    def _pruned_paths(self) -> list[Path]:
        if not self.pruned_dir.is_dir():
            return []
        return [path for path in self.pruned_dir.iterdir() if path.name.partition(".")[0].isdecimal()]

    def pruned_ids(self) -> set[int]:
        """The jobs that were pruned, as far as is remembered."""
        return {int(path.name.partition(".")[0]) for path in self._pruned_paths()}

    def _pruned_places(self, job_id: int) -> list[Path]:
        return [self.pruned_dir / f"{job_id}.{state}.json" for state in State if state.is_final]

    def is_pruned(self, job_id: int) -> bool:
        return any(path.exists() for path in self._pruned_places(job_id))

    def pruned(self, reference: int | str) -> Job | None:
        """The last entry of a job that was pruned, by its number, or the newest of that name."""
        is_number = str(reference).isdecimal()
        paths = self._pruned_places(int(reference)) if is_number else self._pruned_paths()
        found = [job for path in paths if (job := _read_pruned(path)) is not None]
        return max((job for job in found if reference in {job.id, job.name, str(job.id)}),
                   key=lambda job: job.id, default=None)  # fmt: skip

    def forget_pruned(self, job_ids: set[int]) -> None:
        """Let go of the last entries of jobs of which nothing is left."""
        for path in self._pruned_paths():
            if int(path.name.partition(".")[0]) in job_ids:
                path.unlink(missing_ok=True)

    # -- pause --------------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return (self.dir / "paused").exists()

    def pause(self, paused: bool) -> None:
        """Start no more jobs, or start them again; survives a restart."""
        path = self.dir / "paused"
        if paused:
            durable.write(path, b"")
        else:
            path.unlink(missing_ok=True)
            durable.sync_dir(self.dir)

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finish what a crash cut short: half moves, half claims, hidden files of writers that died."""
        for path in [*self.dir.glob(".*.tmp"), *self.rejected_dir.glob(".*.reason.tmp")]:
            path.unlink(missing_ok=True)
        self._catalog = None
        self._drop_pruned_copies()
        self._catalog = Catalog(self._newest_copies())
        for place in list(self.claimed_dir.iterdir()):
            if not place.name.isdecimal() or not place.is_dir():
                log.warning("%s: not honed's; left alone", place)
                continue
            names = list(place.iterdir())
            if not names:
                place.rmdir()
            for path in names:
                self._recover_claim(Claim(int(place.name), path))
        self._drop_refused()
        self._next_id_is_readable()

    def _drop_refused(self) -> None:
        """Remove what a crash has left of the directories of arrivals that were refused: nothing but the spec."""
        kept = {name.partition(".")[0] for state in State for name in _names_in(self.state_dir(state))}
        kept |= {*_names_in(self.claimed_dir), *map(str, self.pruned_ids())}
        for name in _names_in(self._layout.jobs_dir):
            path = self._layout.jobs_dir / name
            if (
                name.isdecimal()
                and name not in kept
                and all(each.name.startswith(("spec.", ".spec.")) for each in path.iterdir())
            ):
                shutil.rmtree(path, ignore_errors=True)

    def _drop_pruned_copies(self) -> None:
        """A rename between directories can leave both names after a power cut: what is pruned is pruned."""
        pruned = {f"{number}.json" for number in self.pruned_ids()}
        for directory in map(self.state_dir, State) if pruned else ():
            for name in pruned.intersection(_names_in(directory)):
                (directory / name).unlink()
                durable.sync_dir(directory)

    def _newest_copies(self) -> Iterable[Job]:
        """Each job once; of two copies, which a move leaves that was cut short, the older is removed."""
        newest: dict[int, Job] = {}
        for state in State:
            for job in self._entries_of(state):
                other = newest.get(job.id)
                newest[job.id] = job if other is None or job.revision > other.revision else other
                if other is not None:
                    older = other if newest[job.id] is job else job
                    log.warning("job %d: dropped its older copy in %s", older.id, older.state)
                    self._entry_path(older.id, older.state).unlink()
                    durable.sync_dir(self.state_dir(older.state))
        return newest.values()

    def _entries_of(self, state: State) -> Iterator[Job]:
        """What lies in a state's directory; hidden files of writers that died are removed."""
        for name in _names_in(self.state_dir(state)):
            if name.startswith(".") and name.endswith(".tmp"):
                (self.state_dir(state) / name).unlink(missing_ok=True)
            elif name.endswith(".json") and name[:-5].isdecimal():
                job = read_entry(self.state_dir(state) / name, state)
                if job is not None:
                    yield job

    def _recover_claim(self, claim: Claim) -> None:
        # A rename between directories can leave both names after a power cut; one inode is one arrival.
        arrival = self.incoming_dir / claim.name
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(arrival.lstat(), claim.path.lstat()) and not claim.path.is_dir():
                arrival.unlink()
                durable.sync_dir(self.incoming_dir)
        if self.job(claim.id) is not None:  # accepted; the crash came before the claimed file was dropped
            self._drop(claim)

    def _next_id_is_readable(self) -> None:
        path = self.dir / "seq"
        if not path.exists():
            return
        text = path.read_text(errors="replace")
        if not text.strip().isdecimal():
            raise EnvironmentInvalidError(
                f"{path}: not a number",
                hint=f"write the highest job number ever used into it: at least {self._max_id()}",
            )

    def job_layout(self, job_id: int) -> JobLayout:
        return self._layout.job(job_id)


def _names_in(directory: Path) -> list[str]:
    """Ten thousand Paths would take longer than to read what they name."""
    return os.listdir(directory)  # noqa: PTH208


def read_entry(path: Path, state: State) -> Job | None:
    """None where it is gone, or damaged, which is logged."""
    try:
        return Job.from_json(path.read_bytes(), state)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # who asked for it made it up
            return None
        log.error("%s: damaged entry: %s", path, error, extra=about(message=ENTRY_DAMAGED))  # noqa: TRY400
        return None


def _read_pruned(path: Path) -> Job | None:
    try:
        return read_entry(path, State(path.name.split(".")[1]))
    except (ValueError, IndexError):
        return None


def refusal(name: str, error: HonedError, *, when: str) -> str:
    """What stands in `<file>.reason`: why, for a person."""
    lines = [f"{name} was refused at {when}.", "", f"{error.code}:"]
    lines += [f"  {line}" for line in error.message.splitlines()]
    if error.hint:
        lines += ["", f"What to do: {error.hint}"]
    return "\n".join([*lines, "", "Correct the file and drop it into incoming/ again.", ""])


def _dropper_fault(claim: Claim, error: OSError) -> SpecError | None:
    """What the dropper can mend; None where the machine is at fault, and the arrival waits for a better moment."""
    match error.errno:
        case errno.ELOOP:
            return SpecError(f"{claim.name}: a symbolic link", hint="drop the file itself")
        case errno.EACCES | errno.EPERM:
            return SpecError(f"{claim.name}: honed may not read it", hint="chmod it so that honed can: g+r or o+r")
        case errno.ENXIO:
            return SpecError(f"{claim.name}: not a plain file", hint="drop the file itself, not a socket")
        case _:
            return None


def _read_at_most(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := os.read(fd, size - len(data))):
        data += chunk
    return data


def drop(incoming_dir: Path, source: Path, *, hold: bool = False) -> str:
    """Put a copy of a job file into incoming/, whole from the first moment. Returns the name that it got there."""
    data, ending = source.read_bytes(), f"{HOLD_SUFFIX if hold else ''}{source.suffix}"
    number = 1
    while True:
        name = f"{source.stem}{'' if number == 1 else f'-{number}'}{ending}"
        # The name is reserved by the hidden file's own: of two that drop at once, each gets another number.
        temporary = incoming_dir / f".{name}.dropping"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1
            continue
        try:
            if not os.path.lexists(incoming_dir / name):
                with os.fdopen(fd, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(fd)
                temporary.rename(incoming_dir / name)
                with contextlib.suppress(PermissionError):  # a drop box cannot be opened; honed syncs it when it claims
                    durable.sync_dir(incoming_dir)
                return name
            temporary.unlink()
            number += 1
        finally:
            os.close(fd)
