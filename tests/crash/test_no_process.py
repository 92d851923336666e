"""A machine that gives out no more processes for a while: what was being checked waits, and is refused by nobody."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from honed.daemon.arrivals.checker import Checker
from honed.daemon.arrivals.line import Request
from honed.run.helper import children
from honed.run.reply import Refused
from honed.spec.config import Config
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from waiting import wait_for
from zoo import plain


def test_an_arrival_is_checked_once_a_process_is_to_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec_path = tmp_path / "a.json"
    spec_path.write_text("{")
    plain.write_base_model(tmp_path / "model")
    checker = Checker(children(Layout(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no pipe for a helper
    try:
        checker.submit(Request(1, PersonPath.own(spec_path), Config()))
        assert checker.poll() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be started" in caplog.text
    answers = wait_for(checker.poll, what="the answer")
    checker.close()
    assert isinstance(answers[0], Refused)
    assert answers[0].error.code == "spec_invalid"
