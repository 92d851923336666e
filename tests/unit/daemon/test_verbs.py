"""The table of verbs: a stranger, a job's owner, root and a member of the administrators' group use each of them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from honed.cli import offline
from honed.daemon.loop import Daemon
from honed.daemon.verb import Right
from honed.job import change, refusals
from honed.job.arrival import Arrivals
from honed.job.job import Job, State
from honed.job.plan_file import PlanFile
from honed.spec.config import Config, JobsConfig, PolicyConfig
from honed.system import device
from honed.system.control import Parts, Request, Rows
from honed.system.error import NotPermittedError, SpecError, UsageError
from honed.system.layout import Layout
from honed.system.part import joined
from honed.system.personpath import PersonPath

STRANGER, OWNER, ADMINISTRATOR, MEMBER = 4243, 4242, 0, 4244
EVERYBODY = (STRANGER, OWNER, ADMINISTRATOR, MEMBER)
#: A group that exists everywhere, as policy.admin_group: root's.
ADMINISTRATORS = 0


@dataclass(frozen=True)
class Use:
    """One use of a verb for job 1, and the users who may make it."""

    right: Right
    may: tuple[int, ...]
    state: State = State.QUEUED
    arguments: dict[str, Any] = field(default_factory=lambda: {"id": "1"})
    becomes: State | None = None  #: the job's state after the verb
    sees: tuple[int, ...] = ()  #: the users whose answer names the job or file


OWN, THEIRS = (OWNER, ADMINISTRATOR, MEMBER), (ADMINISTRATOR, MEMBER)
READS, CHANGES = Use(Right.ANYBODY, OWN, sees=OWN), Use(Right.OWNER, OWN)
FILE = {"name": "a.json", "data": base64.b64encode(b"{}").decode()}
REFUSED = "bad-secret.json"
USES = {
    "list": Use(Right.ANYBODY, EVERYBODY, arguments={}, sees=OWN),
    "numbers": Use(Right.ANYBODY, EVERYBODY, arguments={}),
    "names": Use(Right.ANYBODY, EVERYBODY, arguments={}, sees=OWN),
    "overview": Use(Right.ANYBODY, EVERYBODY, arguments={}, sees=OWN),
    "show": READS,
    "glance": READS,
    "predictions": Use(Right.ANYBODY, OWN),
    "losses": Use(Right.ANYBODY, OWN),
    "group": Use(Right.ANYBODY, OWN, arguments={"id": "9"}, sees=OWN),
    "accepted": Use(Right.ANYBODY, EVERYBODY, arguments={"id": "secret.json", "number": 1}, sees=OWN),
    "refusal": Use(Right.ANYBODY, EVERYBODY, arguments={"id": REFUSED}, sees=OWN),
    "refused": Use(Right.ANYBODY, EVERYBODY, arguments={}, sees=OWN),
    "status": Use(Right.ANYBODY, EVERYBODY, arguments={}),
    "metrics": Use(Right.ANYBODY, EVERYBODY, arguments={}),
    "submit": Use(Right.ANYBODY, (ADMINISTRATOR,), arguments=FILE),  # incoming/ is closed to the others
    "prune": Use(Right.ANYBODY, OWN, State.FAILED, {"ids": ["1"], "dry_run": False}),
    "pruned": Use(Right.ANYBODY, EVERYBODY, State.FAILED, {"ids": [1]}),
    "cancel": Use(Right.OWNER, OWN, becomes=State.CANCELLED),
    "hold": Use(Right.OWNER, OWN, becomes=State.HELD),
    "release": Use(Right.OWNER, OWN, State.HELD, becomes=State.QUEUED),
    "requeue": Use(Right.OWNER, OWN, State.FAILED, becomes=State.QUEUED),
    "edit": Use(Right.OWNER, OWN, arguments={"id": "1", "data": FILE["data"]}),
    "edited": CHANGES,
    "pin": CHANGES,
    "unpin": CHANGES,
    "pause": Use(Right.ADMINISTRATOR, THEIRS, arguments={}),
    "resume": Use(Right.ADMINISTRATOR, THEIRS, arguments={}),
    "drain": Use(Right.ADMINISTRATOR, THEIRS, arguments={"id": "cpu"}),
    "undrain": Use(Right.ADMINISTRATOR, THEIRS, arguments={"id": "cpu"}),
    "reserve": Use(Right.ADMINISTRATOR, THEIRS, arguments={"id": "cpu", "job": "1"}),
    "unreserve": Use(Right.ADMINISTRATOR, THEIRS, arguments={"id": "cpu"}),
}


@pytest.fixture
def honed(tmp_path: Path) -> Iterator[Daemon]:
    config = Config(jobs=JobsConfig(runner="process"), policy=PolicyConfig(share_results=False))
    made = Daemon(Layout(tmp_path), config, probe=lambda _gpus: [device.cpu()])
    made._spool.recover()
    made._dispatch.backlog.recover()
    made._spool.incoming_dir.chmod(0o700)
    text = refusals.text_of(REFUSED, 900, OWNER, SpecError("no"), when="now", fate="Kept.", is_submission=False)
    refusals.make(made._spool.rejected, REFUSED, 900, os.geteuid(), text)
    (made._spool.rejected_dir / "900.json").write_text("{}")
    yield made
    made._close()


def admit(honed: Daemon, state: State) -> Job:
    """Accept job 1 of the owner, in a state."""
    spool = honed._spool
    arrivals = Arrivals(spool)
    (spool.incoming_dir / "secret.json").write_text("{}")
    claim = arrivals.claim(PersonPath.of(spool.incoming_dir / "secret.json", 1))
    assert claim is not None
    arrivals.copy(claim, max_bytes=100)
    common = {"name": "secret", "submitted_at": 1.0, "source": "secret.json", "uid": OWNER, "num_gpus": 0}
    common |= {"group": {"id": 9, "name": "sweep", "file": "sweep.yaml", "values": {}}}
    job = arrivals.admit(Job(id=claim.id, output_dir="/o", **common), claim, PlanFile({}))
    if state.is_final:
        job = spool.move(job, State.RUNNING)
    return job if state is State.QUEUED else spool.move(job, state)


def answered(honed: Daemon, verb: str, uid: int, arguments: dict[str, Any]) -> str:
    """Return an answer as JSON."""
    gids = frozenset({4000, ADMINISTRATORS} if uid == MEMBER else {4000})
    answer = honed._answers.answer(Request(verb, dict(arguments), uid, gids))
    answer = joined(answer.parts) if isinstance(answer, Parts) else answer
    return json.dumps(list(answer.rows) if isinstance(answer, Rows) else answer)


def test_a_job_that_says_it_is_of_a_sweep_hides_it_from_nobody(honed: Daemon) -> None:
    mine = admit(honed, State.QUEUED)
    arrivals = Arrivals(honed._spool)
    (honed._spool.incoming_dir / "theirs.json").write_text("{}")
    claim = arrivals.claim(PersonPath.of(honed._spool.incoming_dir / "theirs.json", 1))
    assert claim is not None
    arrivals.copy(claim, max_bytes=100)
    theirs = Job(
        id=claim.id,
        output_dir="/o",
        name="theirs",
        submitted_at=2.0,
        source="theirs.json",
        uid=STRANGER,
        group=mine.group,
    )
    arrivals.admit(theirs, claim, PlanFile({}))
    for uid, name in ((OWNER, "secret"), (STRANGER, "theirs")):
        for reference in ("9", "sweep"):
            found = json.loads(answered(honed, "group", uid, {"id": reference}))
            assert [job["name"] for job in found["jobs"]] == [name]


def closed(honed: Daemon) -> list[str]:
    """Return the reasons for which the one device is closed or reserved."""
    placement = honed._dispatch.placement
    [row] = placement.availability.rows(placement.all())
    return [closure["reason"] for closure in row["closures"]]


def test_the_table_has_these_verbs_with_these_rights(honed: Daemon) -> None:
    assert {name: verb.right for name, verb in honed._answers.verbs.items()} == {
        name: use.right for name, use in USES.items()
    }
    assert all(USES[name].right is Right.OWNER for name in change.CHANGES)
    assert set(offline.VERBS) == {
        *("list", "numbers", "names", "overview", "show", "glance", "predictions", "losses", "group", "accepted"),
        *("refusal", "refused", "pause", "resume", *change.CHANGES),
    }
    with pytest.raises(UsageError, match="unknown verb 'drop'"):
        answered(honed, "drop", ADMINISTRATOR, {})


@pytest.mark.parametrize("uid", EVERYBODY, ids=["a stranger", "the owner", "an administrator", "a member"])
@pytest.mark.parametrize("verb", USES)
def test_a_verb_is_answered_for_those_who_may_use_it_and_changes_nothing_for_the_others(
    honed: Daemon, caplog: pytest.LogCaptureFixture, verb: str, uid: int
) -> None:
    use = USES[verb]
    job = admit(honed, use.state)
    if uid in use.may:
        if verb in {"resume", "unpin", "undrain", "unreserve"}:
            opposite = verb.removeprefix("un").replace("resume", "pause")
            answered(honed, opposite, ADMINISTRATOR, use.arguments | ({"job": "1"} if opposite == "reserve" else {}))
        answer = answered(honed, verb, uid, use.arguments)
        assert ("secret" in answer) is (uid in use.sees) or (uid != STRANGER and not use.sees)
        after = honed._spool.job(job.id)
        if use.becomes is not None:
            assert after is not None
            assert after.state is use.becomes
        if verb in {"pin", "unpin"}:
            assert after is not None
            assert after.is_pinned is (verb == "pin")
        assert honed._spool.is_paused is (verb == "pause")
        assert closed(honed) == {"drain": ["drained"], "reserve": ["reserved"]}.get(verb, [])
        return
    with pytest.raises(NotPermittedError) as caught:
        answered(honed, verb, uid, use.arguments)
    assert honed._spool.job(job.id) == job
    assert not honed._spool.is_paused
    assert not closed(honed)
    match use.right:
        case Right.OWNER:
            assert caught.value.message == "job 1 belongs to another user"
            assert caught.value.hint == "only its owner, root and the administrators' group may change it"
            assert f"job 1: {verb} refused for user {uid}: it belongs to another user" in caplog.text
        case Right.ADMINISTRATOR:
            assert caught.value.message == f"{verb} affects everybody's jobs"
            assert caught.value.hint == "only root and policy.admin_group may use it"
