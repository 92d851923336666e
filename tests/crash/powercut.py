"""Power cuts: `unshare --mount python powercut.py FILESYSTEM DIRECTORY [--points N] [--mutant NAME]`, as root.

An instance lies on a file system in a loop file. honed is killed at one of its system calls, with all that it started;
the loop file is copied as it is, which is what a disk has when the power goes, and the copy is mounted: what was never
synced is not in it. Then honed is started on the copy, and looked at. An unrelated file that is synced before the copy
makes the file system write its journal, as any other program may: names can then be there without what they hold.

Each cut is made with that and without. Prints a line of JSON: points, and what was wrong at which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from crash.scene import KILL, Hit, Point, Scene, points_of, spread

#: MiB, and options that put off what a kernel would write by itself.
FILE_SYSTEMS = {
    "ext4": (64, "noauto_da_alloc,commit=600"),
    "xfs": (320, "noatime"),
    "btrfs": (160, "commit=600"),
}
#: What says that something is durable; between two of these nothing is promised.
CALLS = ("fsync", "rename", "unlink", "fdatasync")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Disk:
    """A file system in a file, and what is mounted of it."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.base, self.image, self.cut = (directory / f"{name}.img" for name in ("base", "image", "cut"))
        self.place = directory / "disk"
        self.place.mkdir(exist_ok=True)
        self.size, self.options = FILE_SYSTEMS[kind]

    def make(self) -> None:
        with self.base.open("wb") as file:
            file.truncate(self.size << 20)
        run(f"mkfs.{self.kind}", "-q", "-F" if self.kind == "ext4" else "-f", str(self.base))
        self.mount(self.base)
        Scene(self.place / "root").prepare()
        run("sync", "-f", str(self.place))
        self.unmount()

    def mount(self, image: Path) -> None:
        run("mount", "-o", f"loop,{self.options}", str(image), str(self.place))

    def unmount(self) -> None:
        run("umount", str(self.place))

    def copy(self, source: Path, target: Path) -> None:
        run("cp", "--sparse=always", str(source), str(target))


def cut(disk: Disk, hit: Hit, *, syncs_other: bool, mutant: str | None) -> list[str]:
    """One power cut; what is wrong after it."""
    disk.copy(disk.base, disk.image)
    disk.mount(disk.image)
    try:
        scene = Scene(disk.place / "root", mutant=mutant)
        # A pid namespace: with its first process all others go, as they do with the power.
        scene.honed(before=("unshare", "--pid", "--fork", "--kill-child", "strace", *hit.arguments))
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
        scene = Scene(disk.place / "root")
        status = scene.honed()
        found = [f"started again it ends with {status}"] if status != 0 else []
        return found + scene.violations()
    except Exception as error:  # noqa: BLE001 - what cannot even be read is the gravest violation
        return [f"cannot be looked at: {error!r}"]
    finally:
        disk.unmount()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=FILE_SYSTEMS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--points", type=int, default=10**6, help="so many, evenly spread")
    parser.add_argument("--mutant")
    parser.add_argument("--until-seen", action="store_true", help="end with the first violation")
    options = parser.parse_args()
    run("mount", "--make-rprivate", "/")
    disk = Disk(options.kind, options.directory)
    disk.make()
    points: list[Point] = [each for each in points_of(options.directory, mutant=options.mutant) if each.call in CALLS]
    broken: dict[str, list[str]] = {}
    num_cuts = 0
    for index, point in enumerate(spread(points, options.points)):
        both = (True, False) if options.points >= len(points) else (index % 3 != 2,)
        for syncs_other in both:
            num_cuts += 1
            if found := cut(disk, Hit(point, KILL), syncs_other=syncs_other, mutant=options.mutant):
                broken[f"{point}{', journal' if syncs_other else ''}"] = found
                if options.until_seen:
                    break
        if broken and options.until_seen:
            break
    print(json.dumps({"file_system": options.kind, "num_cuts": num_cuts, "broken": broken}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
