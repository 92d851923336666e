"""A start on damaged files of honed's own state: each is begun anew, and the damaged one is kept beside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.daemon.loop import Daemon
from honed.job import leftover
from honed.job.counters import read as counters
from honed.spec.config import Config, ReportingConfig
from honed.system import device
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout

INNER = {"counters": 7, "histograms": [], "counted": 3, "pruned": 1, "rejected": "1-99999999999"}
LARGE = {"counters": {"honed_resumes_total": {"": 10**400}}, "histograms": {}}
CONTENTS = {
    "empty": b"",
    "of another shape": b'[7, null, {"uid": 7, "path": 7}]',
    "a number": b"7",
    "wrong within": json.dumps(INNER).encode(),
    "too large a number": json.dumps(LARGE).encode(),
    "not UTF-8": b"\xff\xfe{}",
    "nested too deeply": b"[" * 100_000,
}
MAKE: dict[str, Callable[[Path], object]] = {
    **{name: lambda path, content=content: path.write_bytes(content) for name, content in CONTENTS.items()},
    "a directory": lambda path: (path.mkdir(), (path / "file").touch()),
    "a link to nowhere": lambda path: path.symlink_to("/nonexistent/file"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
}
KINDS = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def start(layout: Layout) -> None:
    """Start honed, have it write all that it counts, and end it."""
    config = Config(reporting=ReportingConfig(metrics_api_url="http://127.0.0.1:1/rows"))
    honed = Daemon(layout, config, probe=lambda _gpus: [device.cpu()])
    try:
        honed._recover()
        honed._publishing.counters.tend(is_last=True)
    finally:
        honed._close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["counters.json", "usage.jsonl", "outbox/lost.json"])
@KINDS
def test_honed_starts_on_a_damaged_file_of_its_state(tmp_path: Path, make: Callable[[Path], object], name: str) -> None:
    layout = Layout(tmp_path)
    (path := layout.state_dir / name).parent.mkdir(parents=True)
    make(path)
    start(layout)
    if name == "counters.json":
        assert counters(path) is not None
        assert os.path.lexists(path.with_name("counters.json.damaged"))
    elif name == "usage.jsonl":
        assert path.is_file()


@pytest.mark.timeout(20)
@KINDS
def test_a_damaged_list_of_leftovers_is_begun_anew(tmp_path: Path, make: Callable[[Path], object]) -> None:
    layout = Layout(tmp_path)
    layout.jobs_dir.mkdir(parents=True)
    make(layout.left_path)
    leftover._leave(layout, layout.jobs_dir, "it cannot be removed")
    assert [each.problem for each in leftover.listed(layout)] == ["it cannot be removed"]
    leftover.remove_again(layout, lambda: None)
    assert not os.path.lexists(layout.left_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["empty", "a number of nothing", "a directory", "a link to itself", "a pipe"])
def test_without_the_last_number_honed_does_not_start_and_says_what_to_do(tmp_path: Path, kind: str) -> None:
    layout = Layout(tmp_path)
    start(layout)
    MAKE.get(kind, lambda path: path.write_text("seven"))(layout.spool_dir / "seq")
    with pytest.raises(EnvironmentInvalidError, match="not a number") as raised:
        start(layout)
    assert "the highest job number" in raised.value.hint


def test_a_counter_that_was_damaged_once_counts_on_after_the_next_start(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.state_dir.mkdir(parents=True)
    for number in (1, 2):
        layout.counters_path.write_bytes(b"[]")
        start(layout)
        assert len(list(layout.state_dir.glob("counters.json.damaged*"))) == number
    start(layout)
    assert len(list(layout.state_dir.glob("counters.json.damaged*"))) == 2
