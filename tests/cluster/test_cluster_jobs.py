"""Jobs on a Slurm cluster: each ends once, whatever is killed meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from nodes import ClusterInstance

from honed.job.job import State
from honed.run import choice
from honed.spec import config
from waiting import wait_for


def begun(cluster: ClusterInstance, name: str) -> None:
    """Wait until a job's worker has begun."""
    wait_for(lambda: (job := cluster.job(name)) and cluster.starts(job), what=f"{name} begins")


def submissions(cluster: ClusterInstance, name: str) -> list[str]:
    """Return the Slurm jobs that were made for a job of this instance."""
    job = cluster.job(name)
    assert job is not None
    mine = (cluster.layout.state_dir / "slurm-instance").read_text().strip()
    lines = cluster.cluster.run("squeue", "-h", "-t", "all", "-o", "%j").splitlines()
    return [line for line in lines if line.startswith(f"honed-{mine}-{job.id}-")]


def test_a_job_runs_on_the_cluster(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("succeed", name="succeed")
    job = cluster.wait_state("succeed", State.SUCCEEDED, State.FAILED)
    assert job.state is State.SUCCEEDED
    assert len(cluster.starts(job)) == 1
    shown = cluster.show("succeed")["slurm"]
    assert shown["id"].isdecimal()
    assert submissions(cluster, "succeed") == [shown["name"]]


def test_the_doctor_proves_on_each_free_node_what_jobs_need(
    cluster: ClusterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    cluster.layout.state_dir.mkdir(parents=True)
    cluster.configure('[slurm]\ngpu_bytes = 1000\n[slurm.profiles.lost]\npartition = "nowhere"\n')
    found = list(choice.findings(cluster.layout, config.load(cluster.layout)))
    assert [status for _, status, *_ in found] == ["ok", "error", "ok"], found
    assert "[slurm.profiles.lost] would not start" in found[1][2]
    assert "nvalid partition" in found[1][2]
    assert found[2][2].endswith("on node1, node2")


def test_a_job_is_held_and_goes_on_and_one_that_is_cancelled_ends(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("slow-4000", name="slow-4000")
    begun(cluster, "slow-4000")
    where = wait_for(lambda: cluster.show("slow-4000")["slurm"]["nodes"], what="its node")
    assert where in {"node1", "node2"}
    assert cluster.honectl("hold", "slow-4000").returncode == 0
    held = cluster.wait_state("slow-4000", State.HELD)
    assert held.outcome == "interrupted"
    cluster.honectl("release", "slow-4000")
    wait_for(lambda: len(cluster.starts(held)) == 2, what="the second start")
    cluster.honectl("cancel", "slow-4000")
    cluster.wait_state("slow-4000", State.CANCELLED)


def test_a_killed_honed_takes_its_worker_over(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("slow-60", name="slow-60")
    begun(cluster, "slow-60")
    cluster.kill(signal.SIGKILL)
    cluster.start()
    job = cluster.wait_state("slow-60", State.SUCCEEDED, State.FAILED)
    assert job.state is State.SUCCEEDED
    assert len(cluster.starts(job)) == 1


def test_a_controller_that_dies_stops_neither_the_job_nor_the_loop(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("slow-100", name="slow-100")
    begun(cluster, "slow-100")
    cluster.cluster.kill("slurmctld")
    try:
        job = cluster.wait_state("slow-100", State.SUCCEEDED, State.FAILED)
        assert job.state is State.SUCCEEDED
        cluster.drop("succeed", name="succeed")
        cluster.wait_state("succeed", State.RUNNING)
        assert cluster.honectl("list").returncode == 0
    finally:
        cluster.cluster.start("slurmctld")
    later = cluster.wait_state("succeed", State.SUCCEEDED, State.FAILED)
    assert later.state is State.SUCCEEDED
    assert len(cluster.starts(later)) == 1


def test_a_submission_that_is_told_too_late_is_made_once(cluster: ClusterInstance, tmp_path: Path) -> None:
    broken_dir = tmp_path / "bin"
    broken_dir.mkdir()
    sbatch = broken_dir / "sbatch"
    sbatch.write_text('#!/bin/sh\n/usr/bin/sbatch "$@" >/dev/null\necho "Socket timed out" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    cluster.environment["PATH"] = f"{broken_dir}:{cluster.environment['PATH']}"
    cluster.start()
    cluster.drop("succeed", name="succeed")
    job = cluster.wait_state("succeed", State.SUCCEEDED, State.FAILED)
    assert job.state is State.SUCCEEDED
    assert len(submissions(cluster, "succeed")) == 1


def test_a_honed_that_is_killed_while_it_submits_submits_once(cluster: ClusterInstance, tmp_path: Path) -> None:
    slow_dir = tmp_path / "bin"
    slow_dir.mkdir()
    sbatch = slow_dir / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ntouch {tmp_path}/submitting\nsleep 3\nexec /usr/bin/sbatch "$@"\n')
    sbatch.chmod(0o755)
    cluster.environment["PATH"] = f"{slow_dir}:{cluster.environment['PATH']}"
    cluster.start()
    cluster.drop("slow-60", name="slow-60")
    wait_for((tmp_path / "submitting").exists, what="sbatch")
    cluster.kill(signal.SIGKILL)
    cluster.start()
    job = cluster.wait_state("slow-60", State.SUCCEEDED, State.FAILED)
    assert job.state is State.SUCCEEDED
    assert len(cluster.starts(job)) == 1


def test_a_job_whose_node_is_lost_runs_on_another(cluster: ClusterInstance) -> None:
    cluster.start()
    cluster.drop("slow-4000", name="slow-4000")
    begun(cluster, "slow-4000")
    node = wait_for(lambda: cluster.show("slow-4000").get("slurm", {}).get("nodes"), what="its node")
    cluster.cluster.kill(f"slurmd-{node}")
    job = cluster.job("slow-4000")
    assert job is not None
    wait_for(lambda: len(cluster.starts(job)) == 2, what="the second start")
    now = cluster.job("slow-4000")
    assert now is not None
    assert now.state is State.RUNNING
    assert now.attempts[0].outcome == "killed"
    cluster.honectl("cancel", "slow-4000")
    cluster.wait_state("slow-4000", State.CANCELLED)
