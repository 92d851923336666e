"""An edit of a job that waits takes a few file operations. Each of them is the last one, or fails: the job has its old
file or its new one, wholly, and never starts with half of each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from crash import edits
from crash.scene import ERRORS, KILL, Hit, Point, spread


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    found: list[Point] = edits.points_of(tmp_path_factory.mktemp("points"))
    assert len(found) > 30
    return found


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize("fault", [KILL, *ERRORS])
def test_honed_hit_while_it_edits_a_job_leaves_the_old_file_or_the_new_one(
    points: list[Point], tmp_path: Path, is_whole: bool, fault: str
) -> None:
    chosen, broken = points if is_whole else spread(points[[KILL, *ERRORS].index(fault) :], 8), {}
    for point in chosen:
        root = tmp_path / re.sub(r"\W+", "-", str(point))
        edits.prepare(root)
        hit = Hit(point, fault)
        is_done = edits.run(root, tracer=hit.arguments(root))
        if found := edits.violations(root, is_done=is_done):
            broken[str(hit)] = found
        shutil.rmtree(root)
    print(f"{fault}: {len(chosen)} of {len(points)} points, {len(broken)} violations")
    assert broken == {}
