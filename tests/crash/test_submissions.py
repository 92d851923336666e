"""A job file that comes over the control socket is taken by a few file operations. Each of them is the last one, or
fails, or the power goes there: what its submitter was told is so, and whose it is stays known."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from crash import submissions
from crash.scene import ERRORS, KILL, Hit, Point, spread
from crash.test_power_cuts import FILE_SYSTEMS, cut


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    found: list[Point] = submissions.points_of(tmp_path_factory.mktemp("points"))
    assert len(found) > 30
    return found


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize("fault", [KILL, *ERRORS])
def test_honed_hit_while_it_takes_a_submission_keeps_what_it_has_told(
    points: list[Point], tmp_path: Path, is_whole: bool, fault: str
) -> None:
    chosen, broken = points if is_whole else spread(points[[KILL, *ERRORS].index(fault) :], 4), {}
    for point in chosen:
        root = tmp_path / re.sub(r"\W+", "-", str(point))
        submissions.prepare(root)
        hit = Hit(point, fault)
        num_done = submissions.run(root, tracer=hit.arguments(root))
        if found := submissions.violations(root, num_done, was_told=fault != KILL):
            broken[str(hit)] = found
        shutil.rmtree(root)
    print(f"{fault}: {len(chosen)} of {len(points)} points, {len(broken)} violations")
    assert broken == {}


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_power_cut_while_honed_takes_a_submission_loses_none_that_it_has_told(
    mounts: None, tmp_path: Path, is_whole: bool, kind: str
) -> None:
    (found,) = cut(kind, tmp_path, "--of", "submissions", *([] if is_whole else ["--points", "3"]))
    assert found["broken"] == {}


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize("mutant", ["no_fsync", "no_directory_fsync"])
def test_a_submission_that_is_not_synced_is_seen(mounts: None, tmp_path: Path, mutant: str) -> None:
    (found,) = cut("btrfs", tmp_path, "--of", "submissions", "--mutant", mutant, "--until-seen")
    assert found["broken"] != {}
