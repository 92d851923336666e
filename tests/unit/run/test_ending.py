"""The end of an attempt whose plan its worker has removed or damaged, or the machine does not return."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from honed.job.job import Attempt, Job, State
from honed.run import ending
from honed.run.outcome import Outcome
from honed.system.error import BackendError, OutOfMemoryError
from honed.system.layout import Layout

JOB = Job(1, "a", 1.0, "a.json", os.getuid(), "/o", state=State.RUNNING, attempts=(Attempt(1, "unsloth", 2.0),))
FELL = Outcome(BackendError.code, BackendError("unsloth gave up"))
FULL = Outcome(OutOfMemoryError.code, OutOfMemoryError("no memory"), phase="train")
DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(64)),
    "a list": lambda path: path.write_bytes(b"[]"),
    "without a spec": lambda path: path.write_bytes(b"{}"),
    "with a spec that is none": lambda path: path.write_bytes(b'{"spec": 7}'),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = Path(str(Layout(tmp_path).files(1).plan_path))
    path.parent.mkdir(parents=True)
    path.write_text('{"spec": {"retry": {"on_out_of_memory": "fail"}}, "memory": null}')
    return path


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_plan_that_its_worker_has_damaged_lets_its_attempt_end(
    tmp_path: Path, plan_path: Path, damage: Callable[[Path], object]
) -> None:
    assert ending.may_fall_back(Layout(tmp_path), JOB, FELL)
    damage(plan_path)
    assert not ending.may_fall_back(Layout(tmp_path), JOB, FELL)
    assert ending.remedy_for(Layout(tmp_path), JOB, FULL, "train") == ending.Remedy()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_plan_that_the_machine_does_not_return_is_waited_for(
    tmp_path: Path, plan_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if path == plan_path.name:
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        with pytest.raises(OSError, match=plan_path.name):
            ending.may_fall_back(Layout(tmp_path), JOB, FELL)
        with pytest.raises(OSError, match=plan_path.name):
            ending.remedy_for(Layout(tmp_path), JOB, FULL, "train")
    assert ending.remedy_for(Layout(tmp_path), JOB, FULL, "train").is_last
