"""Jobs that start from other jobs' outputs: `job:NAME`, dropped in any order, through failures and restarts."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from harness import Instance

from honed.cli import draft
from honed.cli.instance import Instance as HonedInstance
from honed.job.job import Job, State
from waiting import wait_for
from zoo import plain


class Chain:
    """Stage 1, a merge, stage 2. The fake worker leaves the outputs of such jobs."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def drop(self, *order: str, stage1: str = "make.stage1") -> None:
        for each in order:
            match each:
                case "stage1":
                    self.instance.drop(stage1)
                case "merge":
                    keys = {"kind": "merge", "adapter": f"job:{stage1}", "dtype": "bfloat16"}
                    self.instance.drop("make.merge", **keys, lora=None, datasets=[])
                case "stage2":
                    self.instance.drop("make.stage2", base_model="job:make.merge")

    def job(self, name: str) -> Job:
        found = self.instance.job(name)
        assert found is not None
        return found

    def starts(self, *names: str) -> list[float]:
        return [self.job(name).attempts[0].started_at for name in names]


@pytest.fixture
def chain(instance: Instance) -> Chain:
    return Chain(instance)


@pytest.mark.parametrize("order", [("stage2", "merge", "stage1"), ("merge", "stage1", "stage2")])
def test_a_chain_dropped_together_in_any_order_runs_in_its_own(chain: Chain, order: tuple[str, ...]) -> None:
    instance = chain.instance
    instance.start()
    instance.client.ask("pause")
    chain.drop(*order)
    for name in ("make.stage1", "make.merge", "make.stage2"):
        instance.wait_state(name, State.QUEUED)
    first, merge, second = (chain.job(f"make.{name}") for name in ("stage1", "merge", "stage2"))
    assert (merge.depends_on, merge.is_deferred, merge.num_gpus) == ((str(first.id),), True, 0)
    assert (second.depends_on, second.is_deferred) == ((str(merge.id),), True)
    assert instance.show("make.stage2")["spec"]["base_model"] == "job:make.merge"
    instance.client.ask("resume")
    instance.wait_state("make.stage2", State.SUCCEEDED)
    times = chain.starts("make.stage1", "make.merge", "make.stage2")
    assert times == sorted(times)
    assert instance.show("make.merge")["plan"]["adapter_path"] == first.output_dir
    assert instance.show("make.stage2")["plan"]["base_model_path"] == merge.output_dir
    assert chain.job("make.stage2").inputs == {"make.merge": merge.id}


def test_what_a_failed_stage_was_to_make_holds_the_rest_until_it_is_made(chain: Chain) -> None:
    instance = chain.instance
    chain.drop("stage1", "merge", "stage2", stage1="explain.stage1")
    assert instance.drain() == 0, "what waits for a person is not waited for"
    held = chain.job("make.merge")
    assert held.error is not None
    assert "explain.stage1), which failed" in held.error["message"]
    assert (held.state, chain.job("make.stage2").state) == (State.HELD, State.QUEUED)
    assert chain.job("make.stage2").attempts == ()


def test_what_is_found_when_the_files_are_there_ends_the_job_with_its_code(chain: Chain) -> None:
    instance = chain.instance
    instance.start()
    chain.drop("merge", "stage1", stage1="succeed-1.stage1")  # leaves no file in output_dir
    failed = instance.wait_state("make.merge", State.FAILED)
    assert failed.error is not None
    assert (failed.error["code"], failed.attempts) == ("model_invalid", ())
    assert "adapter: no such directory" in failed.error["message"]
    plain.write_adapter(Path(chain.job("succeed-1.stage1").output_dir))
    instance.client.ask("requeue", id="make.merge")
    instance.wait_state("make.merge", State.SUCCEEDED)


def test_a_restart_in_between_loses_nothing(chain: Chain) -> None:
    instance = chain.instance
    chain.drop("stage2", "merge", "stage1", stage1="make-40.stage1")
    instance.start()
    instance.wait_state("make-40.stage1", State.RUNNING)
    instance.wait_state("make.stage2", State.QUEUED)
    instance.kill(signal.SIGKILL)
    instance.start()
    instance.wait_state("make.stage2", State.SUCCEEDED)
    times = chain.starts("make-40.stage1", "make.merge", "make.stage2")
    assert times == sorted(times)


def test_a_restart_while_arrivals_wait_for_each_other_checks_them_again(chain: Chain) -> None:
    instance = chain.instance
    instance.start()
    chain.drop("stage2", "merge")
    wait_for(lambda: len(list((instance.layout.spool_dir / "claimed").iterdir())) == 2, what="both claimed")
    instance.kill(signal.SIGKILL)
    chain.drop("stage1")
    instance.start()
    instance.wait_state("make.stage2", State.SUCCEEDED)
    assert instance.rejected() == {}


def test_a_name_that_nobody_has_or_that_makes_something_else_is_refused(chain: Chain) -> None:
    instance = chain.instance
    instance.start()
    instance.client.ask("pause")
    instance.drop("make.lora")
    instance.drop("make.full", lora=None)
    instance.drop("a", base_model="job:nobody")
    instance.drop("b", base_model="job:make.lora")
    instance.drop("c", lora=None, adapter="job:make.full")
    instance.drop("d", base_model="job:e")
    instance.drop("e", base_model="job:d")
    instance.drop("f", base_model="job:make.full")
    wait_for(lambda: len(instance.rejected()) == 5, what="five refusals")
    said = instance.rejected()
    assert "there is no job 'nobody'" in said["a.json"]
    assert "produces an adapter, not a base model" in said["b.json"]
    assert "produces a complete checkpoint, not an adapter" in said["c.json"]
    assert "'e' and this job wait for each other" in said["d.json"]
    assert "e.json" in said
    instance.wait_state("f", State.QUEUED)


def test_a_name_means_the_newest_job_of_that_name_dropped_beside_it(chain: Chain) -> None:
    instance = chain.instance
    instance.drop("make.base", lora=None)
    assert instance.drain() == 0
    old = chain.job("make.base")
    instance.drop("next", base_model="job:make.base")
    instance.drop("make.base", lora=None)
    instance.start()
    instance.client.ask("pause")
    job = wait_for(lambda: instance.job("next"), what="the job that names it")
    assert job.inputs == {"make.base": chain.job("make.base").id}
    assert chain.job("make.base").id > old.id


def test_a_merge_of_what_is_there_is_planned_at_once(chain: Chain) -> None:
    instance = chain.instance
    instance.drop("make.first")
    assert instance.drain() == 0
    first = chain.job("make.first")
    keys = {"kind": "merge", "lora": None, "datasets": []}
    instance.drop("make.path", adapter=first.output_dir, **keys)
    instance.drop("make.name", adapter="job:make.first", **keys)
    assert instance.drain() == 0
    for name in ("make.path", "make.name"):
        plan = instance.show(name)["plan"]
        assert (plan["precision"]["load_dtype"], plan["adapter_path"]) == ("float32", first.output_dir)
        assert chain.job(name).state is State.SUCCEEDED


def test_honectl_plans_against_what_has_succeeded_and_says_what_waits(chain: Chain) -> None:
    instance = chain.instance
    path = instance.root / "next.json"
    path.write_text(json.dumps(plain.spec(instance.model, instance.dataset, base_model="job:make.base")))
    waiting = draft.check_one(HonedInstance(instance.layout), path)
    assert (waiting.plan, waiting.waits_for) == (None, {"base_model": "make.base"})
    instance.drop("make.base", lora=None)
    assert instance.drain() == 0
    planned = draft.check_one(HonedInstance(instance.layout), path)
    assert str(planned.plan.model.path) == chain.job("make.base").output_dir
