"""Arrivals: files that people drop, on their way to an entry of the spool, or to a refusal.

    incoming/       people drop `name.yaml` (.yml .json .toml); a leading dot: not yet
    claimed/<id>/   an arrival that is being checked, under its own name
    claimed/<id>.<uid>/    the same of one that this user handed over the control socket
    rejected/       what was refused, as it was dropped, and <file>.reason
    seq             the last number given to an arrival

The rename into claimed/ takes one from the person who dropped it; that of its entry (`Spool.adding`) makes it a job.
Whose it is says the file's owner; of one that came over the control socket, which is a file of honed's own, the name of
the directory that it came into: no crash comes between the two.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job.job import Job, State
from honed.job.spool import Spool, names_in
from honed.spec import problem
from honed.system import access, durable
from honed.system.durable import Steps, finish
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, SpecError

log = logging.getLogger(__name__)

SPEC_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
#: How editors and copiers name what is not finished yet; such a file is left alone until it gets its own name.
UNFINISHED_SUFFIXES = (".tmp", ".part", ".partial", ".filepart", ".swp", ".swx", "~")
#: `name.hold.yaml` is accepted into held/.
HOLD_SUFFIX = ".hold"
MAX_NAME_BYTES = 255
#: A claim's directory: its number and, of what came over the control socket, the user who submitted it.
PLACE = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
#: The second line of such a file's refusal.
SUBMITTED = re.compile(r"Submitted as ([0-9]+) by the user ([0-9]+)\.")


@dataclass(frozen=True)
class Dropped:
    """A file in incoming/ that is meant to be taken."""

    path: Path
    uid: int  #: whose it is


@dataclass(frozen=True)
class Claim:
    """An arrival that was taken out of incoming/ under a number of its own."""

    id: int
    path: Path  #: claimed/<id>/<name>, or claimed/<id>.<uid>/<name>
    submitter: int | None = None  #: the user who handed it over the control socket; None: it was dropped

    @property
    def uid(self) -> int:
        """Whose it is."""
        return self.path.lstat().st_uid if self.submitter is None else self.submitter

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


class Arrivals:
    """All that lie in one spool; its owner's alone."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._left_over: set[Path] = set()  # directories of refused arrivals that could not be removed yet
        #: Whether workers are another user than we, who then shares nothing by accident.
        self._has_workers_user = access.has_workers_user(spool.root)

    def close(self) -> None:
        """The last try at what refusals have left. The spool is closed after it."""
        self._clear_away()

    def dropped(self) -> list[Dropped]:
        """What lies in incoming/ and is meant to be taken, in order of arrival."""
        found = []
        with os.scandir(self._spool.incoming_dir) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(UNFINISHED_SUFFIXES):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    # The change time, since a rename sets it and leaves the others.
                    info = entry.stat(follow_symlinks=False)
                    found.append((info.st_ctime_ns, entry.name, info.st_uid))
        return [Dropped(self._spool.incoming_dir / name, uid) for _, name, uid in sorted(found)]

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
        place = self._spool.claimed_dir / str(job_id)
        place.mkdir(mode=0o700)
        try:
            yield [self._spool.claimed_dir]
            arrival.rename(place / arrival.name)
        except FileNotFoundError:
            place.rmdir()
            return None
        except OSError:
            place.rmdir()
            raise
        yield [place]
        yield [self._spool.incoming_dir]
        return Claim(job_id, place / arrival.name)

    def submit(self, name: str, data: bytes, uid: int) -> Claim:
        """Take a job file that somebody hands over, under a new number. The rename to its name is the commit: a crash
        before it leaves nothing that counts. Raises SpecError for a name that no job file has.
        """
        _check_name(name)
        if "/" in name or name.startswith(".") or len(os.fsencode(name)) > MAX_NAME_BYTES - len("..tmp"):
            raise SpecError(f"{name!r}: not a file's name, too long, or hidden", hint="rename the file")
        job_id = self._next_id()
        place = self._spool.claimed_dir / f"{job_id}.{uid}"
        place.mkdir(mode=0o700)
        try:
            durable.sync_dir(self._spool.claimed_dir)
            durable.write(place / name, data, mode=0o600)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)  # whoever submits it is told that it was not taken
            raise
        return Claim(job_id, place / name, uid)

    def num_submitted(self, uid: int) -> int:
        """How many files of one user came over the control socket, and are neither jobs nor refused yet."""
        return sum(submitter == uid for _, submitter, _ in self._places())

    def _next_id(self, count: int = 1) -> int:
        """The first of so many numbers that were never given before and never will be again, durable before they are
        used."""
        path = self._spool.dir / "seq"
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
        numbers = [int(path.name) for path in self._spool.layout.jobs_dir.iterdir() if path.name.isdecimal()]
        return max([*numbers, *self._spool.pruned_ids(), *self._spool.all_jobs()], default=0)

    def copy(
        self, claim: Claim, *, max_bytes: int, is_shared: bool = False, admin_group: str = "", drops: bool = True
    ) -> Copy:
        """Read a claimed file once, into jobs/<id>/. Raises SpecError for what is not a plain file of a sane size, and
        for a dropped one where no `drops` are taken.

        The person who dropped it may still hold it open: whatever they write from now on changes nothing.
        """
        (copied,) = self.copy_all(
            [claim], max_bytes=max_bytes, is_shared=is_shared, admin_group=admin_group, drops=drops
        )
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
        """As copy, many at once; what went wrong with one stands in its place."""
        return durable.finish_all(
            [
                self._copying(claim, max_bytes=max_bytes, is_shared=is_shared, admin_group=admin_group, drops=drops)
                for claim in claims
            ]
        )

    def _copying(self, claim: Claim, *, max_bytes: int, is_shared: bool, admin_group: str, drops: bool) -> Steps[Copy]:
        if claim.submitter is None and not drops:
            raise SpecError(
                f"{shown(claim.name)}: this honed takes no files from incoming/ (policy.arrivals), since where one lay "
                "before, and so who submits it, cannot be known",
                hint="honectl submit FILE",
            )
        _check_name(claim.name)
        if stat.S_ISCHR(mode := claim.path.lstat().st_mode) or stat.S_ISBLK(mode):
            # Not even opened: opening alone makes some devices act.
            raise SpecError(f"{claim.name}: a device", hint="drop the file itself")
        try:
            fd = os.open(claim.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise (_dropper_fault(claim, error) if claim.submitter is None else None) or error from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise SpecError(
                    f"{claim.name}: not a plain file", hint="drop the file itself, not a pipe or a directory"
                )
            if info.st_nlink != 1:
                raise SpecError(f"{claim.name}: a hard link to another file", hint="drop a copy: cp, not ln")
            if self._has_workers_user and (others := access.other_writers(fd)):
                # Whoever can write a file can put a job into it, and move it here: its owner is no proof then.
                raise SpecError(
                    f"{claim.name}: {others} can write it, too, so its owner need not be who submits it",
                    hint="honectl submit FILE; or drop a copy that only you can write: chmod go-w, setfacl -b",
                )
            data = _read_at_most(fd, max_bytes + 1)
        finally:
            os.close(fd)
        uid = info.st_uid if claim.submitter is None else claim.submitter
        if len(data) > max_bytes:
            raise too_large(claim.name, max_bytes)
        if self._has_workers_user and access.is_person(uid) and not access.is_known(uid):
            raise NotPermittedError(
                f"{claim.name}: its owner, uid {uid}, is no user of this machine",
                hint="submit it as a user whom `getent passwd` has; where a directory service was down, drop it again",
            )
        directory = self._spool.job_layout(claim.id).dir
        if self._has_workers_user:
            yield from durable.making_dir(
                directory, mode=0o1770
            )  # sticky: the workers leave our spec and plan in it alone
            administrators = access.group_id(admin_group)
            access.open_job_dir(directory, uid, is_shared=is_shared, administrators=administrators)
        else:
            yield from durable.making_dir(directory)
        yield from durable.writing(directory / f"spec{claim.path.suffix}", data)
        return Copy(directory / f"spec{claim.path.suffix}", uid)

    def admit(self, job: Job, claim: Claim, plan: dict[str, Any]) -> Job:
        """Accept a claimed arrival. The rename of its entry is the commit: before it, nothing happened."""
        return finish(self._admitting(job, claim, plan))

    def admit_all(self, accepted: Sequence[tuple[Job, Claim, dict[str, Any]]]) -> list[Job | Exception]:
        """As admit, many at once; what went wrong with one stands in its place."""
        return durable.finish_all([self._admitting(*each) for each in accepted])

    def _admitting(self, job: Job, claim: Claim, plan: dict[str, Any]) -> Steps[Job]:
        yield from durable.writing(self._spool.job_layout(job.id).plan_path, durable.as_json(plan))
        yield [self._spool.layout.jobs_dir]
        yield from self._spool.adding(job)
        with contextlib.suppress(FileNotFoundError):  # what a crash leaves of it is dropped by recovery
            claim.path.unlink()
            claim.path.parent.rmdir()
        return job

    def reject(self, claim: Claim, reason: str) -> Path:
        """Refuse a claimed arrival: its file goes to rejected/ as it was dropped, the reason beside it (first).

        The reason quotes what the file names, so that its dropper alone may read it.
        """
        target = self._spool.rejected_dir / claim.name
        if os.path.lexists(target) or len(os.fsencode(claim.name)) + len(".reason") + len("..tmp") > MAX_NAME_BYTES:
            stem = os.fsdecode(os.fsencode(claim.path.stem)[:180]).encode(errors="replace").decode()
            target = self._spool.rejected_dir / f"{stem}.{claim.id}{claim.path.suffix[:16]}"
        reason_path = target.with_name(target.name + ".reason")
        durable.write(reason_path, reason.encode(errors="replace"), mode=0o600)
        if claim.uid != os.geteuid():
            access.let_read(reason_path, claim.uid)
        if self._has_workers_user and claim.submitter is not None:
            access.let_read(claim.path, claim.uid)
        claim.path.rename(target)
        try:
            durable.sync_dir(self._spool.rejected_dir)
            durable.sync_dir(claim.path.parent)
        finally:
            self._left_over |= {claim.path.parent, self._spool.job_layout(claim.id).dir}
            self._clear_away()
        return target

    def _clear_away(self) -> None:
        """Remove the directories of refused arrivals; those that stay are tried again with the next, and at the end."""
        for path in list(self._left_over):
            if path.parent == self._spool.claimed_dir:
                with contextlib.suppress(OSError):
                    path.rmdir()
            else:
                shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                self._left_over.discard(path)

    def accepted(self, claim: Claim) -> Job | None:
        """The job that a claimed arrival has become already: what came after its entry's rename had failed."""
        job = self._spool.job_on_disk(claim.id)
        if job is not None:
            if claim.path.exists():  # else the entry was durable before it was removed
                durable.sync_dir(self._spool.state_dir(job.state))
            with contextlib.suppress(OSError):  # the next start removes what is left
                self._drop(claim)
            self._spool.note(job)
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
        for number, submitter, place in sorted(self._places(), key=lambda each: each[0]):
            if limit is not None and len(found) >= limit:
                break
            if number not in but and place.is_dir():
                found += [Claim(number, path, submitter) for path in place.iterdir() if not path.name.startswith(".")]
        return found

    def _places(self) -> Iterator[tuple[int, int | None, Path]]:
        """The directories of claims: number, submitter, path."""
        for name in names_in(self._spool.claimed_dir):
            if match := PLACE.fullmatch(name):
                yield int(match[1]), int(match[2]) if match[2] else None, self._spool.claimed_dir / name

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finish what a crash cut short: half claims, half refusals. The spool has recovered before."""
        for path in self._spool.rejected_dir.glob(".*.reason.tmp"):
            path.unlink(missing_ok=True)
        for name in names_in(self._spool.claimed_dir):
            if not PLACE.fullmatch(name) or not (self._spool.claimed_dir / name).is_dir():
                log.warning("%s: not honed's; left alone", self._spool.claimed_dir / name)
        for number, submitter, place in self._places():
            if not place.is_dir():
                continue
            for path in place.glob(".*.tmp"):  # its submitter was never told that it was taken
                path.unlink()
            names = list(place.iterdir())
            if not names:
                place.rmdir()
            for path in names:
                self._recover_claim(Claim(number, path, submitter))
        self._drop_refused()
        self._next_id_is_readable()

    def _recover_claim(self, claim: Claim) -> None:
        # A rename between directories can leave both names after a power cut; one inode is one arrival.
        arrival = self._spool.incoming_dir / claim.name
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(arrival.lstat(), claim.path.lstat()) and not claim.path.is_dir():
                arrival.unlink()
                durable.sync_dir(self._spool.incoming_dir)
        if self._spool.job(claim.id) is not None:  # accepted; the crash came before the claimed file was dropped
            self._drop(claim)

    def _next_id_is_readable(self) -> None:
        path = self._spool.dir / "seq"
        if not path.exists():
            return
        text = path.read_text(errors="replace")
        if not text.strip().isdecimal():
            raise EnvironmentInvalidError(
                f"{path}: not a number",
                hint=f"write the highest job number ever used into it: at least {self._max_id()}",
            )

    def _drop_refused(self) -> None:
        """Remove what a crash has left of the directories of arrivals that were refused: nothing but the spec."""
        kept = {name.partition(".")[0] for state in State for name in names_in(self._spool.state_dir(state))}
        kept |= {str(number) for number, _, _ in self._places()} | set(map(str, self._spool.pruned_ids()))
        for name in names_in(self._spool.layout.jobs_dir):
            path = self._spool.layout.jobs_dir / name
            if (
                name.isdecimal()
                and name not in kept
                and all(each.name.startswith(("spec.", ".spec.")) for each in path.iterdir())
            ):
                shutil.rmtree(path, ignore_errors=True)


def _check_name(name: str) -> None:
    if Path(name).suffix not in SPEC_SUFFIXES:
        raise SpecError(f"{name!r}: not a job file's name", hint="a job file ends in .yaml, .yml, .json or .toml")
    if not name.isprintable():
        raise SpecError(f"{name!r}: a name with control characters", hint="rename the file and drop it again")


def too_large(name: str, max_bytes: int) -> SpecError:
    return SpecError(f"{shown(name)}: larger than {max_bytes} bytes", hint="a job file names data; it does not hold it")


def shown(name: str) -> str:
    """A file's name as it stands in a line of text."""
    return name if name.isprintable() else repr(name)


def refusal(claim: Claim, error: HonedError, *, when: str) -> str:
    """What stands in `<file>.reason`: why, for a person; and who submitted it, where its owner does not tell."""
    is_dropped = claim.submitter is None
    lines = [f"{shown(claim.name)} was refused at {when}."]
    lines += [] if is_dropped else [f"Submitted as {claim.id} by the user {claim.submitter}."]
    lines += ["", f"{error.code}:"]
    lines += [f"  {line}" for line in error.told.splitlines()]
    if error.hint:
        first, *rest = error.hint.split("\n")
        lines += ["", f"What to do: {first}", *(f"  {line}" for line in rest)]
    if error.fix:
        lines += ["", "To be changed in the file:", *(f"  {each}" for each in problem.told_fix(error.fix))]
    again = "drop the job file into incoming/ again" if is_dropped else "submit it again: honectl submit FILE"
    return "\n".join([*lines, "", f"Then {again}.", ""])


def submission_of(reason: str) -> tuple[int, int] | None:
    """The number and the user of a refused file that came over the control socket, from its reason."""
    match = SUBMITTED.fullmatch([*reason.split("\n", 2), ""][1])
    return (int(match[1]), int(match[2])) if match else None


def refused_uid(path: Path) -> int:
    """Whose a file in rejected/ is. Raises FileNotFoundError where it is gone."""
    owner = path.lstat().st_uid
    if owner != path.parent.stat().st_uid:
        return owner
    with contextlib.suppress(FileNotFoundError):
        reason = path.with_name(f"{path.name}.reason").read_text(encoding="utf-8", errors="replace")
        if submission := submission_of(reason):
            return submission[1]
    return owner


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


def held_name(name: str) -> str:
    """The name under which a file is accepted into held/."""
    suffix = Path(name).suffix
    return f"{name.removesuffix(suffix)}{HOLD_SUFFIX}{suffix}"


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
