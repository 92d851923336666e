"""The torture of scripts/torture --errnos, short: whatever a file operation fails with, no job is failed, lost or run
twice, and nothing is left of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash import errnos


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(3_600)
def test_errors_of_the_machine_fail_lose_and_repeat_no_job(request: pytest.FixtureRequest, root: Path) -> None:
    num_injections, seed = request.config.getoption("--errnos"), request.config.getoption("--seed")
    began = time.monotonic()
    counts, broken = errnos.torture(root, seed=seed, num_injections=num_injections)
    rows = {
        "failed operations": sum(counts.values()),
        "errors": f"{len(errnos.ERRNOS)} ({', '.join(f'{name} {counts.get(name, 0)}' for name in errnos.names())})",
        "minutes": f"{(time.monotonic() - began) / 60:.1f}",
        "promises broken": len(broken),
    }
    print(
        "\n".join(
            ["| Errors of file operations | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
        )
    )
    assert sum(counts.values()) >= num_injections
    assert broken == []
