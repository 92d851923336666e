"""The sources of a token or key, and the message about an invalid one."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from honed.system import secret
from honed.system.error import EnvironmentInvalidError


def test_of_the_credentials_that_are_there_the_first_named_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "second").write_text("s3cret\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert secret.credential("first", "second") == tmp_path / "second"
    (tmp_path / "first").touch()
    assert secret.credential("first", "second") == tmp_path / "first"
    assert secret.credential("third") is None
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert secret.credential("first") is None


def test_a_secret_is_one_line_without_its_end(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    assert secret.read(tmp_path / "token", "token", min_chars=6) == "s3cret"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "contains no token of 7"),
        (b"s3cret", "contains no token of 7"),
        (b"s3cret s3cret", "contains no token of 7"),
        (b"s3cret\ns3cret", "contains no token of 7"),
        ("s3cr\xe9t".encode(), "not plain text"),
        (None, "No such file"),
    ],
)
def test_what_is_no_secret_is_refused_and_not_shown(tmp_path: Path, text: bytes | None, words: str) -> None:
    if text is not None:
        (tmp_path / "token").write_bytes(text)
    with pytest.raises(EnvironmentInvalidError, match=words) as caught:
        secret.read(tmp_path / "token", "token", min_chars=7, hint="seven")
    assert "s3" not in "".join(traceback.format_exception(caught.value))
