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
    > {"id": 7, "spec_name": "spec.yaml", "spec": "…, in base 64", "config": {…}, "device": {…} | null,
       "uid": 1000 | null, "earlier": {"jobs", "commit", "dataset_commits", "pinned"}}
    < {"id": 7, "ok": true, "spec": {…}, "plan": {…}, "output_dir": "/…", "warnings": […], "waits_for": {…},
       "needs_fetch": {"repo_id", "revision", "repo_type", …} | null, …}
    < {"id": 7, "ok": false, "error": {"code", "message", "hint", "evidence"?, "fix"?}}
    < {"id": 7, "ok": null, "fault": "…"}

run/reply.py has the answers' types, and their lines.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import stat
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from honed.check import (
    checklist,
    clustercheck,
    datacheck,
)
from honed.check.checklist import Asked, Progress, Verdict
from honed.check.policy import Policy, inputs
from honed.inputs import hubdata, modality
from honed.job import entitlement
from honed.job.plan_file import Earlier, PlanFile
from honed.run.helper import READY, STAGE_BYTES
from honed.run.rehearsed import Kept
from honed.run.reply import Answer, Passed, Postponed, Refused
from honed.spec import jobfile, kind, problem, spec, sweep
from honed.spec.config import Config
from honed.spec.document import Document
from honed.spec.spec import JobSpec
from honed.spec.sweep import Member
from honed.system import durable, niceness, python, quote, record
from honed.system import layout as layouts
from honed.system.device import Device
from honed.system.error import (
    DatasetError,
    DegradedError,
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    SpecError,
    said,
    unreadable,
)
from honed.system.layout import Layout
from honed.system.log import trace
from honed.system.printable import printable

#: Bytes of address space for the helper: enough for pyarrow's pools and a large .json, without exhausting the machine.
MAX_HELPER_BYTES = 4 * 1024**3
#: Faults of the machine that may be the helper's own: it ends, and the next one begins afresh.
OWN_ERRNOS = {errno.EMFILE, errno.ENOMEM}


def check(spec_path: Path, asked: Asked, data: bytes | None = None) -> Verdict:
    """Check a job file and everything it names. Raises a HonedError with place, cause and remedy for the first fault; a
    DegradedError if the machine is at fault, which says nothing about the job.

    If the output of a job that it names is missing, or the base model or a data set has yet to be fetched, the rest is
    checked and nothing is planned. `data` is the file's content if it was read before; the file's name tells its
    format. An unforeseen exception becomes an InternalError, with its traceback on stderr.
    """
    layout, config = asked.layout, asked.config
    try:
        asked.progress("spec")
        parsed = jobfile.read(spec_path, data, max_bytes=config.spool.max_spec_bytes)
        try:
            members = _members(parsed, config)
            job_spec = jobfile.of(parsed)
            submitter = os.getuid() if asked.uid is None else asked.uid
            clustercheck.require_user(layout, config, submitter)
            entitlement.require_class(config, job_spec.job_class, submitter)
            with modality.naming(job_spec.parts.patterns):
                job_spec, places, missing = hubdata.located(
                    job_spec, layout.cache_dir, allow_hub=config.policy.hub, commits=asked.earlier.dataset_commits
                )
                verdict = replace(checklist.run(job_spec, asked, missing), hub_datasets=places, members=members)
        except HonedError as error:
            problem.locate(error, parsed.data, parsed.lines)
            raise
        lines = {str(path[0]): line for path, line in parsed.lines.items() if len(path) == 1}
        return replace(verdict, lines=lines)
    except HonedError as error:
        _raise_machine_fault(error)
        raise
    except MemoryError as error:
        raise DatasetError(
            "reading a file named in the job needs more memory than the check is allowed to use",
            hint="use .jsonl or .parquet, which are read piece by piece",
        ) from error
    except OSError as error:
        _raise_machine_fault(error)
        raise unreadable(EnvironmentInvalidError, error.filename or spec_path, error) from error
    except Exception as error:
        traceback.print_exc()
        raise unforeseen(error) from error


def _raise_machine_fault(error: Exception) -> None:
    """Raise DegradedError if an error comes from one of the system that no submitter can cause."""
    if (cause := durable.cause_at_persons(error)) is not None:
        fault = said(error) if isinstance(error, HonedError) else durable.fault_at_persons(cause)
        raise DegradedError(f"{fault}", hint="this is no fault of the job: try again later") from cause


def _members(parsed: Document, config: Config) -> tuple[Member, ...]:
    """Return the jobs of a sweep, whose job files are all valid; empty for a single job. Raises SpecError."""
    if not sweep.is_in(parsed.data):
        return ()
    members = sweep.members(parsed.data, parsed.lines, max_jobs=config.spool.max_sweep_jobs)
    for member in members:
        try:
            job_spec = jobfile.validate(member.document, sweep.lines_of(member, parsed.lines), parsed.problems)
            _check_halving(job_spec, member, parsed)
        except SpecError as error:
            # No edit of the file's own key helps where the sweep sets it.
            message = "\n".join(f"{line} (with {member.words})" for line in error.said.splitlines())
            raise SpecError(message, hint=error.hint) from error
    return tuple(members)


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
            answers.write((answer := _answer(line, layout, cache, progress, journal)).to_line())
            if isinstance(answer, Postponed) and answer.is_of_helper:
                return


def _stage_fd() -> int | None:
    """Return the file for the stage: it arrives with the daemon's first byte, if stdin is a socket."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    with socket.socket(fileno=os.dup(0)) as daemon:
        _, fds, _, _ = socket.recv_fds(daemon, 1, 1)
    return fds[0] if fds else None  # None: the daemon is gone, and no line will follow


def _answer(
    line: bytes, layout: Layout, cache: datacheck.Cache, progress: Progress, journal: TextIO
) -> Answer | Postponed:
    request_id: Any = None
    kept: list[Kept] = []
    try:
        request = json.loads(line)
        request_id = request["id"]
        config = Config.model_validate(request["config"])
        asked = Asked(
            layout,
            config,
            record.read(Device, request["device"]) if request["device"] else None,
            request_id,
            request["uid"],
            record.read(Earlier, request["earlier"]),
            progress,
            cache,
            kept.append,
        )
        verdict = check(Path(request["spec_name"]), asked, base64.b64decode(request["spec"]))
    except DegradedError as error:
        is_of_helper = isinstance(error.__cause__, OSError) and error.__cause__.errno in OWN_ERRNOS
        return Postponed(request_id, printable(error.message), is_of_helper=is_of_helper)
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
        plan=_plan_file(verdict, Policy.of(layout, config, request["uid"])),
        output_dir=str(verdict.output_dir),
        warnings=tuple(map(quote.hide, verdict.warnings)),
        lines=verdict.lines,
        references=spec.references(verdict.spec),
        waits_for=verdict.waits_for,
        needs_fetch=verdict.needs_fetch,
        members=tuple(
            {"document": member.document, "values": member.values, "halving": member.halving}
            for member in verdict.members
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
        warnings=[quote.show(warning) for warning in verdict.warnings],
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
