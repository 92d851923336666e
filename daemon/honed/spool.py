"""The spool: where a job's entry lies is the state the job is in. This module alone moves entries.

    incoming/       people drop `name.yaml` (.yml .json .toml); a leading dot: not yet
    claimed/<id>/   an arrival that is being checked, under its own name
    queued/ held/ running/ succeeded/ failed/ cancelled/      one entry <id>.json per job
    rejected/       what was refused, as it was dropped, and <file>.reason
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed import access, durable
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
        for path in (self.incoming_dir, self.claimed_dir, self.rejected_dir, *map(self.state_dir, State)):
            durable.make_dir(path)
        durable.make_dir(layout.jobs_dir)
        self._lock_fd = self._take_lock() if lock else None
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
            os.close(self._lock_fd)
            self._lock_fd = None

    @property
    def root(self) -> Path:
        """The prefix of the instance whose spool this is."""
        return self._layout.root

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
        job_id = self._next_id()
        place = self.claimed_dir / str(job_id)
        place.mkdir(mode=0o700)
        try:
            durable.sync_dir(self.claimed_dir)
            arrival.rename(place / arrival.name)
        except FileNotFoundError:
            place.rmdir()
            return None
        except OSError:
            place.rmdir()
            raise
        durable.sync_dir(place)
        durable.sync_dir(self.incoming_dir)
        return Claim(job_id, place / arrival.name)

    def _next_id(self) -> int:
        """A number that was never given before and never will be again, durable before it is used."""
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
        durable.write(path, f"{job_id}\n".encode())
        return job_id

    def _max_id(self) -> int:
        numbers = [int(path.name) for path in self._layout.jobs_dir.iterdir() if path.name.isdecimal()]
        return max([*numbers, *self.all_jobs()], default=0)

    def copy(self, claim: Claim, *, max_bytes: int, is_shared: bool = False) -> Copy:
        """Read a claimed file once, into jobs/<id>/. Raises SpecError for what is not a plain file of a sane size.

        The person who dropped it may still hold it open: whatever they write from now on changes nothing.
        """
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
            durable.make_dir(directory, mode=0o1770)  # sticky: the workers leave our spec and plan in it alone
            access.open_job_dir(directory, info.st_uid, is_shared=is_shared)
        else:
            durable.make_dir(directory)
        durable.write(directory / f"spec{claim.path.suffix}", data)
        return Copy(directory / f"spec{claim.path.suffix}", info.st_uid)

    def admit(self, job: Job, claim: Claim, plan: dict[str, Any]) -> Job:
        """Accept a claimed arrival. The rename of its entry is the commit: before it, nothing happened."""
        durable.write_json(self._layout.job(job.id).plan_path, plan)
        durable.sync_dir(self._layout.jobs_dir)
        path = self._entry_path(job.id, job.state)
        durable.write(path, job.to_json())
        self._drop(claim)
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
            with contextlib.suppress(OSError):  # the next start removes what is left
                claim.path.parent.rmdir()
            shutil.rmtree(self._layout.job(claim.id).dir, ignore_errors=True)
        return target

    def accepted(self, claim: Claim) -> Job | None:
        """The job that a claimed arrival has become already: what came after its entry's rename had failed."""
        job = self.job(claim.id)
        if job is not None:
            if claim.path.exists():  # else the entry was durable before it was removed
                durable.sync_dir(self.state_dir(job.state))
            with contextlib.suppress(OSError):  # the next start removes what is left
                self._drop(claim)
        return job

    def _drop(self, claim: Claim) -> None:
        with contextlib.suppress(FileNotFoundError):
            claim.path.unlink()
            durable.sync_dir(claim.path.parent)
        with contextlib.suppress(FileNotFoundError):
            claim.path.parent.rmdir()

    def claims(self) -> list[Claim]:
        """What was claimed and has neither been accepted nor refused."""
        places = sorted(
            (p for p in self.claimed_dir.iterdir() if p.name.isdecimal() and p.is_dir()), key=lambda p: int(p.name)
        )
        return [Claim(int(place.name), path) for place in places for path in place.iterdir()]

    # -- entries ------------------------------------------------------------------------------------------------------

    def jobs(self, state: State) -> Iterator[Job]:
        """The jobs in a state, by number; an entry that cannot be read is logged and passed over."""
        for path in self._entries(state):
            if (job := _read_entry(path, state)) is not None:
                yield job

    def all_jobs(self) -> dict[int, Job]:
        """Every job once, by number, also for a reader beside whom the daemon moves entries.

        In the middle of a move an entry lies in two places: the newer one counts. And it may move behind the reader's
        back into a place already looked at: so the places are looked at twice.
        """
        found: dict[int, Job] = {}
        places = {(path, place) for _ in range(2) for place in State for path in self._entries(place)}
        for path, state in places:
            job = _read_entry(path, state)
            if job is not None and (job.id not in found or job.revision > found[job.id].revision):
                found[job.id] = job
        return dict(sorted(found.items()))

    def _entries(self, state: State) -> list[Path]:
        numbered = [path for path in self.state_dir(state).glob("*.json") if path.stem.isdecimal()]
        return sorted(numbered, key=lambda path: int(path.stem))

    def job(self, job_id: int) -> Job | None:
        """One job, wherever it lies; of two copies the newer."""
        places = [(self._entry_path(job_id, state), state) for _ in range(2) for state in State]  # as in all_jobs
        found = [job for path, state in places if (job := _read_entry(path, state)) is not None]
        return max(found, key=lambda job: job.revision, default=None)

    def update(self, job: Job, **changes: Any) -> Job:
        """Change an entry where it lies."""
        with self._changed(job, job.state, changes) as changed:
            durable.write(self._entry_path(job.id, job.state), changed.to_json())
        return changed

    def move(self, job: Job, to: State, **changes: Any) -> Job:
        """Move an entry to another state, changed on the way; asserts that there is such a move."""
        assert to in MOVES[job.state], f"no move from {job.state} to {to}"
        with self._changed(job, to, changes) as moved:
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
        yield dataclasses.replace(job, state=to, revision=revision, **changes)
        if failed is not None:  # it may have left a copy in a third place
            for path in [self._entry_path(job.id, state) for state in State if state is not to]:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    durable.sync_dir(path.parent)
        del self._begun[job.id]

    def not_in(self, states: dict[int, str]) -> Iterator[Job]:
        """The jobs that lie elsewhere than `states` say, or are unknown to them."""
        for state in State:
            for path in self._entries(state):
                if states.get(int(path.stem)) != state and (job := _read_entry(path, state)) is not None:
                    yield job

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
        for state in State:
            for path in self.state_dir(state).glob(".*.tmp"):
                path.unlink(missing_ok=True)
        for path in [*self.dir.glob(".*.tmp"), *self.rejected_dir.glob(".*.reason.tmp")]:
            path.unlink(missing_ok=True)
        self._drop_older_copies()
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
        kept = {path.stem for state in State for path in self.state_dir(state).iterdir()}
        kept |= {path.name for path in self.claimed_dir.iterdir()}
        for path in [path for path in self._layout.jobs_dir.iterdir() if path.name.isdecimal()]:
            if path.name not in kept and all(each.name.startswith(("spec.", ".spec.")) for each in path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)

    def _drop_older_copies(self) -> None:
        copies: dict[int, list[Job]] = {}
        for state in State:
            for job in self.jobs(state):
                copies.setdefault(job.id, []).append(job)
        for found in copies.values():
            newest = max(found, key=lambda job: job.revision)
            for job in found:
                if job.state != newest.state:
                    log.warning("job %d: dropped its older copy in %s", job.id, job.state)
                    self._entry_path(job.id, job.state).unlink()
                    durable.sync_dir(self.state_dir(job.state))

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


def _read_entry(path: Path, state: State) -> Job | None:
    try:
        return Job.from_json(path.read_bytes(), state)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.error("%s: damaged entry: %s", path, error, extra=about(message=ENTRY_DAMAGED))  # noqa: TRY400
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
