"""Several ranks on one machine: the run of one process, by two that share its batch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import warm
from honed.run import shim
from honed.system.error import EnvironmentInvalidError
from honed.worker import parallel
from waiting import wait_for
from worker.conftest import WORKER_TIMEOUT_SEC, Ended, MakeJob, WorkerJob, read_events
from worker.test_media_training import colored_rows
from zoo.vision import build_vision_checkpoint

#: Seconds in which all ranks have to end after one has failed: they would wait for each other for hours.
END_SEC = 300.0
OFF = {"sample_frequency": "off"}


class Run:
    """One attempt of a job by several ranks behind a shim."""

    def __init__(self, job: WorkerJob, attempt: int = 1, *, num_ranks: int = 2, **environment: str) -> None:
        self.job, self.attempt = job, attempt
        self.dir = job.dir / f"attempts/{attempt}"
        self.dir.mkdir(parents=True, exist_ok=True)
        with (self.dir / "worker.log").open("ab") as log:
            self.process = warm.RankPopen(
                [
                    sys.executable,
                    *("-I", "-S", str(shim.__file__), str(self.dir), "1"),
                    *(sys.executable, "-m", "honed.worker", str(job.dir), str(attempt)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=job.dir,
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": "",
                    "HONED_NUM_RANKS": str(num_ranks),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    **environment,
                },
                start_new_session=True,
            )

    @property
    def pids(self) -> list[int]:
        return list(json.loads((self.dir / "lock").read_text())["worker_pids"])

    @property
    def exit(self) -> dict[str, Any]:
        return dict(json.loads((self.dir / "exit.json").read_text()))

    @property
    def took_sec(self) -> float:
        """Seconds from the first error to the end of all ranks."""
        return float(self.exit["ended_at"] - (self.dir / "ranks/error.json").stat().st_mtime)

    @property
    def log(self) -> str:
        return (self.dir / "worker.log").read_text(errors="replace")

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        def look() -> bool:
            is_over = self.process.poll() is not None
            found = is_there()
            assert found or not is_over, self.log[-3000:]
            return found

        wait_for(look, WORKER_TIMEOUT_SEC, what="what the ranks do", account=lambda: self.log[-3000:])

    def wait_for_step(self, step: int) -> None:
        path = self.job.events_path(self.attempt)
        self.wait_for(
            lambda: path.exists() and any(e.kind == "step" and e.data["step"] >= step for e in read_events(path))
        )

    def end(self, timeout_sec: float = WORKER_TIMEOUT_SEC) -> Ended:
        try:
            self.process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            for pid in [*self.pids, self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still there: {self.log[-3000:]}")
        result_path = self.dir / "result.json"
        result = json.loads(result_path.read_text()) if result_path.exists() else {}
        assert not [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]
        status = self.exit["status"]
        return Ended(-1 if status is None else status, result, read_events(self.job.events_path(self.attempt)))


def over_two(job: WorkerJob, *, effective: int = 4, mode: str = "ddp") -> WorkerJob:
    """Divide a job of one process between two ranks."""
    job.change_plan(
        parallel={
            "mode": mode,
            "num_ranks": 2,
            "ranks_per_node": 2,
            "num_nodes": 1,
            "per_device_train_batch_size": effective // 2,
            "gradient_accumulation_steps": 1,
            "effective_batch": effective,
            "reasons": {},
        }
    )
    return job


def rows(number: int) -> list[dict[str, Any]]:
    """Return rows of different lengths, all different, so that a split is exact."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} and {' and '.join(map(str, range(n % 5)))}?"},
                {"role": "assistant", "content": " ".join(["It is", str(n), *map(str, range(n % 7))])},
            ]
        }
        for n in range(number)
    ]


KEYS: dict[str, Any] = {
    "rows": rows(24),
    "dtype": "float32",
    "lora": {"r": 4},
    "training": {"max_steps": 6, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 2},
    "predictions": {"sample_frequency": "off"},
}


def with_keys(**keys: Any) -> dict[str, Any]:
    return {**KEYS, **keys, "training": {**KEYS["training"], **keys.get("training", {})}}


BF16 = {"dtype": "bfloat16"}


# By default each kind of weights and each dtype once.
@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        pytest.param({"dtype": "float32"}, 5e-7, id="lora-fp32"),
        pytest.param(BF16, 3e-4, id="lora-bf16", marks=pytest.mark.exhaustive),
        pytest.param({"lora": None, "training": {"learning_rate": 2e-4}}, 5e-7, id="full-fp32"),
        pytest.param({"quantization": "4bit"}, 3e-4, id="4bit-fp32", marks=pytest.mark.exhaustive),
        pytest.param({"quantization": "4bit", **BF16}, 3e-4, id="4bit-bf16"),
    ],
)
def test_two_ranks_train_what_one_process_does(make_job: MakeJob, keys: dict[str, Any], tolerance: float) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}
    asked = with_keys(
        **{
            "eval_split": 1 / 3,
            "predictions": {"num_samples": 2, "max_new_tokens": 8},
            **keys,
            "training": {**evaluation, **keys.get("training", {})},
        }
    )
    if asked["lora"] is None:
        del asked["lora"]
    one = make_job(**asked).run()
    assert one.status == 0
    two = Run(over_two(make_job(**asked)))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    assert ended.losses == pytest.approx(one.losses, abs=tolerance)
    for before, now in zip(one.of("evaluation"), ended.of("evaluation"), strict=True):
        for name in ("eval_loss", "eval_mean_token_accuracy"):
            assert now["metrics"][name] == pytest.approx(before["metrics"][name], abs=10 * tolerance), name
    assert ended.metrics["num_trained_tokens"] == one.metrics["num_trained_tokens"]
    assert [each["prediction"] for each in ended.of("predictions")[0]["rows"]] == [
        each["prediction"] for each in one.of("predictions")[0]["rows"]
    ]
    assert [each["step"] for each in ended.of("checkpoint")] == [2, 4, 6]
    assert [each["when"] for each in ended.of("audit")] == [each["when"] for each in one.of("audit")]
    assert {path.name for path in two.job.output_dir.iterdir()} >= {"README.md"}
    assert two.exit["rank"] == 0


DROPOUT = with_keys(lora={"r": 4, "lora_dropout": 0.2}, training={"logging_steps": 1})


@dataclass(frozen=True)
class Undisturbed:
    """What came of a run of two ranks with dropout to which nothing happened."""

    losses: dict[int, float]
    weights: bytes


@pytest.fixture(scope="module")
def once() -> dict[str, Undisturbed]:
    """What was made for the first test that needs it."""
    return {}


@pytest.fixture
def undisturbed(make_job: MakeJob, once: dict[str, Undisturbed]) -> Undisturbed:
    if not once:
        whole = Run(over_two(make_job(**DROPOUT)))
        ended = whole.end()
        assert ended.status == 0, whole.log[-3000:]
        once["run"] = Undisturbed(ended.losses, weights_of(whole))
    return once["run"]


def weights_of(run: Run) -> bytes:
    return (run.job.output_dir / "adapter_model.safetensors").read_bytes()


#: The rank is asked to stop in its third step.
STOP = """
import os
from honed.worker.train.trainer import WatchedTrainer
step = WatchedTrainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step == 2:
        os.kill(os.getpid(), 15)
    return step(self, *args, **kwargs)
WatchedTrainer.training_step = training_step
"""


def test_a_run_that_is_stopped_on_one_rank_ends_on_all_and_resumes_to_the_same_bits(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = over_two(make_job(**DROPOUT))
    first = Run(job, HONED_TEST_RANK_1=STOP)
    ended = first.end(END_SEC)
    assert (ended.status, ended.result["outcome"]) == (75, "interrupted"), first.log[-3000:]
    assert ended.result["step"] == 3
    second = Run(job, 2)
    again = second.end()
    assert again.status == 0, second.log[-3000:]
    assert {**ended.losses, **again.losses} == undisturbed.losses
    assert weights_of(second) == undisturbed.weights


def test_a_checkpoint_of_two_ranks_is_continued_by_one_process_which_says_what_differs(make_job: MakeJob) -> None:
    job = over_two(make_job(**KEYS))
    first = Run(job, HONED_TEST_RANK_0=STOP)
    assert first.end(END_SEC).result["outcome"] == "interrupted", first.log[-3000:]
    job.change_plan(parallel={"mode": "none"})
    ended = job.run(2)
    assert ended.status == 0
    assert any("is of 2 processes" in text for text in ended.messages("warning"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_attempt_as_killed(make_job: MakeJob, rank: int) -> None:
    run = Run(over_two(make_job(**with_keys(training={"max_steps": 2000}))))
    run.wait_for_step(3)
    os.kill(run.pids[rank], signal.SIGKILL)
    ended = run.end(END_SEC)
    assert (run.exit["rank"], run.exit["signal"], ended.result) == (rank, signal.SIGKILL, {}), run.log[-3000:]


MASK = """
from honed.worker.rows import mask
from honed.system.error import MaskError
def check(*args, **kwargs):
    raise MaskError("a batch of the second rank is wrong")
mask.check = check
"""
NAN = """
from honed.worker.train.trainer import WatchedTrainer
compute = WatchedTrainer.compute_loss
def compute_loss(self, *args, **kwargs):
    loss = compute(self, *args, **kwargs)
    return loss * float("nan") if self.state.global_step >= 3 else loss
WatchedTrainer.compute_loss = compute_loss
"""
MEMORY = """
from honed.worker.train.trainer import WatchedTrainer
step = WatchedTrainer.training_step
def training_step(self, model, inputs, *args, **kwargs):
    if self.state.global_step >= 3:
        raise MemoryError("the second rank's")
    return step(self, model, inputs, *args, **kwargs)
WatchedTrainer.training_step = training_step
"""


FULL = """
import errno
from honed.worker.train import checkpoint, disk_reserve
seal = checkpoint.seal
def sealed(path, *args, **kwargs):
    if path.name != "checkpoint-2":
        raise OSError(errno.ENOSPC, "No space left on device")
    seal(path, *args, **kwargs)
checkpoint.seal = sealed
"""


@pytest.mark.parametrize(
    ("code", "words", "status", "broken"),
    [
        pytest.param("mask_invalid", "a batch of the second rank is wrong", 81, MASK, id="mask"),
        pytest.param("diverged", "the loss is nan", 84, NAN, id="nan"),
        pytest.param("out_of_memory", "the second rank's", 83, MEMORY, id="memory"),
    ],
)
def test_an_error_of_the_second_rank_is_the_errors_of_the_run(
    make_job: MakeJob, code: str, words: str, status: int, broken: str
) -> None:
    job = over_two(make_job(**with_keys(training={"max_steps": 200})))
    run = Run(job, HONED_TEST_RANK_1=broken)
    ended = run.end()
    assert (ended.status, ended.result["error"]["code"]) == (status, code), run.log[-3000:]
    assert words in ended.result["error"]["message"]
    assert run.took_sec < END_SEC


def test_a_rank_that_never_hears_of_the_others_error_is_ended_with_it(make_job: MakeJob) -> None:
    """NCCL, unlike gloo, waits for a rank that is gone."""
    stuck = "import time\nfrom honed.worker.rows import mask\nmask.check = lambda *_: time.sleep(900)"
    run = Run(over_two(make_job(**KEYS)), HONED_TEST_RANK_0=stuck, HONED_TEST_RANK_1=MASK)
    ended = run.end(END_SEC)
    assert (ended.status, ended.result["error"]["code"], ended.result["phase"]) == (81, "mask_invalid", "mask")
    assert ended.events[-1].kind == "finished"
    assert run.took_sec < END_SEC


def test_a_full_disk_ends_all_ranks_and_the_last_checkpoint_is_continued(
    make_job: MakeJob, undisturbed: Undisturbed
) -> None:
    job = over_two(make_job(**DROPOUT))
    first = Run(job, HONED_TEST_RANK_0=FULL)
    ended = first.end()
    assert (ended.status, ended.result["error"]["code"]) == (73, "disk_insufficient"), first.log[-3000:]
    assert first.took_sec < END_SEC
    second = Run(job, 2)
    again = second.end()
    assert (again.status, [each["step"] for each in again.of("resumed")]) == (0, [2])
    assert weights_of(second) == undisturbed.weights


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_the_first_step_ends_the_attempt(make_job: MakeJob, rank: int) -> None:
    """Of a rank that waits for another in a Python call."""
    code = f"import os\nfrom honed.worker.rows import data\ndata.check_ids = lambda *_: os.kill(os.getpid(), {9})"
    run = Run(over_two(make_job(**KEYS)), **{f"HONED_TEST_RANK_{rank}": code})
    ended = run.end(END_SEC)
    assert (run.exit["rank"], run.exit["signal"], ended.result) == (rank, signal.SIGKILL, {}), run.log[-3000:]


def assert_the_same_course(one: Ended, run: Run, ended: Ended) -> None:
    """Check that ranks do at each step what one process does, and end with its loss."""
    assert (one.status, ended.status) == (0, 0), run.log[-3000:]
    for kind in ("evaluation", "predictions", "guard"):
        assert [each["step"] for each in ended.of(kind)] == [each["step"] for each in one.of(kind)]
    assert ended.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], abs=1e-3)
    assert ended.result["step"] == one.result["step"]


def test_evaluations_a_guard_and_the_best_model_are_those_of_one_process(make_job: MakeJob) -> None:
    """What ranks do together: rounds of predictions, the guard, the best checkpoint, epochs, an interval."""
    asked = with_keys(
        eval_split=1 / 3,
        early_stopping_patience=5,
        save_interval_sec=0.01,
        guard={"metric": "exact_match", "num_samples": 3, "max_drop": 1.0, "patience": 3},
        predictions={"num_samples": 2, "max_new_tokens": 4, "sample_frequency": "eval"},
        training={
            "max_steps": -1,
            "num_train_epochs": 2,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_steps": None,
            "learning_rate": 3e-2,
            "logging_steps": 3,
        },
    )
    asked["training"] = {name: value for name, value in asked["training"].items() if value is not None}
    one = make_job(**asked).run()
    run = Run(over_two(make_job(**asked)))
    ended = run.end()
    assert_the_same_course(one, run, ended)


def test_a_time_limit_and_a_stop_of_all_ranks_leave_a_checkpoint(make_job: MakeJob) -> None:
    job = over_two(make_job(**with_keys(time_limit_sec=1.0, training={"max_steps": 5000})))
    first = Run(job)
    ended = first.end()
    assert (ended.status, ended.result["error"]["code"]) == (88, "time_limit"), first.log[-3000:]
    assert ended.of("checkpoint")[-1]["step"] == ended.result["step"]
    job.change_plan(spec={**job.plan["spec"], "time_limit_sec": None})
    second = Run(job, 2)
    second.wait_for_step(ended.result["step"] + 2)
    for pid in second.pids:
        os.kill(pid, signal.SIGTERM)
    again = second.end(END_SEC)
    assert (again.status, again.result["outcome"]) == (75, "interrupted"), second.log[-3000:]
    assert again.of("checkpoint")[-1]["step"] == again.result["step"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_inside_a_save_costs_the_steps_since_the_last_checkpoint(
    make_job: MakeJob, rank: int, undisturbed: Undisturbed
) -> None:
    job = over_two(make_job(**DROPOUT))
    first = Run(job, **{f"HONED_TEST_RANK_{rank}": KILL_IN_SAVE})
    assert first.end(END_SEC).result == {}, first.log[-3000:]
    assert (first.exit["rank"], first.exit["signal"]) == (rank, signal.SIGKILL)
    second = Run(job, 2)
    again = second.end()
    assert (again.status, [each["step"] for each in again.of("resumed")]) == (0, [2]), second.log[-3000:]
    assert weights_of(second) == undisturbed.weights


#: Rank 0 may be sealing the checkpoint before this one when rank 1 comes here.
KILL_IN_SAVE = """
import os, sys, time
from honed.worker.train.trainer import Trainer
from honed.worker.train import checkpoint
gather, seal = Trainer.gather_states, checkpoint.seal
def gather_states(self):
    if self.state.global_step == 4 and not self._ranks.is_zero:
        while not os.path.exists(os.path.join(sys.argv[1], "checkpoints", "checkpoint-2")):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    gather(self)
def sealed(path, *args, **kwargs):
    if path.name == "checkpoint-4":
        os.kill(os.getpid(), 9)
    seal(path, *args, **kwargs)
Trainer.gather_states, checkpoint.seal = gather_states, sealed
"""


def test_pictures_are_trained_on_as_by_one_process(make_job: MakeJob, tmp_path: Path) -> None:
    """Some rows have none: such a rank's batch gives the encoder no gradient."""
    pictures = colored_rows(tmp_path / "images", 10)
    mixed = [*pictures, *rows(6)]
    asked = with_keys(
        model=build_vision_checkpoint(tmp_path / "base", "qwen2_5_vl"),
        rows=mixed,
        eval_split=0.25,
        lora={"r": 4, "finetune_vision_layers": True, "finetune_projector": True},
        predictions={"num_samples": 2, "max_new_tokens": 4},
        training={"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2},
    )
    one = make_job(**asked).run()
    assert one.status == 0, one.result
    two = Run(over_two(make_job(**asked)))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    assert ended.losses == pytest.approx(one.losses, abs=1e-6)
    assert ended.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], abs=5e-6)
    assert ended.metrics["num_trained_tokens"] == one.metrics["num_trained_tokens"]
    assert ended.of("example") == one.of("example")
    assert [each["prediction"] for each in ended.of("predictions")[0]["rows"]] == [
        each["prediction"] for each in one.of("predictions")[0]["rows"]
    ]


def test_an_evaluation_has_the_figures_of_one_process_also_by_data_set(make_job: MakeJob, tmp_path: Path) -> None:
    sets = []
    for name, number in (("first", 7), ("second", 4)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(number)))
        sets.append({"path": str(path)})
    asked: dict[str, Any] = {
        "kind": "evaluate",
        "datasets": [],
        "eval_datasets": sets,
        "dtype": "float32",
        "predictions": {"num_samples": 3, "max_new_tokens": 4},
        "training": {
            "max_steps": -1,
            "per_device_train_batch_size": 8,
            "learning_rate": 2e-5,
            "per_device_eval_batch_size": 3,
        },
    }
    one = make_job(**asked).run()
    assert one.status == 0, one.result
    two = Run(over_two(make_job(**asked)))
    ended = two.end()
    assert ended.status == 0, two.log[-4000:]
    assert {"eval_loss/first", "eval_loss/second"} <= set(one.metrics)
    assert ended.metrics == pytest.approx(one.metrics, abs=1e-9)
    assert ended.of("predictions") == one.of("predictions")
    short = Run(over_two(make_job(**asked, time_limit_sec=0.001)))
    late = short.end()
    assert (late.status, late.result["error"]["code"]) == (88, "time_limit"), short.log[-3000:]
    assert "of 3 predictions" in late.result["error"]["message"]


#: A trial begins with its imports done.
WARM = "import subprocess, warm; subprocess.Popen = warm.warm_popen"


def test_a_trial_runs_on_the_first_device_and_its_job_on_both(make_job: MakeJob) -> None:
    job = over_two(make_job(**with_keys(trial=True, training={"max_steps": 2, "num_train_epochs": 1})))
    warm.address("worker")
    run = Run(job, CUDA_VISIBLE_DEVICES="first,second", HONED_TEST_RANK_0=WARM)
    ended = run.end()
    assert ended.status == 0, run.log[-4000:]
    [found] = ended.of("trial")
    assert found["verdict"] in ("learns", "learns_slowly", "does_not_learn")
    assert [each["step"] for each in ended.of("step")] == [1, 2]
    tried = read_events(job.dir / "trial/attempts/1/events.jsonl")
    assert [each.data["pid"] for each in tried if each.kind == "started"] != run.pids[:1]
    alone = Run(over_two(make_job(**with_keys(trial="only"))), HONED_TEST_RANK_0=WARM)
    assert alone.end().status == 0, alone.log[-4000:]
    assert not alone.job.output_dir.exists()


PEER = """
import json, os, pathlib, sys
import torch
from torch import distributed
from honed.worker.parallel import Ranks

rank, shared = int(sys.argv[1]), pathlib.Path(sys.argv[2])
ranks = Ranks(rank, 2, rank, shared)
ranks.join()


class Bad:
    def __reduce__(self):
        return os.mkdir, (str(shared / "ran"),)


def told(call):
    try:
        return call()
    except Exception as error:
        return f"{error.code}: {error.message}"


told_all = [told(lambda: ranks.gather({"a": (1, None)})), told(lambda: ranks.broadcast("b" if rank == 0 else None))]
if rank == 0:
    told(lambda: distributed.all_gather_object([None, None], Bad()))
    told(lambda: distributed.broadcast_object_list([Bad()], src=0))
    told(lambda: distributed.broadcast_object_list([Bad()], src=0))
    told(lambda: distributed.broadcast_object_list([Bad()], src=0))
    distributed.broadcast(torch.tensor([1 << 50]), src=0)
    ranks.barrier()
else:
    told_all += [
        told(lambda: ranks.gather("x")),
        told(lambda: ranks.broadcast(None)),
        told(lambda: ranks.by_zero(lambda: 1)),
        told(lambda: distributed.broadcast_object_list([None], src=0)),
        told(lambda: ranks.broadcast(None)),
    ]
    ranks.barrier()
(shared / f"told.{rank}").write_text(json.dumps(told_all))
os._exit(0)  # as a worker does: gloo's threads may abort a process that ends while the other is gone
"""


def test_a_rank_reads_what_others_send_as_data_and_refuses_a_pickle(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(rank), str(tmp_path)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in (0, 1)
    ]
    assert [each.wait(WORKER_TIMEOUT_SEC) for each in ranks] == [0, 0]
    same, text, *refused = json.loads((tmp_path / "told.1").read_text())
    assert (same, text) == ([{"a": [1, None]}] * 2, "b")
    foreign = "environment_invalid: rank 0 sent a message that is none of honed's: "
    assert [each.startswith(foreign) for each in refused] == [True, True, True, False, True]
    assert "unpickle" in refused[3]
    assert str(1 << 50) in refused[4]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_rank_that_is_killed_while_they_meet_is_not_taken_for_a_network_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The others' connections break a moment before the shim notes it."""

    def meet(*_: object, **__: object) -> None:
        if is_killed:
            threading.Timer(0.3, (tmp_path / "lost.json").write_text, ['{"rank": 1, "signal": 9}']).start()
        raise RuntimeError("gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

    inside = distributed.distributed_c10d
    monkeypatch.setattr(inside, "_tensor_to_object", vars(inside)["_tensor_to_object"])  # so that it is put back
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(distributed, "init_process_group", meet)
    monkeypatch.setattr(parallel, "REASON_SEC", 60.0 if is_killed else 0.5)
    with pytest.raises(RuntimeError if is_killed else EnvironmentInvalidError):
        parallel.Ranks(0, 2, 0, tmp_path).join()
