"""CPU time of each test with all processes that it starts: `--costs FILE` writes a line for each, dearest directories
are printed at the end.

Each test process enters a cgroup of its own, so that daemons that outlive their parents, booted guests and forks of
servers are counted too, and a server's imports for who first needed it; where there is none to be had, only what a test
process and the children that it waited for have used.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm

#: Directories of cgroups, the file with their CPU time, and the number of its units in a second.
PLACES = (
    ("/sys/fs/cgroup/cpuacct", "cpuacct.usage", 1e9),
    ("/sys/fs/cgroup/unified", "cpu.stat", 1e6),
    ("/sys/fs/cgroup", "cpu.stat", 1e6),
)
NUM_DEAREST = 60


def clock() -> Callable[[], float]:
    """Enter a cgroup, and return a function that reads the seconds of CPU time of all that is in it."""
    for place, name, unit in PLACES:
        directory = Path(place) / f"honed-costs-{os.getpid()}"
        with contextlib.suppress(OSError):
            if not (Path(place) / "cgroup.procs").exists():
                continue
            directory.mkdir()
            if (directory / name).exists():
                (directory / "cgroup.procs").write_text(str(os.getpid()))
                os.environ[warm.CGROUP] = str(directory / "cgroup.procs")
                return lambda: int((directory / name).read_text().split("user_usec")[0].split()[-1]) / unit
            directory.rmdir()
    return lambda: sum(os.times()[:4])


class Costs:
    """The plugin, in each test process and in the one that controls them."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._path = path
        self._writes = writes
        self._now = clock() if writes else lambda: 0.0
        self._last = 0.0

    def _add(self, what: str) -> None:
        now = self._now()
        with self._path.open("a") as file:
            file.write(f"{now - self._last:.3f}\t{what}\n")
        self._last = now

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        if self._writes:
            self._add("collection")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._add(f"{item.nodeid}\tsetup")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._add(f"{item.nodeid}\tcall")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._add(f"{item.nodeid}\tteardown")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._path.exists():
            return
        directories: collections.Counter[str] = collections.Counter()
        tests: collections.Counter[str] = collections.Counter()
        for line in self._path.read_text().splitlines():
            seconds, name, *_ = line.split("\t")
            directories["/".join(name.split("::")[0].split("/")[:2])] += float(seconds)
            tests[name] += float(seconds)
        terminalreporter.section(f"CPU time: {directories.total():.0f} s; each test's in {self._path}")
        for found in (directories, tests):
            for name, seconds in found.most_common(NUM_DEAREST):
                terminalreporter.line(f"{seconds:8.1f}s {name}")


def register(config: pytest.Config) -> None:
    if path := config.getoption("--costs"):
        is_controller = not hasattr(config, "workerinput")
        if is_controller:
            Path(path).unlink(missing_ok=True)
        writes = not is_controller or not config.getoption("numprocesses", None)
        config.pluginmanager.register(Costs(Path(path).absolute(), writes=writes), "costs")
