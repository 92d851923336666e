"""What an administrator of Slurm does to a job that runs: no time passes for one that is suspended, and one that is
requeued resumes from its checkpoint, without an attempt that is lost."""

from __future__ import annotations

import re
import time

from nodes import ClusterInstance

from honed.job.job import State
from waiting import wait_for

#: Seconds of the job's time limit, its grace period, and the time for which a worker may be silent.
LIMIT_SEC, GRACE_SEC, STALL_SEC = 12.0, 3.0, 8.0


def slurm_id(cluster: ClusterInstance, name: str) -> str:
    """Return the number of a job whose worker takes steps, as Slurm gave it."""
    wait_for(lambda: cluster.job(name), what=name)
    wait_for(lambda: (cluster.show(name)["progress"]["step"] or 0) > 0, what=f"{name}'s first step")
    return str(wait_for(lambda: cluster.show(name)["slurm"]["id"], what="its number in Slurm"))


def state(cluster: ClusterInstance, name: str) -> str:
    return str(cluster.show(name)["slurm"]["state"])


def test_no_time_passes_for_a_job_that_slurm_suspends(cluster: ClusterInstance) -> None:
    cluster.configure(
        f"[jobs]\ntime_limit_grace_sec = {GRACE_SEC}\nstall_timeout_sec = {STALL_SEC}\nmin_stall_timeout_sec = 1\n"
    )
    cluster.start()
    cluster.drop("until", name="until", time_limit_sec=LIMIT_SEC)
    number = slurm_id(cluster, "until")
    cluster.cluster.run("scontrol", "suspend", number)
    began = time.monotonic()
    wait_for(lambda: state(cluster, "until") == "SUSPENDED", what="the suspension")
    seen_at = time.monotonic()
    wait_for(lambda: time.monotonic() > began + LIMIT_SEC + GRACE_SEC, what="the end of every deadline")
    suspended_sec = time.monotonic() - seen_at
    assert state(cluster, "until") == "SUSPENDED"
    cluster.cluster.run("scontrol", "resume", number)
    wait_for(lambda: state(cluster, "until") == "RUNNING", what="its end")
    cluster.go("until")
    job = cluster.wait_state("until", State.SUCCEEDED, State.FAILED, State.HELD)
    assert job.state is State.SUCCEEDED, cluster.log[-3000:]
    assert not re.search("hung|killed|time limit", cluster.log), cluster.log[-3000:]
    assert len(cluster.starts(job)) == 1
    attempt = job.attempt
    assert attempt.ended_at is not None
    assert attempt.spent_sec <= attempt.ended_at - attempt.started_at - suspended_sec


def test_a_running_job_that_slurm_requeues_resumes_and_loses_no_attempt(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("until", name="until", retry={"max_attempts": 1})
    number = slurm_id(cluster, "until")
    cluster.cluster.run("scontrol", "update", f"jobid={number}", "requeue=1")
    cluster.cluster.run("scontrol", "requeue", number)
    wait_for(lambda: len(cluster.show("until")["attempts"]) == 2, what="the second attempt")
    cluster.go("until")
    job = cluster.wait_state("until", State.SUCCEEDED, State.FAILED, State.HELD)
    assert job.state is State.SUCCEEDED, cluster.log[-3000:]
    assert [attempt.outcome for attempt in job.attempts] == ["interrupted", "succeeded"]
    assert job.num_failures == 0
    assert len(cluster.starts(job)) == 2
    assert not (cluster.layout.job(job.id).dir / "twice.txt").exists()
    assert cluster.show("until")["slurm"]["id"] != number
