"""Everything about a job that can be known before its model is loaded, checked without torch.

    spec ── permissions ── base model ── adapter ── chat template ── data sets ── first rows ── packages ── plan ──
    memory ── output dir ── disk ── cluster ── rehearsal

This module has the order; the checks lie by subject in modelcheck, target, templatecheck, datacheck, rowcheck,
packagecheck, placecheck, clustercheck and rehearsal.

`check` runs in honectl's own process or in the helper: a small process (`python -m honed.check.preflight --root
DIR`) with limits, so that nothing a job file names, such as a dead network file system or a file of terabytes, can
stall or bloat the daemon. It is a child of the daemon (run/helper.py) or, with the rights of one submitter, the unit
honed-check@UID.service (run/systemd_check.py). The daemon's end of it is daemon/arrivals/seat.py. A request is one
line of JSON, and so is an answer. The helper's current stage is kept in a file, which the daemon quotes after a
timeout:

    < {"ready": true}
    > {"id": 7, "spec_name": "spec.yaml", "spec": "…, in base 64", "config": {…}, "device": {…} | null}
    < {"id": 7, "ok": true, "spec": {…}, "plan": {…}, "output_dir": "/…", "warnings": […], "waits_for": {…},
       "needs_fetch": {"repo_id", "revision", "repo_type", …} | null, …}
    < {"id": 7, "ok": false, "error": {"code", "message", "hint", "evidence"?, "fix"?}}

run/reply.py has the answers' types, and their lines.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import resource
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

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
from honed.inputs import basemodel, hubdata, modality
from honed.inputs.basemodel import UncachedError
from honed.job import entitlement
from honed.job.plan_file import DatasetPlace, PlanFile, Precision
from honed.plan import loss, pace, parallel, plan, position, remedy, rung
from honed.plan.plan import Plan
from honed.run.helper import READY, STAGE_BYTES
from honed.run.rehearsed import STAGE, Kept
from honed.run.reply import Answer, Passed, Refused
from honed.run.snapshot import Missing
from honed.spec import kind, problem, recipient, spec, sweep
from honed.spec.config import Config, devices
from honed.spec.document import Document
from honed.spec.spec import JobSpec
from honed.spec.sweep import Member
from honed.system import device, installed, niceness, python, quote, training
from honed.system import layout as layouts
from honed.system.device import Device
from honed.system.error import (
    DatasetError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    MemoryShortError,
    SpecError,
    said,
    unreadable,
)
from honed.system.layout import Layout
from honed.system.log import trace

#: Bytes of address space for the helper: enough for pyarrow's pools and a large .json, without exhausting the machine.
MAX_HELPER_BYTES = 4 * 1024**3

#: Called with the name of each stage as it is entered.
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
            made[key] = place.as_dict(sets[section][int(number)].path)
        return made


@dataclass(frozen=True)
class _Asked:
    """The arguments of `check` other than the job file."""

    layout: Layout
    config: Config
    device: Device | None
    job_id: int | None
    jobs: Mapping[str, Path]
    commit: str | None
    dataset_commits: Mapping[str, str]
    pinned: Precision | None
    uid: int | None
    progress: Progress
    cache: datacheck.Cache | None
    keep: Callable[[Kept], None]

    @property
    def has_network(self) -> bool:
        """False in the unit that checks a user's file for the shared instance: Slurm is asked at the job's turn."""
        return not self.layout.is_of_system or self.uid is None

    @property
    def rights(self) -> Policy:
        return Policy.of(self.layout, self.config, self.uid)

    @property
    def kept_in(self) -> list[Path]:
        """Directories with the submitter's kept rehearsals."""
        return rehearsal.kept_in(self.layout, os.getuid() if self.uid is None else self.uid)


def check(
    spec_path: Path,
    *,
    layout: Layout,
    config: Config,
    device: Device | None = None,
    job_id: int | None = None,
    jobs: Mapping[str, Path] | None = None,
    data: bytes | None = None,
    commit: str | None = None,
    dataset_commits: Mapping[str, str] | None = None,
    pinned: Precision | None = None,
    uid: int | None = None,
    progress: Progress = lambda _stage: None,
    cache: datacheck.Cache | None = None,
    keep: Callable[[Kept], None] = lambda _answer: None,
) -> Verdict:
    """Check a job file and everything it names. Raises a HonedError with place, cause and remedy for the first fault.

    `device` is the one that the job is planned for, by default the first of this machine. `jobs` has the output
    directories of finished jobs, for `job:NAME`. If one is missing, or the base model or a data set has yet to be
    fetched, the rest is checked and nothing is planned. `data` is the file's content if it was read before; the
    file's name tells its format. `commit` is the commit that a hub id's branch meant when the job was accepted,
    `dataset_commits` the same of data sets, by key, and `pinned` the precision of the job's earlier plan. `uid` is
    the submitter, by default the calling user. `cache` is for callers that check many jobs: data sets are looked at
    once. `keep` is called with the answer of a rehearsal.
    An unforeseen exception becomes an InternalError, with its traceback on stderr.
    """
    try:
        asked = _Asked(
            layout,
            config,
            device,
            job_id,
            jobs or {},
            commit,
            dataset_commits or {},
            pinned,
            uid,
            progress,
            cache,
            keep,
        )
        progress("spec")
        parsed = spec.read(spec_path, data, max_bytes=config.spool.max_spec_bytes)
        try:
            members = _members(parsed, config)
            job_spec = spec.of(parsed)
            submitter = os.getuid() if uid is None else uid
            clustercheck.require_user(layout, config, submitter)
            entitlement.require_class(config, job_spec.job_class, submitter)
            with modality.naming(job_spec.parts.patterns):
                job_spec, places, missing = hubdata.located(
                    job_spec, layout.cache_dir, allow_hub=config.policy.hub, commits=asked.dataset_commits
                )
                verdict = replace(_check(job_spec, asked, missing), hub_datasets=places, members=members)
        except HonedError as error:
            problem.locate(error, parsed.data, parsed.lines)
            raise
        lines = {str(path[0]): line for path, line in parsed.lines.items() if len(path) == 1}
        return replace(verdict, lines=lines)
    except HonedError:
        raise
    except MemoryError as error:
        raise DatasetError(
            "reading a file named in the job needs more memory than the check is allowed to use",
            hint="use .jsonl or .parquet, which are read piece by piece",
        ) from error
    except OSError as error:
        raise unreadable(EnvironmentInvalidError, error.filename or spec_path, error) from error
    except Exception as error:
        traceback.print_exc()
        raise unforeseen(error) from error


def _members(parsed: Document, config: Config) -> tuple[Member, ...]:
    """Return the jobs of a sweep, whose job files are all valid; empty for a single job. Raises SpecError."""
    if not sweep.is_in(parsed.data):
        return ()
    found = sweep.members(parsed.data, parsed.lines, max_jobs=config.spool.max_sweep_jobs)
    for member in found:
        try:
            job_spec = spec.validate(member.document, sweep.lines_of(member, parsed.lines), parsed.problems)
            _check_halving(job_spec, member, parsed)
        except SpecError as error:
            # No edit of the file's own key helps where the sweep sets it.
            told = "\n".join(f"{line} (with {member.words})" for line in error.said.splitlines())
            raise SpecError(told, hint=error.hint) from error
    return tuple(found)


def _check_halving(job_spec: JobSpec, member: Member, parsed: Document) -> None:
    """Raise SpecError for a job of a sweep that `halving` could never end."""
    if member.halving is None:
        return
    first, last = member.halving["min_steps"], job_spec.training.max_steps
    if not kind.of(job_spec).trains:
        raise sweep.halving_fault(parsed.lines, "", f"kind: {job_spec.kind} has no steps to stop at", "remove it")
    if job_spec.eval_strategy == "no":
        raise sweep.halving_fault(
            parsed.lines,
            "",
            "it compares the evaluation losses of the jobs, and they are not evaluated",
            "add eval_split: 0.05, or eval_datasets, and training.eval_steps",
        )
    if other_rows := [key for key in member.values if key.partition(".")[0] in ("eval_split", "eval_datasets")]:
        raise sweep.halving_fault(
            parsed.lines,
            "",
            f"it compares evaluation losses, and {other_rows[0]} gives the jobs different rows to evaluate on",
            "remove it, or evaluate all jobs on the same rows",
        )
    if job_spec.eval_strategy == "epoch" and last <= 0 and job_spec.training.num_train_epochs <= 1:
        raise sweep.halving_fault(
            parsed.lines, "", "the only evaluation is at the last step", "add training.eval_steps, or train longer"
        )
    if 0 < last <= first:
        raise sweep.halving_fault(
            parsed.lines,
            "min_steps",
            f"{first} is not before the last step (training.max_steps: {last})",
            f"use less, such as {max(1, last // 4)}",
        )


def _check(job_spec: JobSpec, asked: _Asked, missing: Missing | None) -> Verdict:  # noqa: PLR0915 - a linear sequence
    layout, config, jobs, progress, rights = asked.layout, asked.config, asked.jobs, asked.progress, asked.rights
    if asked.commit is not None:
        job_spec = job_spec.model_copy(update={"revision": asked.commit})
    _check_policy(job_spec, config)
    if training.is_missing():
        raise EnvironmentInvalidError(training.MISSING, hint=training.REMEDY)
    progress("permissions")
    _check_rights(job_spec, rights, config, jobs)
    waits_for = {key: name for key, name in spec.references(job_spec).items() if name not in jobs}
    if waits_for or missing is not None:
        return _check_the_rest(job_spec, asked, waits_for, missing)
    progress("base model")
    try:
        model = modelcheck.inspect(job_spec, layout, config, jobs)
    except UncachedError:
        return _check_the_rest(job_spec, asked, {}, None)
    progress("adapter")
    adapter = modelcheck.inspect_adapter(job_spec, jobs)
    if adapter is not None:
        basemodel.check_fits(adapter, model)
        target.check_adapter(adapter, model)
    modelcheck.check_merge(job_spec, model, adapter)
    loss.check(job_spec, model, adapter)
    named = [*_of_itself(job_spec), *modelcheck.warnings(model), *target.check(job_spec, model)]
    progress("chat template")
    has_chat_template = templatecheck.check(job_spec, model)
    progress("datasets")
    looked = datacheck.check(job_spec, model, rights, has_chat_template=has_chat_template, cache=asked.cache)
    warnings = named + looked.warnings + position.check(job_spec, model, looked.num_row_tokens)
    warnings += pace.warnings(job_spec, looked.num_train_rows)
    progress("rows in the chat template")
    warnings += [*templatecheck.unused(job_spec, model), *rowcheck.check(job_spec, model, rights, cache=asked.cache)]
    progress("packages")
    here = installed.look()
    candidates = _devices(job_spec, config, asked.device)
    packagecheck.check(job_spec, model, candidates[0], here)
    warnings += packagecheck.outside_window(here) + packagecheck.lacking(looked.attached, here)
    warnings += packagecheck.unpaged(job_spec, candidates[0])
    progress("plan")

    pinned = rung.pinned(asked.pinned)

    def planned(changed: JobSpec, target: Device) -> Plan:
        return plan.make(
            changed,
            model,
            target,
            config=config,
            installed=here,
            adapter=adapter,
            num_row_tokens=looked.num_row_tokens,
            num_rows=looked.num_rows,
            rows=looked.attached,
            pinned=pinned,
            adapter_dtype=asked.pinned.adapter_dtype if asked.pinned else None,
        )

    def fitting(target: Device) -> Plan:
        made = planned(job_spec, target)
        progress("memory")
        remedy.check(
            job_spec,
            made.memory,
            target,
            lambda changed: planned(changed, target).memory,
            num_devices=_num_like(target, job_spec, config),
        )
        return made

    made = replace(
        _first_that_fits(candidates, fitting),
        rows_template=templatecheck.for_rows(job_spec, model),
        rows=looked.needs if kind.of(job_spec).has_rows else None,
    )
    progress("output directory")
    output_dir = placecheck.output_dir(job_spec, layout, asked.job_id, rights)
    progress("disk")
    warnings += placecheck.check_apart(job_spec, output_dir, model)
    placecheck.check_room(job_spec, made, layout, output_dir)
    warnings += clustercheck.ask(job_spec, config, progress) if asked.has_network else []
    warnings += rehearsal.check(
        job_spec,
        model,
        made,
        config,
        sees=any(media.kind == "image" for row in looked.attached for media in row.media),
        places=asked.kept_in,
        keep=asked.keep,
        begins=lambda: progress(STAGE),
    )
    return Verdict(
        job_spec,
        made,
        output_dir,
        [*made.warnings, *warnings],
        adapter.path if adapter else None,
        commit=modelcheck.commit(job_spec, model),
        is_sampled=looked.is_sampled,
    )


def _check_the_rest(
    job_spec: JobSpec, asked: _Asked, waits_for: Mapping[str, str], missing_data: Missing | None
) -> Verdict:
    """Check a job that waits for another job's output or for a fetch, as far as possible without them."""
    layout, config, jobs, progress, rights = asked.layout, asked.config, asked.jobs, asked.progress, asked.rights
    model, missing = None, None
    warnings = _of_itself(job_spec)
    if "base_model" not in waits_for:
        progress("base model")
        try:
            model = modelcheck.inspect(job_spec, layout, config, jobs)
            modelcheck.check_merge(job_spec, model, None)
            warnings += [*modelcheck.warnings(model), *target.check(job_spec, model)]
        except UncachedError as error:
            missing = error.missing
    if "adapter" not in waits_for:
        progress("adapter")
        adapter = modelcheck.inspect_adapter(job_spec, jobs)
        if adapter is not None and model is not None:
            basemodel.check_fits(adapter, model)
            target.check_adapter(adapter, model)
        elif adapter is not None:
            basemodel.check_whole(adapter)
    progress("chat template")
    has_chat_template = templatecheck.check(job_spec, model)
    progress("datasets")
    looked = datacheck.check(job_spec, model, rights, has_chat_template=has_chat_template, cache=asked.cache)
    warnings += looked.warnings + pace.warnings(job_spec, looked.num_train_rows)
    progress("rows in the chat template")
    warnings += [*templatecheck.unused(job_spec, model), *rowcheck.check(job_spec, model, rights, cache=asked.cache)]
    progress("packages")
    here = installed.look()
    packagecheck.check(job_spec, model, _devices(job_spec, config, asked.device)[0], here)
    warnings += packagecheck.outside_window(here)
    progress("output directory")
    output_dir = placecheck.output_dir(job_spec, layout, asked.job_id, rights)
    warnings += placecheck.check_apart(job_spec, output_dir, model)
    warnings += [
        f"{key}: job:{name}: checked, and the job planned, once that job has succeeded"
        for key, name in waits_for.items()
    ]
    # Data sets first: they are small, and their faults show early.
    for each in filter(None, (missing_data, missing)):
        where = f"{each.repo_id} at {each.revision} is not, or only partly, in the local cache"
        warnings.append(f"{each.key}: {where}: honed first fetches it from the hub, then checks and plans the job")
    commit = modelcheck.commit(job_spec, model) if model is not None else None
    return Verdict(
        job_spec,
        None,
        output_dir,
        warnings,
        waits_for=waits_for,
        needs_fetch=missing_data or missing,
        commit=commit,
        is_sampled=looked.is_sampled,
    )


def _devices(job_spec: JobSpec, config: Config, given: Device | None) -> list[Device]:
    """Return the devices that the job may run on; it is planned for the first on which it fits."""
    if job_spec.resources.gpus == 0 or not kind.of(job_spec).needs_device:
        return [device.cpu()]
    if given:
        return [given]
    found = devices(config, job_spec.resources.profile)
    if (asked := clustercheck.profile(job_spec, config)) is not None:
        clustercheck.require_gpus(job_spec, asked)
        return found[:1]
    gpus = device.alike([each for each in found if each.kind == "cuda"])
    parallel.check_devices(job_spec, max(map(len, gpus), default=0), sum(map(len, gpus)))
    if job_spec.resources.gpus <= 1:
        return found
    # Each set of GPUs that are alike has its smallest one for all.
    return [min(each, key=lambda one: one.total_bytes) for each in gpus if len(each) >= job_spec.resources.gpus]


def _num_like(target: Device, job_spec: JobSpec, config: Config) -> int:
    """Return how many devices like this one the machine has."""
    found = devices(config, job_spec.resources.profile) if target.kind == "cuda" else []
    return sum(device.are_alike(each, target) for each in found) or 1


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
    parallel.check(job_spec, has_cluster=config.jobs.runner == "slurm")
    clustercheck.profile(job_spec, config)
    recipient.check(job_spec.notify, config.notify)


def _of_itself(job_spec: JobSpec) -> list[str]:
    """Return a warning for each key that names the job's own name, which means an earlier job of that name."""
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
    for each in inputs(job_spec, model, adapter):
        rights.check_read(each)


# --- The helper -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests, one per line, until stdin ends. Only answers go to stdout; a bad request fails alone.

    stderr goes to the journal. Output of libraries may quote rows and is discarded, and of a traceback only the places
    are logged.
    """
    python.protect()
    parser = argparse.ArgumentParser(prog="honed.check.preflight")
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--max-bytes", type=int, default=MAX_HELPER_BYTES)
    options = parser.parse_args()
    layout = layouts.of(options.root)
    niceness.step_back()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    # The hard limit stays: a rehearsal has a limit of another kind.
    resource.setrlimit(resource.RLIMIT_AS, (options.max_bytes, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon ends us by closing stdin
    stage_fd = _stage_fd()
    answers, journal = os.fdopen(os.dup(1), "wb", buffering=0), os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    cache = datacheck.Cache()

    def progress(stage: str) -> None:
        if stage_fd is not None:
            with contextlib.suppress(OSError):  # of the machine, such as no memory: no fault of the job file
                os.pwrite(stage_fd, stage.ljust(STAGE_BYTES).encode(), 0)

    with contextlib.suppress(ConnectionError):  # the daemon is gone
        answers.write(READY + b"\n")
        for line in sys.stdin.buffer:
            answers.write(_answer(line, layout, cache, progress, journal).to_line())


def _stage_fd() -> int | None:
    """Return the file for the stage: it arrives with the daemon's first byte, if stdin is a socket."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    with socket.socket(fileno=os.dup(0)) as daemon:
        _, fds, _, _ = socket.recv_fds(daemon, 1, 1)
    return fds[0] if fds else None  # None: the daemon is gone, and no line will follow


def _answer(line: bytes, layout: Layout, cache: datacheck.Cache, progress: Progress, journal: TextIO) -> Answer:
    request_id: Any = None
    kept: list[Kept] = []
    try:
        request = json.loads(line)
        request_id = request["id"]
        config = Config.model_validate(request["config"])
        verdict = check(
            Path(request["spec_name"]),
            data=base64.b64decode(request["spec"]),
            layout=layout,
            config=config,
            device=Device.from_dict(request["device"]) if request.get("device") else None,
            job_id=request_id,
            jobs={name: Path(path) for name, path in (request.get("jobs") or {}).items()},
            commit=request.get("commit"),
            dataset_commits=request.get("dataset_commits"),
            pinned=Precision.from_dict(request["pinned"]) if request.get("pinned") else None,
            uid=request.get("uid"),
            progress=progress,
            cache=cache,
            keep=kept.append,
        )
    except HonedError as error:
        if isinstance(error, InternalError) and error.__cause__ is not None:
            print(trace(error.__cause__), file=journal)
        return Refused(request_id, error, next(iter(kept), None))
    except Exception as error:  # noqa: BLE001  (the helper's main loop: this job file fails, the helper lives)
        print(trace(error), file=journal)
        return Refused(request_id, unforeseen(error))
    return Passed(
        id=request_id,
        spec=verdict.spec.model_dump(mode="json"),
        plan=_plan_file(verdict, Policy.of(layout, config, request.get("uid"))),
        output_dir=str(verdict.output_dir),
        warnings=tuple(map(quote.hide, verdict.warnings)),
        lines=verdict.lines,
        references=spec.references(verdict.spec),
        waits_for=verdict.waits_for,
        needs_fetch=verdict.needs_fetch,
        members=tuple(
            {"document": each.document, "values": each.values, "halving": each.halving} for each in verdict.members
        ),
        rehearsed=next(iter(kept), None),
    )


def _plan_file(verdict: Verdict, rights: Policy) -> PlanFile:
    """Return the plan, with the files that the worker may read; it checks again, since files and links change."""
    grant = None
    if verdict.plan is not None:
        grant = rights.grant(inputs(verdict.spec, verdict.plan.model.path, verdict.adapter_path))
    return PlanFile.checked(
        verdict.plan.as_dict() if verdict.plan else {},
        warnings=[quote.show(each) for each in verdict.warnings],
        adapter_path=verdict.adapter_path,
        base_model_commit=verdict.commit,
        hub_datasets=verdict.places(),
        may_read=grant,
    )


def unforeseen(error: Exception) -> InternalError:
    """Return an unforeseen exception as an InternalError."""
    return InternalError(
        f"the check failed unexpectedly: {type(error).__name__}: {said(error)}",
        hint="the log has the traceback: journalctl -u honed -u 'honed-check@*'",
    )


if __name__ == "__main__":
    main()
