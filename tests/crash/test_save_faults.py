"""Every system call of a worker that saves checkpoints and outputs is the last one, or fails: what was said to be saved
is there, whole, or what came after it; and a new worker leaves nothing but the newest. By default a few calls of each
kind are hit; all with --all."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash import saves
from crash.scene import ERRORS, KILL, Hit, Point, spread

FAULTS = (KILL, *ERRORS)
#: What only reads, or lets go.
QUIET = ("openat", "close")


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    return saves.points_of(tmp_path_factory.mktemp("points"))


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_hit_at_a_call_while_it_saves_loses_nothing_that_is_saved(
    points: list[Point], tmp_path: Path, is_whole: bool, fault: str
) -> None:
    chosen = points
    if not is_whole:
        first = FAULTS.index(fault)  # other cells for each
        changing = [point for point in points if point.call not in QUIET]
        chosen = spread(changing[7 * first :], 2) + spread(
            [point for point in points if point.call in QUIET][first:], 1
        )
    broken = {str(point): found for point in chosen if (found := saves.try_hit(tmp_path, Hit(point, fault)))}
    print(f"{fault}: {len(chosen)} of {len(points)} points, {len(broken)} violations")
    assert broken == {}
