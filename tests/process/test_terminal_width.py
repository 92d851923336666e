"""honectl's output on a terminal: nothing essential is cut off, however narrow it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import Instance, said_on_terminal

from honed.job.job import State
from zoo import plain


def on_terminal(instance: Instance, columns: int, *arguments: str) -> list[str]:
    """The lines of honectl on a terminal of so many columns, without their colours."""
    said = said_on_terminal(instance, columns, *arguments)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said).replace("\r", "").splitlines()


def drop_held(instance: Instance, name: str, **keys: Any) -> None:
    path: Path = instance.root / f"{name}.json"
    path.write_text(json.dumps({**plain.spec(instance.model, instance.dataset, **keys), "name": name}))
    dropped = instance.honectl("submit", "--hold", str(path))
    assert dropped.returncode == 0, dropped.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_names_each_job_and_why_it_waits(instance: Instance, columns: int) -> None:
    instance.start()
    drop_held(instance, "a-name-of-the-forty-characters-it-may-be", priority=7)
    lines = on_terminal(instance, columns, "list")
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines[:2]] == ["id", "1"]
    assert "held" in lines[1].split()
    assert "honectl release 1" in "\n".join(lines)
    paths = on_terminal(instance, columns, "show", "1")
    assert str(instance.spool.layout.job(1).output_dir) in "".join(line.strip() for line in paths)


def test_of_several_jobs_each_is_answered_for(instance: Instance) -> None:
    instance.start()
    for name in ("first", "second"):
        drop_held(instance, name)
    assert "job 1 (first) has not started yet: it is held: honectl release 1" in instance.honectl("logs", "1").stderr
    done = instance.honectl("cancel", "99", "first", "second")
    assert done.returncode == 2
    assert "no job '99'" in done.stderr
    assert "job 1 (first): cancelled" in done.stdout
    assert "job 2 (second): cancelled" in done.stdout
    assert all(job and job.state is State.CANCELLED for job in map(instance.job, ("first", "second")))
    again = json.loads(instance.honectl("pin", "--json", "first", "99").stdout)
    assert again[0]["is_pinned"]
    assert again[1]["error"]["code"] == "usage"
