"""Work ahead yields to other work, with all of its threads and children, and returns where the kernel lets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from honed.worker.background import may_return_to

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user with and without rights")

#: Prints the nice values, IO priorities and out-of-memory scores of a process, a thread of it and a child, before work
#: ahead, during it and after it.
PROGRAM = """
import json, os, subprocess, sys, threading
from honed.worker.background import Background, _call_io
os.nice(5)
if sys.argv[1] == "nobody":
    os.setgid(65534); os.setuid(65534)
found = []
ids = [0]
def note():
    found.append([[os.getpriority(os.PRIO_PROCESS, each) for each in ids], _call_io(1, 1),
                  int(open("/proc/self/oom_score_adj").read())])
note()
background = Background()
ends = threading.Event()
thread = threading.Thread(target=ends.wait)
thread.start()
child = subprocess.Popen(["sleep", "60"])
ids += [thread.native_id, child.pid]
note()
background.end()
note()
child.kill(); ends.set()
print(json.dumps(found))
"""


def followed(user: str) -> list[list[int]]:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, user],
        check=True,
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    return list(json.loads(found.stdout))


@needs_root
def test_work_ahead_has_the_lowest_priority_and_returns_to_its_own_with_threads_and_children() -> None:
    before, ahead, after = followed("root")
    assert (before[0], ahead[0], after[0]) == ([5], [19, 19, 19], [5, 5, 5])
    assert (ahead[1], after[1]) == ((2 << 13) | 7, before[1])
    assert (before[2], ahead[2], after[2]) == (0, 1000, 0)


@needs_root
def test_processes_that_may_not_return_keep_their_priority() -> None:
    before, ahead, after = followed("nobody")
    assert (before[0], ahead[0], after[0]) == ([5], [5, 5, 5], [5, 5, 5])
    assert (ahead[1], after[1]) == ((2 << 13) | 7, before[1])


@pytest.mark.parametrize(
    ("limit", "capabilities", "may"),
    [(0, 0, False), (14, 0, False), (15, 0, True), (-1, 0, True), (0, 1 << 23, True), (0, ~(1 << 23), False)],
)
def test_a_limit_or_the_capability_lets_a_process_return(limit: int, capabilities: int, may: bool) -> None:
    assert may_return_to(5, limit, capabilities) is may
