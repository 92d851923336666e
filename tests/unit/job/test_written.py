"""Bytes that workers report: summed up by kind, whatever they write."""

from __future__ import annotations

import os
from pathlib import Path

from honed.job.event import MAX_WRITTEN_BYTES, Written, written_bytes
from honed.system import durable


def test_checkpoints_and_the_output_directory_count_and_what_is_no_number_does_not() -> None:
    told = [
        ("checkpoint", {"num_bytes": 100}),
        ("checkpoint", {"num_bytes": 50}),
        ("checkpoint", {}),
        ("checkpoint", {"num_bytes": -7}),
        ("checkpoint", {"num_bytes": True}),
        ("checkpoint", {"num_bytes": 1e30}),
        ("artifact", {"name": "output_dir", "num_bytes": 9}),
        ("artifact", {"name": "merged", "num_bytes": 8}),  # below output_dir
        ("artifact", {"name": ["output_dir"], "num_bytes": 1}),
    ]
    assert written_bytes(told) == Written(150, 9)
    assert written_bytes([]) == Written(0, 0)


def test_no_account_goes_beyond_what_can_be() -> None:
    assert written_bytes([("checkpoint", {"num_bytes": 10**30})] * 3).checkpoints == MAX_WRITTEN_BYTES


def test_regular_files_below_a_directory_count_once_and_links_are_not_followed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "deep").mkdir(parents=True)
    (made / "a").write_bytes(bytes(100))
    (made / "deep/b").write_bytes(bytes(11))
    (tmp_path / "elsewhere").write_bytes(bytes(5000))
    (made / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(made / "pipe")
    assert durable.num_bytes_below(made) == 111
    assert durable.num_bytes_below(tmp_path / "missing") == 0
