"""The instance of version 0.2.0 is taken over without loss: unpacked, and this honed's daemon started on it.

tests/data/instance/record.py made it, of workers and a daemon that were killed in the middle of their work. To be
read, and run, in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import endpoint as api
import pytest
import torch
import transformers
import trl
from endpoint import Endpoint
from harness import RealInstance
from postbox import Webhook
from test_report import Page

import warm
from honed.page import report
from honed.send import notification, outbox
from honed.spec import config
from honed.system.client import Client
from honed.system.layout import Layout
from waiting import wait_for

pytestmark = pytest.mark.random_order(disabled=True)
DATA = Path(__file__).parents[1] / "data/instance"
RECORD = runpy.run_path(str(DATA / "record.py"))
ROOT: Path = RECORD["ROOT"]
#: Jobs that had ended, with what is left of them, and those that this honed has to end.
OVER = ("whole", "overdue", "cancelled", "given-up", "told-later")
OPEN = ("cut", "deferred", "after", "staged", "claimed", "arriving", "held")
TABLES = ("metrics", "training_predictions", "events")


class Unpacked(RealInstance):
    """The recorded instance at the place where it was recorded, and receivers in the place of the recording's."""

    def __init__(self) -> None:
        warm.address("worker")
        warm.address("plain")
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir(mode=0o700)
        subprocess.run(
            ["tar", "--extract", "--xz", "--file", DATA / "instance.tar.xz", "--directory", ROOT], check=True
        )
        self.layout, self.root = Layout(ROOT), ROOT
        if os.getuid() != 0:  # root recorded it; its files are ours now, and so are its jobs
            for path in self.layout.spool_dir.glob("*/[0-9]*.json"):
                path.write_text(json.dumps(json.loads(path.read_text()) | {"uid": os.getuid()}))
            with contextlib.closing(sqlite3.connect(self.layout.database_path)) as db, db:
                db.execute("UPDATE training_predictions SET user_id = ?", (str(os.getuid()),))
        self.client = Client(self.layout.control_path)
        self.process = None
        self.log_path = ROOT / "honed.log"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / "packages")}

    def send_to(self, endpoint: Endpoint, hook: Webhook) -> None:
        """Name receivers on other ports, in the files that the administrator wrote."""
        for path in (self.layout.config_path, self.layout.config_path.with_name("team-webhook")):
            text = path.read_text()
            text = text.replace(f":{RECORD['PORT']}/api", f":{endpoint.port}/api")
            path.write_text(text.replace(f":{RECORD['PORT']}/team", f":{hook.port}/team"))

    def end(self) -> None:
        # The lock names processes of the recording, whose numbers others have now.
        (self.layout.job(self.number("cut")).attempt(1).dir / "lock").unlink(missing_ok=True)
        super().end()

    def number(self, name: str) -> int:
        return next(job.id for job in self.spool.all_jobs().values() if job.name == name)

    def states(self) -> dict[str, str]:
        return {job.name: job.state.value for job in self.spool.all_jobs().values()}

    def losses(self, name: str, attempt: int) -> dict[int, float]:
        """The loss of each step that an attempt reported."""
        lines = self.layout.job(self.number(name)).attempt(attempt).events_path.read_text().splitlines()
        return {event["step"]: event["loss"] for event in map(json.loads, lines) if event["event"] == "step"}

    def rows(self, table: str) -> dict[int, list[tuple[Any, ...]]]:
        """The rows of a table of honed.db, by job."""
        found: dict[int, list[tuple[Any, ...]]] = {}
        with contextlib.closing(sqlite3.connect(self.layout.database_path)) as db:
            for row in db.execute(f"SELECT job_id, * FROM {table} ORDER BY rowid"):
                found.setdefault(row[0], []).append(row)
        return found


@dataclass
class Course:
    """The state before this honed started, and the receivers that saw what it then did."""

    instance: Unpacked
    endpoint: Endpoint
    hook: Webhook
    recorded: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    plans: dict[str, str] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    rows: dict[str, dict[int, list[tuple[Any, ...]]]] = field(default_factory=dict)
    states_before_release: dict[str, str] = field(default_factory=dict)

    def job(self, name: str) -> dict[str, Any]:
        """A job as it was listed."""
        return next(job for job in self.recorded["jobs"] if job["name"] == name)

    def digests(self) -> dict[str, str]:
        """A digest of each file of what was over, but for the pages, which are made again."""
        layout = self.instance.layout
        places = [layout.spool_dir / "rejected", *(layout.job(self.instance.number(name)).dir for name in OVER)]
        paths = [path for place in places for path in place.rglob("*") if path.is_file() and path.name != "report.html"]
        return {str(path.relative_to(ROOT)): sha256(path.read_bytes()).hexdigest() for path in paths}

    def planned(self) -> dict[str, str]:
        """The plans of the jobs that were queued or held, and planned when they were accepted."""
        layout = self.instance.layout
        return {name: layout.job(self.instance.number(name)).plan_path.read_text() for name in ("staged", "held")}


def pending_keys(instance: Unpacked) -> set[str]:
    """The keys of rows in the outbox that were not delivered."""
    position = outbox.read_cursor(instance.layout.outbox_dir)
    text = b""
    for number, path in outbox.segments(instance.layout.outbox_dir).items():
        if number >= position.segment:
            text += path.read_bytes()[position.offset if number == position.segment else 0 :]
    return {json.loads(line)["idempotency_key"] for line in text.splitlines()}


@pytest.fixture(scope="module")
def place() -> Iterator[None]:
    """Keep the place from other runs of these tests on this machine."""
    with socket.socket(socket.AF_UNIX) as lock:

        def is_bound() -> bool:
            try:
                lock.bind("\0honed-recorded")
            except OSError:
                return False
            return True

        wait_for(is_bound, what=f"the end of another run of these tests, which has {ROOT}")
        yield


@pytest.fixture(scope="module")
def course(place: None) -> Iterator[Course]:
    hook = Webhook()
    with api.running() as endpoint:
        instance = Unpacked()
        try:
            instance.send_to(endpoint, hook)
            before = Course(instance, endpoint, hook, json.loads((DATA / "recorded.json").read_text()))
            follow(before)
            yield before
        finally:
            instance.end()
            hook.down()
            shutil.rmtree(ROOT)


def follow(course: Course) -> None:
    """Start this honed on it until nothing is left to do, release the job that is held, and start it once more."""
    instance, layout = course.instance, course.instance.layout
    course.files = course.digests()
    course.plans = course.planned()
    course.pending = pending_keys(instance)
    course.rows = {table: instance.rows(table) for table in TABLES}
    assert instance.drain() == 0, instance.log
    course.states_before_release = instance.states()
    instance.honectl("release", "held", check=True)
    assert instance.drain() == 0, instance.log
    wait_for(lambda: not notification.waiting(layout) and not pending_keys(instance), what="the deliveries")


def test_each_job_ends_as_it_should(course: Course) -> None:
    before, after = course.states_before_release, course.instance.states()
    ended = {job["name"]: job["state"] for job in course.recorded["jobs"] if job["name"] in OVER}
    assert before == {**ended, **dict.fromkeys(OPEN, "succeeded"), "held": "held"}
    assert after == {**before, "held": "succeeded"}
    numbers = {name: course.instance.number(name) for name in after}
    assert {job["name"]: job["id"] for job in course.recorded["jobs"]}.items() <= numbers.items()
    assert len(course.instance.entries()) == len(after) == len(set(numbers.values()))
    attempts = {name: [each["number"] for each in course.instance.show(name)["attempts"]] for name in OPEN}
    assert attempts == {name: [1, 2] if name == "cut" else [1] for name in OPEN}
    assert course.planned() == course.plans, "nothing is planned twice"


def test_the_job_that_was_cut_resumes_bit_identically(course: Course) -> None:
    """On the processor of the recording and with its libraries: others may compute other last bits."""
    whole = dict(enumerate(course.recorded["losses"], start=1))
    first, second = course.instance.losses("cut", 1), course.instance.losses("cut", 2)
    assert min(second) > 1, "from its checkpoint"
    assert sorted({*first, *second}) == sorted(whole)
    weights = [course.instance.layout.job(course.instance.number(name)).dir / "output" for name in ("whole", "cut")]
    expected, found = ((each / "adapter_model.safetensors").read_bytes() for each in weights)
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    here = {**libraries, "processor": RECORD["processor"]()}
    if here.items() <= course.recorded.items():
        assert second == {step: whole[step] for step in second}
        assert found == expected
    else:
        assert second == pytest.approx({step: whole[step] for step in second}, rel=1e-4)
        assert len(found) == len(expected)


def test_jobs_that_had_ended_are_listed_with_numbers_results_and_scores(course: Course) -> None:
    listed = {
        job["name"]: job for job in json.loads(course.instance.honectl("list", "--all", "--json", check=True).stdout)
    }
    for name in OVER:
        job, shown = course.job(name), json.loads(course.instance.honectl("show", "--json", name, check=True).stdout)
        assert listed[name]["id"] == job["id"]
        shown["attempts"] = [  # without the keys of later
            {key: after[key] for key in before}
            for before, after in zip(job["attempts"], shown["attempts"], strict=True)
        ]
        assert {key: shown[key] for key in job} == job
    assert course.job("whole")["metrics"]["predictions/vowels"] > 0
    assert course.job("whole")["is_pinned"]
    assert course.job("overdue")["error"]["code"]


def test_nothing_of_theirs_has_changed(course: Course) -> None:
    assert course.digests() == course.files
    for table, before in course.rows.items():
        after = course.instance.rows(table)
        for number in map(course.instance.number, ("whole", "overdue", "cancelled")):
            assert before[number], table
            assert after[number] == before[number], table


def test_reports_of_them_can_be_made(course: Course) -> None:
    layout = course.instance.layout
    for name in OVER:
        number = course.instance.number(name)
        layout.job(number).report_path.unlink()
        assert report.write(layout, [number], is_shared=True, admin_group="") == 0
        page = Page.of(layout.job(number).report_path)
        assert course.job(name)["state"] in page.shown, name
        assert (f"{course.recorded['losses'][-1]:.4g}" in page.shown) is (name == "whole"), "the last loss"


def test_what_waited_in_the_outbox_is_delivered_once(course: Course) -> None:
    delivered = set(course.recorded["rows"])
    assert course.pending, "the recording has rows that wait"
    assert course.pending <= set(course.endpoint.rows)
    assert not delivered & set(course.endpoint.rows)
    assert set(course.endpoint.num_times.values()) == {1}
    told = {row["job_id"] for row in course.endpoint.rows.values()}
    assert told == {str(course.instance.number(name)) for name in ("cancelled", *OPEN)}


def test_notices_that_waited_are_delivered_once_and_refused_ones_are_kept(course: Course) -> None:
    told = sorted((notice["name"], notice["state"]) for notice in course.hook.notices.values())
    assert told == [("cut", "succeeded"), ("given-up", "cancelled"), ("told-later", "cancelled")]
    assert set(course.hook.num_times.values()) == {1}
    assert not set(course.recorded["notices"]) & set(course.hook.notices)
    [refused] = notification.refused_dir(course.instance.layout).glob("*.json")
    assert json.loads(refused.read_text())["notice"]["payload"]["job_id"] == course.instance.number("cancelled")
    assert not list((course.instance.layout.spool_dir / "ended").iterdir())


def test_what_was_pruned_or_staged_leaves_nothing_behind(course: Course) -> None:
    layout = course.instance.layout
    assert not list(layout.staged_dir.iterdir())
    assert sorted(path.name for path in (layout.spool_dir / "pruned").iterdir()) == [
        "2.succeeded.json",
        "4.failed.json",
    ]
    assert not {"2", "4"} & {path.name for path in layout.jobs_dir.iterdir()}
    assert 4 in course.rows["metrics"], "its rows were left"
    assert not any({2, 4} & course.instance.rows(table).keys() for table in TABLES)
    assert not list(layout.jobs_dir.rglob("checkpoints/.new/*"))
    assert not list((layout.spool_dir / "claimed").iterdir())


def test_what_the_administrator_wrote_holds(course: Course) -> None:
    """The later of two drop-ins wins; the metric module counts."""
    jobs = config.load(course.instance.layout).jobs
    assert (jobs.min_stall_timeout_sec, jobs.stop_timeout_sec, jobs.max_running) == (200, 123, 1)
    assert all(course.instance.show(name)["metrics"]["predictions/vowels"] > 0 for name in OPEN)


def test_the_database_can_be_rebuilt_from_their_files(course: Course) -> None:
    instance = course.instance
    numbers = [instance.number(name) for name in (*OVER, *OPEN)]
    before = {table: instance.rows(table) for table in TABLES}
    for path in instance.layout.database_path.parent.glob("honed.db*"):
        path.unlink()
    assert instance.drain() == 0, instance.log
    for table in TABLES:
        after = instance.rows(table)
        for number in numbers:
            assert sorted(after.get(number, [])) == sorted(before[table].get(number, [])), (table, number)


def test_a_requeued_job_resumes_from_its_checkpoint(course: Course) -> None:
    instance = course.instance
    instance.honectl("requeue", "cancelled", check=True)
    assert instance.drain() == 0, instance.log
    shown = instance.show("cancelled")
    assert (shown["state"], [each["outcome"] for each in shown["attempts"]]) == (
        "succeeded",
        ["interrupted", "succeeded"],
    )
    first, second = instance.losses("cancelled", 1), instance.losses("cancelled", 2)
    assert min(second) == max(first) + 1
