"""Many jobs at once: the cost of each operation does not grow with their number, and no job is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import HERE, Instance

from honed.job.arrival import Arrivals
from honed.job.job import Job, State
from honed.job.spool import Spool
from honed.system.personpath import PersonPath
from waiting import wait_for


def fill(instance: Instance, num_jobs: int, state: State = State.QUEUED) -> None:
    """Write entries as if so many jobs had been accepted; the spool is paused, so no job starts."""
    Spool(instance.layout, lock=False)
    for number in range(1, num_jobs + 1):
        job = Job(number, f"job-{number}", 1e9, f"job-{number}.json", os.getuid(), f"/nowhere/{number}")
        (instance.layout.spool_dir / state.value / f"{number}.json").write_bytes(job.to_json())
    (instance.layout.spool_dir / "seq").write_text(f"{num_jobs}\n")
    (instance.layout.spool_dir / "paused").touch()


def honectl(instance: Instance, *arguments: str) -> str:
    done = instance.honectl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_opened(instance: Instance, num_jobs: int) -> int:
    """Return how many entries are opened from start to stop, with arrivals and requests in between."""
    instance.command = (sys.executable, str(HERE / "countedhoned.py"))
    fill(instance, num_jobs)
    instance.start()
    instance.drop("first", name="first", output_dir=str(instance.root / "out/first"))
    instance.drop("second", name="second", depends_on=["first", "job-7"])
    queued_dir = instance.layout.spool_dir / "queued"
    wait_for(lambda: len(list(queued_dir.glob("*.json"))) == num_jobs + 2, what="both accepted")
    assert instance.client.ask("show", id="job-3")["id"] == 3
    assert instance.client.ask("overview")["counts"]["queued"] == num_jobs + 2
    assert len(instance.client.ask("list")) == num_jobs + 2
    instance.client.ask("cancel", id="job-5")
    instance.stop()
    return int((instance.root / "opened").read_text())


def test_each_entry_is_read_once_at_start_and_never_again_for_an_arrival_or_a_question(tmp_path: Path) -> None:
    few, many = Instance(tmp_path / "few"), Instance(tmp_path / "many")
    assert num_opened(many, 70) - num_opened(few, 10) == 60


def test_a_flood_of_arrivals_becomes_one_job_each_beside_one_that_trains(instance: Instance) -> None:
    instance.start()
    instance.drop("slow-4000")
    slow = instance.wait_state("slow-4000", State.RUNNING)
    events = instance.layout.job(slow.id).attempt(1).events_path
    names = [f"succeed.{number}" for number in range(24)]
    for number, name in enumerate(names):
        keys = {"depends_on": ["slow-4000"]} if number % 4 == 0 else {}
        instance.drop(f"file-{number}", name=name, **keys)
    (instance.incoming_dir / "bad.json").write_text("{")
    wait_for(lambda: len(instance.spool.all_jobs()) == 25 and instance.rejected(), what="accepted", deadline_sec=300)
    assert sorted(job.name for job in instance.spool.all_jobs().values()) == sorted(["slow-4000", *names])
    assert set(instance.rejected()) == {"bad.json"}
    claimed_dir = instance.layout.spool_dir / "claimed"  # its files are removed after the entries exist
    wait_for(lambda: not list(claimed_dir.iterdir()), what="nothing claimed")
    row = instance.client.ask("list", names=["slow-4000"])[0]
    assert row["progress"]["step"], "the running job's events are followed meanwhile"
    assert events.stat().st_size


def test_what_was_claimed_when_honed_was_killed_is_accepted_after_it(instance: Instance) -> None:
    fill(instance, 0)
    spool = Spool(instance.layout)
    for number in range(24):
        claimed = Arrivals(spool).claim(PersonPath.of(instance.drop(f"claimed-{number}"), 1))
        assert claimed is not None
    spool.close()
    instance.start()
    wait_for(lambda: len(instance.spool.all_jobs()) == 24, what="accepted", deadline_sec=300)
    assert {job.name for job in instance.spool.all_jobs().values()} == {f"claimed-{number}" for number in range(24)}


def test_a_long_list_shows_the_first_of_each_kind_and_counts_the_rest(instance: Instance) -> None:
    fill(instance, 560)
    instance.start()
    for number in (3, 4):
        instance.client.ask("cancel", id=str(number))
    instance.client.ask("hold", id="5")
    short = honectl(instance, "list")
    assert [line.split()[0] for line in short.splitlines()[1:-1]] == [*map(str, [1, 2, *range(6, 24)]), "5", "4", "3"]
    assert "and 537 more queued: honectl list --all" in short
    assert len(json.loads(honectl(instance, "list", "--json"))) == 560
    everything = honectl(instance, "list", "--all").splitlines()
    assert len(everything) == 561
    assert everything[1].split()[:3] == ["1", "job-1", "queued"]
    page = json.loads(honectl(instance, "list", "--limit", "3", "--after", "7", "--json"))
    assert [job["id"] for job in page] == [8, 9, 10]
    assert [job["id"] for job in json.loads(honectl(instance, "list", "job-9", "11", "--json"))] == [9, 11]
    assert [job["id"] for job in json.loads(honectl(instance, "list", "--state", "held", "--json"))] == [5]
    listed = json.loads(honectl(instance, "list", "--json"))
    instance.stop()
    *from_files, last = honectl(instance, "list").splitlines()
    assert last.startswith("honed is not running: the queue is in the order")
    assert [line.split()[0] for line in from_files] == [line.split()[0] for line in short.splitlines()]
    told = [{**job, "waiting_for": None} for job in json.loads(honectl(instance, "list", "--json"))]
    assert told == [{**job, "waiting_for": None} for job in listed], "and the same from the files, when honed is down"


def test_a_restart_with_many_jobs_makes_no_report_anew(instance: Instance) -> None:
    fill(instance, 50)
    instance.start()
    instance.stop()
    index = instance.layout.index_path
    before = index.stat().st_mtime_ns
    instance.start()
    assert instance.client.ask("overview")["counts"]["queued"] == 50
    instance.stop()
    assert index.stat().st_mtime_ns == before


# -- when inotify does not tell ---------------------------------------------------------------------------------------


def test_a_job_whose_event_is_lost_in_an_overflow_is_found_all_the_same(instance: Instance) -> None:
    num_kept = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    instance.configure("[spool]\nrescan_interval_sec = 1\n")
    instance.start()
    assert instance.process is not None
    instance.process.send_signal(signal.SIGSTOP)
    noise = instance.incoming_dir / ".noise"
    for _ in range(num_kept // 2):  # each is several events
        noise.touch()
        noise.unlink()
    instance.drop("succeed")
    instance.process.send_signal(signal.SIGCONT)
    instance.wait_state("succeed", State.SUCCEEDED)
    wait_for(lambda: "queue overflowed" in instance.log, what="the overflow")
    instance.drop("succeed-2")
    instance.wait_state("succeed-2", State.SUCCEEDED)


@pytest.mark.parametrize("limit", ["max_inotify_instances", "max_inotify_watches"])
def test_at_a_limit_of_inotify_the_rescan_carries_on_which_is_said_once(instance: Instance, limit: str) -> None:
    inside = f"echo 0 > /proc/sys/user/{limit} && exec {sys.executable} {HERE / 'fakehoned.py'} $0 $@"
    instance.command = ("unshare", "--user", "--map-root-user", "sh", "-c", inside)
    if subprocess.run([*instance.command[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not to be had")
    instance.configure("[spool]\nrescan_interval_sec = 0.5\n")
    instance.start()
    assert not instance.client.ask("status")["is_watching"]
    instance.drop("succeed")
    instance.wait_state("succeed", State.SUCCEEDED)
    since = time.monotonic()
    wait_for(lambda: time.monotonic() - since > 1.5, what="some more rescans")
    assert instance.log.count("cannot be watched") == 1
    assert "scanning it instead" in instance.log


def test_files_that_are_moved_in_one_after_another_become_jobs_in_that_order(instance: Instance) -> None:
    """They are older than any wait for the end of their writing, and honed is woken all the time by other things."""
    elsewhere = instance.root / "elsewhere"
    elsewhere.mkdir()
    names = [f"{number * 7919 % 1000:03}" for number in range(40)]
    for name in names:
        instance.drop(name)
        file = (instance.incoming_dir / f"{name}.json").rename(elsewhere / f"{name}.json")
        os.utime(file, (1e9, 1e9))
    instance.start()
    instance.client.ask("pause")
    for name in names:
        (elsewhere / f"{name}.json").rename(instance.incoming_dir / f"{name}.json")
        instance.process.send_signal(signal.SIGCHLD)
    wait_for(lambda: len(instance.spool.all_jobs()) == len(names), what="all accepted")
    assert [job.name for _, job in sorted(instance.spool.all_jobs().items())] == names
