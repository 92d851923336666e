"""honectl without a daemon: the same answers from the files, and changes under the spool's lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.cli.instance import Instance
from honed.job.arrival import Arrivals
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.system.error import EnvironmentInvalidError, UsageError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    """An instance with two queued jobs, the second with the higher priority; honed is down."""
    spool = Spool(Layout(tmp_path))
    spool.recover()
    arrivals = Arrivals(spool)
    for name, priority in (("first", 0), ("second", 5)):
        path = spool.incoming_dir / f"{name}.json"
        path.write_text("{}")
        claim = arrivals.claim(PersonPath.of(path, 1))
        assert claim is not None
        arrivals.copy(claim, max_bytes=100)
        job = Job(id=claim.id, name=name, output_dir="/o", submitted_at=1.0, source=path.name, uid=0, priority=priority)
        arrivals.admit(job, claim, PlanFile({}))
    spool.close()
    return Instance(Layout(tmp_path))


def test_jobs_are_listed_in_the_order_in_which_they_would_start(instance: Instance) -> None:
    assert [job["name"] for job in instance.jobs()] == ["second", "first"]
    assert [job["name"] for job in instance.ask("overview")["jobs"]] == ["second", "first"]
    assert instance.ask("accepted", id="first.json", since="", number=None)["name"] == "first"
    assert instance.show("second")["priority"] == 5
    assert instance.status() is None


def test_a_change_is_made_in_the_spool_and_one_that_is_not_allowed_names_the_states(instance: Instance) -> None:
    assert instance.ask("hold", id="first")["state"] == "held"
    with pytest.raises(UsageError, match="is held, but hold needs a job that is queued or running"):
        instance.ask("hold", id="first")
    assert instance.ask("cancel", id="first")["state"] == "cancelled"
    with pytest.raises(UsageError, match="cancel needs a job that is queued, held or running"):
        instance.ask("cancel", id="first")
    assert instance.ask("requeue", id="first")["goes_on_from"] == "the start: it has no checkpoint"
    with pytest.raises(UsageError, match="is queued, but release needs a job that is held"):
        instance.ask("release", id="first")


def test_a_change_needs_the_lock_and_reading_does_not(instance: Instance) -> None:
    spool = Spool(instance.layout, lock=True)
    with pytest.raises(EnvironmentInvalidError):
        instance.ask("pin", id="first")
    assert not instance.show("first")["is_pinned"]
    spool.close()
    assert instance.ask("pin", id="first")["is_pinned"]


@pytest.mark.parametrize("verb", ["submit", "edit", "drain", "prune"])
def test_a_verb_that_needs_the_daemon_says_that_it_is_down(instance: Instance, verb: str) -> None:
    with pytest.raises(EnvironmentInvalidError, match="honed does not respond"):
        instance.ask(verb, id="first")


def test_without_a_spool_there_is_nothing_to_ask(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentInvalidError, match="the spool does not exist"):
        Instance(Layout(tmp_path / "none")).ask("list")
