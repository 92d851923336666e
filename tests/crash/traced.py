"""Processes that begin with their imports done, see warm.py, and under strace from there on: `run` starts one, and the
first that it does is `begin`. Its calls are few and the same each time; those of a cold start are ten thousand more."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import warm
from crash import mutants
from waiting import wait_for

#: What is asked for until strace has injected another error than that there is no such file.
MARK = "/honed/is/traced"
_PR_SET_PTRACER = 0x59616D61


def environment(*, mutant: str | None = None, tracer: Sequence[str] = ()) -> dict[str, str]:
    """What a process finds in its environment that is to have a bug, see mutants.py, and to be run under strace with
    these arguments."""
    found = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    found |= {} if mutant is None else {"HONED_TEST_MUTANT": mutant}
    return found | ({"HONED_TEST_TRACER": json.dumps(list(tracer))} if tracer else {})


def begin() -> None:
    """Have the bug and be traced, as the environment says. No module is compiled into a file from now on: the first
    process alone would do that, and shift the numbers of all later calls."""
    sys.dont_write_bytecode = True
    if mutant := os.environ.pop("HONED_TEST_MUTANT", None):
        mutants.plant(mutant)
    if tracer := json.loads(os.environ.pop("HONED_TEST_TRACER", "[]")):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        words = [f"{word},truncate" if word.startswith("trace=") else word for word in tracer]
        words += ["-P", MARK] if "-P" in words else []
        injection = "inject=truncate:error=EDOM:when=1"
        pid = os.posix_spawnp("strace", ["strace", *words, "-e", injection, "-p", str(os.getpid())], os.environ)
        while not _is_traced():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"strace does not trace: {words}"
            time.sleep(0.001)


def _is_traced() -> bool:
    try:
        os.truncate(MARK, 0)
    except OSError as error:
        return error.errno == errno.EDOM
    return False


def run(
    command: Sequence[str], *, mutant: str | None = None, tracer: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a process that calls `begin` to its end."""
    return warm.run(command, env=environment(mutant=mutant, tracer=tracer))


def wait_for_end(trace_path: Path) -> None:
    """Wait until strace has written the last of a trace that tells of ends (-q): it outlives what it traces."""
    # With -f each line begins with a thread; the first of them is the process.
    pattern = re.compile(r"\A(\d+ +)?(?s:.*)^\1?\+\+\+ (exited|killed) .*\n\Z", re.MULTILINE)
    wait_for(lambda: pattern.search(_text(trace_path)), what=f"strace's end of {trace_path}")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
