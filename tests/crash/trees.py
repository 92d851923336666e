"""Trees that a person planted in each place that honed visits, and a start of honed on them.

A tree is deep, wide, odd, or hides a file system that never answers. honed must become ready, accept another user's
file, end the job that it found running, and remove the pruned jobs, with all that lies in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hanging import hanging
from honed.job import leftover, tree
from honed.job.job import State
from honed.system.error import HonedError
from process.harness import Instance
from waiting import wait_for

#: Another user, who drops a file after honed's start.
OTHER_UID = 4711
#: Number of a claim that a crash left behind, and names of a staged copy and of an entry of the row cache.
CLAIMED, STAGED, ROWS = "900", "0123456789abcdef", "0123456789abcdef0123456789abcdef"
#: Seconds within which each step must be done, however busy the machine is.
PATIENCE_SEC = 120.0
#: The kind of tree that is all of them.
EVERY = "every"
_LIVE, _ENDED, _PRUNED = "until.live", "make.ended", "make.pruned"


@dataclass(frozen=True)
class Size:
    """Of the deep and the wide trees, each."""

    num_levels: int = 5_000
    num_names: int = 3_000


@dataclass
class Found:
    """What a start on such trees gave."""

    num_planted: int
    ready_cpu_sec: float = 0.0
    ready_sec: float = 0.0
    accept_sec: float = 0.0  #: of the first file after the start, which waits for the imports of the check's process
    next_accept_sec: float = 0.0
    prune_sec: float = 0.0
    left: list[str] = field(default_factory=list)  #: what stays beside the jobs, and what is tried again
    broken: list[str] = field(default_factory=list)


# -- what is planted --------------------------------------------------------------------------------------------------


def deep(place: Path, name: str, size: Size) -> int:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(size.num_levels):
        each = name.format(0) if number == 0 else "d"
        os.mkdir(each, dir_fd=fd)
        below = os.open(each, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    return size.num_levels


def wide(place: Path, name: str, size: Size) -> int:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(size.num_names):
        os.mknod(name.format(1000 + number), dir_fd=fd)  # beside what is there
    os.close(fd)
    return size.num_names


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        fd = os.open(path.parent, os.O_PATH)
        one.bind(f"/proc/self/fd/{fd}/{path.name}")  # a long path is none of a socket's
        os.close(fd)


def _sparse(path: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 2**40)


def _closed(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below").chmod(0)
    path.chmod(0o500)


def _moded(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(b"{}")
        path.chmod(mode)

    return make


def _written(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


#: Kinds of things that are no regular file, or whose content or mode is odd.
ODD: tuple[Callable[[Path], object], ...] = (
    *(lambda path, to=to: path.symlink_to(to) for to in ("/", "/dev/zero", "/proc/self/environ", "/nowhere", "..")),
    lambda path: path.symlink_to(path.name),
    os.mkfifo,
    _bound,
    Path.mkdir,
    _sparse,
    _closed,
    *(_moded(mode) for mode in (0, 0o4755, 0o666)),
    *(_written(data) for data in (b"", bytes(4096), b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b" " * (2**20 + 1))),
    *(_written(data) for data in (b"[" * 100_000, b'{"a": ' + b"9" * 100_000 + b"}", b"{}")),
)
#: Names that are odd, of empty files.
ODD_NAMES = ("\n.json", "\x1b[31m.json", "-.json", "\udcff.json", "x" * 240 + ".json", ".json.reason", "%n%s{0}.json")


def odd(place: Path, name: str, _size: Size) -> int:
    is_hidden = name.startswith(".")
    for number, make in enumerate(ODD):
        make(place / (f"odd{number}.json" if is_hidden else name.format(10_000 + number)))
    for each in ODD_NAMES:
        (place / f"odd{each}").touch()
    return len(ODD) + len(ODD_NAMES)


def every(place: Path, name: str, size: Size) -> int:
    """Plant all of these side by side: one start of honed meets each of them in each place."""
    return sum(plant(place, name, size) for plant in (deep, wide, odd))


TREES: Mapping[str, Callable[[Path, str, Size], int]] = {"deep": deep, "wide": wide, "odd": odd, EVERY: every}
#: A file system that never answers, in each place: only root can mount it, where there is /dev/fuse.
SLOW = "slow"
#: Nothing is planted: what the others are compared with.
NONE = "none"


# -- a start on it ----------------------------------------------------------------------------------------------------


class Scene(Instance):
    """An instance with a job of each kind, in whose places something is planted."""

    is_warm = False  # as an installation starts it: the CPU time counts the imports

    def __init__(self, root: Path, size: Size) -> None:
        super().__init__(root)
        self.patience_sec = PATIENCE_SEC + size.num_names / 500
        self.staged_dir = self.layout.staged_dir / STAGED
        self.staged_dir.mkdir(parents=True)

    def prepare(self) -> None:
        """Leave a job that runs, one that has ended and one that is pruned, and no honed."""
        self.start()
        for name in (_ENDED, _PRUNED):
            self.arrive(name, name=name)
            self.wait_state(name, State.SUCCEEDED)
        staged = self.staged_dir / "rows.jsonl"  # it is removed once no unfinished job names it
        staged.write_bytes(self.dataset.read_bytes())
        self.arrive(_LIVE, name=_LIVE, datasets=[{"path": str(staged)}])
        self.wait_state(_LIVE, State.RUNNING)
        assert self.process is not None
        self.kill(signal.SIGKILL)
        spool = self.spool
        spool.prune(next(job for job in spool.jobs(State.SUCCEEDED) if job.name == _PRUNED))

    def places(self) -> dict[Path, str]:
        """Return the directories in which something is planted, each with a pattern of the names there that honed's
        listings have a use for, where they have any."""
        spool = self.spool.dir
        live, ended = (self.layout.job(self._number(name)).dir for name in (_LIVE, _ENDED))
        pruned = self.layout.job(next(iter(self.spool.pruned.ids()))).dir
        found = {
            spool / "incoming": ".{}",
            spool / "rejected": "{}.json",
            spool / "claimed" / CLAIMED / "tree.json": "{}",
            self.staged_dir: "{}",
            self.layout.rows_dir / str(os.geteuid()) / ROWS: "{}",
            pruned: "{}",
        }
        for directory in (live, ended):
            found |= {directory: "spec.{}", directory / "attempts": "{}", directory / "attempts/1": "{}"}
            found |= {directory / "checkpoints": "checkpoint-{}", directory / "output": "{}.safetensors"}
        for place in found:
            place.mkdir(parents=True, exist_ok=True)
        return found

    def _number(self, name: str) -> int:
        job = self.job(name)
        assert job is not None
        return job.id

    def start_on(self, found: Found) -> None:
        began = time.monotonic()
        self.start()
        found.ready_sec, found.ready_cpu_sec = time.monotonic() - began, self.cpu_sec()

    def cpu_sec(self) -> float:
        """Return the CPU time of the daemon, without that of its children; 0 if it has ended."""
        assert self.process is not None
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def accept_another(self, name: str) -> float:
        """Drop another user's file. Returns the seconds until it is a job."""
        keys = {"base_model": str(self.model), "datasets": [{"path": str(self.dataset)}], "lora": {"r": 4}}
        (hidden := self.incoming_dir / f".{name}.tmp").write_text(json.dumps(keys | {"name": "succeed.other"}))
        if os.geteuid() == 0:
            os.chown(hidden, OTHER_UID, OTHER_UID)
        began = time.monotonic()
        self.put(hidden, name)

        def accepted() -> bool:
            return not self.is_up or any(job.source == name for job in self.spool.all_jobs().values())

        wait_for(accepted, PATIENCE_SEC, what=f"{name} accepted", account=self.account)
        return time.monotonic() - began

    def end_all(self) -> list[str]:
        """Let the job that runs end. Returns what is wrong with the jobs."""
        self.go(_LIVE)
        jobs = self.spool.all_jobs

        def ended() -> bool:
            return not self.is_up or all(job.state.is_final for job in jobs().values())

        wait_for(ended, self.patience_sec, what="all jobs ended", account=self.account)
        bad = [job for job in jobs().values() if job.state is not State.SUCCEEDED or len(job.attempts) != 1]
        return [f"{job.name} is {job.state} after {len(job.attempts)} attempts: {job.error}" for job in bad]

    def prune_all(self) -> float:
        """Prune all jobs. Returns the seconds until each is removed or left."""
        began = time.monotonic()
        numbers = [str(job.id) for job in self.spool.all_jobs().values()]
        with contextlib.suppress(HonedError):
            self.client.ask("prune", ids=numbers, dry_run=False)
        wait_for(
            lambda: not self.is_up or not self.job_dirs(),
            self.patience_sec,
            what="the jobs removed",
            account=lambda: f"{self.job_dirs()}\n{self.account()}",
        )
        return time.monotonic() - began

    def job_dirs(self) -> list[str]:
        """Return the directories of jobs that are neither removed nor left under another name."""
        return [path.name for path in self.layout.jobs_dir.iterdir() if path.name.isdecimal()]

    def left(self) -> list[str]:
        """Return what is left: what is tried again, then each place beside the jobs that still has something."""
        again = [f"{Path(each.path).name}: {each.problem}" for each in leftover.listed(self.layout)]
        others = [self.incoming_dir, self.spool.rejected_dir, self.spool.claimed_dir, self.layout.staged_dir]
        counts = {place.name: sum(1 for _ in place.iterdir()) for place in others}
        return again + [f"{name}/: {count:,} names" for name, count in counts.items() if count]


def started_on(kind: str, root: Path, size: Size) -> Found:
    """Plant one kind of tree in each place, start honed on it, and prune. Removes all of it."""
    scene = Scene(root, size)
    with contextlib.ExitStack() as stack:
        stack.callback(tree.clear, root)
        stack.callback(scene.end)
        scene.prepare()
        mounts = stack.enter_context(contextlib.ExitStack())
        found = Found(0)
        for place, name in scene.places().items():
            if kind == NONE:
                continue
            if kind == SLOW:
                (over := place / "slow").mkdir()
                mounts.enter_context(hanging(over))
                found.num_planted += 1
            else:
                found.num_planted += TREES[kind](place, name, size)
        scene.start_on(found)
        found.accept_sec = scene.accept_another("other.json")
        found.next_accept_sec = scene.accept_another("next.json")
        found.broken = scene.end_all()
        found.prune_sec, found.left = scene.prune_all(), scene.left()
        if not scene.is_up:
            found.broken.append("honed ended")
        scene.stop()
        if scene.wait() != 0:
            found.broken.append(f"honed ends with {scene.wait()}")
        mounts.close()
        if kind == SLOW:
            scene.start()
            wait_for(
                lambda: not leftover.listed(scene.layout), PATIENCE_SEC, what="nothing left", account=scene.account
            )
            scene.stop()
    return found
