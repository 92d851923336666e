"""The places in which a job's files are looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.system.layout import JobLayout


def test_the_spec_is_what_the_owner_of_the_jobs_directory_wrote(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make another user's file")
    layout = JobLayout(tmp_path)
    (tmp_path / "spec.yaml").write_text("name: mine\n")
    planted = tmp_path / "spec.a.yaml"
    planted.write_text("name: planted\n")
    os.chown(planted, 12345, 12345)
    assert layout.spec_path == tmp_path / "spec.yaml"
    (tmp_path / "spec.yaml").unlink()
    with pytest.raises(FileNotFoundError):
        _ = layout.spec_path
