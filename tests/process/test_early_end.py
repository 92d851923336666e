"""A sweep with `halving` ends its hopeless jobs early, also across a kill of honed, and they can be continued."""

from __future__ import annotations

import json
import signal
import time

from harness import Instance

from honed.job.event import read
from honed.job.job import Job, State
from honed.page import comparison
from honed.page.story import gather
from honed.system.personpath import PersonPath
from waiting import wait_for

RATES = [3e-4, 1e-4, 2e-4, 4e-4, 5e-4]


def member(instance: Instance, number: int) -> Job:
    job = instance.job(f"rungs-{number}")
    assert job is not None
    return job


def num_evaluations(instance: Instance, number: int) -> int:
    path = instance.layout.job(member(instance, number).id).attempt(1).events_path
    if not path.exists():
        return 0
    return sum(event.kind == "evaluation" for event in read(PersonPath.own(path), 0).events)


def test_jobs_that_are_not_among_the_best_at_a_rung_end_early_and_can_be_continued(instance: Instance) -> None:
    instance.configure("[jobs]\nmax_running = 1\npoll_interval_sec = 0.02\nstage_ahead = false\n")
    halving = {"min_steps": 4, "eta": 2}
    instance.drop("none", sweep={"lora.r": [2, 4], "halving": halving})
    keys = {"eval_split": 0.25, "training": {"eval_steps": 1}}
    instance.drop("rungs", sweep={"training.learning_rate": RATES, "halving": halving}, **keys)
    instance.start()
    wait_for(lambda: "none.json" in instance.rejected(), what="a refusal")
    assert "sweep.halving: it compares the evaluation losses" in instance.rejected()["none.json"]

    # Killed before the fourth job's first rung, which the job passes while there is no honed.
    wait_for(lambda: instance.job("rungs-4") and member(instance, 4).state is State.RUNNING, what="the fourth job")
    wait_for(lambda: num_evaluations(instance, 4) >= 1, what="its first evaluation")
    instance.kill(signal.SIGKILL)
    instance.go("rungs-4")
    wait_for(lambda: num_evaluations(instance, 4) >= 5, what="the rung")
    assert member(instance, 4).cut is None
    instance.start()
    fourth = instance.wait_state("rungs-4", State.CANCELLED, State.SUCCEEDED)
    fifth = instance.wait_state("rungs-5", State.CANCELLED, State.SUCCEEDED)
    assert [job.outcome for job in (fourth, fifth)] == ["stopped_early"] * 2
    assert fourth.cut is not None
    assert (fourth.cut.rung, fourth.cut.step, fourth.cut.place, fourth.cut.num) == (1, 4, 4, 4)
    assert fifth.attempt.step < 30
    assert [member(instance, n).state for n in (1, 2, 3)] == [State.SUCCEEDED] * 3
    assert "its sweep stops it: at step 4 (rung 1)" in instance.log

    found = json.loads(instance.honectl("show", "rungs", "--json", check=True).stdout)
    assert found["best"] == member(instance, 2).id
    assert [bool(job["stopped_early"]) for job in found["jobs"]] == [False, False, False, True, True]
    told = instance.honectl("show", "rungs", check=True).stdout
    assert f"job {fourth.id} was stopped early: at step 4 (rung 1) its eval_loss 0.0004 was number 4 of 4" in told
    assert f"has job {found['best']}" in told
    assert "stopped_early" in instance.honectl("list", check=True).stdout
    stories = [gather(instance.spool, instance.layout, member(instance, number)) for number in range(1, 6)]
    page = comparison.render(stories, num_all=5, now=time.time()).decode()
    assert page.count("stopped early by its sweep: at step 4 (rung 1)") == 2
    assert f'<span class="mark s1">B</span> <a href="/jobs/{found["best"]}">' in page.partition("Lowest evaluation")[2]

    instance.honectl("requeue", "rungs-4", check=True)
    done = instance.wait_state("rungs-4", State.SUCCEEDED)
    assert (len(done.attempts), done.attempt.is_resumed) == (2, True)
    assert json.loads(instance.honectl("show", "rungs", "--json", check=True).stdout)["best"] == found["best"]
