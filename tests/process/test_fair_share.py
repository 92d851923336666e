"""Users share one daemon: whose job starts next, what waits for a limit, and that nothing lowers what was used."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SOON, Instance

from honed.job.job import State
from honed.page import report
from waiting import wait_for
from zoo import plain

ANNA, BERTA, CARL = 23001, 23002, 23003

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop files as several users")


@pytest.fixture
def instance() -> Iterator[Instance]:
    """An instance whose model and data every user may read: pytest's directories are root's alone."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        Path(made).chmod(0o755)
        instance = Instance(Path(made))
        yield instance
        instance.end()


def drop(instance: Instance, uid: int, name: str, **keys: Any) -> Path:
    """Drop a job file as a user."""
    hidden = instance.layout.spool_dir / f"incoming/.{name}.json"
    hidden.write_text(json.dumps(plain.spec(instance.model, instance.dataset, name=name, **keys)))
    os.chown(hidden, uid, uid)
    return instance.put(hidden, f"{name}.json")


def order(instance: Instance) -> list[str]:
    """Return the names of the jobs in the order of their first starts."""
    jobs = [job for job in instance.spool.all_jobs().values() if job.attempts]
    return [job.name for job in sorted(jobs, key=lambda job: job.attempts[0].started_at)]


def waits(instance: Instance, name: str) -> str:
    found = instance.client.ask("show", id=name)["waiting_for"]
    return f"{found['reason']}: {found['detail']}" if found else ""


def test_one_job_beside_a_flood_starts_next_and_a_higher_class_before_it(instance: Instance) -> None:
    instance.configure(f"[classes.urgent]\nrank = 5\nusers = ['{CARL}']\n")
    instance.start()
    instance.client.ask("pause")
    for number in range(6):
        drop(instance, ANNA, f"succeed.a{number}", priority=1_000_000)
        wait_for(lambda number=number: instance.job(f"succeed.a{number}"), what="a flood")  # type: ignore[misc]
    drop(instance, BERTA, "succeed.b")
    drop(instance, CARL, "succeed.c", **{"class": "urgent"})
    drop(instance, BERTA, "succeed.no", **{"class": "urgent"})
    wait_for(lambda: len(instance.spool.all_jobs()) == 8 and instance.rejected(), what="all")
    (reason,) = instance.rejected().values()
    assert "class: urgent is not for your jobs; there are none for you" in reason
    assert instance.client.ask("show", id="succeed.c")["class"] == "urgent"
    instance.client.ask("resume")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 8, what="all")
    names = order(instance)
    assert names[0] == "succeed.c"
    assert names.index("succeed.b") <= 2  # anna's first one may come before hers, and no second one
    assert [name for name in names if ".a" in name] == [f"succeed.a{number}" for number in range(6)]


def test_files_are_taken_and_checked_by_the_weights_of_their_users(instance: Instance) -> None:
    """Numbers are given as files are taken, and jobs are accepted as their checks end."""
    # No file waits to settle: on a busy machine half of them would, and only the rest be taken by turns.
    spool, users = "[spool]\nsettle_sec = 0\npreflight_helpers = 1\n", "[users.'*']\nmax_running = 0\n"
    instance.configure(f"{spool}[users.{ANNA}]\nweight = 3\n{users}")
    for number in range(20):
        for uid in (BERTA, ANNA):
            drop(instance, uid, f"succeed.{uid}-{number:02}")
    instance.start()
    wait_for(lambda: len(instance.spool.all_jobs()) == 40, what="all")
    jobs = sorted(instance.spool.all_jobs().values(), key=lambda job: job.id)
    for key in ("id", "submitted_at"):
        jobs.sort(key=lambda job, key=key: (getattr(job, key), job.id))  # type: ignore[misc]
        for count in (4, 8, 16, 24):
            num_of = [sum(job.uid == uid for job in jobs[:count]) for uid in (ANNA, BERTA)]
            assert abs(num_of[0] - count * 3 / 4) <= 1, (key, count, num_of)
    for uid in (ANNA, BERTA):
        own = [job.name for job in sorted(jobs, key=lambda job: job.id) if job.uid == uid]
        assert own == [f"succeed.{uid}-{number:02}" for number in range(20)]


def listed(instance: Instance) -> list[str]:
    """Return the names of the queued jobs as honectl lists them."""
    rows = json.loads(instance.honectl("list", "--json", "--state", "queued", check=True).stdout)
    return [row["name"] for row in rows]


def test_the_list_has_the_queue_in_the_order_in_which_the_jobs_start_and_without_honed_too(instance: Instance) -> None:
    instance.configure(f"[classes.urgent]\nrank = 5\n[users.{BERTA}]\nweight = 2\n")
    instance.start()
    instance.client.ask("pause")
    for number in range(4):
        drop(instance, ANNA, f"succeed.a{number}", priority=5 if number == 3 else 0)
        wait_for(lambda number=number: instance.job(f"succeed.a{number}"), what="a job")  # type: ignore[misc]
    for number in range(4):
        drop(instance, BERTA, f"succeed.b{number}")
        wait_for(lambda number=number: instance.job(f"succeed.b{number}"), what="a job")  # type: ignore[misc]
    drop(instance, CARL, "succeed.c", **{"class": "urgent"})
    drop(instance, BERTA, "succeed.after", depends_on=["succeed.b3"])
    wait_for(lambda: len(instance.spool.all_jobs()) == 10 or instance.rejected(), what="all")
    assert instance.rejected() == {}
    wait_for(lambda: waits(instance, "succeed.after").startswith("dependency"), what="a look")
    told = listed(instance)
    assert told[0] == "succeed.c"
    assert told[-1] == "succeed.after"
    assert [name for name in told if ".a" in name][:4] == [f"succeed.a{number}" for number in (3, 0, 1, 2)]
    assert told.index("succeed.b1") < told.index("succeed.a0") < told.index("succeed.b3")  # a, b, b, a, b, b
    assert [row["name"] for row in instance.client.ask("overview")["jobs"]] == told
    assert listed_after(instance, told[3]) == told[4:]
    instance.stop()
    assert listed(instance) == told
    assert "the shares, as last written" in instance.honectl("list", check=True).stdout
    instance.start()
    assert listed(instance) == told
    instance.client.ask("resume")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 10, what="all")
    assert order(instance)[:3] == told[:3]  # later, each job's own duration counts


def listed_after(instance: Instance, name: str) -> list[str]:
    number = str(instance.show(name)["id"])
    done = instance.honectl("list", "--json", "--state", "queued", "--after", number, check=True)
    return [row["name"] for row in json.loads(done.stdout)]


def test_one_users_check_that_stands_still_holds_up_no_other_user_where_there_are_two_helpers(
    instance: Instance,
) -> None:
    instance.is_warm = False  # so that its helpers are its children
    instance.configure(f"{SOON}preflight_helpers = 2\npreflight_timeout_sec = 3600\n")
    instance.start()
    instance.client.ask("pause")
    drop(instance, ANNA, "succeed.first")
    instance.wait_state("succeed.first", State.QUEUED)
    (helper,) = instance.helpers()
    os.kill(helper, signal.SIGSTOP)
    for number in range(3):
        path = drop(instance, ANNA, f"succeed.a{number}")
        wait_for(lambda path=path: not path.exists(), what="its number")  # type: ignore[misc]
    drop(instance, BERTA, "succeed.b")
    instance.wait_state("succeed.b", State.QUEUED)
    assert [job.name for job in instance.spool.all_jobs().values()] == ["succeed.first", "succeed.b"]
    assert len(instance.helpers()) == 2
    os.kill(helper, signal.SIGCONT)
    wait_for(lambda: len(instance.spool.all_jobs()) == 5, what="all")
    numbers = {job.name: job.id for job in instance.spool.all_jobs().values()}
    assert sorted(numbers, key=numbers.__getitem__)[0] == "succeed.first"
    assert [numbers[f"succeed.a{number}"] for number in range(3)] == sorted(
        numbers[f"succeed.a{number}"] for number in range(3)
    )


def test_what_is_beyond_a_limit_waits_with_its_numbers_and_is_taken_when_there_is_room(instance: Instance) -> None:
    instance.configure('[users."*"]\nmax_queued = 2\n')
    instance.start()
    drop(instance, ANNA, "slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    for number in range(5):
        drop(instance, ANNA, f"succeed.a{number}")
    wait_for(lambda: "3 files wait until fewer jobs of their users are queued" in status(instance), what="the limit")
    drop(instance, BERTA, "succeed.b")
    instance.wait_state("succeed.b", State.QUEUED)  # nobody else is held up
    assert len(list(instance.spool.jobs(State.QUEUED))) == 3
    instance.client.ask("cancel", id="slow-4000")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 6, what="all")
    assert instance.rejected() == {}


def status(instance: Instance) -> str:
    return str(instance.client.ask("status")["status"])


def test_nothing_lowers_what_was_used_and_the_limit_says_how_much(instance: Instance) -> None:
    instance.start()
    drop(instance, ANNA, "succeed.one")
    instance.wait_state("succeed.one", State.SUCCEEDED)
    lines = wait_for(lambda: used(instance), what="its use")  # it is counted after the job has moved
    assert [(line["uid"], line["job"], line["attempt"]) for line in lines] == [(ANNA, 1, 1)]
    instance.honectl("prune", "1", check=True)
    instance.kill(signal.SIGKILL)
    for path in instance.layout.state_dir.glob("honed.db*"):
        path.unlink()
    instance.configure(f"[users.{ANNA}]\nmax_device_sec = {lines[0]['sec'] / 2}\n")
    instance.start()
    drop(instance, ANNA, "succeed.two")
    drop(instance, BERTA, "succeed.b")
    instance.wait_state("succeed.b", State.SUCCEEDED)
    assert waits(instance, "succeed.two").startswith(f"limit: {ANNA} has used ")
    assert used(instance)[0] == lines[0]
    instance.configure("")
    instance.client.ask("status")
    os.kill(instance.process.pid, signal.SIGHUP)  # type: ignore[union-attr]
    instance.wait_state("succeed.two", State.SUCCEEDED)


def test_a_user_whose_finished_jobs_take_too_much_starts_none_before_they_are_pruned(instance: Instance) -> None:
    instance.start()
    drop(instance, ANNA, "succeed.one")
    instance.wait_state("succeed.one", State.SUCCEEDED)
    (instance.layout.job(1).dir / "large").write_bytes(bytes(10 * 2**20))
    instance.configure(f"[users.{ANNA}]\nmax_job_bytes = {5 * 2**20}\n")
    os.kill(instance.process.pid, signal.SIGHUP)  # type: ignore[union-attr]
    wait_for(lambda: "configuration reloaded" in instance.log, what="the limit")
    instance.client.ask("pause")
    drop(instance, ANNA, "succeed.two")
    instance.wait_state("succeed.two", State.QUEUED)
    wait_for(lambda: waits(instance, "succeed.two").startswith("paused"), what="a look")
    wait_for(lambda: measured(instance), what="its size")
    instance.client.ask("resume")
    drop(instance, BERTA, "succeed.b")
    instance.wait_state("succeed.b", State.SUCCEEDED)
    assert f"limit: the jobs of {ANNA} take" in waits(instance, "succeed.two")
    instance.honectl("prune", "1", check=True)
    instance.wait_state("succeed.two", State.SUCCEEDED)


def measured(instance: Instance) -> bool:
    rows = instance.client.ask("prune", ids=["1"], dry_run=True)
    return bool(rows["is_measured"])


def used(instance: Instance) -> list[dict[str, Any]]:
    path: Path = instance.layout.usage_path
    if not path.exists():
        return []
    return [line for line in map(json.loads, path.read_text().splitlines()) if "job" in line]


CLASSES = """
[classes.urgent]
rank = 5
preempts = true
[classes.high]
rank = 4
[classes.low]
default = true
min_run_sec = {}
"""


def test_a_job_of_a_class_that_preempts_takes_the_device_and_the_other_resumes(instance: Instance) -> None:
    instance.configure(CLASSES.format(0))
    instance.start()
    drop(instance, ANNA, "until-60")
    wait_for(lambda: instance.job("until-60") and instance.show("until-60")["progress"]["step"], what="a step")
    drop(instance, BERTA, "succeed.high", **{"class": "high"})
    wait_for(lambda: instance.job("succeed.high") and waits(instance, "succeed.high"), what="a wait")
    assert waits(instance, "succeed.high").startswith("device: job 1 ")
    drop(instance, BERTA, "until-20", **{"class": "urgent"})
    instance.wait_state("until-20", State.RUNNING)
    instance.go("until-60")
    drop(instance, CARL, "succeed.second", **{"class": "urgent"})
    instance.wait_state("succeed.second", State.QUEUED)
    instance.go("until-20")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 4, what="all")
    low, urgent = instance.job("until-60"), instance.job("until-20")
    assert low is not None
    assert urgent is not None
    reason = f"job {urgent.id}, of a higher class, needs its device"
    assert [attempt.preemption and attempt.preemption.reason for attempt in low.attempts] == [reason, None]
    assert (low.num_failures, low.num_preemptions, len(urgent.attempts)) == (0, 1, 1)
    # Neither the second urgent job nor the one of a class that does not preempt has ended anything.
    assert order(instance) == ["until-60", "until-20", "succeed.second", "succeed.high"]
    assert f"preempted: {reason}" in instance.honectl("show", "until-60", check=True).stdout
    report.write(instance.layout, [low.id], is_shared=True, admin_group="")
    page = instance.layout.job(low.id).report_path.read_text()
    assert re.search(rf"<td>{reason}</td>\s*<td>\d+</td>\s*<td>none</td>", page)  # what it cost: seconds, and no steps


@pytest.mark.parametrize("kept", ["min_run", "merge", "rank"])
def test_what_has_just_begun_or_could_not_resume_or_is_as_high_is_not_preempted(instance: Instance, kept: str) -> None:
    instance.configure(CLASSES.format(3600 if kept == "min_run" else 0))
    instance.start()
    instance.client.ask("pause")
    drop(instance, ANNA, "until-60", **({"class": "urgent"} if kept == "rank" else {}))
    job = instance.wait_state("until-60", State.QUEUED)
    if kept == "merge":
        path = instance.layout.job(job.id).plan_path
        plan = json.loads(path.read_text())
        path.write_text(json.dumps({**plan, "spec": {**plan["spec"], "kind": "merge"}}))
    instance.client.ask("resume")
    instance.wait_state("until-60", State.RUNNING)
    drop(instance, BERTA, "succeed.urgent", **{"class": "urgent"})
    wait_for(lambda: instance.job("succeed.urgent") and waits(instance, "succeed.urgent"), what="a wait")
    instance.go("until-60")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 2, what="both")
    assert [job.num_preemptions for job in instance.spool.all_jobs().values()] == [0, 0]
    assert order(instance) == ["until-60", "succeed.urgent"]


def test_no_more_is_preempted_than_a_users_limit_lets_start(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps([{"uuid": f"GPU-{number}", "free_bytes": 80 << 30} for number in range(2)]))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.configure(CLASSES.format(0) + f"[users.{BERTA}]\nmax_running = 1\n")
    instance.start()
    for number in range(2):
        drop(instance, ANNA, f"until-6{number}")
    wait_for(lambda: len(list(instance.spool.jobs(State.RUNNING))) == 2, what="both GPUs taken")
    instance.client.ask("pause")
    for number in range(3):
        drop(instance, BERTA, f"slow-1{number}", **{"class": "urgent"})
    wait_for(lambda: len(list(instance.spool.jobs(State.QUEUED))) == 3, what="three urgent jobs")
    instance.client.ask("resume")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 3, what="the urgent ones")
    for number in range(2):
        instance.go(f"until-6{number}")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 5, what="all")
    jobs = instance.spool.all_jobs().values()
    assert sum(job.num_preemptions for job in jobs) == 1, "one made room for all three, one after the other"


def test_honed_that_is_to_drain_ends_where_only_a_person_can_lift_a_limit(instance: Instance) -> None:
    instance.configure(f"[users.{ANNA}]\nmax_running = 0\nmax_queued = 1\n")
    for name in ("succeed.one", "succeed.two"):
        drop(instance, ANNA, name)
    drop(instance, BERTA, "succeed.b")
    assert instance.drain() == 0
    jobs = {job.name: job.state for job in instance.spool.all_jobs().values()}
    assert sorted(jobs.values()) == [State.QUEUED, State.SUCCEEDED]
    assert jobs["succeed.b"] is State.SUCCEEDED
    assert len(list(instance.incoming_dir.glob("*.json"))) == 1


def test_honed_that_is_to_drain_ends_where_a_file_waits_for_one_that_a_limit_keeps_away(instance: Instance) -> None:
    instance.configure(f"[users.{ANNA}]\nmax_running = 0\nmax_queued = 2\n")
    drop(instance, ANNA, "succeed.after", depends_on=["succeed.last"])
    for name in ("succeed.one", "succeed.last"):
        drop(instance, ANNA, name)
    assert instance.drain() == 0
    assert [(job.name, job.state) for job in instance.spool.all_jobs().values()] == [("succeed.one", State.QUEUED)]
    assert [path.stem for path in instance.incoming_dir.glob("*.json")] == ["succeed.last"]
    assert instance.rejected() == {}
    instance.configure(f"[users.{ANNA}]\nmax_queued = 1\n")
    assert instance.drain() == 0
    assert order(instance) == ["succeed.one", "succeed.last", "succeed.after"]


def test_files_that_wait_for_jobs_which_they_name_count_for_the_limit(instance: Instance) -> None:
    instance.configure('[users."*"]\nmax_queued = 3\nmax_running = 0\n')
    us = os.getuid()
    for number in range(2):
        drop(instance, us, f"succeed.after-{number}", depends_on=["succeed.last"])
    for name in ("succeed.0", "succeed.1", "succeed.last"):
        drop(instance, us, name)
    instance.start()
    told = (
        "2 job files wait: 1 jobs are queued or held and 2 wait for a fetch or for jobs that they name, and the "
        "maximum is 3 (max_queued)"
    )
    wait_for(lambda: instance.client.ask("status")["limit"] == told, what="the limit")
    assert "2 files wait until fewer jobs of their users are queued" in status(instance)
    assert [job.name for job in instance.spool.jobs(State.QUEUED)] == ["succeed.0"]
    instance.stop()
    instance.configure('[users."*"]\nmax_queued = 3\n')
    assert instance.drain() == 0
    assert instance.rejected() == {}
    assert len(list(instance.spool.jobs(State.SUCCEEDED))) == 5


def test_a_job_that_names_one_which_a_limit_keeps_in_incoming_waits_for_it(instance: Instance) -> None:
    instance.configure(f"[users.{ANNA}]\nmax_queued = 3\n[spool]\nsettle_sec = 0\n")
    instance.start()
    instance.client.ask("pause")
    drop(instance, ANNA, "succeed.after", depends_on=["succeed.last"])
    for name in ("succeed.one", "succeed.two", "succeed.last"):
        drop(instance, ANNA, name)
    wait_for(lambda: "1 file waits until fewer jobs" in status(instance), what="the limit")
    # A later file that names a job that never comes is given up: so would the first have been.
    drop(instance, BERTA, "succeed.lost", depends_on=["succeed.nobody"])
    wait_for(instance.rejected, what="the end of its patience")
    assert [*instance.rejected()] == ["succeed.lost.json"]
    instance.client.ask("resume")
    wait_for(lambda: len(list(instance.spool.jobs(State.SUCCEEDED))) == 4 or len(instance.rejected()) > 1, what="all")
    assert [*instance.rejected()] == ["succeed.lost.json"]
    assert order(instance)[-2:] == ["succeed.last", "succeed.after"]
