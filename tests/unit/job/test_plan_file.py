"""plan.json: written as ever, and read whoever wrote it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.job.job import Adjustment
from honed.job.plan_file import Backend, DatasetPlace, Grant, Loss, PlanFile
from honed.system.error import said
from honed.system.personpath import PersonPath

PLANS = Path(__file__).parents[2] / "data" / "plans"


def recorded(name: str) -> PlanFile:
    return PlanFile.read(PersonPath.own(PLANS / f"{name}.plan.json"))


@pytest.mark.parametrize("name", ["adapter", "whole", "deferred", "older"])
def test_a_plan_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    path = PLANS / f"{name}.plan.json"
    recorded(name).write(PersonPath.own(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["adapter", "whole"])
def test_what_is_read_of_a_plan_has_its_type_and_is_written_the_same(name: str) -> None:
    plan = recorded(name)
    document = plan.document
    assert plan.is_decided
    for key in ("precision", "device", "may_read"):
        assert json.loads(json.dumps(getattr(plan, key).as_dict())) == document[key], key
    for key in ("backend", "loss"):
        assert json.loads(json.dumps(asdict(getattr(plan, key)))) == document[key], key
    assert plan.memory is not None
    known = {name: value for name, value in plan.memory.as_dict().items() if name in document["memory"]}
    assert json.dumps(known) == json.dumps(document["memory"])
    assert (plan.memory.exchange_bytes, plan.memory.num_ranks) == (0, 1), "a plan for one device"
    assert json.dumps(plan.precision.as_dict()) == json.dumps(document["precision"])
    checkpoint = plan.checkpoint.as_dict()
    assert "earlier version" in str(checkpoint.pop("trained_unsure")), (
        "its number of trained parameters is not relied on"
    )
    assert json.dumps(checkpoint) == json.dumps(document["checkpoint"])
    assert plan.base_model_path == Path("/tmp/recorded/model")
    assert plan.output_dir == Path(document["output_dir"])
    assert plan.job.owner == (document["job"]["id"], "/var/lib/honed")
    assert plan.date is not None
    assert plan.date.isoformat() == document["date"]
    assert plan.splits_by_meaning
    assert not plan.is_trial


def test_a_deferred_plan_has_no_decisions() -> None:
    plan = recorded("deferred")
    assert not plan.is_decided
    assert (plan.memory, plan.device, plan.may_read, plan.adapter_path) == (None, None, None, None)
    assert plan.warnings[0].startswith("adapter: job:first: ")
    with pytest.raises(KeyError):
        _ = plan.backend


def test_a_plan_of_an_older_version_has_defaults() -> None:
    plan = recorded("older")
    assert plan.backend == Backend("transformers")
    assert plan.precision.master_weights is None
    assert plan.memory is not None
    assert (plan.memory.total_bytes, plan.memory.media, plan.memory.num_frames) == (15, (), 0)
    assert plan.loss is None
    assert plan.checkpoint.quantization_method is None
    assert not plan.checkpoint.is_pickled
    assert (plan.date, plan.base_model_commit, plan.hub_datasets, plan.may_read) == (None, None, {}, None)
    assert not plan.splits_by_meaning
    assert plan.job.owner == (7, "")


def test_an_attempts_plan_keeps_every_other_key() -> None:
    plan = recorded("older")
    change = Adjustment(1, "smaller", {"training.per_device_train_batch_size": 1})
    made = plan.adjusted({"kind": "sft"}, [change])
    assert list(made.document) == [*plan.document, "adjustments"]
    assert made.document["colour"] == plan.document["colour"] == "blue"
    assert made.document["adjustments"][0]["text"] == "smaller"
    assert (made.spec, plan.spec["kind"]) == ({"kind": "sft"}, "merge")


def test_places_and_grants_survive_the_file() -> None:
    place = DatasetPlace("c0ffee", Path("/cache/snapshot"), ("a.jsonl", "b.jsonl"))
    grant = Grant((Path("/var/lib/honed"),), None, (Path("/data/rows.jsonl"),))
    made = PlanFile.checked(
        {},
        warnings=["a warning"],
        adapter_path=Path("/a"),
        base_model_commit="beef",
        hub_datasets={"datasets.0": place.as_dict("org/rows")},
        may_read=grant,
    )
    read = PlanFile.from_json(made.to_json())
    assert read.hub_datasets == {"datasets.0": place}
    assert read.may_read == grant
    assert (read.adapter_path, read.base_model_commit, read.warnings) == (Path("/a"), "beef", ("a warning",))


def test_a_loss_left_to_the_backend_is_not_one_that_was_not_planned() -> None:
    assert PlanFile({"loss": {"type": None, "reasons": []}}).loss == Loss(None)
    assert PlanFile({}).loss is None


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_plan_is_told(data: bytes) -> None:
    with pytest.raises(ValueError) as raised:
        PlanFile.from_json(data)
    assert said(raised.value)


@pytest.mark.parametrize("key", ["memory", "device", "hub_datasets", "checkpoint", "precision", "backend", "job"])
@pytest.mark.parametrize("value", ["x", 7, [1], {"x": 1}])
def test_a_damaged_value_is_told_where_it_is_read(key: str, value: object) -> None:
    plan = PlanFile({key: value, "warnings": ["whole"]})
    assert plan.warnings == ("whole",)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        assert getattr(plan, key) is not None


def test_a_damaged_grant_grants_nothing() -> None:
    with pytest.raises(KeyError):
        _ = PlanFile({"may_read": {"inputs": ["/"]}}).may_read
