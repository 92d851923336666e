"""Every file operation of an export is the last one, or fails: at its place is the output before it or the new one,
whole; and the next attempt leaves the new one and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import warm
from crash import exports
from crash.exports import EARLIER, FAULTS, NOT_EXCHANGED

CASES = [(over, fault) for over in ("nothing", EARLIER) for fault in FAULTS]
CASES += [(NOT_EXCHANGED, fault) for fault in ("KILL", "ENOSPC")]


@pytest.mark.parametrize(("over", "fault"), CASES)
def test_an_export_hit_at_any_operation_leaves_a_whole_output_and_the_next_one_the_new(
    tmp_path: Path, over: str, fault: str
) -> None:
    ended = warm.run([sys.executable, exports.__file__, str(tmp_path), over, fault])
    assert ended.returncode == 0, ended.stderr
    wrong, num_operations = json.loads(ended.stdout)
    print(f"{fault} over {over}: {num_operations} operations")
    assert wrong == {}
    assert num_operations > 40, "the faults were really met"
