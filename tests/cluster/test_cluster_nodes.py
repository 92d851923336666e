"""Jobs of several nodes and ranks on a Slurm cluster: all ranks begin and end together, and rank 0 alone tells."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from nodes import ClusterInstance

from honed.job.job import Job, State
from waiting import DEADLINE_SEC, wait_for
from zoo.model import build_checkpoint, write_facts

GPUS = "[slurm]\ngpu_bytes = 85899345920\n"


def ranks(cluster: ClusterInstance, name: str, number: int) -> list[dict[str, Any]]:
    """Return the last start of each rank, once there are so many."""
    job = cluster.job(name)
    if job is None:
        return []
    files = [cluster.layout.job(job.id).dir / f"rank-{rank}.txt" for rank in range(number)]
    return [json.loads(path.read_text().splitlines()[-1]) for path in files if path.exists() and path.stat().st_size]


def all_begun(cluster: ClusterInstance, name: str, number: int) -> list[dict[str, Any]]:
    return wait_for(
        lambda: found if len(found := ranks(cluster, name, number)) == number else None,
        what=f"{number} ranks",
    )


def begun(cluster: ClusterInstance, name: str) -> None:
    """Wait until rank 0 has taken its first step: before that, a stop leaves nothing."""
    wait_for(lambda: (cluster.show(name)["progress"]["step"] or 0) > 0, what=f"{name}'s first step")


def ended(cluster: ClusterInstance, name: str, state: State, deadline_sec: float = DEADLINE_SEC) -> Job:
    is_over = {State.SUCCEEDED, State.FAILED, State.HELD, State.CANCELLED}
    job = wait_for(
        lambda: (
            cluster.rejected().get(f"{name}.json")
            or (found if (found := cluster.job(name)) and found.state in is_over else None)
        ),
        what=name,
        deadline_sec=deadline_sec,
    )
    assert isinstance(job, Job), job
    assert job.state is state, (job, cluster.log[-3000:])
    return job


def test_a_job_of_two_nodes_has_a_rank_on_each_gpu(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("slow-30", name="slow-30", resources={"gpus": 2, "nodes": 2})
    job = ended(cluster, "slow-30", State.SUCCEEDED)
    found = ranks(cluster, "slow-30", 4)
    assert [each["SLURMD_NODENAME"] for each in found] == ["node1", "node1", "node2", "node2"]
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0", "1"]
    assert {each["WORLD_SIZE"] for each in found} == {"4"}
    assert {each["gpus"] for each in found} == {"0,1"}
    assert len(cluster.starts(job)) == 1
    told = cluster.honectl("show", "slow-30").stdout
    assert "Slurm job" in told
    assert "node[1-2]" in told


def test_a_job_of_two_gpus_of_one_node_needs_no_step(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("succeed", name="succeed", resources={"gpus": 2})
    ended(cluster, "succeed", State.SUCCEEDED)
    (one, two) = all_begun(cluster, "succeed", 2)
    assert one["SLURMD_NODENAME"] == two["SLURMD_NODENAME"]
    assert (one["gpus"], two["gpus"]) == ("0,1", "0,1")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_nodes_train_one_model(cluster: ClusterInstance, mode: str) -> None:
    """Real ranks, over gloo, which meet over the network."""
    cluster.environment |= {"HONED_TEST_REAL": "1", "OMP_NUM_THREADS": "1"}
    model = build_checkpoint(cluster.root / "tiny", "llama")
    data = write_facts(cluster.root / "facts.jsonl", 12)
    cluster.start()
    training = {"max_steps": 4, "per_device_train_batch_size": 2, "save_steps": 2, "gradient_checkpointing": False}
    cluster.drop(
        "train",
        name="train",
        base_model=str(model),
        datasets=[{"path": str(data)}],
        eval_split=0.25,
        dtype="float32",
        backend="transformers",
        training=training,
        predictions={"num_samples": 2, "max_new_tokens": 4},
        resources={"gpus": 0, "nodes": 2},
        parallel=mode,
    )
    job = ended(cluster, "train", State.SUCCEEDED, deadline_sec=400)
    assert len(job.attempts) == 1
    files = cluster.layout.job(job.id)
    assert json.loads((files.attempt(1).dir / "ranks/address.json").read_text())["port"]
    assert sorted(path.name for path in files.checkpoints_dir.glob("*/rng_state_*.pth"))[-1] == "rng_state_1.pth"
    assert len(list(files.checkpoints_dir.glob("checkpoint-4/part-*-of-2.pt"))) == (2 if mode == "fsdp" else 0)
    assert (Path(job.output_dir) / "adapter_model.safetensors").exists()
    steps = [event for event in cluster.show("train")["events"] if event["event"] == "stage"]
    assert len({event["stage"] for event in steps}) == len(steps), "one rank alone tells"


def test_a_rank_that_dies_ends_all_and_the_job_resumes(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("slow-60", name="slow-60.fall-1", resources={"nodes": 2})
    job = ended(cluster, "slow-60.fall-1", State.SUCCEEDED)
    assert [each.outcome for each in job.attempts] == ["killed", "succeeded"]
    first = cluster.layout.job(job.id).attempt(1)
    end = json.loads(first.exit_path.read_text())
    assert (end["rank"], end["signal"]) == (1, signal.SIGKILL)
    assert end["ended_at"] - (first.dir / "ranks/lost.json").stat().st_mtime < 60  # it would wait for a result for ever


def test_ranks_that_hang_leave_their_stacks_and_end(cluster: ClusterInstance) -> None:
    cluster.configure(f"{GPUS}[jobs]\nstall_timeout_sec = 4\nmin_stall_timeout_sec = 1\n")
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("hang", name="hang", resources={"nodes": 2}, retry={"max_attempts": 1})
    job = ended(cluster, "hang", State.FAILED)
    assert job.outcome == "stalled"
    assert "Fatal Python error: Aborted" in cluster.layout.job(job.id).attempt(1).log_path.read_text()
    wait_for(lambda: not cluster.cluster.run("squeue", "-h", "-t", "running,completing"), what="its end in Slurm")


def test_a_job_of_two_nodes_is_held_goes_on_and_is_cancelled(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("slow-4000", name="slow-4000", resources={"nodes": 2})
    all_begun(cluster, "slow-4000", 2)
    begun(cluster, "slow-4000")
    cluster.honectl("hold", "slow-4000")
    held = cluster.wait_state("slow-4000", State.HELD)
    assert held.outcome == "interrupted"
    assert held.attempt.step
    cluster.honectl("release", "slow-4000")
    wait_for(lambda: len(cluster.starts(held)) == 2, what="the second start")
    cluster.honectl("cancel", "slow-4000")
    cluster.wait_state("slow-4000", State.CANCELLED)


def test_a_lost_node_ends_all_ranks_and_the_job_waits_for_another(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("until-600", name="until-600", resources={"nodes": 2})
    began = all_begun(cluster, "until-600", 2)
    cluster.cluster.kill("slurmd-node2")
    wait_for(lambda: len(cluster.show("until-600")["attempts"]) == 2, what="the second attempt")
    wait_for(lambda: cluster.show("until-600").get("slurm", {}).get("reason"), what="why it waits")
    told = cluster.honectl("show", "until-600").stdout
    assert re.search(r"Slurm job \d+: pending, \w", told), told
    cluster.cluster.mend()
    cluster.go("until-600")
    job = ended(cluster, "until-600", State.SUCCEEDED)
    assert job.attempts[0].outcome in {"killed", "interrupted"}  # the rank that is left may write a checkpoint
    again = ranks(cluster, "until-600", 2)
    assert {each["attempt"] for each in again} == {2}
    assert {each["pid"] for each in again}.isdisjoint(each["pid"] for each in began)


def test_what_slurm_refuses_ends_with_its_words(cluster: ClusterInstance) -> None:
    cluster.configure(GPUS)
    cluster.pretend_cuda()
    cluster.start()
    cluster.drop("many", name="many", resources={"nodes": 3})
    why = wait_for(lambda: cluster.rejected().get("many.json"), what="the refusal")
    assert "Slurm refuses the job: allocation failure: Requested node configuration is not available" in why
    cluster.drop("succeed.hold", name="succeed")
    cluster.wait_state("succeed", State.HELD)
    cluster.configure(f'{GPUS}partition = "gone"\n')
    assert cluster.process is not None
    cluster.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "reloaded" in cluster.log, what="the new configuration")
    cluster.honectl("release", "succeed")
    job = ended(cluster, "succeed", State.FAILED)
    assert job.outcome == "cluster_refused"
    assert job.error is not None
    assert "nvalid partition" in job.error["message"]
    assert not cluster.starts(job)
