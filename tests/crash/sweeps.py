"""A sweep on its way to the arrivals of its jobs. `python sweeps.py SPOOL_DIR` spreads the one that is claimed there,
as honed does.

What must hold, whatever happens to that process, is in `violations`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from crash import traced
from crash.scene import Point, counted
from honed.job.arrival import Arrivals
from honed.job.spool import Spool
from honed.job.sweeping import Sweeps
from honed.system import untrusted
from honed.system.layout import Layout

CALLS = ("openat", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "close")
UID = 20_000
MEMBERS = [{"document": {"base_model": "/m", "n": n}, "values": {"n": n}} for n in range(3)]


def prepare(root: Path) -> None:
    """A spool with one claimed sweep, whose copy is being checked."""
    spool = Spool(Layout(root))
    arrivals = Arrivals(spool)
    claim = arrivals.submit("grid.yaml", b"sweep: {n: [0, 1, 2]}\n", UID)
    arrivals.copy(claim, max_bytes=10**6)
    spool.close()


def spread(root: Path) -> None:
    spool = Spool(Layout(root))
    arrivals = Arrivals(spool)
    for claim in arrivals.claims():
        if claim.name == "grid.yaml":
            Sweeps(spool).spread(claim, UID, MEMBERS)
            print("done", flush=True)
    spool.close()


def run(root: Path, *, tracer: Sequence[str] = ()) -> bool:
    """Spread it in a process of its own. Returns True if that ended well."""
    ended = traced.run([sys.executable, str(Path(__file__)), str(Layout(root).spool_dir)], tracer=tracer)
    return ended.stdout.split() == ["done"]


def violations(root: Path) -> list[str]:
    """What is wrong after the next start, which spreads the sweep if that is still to be done."""
    spool = Spool(Layout(root))
    try:
        spool.recover()
        arrivals, sweeps = Arrivals(spool), Sweeps(spool)
        sweeps.recover()
        arrivals.recover()
        before = arrivals.claims()
        for claim in before:
            if claim.name == "grid.yaml":
                sweeps.spread(claim, UID, MEMBERS)
        if len(before) not in (1, 3):
            return [f"{len(before)} arrivals"]
        found = arrivals.claims()
        told = [(each.name, each.uid, json.loads(untrusted.read_plain(each.path))) for each in found]
    finally:
        spool.close()
    wrong = []
    if [(name, uid, document["n"]) for name, uid, document in told] != [
        (f"grid-{n + 1}.json", UID, n) for n in range(3)
    ]:
        wrong.append(f"there are {told}")
    if len({document["group"]["id"] for _, _, document in told}) != 1:
        wrong.append("several groups")
    if len({each.id for each in found}) != 3 or any(each.id <= 1 for each in found):
        wrong.append(f"numbers {[each.id for each in found]}")
    left = [
        *(spool.dir / "sweeps").iterdir(),
        *(path for path in spool.claimed_dir.iterdir() if not any(path.iterdir())),
    ]
    return wrong + [f"left: {path}" for path in left] + [f"hidden: {path}" for path in spool.dir.rglob(".*")]


def points_of(directory: Path) -> list[Point]:
    """What an undisturbed process calls on files of the instance, in order."""
    root, trace_path = directory / "undisturbed", directory / "undisturbed.trace"
    prepare(root)
    arguments = ("-q", "-y", "-o", str(trace_path), "-e", f"trace={','.join(CALLS)}")
    assert run(root, tracer=arguments)
    assert violations(root) == []
    return [point for point in counted(trace_path, root) if re.search("/(claimed|seq|.seq|sweeps)", point.path)]


if __name__ == "__main__":
    traced.begin()
    spread(Path(sys.argv[1]).parents[2])
