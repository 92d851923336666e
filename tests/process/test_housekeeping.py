"""Housekeeping: what prune and retention remove, what they never touch, and that no crash in between matters."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from harness import Instance

from hanging import hanging, needs_fuse
from honed.job import removal
from honed.job.job import State
from waiting import wait_for

DAY = 86400


def answer(instance: Instance, *words: str) -> Any:
    done = instance.honectl(*words, "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def age(instance: Instance, number: int, days: float) -> None:
    """Make a job look as if it had ended that long ago."""
    (path,) = (instance.layout.spool_dir).glob(f"*/{number}.json")
    when = path.stat().st_mtime - days * DAY
    os.utime(path, (when, when))


def numbers(instance: Instance) -> set[int]:
    return set(instance.spool.all_jobs())


def directories(instance: Instance) -> set[int]:
    return {int(path.name) for path in instance.layout.jobs_dir.iterdir() if path.name.isdecimal()}


def rows(instance: Instance) -> set[int]:
    found: set[int] = set()
    for table, column in (("jobs", "id"), ("metrics", "job_id"), ("events", "job_id"), ("offsets", "job_id")):
        found |= {n for (n,) in sqlite3.connect(instance.layout.database_path).execute(f"SELECT {column} FROM {table}")}
    return found


def run_jobs(instance: Instance, *names: str) -> None:
    for number, name in enumerate(names):
        instance.drop(f"{number:02}", name=name, retry={"max_attempts": 1})
    assert instance.drain() == 0


def test_prune_says_what_goes_and_removes_all_of_it(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "crash.c")
    for number, days in ((1, 40), (2, 2), (3, 50)):
        age(instance, number, days)
    (instance.layout.job(1).dir / "output").mkdir()
    (instance.layout.job(1).dir / "output/weights").write_bytes(b"x" * 5000)
    instance.start()
    before = answer(instance, "prune", "--older-than", "30d", "--dry-run")
    assert [row["id"] for row in before["jobs"]] == [3, 1]
    assert numbers(instance) == directories(instance) == {1, 2, 3}
    done = answer(instance, "prune", "--older-than", "30d")
    assert {row["id"]: row["num_bytes"] for row in done["removed"]} == pytest.approx(
        {row["id"]: row["num_bytes"] for row in before["jobs"]}, rel=0.5
    )
    assert next(row["num_bytes"] for row in done["removed"] if row["id"] == 1) > 5000
    assert numbers(instance) == directories(instance) == rows(instance) == {2}
    gone = instance.honectl("show", "succeed.a")
    assert (gone.returncode, "job 1 (succeed.a) succeeded and was pruned" in gone.stderr) == (2, True)
    wait_for(lambda: "succeed.a" not in instance.index, what="the index")


def test_prune_without_limits_is_no_wish_for_everything(instance: Instance) -> None:
    run_jobs(instance, "succeed.a")
    for _ in range(2):
        done = instance.honectl("prune")
        assert (done.returncode, numbers(instance)) == (2, {1})
        instance.start() if instance.process is None or instance.process.poll() is not None else None


def test_numbers_are_never_used_again_though_every_job_is_pruned(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b")
    assert instance.honectl("prune", "--keep", "0").returncode == 0  # honed is down
    assert numbers(instance) == directories(instance) == set()
    (instance.layout.spool_dir / "seq").unlink()
    run_jobs(instance, "succeed.c")
    assert numbers(instance) == {3}
    wait_for(lambda: rows(instance) == {3}, what="its rows alone")


def test_what_is_pinned_needed_or_not_over_stays_and_says_why(instance: Instance) -> None:
    instance.drop("a", name="make.base")
    instance.drop("b", name="succeed.pinned", pin=True)
    instance.drop("c", name="succeed.first")
    assert instance.drain() == 0
    made = str(instance.layout.job(1).output_dir)
    instance.drop("d.hold", name="succeed.user", adapter=made, lora=None)
    instance.drop("e.hold", name="succeed.after", depends_on=["succeed.first"])
    assert instance.drain() == 0
    done = answer(instance, "prune", "1", "2", "3", "4")
    assert {row["id"]: row["why"] for row in done["kept"]} == {
        1: "job 4 (succeed.user), which is held, needs it",
        2: "it is pinned",
        3: "job 5 (succeed.after), which is held, needs it",
        4: "it is held",
    }
    assert not done["removed"]
    assert instance.honectl("unpin", "2").returncode == 0
    assert instance.honectl("prune", "2").returncode == 0
    assert numbers(instance) == {1, 3, 4, 5}


def test_pins_outlive_honed_and_are_shown(instance: Instance) -> None:
    run_jobs(instance, "succeed.a")
    age(instance, 1, 10)
    instance.start()
    assert answer(instance, "pin", "1")[0]["is_pinned"]
    instance.kill(signal.SIGKILL)
    instance.start()
    assert answer(instance, "show", "1")["is_pinned"]
    assert "pinned" in instance.honectl("list").stdout
    assert answer(instance, "prune", "--older-than", "9d")["jobs"] == []
    assert answer(instance, "unpin", "1")[0]["is_pinned"] is False
    assert [row["id"] for row in answer(instance, "prune", "--older-than", "9d")["removed"]] == [1]


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
def test_prune_says_in_sentences_what_goes_and_which_pinned_job_it_passes_over(instance: Instance, is_up: bool) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "succeed.c")
    for number in (1, 2, 3):
        age(instance, number, 10 - number)
    instance.start()
    answer(instance, "pin", "1")
    if not is_up:
        instance.stop()

    def said(*words: str) -> list[str]:
        lines = [line for line in instance.honectl("prune", *words).stdout.splitlines() if "succeeded" not in line]
        return [re.sub(r"\d+(\.\d)? (files|bytes|[KM]iB)", "N", line) for line in lines]

    stays = "kept job 1 (succeed.a): it is pinned"
    assert said("--keep", "2", "--dry-run") == ["no job would be removed", stays]
    assert said("--keep", "2") == ["no job is removed", stays]
    assert said("--keep", "2", "--checkpoints", "--dry-run")[0] == "no job's checkpoint would be removed"
    assert said("--keep", "3") == ["no job is removed"]
    assert said("--keep", "1", "--dry-run")[:1] == ["1 job would be removed, N in total"]
    assert said("--keep", "0", "--checkpoints")[-1] == "the checkpoints of 2 jobs were removed: N, N"
    done = said("--keep", "1")
    assert (done[0], done[-2:]) == ("1 job is being removed, N in total", [stays, "1 job was removed: N, N"])
    assert said("--rejected", "--keep", "0") == ["no rejected file is removed"]
    assert said("1", "--dry-run") == ["no job would be removed", stays]


def test_an_output_outside_of_honeds_tree_is_never_touched(instance: Instance, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    instance.drop("a", name="make.a", output_dir=str(out))
    assert instance.drain() == 0
    (instance.layout.job(1).dir / "elsewhere").symlink_to(out)
    assert instance.honectl("prune", "1").returncode == 0
    assert not instance.layout.job(1).dir.exists()
    assert (out / "honed.json").exists()


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
def test_checkpoints_go_alone_and_the_job_that_is_requeued_says_so(instance: Instance, is_up: bool) -> None:
    run_jobs(instance, "regress.a", "succeed.b")
    for number in (1, 2):
        age(instance, number, 8)
    if is_up:
        instance.start()
    done = answer(instance, "prune", "--checkpoints", "--older-than", "7d")
    assert [row["id"] for row in done["removed"]] == [2]  # a failed job would go on from its own
    assert instance.layout.job(1).checkpoints_dir.exists()
    done = answer(instance, "prune", "--checkpoints", "1")
    assert done["removed"][0]["num_files"] == 1
    assert not list(instance.layout.job(1).dir.glob("*checkpoints*"))
    assert not list(instance.layout.job(2).dir.glob("*checkpoints*"))
    assert answer(instance, "list")[0]["state"] in {"succeeded", "failed"}
    said = instance.honectl("requeue", "1").stdout
    assert "from the start: its checkpoints were pruned" in said


def test_a_requeued_job_goes_on_from_its_checkpoint_or_from_the_start(instance: Instance) -> None:
    instance.drop("a", name="until-100")
    instance.start()
    wait_for((instance.layout.job(1).checkpoints_dir / "step").exists, what="steps")
    instance.client.ask("cancel", id="1")
    instance.wait_state("until-100", State.CANCELLED)
    assert "from its last checkpoint" in instance.honectl("requeue", "1").stdout
    events_path = instance.layout.job(1).attempt(2).events_path
    wait_for(lambda: events_path.exists() and '"resumed"' in events_path.read_text(), what="the resumed event")
    instance.client.ask("cancel", id="1")
    instance.wait_state("until-100", State.CANCELLED)
    assert "from the start" in instance.honectl("requeue", "1", "--from-start").stdout
    third = instance.wait_state("until-100", State.RUNNING)
    assert (third.num_failures, len(third.attempts)) == (0, 3)
    instance.go("until-100")
    instance.wait_state("until-100", State.SUCCEEDED)
    assert '"resumed"' not in instance.layout.job(1).attempt(3).events_path.read_text()
    wait_for(lambda: not list(instance.layout.job(1).dir.glob(removal.OLD_CHECKPOINTS)), what="old ones are gone")


def look(instance: Instance) -> None:
    """Have honed reload its configuration: then it looks at all jobs, and not only once an hour."""
    assert instance.process is not None
    instance.process.send_signal(signal.SIGHUP)


def start_and_look(instance: Instance, limits: str) -> None:
    instance.configure(f"[retention]\n{limits}\n")
    instance.start()
    look(instance)


def test_retention_removes_by_itself_what_the_configuration_says_and_nothing_else(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "succeed.c", "succeed.d")
    for number, days in ((1, 40), (2, 20), (3, 10), (4, 1)):
        age(instance, number, days)
    instance.honectl("pin", "1")
    start_and_look(instance, "max_job_age_days = 15\nmax_checkpoint_age_days = 5")
    wait_for(lambda: directories(instance) == {1, 3, 4}, what="the old one's end")
    wait_for(lambda: not list(instance.layout.job(3).dir.glob("*checkpoints*")), what="checkpoints' end")
    assert instance.layout.job(4).checkpoints_dir.exists()
    assert instance.layout.job(1).checkpoints_dir.exists()
    assert numbers(instance) == {1, 3, 4}


def test_retention_by_number_and_by_size(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "succeed.c")
    for number in (1, 2, 3):
        age(instance, number, 10 - number)
        (instance.layout.job(number).dir / "weights").write_bytes(b"x" * 1_000_000)
    start_and_look(instance, "max_job_bytes = 2500000")
    wait_for(lambda: directories(instance) == {2, 3}, what="the size")
    instance.stop()
    start_and_look(instance, "max_jobs = 1")
    wait_for(lambda: directories(instance) == {3}, what="the number")


def test_retention_of_checkpoints_by_size(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "succeed.c", "succeed.d")
    for number in (1, 2, 3, 4):
        age(instance, number, 10 - number)
        (instance.layout.job(number).checkpoints_dir / "weights").write_bytes(b"x" * 1_000_000)
    instance.honectl("pin", "1")

    def with_checkpoints() -> set[int]:
        return {number for number in (1, 2, 3, 4) if list(instance.layout.job(number).dir.glob("*checkpoints*"))}

    start_and_look(instance, "max_checkpoint_bytes = 2500000")
    wait_for(lambda: with_checkpoints() == {1, 3, 4}, what="the size")
    assert instance.job("succeed.b").are_checkpoints_pruned  # type: ignore[union-attr]
    assert directories(instance) == {1, 2, 3, 4}


def test_refused_files_go_beyond_a_number_and_after_their_time(instance: Instance) -> None:
    rejected = instance.layout.spool_dir / "rejected"
    instance.start()
    for number in range(3):
        instance.drop(f"bad{number}", nonsense=number)
        wait_for(lambda name=f"{number + 1}.json": (rejected / name).exists(), what="refused")  # type: ignore[misc]
    done = answer(instance, "prune", "--rejected", "--keep", "1")
    assert [row["file"] for row in done["rejected"]] == ["bad0.json", "bad1.json"]
    assert sorted(path.name for path in rejected.iterdir()) == ["3.json", "bad2.json.reason"]
    instance.configure("[retention]\nmax_rejected_age_days = 0\n")
    look(instance)
    wait_for(lambda: not list(rejected.iterdir()), what="their end")


def test_a_removal_that_was_cut_short_is_finished_at_the_next_start(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b", "succeed.c")
    spool = instance.spool
    job = spool.job(1)
    assert job is not None
    spool.prune(job)  # killed right after the commit
    other = spool.job(2)
    assert other is not None
    spool.prune(other)
    (instance.layout.spool_dir / "succeeded/2.json").write_bytes(other.to_json())  # as a power cut on btrfs leaves it
    (instance.layout.job(2).dir / "output").mkdir()
    removal.set_aside_checkpoints(instance.layout, 3)
    assert rows(instance) == {1, 2, 3}
    instance.start()
    wait_for(lambda: rows(instance) == {3} and directories(instance) == {3}, what="the rest")
    wait_for(lambda: not list(instance.layout.job(3).dir.glob("*checkpoints*")), what="checkpoints")
    assert numbers(instance) == {3}


@needs_fuse
def test_a_job_with_a_file_system_that_hangs_is_out_of_the_way_and_goes_when_that_is_gone(instance: Instance) -> None:
    run_jobs(instance, "succeed.a", "succeed.b")
    place = instance.layout.job(1).dir / "mine/mount"
    place.mkdir(parents=True)
    left = instance.layout.jobs_dir / ".1.left"
    with hanging(place):
        instance.start()
        done = answer(instance, "prune", "1")
        assert "another file system is mounted there" in done["removed"][0]["problem"]
        assert directories(instance) == {2}
        assert left.is_dir()
        assert answer(instance, "prune", "2")["removed"][0]["problem"] is None
        assert instance.log.count("job 1: its directory cannot be removed") == 1
    wait_for(lambda: not left.exists(), what="the rest of the job gone")
    wait_for(lambda: not instance.layout.left_path.exists(), what="nothing left")


def test_a_pruned_job_cannot_be_built_upon_and_the_refusal_says_so(instance: Instance) -> None:
    run_jobs(instance, "make.base")
    assert instance.honectl("prune", "1").returncode == 0
    instance.drop("x", name="next", base_model="job:make.base")
    instance.drop("y", name="later", depends_on=["make.base"])
    assert instance.drain() == 0
    for name in ("x.json", "y.json"):
        assert "job 1 (make.base) succeeded and was pruned" in instance.rejected()[name]
