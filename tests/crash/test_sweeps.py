"""A sweep becomes the arrivals of its jobs by a few file operations. Each of them is the last one, or fails: after the
next start there are exactly its jobs, each once."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from crash import sweeps
from crash.scene import ERRORS, KILL, Hit, Point, spread


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    found: list[Point] = sweeps.points_of(tmp_path_factory.mktemp("points"))
    assert len(found) > 30
    return found


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize("fault", [KILL, *ERRORS])
def test_honed_hit_while_it_spreads_a_sweep_makes_each_of_its_jobs_once(
    points: list[Point], tmp_path: Path, is_whole: bool, fault: str
) -> None:
    chosen, broken = points if is_whole else spread(points[[KILL, *ERRORS].index(fault) :], 4), {}
    for point in chosen:
        root = tmp_path / re.sub(r"\W+", "-", str(point))
        sweeps.prepare(root)
        hit = Hit(point, fault)
        sweeps.run(root, tracer=hit.arguments(root))
        if found := sweeps.violations(root):
            broken[str(hit)] = found
        shutil.rmtree(root)
    print(f"{fault}: {len(chosen)} of {len(points)} points, {len(broken)} violations")
    assert broken == {}
