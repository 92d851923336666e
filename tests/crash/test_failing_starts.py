"""The torture of scripts/torture --starts, short: whatever one operation of a start fails with, honed starts, or ends
with a sentence and a status, and the next start is whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash import errnos

#: Of the operations of a start, one in so many fails, unless all are to; there are some 95.
STRIDE = 16


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(1_800)
def test_a_start_in_which_an_operation_fails_leaves_a_whole_one_to_the_next(
    request: pytest.FixtureRequest, is_whole: bool, root: Path
) -> None:
    stride = 1 if is_whole else STRIDE
    num_failed, broken = errnos.starts(root, seed=request.config.getoption("--seed"), stride=stride)
    print(f"{num_failed} starts with a failing operation")
    assert num_failed >= 80 // stride
    assert broken == []
