"""Arrivals: job files on their way from incoming/ (or the control socket) to a job's entry or to rejected/.

    incoming/       people drop `name.yaml` (.yml .json .toml) here; a leading dot means "not finished yet"
    claimed/<id>/   an arrival that is being checked, under its own name
    claimed/<id>.<uid>/    the same for a file that user <uid> submitted over the control socket
    rejected/       rejected files and the reasons; see refusals.py
    seq             the last number given to an arrival

The rename into claimed/ takes a file from the person who dropped it; the rename of its entry (`Spool.adding`) makes it
a job. A dropped file belongs to its owner. A file that came over the control socket is owned by honed, so the name of
its directory records the user: no crash can separate the two.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.job import refusals
from honed.job.damaged import passed_over
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.job.refusals import MAX_NAME_BYTES, shown
from honed.job.spool import Spool, names_in
from honed.job.submitted import Submitted
from honed.system import access, durable, rename, untrusted
from honed.system.durable import Steps, finish
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, SpecError
from honed.system.holder import Holders
from honed.system.layout import SPEC_SUFFIXES
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: Suffixes of files that editors and copy tools have not finished; such a file is left alone until it is renamed.
UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".filepart", ".swp", ".swx", "~")
#: `name.hold.yaml` is accepted into held/.
HOLD_SUFFIX = ".hold"
#: A claim's directory: its number and, for files from the control socket, the user who submitted it.
PLACE = re.compile(r"([0-9]+)(?:\.([0-9]+))?")


#: Names that are listed at once.
MAX_NAMES = 500


@dataclass(frozen=True)
class Dropped:
    """A file in incoming/ that is ready to be claimed."""

    path: PersonPath
    uid: int  #: its owner; or whoever that is a subordinate user of, or UNKNOWN (holder.py): their files are as one's
    inode: int
    changed_ns: int  #: its change time


@dataclass(frozen=True)
class Claim:
    """An arrival that was moved out of incoming/ under its own number."""

    id: int
    path: PersonPath  #: claimed/<id>/<name>, or claimed/<id>.<uid>/<name>
    submitter: int | None = None  #: the user who submitted it over the control socket; None if it was dropped
    #: seconds since the epoch; for one that an earlier daemon claimed, when it was claimed
    arrived_at: float = field(default=0.0, compare=False)

    @property
    def uid(self) -> int:
        """The user who submitted it."""
        return untrusted.info(self.path).st_uid if self.submitter is None else self.submitter

    @property
    def place(self) -> Path:
        """The directory that it is in, where only honed can enter."""
        return self.path.root

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_held(self) -> bool:
        return Path(self.path.stem).suffix == HOLD_SUFFIX

    @property
    def title(self) -> str:
        """The job's default name: the file's name without its suffixes."""
        return self.path.stem.removesuffix(HOLD_SUFFIX)


@dataclass(frozen=True)
class Copy:
    """The content of a claimed file, read once through a descriptor and written to a new file owned by honed."""

    path: PersonPath  #: jobs/<id>/spec.<suffix>
    uid: int


class Numbers:
    """Numbers of arrivals and jobs. The file `seq` holds the last one given."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._path = spool.dir / "seq"

    def reserve(self, count: int = 1) -> int:
        """Reserve `count` numbers that were never used before and return the first. Durable on return."""
        try:
            last = int(durable.read(self._path))
        except FileNotFoundError:
            last = 0
        except ValueError:
            raise self._damage() from None
        job_id = max(last, self._max_id() if last == 0 else 0) + 1
        durable.write(self._path, f"{job_id + count - 1}\n".encode())
        return job_id

    def check(self) -> None:
        """Raise EnvironmentInvalidError if the file holds no number."""
        try:
            is_whole = durable.read(self._path).strip().isdigit()
        except FileNotFoundError:
            return
        except OSError as error:
            if durable.machine_fault(error):
                raise
            is_whole = False
        if not is_whole:
            raise self._damage()

    def _damage(self) -> EnvironmentInvalidError:
        return EnvironmentInvalidError(
            f"{self._path}: not a number",
            hint=f"write the highest job number that was ever used into it: at least {self._max_id()}",
        )

    def _max_id(self) -> int:
        numbers = [int(path.name) for path in self._spool.layout.jobs_dir.iterdir() if path.name.isdecimal()]
        return max([*numbers, *self._spool.pruned.ids(), *self._spool.all_jobs()], default=0)


class _Leftovers:
    """Directories of rejected arrivals that could not be removed yet."""

    def __init__(self, claimed_dir: Path) -> None:
        self._claimed_dir = claimed_dir
        self._paths: set[Path] = set()

    def remove(self, *paths: Path) -> None:
        """Remove these and earlier directories; failures are retried at the next call."""
        self._paths |= set(paths)
        for path in list(self._paths):
            if path.parent == self._claimed_dir:
                with contextlib.suppress(OSError):
                    path.rmdir()
            else:
                with contextlib.suppress(OSError):
                    durable.remove_flat(path)
            if not os.path.lexists(path):
                self._paths.discard(path)


class Arrivals:
    """All arrivals of one spool; used only by the spool's owner."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._numbers = Numbers(spool)
        self._leftovers = _Leftovers(spool.claimed_dir)
        self._damaged: set[int] = set()  # claims that could not be recovered: the next start tries again
        self.submitted = Submitted(lambda: _places(spool.claimed_dir))
        #: True if workers run as another user; files must then be shared with that user explicitly.
        self._has_workers_user = access.has_workers_user(spool.layout.root)
        self._holders = Holders()

    def close(self) -> None:
        """Try once more to remove the directories of rejected arrivals. Call it before the spool is closed."""
        self._leftovers.remove()

    @property
    def incoming(self) -> PersonPath:
        return self._spool.incoming

    def listed(self) -> dict[str, int]:
        """Return the names of the files in incoming/ that are ready to be claimed, each with its inode. It asks for
        nothing but the listing: ten thousand names take some milliseconds."""
        with os.scandir(self._spool.incoming_dir) as entries:
            return {entry.name: entry.inode() for entry in entries if _is_finished(entry.name)}

    def listing(self) -> Iterator[dict[str, int]]:
        """Yield the names of `listed`, a few hundred at a time."""
        with os.scandir(self._spool.incoming_dir) as entries:
            while some := list(itertools.islice(entries, MAX_NAMES)):
                yield {entry.name: entry.inode() for entry in some if _is_finished(entry.name)}

    def dropped(self) -> list[Dropped]:
        """Return the files in incoming/ that are ready to be claimed, in order of arrival."""
        return self.dropped_of(self.listed())

    def dropped_of(self, names: Iterable[str]) -> list[Dropped]:
        """Return those of these files in incoming/ that are ready to be claimed, in order of arrival."""
        dropped = []
        for name, info in untrusted.infos(self._spool.incoming, filter(_is_finished, names)):
            # The change time, because a rename updates it and leaves the other times.
            uid = self._holders.of(info.st_uid) if self._has_workers_user else info.st_uid
            dropped.append((info.st_ctime_ns, name, uid, info.st_ino))
        return [Dropped(self._spool.incoming / name, uid, ino, changed) for changed, name, uid, ino in sorted(dropped)]

    def claim(self, arrival: PersonPath) -> Claim | None:
        """Claim an arrival under a new number; None if it is gone. A crash leaves it in incoming/ or in claimed/.

        Raises IsADirectoryError for a directory, which stays where it is: it may hold somebody's work.
        """
        return finish(self._claiming(arrival, self._numbers.reserve()))

    def claim_all(self, arrivals: Sequence[PersonPath]) -> list[Claim | Exception | None]:
        """Claim many arrivals at once; a failed one is represented by its exception. Numbers may stay unused."""
        first = self._numbers.reserve(len(arrivals)) if arrivals else 0
        return durable.finish_all([self._claiming(path, first + index) for index, path in enumerate(arrivals)])

    def _claiming(self, arrival: PersonPath, job_id: int) -> Steps[Claim | None]:
        place = self._spool.claimed_dir / str(job_id)
        place.mkdir(mode=0o700)
        try:
            yield [self._spool.claimed_dir]
            info = untrusted.info(arrival)
            if stat.S_ISDIR(info.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(arrival))
            arrived_at = info.st_ctime  # before the rename, which changes it
            untrusted.rename(arrival, PersonPath(place, (arrival.name,)))
        except FileNotFoundError:
            place.rmdir()
            return None
        except OSError:
            place.rmdir()
            raise
        yield [place]
        yield [self._spool.incoming_dir]
        return Claim(job_id, PersonPath(place, (arrival.name,)), arrived_at=arrived_at)

    def submit(self, name: str, data: bytes, uid: int) -> Claim:
        """Store a submitted job file under a new number. The rename to its final name is the commit: a crash before it
        leaves nothing that counts. Raises SpecError if the name is not a valid job file name, and NotPermittedError
        for a user whom the machine does not know: every one of them would have room for as many files as a person.
        """
        _check_name(name)
        if self._has_workers_user:
            _require_known(name, uid)
        if "/" in name or name.startswith(".") or len(os.fsencode(name)) > MAX_NAME_BYTES - len("..tmp"):
            raise SpecError(f"{name!r}: not a valid file name, too long, or hidden", hint="rename the file")
        job_id = self._numbers.reserve()
        place = self._spool.claimed_dir / f"{job_id}.{uid}"
        place.mkdir(mode=0o700)
        try:
            durable.sync_dir(self._spool.claimed_dir)
            durable.write(place / name, data, mode=0o600)
        except BaseException:
            with contextlib.suppress(OSError):
                durable.remove_flat(place)  # the submitter gets an error: nothing was accepted
            raise
        self.submitted.add(uid, job_id, len(data))
        return Claim(job_id, PersonPath(place, (name,)), uid, time.time())

    def num_queued(self, uid: int) -> int:
        """Return the number of one user's queued jobs."""
        return self._spool.catalog.num_queued(uid)

    def copy(self, claim: Claim, **rules: Any) -> Copy:
        """Copy a claimed file into jobs/<id>/ by the rules of `copy_all`. Raises the exception of one that failed."""
        (copied,) = self.copy_all([claim], **rules)
        if isinstance(copied, Exception):
            raise copied
        return copied

    def copy_all(
        self,
        claims: Sequence[Claim],
        *,
        max_bytes: int,
        is_shared: bool = False,
        admin_group: str = "",
        drops: bool = True,
    ) -> list[Copy | Exception]:
        """Copy many claimed files into jobs/<id>/, reading each once; one that failed is represented by its exception.

        That is a SpecError if it is not a regular file or is too large, and for a dropped file if `drops` is false. The
        person who dropped a file may still hold it open: later writes to it change nothing.
        """
        return durable.finish_all(
            [
                self._copying(claim, max_bytes=max_bytes, is_shared=is_shared, admin_group=admin_group, drops=drops)
                for claim in claims
            ]
        )

    def _copying(self, claim: Claim, *, max_bytes: int, is_shared: bool, admin_group: str, drops: bool) -> Steps[Copy]:
        if claim.submitter is None and not drops:
            raise SpecError(
                f"{shown(claim.name)}: files in incoming/ are not accepted (policy.arrivals), because honed cannot "
                "know where a file came from, and so who submitted it",
                hint="honectl submit FILE",
            )
        data, uid = _read_claimed(claim, max_bytes, has_workers_user=self._has_workers_user)
        files = self._spool.files(claim.id)
        directory = files.place
        if self._has_workers_user:
            yield from durable.making_dir(
                directory, mode=0o1770
            )  # sticky: workers cannot replace our spec and plan in it
            administrators = access.group_id(admin_group)
            access.open_job_dir(directory, uid, is_shared=is_shared, administrators=administrators)
        else:
            yield from durable.making_dir(directory)
        yield from untrusted.writing(files.dir / f"spec{claim.path.suffix}", data)
        return Copy(files.dir / f"spec{claim.path.suffix}", uid)

    def admit(self, job: Job, claim: Claim, plan: PlanFile) -> Job:
        """Accept a claimed arrival. The rename of its entry is the commit: a crash before it leaves no job."""
        return finish(self._admitting(job, claim, plan))

    def admit_all(self, accepted: Sequence[tuple[Job, Claim, PlanFile]]) -> list[Job | Exception]:
        """Accept many claimed arrivals at once; an arrival that failed is represented by its exception."""
        return durable.finish_all([self._admitting(*item) for item in accepted])

    def _admitting(self, job: Job, claim: Claim, plan: PlanFile) -> Steps[Job]:
        yield from untrusted.writing(self._spool.files(job.id).plan_path, plan.to_json())
        yield [self._spool.layout.jobs_dir]
        if self._has_workers_user:
            access.give_job_dir(self._spool.files(job.id).place)
        yield from self._spool.adding(job)
        with contextlib.suppress(FileNotFoundError):  # recovery removes what a crash leaves here
            untrusted.remove(claim.path)
            claim.place.rmdir()
        return job

    def reject(self, claim: Claim, error: HonedError, *, when: str) -> PersonPath:
        """Reject a claimed arrival: write its reason, then move the file unchanged to rejected/; what is not a regular
        file is removed. Returns the reason's path."""
        directory = self._spool.rejected
        what = refusals.why_not_kept(claim.path)
        kept = refusals.place_for(directory, claim.name, claim.id)
        aside = claim.place.with_name(f".{claim.id}")
        fate = f"The file is kept as rejected/{kept.name}."
        if what:
            fate = f"It is kept as claimed/{aside.name}, " if what == "a directory" else "It is not kept, "
            fate += f"since it is {what}."
        is_submission, uid = claim.submitter is not None, claim.uid
        text = refusals.text_of(claim.name, claim.id, uid, error, when=when, fate=fate, is_submission=is_submission)
        if (earlier := refusals.find(directory, claim.name, claim.id)) is not None:  # an error came before the move
            untrusted.remove(earlier.path)
        reason_path = refusals.make(directory, claim.name, claim.id, uid, text)
        if what == "a directory":  # it may hold somebody's work, and only its owner may be able to move it
            claim.place.rename(aside)
            log.warning("%s: a directory of the user %d, which was dropped; remove it as root", aside, uid)
        elif what:
            untrusted.remove(claim.path)
        else:
            if self._has_workers_user and is_submission:
                refusals.let_read(claim.path, uid)
            untrusted.rename_to_free(claim.path, kept)
        try:
            untrusted.sync_dir(directory)
            if claim.place.exists():
                durable.sync_dir(claim.place)
        finally:
            self._leftovers.remove(claim.place, self._spool.files(claim.id).place)
        return reason_path

    def accepted(self, claim: Claim) -> Job | None:
        """Return the job that a claimed arrival became, if its entry was renamed before a later step failed. Raises
        OSError where its entry cannot be read: the arrival would be accepted a second time."""
        if (known := self._spool.job(claim.id)) is not None:  # it may have begun since, or a move of it have failed
            job: Job | None = known
        elif (job := self._spool.entries.get(claim.id)) is None:
            _require_no_entry(self._spool, claim.id)
        if job is not None:
            if untrusted.exists(claim.path):  # otherwise the entry was already durable when the file was removed
                durable.sync_dir(self._spool.state_dir(job.state))
            with contextlib.suppress(OSError):  # the next start removes what is left
                _drop(claim)
            if known is None:
                self._spool.note(job)
        return job

    def claims(self, *, but: Container[int] = (), limit: int | None = None) -> list[Claim]:
        """Return up to `limit` arrivals that are claimed but neither accepted nor rejected, skipping those in `but`."""
        claims: list[Claim] = []
        for number, submitter, place in sorted(_places(self._spool.claimed_dir), key=lambda item: item[0]):
            if limit is not None and len(claims) >= limit:
                break
            if number not in but and number not in self._damaged and place.is_dir():
                names = [name for name in names_in(place) if not name.startswith(".")]
                claims += [
                    Claim(number, PersonPath(place, (name,)), submitter, place.stat().st_mtime) for name in names
                ]
        return claims

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finish what a crash interrupted: unfinished claims and rejections. The spool must have recovered before."""
        self._damaged = _recover_claims(self._spool)
        _drop_refused(self._spool)
        self._numbers.check()


def _recover_claims(spool: Spool) -> set[int]:
    """Finish the claims and rejections that a crash interrupted. Returns the numbers of those that are damaged."""
    for name in names_in(spool.rejected_dir):
        if name.startswith(".") and name.endswith(f"{refusals.SUFFIX}.tmp"):
            with passed_over(spool.rejected_dir / name):
                untrusted.remove(spool.rejected / name)
    for name in names_in(spool.claimed_dir):
        if not PLACE.fullmatch(name) or not (spool.claimed_dir / name).is_dir():
            log.warning("%s: not created by honed; left alone", spool.claimed_dir / name)
    damaged = set()
    for number, submitter, place in _places(spool.claimed_dir):
        damaged.add(number)
        with passed_over(place):
            if place.is_dir():
                _recover_place(spool, number, submitter, place)
            damaged.remove(number)
    return damaged


def _recover_place(spool: Spool, number: int, submitter: int | None, place: Path) -> None:
    for path in place.glob(".*.tmp"):  # its submitter never got a success reply
        path.unlink()
    names = names_in(place)
    if not names:
        place.rmdir()
    for name in names:
        _recover_claim(spool, Claim(number, PersonPath(place, (name,)), submitter))


def _require_no_entry(spool: Spool, number: int) -> None:
    """Raise OSError if a job has an entry, which was not readable then."""
    for state in State:
        with contextlib.suppress(FileNotFoundError):
            (path := spool.entries.path(number, state)).lstat()
            raise OSError(errno.EIO, "an entry that cannot be read", str(path))


def _places(claimed_dir: Path) -> Iterator[tuple[int, int | None, Path]]:
    for name in names_in(claimed_dir):
        if match := PLACE.fullmatch(name):
            yield int(match[1]), int(match[2]) if match[2] else None, claimed_dir / name


def _drop(claim: Claim) -> None:
    with contextlib.suppress(FileNotFoundError):
        untrusted.remove(claim.path)
        durable.sync_dir(claim.place)
    with contextlib.suppress(FileNotFoundError):
        claim.place.rmdir()


def _recover_claim(spool: Spool, claim: Claim) -> None:
    # After a power cut both names of a rename between directories can exist; the same inode is the same arrival.
    arrival = spool.incoming / claim.name
    if _are_same(arrival, claim.path) and not untrusted.is_dir(claim.path):
        untrusted.remove(arrival)
        durable.sync_dir(spool.incoming_dir)
    reason = refusals.find(spool.rejected, claim.name, claim.id)
    kept = reason.kept_path if reason is not None else None
    if kept is not None and _are_same(kept, claim.path):
        # the same for a rejection
        durable.sync_dir(spool.rejected_dir)
        _drop(claim)
    elif reason is not None:  # it was not rejected yet, and may be accepted now
        untrusted.remove(reason.path)
        durable.sync_dir(spool.rejected_dir)
    if spool.listed(claim.id) is not None:  # accepted; the crash came before the claimed file was removed
        _drop(claim)


def _are_same(one: PersonPath, other: PersonPath) -> bool:
    """Return True if two names are of one file; False if one is gone."""
    infos = [info for path in (one, other) for _, info in untrusted.infos(path.parent, [path.name])]
    return len(infos) == 2 and os.path.samestat(*infos)


def _drop_refused(spool: Spool) -> None:
    """Remove directories of rejected arrivals that a crash left behind: those that hold only the spec."""
    kept = {name.partition(".")[0] for state in State for name in names_in(spool.state_dir(state))}
    kept |= {str(number) for number, _, _ in _places(spool.claimed_dir)} | set(map(str, spool.pruned.ids()))
    jobs_dir = spool.layout.jobs_dir
    for name in set(names_in(jobs_dir)) - kept:
        with contextlib.suppress(OSError):
            if name.isdecimal() and all(item.startswith(("spec.", ".spec.")) for item in names_in(jobs_dir / name)):
                durable.remove_flat(jobs_dir / name)


def _is_finished(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(UNFINISHED_SUFFIXES)


def _check_name(name: str) -> None:
    if Path(name).suffix not in SPEC_SUFFIXES:
        raise SpecError(f"{name!r}: not a job file's name", hint="a job file ends in .yaml, .yml, .json or .toml")
    if not name.isprintable():
        raise SpecError(f"{name!r}: a name with control characters", hint="rename the file and drop it again")


def too_large(name: str, max_bytes: int) -> SpecError:
    return SpecError(
        f"{shown(name)}: larger than {max_bytes} bytes", hint="a job file refers to data; it does not contain data"
    )


def _read_claimed(claim: Claim, max_bytes: int, *, has_workers_user: bool) -> tuple[bytes, int]:
    """Read a claimed file once. Returns its content and the user who submitted it.

    Raises SpecError or NotPermittedError if it is not a regular file of one user of this machine, or too large.
    """
    _check_name(claim.name)
    if stat.S_ISCHR(mode := untrusted.info(claim.path).st_mode) or stat.S_ISBLK(mode):
        raise SpecError(f"{claim.name}: a device", hint="drop the file itself")
    try:
        fd = untrusted.open_plain(claim.path)
    except OSError as error:
        raise (_dropper_fault(claim, error) if claim.submitter is None else None) or error from error
    try:
        info = os.fstat(fd)
        if info.st_nlink != 1:
            raise SpecError(f"{claim.name}: a hard link to another file", hint="drop a copy (cp, not ln)")
        if has_workers_user and (others := access.other_writers(fd)):
            # Anyone who can write a file can put a job into it and move it here, so its owner proves nothing.
            raise SpecError(
                f"{claim.name}: other users ({others}) can write it, so its owner may not be the submitter",
                hint="use honectl submit FILE; or drop a copy that only you can write: chmod go-w, setfacl -b",
            )
        data = _read_at_most(fd, max_bytes + 1)
    finally:
        os.close(fd)
    uid = info.st_uid if claim.submitter is None else claim.submitter
    if len(data) > max_bytes:
        raise too_large(claim.name, max_bytes)
    if has_workers_user:
        _require_known(claim.name, uid)
    return data, uid


def _require_known(name: str, uid: int) -> None:
    if access.is_person(uid) and not access.is_known(uid):
        raise NotPermittedError(
            f"{name}: its owner, uid {uid}, is not a user of this machine",
            hint="submit it as a user that `getent passwd` lists; if a directory service was down, drop it again",
        )


def _dropper_fault(claim: Claim, error: OSError) -> SpecError | None:
    """Return an error that the submitter can fix; None if the machine is at fault and the arrival should wait."""
    match error.errno:
        case errno.ELOOP:
            return SpecError(f"{claim.name}: a symbolic link", hint="drop the file itself")
        case errno.EACCES | errno.EPERM:
            return SpecError(f"{claim.name}: honed cannot read it", hint="make it readable: chmod g+r or o+r")
        case errno.EINVAL:
            hint = "drop a regular file, not a pipe, a socket or a directory"
            return SpecError(f"{claim.name}: not a regular file", hint=hint)
        case errno.EAGAIN:  # a lease of fcntl(2), which we do not wait for
            return SpecError(f"{claim.name}: a program holds a lease on it", hint="end that program, or drop a copy")
        case _:
            return None


def _read_at_most(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := os.read(fd, size - len(data))):
        data += chunk
    return data


def held_name(name: str) -> str:
    """Return the file name under which a job is accepted into held/."""
    suffix = Path(name).suffix
    return f"{name.removesuffix(suffix)}{HOLD_SUFFIX}{suffix}"


def drop(incoming_dir: Path, source: Path, *, hold: bool = False) -> str:
    """Copy a job file into incoming/ atomically. Returns the name that it got there."""
    data, ending = source.read_bytes(), f"{HOLD_SUFFIX if hold else ''}{source.suffix}"
    number = 1
    while True:
        name = f"{source.stem}{'' if number == 1 else f'-{number}'}{ending}"
        # Creating the hidden file reserves the name: two concurrent drops get different numbers.
        temporary = incoming_dir / f".{name}.dropping"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1
            continue
        try:
            with os.fdopen(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            rename.to_free(temporary, incoming_dir / name)
        except FileExistsError:
            temporary.unlink()
            number += 1
        else:
            with contextlib.suppress(PermissionError):  # a drop box cannot be opened; honed syncs it when it claims
                durable.sync_dir(incoming_dir)
            return name
        finally:
            os.close(fd)
