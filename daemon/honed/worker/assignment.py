"""A worker's assignment: plan.json, read once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from honed.check.policy import Named, check_granted, inputs
from honed.inputs import hubdata
from honed.job import out_of_memory
from honed.job.job import Adjustment
from honed.job.plan_file import Grant, PlanFile, Precision
from honed.spec.spec import JobSpec
from honed.system.error import InternalError, said
from honed.system.layout import AttemptLayout, JobLayout


@dataclass(frozen=True)
class Assignment:
    """One attempt at one job."""

    job_id: int
    name: str
    spec: JobSpec
    base_model_path: Path
    output_dir: Path
    backend: str
    precision: Precision
    plan: dict[str, Any]  #: all of plan.json, for the output's manifest
    layout: JobLayout
    attempt: AttemptLayout
    date: datetime  #: given to chat templates that ask for the date, in local time
    adjustments: tuple[Adjustment, ...] = ()  #: changes of the spec for lack of memory; `spec` includes them

    @property
    def is_trial(self) -> bool:
        """True for a trial of the job on a few rows; see trial.py."""
        return bool(self.plan.get("is_trial"))

    @property
    def seed(self) -> int:
        return int(self.spec.training.as_kwargs().get("seed", 42))

    def check_inputs(self) -> None:
        """Check that the job may still read all that the spec names. Raises the error of the input's kind."""
        adapter = Path(self.spec.adapter) if self.spec.adapter else None
        for named in inputs(self.spec, self.base_model_path, adapter):
            self.check_read(named)

    def check_read(self, named: Named) -> None:
        if self._grant is not None:
            check_granted(self._grant, named, self.layout.dir)

    @cached_property
    def _grant(self) -> Grant | None:
        granted = self.plan.get("may_read")
        return Grant.from_dict(granted) if granted else None


def read(job_dir: Path, attempt: int, *, backend: str | None = None) -> Assignment:
    """Read the assignment in `job_dir`; `backend` replaces the plan's."""
    layout = JobLayout(job_dir)
    try:
        plan = json.loads(layout.plan_path.read_bytes())
    except (OSError, ValueError) as error:
        raise InternalError(f"{layout.plan_path}: {said(error)}") from error
    adjustments = _adjustments(layout)
    if adjustments:
        plan |= {
            "spec": out_of_memory.adjusted(plan["spec"], adjustments),
            "adjustments": [asdict(each) for each in adjustments],
        }
    date = _date(plan, layout)
    plan |= {"date": date.isoformat(timespec="seconds")}
    spec = hubdata.placed(JobSpec.model_validate(plan["spec"]), PlanFile(plan).hub_datasets)
    if plan.get("adapter_path"):
        spec = spec.model_copy(update={"adapter": plan["adapter_path"]})  # where the spec says job:NAME
    return Assignment(
        job_id=plan["job"]["id"],
        name=plan["job"].get("name") or f"job {plan['job']['id']}",
        spec=spec,
        base_model_path=Path(plan["base_model_path"]),
        output_dir=Path(plan["output_dir"]),
        backend=backend or plan["backend"]["name"],
        precision=Precision(**plan["precision"]),
        plan=plan,
        layout=layout,
        attempt=layout.attempt(attempt),
        date=date,
        adjustments=adjustments,
    )


def _date(plan: Mapping[str, Any], layout: JobLayout) -> datetime:
    """Return when the job was accepted, or when its first attempt started if an older honed accepted it."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(plan["date"])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), layout.attempt(1).events_path.open() as events:
        return datetime.fromtimestamp(json.loads(next(events, ""))["time"], UTC).astimezone()
    return datetime.now(UTC).astimezone()


def _adjustments(layout: JobLayout) -> tuple[Adjustment, ...]:
    try:
        return tuple(Adjustment(**item) for item in json.loads(layout.adjustments_path.read_bytes()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise InternalError(f"{layout.adjustments_path}: {said(error)}") from error
