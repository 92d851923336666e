"""A success is the worker's own word; every other outcome has a code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from honed.job.job import MOVES, Attempt, Job, State, Stop
from honed.run.ending import destination
from honed.run.outcome import Outcome, judge
from honed.run.runner import Exit
from honed.system.error import BY_CODE, HonedError, KilledError
from honed.system.personpath import PersonPath

SUCCESS = {"outcome": "succeeded", "step": 9, "metrics": {"train_loss": 1.0}, "artifacts": {}, "error": None}
FAILURE = {"outcome": "failed", "error": {"code": "mask_invalid", "message": "m", "hint": "h"}}


@pytest.mark.parametrize(
    ("result", "ended", "code"),
    [
        (SUCCESS, Exit(0, None), "succeeded"),
        # However it ended after it wrote its result, its work is complete and not repeated.
        (SUCCESS, Exit(3, None), "succeeded"),
        (SUCCESS, Exit(None, 11), "succeeded"),
        (SUCCESS, Exit(None, 6, service_result="watchdog"), "succeeded"),
        (SUCCESS, Exit(None, 9, was_out_of_memory=True), "succeeded"),
        (SUCCESS, Exit(None, None, service_result="node-lost"), "succeeded"),
        # These workers never began, so the result is not theirs.
        (SUCCESS, Exit(None, None, ran=False, problem=KilledError("not launched")), "killed"),
        (SUCCESS, Exit(226, None, service_result="exit-code", ran=False), "environment_invalid"),
        (SUCCESS, Exit(None, 9), "succeeded"),
        (SUCCESS, Exit(None, None), "succeeded"),
        (FAILURE, Exit(81, None), "mask_invalid"),
        (FAILURE, Exit(None, 11), "mask_invalid"),  # it had explained itself before it crashed on its way out
        ({"outcome": "failed", "error": None}, Exit(1, None), "error"),
        ({"outcome": "failed", "error": {"code": "of_a_later_honed", "message": ""}}, Exit(1, None), "error"),
        (None, Exit(0, None), "killed"),
        (None, Exit(1, None), "killed"),
        (None, Exit(None, 9), "killed"),
        (None, Exit(None, None), "killed"),
        ([], Exit(0, None), "killed"),
        # The cause comes from systemd or the OOM killer where the worker could write no result itself.
        (None, Exit(None, 6, service_result="watchdog"), "stalled"),
        (None, Exit(None, 9, service_result="oom-kill"), "out_of_memory"),
        (None, Exit(None, 9, was_out_of_memory=True), "out_of_memory"),
        (None, Exit(None, 9, service_result="timeout"), "killed"),
        (None, Exit(226, None, service_result="exit-code", ran=False), "environment_invalid"),
        (None, Exit(None, None, ran=False), "environment_invalid"),
        (FAILURE, Exit(None, 6, service_result="watchdog"), "mask_invalid"),
    ],
)
def test_the_outcome_of_result_and_exit(tmp_path: Path, result: Any, ended: Exit, code: str) -> None:
    path = tmp_path / "result.json"
    if result is not None:
        path.write_text(json.dumps(result))
    outcome = judge(PersonPath.of(path, 3), ended)
    assert outcome.code == code
    assert (outcome.error is None) == (code == "succeeded")


@pytest.mark.parametrize(
    ("ended", "remark"),
    [
        (Exit(0, None), "the loss rose"),
        (Exit(None, None), "the loss rose"),
        (Exit(None, 11), "the loss rose; its worker was killed by SIGSEGV after it had finished"),
        (
            Exit(None, None, service_result="node-lost"),
            "the loss rose; its worker's end was recorded as node-lost after it had finished",
        ),
        (Exit(3, None), "the loss rose; its worker exited with status 3 after it had finished"),
    ],
)
def test_an_end_after_the_result_is_remarked(tmp_path: Path, ended: Exit, remark: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**SUCCESS, "remark": "the loss rose"}))
    assert judge(PersonPath.of(path, 3), ended).remark == remark


def test_a_success_without_its_output_is_none(tmp_path: Path) -> None:
    job_dir = tmp_path / "jobs/1"
    path = job_dir / "attempts/1/result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**SUCCESS, "artifacts": {"output_dir": str(job_dir / "output")}}))
    assert judge(PersonPath.of(path, 3), Exit(None, 11)).code == "killed"
    (job_dir / "output").mkdir()
    assert judge(PersonPath.of(path, 3), Exit(None, 11)).code == "succeeded"


@pytest.mark.parametrize("code", ["precision_mismatch", "loss_mismatch"])
@pytest.mark.parametrize(("step", "is_worth"), [(None, True), (0, True), (3, False)])
def test_another_backend_is_worth_it_before_a_step_is_trained(code: str, step: int | None, is_worth: bool) -> None:
    outcome = Outcome(code, BY_CODE[code]("m"), step=step)
    assert outcome.is_worth_another_backend is is_worth


def test_a_torn_result_is_none(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"outcome": "succ')
    assert judge(PersonPath.of(path, 3), Exit(0, None)).code == "killed"


def test_what_a_result_has_that_nobody_could_write_down_is_taken_out_or_it_is_none(tmp_path: Path) -> None:
    """Python's JSON reader accepts lone surrogates, NaN and unlimited nesting; strict JSON writers do not."""
    path = tmp_path / "result.json"
    failure = {"code": "mask_invalid", "message": "\ud800 m", "hint": "h", "fix": {"\ud800": 1}}
    path.write_text(json.dumps({"outcome": "failed", "error": failure, "metrics": {"a\ud800": float("nan"), "b": 1.0}}))
    found = judge(PersonPath.of(path, 3), Exit(81, None))
    assert found.error is not None
    assert found.code == "mask_invalid"
    assert (found.error.fix, found.metrics) == ({"?": 1}, {"a?": None, "b": 1.0})
    json.dumps([found.error.as_dict(), found.metrics], ensure_ascii=False, allow_nan=False).encode()
    for depth in (60, 600, 100_000):
        path.write_text('{"outcome": "failed", "error": ' + '{"fix": ' * depth + "1" + "}" * depth + "}")
        assert judge(PersonPath.of(path, 3), Exit(81, None)).code == "killed"


def test_a_result_that_the_disk_keeps_back_is_not_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(SUCCESS))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "open", _fails)
        with pytest.raises(OSError, match="Input/output"):
            judge(PersonPath.of(path, 3), Exit(0, None))
        assert judge(PersonPath.of(path, 3), Exit(0, None), is_readable=False).code == "killed"


@pytest.mark.parametrize(("status", "words"), [(226, "could not start the worker (exit status 226)"), (None, "worker")])
def test_a_unit_that_did_not_start_is_reported_with_its_status_if_it_has_one(
    tmp_path: Path, status: int | None, words: str
) -> None:
    found = judge(PersonPath.of(tmp_path / "result.json", 3), Exit(status, None, ran=False)).error
    assert found is not None
    assert found.message.endswith(words)


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (2**62 - 1, 2**62 - 1), (2**62, None), (-1, None), ("3", None)])
def test_a_step_that_no_database_keeps_is_none(tmp_path: Path, step: Any, kept: int | None) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**SUCCESS, "step": step}))
    assert judge(PersonPath.of(path, 3), Exit(0, None)).step == kept


def test_a_result_says_the_phase_that_the_worker_was_in(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**FAILURE, "phase": "predictions", "needed_bytes": 4096}))
    outcome = judge(PersonPath.of(path, 3), Exit(81, None))
    assert (outcome.phase, outcome.needed_bytes) == ("predictions", 4096)
    path.write_text(json.dumps({**FAILURE, "needed_bytes": 2**62}))
    assert (
        judge(PersonPath.of(path, 3), Exit(81, None)).phase,
        judge(PersonPath.of(path, 3), Exit(81, None)).needed_bytes,
    ) == ("", 0)


def _fails(*_arguments: Any, **_keys: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_every_code_has_its_own_exit_status_and_a_sentence() -> None:
    workers_own = [error for error in BY_CODE.values() if error.code not in {"usage"}]
    statuses = [error.exit_status for error in workers_own]
    assert len(set(statuses)) == len(statuses)
    assert all(error.__doc__ for error in BY_CODE.values())


JOB = Job(
    id=1,
    name="j",
    submitted_at=0,
    source="j",
    uid=0,
    output_dir="/o",
    state=State.RUNNING,
    attempts=(Attempt(number=1, backend="transformers", started_at=0),),
)


def outcome_of(code: str) -> Outcome:
    return Outcome(code, None if code == "succeeded" else BY_CODE[code]("message"))


@pytest.mark.parametrize("stop", [None, *Stop])
@pytest.mark.parametrize("code", ["succeeded", *BY_CODE])
def test_every_outcome_leads_somewhere_that_there_is_a_move_to(code: str, stop: Stop | None) -> None:
    state, changes = destination(dataclasses.replace(JOB, stop=stop), outcome_of(code))
    assert state in MOVES[State.RUNNING]
    assert changes["stop"] is None
    if code == "succeeded":
        assert state is State.SUCCEEDED
    elif stop is Stop.CANCEL:
        assert (state, changes["outcome"]) == (State.CANCELLED, "cancelled")
    elif stop is Stop.HALVE:
        is_stopped = code in {"interrupted", "killed"}
        assert state is (State.CANCELLED if is_stopped else State.FAILED)
        assert (changes["outcome"], changes["error"] is None) == ("stopped_early" if is_stopped else code, is_stopped)
    elif code == "interrupted":
        assert state is (State.QUEUED if stop in {Stop.PREEMPT, Stop.SHUTDOWN} else State.HELD)
        assert "num_failures" not in changes, "a clean stop uses up no attempt"


def test_the_alert_counts_the_outcomes_of_failed_jobs_and_no_others() -> None:
    """The outcomes of finished jobs are those with which an attempt sends them to a final state."""
    ended: dict[State, set[str]] = {state: set() for state in State if state.is_final}
    for stop in (None, *Stop):
        for code in ("succeeded", *BY_CODE):
            for num_failures in (0, JOB.max_attempts):
                job = dataclasses.replace(JOB, stop=stop, num_failures=num_failures)
                state, changes = destination(job, outcome_of(code))
                if state.is_final:
                    ended[state].add(changes["outcome"])
    (group,) = yaml.safe_load((Path(__file__).parents[3] / "etc/prometheus/honed.rules.yml").read_text())["groups"]
    expression = next(rule["expr"] for rule in group["rules"] if rule["alert"] == "HonedJobsFailing")
    counted = [
        {code for codes in ended.values() for code in codes if bool(re.fullmatch(pattern, code)) is (operator == "=~")}
        for operator, pattern in re.findall(r'honed_jobs_finished_total\{outcome(=~|!~)"([^"]*)"\}', expression)
    ]
    assert counted == [ended[State.FAILED]] * 2
    assert ended[State.FAILED].isdisjoint(ended[State.SUCCEEDED] | ended[State.CANCELLED])


def test_transient_faults_are_tried_again_until_the_attempts_are_used_up() -> None:
    for num_failures, state in ((0, State.QUEUED), (1, State.QUEUED), (2, State.FAILED)):
        job = dataclasses.replace(JOB, num_failures=num_failures)
        assert destination(job, outcome_of("killed"))[0] is state
        assert destination(job, outcome_of("mask_invalid"))[0] is State.FAILED


def test_an_error_comes_through_a_file_as_it_was() -> None:
    from honed.system.error import from_dict

    for error_class in BY_CODE.values():
        error = error_class("what", hint="do")
        back: HonedError = from_dict(error.as_dict())
        assert (type(back), back.message, back.hint) == (type(error), "what", "do")
