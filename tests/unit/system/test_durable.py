"""Files that survive a power cut, and what is left where one cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.system import durable


def test_a_rename_that_fails_leaves_no_hidden_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(OSError, match="here"):
        durable.write(tmp_path / "here", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
