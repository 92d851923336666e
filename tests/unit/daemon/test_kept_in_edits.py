"""What stays in an edit, and what counts as a change where a later version adds a key."""

from __future__ import annotations

from typing import Any

import pytest

from honed.daemon.editing import _changed, _check_kept
from honed.job.job import Attempt, Job, State
from honed.job.plan_file import PlanFile
from honed.run.reply import Passed
from honed.system.error import SpecError

GROUP: dict[str, Any] = {"id": 3, "name": "s", "file": "s.yaml", "values": {"lora.r": 4}}
SPEC: dict[str, Any] = {
    "kind": "sft",
    "name": None,
    "group": GROUP,
    "lora": {"r": 4},
    "eval_split": 0.1,
    "training": {"max_steps": 8},
}


def check(job: dict[str, Any], before: dict[str, Any], **changed: Any) -> None:
    held = Job(7, "job7", 1.0, "a.json", 1000, "/tmp", state=State.QUEUED, **job)
    answer = Passed(1, {**SPEC, **changed}, PlanFile({}), "/tmp", (), {}, {}, {}, None)
    _check_kept(held, before, answer)


def test_keys_that_a_later_version_adds_are_no_change() -> None:
    now = {**SPEC, "group": {**GROUP, "halving": None}, "resources": {"gpus": 1, "profile": None}}
    before = {**SPEC, "resources": {"gpus": 1}}
    ran = {"group": GROUP, "attempts": (Attempt(1, "transformers", 1.0, device="cpu"),)}
    check(ran, before, group=now["group"], resources=now["resources"], priority=9)
    assert _changed({}, {"later": {"profile": None}}) == []
    assert _changed({"a": 1, "b": {"c": 1}}, {"a": None, "b": {"c": 1, "d": 2}}) == ["a", "b"]
    with pytest.raises(SpecError, match="resources: the job has run before"):
        check(ran, before, resources={"gpus": 1, "profile": "big"})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"eval_split": 0.2}, "eval_split: its sweep compares"),
        ({"training": {"max_steps": 9}}, "training.max_steps: its sweep compares"),
        ({"lora": {"r": 8}}, "lora.r: its sweep sets it"),
        ({"group": None}, "group: honed writes it"),
        ({"kind": "evaluate"}, "kind: stays sft"),
    ],
)
def test_what_a_sweep_compares_its_jobs_by_stays(changed: dict[str, Any], why: str) -> None:
    halved = {**GROUP, "halving": {"min_steps": 2, "eta": 2}}
    with pytest.raises(SpecError, match=why):
        check({"group": halved}, {**SPEC, "group": halved}, **{"group": halved, **changed})
    if "compares" in why:
        check({"group": GROUP}, SPEC, **changed)
