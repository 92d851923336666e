"""Access permissions: POSIX ACLs, and whether another user can reach a path, or what stops them.

An ACL is stored in an extended attribute (linux/posix_acl_xattr.h): a version, then (tag, permissions, id) entries
sorted by tag. Its mask replaces the group's bits of the mode, so that `ls -l` shows the mask there.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import logging
import operator
import os
import pwd
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

log = logging.getLogger(__name__)

ACCESS_XATTR = "system.posix_acl_access"
DEFAULT_XATTR = "system.posix_acl_default"
_VERSION = 2
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NOBODY = 0xFFFFFFFF

READ, WRITE, ENTER = 4, 2, 1
#: The users and the group of the system's own instance; without them, honed serves a single user.
DAEMON_USER, WORKERS_USER, DROPPERS_GROUP = "honed", "honed-job", "honed-submit"
#: The first uid of people (login.defs' UID_MIN), and later uids that belong to a service (systemd's dynamic users) or
#: to nobody (the kernel's overflow user).
FIRST_PERSON, SERVICES, NOBODY = 1000, range(61184, 65520), (65534, 65535)
#: Hidden from the services (ProtectHome=), whatever their modes.
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
MAX_LINKS = 40


@dataclass(frozen=True)
class Acl:
    """The permissions in an ACL, 0 to 7 each."""

    owner: int
    group: int
    other: int
    users: Mapping[int, int]
    groups: Mapping[int, int]
    mask: int | None = None  #: None: covers all that it masks

    def encode(self) -> bytes:
        named = [*self.users.values(), *self.groups.values(), self.group]
        mask = self.mask if self.mask is not None else functools.reduce(operator.or_, named)
        entries = [
            (_USER_OBJ, self.owner, _NOBODY),
            *((_USER, permissions, uid) for uid, permissions in sorted(self.users.items())),
            (_GROUP_OBJ, self.group, _NOBODY),
            *((_GROUP, permissions, gid) for gid, permissions in sorted(self.groups.items())),
            (_MASK, mask, _NOBODY),
            (_OTHER, self.other, _NOBODY),
        ]
        return struct.pack("<I", _VERSION) + b"".join(struct.pack("<HHI", *entry) for entry in entries)

    @classmethod
    def decode(cls, data: bytes) -> Acl:
        """Decode an ACL. Raises ValueError if the data is not one."""
        if len(data) % 8 != 4 or struct.unpack_from("<I", data)[0] != _VERSION:
            raise ValueError("not a POSIX ACL")
        single, users, groups = {_GROUP_OBJ: 0, _USER_OBJ: 0, _OTHER: 0}, {}, {}
        for tag, permissions, number in struct.iter_unpack("<HHI", data[4:]):
            match tag:
                case 0x02:
                    users[number] = permissions
                case 0x08:
                    groups[number] = permissions
                case _:
                    single[tag] = permissions
        return cls(single[_USER_OBJ], single[_GROUP_OBJ], single[_OTHER], users, groups, single.get(_MASK))


def acl_of(path: Path | int) -> Acl | None:
    """Return the ACL of a path or an open file; None if it has only a mode."""
    try:
        return Acl.decode(os.getxattr(path, ACCESS_XATTR))
    except (OSError, ValueError):
        return None


def set_acl(path: Path | int, acl: Acl, *, inherited: bool = False) -> bool:
    """Set a path's ACL; with `inherited` also the default ACL for everything created in the directory later.

    Returns False, and logs that once, if the file system does not support ACLs.
    """
    try:
        # First what is inherited: who may write from now on makes nothing that inherits what was there before.
        for name in (DEFAULT_XATTR, ACCESS_XATTR) if inherited else (ACCESS_XATTR,):
            os.setxattr(path, name, acl.encode())
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        _say_no_acls(path)
        return False
    return True


_said: set[int] = set()


def _say_no_acls(path: Path | int) -> None:
    device = os.stat(path).st_dev  # noqa: PTH116 - or a descriptor
    if device not in _said:
        _said.add(device)
        log.warning(
            "%s: this file system does not support ACLs: submitters read their results with honectl, not from the "
            "files",
            path,
        )


# -- people -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Person:
    """A user of this machine, with all their groups."""

    uid: int
    gids: frozenset[int]
    name: str


def person(who: str | int) -> Person | None:
    """Look up a user by name or number; None for an unknown name. An unknown number gives a user without groups."""
    try:
        entry = pwd.getpwnam(who) if isinstance(who, str) else pwd.getpwuid(who)
    except KeyError:
        return None if isinstance(who, str) else Person(who, frozenset(), f"user {who}")
    return Person(entry.pw_uid, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)), entry.pw_name)


def group_id(name: str) -> int | None:
    with contextlib.suppress(KeyError):
        return grp.getgrnam(name).gr_gid
    return None


def user_name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def group_name(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def has_workers_user(root: Path) -> bool:
    """Tell whether workers of the instance below `root` run as other users than the daemon."""
    return root == Path("/") and person(WORKERS_USER) is not None


def worker_of(root: Path, uid: int, jobs_dir: Path) -> Person | None:
    """Return the user that a submitter's jobs run as: the submitter, but honed-job for root and system accounts and on
    a file system without ACLs. None if workers run as the daemon's own user.
    """
    if not has_workers_user(root):
        return None
    return person(uid if is_person(uid) and has_acls(jobs_dir) else WORKERS_USER)


def is_person(uid: int) -> bool:
    """Tell whether jobs may run as this user: root and system accounts have permissions that no job should have."""
    return uid >= FIRST_PERSON and uid not in SERVICES and uid not in NOBODY


def is_known(uid: int) -> bool:
    """Tell whether the system's user databases contain this user."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def has_acls(directory: Path) -> bool:
    """Tell whether the file system of a directory supports POSIX ACLs."""
    try:
        os.getxattr(directory, ACCESS_XATTR)
    except OSError as error:
        return error.errno != errno.ENOTSUP
    return True


def job_user(job_dir: Path | int) -> int | None:
    """Return the user whom a job's directory lets write by its ACL: its worker's. None if honed-job runs it."""
    acl = acl_of(job_dir)
    users = [] if acl is None else [uid for uid, permissions in acl.users.items() if permissions & WRITE]
    return users[0] if len(users) == 1 and is_person(users[0]) else None


def submitter_of(job_dir: Path) -> int | None:
    """Return the user whom a job's directory grants access by its ACL; None if there is none."""
    acl = acl_of(job_dir)
    return next(iter(acl.users), None) if acl is not None and len(acl.users) == 1 else None


# -- what is in the way -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Obstacle:
    """The first directory, or the file, that prevents a user from reaching a path."""

    path: Path
    info: os.stat_result
    what: str  #: entered, read or written
    person: Person

    def __str__(self) -> str:
        mode, owner = stat.S_IMODE(self.info.st_mode), user_name(self.info.st_uid)
        group = group_name(self.info.st_gid)
        return f"{self.path} (mode {mode:04o}, {owner}:{group}) cannot be {self.what} by the user {self.person.name}"


def obstacle(path: Path, who: Person, wanted: int = READ) -> Obstacle | None:
    """Return what prevents `who` from reaching a path, by modes and ACLs, following links; None if nothing does, or if
    we cannot see it.

    A missing path is no obstacle. Read-only mounts, security modules and a file server's own view are not detected.
    """
    try:
        # One by one: a directory behind one that is closed to us cannot be examined.
        for step, is_last in _steps(path):
            enter = ENTER if step.is_dir() else 0
            if not is_last and not may(step, who, ENTER):
                return Obstacle(step, step.stat(), "entered", who)
            if is_last and wanted & WRITE and not may(step, who, WRITE | enter):
                return Obstacle(step, step.stat(), "written", who)
            if is_last and not may(step, who, (wanted & READ) | enter):
                return Obstacle(step, step.stat(), "read", who)
    except OSError:
        return None
    return None


def _steps(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield every directory on the way to a path, following links, with whether it is the last: the real path."""
    here, ahead, num_links = Path("/"), list(path.parts[1:]), 0
    yield here, not ahead
    while ahead:
        part = ahead.pop(0)
        if part == "..":
            here = here.parent
            yield here, not ahead
            continue
        if (here / part).is_symlink():
            num_links += 1
            if num_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = (here / part).readlink()
            if target.is_absolute():
                here = Path("/")
                yield here, target == here and not ahead
            ahead = [name for name in target.parts if name != "/"] + ahead
            continue
        here /= part
        yield here, not ahead


def may(path: Path, who: Person, wanted: int) -> bool:
    """Tell whether a path's own mode and ACL give a user all wanted permissions. May raise OSError."""
    info = path.stat()
    if who.uid == 0:
        return True
    mode = info.st_mode
    if who.uid == info.st_uid:
        return (mode >> 6) & wanted == wanted
    acl = acl_of(path)
    if acl is None:
        return ((mode >> 3) if info.st_gid in who.gids else mode) & wanted == wanted
    mask = acl.mask if acl.mask is not None else 7
    if who.uid in acl.users:
        return acl.users[who.uid] & mask & wanted == wanted
    groups = [permissions for gid, permissions in acl.groups.items() if gid in who.gids]
    groups += [acl.group] if info.st_gid in who.gids else []
    if groups:
        return any(permissions & mask & wanted == wanted for permissions in groups)
    return acl.other & wanted == wanted


def other_writers(file: int) -> str:
    """Describe who can write an open file besides its owner, root and us; empty if nobody can.

    A group counts if the system's databases list another member; its primary members are those that getpwent lists,
    which a directory service may hide.
    """
    info = os.fstat(file)
    return _writers(info, acl_of(file), {0, info.st_uid, os.geteuid()})


def _writers(info: os.stat_result, acl: Acl | None, but: set[int]) -> str:
    if (info.st_mode if acl is None else acl.other) & WRITE:
        return "everybody"
    # With an ACL, the group's bits hold the mask.
    if not info.st_mode & stat.S_IWGRP:
        return ""
    for uid, permissions in {} if acl is None else acl.users.items():
        if permissions & WRITE and uid not in but:
            return f"the user {user_name(uid)}"
    groups = {info.st_gid: WRITE} if acl is None else {info.st_gid: acl.group, **acl.groups}
    for gid, permissions in groups.items():
        if permissions & WRITE and _has_members_besides(gid, but):
            return f"the group {group_name(gid)}"
    return ""


def _has_members_besides(gid: int, uids: set[int]) -> bool:
    with contextlib.suppress(KeyError):
        for name in grp.getgrgid(gid).gr_mem:
            member = person(name)
            if member is None or member.uid not in uids:
                return True
    return any(item.pw_gid == gid and item.pw_uid not in uids for item in pwd.getpwall())


def replacer(path: Path) -> str:
    """Describe who besides root can replace the file at a path; empty if nobody can.

    The owner of the file cannot, but whoever owns or can write a directory on the way to it, following links. Raises
    OSError if that cannot be seen.
    """
    who_may, sticky = "", Path()
    for step, is_last in _steps(path):
        try:
            info = step.lstat()
        except FileNotFoundError:
            return who_may
        # In a sticky directory only the owner of an existing file can rename it, but anybody can create a missing one.
        if who_may and (step.parent != sticky or info.st_uid):
            return who_may
        if is_last:
            break
        who_may, sticky = "", step
        if info.st_uid:
            return f"the user {user_name(info.st_uid)}, the owner of {step}"
        if who := _writers(info, acl_of(step), {0}):
            who_may = f"{who}, with write permission for {step}"
            if not info.st_mode & stat.S_ISVTX:
                return who_may
    return ""


def home_above(path: Path) -> Path | None:
    """Return the directory of homes that a path is really below, if any."""
    real = Path(os.path.realpath(path))
    return next((home for home in HOMES if real.is_relative_to(home)), None)


# -- a job's directory ------------------------------------------------------------------------------------------------


def open_job_dir(path: Path, owner_uid: int, *, is_shared: bool, administrators: int | None = None) -> None:
    """Set the ACL of a new job's directory (mode 0770): besides the daemon, the submitter, the group honed-job and the
    administrators' group may read. Nobody else writes in it before the job is accepted; see `give_job_dir`.

    Everything created in it inherits that. The group comes from the setgid bit of the parent directory, since a
    sandboxed daemon may not set that bit (RestrictSUIDSGID=).
    """
    gid = group_id(WORKERS_USER)
    if gid is not None and path.stat().st_gid != gid:
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, gid)
    everybody = READ | ENTER if is_shared else 0
    groups = {administrators: READ | ENTER} if administrators is not None else {}
    acl = Acl(owner=7, group=READ | ENTER, other=everybody, users={owner_uid: READ | ENTER}, groups=groups)
    set_acl(path, acl, inherited=True)


def give_job_dir(path: Path) -> None:
    """Let the worker of an accepted job write in its directory: as the submitter, or as honed-job for one that is not a
    person, who may only read."""
    acl = acl_of(path)
    if acl is None:  # a file system without ACLs, where the mode lets the group honed-job write
        return
    users = {uid: 7 if is_person(uid) else permissions for uid, permissions in acl.users.items()}
    set_acl(path, replace(acl, group=7, users=users, mask=None), inherited=True)


def let_read(fd: int, uid: int) -> None:
    """Let one more user read an open file of ours."""
    permissions = stat.S_IMODE(os.fstat(fd).st_mode)
    set_acl(fd, Acl(permissions >> 6, (permissions >> 3) & 7, permissions & 7, {uid: READ}, {}))
