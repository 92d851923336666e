"""Every file operation of honed and of its shim is the last one, or fails: nothing is lost, nothing is there twice.

Each cell of the matrix is a real honed with real children, hit through strace at one system call on a file of its own;
where it does not end well by itself it is started again. See scene.Scene.violations for what must hold then. By
default a few cells of each kind are run; all with --all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.scene import ERRORS, KILL, Hit, Point, points_of, spread, try_hit

#: What changes something durable: of these more are taken than of the many others.
CHANGING = ("rename", "renameat2", "link", "unlink", "unlinkat", "mkdir", "rmdir", "fsync", "ftruncate")
FAULTS = (KILL, *ERRORS)


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    return points_of(tmp_path_factory.mktemp("points"))


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("fault", FAULTS)
def test_honed_hit_at_a_file_operation_loses_and_doubles_nothing(
    points: list[Point], tmp_path: Path, is_whole: bool, fault: str
) -> None:
    chosen = points
    if not is_whole:
        changing = [point for point in points if point.call in CHANGING]
        others = [point for point in points if point.call not in CHANGING]
        first = FAULTS.index(fault)  # other cells for each
        chosen = spread(changing[first:], 3 if fault == KILL else 2) + spread(others[7 * first :], 1)
    broken = {str(point): found for point in chosen if (found := try_hit(tmp_path, Hit(point, fault)))}
    print(f"{fault}: {len(chosen)} points, {len(broken)} violations")
    assert broken == {}


@pytest.mark.timeout(20_000)
def test_honed_hit_between_a_jobs_start_and_its_workers_costs_no_attempt(
    points: list[Point], tmp_path: Path, is_whole: bool
) -> None:
    begun = next(index for index, point in enumerate(points) if point.path.endswith("attempts/1/worker.log"))
    moved = max(index for index in range(begun) if "/honed/running" in points[index].path)
    near = points[moved - 6 : begun + 4]
    assert len(near) < 100
    hits = [Hit(point, fault) for fault in (KILL, "EMFILE", "ESTALE", "ENOMEM", "ETIMEDOUT") for point in near]
    chosen = hits if is_whole else [*spread(hits[: len(near)], 6), *spread(hits[len(near) :], 4)]
    broken = {str(hit): found for hit in chosen if (found := try_hit(tmp_path, hit))}
    print(f"start: {len(chosen)} points of {len(hits)}, {len(broken)} violations")
    assert broken == {}


@pytest.mark.timeout(20_000)
def test_a_shim_hit_at_a_file_operation_loses_and_doubles_nothing(strace: None, tmp_path: Path, is_whole: bool) -> None:
    points = points_of(tmp_path, shim=True)
    assert len(points) >= 10
    hits = [Hit(point, fault) for fault in FAULTS for point in points]
    chosen = hits if is_whole else hits[-1:0:-13][:4]
    broken = {str(hit): found for hit in chosen if (found := try_hit(tmp_path, hit, shim=True))}
    print(f"shim: {len(chosen)} points, {len(broken)} violations")
    assert broken == {}


@pytest.mark.timeout(20_000)
def test_honed_hit_while_a_job_is_staged_loses_and_doubles_nothing(
    strace: None, tmp_path: Path, is_whole: bool
) -> None:
    points = points_of(tmp_path, is_staging=True)
    gates = [point for point in points if "gate.json" in point.path]
    assert gates
    staged = [point for point in points[points.index(gates[0]) - 60 :] if point.call in CHANGING]
    hits = [Hit(point, fault) for point in staged for fault in (KILL, "ENOSPC")]
    chosen = hits if is_whole else [*(Hit(point, KILL) for point in gates[:2]), *hits[:: max(1, len(hits) // 4)][:4]]
    broken = {str(hit): found for hit in chosen if (found := try_hit(tmp_path, hit, is_staging=True))}
    print(f"staged: {len(chosen)} points of {len(hits)}, {len(broken)} violations")
    assert broken == {}


@pytest.mark.timeout(2_000)
def test_the_last_rows_that_the_database_would_not_take_are_in_it_when_honed_has_ended(
    points: list[Point], tmp_path: Path
) -> None:
    last = [point for point in points if point.call == "pwrite64" and point.path.endswith("honed.db-wal")][-3:]
    broken = {str(point): found for point in last if (found := try_hit(tmp_path, Hit(point, "EROFS")))}
    assert broken == {}


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize(
    ("mutant", "call", "direction"), [("unlink_before_publish", "rename", -1), ("write_in_place", "write", 1)]
)  # from the end that shows it sooner
def test_a_planted_bug_is_seen(strace: None, tmp_path: Path, mutant: str, call: str, direction: int) -> None:
    points = [point for point in points_of(tmp_path, mutant=mutant) if point.call == call]
    points = [point for point in points if "/spool/" in f"/{point.path}"]
    found: dict[str, list[str]] = {}
    for point in spread(points[::direction], 12):
        found[str(point)] = try_hit(tmp_path, Hit(point, KILL), mutant=mutant)
        if found[str(point)]:
            return
    pytest.fail(f"no violation at any of {sorted(found)}, of {len(points)} points")
