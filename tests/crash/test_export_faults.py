"""Every file operation of an export is the last one, or fails: at its place is the output before it or the new one,
whole; and the next attempt leaves the new one and nothing else."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from honed.worker import export

OPERATIONS = ("open", "fsync", "rename", "unlink", "mkdir", "rmdir")
FILES = ("adapter_model.safetensors", "tokenizer.json", "merged/model.safetensors")
OWNER = (1, "/i")
KILLED = 9
FAULTS = {"KILL": None, **{name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EACCES", "EROFS")}}


def make(target: Path, content: str) -> None:
    """What export.export does, but for the model."""
    with export.beside(target) as made:
        for name in FILES:
            (made / name).parent.mkdir(exist_ok=True)
            fd = os.open(made / name, os.O_CREAT | os.O_WRONLY)
            os.write(fd, content.encode())
            os.close(fd)
        (made / export.MANIFEST).write_text(json.dumps({"job": {"id": 1, "instance": "/i"}}))
        export.sync(made)
        export.place(made, target, owner=OWNER)


def make_hit(target: Path, content: str, *, at: int, fault: int | None) -> bool:
    """The same in a process of its own, hit at the n-th operation. Returns whether there was an n-th."""
    pid = os.fork()
    if pid == 0:
        num_seen = 0

        def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
            def faulty(*arguments: Any, **keys: Any) -> Any:
                nonlocal num_seen
                num_seen += 1
                if num_seen == at:
                    if fault is None:
                        os._exit(KILLED)
                    raise OSError(fault, os.strerror(fault))
                return operation(*arguments, **keys)

            return faulty

        for name in OPERATIONS:
            setattr(os, name, wrap(getattr(os, name)))
        try:
            make(target, content)
        except OSError:
            pass
        finally:
            os._exit(0 if num_seen < at else KILLED)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


def state(target: Path) -> str:
    """What lies there: nothing, or the content that all files have; anything else is torn."""
    if not target.exists():
        return "nothing"
    names = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    contents = {(target / name).read_text() for name in FILES if (target / name).exists()}
    return contents.pop() if names == {*FILES, export.MANIFEST} and len(contents) == 1 else f"torn: {names}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_again", [False, True], ids=["the first", "over an earlier one"])
def test_an_export_hit_at_any_operation_leaves_a_whole_output_and_the_next_one_the_new(
    tmp_path: Path, fault: str, is_again: bool
) -> None:
    at = 0
    while True:
        at += 1
        target = tmp_path / str(at) / "output"
        if is_again:
            make(target, "before")
        was_hit = make_hit(target, "after", at=at, fault=FAULTS[fault])
        found = state(target)
        # Killed between two renames an earlier attempt's output waits beside for the next attempt, which replaces it.
        before = {"before"} if is_again and fault != "KILL" else {"nothing", "before"}
        assert found == "after" or (was_hit and found in before), f"{fault} at operation {at}: {found}"
        make(target, "again")
        assert state(target) == "again"
        assert [path.name for path in target.parent.iterdir()] == ["output"]
        if not was_hit:
            break
    assert at > 20, "the faults were really met"
