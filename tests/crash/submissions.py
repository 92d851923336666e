"""Job files that come over the control socket, on their way to the disk. `python submissions.py SPOOL_DIR` takes three,
as honed does; each number on stdout is one that its submitter was told of.

What must hold, whatever happens to that process, is in `violations`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from crash import traced
from crash.scene import Point, counted
from honed.job.arrival import Arrivals, Claim
from honed.job.spool import Spool
from honed.system import untrusted
from honed.system.layout import Layout

CALLS = ("openat", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "close")
#: Name, submitter and content, each of its own.
FILES = tuple(
    (f"{word}.json", 20_000 + number, f'{{"name": "{word}"}}'.encode() * 400)
    for number, word in enumerate(("first", "second", "third"))
)


def tell(root: Path, *, done: Callable[[Claim], None] = lambda _claim: None) -> None:
    spool = Spool(Layout(root))
    arrivals = Arrivals(spool)
    for name, uid, data in FILES:
        done(arrivals.submit(name, data, uid))
    spool.close()


def prepare(root: Path) -> None:
    """A spool as honed's first start leaves it."""
    Spool(Layout(root)).close()


def run(root: Path, *, tracer: Sequence[str] = (), mutant: str | None = None) -> int:
    """Submit all in a process of its own. Returns how many were said to be taken."""
    command = [sys.executable, str(Path(__file__)), str(Layout(root).spool_dir)]
    ended = traced.run(command, mutant=mutant, tracer=tracer)
    return len(ended.stdout.split())


def violations(root: Path, num_done: int, *, was_told: bool = False) -> list[str]:
    """What is wrong after the next start. `was_told`: the process lived on, so that the submitter of the next file was
    told that it was not taken."""
    spool = Spool(Layout(root), lock=False)  # what cannot be read raises, and leaves nothing open
    spool.recover()
    arrivals = Arrivals(spool)
    arrivals.recover()
    found = [(claim.name, arrivals.copy(claim, max_bytes=10**6, drops=False)) for claim in arrivals.claims()]
    told = [(name, copy.uid, untrusted.read_plain(copy.path)) for name, copy in found]
    allowed = [list(FILES[:num_done])] + ([] if was_told else [list(FILES[: num_done + 1])])
    wrong = [] if told in allowed else [f"after {num_done} there are {[each[:2] for each in told]}"]
    wrong += [f"left in claimed/: {path.name}" for path in spool.claimed_dir.iterdir() if not any(path.iterdir())]
    return wrong + [f"hidden: {path}" for path in spool.dir.rglob(".*")]


def points_of(directory: Path, *, mutant: str | None = None) -> list[Point]:
    """What an undisturbed process calls on files of the instance, in order."""
    root, trace_path = directory / "undisturbed", directory / "undisturbed.trace"
    prepare(root)
    arguments = ("-q", "-y", "-o", str(trace_path), "-e", f"trace={','.join(CALLS)}")
    assert run(root, tracer=arguments, mutant=mutant) == len(FILES)
    assert violations(root, len(FILES)) == []
    return [point for point in counted(trace_path, root) if re.search("/(claimed|seq|.seq)", point.path)]


if __name__ == "__main__":
    traced.begin()
    tell(Path(sys.argv[1]).parents[2], done=lambda claim: print(claim.id, flush=True))
