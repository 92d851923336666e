"""The checks of a job file, in order. A check that needs what is not there yet, such as another job's output or a base
model that must be fetched first, is left out: the job is checked as far as possible, and planned later."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from honed.check import (
    clustercheck,
    datacheck,
    modelcheck,
    packagecheck,
    placecheck,
    rehearsal,
    rowcheck,
    target,
    templatecheck,
)
from honed.check.policy import Policy, inputs
from honed.inputs import basemodel
from honed.inputs.basemodel import AdapterInfo, BaseModelInfo, UncachedError
from honed.job.plan_file import DatasetPlace, Earlier
from honed.plan import loss, pace, parallel, plan, position, remedy, rung
from honed.plan.plan import Plan
from honed.run.rehearsed import STAGE, Kept
from honed.run.snapshot import Missing
from honed.spec import kind, recipient, spec
from honed.spec.config import Config, devices
from honed.spec.spec import JobSpec
from honed.spec.sweep import Member
from honed.system import device, installed, record, training
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError, MemoryShortError, SpecError
from honed.system.layout import Layout

#: Called with the name of every stage as it is entered.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """A job that may run, or a job whose plan has to wait for another job's output or for a fetch."""

    spec: JobSpec
    plan: Plan | None  #: None while the job waits
    output_dir: Path
    warnings: list[str]  #: with quoted content marked
    adapter_path: Path | None = None
    waits_for: Mapping[str, str] = field(default_factory=dict)  #: key → name of the job that makes its input
    needs_fetch: Missing | None = None  #: a base model or data set that is not in the cache but may be fetched
    commit: str | None = None  #: the commit that the base model's hub id points to now; a branch may move
    lines: Mapping[str, int] = field(default_factory=dict)  #: line numbers of the job file's top-level keys
    hub_datasets: Mapping[str, DatasetPlace] = field(default_factory=dict)  #: local paths of hub data sets, by key
    is_sampled: bool = False  #: True if a data set has more rows than the first ones, which were checked
    members: tuple[Member, ...] = ()  #: of a sweep; the rest is about the first of them

    def places(self) -> dict[str, dict[str, object]]:
        """Return `hub_datasets` in the plan's format."""
        sets = {"datasets": self.spec.datasets, "eval_datasets": self.spec.eval_datasets}
        made = {}
        for key, place in self.hub_datasets.items():
            section, _, number = key.partition(".")
            made[key] = {"repo_id": sets[section][int(number)].path, **record.as_dict(place)}
        return made


@dataclass(frozen=True)
class Asked:
    """What a check is asked, other than the job file."""

    layout: Layout
    config: Config
    device: Device | None = None  #: the one that the job is planned for; None: the first of this machine
    job_id: int | None = None
    uid: int | None = None  #: the submitter; None: the calling user
    earlier: Earlier = field(default_factory=Earlier)
    progress: Progress = lambda _stage: None
    cache: datacheck.Cache | None = None  #: of a caller that checks many jobs: data sets are looked at once
    keep: Callable[[Kept], None] = lambda _answer: None  #: called with the answer of a rehearsal

    @property
    def has_network(self) -> bool:
        """False in the unit that checks a user's file for the shared instance: a cluster is asked at the job's turn."""
        return not self.layout.is_of_system or self.uid is None

    @property
    def rights(self) -> Policy:
        return Policy.of(self.layout, self.config, self.uid)

    @property
    def kept_in(self) -> list[Path]:
        """Directories with the submitter's kept rehearsals."""
        return rehearsal.kept_in(self.layout, os.getuid() if self.uid is None else self.uid)


@dataclass
class _Checking:
    """A job file that is being checked, and what is known of it so far."""

    spec: JobSpec
    asked: Asked
    waits_for: Mapping[str, str]  #: key → name of the job that makes its input
    missing: list[Missing]  #: what must be fetched first; data sets before the model: they are small
    warnings: list[str] = field(default_factory=list)
    model: BaseModelInfo | None = None
    adapter: AdapterInfo | None = None
    looked: datacheck.Looked = field(init=False)
    candidates: list[Device] = field(init=False)  #: the devices that it may run on
    plan: Plan | None = None
    output_dir: Path = field(init=False)

    @property
    def is_whole(self) -> bool:
        """True if nothing is missing that a plan needs."""
        return not (self.waits_for or self.missing)

    # -- step by step -------------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        if "base_model" in self.waits_for:
            return
        self.asked.progress("base model")
        try:
            self.model = modelcheck.inspect(self.spec, self.asked.layout, self.asked.config, self.asked.earlier.jobs)
        except UncachedError as error:
            self.missing.append(error.missing)

    def check_adapter(self) -> None:
        if "adapter" not in self.waits_for:
            self.asked.progress("adapter")
            self.adapter = modelcheck.inspect_adapter(self.spec, self.asked.earlier.jobs)
        if self.adapter is not None and self.model is not None:
            basemodel.check_fits(self.adapter, self.model)
            target.check_adapter(self.adapter, self.model)
        elif self.adapter is not None:
            basemodel.check_whole(self.adapter)
        if self.model is not None:
            modelcheck.check_merge(self.spec, self.model, self.adapter)
            if self.is_whole:
                loss.check(self.spec, self.model, self.adapter)
            self.warnings += [*modelcheck.warnings(self.model), *target.check(self.spec, self.model)]

    def check_data(self) -> None:
        spec, asked = self.spec, self.asked
        asked.progress("chat template")
        has_chat_template = templatecheck.check(spec, self.model)
        asked.progress("datasets")
        self.looked = datacheck.check(
            spec, self.model, asked.rights, has_chat_template=has_chat_template, cache=asked.cache
        )
        self.warnings += self.looked.warnings
        if self.model is not None and self.is_whole:
            self.warnings += position.check(spec, self.model, self.looked.num_row_tokens)
        self.warnings += pace.warnings(spec, self.looked.num_train_rows)
        asked.progress("rows in the chat template")
        self.warnings += templatecheck.unused(spec, self.model)
        self.warnings += rowcheck.check(spec, self.model, asked.rights, cache=asked.cache)

    def check_packages(self) -> None:
        self.asked.progress("packages")
        here = installed.look()
        self.candidates = _devices(self.spec, self.asked.config, self.asked.device)
        packagecheck.check(self.spec, self.model, self.candidates[0], here)
        self.warnings += packagecheck.outside_window(here)
        if self.is_whole:
            self.warnings += packagecheck.lacking(self.looked.attached, here)
            self.warnings += packagecheck.unpaged(self.spec, self.candidates[0])

    def check_plan(self) -> None:
        """Plan the job for the first device on which it fits."""
        assert self.model is not None
        self.asked.progress("plan")
        self.plan = replace(
            _first_that_fits(self.candidates, self._fitting),
            rows_template=templatecheck.for_rows(self.spec, self.model),
            rows=self.looked.needs if kind.of(self.spec).has_rows else None,
        )

    def check_output(self) -> None:
        spec, asked = self.spec, self.asked
        asked.progress("output directory")
        self.output_dir = placecheck.output_dir(spec, asked.layout, asked.job_id, asked.rights)
        self.warnings += placecheck.check_apart(spec, self.output_dir, self.model)

    def check_room(self) -> None:
        assert self.plan is not None
        self.asked.progress("disk")
        placecheck.check_room(self.spec, self.plan, self.asked.layout, self.output_dir)
        if self.asked.has_network:
            self.warnings += clustercheck.ask(self.spec, self.asked.config, self.asked.progress)

    def rehearse(self) -> None:
        assert self.model is not None
        assert self.plan is not None
        self.warnings += rehearsal.check(
            self.spec,
            self.model,
            self.plan,
            self.asked.config,
            sees=any(media.kind == "image" for row in self.looked.attached for media in row.media),
            places=self.asked.kept_in,
            keep=self.asked.keep,
            begins=lambda: self.asked.progress(STAGE),
        )

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _fitting(self, device: Device) -> Plan:
        """Return the job's plan for a device. Raises MemoryShortError, with remedies, where it does not fit."""
        made = self._planned(self.spec, device)
        self.asked.progress("memory")
        num_devices = _num_like(device, self.spec, self.asked.config)
        remedy.check(
            self.spec,
            made.memory,
            device,
            lambda changed: self._planned(changed, device).memory,
            num_devices=num_devices,
        )
        return made

    def _planned(self, changed: JobSpec, device: Device) -> Plan:
        assert self.model is not None
        pinned = self.asked.earlier.pinned
        return plan.make(
            changed,
            self.model,
            device,
            config=self.asked.config,
            installed=installed.look(),
            adapter=self.adapter,
            num_row_tokens=self.looked.num_row_tokens,
            num_rows=self.looked.num_rows,
            rows=self.looked.attached,
            pinned=rung.pinned(pinned),
            adapter_dtype=pinned.adapter_dtype if pinned else None,
        )

    def verdict(self) -> Verdict:
        for key, name in self.waits_for.items():
            self.warnings.append(f"{key}: job:{name}: checked, and the job planned, once that job has succeeded")
        for missing in self.missing:
            where = f"{missing.repo_id} at {missing.revision} is not, or only partly, in the local cache"
            self.warnings.append(
                f"{missing.key}: {where}: honed first fetches it from the hub, then checks and plans the job"
            )
        return Verdict(
            self.spec,
            self.plan,
            self.output_dir,
            [*(self.plan.warnings if self.plan is not None else ()), *self.warnings],
            self.adapter.path if self.adapter is not None and self.is_whole else None,
            waits_for=self.waits_for,
            needs_fetch=self.missing[0] if self.missing else None,
            commit=modelcheck.commit(self.spec, self.model) if self.model is not None else None,
            is_sampled=self.looked.is_sampled,
        )


#: The checks, in order; True: only where nothing is missing.
_CHECKS: tuple[tuple[Callable[[_Checking], None], bool], ...] = (
    (_Checking.check_model, False),
    (_Checking.check_adapter, False),
    (_Checking.check_data, False),
    (_Checking.check_packages, False),
    (_Checking.check_plan, True),
    (_Checking.check_output, False),
    (_Checking.check_room, True),
    (_Checking.rehearse, True),
)


def run(job_spec: JobSpec, asked: Asked, missing: Missing | None) -> Verdict:
    """Make all checks of a job that is valid in itself. `missing`: a data set that must be fetched first."""
    if asked.earlier.commit is not None:
        job_spec = job_spec.model_copy(update={"revision": asked.earlier.commit})
    _check_policy(job_spec, asked.config)
    if training.is_missing():
        raise EnvironmentInvalidError(training.MISSING, hint=training.REMEDY)
    asked.progress("permissions")
    _check_rights(job_spec, asked.rights, asked.config, asked.earlier.jobs)
    waits_for = {key: name for key, name in spec.references(job_spec).items() if name not in asked.earlier.jobs}
    checking = _Checking(job_spec, asked, waits_for, [missing] if missing is not None else [], _of_itself(job_spec))
    for check, needs_all in _CHECKS:
        if checking.is_whole or not needs_all:
            check(checking)
    return checking.verdict()


def _devices(job_spec: JobSpec, config: Config, given: Device | None) -> list[Device]:
    """Return the devices that the job may run on; it is planned for the first on which it fits."""
    if job_spec.resources.gpus == 0 or not kind.of(job_spec).needs_device:
        return [device.cpu()]
    if given:
        return [given]
    there = devices(config, job_spec.resources.profile)
    if (asked := clustercheck.profile(job_spec, config)) is not None:
        clustercheck.require_gpus(job_spec, asked)
        return there[:1]
    gpus = device.alike([item for item in there if item.kind == "cuda"])
    parallel.check_devices(job_spec, max(map(len, gpus), default=0), sum(map(len, gpus)))
    if job_spec.resources.gpus <= 1:
        return there
    # Each set of GPUs that are alike has its smallest one for all.
    return [min(item, key=lambda one: one.total_bytes) for item in gpus if len(item) >= job_spec.resources.gpus]


def _num_like(target: Device, job_spec: JobSpec, config: Config) -> int:
    there = devices(config, job_spec.resources.profile) if target.kind == "cuda" else []
    return sum(device.are_alike(item, target) for item in there) or 1


def _first_that_fits(candidates: list[Device], fitting: Callable[[Device], Plan]) -> Plan:
    """Return the plan for the device with the best rung; among equals, the first. Raises the largest device's refusal
    if the job fits on none."""
    refusals, lower = [], []
    for candidate in candidates:
        try:
            made = fitting(candidate)
        except MemoryShortError as error:
            refusals.append((candidate.total_bytes, error))
        else:
            if not made.num_passed:
                return made
            lower.append(made)
    if lower:
        return min(lower, key=lambda made: made.num_passed)
    raise max(refusals, key=lambda refusal: refusal[0])[1]


def _check_policy(job_spec: JobSpec, config: Config) -> None:
    if job_spec.trust_remote_code and not config.policy.trust_remote_code:
        raise SpecError(
            "trust_remote_code: running code from model repositories is not allowed here",
            hint="remove it, or ask the administrator to set policy.trust_remote_code in honed.toml",
            fix={"trust_remote_code": None},
        )
    parallel.check(job_spec, has_cluster=config.jobs.has_cluster)
    clustercheck.profile(job_spec, config)
    recipient.check(job_spec.notify, config.notify)


def _of_itself(job_spec: JobSpec) -> list[str]:
    """Return a warning for every key that names the job's own name, which means an earlier job of that name."""
    if job_spec.name is None:
        return []
    named = [key for key, name in spec.references(job_spec).items() if name == job_spec.name]
    named += ["depends_on"] if job_spec.name in job_spec.depends_on else []
    return [
        f"{key}: {job_spec.name} is also this job's name: the latest earlier job of that name is used; without one, "
        "this job is rejected"
        for key in named
    ]


def _check_rights(job_spec: JobSpec, rights: Policy, config: Config, jobs: Mapping[str, Path]) -> None:
    """Check the rights to all paths, before any is opened, except other jobs' outputs: daemon/arrivals/naming.py."""
    named = spec.references(job_spec)
    model = None
    with contextlib.suppress(UncachedError):  # it will be fetched into honed's own cache
        model = None if "base_model" in named else modelcheck.resolve(job_spec, rights.layout, config, jobs)
    adapter = None if job_spec.adapter is None or "adapter" in named else Path(job_spec.adapter)
    for item in inputs(job_spec, model, adapter):
        rights.check_read(item)
