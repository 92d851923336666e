"""Python environments with honed or its training packages, for the programs that make, replace and remove them:
scripts/install and honed-setup. Imports nothing outside of Python's library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

#: The group of entry points that makes a function a metric.
METRICS = "honed.metrics"


def say(text: str) -> None:
    """Print a line at once. If a pipe's reader has gone, this and later output is dropped: the work continues."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def run_shown(command: Sequence[str | Path], *, environment: Mapping[str, str]) -> int:
    """Run a program and print each line of its output as it comes. Returns its exit status."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(list(command), env=dict(environment), text=True, errors="replace", **streams) as process:  # type: ignore[call-overload]
        for line in process.stdout:
            say(line.rstrip("\n"))
    return int(process.returncode)


def copy_metrics(before: Path, packages: Path) -> Iterator[str]:
    """Copy packages with an administrator's metrics from the packages of an environment to those of its successor: jobs
    in the queue name them. Yields a line for each.
    """
    there = {package.name for package in metadata.distributions(path=[str(packages)])}
    for package in metadata.distributions(path=[str(before)]):
        if package.name in there or not package.entry_points.select(group=METRICS):
            continue
        if package.files is None:
            yield f"warning: {package.name} has metrics but no list of its files: install it again"
            continue
        yield f"{package.name} {package.version}: copied, as it has metrics; not so what it depends on"
        for file in package.files:
            if ".." not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(before / file, target)


def running_from(directory: Path) -> Iterator[int]:
    """Yield the processes that started in an environment: their command line begins with its Python, or their variables
    name it (training.VARIABLE).
    """
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_named = f"{directory}/".encode() in (path / "cmdline").read_bytes()
            if is_named or f"={directory}\0".encode() in (path / "environ").read_bytes():
                yield int(path.name)
