"""A step of a fetch that meets a fault of the machine is tried again; one that its submitter caused is not."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.inputs.fetch import Download, Request
from honed.run.hub import Hub
from honed.run.snapshot import FetchProgress
from honed.system.clock import awake_time


def download(path: Path, tell: Callable[[FetchProgress], None] = lambda _: None) -> Download:
    request = Request("someone/model", "main", pickle=False, code=False, deadline=awake_time() + 600)
    return Download(request, Hub(request.wanted, None), path, tell)


def test_a_fault_of_the_machine_is_waited_for(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(b"whole")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    problems: list[str | None] = []

    def tell(progress: FetchProgress) -> None:
        problems.append(progress["problem"])
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    made = download(tmp_path, tell)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert made.patiently(part.read_bytes) == b"whole"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert problems == [f"{part}: Too many open files"]


def test_an_error_that_a_submitter_can_cause_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        download(tmp_path).patiently((tmp_path / "gone").read_bytes)
