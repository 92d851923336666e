"""The view of a job's unit: `honed-view ID`, as root, before honed-job@ID.service; `honed-view ID --remove` after it.

    /run/userdb/honed-j<id>.user              the unit's user: an alias of the job's submitter, without a password
    /run/userdb/honed-j<id>:honed-g<gid>.membership      and their groups, with a honed-g<gid>.group
    /run/honed-view/<id>/                     the directory that the unit sees as /var/lib/honed
        jobs/<id>/                            an empty directory, over which the unit binds the job's own
        jobs/<other>/  staged/<copy>/         inputs in these places, opened as the submitter and then bound
        rows/<uid>/                           the submitter's encoded rows, likewise; not for a job with code of its own
    /run/systemd/system/honed-job@<id>.service.d/       for a job with several ranks: loopback, so that they can talk

systemd resolves `User=honed-j%i` by these records (nss-systemd), so that the worker starts with its submitter's
permissions and the unit needs no capability. The user is the one with write access in the ACL of the job's directory.
Jobs of root and of system accounts, and jobs on a file system without ACLs, run as honed-job.

honed, which owns these files, gains no permissions: the inputs that it names are opened with the submitter's
permissions, and it cannot choose a user below FIRST_PERSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pwd
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from honed.job import tree
from honed.job.plan_file import PlanFile
from honed.job.row_cache import has_code
from honed.run import jobunit, viewmount
from honed.run.runner import RANKS_VARIABLE
from honed.run.viewmount import ViewError
from honed.system import access
from honed.system.access import Person
from honed.system.dbus import BusError, Systemd
from honed.system.layout import JobFiles, Layout

VIEW_DIR = Path("/run/honed-view")
USERDB_DIR = Path("/run/userdb")
LOCK_PATH = Path("/run/honed-view.lock")
UNIT_DIR = Path("/run/systemd/system")
#: Gloo and NCCL connect over loopback, and list the interfaces over netlink. PrivateNetwork= stays.
LOOPBACK = """\
[Service]
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK
IPAddressAllow=localhost
"""


def user_name(job_id: int) -> str:
    """Return the User= of a job's unit."""
    return f"honed-j{job_id}"


def worker(job: JobFiles) -> Person:
    """Return the user that a job's worker runs as. Raises ViewError if there is none."""
    uid = access.job_user(job.place)
    person = access.person(uid if uid is not None else access.WORKERS_USER)
    if person is None:
        raise ViewError(f"the user {access.WORKERS_USER} is missing: systemd-sysusers creates it")
    try:
        pwd.getpwuid(person.uid)
    except KeyError:
        raise ViewError(f"{job.dir}: its submitter, user {person.uid}, no longer exists on this machine") from None
    return person


def add(layout: Layout, job_id: int) -> None:
    """Create a job's view, replacing a leftover one. Raises ViewError or OSError.

    The lock is held for the mounts alone: what people can delay is done before.
    """
    remove(job_id)
    job = layout.files(job_id)
    who, num_ranks = worker(job), _num_ranks(job)
    try:
        with contextlib.ExitStack() as stack:
            shown = list(_opened(layout, job_id, who, stack))
            with _locked():
                _register(job_id, who)
                view = VIEW_DIR / str(job_id)
                (view / "jobs" / str(job_id)).mkdir(parents=True)
                for path, fd in shown:
                    target = view / path.relative_to(layout.state_dir)
                    target.mkdir(parents=True, exist_ok=True)
                    viewmount.mount(fd, target)
        _check_registered(job_id, who)
        if num_ranks > 1:
            _open_loopback(job_id)
    except BaseException:
        remove(job_id)
        raise


def _opened(layout: Layout, job_id: int, who: Person, stack: contextlib.ExitStack) -> Iterator[tuple[Path, int]]:
    """Yield the directories that a job's view shows, and their descriptors. Raises ViewError if one is closed to the
    submitter, or does not answer."""
    job, until = layout.files(job_id), time.monotonic() + viewmount.OPEN_SEC
    submitter = access.submitter_of(job.place)
    # For a system account, whose worker runs as honed-job, inputs are opened with the account's own permissions.
    opener = who if submitter in {None, 0} else access.person(submitter) or who
    for path in _inputs(layout, job):
        yield path, stack.enter_context(viewmount.opened_as(opener, path, until=until))
    rows_dir = layout.rows_dir / str(submitter)
    if submitter is not None and rows_dir.is_dir() and not has_code(layout, job_id):
        try:
            yield rows_dir, stack.enter_context(viewmount.opened_as(opener, rows_dir, until=until))
        except ViewError as error:  # e.g. restored from a backup without its ACL
            print(f"<4>the job encodes its rows itself: {error}", file=sys.stderr)


def _num_ranks(job: JobFiles) -> int:
    try:
        return int(jobunit.read(job).environment.get(RANKS_VARIABLE, 1))
    except (OSError, ValueError):
        return 1  # the unit will log what is wrong


def _dropin(job_id: int) -> Path:
    return UNIT_DIR / f"honed-job@{job_id}.service.d" / "50-several-ranks.conf"


def _open_loopback(job_id: int) -> None:
    """Let a job's unit, which waits for this one, use sockets within its own network namespace, where there is nothing
    but loopback."""
    path = _dropin(job_id)
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.write_text(LOOPBACK, encoding="ascii")
    try:
        Systemd().reload()
    except BusError as error:
        raise ViewError(f"systemd did not read the unit of several ranks: {error}") from error


def remove(job_id: int) -> None:
    """Remove a job's view and the groups that only it used; other views' mounts are kept."""
    with _locked():
        _remove(job_id)


def _remove(job_id: int) -> None:
    if _dropin(job_id).exists():
        _dropin(job_id).unlink()
        with contextlib.suppress(OSError):  # somebody else's drop-ins
            _dropin(job_id).parent.rmdir()
        # systemd forgets the settings with the unit, and reads the units again for the next job of several ranks.
    view = VIEW_DIR / str(job_id)
    viewmount.unmount_below(view)
    tree.clear(view)
    for path in [*USERDB_DIR.glob(f"{user_name(job_id)}.user"), *USERDB_DIR.glob(f"{user_name(job_id)}:*")]:
        path.unlink(missing_ok=True)
    used = {path.stem.partition(":")[2] for path in USERDB_DIR.glob(f"{user_name(0)[:-1]}*:*.membership")}
    for path in USERDB_DIR.glob("honed-g*.group"):
        if path.stem not in used:
            path.unlink()
    with contextlib.suppress(OSError):  # other jobs have their views there
        VIEW_DIR.rmdir()


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold the lock: views share groups and directories. Only root can open, and so hold, the lock."""
    USERDB_DIR.mkdir(mode=0o755, exist_ok=True)
    fd = os.open(LOCK_PATH, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _inputs(layout: Layout, job: JobFiles) -> Iterator[Path]:
    """Yield the directories directly below jobs/ and staged/ that a job's plan grants access to, except its own."""
    try:
        grant = PlanFile.read(job.plan_path).may_read
    except (KeyError, TypeError) as error:
        raise ViewError(f"its plan does not say what it may read: {error!r}") from error
    places = {
        top / path.relative_to(top).parts[0]
        for path in (grant.inputs if grant else ())
        for top in (layout.jobs_dir, layout.staged_dir)
        if ".." not in path.parts and path.is_relative_to(top) and path != top
    }
    yield from sorted(places - {job.place})


# -- the user ----------------------------------------------------------------------------------------------------------


def _register(job_id: int, who: Person) -> None:
    name = user_name(job_id)
    for gid in sorted(who.gids):
        _write(USERDB_DIR / f"honed-g{gid}.group", {"groupName": f"honed-g{gid}", "gid": gid})
        _write(USERDB_DIR / f"{name}:honed-g{gid}.membership", {})
    record = {
        "userName": name,
        "uid": who.uid,
        "gid": pwd.getpwuid(who.uid).pw_gid,
        "homeDirectory": "/nonexistent",
        "shell": "/usr/sbin/nologin",
        "locked": True,
        "disposition": "dynamic",
    }
    _write(USERDB_DIR / f"{name}.user", record)


def _write(path: Path, record: dict[str, object]) -> None:
    """Write a record. It is never empty: systemd treats an empty file as masked."""
    path.with_suffix(".new").write_text(json.dumps(record) + "\n", encoding="ascii")
    path.with_suffix(".new").replace(path)


def _check_registered(job_id: int, who: Person) -> None:
    try:
        uid, groups = pwd.getpwnam(user_name(job_id)).pw_uid, os.getgrouplist(user_name(job_id), min(who.gids))
    except KeyError:
        uid, groups = None, []
    if uid != who.uid or set(groups) != who.gids:
        raise ViewError(
            "the user database does not read /run/userdb: install libnss-systemd, and add `systemd` to the lines "
            "passwd: and group: in /etc/nsswitch.conf"
        )


def main() -> int:
    """Run the `honed-view` command."""
    parser = argparse.ArgumentParser(prog="honed-view", description=__doc__)
    parser.add_argument("job", type=int)
    parser.add_argument("--remove", action="store_true")
    options = parser.parse_args()
    try:
        if options.remove:
            remove(options.job)
        else:
            add(Layout(Path("/")), options.job)
    except (ViewError, OSError, ValueError) as error:
        print(f"<3>the file system view of job {options.job} could not be set up: {error}", file=sys.stderr)
        return 1
    return 0
