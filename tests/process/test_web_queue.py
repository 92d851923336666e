"""honed-web with a queue: the reasons why its jobs wait, and the fate of a removed job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Instance
from test_web import SHARED, serving

from honed.job.job import State
from honed.job.spool import Spool
from honed.system.layout import Layout
from waiting import wait_for


def test_why_a_job_waits_is_told_as_honed_knows_it(instance: Instance) -> None:
    instance.configure(SHARED)
    instance.start()
    instance.drop("a", name="slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    instance.drop("b", name="succeed.b", depends_on=["slow-4000"])
    wait_for(lambda: instance.job("succeed.b"), what="the second job")
    with serving(instance) as web:
        row, running = web.json("/api/jobs")["jobs"]
        assert (row["waiting_for"]["reason"], running["waiting_for"]) == ("dependency", None)
        assert row["waiting_for"]["detail"] == "job 1 (slow-4000), which it depends on, is running"
        assert web.json("/api/jobs/2")["waiting_for"] == row["waiting_for"]
    instance.end()
    with serving(instance) as web:
        assert web.json("/api/jobs/2")["waiting_for"]["detail"] == "honed is not running"


def test_somebody_elses_job_waits_for_a_reason_without_names(instance: Instance) -> None:
    instance.start()
    instance.drop("a", name="slow-4000")
    instance.wait_state("slow-4000", State.RUNNING)
    instance.drop("b", name="succeed.b", depends_on=["slow-4000"])
    wait_for(lambda: instance.job("succeed.b"), what="the second job")
    instance.client.ask("drain", id="cpu", reason="for anna")
    with serving(instance) as web:
        row = web.json("/api/jobs")["jobs"][0]
        status, _, page = web.ask("/")
    assert status == 200
    assert b"job 2" in page
    assert b">drained<" in page
    assert not {each for each in (b"slow-4000", b"succeed.b", b"anna") if each in page}
    assert (row["name"], row["waiting_for"]) == ("", {"reason": "dependency", "detail": ""})


def test_a_job_that_was_pruned_is_said_to_be_gone(instance: Instance) -> None:
    instance.drop("a", name="succeed")
    assert instance.drain() == 0
    instance.spool.prune(instance.spool.all_jobs()[1])
    with serving(instance) as web:
        status, _, body = web.ask("/api/jobs/1")
        assert (status, json.loads(body)["error"]["message"]) == (404, "no job 1")  # whose it was is nobody's business
    instance.configure(SHARED)
    with serving(instance) as web:
        status, _, body = web.ask("/jobs/1")
    assert status == 404
    assert json.loads(body)["error"]["message"] == "job 1 (succeed) succeeded and was pruned: its output is gone"


@pytest.mark.parametrize("num_digits", [19, 300, 5000])
def test_a_number_without_end_is_no_job_and_no_line_in_the_log(instance: Instance, num_digits: int) -> None:
    assert instance.drain() == 0
    with serving(instance) as web:
        before = web.log
        for path in ("/api/jobs/{}", "/jobs/{}", "/api/jobs/{}/events"):
            assert web.ask(path.format("9" * num_digits))[0] == 404
        assert web.log == before


def test_a_spool_asked_for_an_endless_number_says_nothing_of_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(Layout(tmp_path))
    assert spool.job(10**300) is None
    assert spool.pruned.get("9" * 300) is None
    assert caplog.text == ""
