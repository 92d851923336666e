"""Trees that a person planted in each place that honed visits, and a start of honed on each. See scripts/torture.

Deep ones, wide ones, odd things, and, as root where there is /dev/fuse, a file system that never answers. Status 1
where a bound is passed or something is wrong afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from crash import trees
from crash.trees import EVERY, NONE, SLOW, TREES, Found, Size
from honed.job import tree

#: Bounds, in seconds: of CPU until honed is ready, and until each of two files is accepted.
MAX_READY_SEC, MAX_ACCEPT_SEC = 5.0, 2.0


def broken(found: Found) -> list[str]:
    accept_sec = max(found.accept_sec, found.next_accept_sec)
    return [
        *found.broken,
        *([f"ready after {found.ready_cpu_sec:.2f} s of CPU"] if found.ready_cpu_sec >= MAX_READY_SEC else []),
        *([f"a file was accepted after {accept_sec:.2f} s"] if accept_sec >= MAX_ACCEPT_SEC else []),
    ]


def kinds() -> list[str]:
    can_mount = os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)
    return [NONE, *(kind for kind in TREES if kind != EVERY), *([SLOW] if can_mount else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", type=int, help="of each wide tree")
    parser.add_argument("--levels", type=int, default=Size.num_levels, help="of each deep tree")
    parser.add_argument("--kinds", nargs="+", choices=[NONE, *TREES, SLOW], default=kinds())
    options = parser.parse_args()
    size = Size(options.levels, options.names)
    is_broken = False
    heads = ("tree", "planted", "ready, CPU s", "ready, s", "first accepted, s", "next accepted, s", "pruned, s")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    with contextlib.ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="honed-trees-"))
        stack.callback(tree.clear, root)
        for kind in options.kinds:
            found = trees.started_on(kind, root / kind, size)
            accepts = (found.accept_sec, found.next_accept_sec)
            figures = (found.ready_cpu_sec, found.ready_sec, *accepts, found.prune_sec)
            cells = " | ".join(f"{each:.2f}" for each in figures)
            print(f"| {kind} | {found.num_planted:,} | {cells} |", flush=True)
            for words in found.left:
                print(f"left: {words}", flush=True)
            for words in broken(found):
                print(f"BROKEN: {kind}: {words}", flush=True)
                is_broken = True
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
