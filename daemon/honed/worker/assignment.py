"""A worker's assignment: plan.json, read once, with what has changed since."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from honed.check.policy import Named, check_granted, inputs
from honed.inputs import datadir, hubdata
from honed.job import out_of_memory, row_cache
from honed.job.job import Adjustment
from honed.job.plan_file import Grant, PlanFile, Precision
from honed.spec.spec import JobSpec
from honed.system.error import DatasetError, InternalError, said
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
    plan: PlanFile  #: with the adjustments, as the output's manifest has it
    layout: JobLayout
    attempt: AttemptLayout
    date: datetime  #: given to chat templates that ask for the date, in local time
    adjustments: tuple[Adjustment, ...] = ()  #: changes of the spec for lack of memory; `spec` includes them

    @property
    def is_trial(self) -> bool:
        """True for a trial of the job on a few rows; see trial.py."""
        return self.plan.is_trial

    @property
    def seed(self) -> int:
        return int(self.spec.training.as_kwargs().get("seed", 42))

    @property
    def rows_dir(self) -> Path:
        """The cache of encoded rows; a trial's is the job's."""
        return JobLayout(self.layout.dir.parent).rows_dir if self.is_trial else self.layout.rows_dir

    @property
    def shared_rows_dir(self) -> Path | None:
        """The cache of rows that the job shares with others of its user, to be read only; None if it shares none."""
        given = os.environ.get(row_cache.VARIABLE)
        return Path(given) if given and not self.spec.trust_remote_code else None

    def check_inputs(self) -> None:
        """Check that the job may still read all that the spec names. Raises the error of the input's kind."""
        adapter = Path(self.spec.adapter) if self.spec.adapter else None
        for named in inputs(self.spec, self.base_model_path, adapter):
            self.check_read(named)

    def files(self) -> list[Path]:
        """Return the files that are read when the run begins: all inputs but media. A directory that is missing, or has
        no data files, stands for itself: the run will show it."""
        paths = [self.layout.plan_path]
        adapter = Path(self.spec.adapter) if self.spec.adapter else None
        for item in inputs(self.spec, self.base_model_path, adapter):
            if item.error is not DatasetError:
                paths.append(item.path)
                with contextlib.suppress(OSError):
                    paths += [path for path in item.path.glob("*") if path.is_file()]
        for dataset in (*self.spec.datasets, *self.spec.eval_datasets):
            try:
                paths += datadir.files_of(dataset)
            except (OSError, DatasetError):
                paths.append(dataset.place)
        return paths

    def check_read(self, named: Named) -> None:
        if self._grant is not None:
            check_granted(self._grant, named, self.layout.dir)

    @cached_property
    def _grant(self) -> Grant | None:
        return self.plan.may_read


def read(job_dir: Path, attempt: int, *, backend: str | None = None) -> Assignment:
    """Read the assignment in `job_dir`; `backend` replaces the plan's."""
    layout = JobLayout(job_dir)
    try:
        plan = PlanFile.from_json(layout.plan_path.read_bytes())
    except (OSError, ValueError) as error:
        raise InternalError(f"{layout.plan_path}: {said(error)}") from error
    adjustments = _adjustments(layout)
    if adjustments:
        plan = plan.adjusted(out_of_memory.adjusted(plan.spec, adjustments), adjustments)
    spec = hubdata.placed(JobSpec.model_validate(plan.spec), plan.hub_datasets)
    if plan.adapter_path is not None:
        spec = spec.model_copy(update={"adapter": str(plan.adapter_path)})  # where the spec says job:NAME
    return Assignment(
        job_id=plan.job.id,
        name=plan.job.name,
        spec=spec,
        base_model_path=plan.base_model_path,
        output_dir=plan.output_dir,
        backend=backend or plan.backend.name,
        precision=plan.precision,
        plan=plan,
        layout=layout,
        attempt=layout.attempt(attempt),
        date=plan.date,
        adjustments=adjustments,
    )


def _adjustments(layout: JobLayout) -> tuple[Adjustment, ...]:
    try:
        return tuple(Adjustment(**item) for item in json.loads(layout.adjustments_path.read_bytes()))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise InternalError(f"{layout.adjustments_path}: {said(error)}") from error
