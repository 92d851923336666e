"""Power cuts: `python powercut.py FILESYSTEM DIRECTORY [--of WHOM] [--points N] [--mutant NAME …]`, as
root.

An instance lies on a file system in a loop file. honed, or what saves checkpoints and outputs, is killed at one of its
system calls, with all that it started; the loop file is copied as it is, which is what a disk has when the power goes,
and the copy is mounted: what was never synced is not in it. Then honed is started on the copy, or everything saved
again, and looked at. An unrelated file that is synced before the copy makes the file system write its journal, as any
other program may: names can then be there without what they hold.

Each cut is made with that and without. Prints a line of JSON for each mutant, or one for none: points, and what was
wrong at which.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import warm
from crash import saves, submissions
from crash.scene import KILL, Hit, Point, Scene, points_of, spread

#: MiB, and options that put off what a kernel would write by itself.
FILE_SYSTEMS = {
    "ext4": (64, "noauto_da_alloc,commit=600"),
    "xfs": (320, "noatime"),
    "btrfs": (160, "commit=600"),
}
#: What says that something is durable; between two of these nothing is promised.
CALLS = ("fsync", "rename", "unlink", "fdatasync")
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000


class Victim(Protocol):
    """Whom the power cut meets, below `root`."""

    def prepare(self, root: Path) -> None: ...

    def points(self, directory: Path, *, mutant: str | None) -> list[Point]:
        """Where it is cut; the last one may be none of its calls: its end."""

    def run(self, root: Path, hit: Hit, *, mutant: str | None) -> None: ...

    def violations(self, root: Path) -> list[str]:
        """What is wrong with what the cut left of the run before, once it has been started again."""


class Daemon:
    """honed, with its shims and its workers."""

    def prepare(self, root: Path) -> None:
        Scene(root).prepare()

    def points(self, directory: Path, *, mutant: str | None) -> list[Point]:
        return [point for point in points_of(directory, mutant=mutant) if point.call in CALLS]

    def run(self, root: Path, hit: Hit, *, mutant: str | None) -> None:
        run_to_its_end(lambda: Scene(root, mutant=mutant).honed(tracer=hit.arguments(root)))

    def violations(self, root: Path) -> list[str]:
        scene = Scene(root)
        status = scene.honed()
        found = [f"started again it ends with {status}"] if status != 0 else []
        return found + scene.violations()


class Saves:
    """What a worker does with checkpoints and outputs."""

    #: What changes something; and the end, when everything was said to be done.
    CALLS = ("write", "sendfile", "fsync", "rename", "renameat2", "unlinkat", "mkdir", "rmdir")
    END = Point("end", 1)

    def __init__(self) -> None:
        self._num_done = 0

    def prepare(self, root: Path) -> None:
        saves.prepare(root)

    def points(self, directory: Path, *, mutant: str | None) -> list[Point]:
        return [*(point for point in saves.points_of(directory, mutant=mutant) if point.call in self.CALLS), self.END]

    def run(self, root: Path, hit: Hit, *, mutant: str | None) -> None:
        tracer = () if hit.point == self.END else saves.hit_arguments(root, hit)
        self._num_done = saves.run(root, tracer=tracer, mutant=mutant)

    def violations(self, root: Path) -> list[str]:
        return saves.violations(root, self._num_done)


class Submissions:
    """honed, while it takes job files over its socket."""

    def __init__(self) -> None:
        self._num_done = 0

    def prepare(self, root: Path) -> None:
        submissions.prepare(root)

    def points(self, directory: Path, *, mutant: str | None) -> list[Point]:
        found = submissions.points_of(directory, mutant=mutant)
        return [*(point for point in found if point.call in (*CALLS, "write", "mkdir")), Saves.END]

    def run(self, root: Path, hit: Hit, *, mutant: str | None) -> None:
        tracer = () if hit.point == Saves.END else hit.arguments(root)
        self._num_done = submissions.run(root, tracer=tracer, mutant=mutant)

    def violations(self, root: Path) -> list[str]:
        return submissions.violations(root, self._num_done)


VICTIMS: dict[str, type[Daemon] | type[Saves] | type[Submissions]] = {
    "honed": Daemon,
    "saves": Saves,
    "submissions": Submissions,
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def unshare(flags: int) -> None:
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def run_to_its_end(begin: Callable[[], object]) -> None:
    """Call it in a pid namespace, and end all that it has started: with the first process of a pid namespace all others
    go, as they do with the power."""
    pid = os.fork()
    if pid == 0:
        try:
            unshare(CLONE_NEWNS | CLONE_NEWPID)
            if (first_pid := os.fork()) != 0:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(first_pid, 0)[1]))
            libc.mount(b"proc", b"/proc", b"proc", 0, None)  # strace reads there what a descriptor is of
            with warm.forks_of_us():
                begin()
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


class Disk:
    """A file system in a file, and what is mounted of it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.base, self.image, self.cut = (directory / f"{name}.img" for name in ("base", "image", "cut"))
        self.place = directory / "disk"
        self.place.mkdir(exist_ok=True)
        self.size, self.options = FILE_SYSTEMS[kind]

    def make(self, victim: Victim) -> None:
        with self.base.open("wb") as file:
            file.truncate(self.size << 20)
        run(f"mkfs.{self.kind}", "-q", "-F" if self.kind == "ext4" else "-f", str(self.base))
        self.mount(self.base)
        victim.prepare(self.place / "root")
        run("sync", "-f", str(self.place))
        self.unmount()

    def mount(self, image: Path) -> None:
        run("mount", "-o", f"loop,{self.options}", str(image), str(self.place))

    def unmount(self) -> None:
        run("umount", str(self.place))

    def copy(self, source: Path, target: Path) -> None:
        run("cp", "--sparse=always", str(source), str(target))


def cut(disk: Disk, victim: Victim, hit: Hit, *, syncs_other: bool, mutant: str | None) -> list[str]:
    """One power cut; what is wrong after it."""
    disk.copy(disk.base, disk.image)
    disk.mount(disk.image)
    try:
        victim.run(disk.place / "root", hit, mutant=mutant)
        if syncs_other:
            fd = os.open(disk.place / "other", os.O_CREAT | os.O_WRONLY)
            os.write(fd, b"x")
            os.fsync(fd)
            os.close(fd)
        disk.copy(disk.image, disk.cut)
    finally:
        disk.unmount()
    try:
        disk.mount(disk.cut)
    except subprocess.CalledProcessError as error:
        return [f"cannot be mounted: {error.stderr.decode()}"]
    try:
        return victim.violations(disk.place / "root")
    except Exception as error:  # noqa: BLE001 - what cannot even be read is the gravest violation
        return [f"cannot be looked at: {error!r}"]
    finally:
        disk.unmount()


@dataclass(frozen=True)
class Found:
    """What a matrix of cuts has shown."""

    num_cuts: int
    broken: dict[str, list[str]]


def cut_at(
    disk: Disk, victim: Victim, points: Sequence[Point], *, mutant: str | None, is_whole: bool, until_seen: bool
) -> Found:
    broken: dict[str, list[str]] = {}
    num_cuts = 0
    for index, point in enumerate(points):
        for syncs_other in (True, False) if is_whole else (index % 3 != 2,):
            num_cuts += 1
            if found := cut(disk, victim, Hit(point, KILL), syncs_other=syncs_other, mutant=mutant):
                broken[f"{point}{', journal' if syncs_other else ''}"] = found
                if until_seen:
                    return Found(num_cuts, broken)
    return Found(num_cuts, broken)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=FILE_SYSTEMS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--of", choices=VICTIMS, default="honed")
    parser.add_argument("--points", type=int, default=10**6, help="so many, evenly spread")
    parser.add_argument("--at", default="", help="only points like this regular expression")
    parser.add_argument("--mutant", nargs="+", default=[None])
    parser.add_argument("--until-seen", action="store_true", help="end with the first violation")
    options = parser.parse_args()
    unshare(CLONE_NEWNS)
    run("mount", "--make-rprivate", "/")
    with warm.forks_of_us():
        cut_as_told(options)
    return 0


def cut_as_told(options: argparse.Namespace) -> None:
    victim: Victim = VICTIMS[options.of]()
    disk = Disk(options.kind, options.directory)
    disk.make(victim)
    for mutant in options.mutant:
        points = [
            point for point in victim.points(options.directory, mutant=mutant) if re.search(options.at, str(point))
        ]
        is_whole = options.points >= len(points)
        chosen = spread(points, options.points)
        found = cut_at(disk, victim, chosen, mutant=mutant, is_whole=is_whole, until_seen=options.until_seen)
        print(
            json.dumps(
                {
                    "file_system": options.kind,
                    "mutant": mutant,
                    "num_points": len(points),
                    "num_cuts": found.num_cuts,
                    "broken": found.broken,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
