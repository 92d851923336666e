"""The memory that is left: of the machine, and below each limit of a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.system import usage

GIB = 2**30


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """A /proc and a cgroup2 tree: 10 GiB are available, and we are in a/b."""
    proc, sysfs = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {10 * 2**20} kB\n")
    (proc / "self/cgroup").write_text("4:cpu:/old\n0::/a/b\n")
    for name in ("a/b", "jobs.slice"):
        (sysfs / name).mkdir(parents=True)
    return proc, sysfs


def limit(group: Path, limit_bytes: int | str, *, used: int, cache: int = 0, high: int | str = "max") -> None:
    (group / "memory.max").write_text(f"{limit_bytes}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_the_lowest_limit_on_the_way_to_a_group_counts(kernel: tuple[Path, Path]) -> None:
    proc, sysfs = kernel

    def left(group: str = "") -> int:
        return usage.available_bytes(group, proc=proc, sysfs=sysfs)

    assert left() == left("jobs.slice") == 10 * GIB  # no memory controller
    limit(sysfs / "a/b", "max", used=3 * GIB)
    assert left() == 10 * GIB
    limit(sysfs / "a", 8 * GIB, used=3 * GIB, cache=1 * GIB)
    assert left() == 6 * GIB
    assert left("jobs.slice") == 10 * GIB
    limit(sysfs / "jobs.slice", 9 * GIB, used=3 * GIB, high=4 * GIB)
    assert left("jobs.slice") == 1 * GIB
    limit(sysfs / "jobs.slice", 1 * GIB, used=3 * GIB)
    assert left("jobs.slice") == 0
    assert left("not.slice") == 6 * GIB  # no such group: our own counts


def test_this_machine_has_some_memory_left() -> None:
    assert 0 < usage.available_bytes() < 2**50
