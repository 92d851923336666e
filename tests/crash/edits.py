"""An edit of a job that waits. `python edits.py ROOT` makes the one that is kept there, as honed does.

What must hold, whatever happens to that process, is in `violations`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from crash import traced
from crash.scene import Point, counted
from honed.job.arrival import Arrivals
from honed.job.editing import Edits
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

CALLS = ("openat", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "close")
OLD, NEW = b'{"priority": 0}\n', b'{"priority": 7}\n'


def prepare(root: Path) -> None:
    """A spool with one queued job, whose owner wants another file for it."""
    spool = Spool(Layout(root))
    arrivals = Arrivals(spool)
    claim = arrivals.submit("a.json", OLD, 0)
    arrivals.copy(claim, max_bytes=10**6)
    job = Job(id=claim.id, name="a", submitted_at=1.0, source=claim.name, uid=0, output_dir="/o")
    arrivals.admit(job, claim, PlanFile({"spec": {"priority": 0}}))
    spool.close()


def make(root: Path, *, is_again: bool = False) -> None:
    """Keep the new file and make the edit; `is_again`: go on with what a crash has left, which may be nothing."""
    spool = Spool(Layout(root))
    try:
        spool.recover()
        edits = Edits(spool)
        found = list(edits.take_up())
        if not is_again:
            [job] = spool.all_jobs().values()
            found = [(job, edits.put(job, NEW, ".json"))]
        for job, path in found:
            changes = {} if job.is_being_edited else {"priority": 7}
            edits.make(job, path, {**changes, "is_deferred": False}, PlanFile({"spec": {"priority": 7}}))
    finally:
        spool.close()


def run(root: Path, *, tracer: Sequence[str] = ()) -> bool:
    """Make it in a process of its own. Returns True if that ended well."""
    return traced.run([sys.executable, str(Path(__file__)), str(root)], tracer=tracer).returncode == 0


def facts(root: Path) -> tuple[int, bytes, int, bool]:
    """The priority in the entry, the job file, the priority in the plan, and whether the job may start."""
    spool = Spool(Layout(root), lock=False)
    [job] = spool.all_jobs().values()
    files = spool.layout.job(job.id)
    plan = PlanFile.read(PersonPath.own(files.plan_path))
    return job.priority, files.spec_path.read_bytes(), plan.spec["priority"], not job.is_deferred


def violations(root: Path, *, is_done: bool) -> list[str]:
    """What is wrong as the crash has left it, and after the next start."""
    wrong = []
    whole = [(0, OLD, 0, True), (7, NEW, 7, True)]
    if (found := facts(root)) not in whole and found[-1]:
        wrong.append(f"a half-changed job could start: {found}")
    make(root, is_again=True)
    if (found := facts(root)) not in whole[int(is_done) :]:
        wrong.append(f"after the next start: {found}")
    spool = Spool(Layout(root), lock=False)
    [job] = spool.all_jobs().values()
    if len(job.edited_at) != job.priority // 7 or job.is_being_edited:
        wrong.append(f"edited {len(job.edited_at)} times")
    left = [*spool.dir.rglob(".*"), *spool.layout.job(job.id).dir.rglob(".*"), *(spool.dir / "edits").glob("*")]
    return wrong + [f"left: {path}" for path in left]


def points_of(directory: Path) -> list[Point]:
    """What an undisturbed process calls on files of the instance, in order."""
    root, trace_path = directory / "undisturbed", directory / "undisturbed.trace"
    prepare(root)
    assert run(root, tracer=("-q", "-y", "-o", str(trace_path), "-e", f"trace={','.join(CALLS)}"))
    assert violations(root, is_done=True) == []
    return [point for point in counted(trace_path, root) if re.search(r"/(edits|queued|jobs)", point.path)]


if __name__ == "__main__":
    traced.begin()
    make(Path(sys.argv[1]))
