"""A job that is preempted again and again, at random steps, has the losses and the weights of one that never was."""

from __future__ import annotations

import random

import pytest
from harness import RealInstance

from honed.job import query
from honed.job.job import State
from waiting import wait_for
from zoo.model import build_checkpoint, write_facts

#: Steps of the job for each preemption: far more than pass between two of them.
STEPS_EACH = 12
#: Seconds for all of a job's steps, for each preemption; far more than they take.
SEC_EACH = 60.0


@pytest.mark.timeout(7200)
def test_preemptions_at_random_steps_change_no_loss_and_no_weight(
    real: RealInstance, request: pytest.FixtureRequest
) -> None:
    num = int(request.config.getoption("--preemptions"))
    drawn = random.Random(7)
    keys = {
        "base_model": str(build_checkpoint(real.root / "llama", "llama")),
        "datasets": [{"path": str(write_facts(real.root / "facts.jsonl", 24))}],
        "lora": {"r": 4, "lora_dropout": 0.1},
        "training": {
            "max_steps": STEPS_EACH * num,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "eval_strategy": "no",
        },
    }
    real.configure("[jobs]\npoll_interval_sec = 0.05\n")
    real.start()
    whole_sec = SEC_EACH * max(num, 5)
    real.drop("calm", name="calm", **keys)
    assert real.wait_state("calm", State.SUCCEEDED, State.FAILED, deadline_sec=whole_sec).error is None
    real.client.ask("drain", id="all", now=True)
    real.drop("cut", name="cut", **keys)
    job, steps = real.wait_state("cut", State.QUEUED), []
    for number in range(num):
        real.client.ask("undrain", id="all")
        wanted = (steps[-1] if steps else 0) + drawn.randint(0, 5)
        wait_for(
            lambda number=number, wanted=wanted: (
                (found := real.job("cut")) is not None
                and len(found.attempts) > number
                and len(query.losses(real.spool, real.layout, "cut")) >= wanted
            ),
            what=f"step {wanted}",
        )
        real.client.ask("drain", id="all", now=True)
        job = real.wait_state("cut", State.QUEUED, State.SUCCEEDED, State.FAILED)
        assert job.state is State.QUEUED, f"it ended before preemption {number + 1}"
        steps.append(max((attempt.step for attempt in job.attempts), default=0))
    print(f"preempted at the steps {steps}")
    real.client.ask("undrain", id="all")
    job = real.wait_state("cut", State.SUCCEEDED, State.FAILED, deadline_sec=whole_sec)
    assert (job.error, job.num_failures, job.num_preemptions) == (None, 0, num)
    calm, cut = (query.losses(real.spool, real.layout, name) for name in ("calm", "cut"))
    assert [step for step, _ in calm] == list(range(1, STEPS_EACH * num + 1))
    assert cut == calm
    weights = [real.layout.job(id_).output_dir / "adapter_model.safetensors" for id_ in (1, 2)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
