"""plan.json: written as ever, and read whoever wrote it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.job.job import Adjustment
from honed.job.plan_file import DatasetPlace, Grant, Loss, PlanFile
from honed.system import record
from honed.system.error import said
from honed.system.personpath import PersonPath

PLANS = Path(__file__).parents[2] / "data" / "plans"


def recorded(name: str) -> PlanFile:
    return PlanFile.read(PersonPath.own(PLANS / f"{name}.plan.json"))


@pytest.mark.parametrize("name", ["adapter", "whole", "deferred"])
def test_a_plan_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    path = PLANS / f"{name}.plan.json"
    recorded(name).write(PersonPath.own(tmp_path / "plan.json"))
    assert (tmp_path / "plan.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["adapter", "whole"])
def test_what_is_read_of_a_plan_has_its_type_and_is_written_the_same(name: str) -> None:
    plan = recorded(name)
    document = plan.document
    assert plan.is_decided
    for key in ("precision", "may_read"):
        assert json.loads(json.dumps(getattr(plan, key).as_dict())) == document[key], key
    for key in ("backend", "loss", "device"):
        assert json.loads(json.dumps(asdict(getattr(plan, key)))) == document[key], key
    assert plan.memory is not None
    assert json.dumps(plan.memory.as_dict()) == json.dumps(document["memory"])
    assert json.dumps(asdict(plan.parallel)) == json.dumps(document["parallel"])
    assert json.dumps(plan.precision.as_dict()) == json.dumps(document["precision"])
    assert json.dumps(asdict(plan.checkpoint)) == json.dumps(document["checkpoint"])
    assert plan.base_model_path == Path("/tmp/recorded/model")
    assert plan.output_dir == Path(document["output_dir"])
    assert plan.job.owner == (document["job"]["id"], "/var/lib/honed")
    assert plan.date.isoformat() == document["date"]
    assert not plan.is_trial


def test_a_deferred_plan_has_no_decisions() -> None:
    plan = recorded("deferred")
    assert not plan.is_decided
    assert (plan.memory, plan.device, plan.may_read, plan.adapter_path) == (None, None, None, None)
    assert plan.warnings[0].startswith("adapter: job:first: ")
    with pytest.raises(KeyError):
        _ = plan.backend


def test_an_attempts_plan_keeps_every_other_key() -> None:
    plan = PlanFile({**recorded("whole").document, "colour": "blue"})
    change = Adjustment(1, "smaller", {"training.per_device_train_batch_size": 1})
    made = plan.adjusted({"kind": "sft"}, [change])
    assert list(made.document) == [*plan.document, "adjustments"]
    assert made.document["colour"] == plan.document["colour"] == "blue"
    assert made.document["adjustments"][0]["text"] == "smaller"
    assert made.spec == {"kind": "sft"}


def test_places_and_grants_survive_the_file() -> None:
    place = DatasetPlace("c0ffee", Path("/cache/snapshot"), ("a.jsonl", "b.jsonl"))
    grant = Grant((Path("/var/lib/honed"),), None, (Path("/data/rows.jsonl"),))
    made = PlanFile.checked(
        {},
        warnings=["a warning"],
        adapter_path=Path("/a"),
        base_model_commit="beef",
        hub_datasets={"datasets.0": record.as_dict(place)},
        may_read=grant,
    )
    read = PlanFile.from_json(made.to_json())
    assert read.hub_datasets == {"datasets.0": place}
    assert read.may_read == grant
    assert (read.adapter_path, read.base_model_commit, read.warnings) == (Path("/a"), "beef", ("a warning",))


def test_a_loss_can_be_left_to_the_backend() -> None:
    assert PlanFile({"loss": {"type": None, "reasons": []}}).loss == Loss(None)


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
    with pytest.raises((TypeError, ValueError)):
        getattr(plan, key)


def test_a_value_of_a_wrong_type_is_named_and_not_quoted() -> None:
    document = recorded("adapter").document
    with pytest.raises(ValueError, match=r"^load_dtype: Input should be a valid string$"):
        _ = PlanFile({"precision": document["precision"] | {"load_dtype": ["secret"]}}).precision


def test_a_damaged_grant_grants_nothing() -> None:
    with pytest.raises(KeyError):
        _ = PlanFile({"may_read": {"inputs": ["/"]}}).may_read
