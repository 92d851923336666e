"""The power goes while a worker saves checkpoints and outputs: what was said to be saved is there, whole, or what came
after it. Each sync that this hangs on is left out once, and that must be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.test_power_cuts import FILE_SYSTEMS, cut

#: What is not synced, by its path. All three file systems show each. None of them shows the syncs of the directories
#: within an output or a checkpoint, for they make a new file's name durable with the file: see test_save_faults.py.
MUTANTS = {
    "the files of an output": r"no_fsync_of:\.output\.tmp/.*\.(safetensors|json|md)$",
    "an output's name": r"no_fsync_of:/out$",
    "the files of a checkpoint": r"no_fsync_of:checkpoint-\d/.*\.(safetensors|pt|pth|json)$",
    "a checkpoint's manifest": r"no_fsync_of:MANIFEST\.json\.tmp$",
    "a checkpoint's name": r"no_fsync_of:/checkpoints$",
    "any directory": "no_directory_fsync",
}
#: Where they show: between a rename and its sync, when a save is said to be done, and in the end.
TELLING = r"^(end|fsync 1 .(out|.*/checkpoints).$|mkdir 2 .*/\.new.$)"


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_power_cut_while_a_worker_saves_loses_and_tears_nothing_that_is_saved(
    mounts: None, tmp_path: Path, is_whole: bool, kind: str
) -> None:
    (found,) = cut(kind, tmp_path, "--of", "saves", *([] if is_whole else ["--at", "^(rename|end)", "--points", "3"]))
    assert found["broken"] == {}


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_sync_that_is_left_out_of_a_save_is_seen(mounts: None, tmp_path: Path, is_whole: bool, kind: str) -> None:
    first = FILE_SYSTEMS.index(kind)
    mutants = list(MUTANTS.values())[0 if is_whole else first :: 1 if is_whole else len(FILE_SYSTEMS)]
    found = cut(kind, tmp_path, "--of", "saves", "--at", TELLING, "--until-seen", "--mutant", *mutants)
    assert [each["mutant"] for each in found] == mutants
    assert [each["mutant"] for each in found if not each["broken"]] == []
