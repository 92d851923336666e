"""The users' caches of encoded rows: a job finds what another job of the same user has encoded.

    rows/<uid>/                 of one submitter: only the user that their workers run as may read it
        <key>/tokens.arrow      hard links to the files that a job's worker made in its own directory
              rows.arrow  MANIFEST.json
              USED              {"jobs": […]} have made or read the entry; its time of change is that of the last use
        .<key>.new/             an entry in the making
    rows/.old/                  entries on their way out, which removal.py deletes

Only honed writes here. A worker encodes into its job's directory (see worker/rows/cache.py) and reports the entry by an
event; honed links its files, and removes the job's own once it has succeeded. Workers read the directory of their
submitter, the only one in their unit's view, and compare every file with its hash. A job with code of its own takes no
part: it could write rows that another job reads.

An entry is removed with the last job that used it, and sooner if the entries of all users exceed the limit: then it is
the one that was not used for the longest time, of the user who has the most, and nobody within an equal share of the
limit loses one. Jobs with a worker keep theirs: also beyond the limit, and at nobody else's cost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.job import tree
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.shape import CachedRows
from honed.system import access, untrusted
from honed.system.access import ENTER, READ, Acl
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

log = logging.getLogger(__name__)

#: The files of an entry; see worker/rows/table.py.
FILES = ("tokens.arrow", "rows.arrow", "MANIFEST.json")
#: In a worker's environment: the cache that it may read.
VARIABLE = "HONED_SHARED_ROWS"
#: Entries at most, of all users.
MAX_ENTRIES = 2000
#: Share of the space without the cache that it may take: the rest is for checkpoints and output.
MAX_SHARE = 0.25
#: Names in the directory of a job's rows that are looked at; a worker leaves two entries there.
MAX_NAMES = 64
_USED, _OLD = "USED", ".old"
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass
class Entry:
    """One entry; its directory is `rows/<uid>/<name>`."""

    uid: int
    name: str
    num_bytes: int
    used_at: float  #: seconds since the epoch
    jobs: frozenset[int]


class RowCache:
    """The entries of all users. `limit` returns the bytes that they may take; `working` the jobs that have a worker,
    and the users of these."""

    def __init__(
        self,
        layout: Layout,
        limit: Callable[[], int],
        *,
        working: Callable[[], Mapping[int, int]] = dict,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._layout = layout
        self._dir = layout.rows_dir
        self._limit = limit
        self._working = working
        self._now = now
        self._entries: dict[tuple[int, str], Entry] | None = None
        self._fault = ""  # the last one that was logged
        self.has_old = False  #: True if `rows/.old` is to be deleted

    # -- for workers --------------------------------------------------------------------------------------------------

    def environment(self, job: Job) -> dict[str, str]:
        """Return the variable that lets a job's worker read its user's cache; empty if the job takes no part."""
        if self._limit() <= 0 or has_code(self._layout, job.id):
            return {}
        try:
            directory = self._opened(job.uid)
        except OSError as error:
            self._complain(error)
            return {}
        return {VARIABLE: str(directory)} if directory is not None else {}

    def _opened(self, uid: int) -> Path | None:
        """Return a user's directory, created if missing; None if it could not be closed to others."""
        directory = self._dir / str(uid)
        if directory.is_dir():
            return directory
        with contextlib.suppress(FileExistsError):
            self._dir.mkdir(mode=0o711)
        new = self._dir / f".{uid}.new"
        tree.remove(new)
        new.mkdir(mode=0o700)
        worker = access.worker_of(self._layout.root, uid, self._layout.jobs_dir)
        if worker is not None:
            acl = Acl(owner=7, group=0, other=0, users={uid: READ | ENTER, worker.uid: READ | ENTER}, groups={})
            if not access.set_acl(new, acl, inherited=True):
                new.rmdir()
                return None
        new.rename(directory)
        return directory

    # -- entries ------------------------------------------------------------------------------------------------------

    def take(self, job: Job, names: Iterable[str]) -> None:
        """Add the entries that a job's worker has made, and note the use of those that it found."""
        if self._limit() <= 0 or has_code(self._layout, job.id):
            return
        for name in names:
            if _NAME.fullmatch(name):
                try:
                    self._take(job, name)
                except OSError as error:
                    self._complain(error)
        self.trim()

    def finish(self, job: Job) -> None:
        """Remove the rows in the directory of a job that has succeeded: no later attempt needs them."""
        if self._dir.is_dir():  # else its worker has removed them
            try:
                self._set_aside(self._layout.files(job.id).place / "rows")
            except OSError as error:
                self._complain(error)

    def _take(self, job: Job, name: str) -> None:
        entry = self._known.get((job.uid, name))
        with (
            contextlib.suppress(FileNotFoundError),
            untrusted.directory(self._layout.files(job.id).rows_dir / name) as fd,
        ):
            infos = [os.stat(file, dir_fd=fd, follow_symlinks=False) for file in FILES]
            if all(stat.S_ISREG(info.st_mode) for info in infos) and not (entry and self._is_of(entry, infos)):
                self._link(job.uid, name, fd)
                jobs = entry.jobs if entry is not None else frozenset()
                entry = Entry(job.uid, name, sum(map(_taken, infos)), 0.0, jobs)
        if entry is not None:
            # Known first: on a full disk its use may not be written, but its bytes count.
            self._known[job.uid, name] = entry
            entry.jobs, entry.used_at = entry.jobs | {job.id}, self._now()
            self._note(entry)

    def _is_of(self, entry: Entry, infos: Iterable[os.stat_result]) -> bool:
        mine = _infos(self._place(entry))
        return len(mine) == len(FILES) and all(map(os.path.samestat, mine, infos))

    def _link(self, uid: int, name: str, fd: int) -> None:
        """Link the files in an open directory, which a worker can change, and put them in place of the entry."""
        if (directory := self._opened(uid)) is None:
            return
        new = directory / f".{name}.new"
        tree.remove(new)
        new.mkdir(mode=0o750)
        try:
            for file in FILES:
                os.link(file, new / file, src_dir_fd=fd, follow_symlinks=False)
                if not stat.S_ISREG(untrusted.info(PersonPath(new) / file).st_mode):
                    raise OSError(f"{file} is not a regular file")
        except BaseException:
            tree.remove(new)
            raise
        self._set_aside(directory / name)
        new.rename(directory / name)

    def _note(self, entry: Entry) -> None:
        """Write who used an entry. Not synced: an entry that nobody is known to use is removed at the next start."""
        path = self._place(entry) / _USED
        new = path.with_name(f".{_USED}.new")
        new.write_text(json.dumps({"jobs": sorted(entry.jobs)}))
        os.utime(new, (entry.used_at, entry.used_at))
        new.replace(path)

    def _place(self, entry: Entry) -> Path:
        return self._dir / str(entry.uid) / entry.name

    @property
    def _known(self) -> dict[tuple[int, str], Entry]:
        if self._entries is None:
            self._entries = {(item.uid, item.name): item for item in self._found()}
        return self._entries

    def _found(self) -> Iterator[Entry]:
        """Yield the entries on disk; set aside what a crash has left."""
        self.has_old = (self._dir / _OLD).is_dir()
        for directory in sorted(self._dir.iterdir()) if self._dir.is_dir() else ():
            if not directory.name.isdecimal():
                continue
            for path in sorted(directory.iterdir()):
                entry = _read(int(directory.name), path) if _NAME.fullmatch(path.name) else None
                if entry is not None:
                    yield entry
                    continue
                try:
                    self._set_aside(path)
                except OSError as error:  # it stays until the next start
                    self._complain(error)

    def num_bytes(self, uid: int | None = None) -> int:
        """Return the bytes of a user's entries, or of all."""
        return sum(item.num_bytes for item in self._known.values() if uid in {None, item.uid})

    # -- removal ------------------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Remove entries until the rest is within the limit."""
        if not self._known:
            return
        in_use = self._in_use()
        space = os.statvfs(self._dir)
        limit = min(self._limit(), int(MAX_SHARE * (space.f_bavail * space.f_frsize + self.num_bytes())))
        self._trim(limit, lambda entry: entry.num_bytes, in_use)
        self._trim(MAX_ENTRIES, lambda _entry: 1, in_use)

    def _trim(self, limit: int, size: Callable[[Entry], int], in_use: Container[int]) -> None:
        while (gone := _first_out(self._known.values(), limit, size, in_use)) is not None:
            if not self._remove(gone, "the cache of rows is full"):
                return  # tried again after the next entry, or at the next look

    def forget(self, jobs: Iterable[int]) -> None:
        """Remove the entries that no other job than these has used."""
        gone = frozenset(jobs)
        self._in_use()
        for entry in list(self._known.values()):
            if entry.jobs & gone:
                entry.jobs -= gone
                if entry.jobs:
                    try:
                        self._note(entry)
                    except OSError as error:  # on a full disk; the next start forgets jobs that are gone
                        self._complain(error)
                else:
                    self._remove(entry, "the last job that used it was removed")

    def forget_all_but(self, jobs: Container[int]) -> None:
        """Remove the entries that none of these jobs has used, after a crash in a removal."""
        used = {number for entry in self._known.values() for number in entry.jobs}
        self.forget(number for number in used if number not in jobs)
        for entry in list(self._known.values()):
            if not entry.jobs:
                self._remove(entry, "no job is known to use it")

    def listed(self, *, uid: int | None) -> list[Entry]:
        """Return the entries of a user, or of all, that no job with a worker uses."""
        in_use = self._in_use()
        mine = (item for item in self._known.values() if uid is None or item.uid == uid)
        return [item for item in mine if not any(number in in_use for number in item.jobs)]

    def remove(self, entries: Iterable[Entry], why: str) -> None:
        for entry in entries:
            self._remove(entry, why)

    def _in_use(self) -> Container[int]:
        """Return the jobs that have a worker. Their entries know of them afterwards, also of one ahead of its
        turn, whose events nobody reads yet: it may have found an entry, and may open it again."""
        working = self._working()
        for number, uid in working.items():
            for name in _names_in(self._layout.files(number).rows_dir):
                if (entry := self._known.get((uid, name))) is not None:
                    entry.jobs |= {number}
        return working

    def _remove(self, entry: Entry, why: str) -> bool:
        try:
            self._set_aside(self._place(entry))
        except OSError as error:
            self._complain(error)
            return False
        del self._known[entry.uid, entry.name]
        log.info("%s: removed %d bytes of encoded rows: %s", self._place(entry), entry.num_bytes, why)
        return True

    def _set_aside(self, path: Path) -> None:
        """Take a directory away with one rename; the removal process deletes it."""
        if not os.path.lexists(path):
            return
        old = self._dir / _OLD
        for _ in range(100):  # the child may remove the directory meanwhile
            with contextlib.suppress(FileExistsError):
                old.mkdir(mode=0o700)
            try:
                path.rename(old / f"{path.parent.name}.{path.name}.{time.monotonic_ns()}")
            except FileNotFoundError:
                continue
            break
        self.has_old = True

    def _complain(self, error: OSError) -> None:
        """Log a fault of the cache, once: jobs encode their rows themselves."""
        fault = error.strerror or str(error)
        if fault != self._fault:
            log.warning("%s: rows are not shared between jobs: %s", self._dir, error)
        self._fault = fault


def _first_out(
    entries: Collection[Entry], limit: int, size: Callable[[Entry], int], in_use: Container[int]
) -> Entry | None:
    """Return the entry that is removed first; None if the sizes are within the limit, or each entry is in use or of a
    user who is within an equal share of it."""
    sums: dict[int, int] = defaultdict(int)
    for entry in entries:
        sums[entry.uid] += size(entry)
    if sum(sums.values()) <= limit:
        return None
    above = (entry for entry in entries if sums[entry.uid] * len(sums) > limit)
    free = (item for item in above if not any(number in in_use for number in item.jobs))
    return min(free, key=lambda item: (-sums[item.uid], item.used_at), default=None)


def _names_in(rows_dir: PersonPath) -> list[str]:
    """Return some names in the directory of a job's rows, which its worker can change."""
    with contextlib.suppress(OSError):
        return untrusted.names_in(rows_dir, limit=MAX_NAMES)
    return []


def _infos(place: Path) -> list[os.stat_result]:
    """Return what lstat(2) tells of an entry's files that are there: the inodes are a worker's, which may have mounted
    something over one."""
    return [info for _, info in untrusted.infos(PersonPath(place), FILES)]


def _taken(info: os.stat_result) -> int:
    """Return the bytes of disk space that a file takes: one with holes takes less than its size."""
    return min(info.st_size, info.st_blocks * 512)


def answer(entries: Iterable[Entry]) -> list[CachedRows]:
    """Return entries in the format of `prune --json`."""
    return [{"uid": entry.uid, "key": entry.name, "num_bytes": entry.num_bytes} for entry in entries]


def old_dir(layout: Layout) -> Path:
    return layout.rows_dir / _OLD


def has_code(layout: Layout, job_id: int) -> bool:
    """Return True if a job runs code of its own, or if that is not certain: a worker could replace its plan."""
    files = layout.files(job_id)
    try:
        plan = PlanFile.from_json(untrusted.read_plain(files.plan_path, owners={files.owner}))
        return bool(plan.spec.get("trust_remote_code"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def names(data: Mapping[str, Any]) -> list[str]:
    """Return the entries in a worker's event `rows`."""
    entries = data.get("entries")
    return [item for item in entries if isinstance(item, str)][:2] if isinstance(entries, list) else []


def _read(uid: int, path: Path) -> Entry | None:
    """Return the entry in a directory; None if it is not whole, or nobody is known to use it."""
    try:
        used = json.loads((path / _USED).read_bytes())
        jobs = frozenset(int(item) for item in used["jobs"])
        infos = _infos(path)
        is_whole = jobs and len(infos) == len(FILES)
        return (
            Entry(uid, path.name, sum(map(_taken, infos)), (path / _USED).stat().st_mtime, jobs) if is_whole else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
