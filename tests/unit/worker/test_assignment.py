"""The assignment that a worker reads from its job's directory."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from honed.job import trial
from honed.job.plan_file import Parallel, PlanFile
from honed.system.error import InternalError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from honed.worker import assignment as assignments

PLANS = Path(__file__).parents[2] / "data" / "plans"


def test_the_plan_of_an_assignment_is_the_file(tmp_path: Path) -> None:
    layout = Layout(tmp_path).job(1)
    layout.dir.mkdir(parents=True)
    shutil.copy(PLANS / "adapter.plan.json", layout.plan_path)
    job = assignments.read(layout.dir, 1)
    assert job.plan.to_json() == layout.plan_path.read_bytes(), "so the manifest has all of it"
    assert (job.job_id, job.name, job.backend) == (1, "ärgerlich", "transformers")
    assert (job.precision.load_dtype, job.precision.adapter_dtype) == ("bfloat16", "float32")
    assert job.spec.training.as_kwargs()["max_steps"] == 3
    changes = {"training.per_device_train_batch_size": 4}
    layout.adjustments_path.write_text(json.dumps([{"attempt": 1, "text": "smaller", "changes": changes}]))
    smaller = assignments.read(layout.dir, 2)
    assert smaller.spec.training.per_device_train_batch_size == 4
    assert list(smaller.plan.document) == [*job.plan.document, "adjustments"]


def test_a_trials_plan_is_the_jobs_made_small() -> None:
    plan = PlanFile.read(PersonPath.own(PLANS / "adapter.plan.json"))
    made = trial.reduced(plan, Path("/o"))
    changed = {
        "spec": made.spec,
        "output_dir": "/o",
        "is_trial": True,
        "parallel": asdict(Parallel()),
    }  # on one device
    assert json.dumps(made.document) == json.dumps(plan.document | changed)
    assert made.is_trial
    assert made.spec["training"]["lr_scheduler_type"] == "constant"


def test_a_plan_that_cannot_be_read_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(InternalError, match=r"plan\.json: "):
        assignments.read(tmp_path, 1)
