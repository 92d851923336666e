"""Every system call of a worker that saves checkpoints and outputs is the last one, or fails: what was said to be saved
is there, whole, or what came after it; and a new worker leaves nothing but the newest. By default a few calls of each
kind are hit; all with --all.

And what is renamed into its place has been synced before, by the order of the calls: file systems forgive much of what
is left out there, so that no power cut shows it.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from crash import saves
from crash.scene import ERRORS, KILL, Hit, Point, spread
from honed.worker.model import export
from honed.worker.train import checkpoint

FAULTS = (KILL, *ERRORS)
#: What only reads, or lets go.
QUIET = ("openat", "close")
#: What is not synced any more, and what is then found.
UNSYNCED = {
    r"/undisturbed$": "",
    r"/out$": "out",
    r"/\.output\.tmp$": "out/.output.tmp",
    r"/\.output\.tmp/merged$": "out/.output.tmp/merged",
    r"/\.output\.tmp/.*/model\.safetensors$": "out/.output.tmp/merged/model.safetensors",
    r"/\.output\.tmp/honed\.json$": "out/.output.tmp/honed.json",
    r"/checkpoints$": "checkpoints",
    r"/\.new/checkpoint-1$": "checkpoints/.new/checkpoint-1",
    r"/checkpoint-1/random$": "checkpoints/.new/checkpoint-1/random",
    r"/checkpoint-1/random/state\.pth$": "checkpoints/.new/checkpoint-1/random/state.pth",
    r"/checkpoint-1/\.MANIFEST\.json\.tmp$": "checkpoints/.new/checkpoint-1/.MANIFEST.json.tmp",
}


@pytest.fixture(scope="module")
def points(strace: None, tmp_path_factory: pytest.TempPathFactory) -> list[Point]:
    return saves.points_of(tmp_path_factory.mktemp("points"))


def test_what_cannot_be_looked_into_is_neither_sealed_nor_said_to_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "checkpoint-1"
    saves.write(made, saves.CHECKPOINT_FILES, saves.STORY[0])
    real = os.scandir

    def scandir(path: Path) -> Any:
        if str(path).endswith("random"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        export.sync(made)
    with pytest.raises(PermissionError):
        checkpoint.seal(made, checkpoint.Progress())
    assert not (made / checkpoint.MANIFEST).exists()


def test_what_is_renamed_into_its_place_was_synced_before_and_its_name_when_it_is_said(
    strace: None, tmp_path: Path
) -> None:
    assert saves.unsynced(saves.calls_of(tmp_path)) == set()


@pytest.mark.parametrize("pattern", UNSYNCED)
def test_a_sync_that_is_left_out_is_seen(strace: None, tmp_path: Path, pattern: str) -> None:
    found = saves.unsynced(saves.calls_of(tmp_path, mutant=f"no_fsync_of:{pattern}"))
    assert {path.removeprefix("var/lib/honed/jobs/1/") for path in found} == {UNSYNCED[pattern]}


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
