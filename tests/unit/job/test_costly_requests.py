"""Requests and files that would keep honed busy for everybody: their cost does not depend on who makes them."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from honed.cli import joblog
from honed.daemon.housekeeper import Housekeeper
from honed.job import query, refusals, removal
from honed.job import spool as spools
from honed.job.database import Database
from honed.job.job import Attempt, Group, Job, State
from honed.job.query import ANYBODY, Asker, Choice
from honed.job.retention import Wish
from honed.job.spool import Spool
from honed.run.outcome import MAX_RESULT_BYTES, judge
from honed.run.runner import Exit
from honed.spec.config import Config
from honed.system import access, durable
from honed.system.control import Request
from honed.system.error import SpecError, UsageError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath

JOB = Job(
    7, "capitals", 0.0, "a.json", os.getuid(), "/o", state=State.FAILED, attempts=(Attempt(1, "transformers", 0),)
)
MANY = [f"no-{number}" for number in range(60_000)]


class Compared(str):
    """A text that counts its comparisons."""

    __slots__ = ()
    num = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.num += 1
        return str.__eq__(self, other)


def test_a_request_that_names_all_it_has_room_for_costs_a_job_no_more_than_one_name() -> None:
    Compared.num = 0
    choice = Choice.of({"names": MANY})
    assert not choice.has(replace(JOB, name=Compared("capitals")), ANYBODY)
    assert not Choice.of({"states": MANY}).has(JOB, ANYBODY)
    assert isinstance(Choice.of({"states": MANY}).states, frozenset)
    assert Compared.num < 10
    assert Choice.of({"names": [*MANY, "capitals"]}).has(JOB, ANYBODY)


def test_jobs_and_states_that_a_request_repeats_are_looked_up_once() -> None:
    wish = Wish.of({"ids": ["7", "qa", "7"] * 1000, "states": ["failed"] * 1000})
    assert (wish.references, len(wish.states)) == (("7", "qa"), 1)


def left(layout: Layout, num_bytes: int) -> PersonPath:
    """A result of job 7 of so many bytes."""
    path = layout.job(7).attempt(1).result_path
    path.parent.mkdir(parents=True)
    told = {"outcome": "failed", "metrics": {"eval_loss": 4.5}, "artifacts": {"output_dir": "/elsewhere"}, "fill": ""}
    told["fill"] = "x" * (num_bytes - len(json.dumps(told)))
    path.write_text(json.dumps(told))
    return PersonPath.of(path, 3)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_result_is_not_read_for_an_answer(tmp_path: Path, is_large: bool) -> None:
    """Its owner could have each answer take ten seconds, with 16 MiB of brackets."""
    spool = Spool(Layout(tmp_path))
    left(spool.layout, query.MAX_TOLD_BYTES + is_large)
    durable.finish(spool.adding(JOB))
    shown = query.show(spool, spool.layout, "7")
    assert shown["metrics"].get("eval_loss") == (None if is_large else 4.5)
    assert shown["artifacts"]["output_dir"] == ("/o" if is_large else "/elsewhere")


def test_the_jobs_of_a_sweep_are_told_one_at_a_time(tmp_path: Path) -> None:
    """Of each, a result is read, which may take milliseconds: others are answered between them."""
    spool = Spool(Layout(tmp_path))
    for number in (7, 8, 9):
        group: Group = {"id": 6, "name": "s", "file": "s.yaml", "values": {"seed": number}}
        durable.finish(spool.adding(replace(JOB, id=number, state=State.SUCCEEDED, group=group)))
    left(spool.layout, 1000)
    parts = list(query.grouped(spool, spool.layout, "s"))
    assert [[job["id"] for job in part.get("jobs", [])] for part in parts if part] == [[], [7], [8], [9], []]
    shown = query.group(spool, spool.layout, "6")
    assert ([job["id"] for job in shown["jobs"]], shown["best"]) == ([7, 8, 9], 7)


def test_a_result_is_judged_up_to_a_size(tmp_path: Path) -> None:
    path = left(Layout(tmp_path), MAX_RESULT_BYTES + 1)
    error = judge(path, Exit(0, None)).error
    assert error is not None
    assert "File too large" in error.message


def test_checkpoints_are_set_aside_under_a_name_that_nobody_can_take_before(tmp_path: Path) -> None:
    """A search for a free name among those that a worker has made may take seconds."""
    layout = Layout(tmp_path)
    files = layout.job(7)
    files.checkpoints_dir.mkdir(parents=True)
    taken = [files.dir / f".checkpoints.{number}.old" for number in range(1, 100)]
    for path in taken:
        path.symlink_to("/")
    assert removal.set_aside_checkpoints(layout, 7)
    (made,) = set(files.dir.glob(removal.OLD_CHECKPOINTS)) - set(taken)
    assert made.is_dir()
    assert len(made.name) > 20
    assert removal.remove_checkpoints(layout, 7).problem is None
    assert not list(files.dir.iterdir())


def test_a_directory_of_many_names_is_not_searched_for_checkpoints_by_the_daemon(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (directory := layout.job(7).dir).mkdir(parents=True)
    assert not removal.may_have_set_aside(layout, 7)
    assert not removal.may_have_set_aside(layout, 8)
    (directory / ".checkpoints.3.old").mkdir()
    assert removal.may_have_set_aside(layout, 7)
    (directory / ".checkpoints.3.old").rmdir()
    for number in range(removal.MAX_SEARCHED):
        (directory / str(number)).touch()
    assert removal.may_have_set_aside(layout, 7), "the removal process looks"


def test_a_workers_output_is_printed_a_piece_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner chooses its size: 1 TiB of a sparse file, say, for root to read."""
    monkeypatch.setattr(joblog, "_BITE_BYTES", 8)
    files = Layout(tmp_path).files(7).attempt(1)
    log = Path(str(files.log_path))
    log.parent.mkdir(parents=True)
    log.write_bytes(b"one\ntwo\nthree\n" + b"x" * 20 + b"\nlast\nhal")
    read = joblog._read_raw(files, 0)
    assert capsys.readouterr().out.split("\n") == ["one", "two", "three", "x" * 8, "x" * 8, "x" * 4, "last", ""]
    with log.open("ab") as file:
        file.write(b"f\n")
    assert joblog._read_raw(files, read) == log.stat().st_size
    assert capsys.readouterr().out == "half\n"


def test_only_entries_of_honed_systemd_and_its_own_unit_are_a_jobs_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can write HONED_JOB=7 into the journal, but not the fields that begin with _."""
    monkeypatch.setattr(joblog, "_WRITERS", ("nobody", "root", "no-such-user"))
    nobody = access.person("nobody")
    assert nobody is not None
    clauses = [clause.split() for clause in " ".join(joblog.journal_command(7)[1:]).split(" + ")]
    assert [[word for word in clause if word.startswith("_")] for clause in clauses] == [
        [f"_UID={nobody.uid}", "_UID=0"],
        ["_SYSTEMD_UNIT=honed-job@7.service"],  # the stacks of a worker that hung: its unit runs as its submitter
        ["_PID=1"],
    ]


def test_of_refused_files_of_one_name_the_newest_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can have ten thousand refused files of that name: an answer took a second."""
    monkeypatch.setattr(query, "MAX_OF_A_NAME", 3)
    spool, mine = Spool(Layout(tmp_path)), Asker(70_001, is_administrator=False, reads_all=False)

    def refuse(number: int, uid: int) -> None:
        fate = f"The file is kept as rejected/{number}.json."
        error = SpecError(f"the fault of {number}")
        text = refusals.text_of("a.json", number, uid, error, when="now", fate=fate, is_submission=True)
        path = refusals.make(spool.rejected, "a.json", number, os.geteuid(), text)
        os.utime(str(path), (number, number))

    def told(number: int | None = None) -> str:
        found = query.refusal(spool, "a.json", mine, number=number)
        return "" if found is None else found["reason"]

    refuse(1, 70_001)
    refuse(2, 70_001)
    refuse(3, 70_002)
    refuse(4, 70_002)
    assert "the fault of 2" in told()
    refuse(5, 70_002)
    assert told() == ""
    assert "the fault of 1" in told(1), "an arrival's own is found at once"
    assert told(5) == told(77) == ""
    refuse(6, 70_001)
    assert "the fault of 6" in told()
    with pytest.raises(ValueError, match="not a name below"):
        query.refusal(spool, "../../etc/a.json", mine, number=1)


def test_a_pruned_job_is_read_for_its_name_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can ask for names of no job, and ten thousand pruned ones are remembered."""
    spool, read = Spool(Layout(tmp_path)), list[str]()
    read_pruned = spools._read_pruned
    monkeypatch.setattr(spools, "_read_pruned", lambda path: read.append(path.name) or read_pruned(path))

    def prune(number: int, name: str) -> None:
        spool.pruned.dir.mkdir(exist_ok=True)
        path = spool.pruned.path(number, State.FAILED)
        path.write_bytes(replace(JOB, id=number, name=name).to_json())

    def number_of(name: str) -> int | None:
        return None if (job := spool.pruned.get(name)) is None else job.id

    prune(1, "qa")
    prune(2, "facts")
    assert number_of("no-such-job") is None
    assert sorted(read) == ["1.failed.json", "2.failed.json"]
    read.clear()
    assert number_of("no-such-job") is None
    assert read == []
    assert number_of("qa") == 1
    prune(3, "qa")
    assert number_of("qa") == 3
    spool.pruned.forget({1, 3})
    assert number_of("qa") is None
    assert (number_of("2"), number_of("facts")) == (2, 2)


def test_a_request_asks_for_a_thousand_removals_at_most(tmp_path: Path) -> None:
    """Each is looked for on the disk; honectl asks for a hundred."""
    spool = Spool(Layout(tmp_path))
    with contextlib.closing(Database(spool.layout.database_path)) as database:
        keeper = Housekeeper(spool.layout, Config(), spool, database, list)
        assert len(keeper.pruned(Request("pruned", {"ids": list(range(1000))}, 0), ANYBODY)) == 1000
        with pytest.raises(UsageError, match="at most 1000"):
            keeper.pruned(Request("pruned", {"ids": list(range(1001))}, 0), ANYBODY)
        keeper.close()
