"""The power goes at any moment, on ext4, xfs and btrfs: each finds what the others hide. See powercut.py."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import warm

HERE = Path(__file__).parent
FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
#: Which planted bug which file system shows: ext4 and xfs make names durable in order, btrfs each by itself.
#: With the points that show it soonest.
MUTANTS = [
    ("no_fsync", "ext4", "^rename"),
    ("no_fsync", "xfs", "^rename"),
    ("no_directory_fsync", "btrfs", "^unlink.*(queued|running)/"),
]


def cut(kind: str, directory: Path, *arguments: str) -> list[dict[str, Any]]:
    """powercut.py's findings."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs mkfs.{kind}")
    ended = warm.run([sys.executable, str(HERE / "powercut.py"), kind, str(directory), *arguments])
    if "unknown filesystem type" in ended.stderr:
        pytest.skip(f"this kernel has no {kind}")
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in ended.stdout.splitlines()]
    for each in found:
        print(f"{kind}: {each['mutant'] or 'honed'}: {each['num_cuts']} power cuts, {len(each['broken'])} violations")
    return found


@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_power_cut_at_any_moment_loses_and_doubles_nothing(
    mounts: None, tmp_path: Path, is_whole: bool, kind: str
) -> None:
    (found,) = cut(kind, tmp_path, *([] if is_whole else ["--points", "3"]))
    assert found["broken"] == {}


@pytest.mark.timeout(2_000)
def test_a_power_cut_between_the_two_names_of_a_rejection_leaves_one(mounts: None, tmp_path: Path) -> None:
    (found,) = cut("btrfs", tmp_path, "--at", r"^fsync \d+ .var/spool/honed/claimed/\d+.$")
    assert found["num_cuts"] > 0
    assert found["broken"] == {}


@pytest.mark.timeout(2_000)
@pytest.mark.parametrize(("mutant", "kind", "at"), MUTANTS)
def test_a_planted_bug_is_seen_on_a_file_system_that_shows_it(
    mounts: None, tmp_path: Path, mutant: str, kind: str, at: str
) -> None:
    (found,) = cut(kind, tmp_path, "--mutant", mutant, "--at", at, "--points", "12", "--until-seen")
    assert found["broken"] != {}
