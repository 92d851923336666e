"""`honectl edit`: a job that waits gets another job file, or stays exactly as it was."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from harness import HERE, Instance
from test_staging import make_busy, wait_staged_again

from honed.job.job import Job, State
from waiting import wait_for


@pytest.fixture
def waiting(instance: Instance) -> Instance:
    """A honed with a queued job, which does not start: the queue is paused."""
    instance.start()
    instance.client.ask("pause")
    instance.drop("succeed", name="succeed", training={"learning_rate": 1e-4})
    instance.wait_state("succeed", State.QUEUED)
    return instance


def job_of(instance: Instance, name: str = "succeed") -> Job:
    job = instance.job(name)
    assert job is not None
    return job


def edit(instance: Instance, *arguments: str, editor: str = "") -> CompletedProcess[str]:
    return instance.honectl("edit", *arguments, env=os.environ | {"EDITOR": editor, "VISUAL": ""})


def files_of(instance: Instance, job: Job) -> tuple[bytes, bytes]:
    files = instance.layout.job(job.id)
    return files.spec_path.read_bytes(), files.plan_path.read_bytes()


def test_a_queued_job_gets_the_changes_and_keeps_its_number_name_and_place(waiting: Instance) -> None:
    before = job_of(waiting)
    done = edit(waiting, "succeed", "--set", "training.learning_rate=3e-4", "--set", "priority=7", "--set", "lora.r=2")
    assert done.returncode == 0, done.stderr
    assert "training.learning_rate: 0.0001 → 0.0003" in done.stdout
    after = job_of(waiting)
    kept = ("id", "name", "uid", "submitted_at", "arrived_at", "source", "state", "output_dir", "attempts")
    assert [getattr(after, key) for key in kept] == [getattr(before, key) for key in kept]
    assert (after.priority, len(after.edited_at), after.is_deferred, after.is_being_edited) == (7, 1, False, False)
    spec = json.loads(waiting.honectl("show", "--json", "succeed", check=True).stdout)["spec"]
    assert (spec["training"]["learning_rate"], spec["lora"]["r"]) == (3e-4, 2)
    own = json.loads(waiting.layout.job(after.id).spec_path.read_text())
    assert (own["training"]["learning_rate"], own["priority"]) == (3e-4, 7)
    assert re.search(r"edited +20\d\d-", waiting.honectl("show", "succeed", check=True).stdout)
    assert re.search(rf"job {after.id} \(succeed\): edited: training, lora, priority|edited: .*priority", waiting.log)
    with sqlite3.connect(waiting.layout.database_path) as database:
        assert database.execute("SELECT job_id FROM events WHERE kind = 'edited'").fetchall() == [(after.id,)]
    assert not list((waiting.layout.spool_dir / "edits").iterdir())
    waiting.client.ask("resume")
    assert len(waiting.wait_state("succeed", State.SUCCEEDED).attempts) == 1
    late = edit(waiting, "succeed", "--set", "priority=1")
    assert late.returncode == 2
    assert f"honectl rerun {after.id} --set" in late.stderr


def test_an_editors_text_that_is_refused_is_kept_and_the_job_stays_as_it_was(waiting: Instance, tmp_path: Path) -> None:
    job = job_of(waiting)
    held = waiting.honectl("hold", "succeed", check=True)
    assert "held" in held.stdout
    before = files_of(waiting, job)
    wrong = edit(waiting, str(job.id), editor="sed -i s/learning_rate/learning_rat/")
    assert wrong.returncode == 1
    assert "training.learning_rat: unknown key (did you mean learning_rate?)" in wrong.stderr
    (kept,) = re.findall(r"--file (\S+)", wrong.stderr)
    assert 'learning_rat"' in Path(kept).read_text()
    assert files_of(waiting, job) == before
    assert "nothing changed" in edit(waiting, str(job.id), editor="true").stdout
    ended = edit(waiting, str(job.id), editor="false")
    assert (ended.returncode, "status 1" in ended.stderr, "--file" in ended.stderr) == (2, True, False)
    Path(kept).write_text(Path(kept).read_text().replace('learning_rat"', 'learning_rate"').replace("0.0001", "5e-5"))
    taken = edit(waiting, str(job.id), "--file", kept)
    assert taken.returncode == 0, taken.stderr
    after = job_of(waiting)
    assert (after.state, len(after.edited_at)) == (State.HELD, 1)
    assert waiting.show(str(job.id))["spec"]["training"]["learning_rate"] == 5e-5
    typo = edit(waiting, str(job.id), "--set", "training.learning_rat=1e-3")
    assert "--set training.learning_rat: unknown key" in typo.stderr
    assert "did you mean --set training.learning_rate=0.001?" in typo.stderr
    assert "/tmp" not in typo.stderr
    assert "line " not in typo.stderr


def test_on_a_terminal_a_person_may_edit_a_refused_text_again(waiting: Instance, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text(
        '#!/bin/sh\nif [ -e "$0.2" ]; then sed -i s/learning_rat\\\\b/learning_rate/ "$1"\n'
        'else touch "$0.2"; sed -i "s/learning_rate/learning_rat/; s/0.0001/7e-5/" "$1"; fi\n'
    )
    editor.chmod(0o755)
    controller, side = pty.openpty()
    command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(waiting.root), "edit", "succeed"]
    environment = os.environ | {"EDITOR": str(editor), "VISUAL": "", "TERM": "dumb"}
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=environment) as process:
        os.close(side)
        said = b""
        while b"again? [Y/n]" not in said:
            said += os.read(controller, 1 << 16)
        assert b"learning_rat: unknown key" in said
        os.write(controller, b"\n")
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(controller, 1 << 16):
                said += part
        assert process.wait() == 0, said.decode()
    os.close(controller)
    assert waiting.show("succeed")["spec"]["training"]["learning_rate"] == 7e-5


def test_what_a_job_keeps_is_refused_by_name(waiting: Instance) -> None:
    waiting.drop("succeed.grid", sweep={"lora.r": [2, 4]})
    second = waiting.wait_state("succeed.grid-2", State.QUEUED)
    for name, settings, said in (
        ("succeed", ["name=other"], "name: stays succeed"),
        ("succeed", ["sweep={lora.r: [1, 2]}"], "sweep: a job that waits does not become a sweep"),
        ("succeed.grid-2", ["lora.r=8"], "lora.r: its sweep sets it"),
        ("succeed.grid-2", ["group=null"], "group: honed writes it"),
        ("succeed", [f"depends_on=['{second.id}', none]"], "there is no job 'none'"),
    ):
        before = files_of(waiting, job_of(waiting, name))
        refused = edit(waiting, name, *(word for each in settings for word in ("--set", each)))
        assert refused.returncode in (1, 2), settings
        assert said in refused.stderr, (settings, refused.stderr)
        assert "line " not in refused.stderr, refused.stderr  # of a file that nobody has seen
        assert files_of(waiting, job_of(waiting, name)) == before
    other = waiting.root / "evaluate.json"
    keys = {"kind": "evaluate", "base_model": str(waiting.model), "eval_datasets": [{"path": str(waiting.dataset)}]}
    other.write_text(json.dumps(keys))
    assert "kind: stays sft" in edit(waiting, "succeed", "--file", str(other)).stderr
    assert edit(waiting, "succeed", "--set", f"depends_on=['{second.id}']").returncode == 0
    assert job_of(waiting).depends_on == (str(second.id),)
    circle = edit(waiting, "succeed.grid-2", "--set", "depends_on=[succeed]")
    assert "would wait for each other" in circle.stderr
    assert edit(waiting, "succeed.grid-2", "--set", "training.seed=7").returncode == 0
    waiting.client.ask("resume")
    assert waiting.wait_state("succeed", State.SUCCEEDED).attempt.started_at >= (
        waiting.wait_state("succeed.grid-2", State.SUCCEEDED).attempt.ended_at or 0.0
    )
    assert waiting.show("succeed.grid-2")["spec"]["training"]["seed"] == 7


def test_a_staged_job_is_staged_anew_and_a_running_one_is_not_edited(instance: Instance) -> None:
    make_busy(instance)
    done = edit(instance, "succeed", "--set", "training.seed=7")
    assert done.returncode == 0, done.stderr
    wait_staged_again(instance, "succeed", 2)
    running = edit(instance, "until", "--set", "training.seed=7")
    assert running.returncode == 2
    assert "is running, but edit needs a job that is queued or held" in running.stderr
    job = job_of(instance, "until")
    (instance.layout.job(job.id).dir / "go").touch()
    ended = instance.wait_state("succeed", State.SUCCEEDED)
    assert (len(ended.attempts), ended.attempt.start) == (1, 2)
    assert instance.show("succeed")["spec"]["training"]["seed"] == 7


def test_of_a_job_that_has_run_only_what_no_checkpoint_depends_on_is_edited(instance: Instance) -> None:
    instance.start()
    instance.drop("until-60", name="until-60", training={"seed": 1})
    wait_for(lambda: (instance.job("until-60") and instance.show("until-60")["progress"]["step"]) or 0, what="a step")
    instance.honectl("hold", "until-60", check=True)
    before = instance.wait_state("until-60", State.HELD)
    plan = instance.show("until-60")["plan"]
    refused = edit(instance, "until-60", "--set", "training.seed=2")
    assert "training: the job has run before, and what it may resume from" in refused.stderr
    assert "priority, retry, time_limit_sec can be edited" in refused.stderr
    assert edit(instance, "until-60", "--set", "priority=5", "--set", "retry.max_attempts=7").returncode == 0
    after = job_of(instance, "until-60")
    assert (after.priority, after.max_attempts, after.attempts) == (5, 7, before.attempts)
    shown = instance.show("until-60")
    assert (shown["plan"], shown["spec"]["priority"]) == (plan, 5)
    instance.honectl("release", "until-60", check=True)
    instance.go("until-60")
    done = instance.wait_state("until-60", State.SUCCEEDED)
    assert (len(done.attempts), done.attempt.is_resumed) == (2, True)


@pytest.mark.parametrize("is_committed", [False, True], ids=["being checked", "half made"])
def test_an_edit_that_honed_had_not_made_when_it_was_killed_is_made_after_the_next_start(
    waiting: Instance, *, is_committed: bool
) -> None:
    job = job_of(waiting)
    content: dict[str, Any] = json.loads(waiting.layout.job(job.id).spec_path.read_text())
    data = json.dumps(content | {"priority": 3}).encode()
    waiting.client.ask("edit", id=str(job.id), data=base64.b64encode(data).decode())
    waiting.kill(signal.SIGKILL)
    if is_committed and not job_of(waiting).edited_at:  # as the next one is after the first of its file operations
        changes = {"priority": 3, "is_deferred": True, "is_being_edited": True, "edited_at": (time.time(),)}
        waiting.spool.update(job_of(waiting), **changes)
    waiting.start()
    wait_for(lambda: len(job_of(waiting).edited_at) == 1 and not job_of(waiting).is_being_edited, what="edited")
    assert (job_of(waiting).priority, waiting.show("succeed")["spec"]["priority"]) == (3, 3)
    assert waiting.layout.job(job.id).spec_path.read_bytes() == data
    waiting.client.ask("resume")
    waiting.wait_state("succeed", State.SUCCEEDED)


class ShortHoned(Instance):
    command = (sys.executable, str(HERE / "shorthoned.py"))


@pytest.mark.parametrize("error", ["EMFILE", "ESTALE", "ENOSPC"])
@pytest.mark.parametrize("name", ["spec.json", "plan.json"])
def test_an_edit_that_has_begun_is_completed_before_the_job_starts(tmp_path: Path, error: str, name: str) -> None:
    short = ShortHoned(tmp_path)
    try:
        short.start()
        short.client.ask("pause")
        short.drop("succeed", name="succeed", training={"learning_rate": 1e-4})
        job = short.wait_state("succeed", State.QUEUED)
        data = short.layout.job(job.id).spec_path.read_bytes().replace(b"0.0001", b"0.0005")
        (tmp_path / "short").write_text(f"{error} jobs/{job.id}/{name}")
        short.client.ask("edit", id=str(job.id), data=base64.b64encode(data).decode())
        wait_for(lambda: job_of(short).is_being_edited, what="the edit's begin")
        short.client.ask("resume")
        for number in range(2):  # in this honed, and in the next
            short.drop(f"succeed-1.{number}", priority=-9)
            short.wait_state(f"succeed-1.{number}", State.SUCCEEDED)
            assert short.client.ask("edited", id=str(job.id))["state"] == "checking"
            assert (job_of(short).state, job_of(short).attempts) == (State.QUEUED, ())
            if not number:
                short.kill(signal.SIGKILL)
                short.start()
        (tmp_path / "short").unlink()
        done = short.wait_state("succeed", State.SUCCEEDED)
        assert (len(done.edited_at), len(done.attempts), done.is_being_edited) == (1, 1, False)
        spec, plan = files_of(short, done)
        assert (spec, json.loads(plan)["spec"]["training"]["learning_rate"]) == (data, 5e-4)
        assert not list((short.layout.spool_dir / "edits").iterdir())
    finally:
        short.end()


def test_the_edit_of_a_job_that_is_cancelled_meanwhile_is_completed(tmp_path: Path) -> None:
    short = ShortHoned(tmp_path)
    try:
        short.start()
        short.client.ask("pause")
        short.drop("succeed", name="succeed", training={"learning_rate": 1e-4})
        job = short.wait_state("succeed", State.QUEUED)
        data = short.layout.job(job.id).spec_path.read_bytes().replace(b"0.0001", b"0.0005")
        (tmp_path / "short").write_text(f"EMFILE jobs/{job.id}/spec.json")
        short.client.ask("edit", id=str(job.id), data=base64.b64encode(data).decode())
        wait_for(lambda: job_of(short).is_being_edited, what="the edit's begin")
        short.client.ask("cancel", id=str(job.id))
        short.kill(signal.SIGKILL)
        (tmp_path / "short").unlink()
        short.start()
        wait_for(lambda: not job_of(short).is_being_edited, what="the edit")
        short.client.ask("requeue", id=str(job.id))
        short.client.ask("resume")
        done = short.wait_state("succeed", State.SUCCEEDED)
        spec, plan = files_of(short, done)
        assert (spec, json.loads(plan)["spec"]["training"]["learning_rate"]) == (data, 5e-4)
    finally:
        short.end()


def test_an_edit_that_honed_ends_before_it_is_settled_is_said_to_be_kept(tmp_path: Path) -> None:
    short = ShortHoned(tmp_path)
    try:
        short.start()
        short.client.ask("pause")
        short.drop("succeed")
        job = short.wait_state("succeed", State.QUEUED)
        (tmp_path / "short").write_text(f"EMFILE jobs/{job.id}/spec.json")
        command = [sys.executable, "-m", "honed.cli.honectl", "--root", str(tmp_path), "edit", "succeed"]
        with subprocess.Popen([*command, "--set", "priority=3"], stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: job_of(short).is_being_edited, what="the edit's begin")
            short.kill(signal.SIGKILL)
            _, errors = process.communicate()
        assert "when it runs again, it completes one that is not settled" in errors
        (tmp_path / "short").unlink()
        short.start()
        wait_for(lambda: not job_of(short).is_being_edited, what="the edit")
        assert job_of(short).priority == 3
    finally:
        short.end()


def test_a_job_whose_half_made_edit_is_lost_waits_for_a_person(waiting: Instance) -> None:
    job = job_of(waiting)
    waiting.kill(signal.SIGKILL)
    waiting.spool.update(job, is_being_edited=True, is_deferred=True, edited_at=(time.time(),))
    waiting.start()
    held = waiting.wait_state("succeed", State.HELD)
    assert held.error is not None
    assert (held.is_being_edited, held.error["message"]) == (
        False,
        "its edit was interrupted, and the new file is lost",
    )
    waiting.client.ask("resume")
    waiting.client.ask("release", id=str(job.id))
    waiting.wait_state("succeed", State.SUCCEEDED)
