"""Removable and protected files; and a removal that can be killed between any two operations."""

from __future__ import annotations

import argparse
import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.cli import pruning
from honed.daemon import housekeeper
from honed.daemon.housekeeper import Housekeeper
from honed.job import refusals, removal, retention
from honed.job import tree as trees
from honed.job.arrival import Arrivals
from honed.job.database import Database
from honed.job.job import Job, State
from honed.job.query import Asker
from honed.job.retention import DAY_SEC, Item, Limits, Needs
from honed.job.spool import Spool
from honed.spec.config import Config, RetentionConfig
from honed.system.control import Parts, Request
from honed.system.error import SpecError, UsageError
from honed.system.layout import Layout
from honed.system.personpath import PersonPath
from unit.job.test_spool import Crash, Faults

NOW = 1_000_000_000.0
ITEMS = [Item(number, NOW - number * DAY_SEC, 100) for number in range(5)]


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        (Limits(), []),
        (Limits(max_age_sec=2.5 * DAY_SEC), [4, 3]),
        (Limits(max_count=1), [4, 3, 2, 1]),
        (Limits(max_count=0), [4, 3, 2, 1, 0]),
        (Limits(max_bytes=250), [4, 3, 2]),
        (Limits(max_bytes=99), [4, 3, 2, 1, 0]),
        (Limits(max_age_sec=3.5 * DAY_SEC, max_count=3), [4, 3]),
    ],
)
def test_what_lies_beyond_any_limit_goes_the_oldest_first(limits: Limits, gone: list[int]) -> None:
    assert [item.key for item in retention.excess(ITEMS, limits, now=NOW)] == gone


def entry(spool: Spool, number: int, state: State, **keys: Any) -> Job:
    """Create a job with a directory as an attempt leaves it."""
    files = spool.layout.job(number)
    directory = str(files.output_dir)
    plan = keys.pop("plan", {})
    job = Job(
        number, f"job{number}", 0.0, "a.json", os.getuid(), keys.pop("output_dir", directory), state=state, **keys
    )
    for path in (files.output_dir, files.checkpoints_dir / "checkpoint-1", files.attempt(1).dir):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x" * 1000)
    files.plan_path.write_text(json.dumps({"spec": {}, **plan}))
    (spool.state_dir(state) / f"{number}.json").write_bytes(job.to_json())
    spool.note(job)
    return job


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(Layout(tmp_path / "root"))
    (made.dir / "seq").write_text("50\n")
    made.recover()
    return made


def test_what_an_unfinished_or_pinned_job_needs_stays_by_name_by_number_and_by_path(spool: Spool) -> None:
    jobs = [entry(spool, number, State.SUCCEEDED) for number in (1, 2, 3, 4)]
    path = str(spool.layout.job(3).output_dir / "merged")
    jobs += [
        entry(spool, 11, State.QUEUED, depends_on=("1",), inputs={"x": 2}),
        entry(spool, 12, State.RUNNING, plan={"may_read": {"paths": [path]}}),
        entry(spool, 13, State.SUCCEEDED, is_pinned=True, plan={"spec": {"adapter": path}}),
        entry(spool, 14, State.FAILED, output_dir=str(spool.layout.job(4).dir / "mine")),
        entry(spool, 15, State.FAILED, depends_on=("14",)),
    ]
    needed = retention.needed_of(Needs(spool, spool.layout), spool, jobs)
    assert set(needed) == {1, 2, 3, 4}
    assert needed[1] == "job 11 (job11), which is queued, needs it"
    assert needed[4] == "the output of job 14 (job14) is in its directory"
    assert retention.why_kept(jobs[4], needed) == "it is queued"
    assert retention.why_kept(jobs[6], needed) == "it is pinned"
    assert retention.why_kept(jobs[7], needed) is None


def test_what_the_others_need_is_looked_up_one_by_one_between_other_answers(spool: Spool) -> None:
    for number in (1, 2):
        entry(spool, number, State.SUCCEEDED)
    path = str(spool.layout.job(1).output_dir / "merged")
    for number in range(3, 8):
        entry(spool, number, State.HELD, plan={"spec": {"base_model": path if number == 7 else "elsewhere"}})
    keeper = Housekeeper(spool.layout, Config(), spool, Database(spool.layout.database_path), list)
    us = Asker(os.getuid(), is_administrator=False, reads_all=False)
    answer = keeper.prune(Request("prune", {"ids": ["1", "2"], "dry_run": False}, us.uid), us)
    assert isinstance(answer, Parts)
    *looks, last = answer.parts
    assert looks == [None] * 5
    assert last is not None
    assert ([row["id"] for row in last["jobs"]], [row["id"] for row in last["kept"]]) == ([2], [1])
    assert [job.id for job in spool.catalog.ended()] == [1]
    for wrong in ({"ids": ["9"]}, {}):
        with pytest.raises(UsageError):
            keeper.prune(Request("prune", wrong, us.uid), us)


def test_what_a_sweep_compares_its_jobs_with_stays_until_it_has_ended(spool: Spool) -> None:
    def group(number: int, **keys: Any) -> dict[str, Any]:
        return {"id": number, "name": "s", "file": "s.yaml", "values": {}, **keys}

    halved, plain = group(1, halving={"min_steps": 2, "eta": 2}), group(2)
    jobs = [
        entry(spool, 1, State.CANCELLED, group=halved),
        entry(spool, 2, State.QUEUED, group=halved),
        entry(spool, 3, State.SUCCEEDED, group=plain),
        entry(spool, 4, State.QUEUED, group=plain),
        replace(entry(spool, 5, State.SUCCEEDED, group=halved), uid=os.getuid() + 1),
    ]
    needed = retention.needed_of(Needs(spool, spool.layout), spool, jobs)
    assert needed == {1: "job 2 (job2) of its sweep, which is queued, is compared with it"}
    ended = [replace(job, state=State.SUCCEEDED) for job in jobs]
    assert retention.needed_of(Needs(spool, spool.layout), spool, ended) == {}


def test_a_removal_leads_nowhere_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x" * 10)
    tree = tmp_path / "jobs" / "7"
    (tree / "deep/er").mkdir(parents=True)
    (tree / "deep/er/file").write_bytes(b"x" * 100)
    (tree / "link").symlink_to(outside)
    (tree / "deep/name").hardlink_to(outside / "precious")
    os.mkfifo(tree / "pipe")
    (tree / "deep").chmod(0o500)
    assert trees.measure(tree).num_bytes < 100 + 200  # the link's own few bytes, and nothing behind it
    count = trees.remove(tree)
    assert (count.num_files, count.problem) == (4, None)
    assert not tree.exists()
    assert (outside / "precious").read_bytes() == b"x" * 10
    assert trees.remove(tree) == trees.Count()


def test_staged_copies_go_with_their_job_unless_another_names_them(spool: Spool) -> None:
    own, shared = (spool.layout.staged_dir / (digit * 16) for digit in "ab")
    for place in (own, shared):
        (place / "0").mkdir(parents=True)
    spec = {"base_model": str(own / "0/model"), "datasets": [{"path": str(shared / "0/rows.jsonl")}]}
    entry(spool, 2, State.HELD, plan={"spec": {"datasets": spec["datasets"]}})
    spool.prune(entry(spool, 1, State.FAILED, plan={"spec": spec}))
    assert removal.remove_job(spool, spool.layout, 1).problem is None
    assert (own.exists(), shared.exists()) == (False, True)


def give_up(spool: Spool, number: int) -> None:
    """Remove a job as the daemon does, except for its rows in the database."""
    if (job := spool.job(number)) is not None:
        spool.prune(job)
    removal.remove_job(spool, spool.layout, number)


def after_a_crash(root: Path) -> Spool:
    """Do what the next daemon does after a crash, except for the database, and return its spool."""
    spool = Spool(Layout(root))
    spool.recover()
    Arrivals(spool).recover()
    for number in spool.pruned.ids():
        removal.remove_job(spool, spool.layout, number)
    for path in spool.layout.jobs_dir.iterdir():
        removal.remove_checkpoints(spool.layout, int(path.name))
    return spool


def test_a_kill_between_any_two_operations_leaves_a_job_whole_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    point, seen = 0, set()
    while True:
        point += 1
        root = tmp_path / str(point)
        spool = Spool(Layout(root))
        entry(spool, 1, State.SUCCEEDED)
        other = entry(spool, 2, State.FAILED)
        num_files = len(list(spool.layout.job(1).dir.rglob("*")))
        faults.num_seen, faults.crash_at = 0, point
        try:
            give_up(spool, 1)
            spool.annotate(other, are_checkpoints_pruned=True)
            removal.set_aside_checkpoints(spool.layout, 2)
            removal.remove_checkpoints(spool.layout, 2)
        except Crash:
            finished = False
        else:
            finished = True
        faults.crash_at = None
        spool.close()
        again = after_a_crash(root)
        is_there = again.job(1) is not None
        seen.add(is_there)
        assert again.layout.job(1).dir.exists() == is_there
        assert len(list(again.layout.job(1).dir.rglob("*"))) == (num_files if is_there else 0)
        kept = again.job(2)
        assert kept is not None
        has_checkpoints = (again.layout.job(2).checkpoints_dir / "checkpoint-1/file").exists()
        assert has_checkpoints or (kept.are_checkpoints_pruned and not again.layout.job(2).checkpoints_dir.exists())
        assert not list(again.layout.job(2).dir.glob(removal.OLD_CHECKPOINTS))
        (again.dir / "seq").unlink(missing_ok=True)
        put = again.incoming_dir / "next.json"
        put.write_text("{}")
        claim = Arrivals(again).claim(PersonPath.of(put, 1))
        assert claim is not None
        assert claim.id == 3
        again.close()
        if finished:
            break
    assert (point > 20, seen) == (True, {True, False})


def nest(path: Path, depth: int) -> None:
    """Nest directories below a path, deeper than a path's text can be."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below_fd = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below_fd
    os.close(os.open("deepest", os.O_CREAT, dir_fd=fd))
    os.close(fd)


def test_a_tree_of_any_depth_and_width_is_measured_and_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name, depth in (("deep", 5000), ("deep-too", 1200)):
        (tree / name).mkdir(parents=True)
        nest(tree / name, depth)
    (tree / "wide").mkdir()
    for number in range(5000):
        (tree / f"wide/{number}").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6, before[1]))  # noqa: PTH208
    try:
        assert trees.measure(tree).num_files == 5002
        assert trees.remove(tree) == trees.Count(0, 5002)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not tree.exists()


def test_a_directory_that_is_moved_meanwhile_leads_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who moves a directory that is being emptied would have honed go on in the one above its new place."""
    (tmp_path / "tree/inner/file").mkdir(parents=True)
    (tmp_path / "elsewhere/inner").mkdir(parents=True)
    (tmp_path / "elsewhere/precious").touch()
    unlink = os.rmdir

    def move(name: str, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        if name == "file":
            (tmp_path / "tree/inner").rename(tmp_path / "elsewhere/inner")

    monkeypatch.setattr(os, "rmdir", move)
    assert "moved meanwhile" in str(trees.remove(tmp_path / "tree").problem)
    assert (tmp_path / "elsewhere/precious").exists()


def test_a_flood_of_refused_files_is_removed_after_a_while(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_REJECTED", 2)
    for number in range(4):
        (spool.rejected_dir / f"{number}.yaml").touch()
    database = Database(spool.layout.database_path)
    keeper = Housekeeper(spool.layout, Config(), spool, database, list)
    keeper.reload(Config())
    for _ in range(20):
        keeper.tend()
    assert len(list(spool.rejected_dir.iterdir())) == 2
    keeper.close()
    database.close()


def refusal_of(spool: Spool, number: int, uid: int, *, is_submission: bool) -> None:
    """Leave a refused file of a user, one second younger than that of the number before, with its reason."""
    kept = spool.rejected_dir / f"{number}.yaml"
    kept.touch()
    if not is_submission:
        os.chown(kept, uid, -1)
    text = refusals.text_of(
        f"job{number}.yaml",
        number,
        uid,
        SpecError("no"),
        when="now",
        fate=f"The file is kept as rejected/{kept.name}.",
        is_submission=is_submission,
    )
    (spool.rejected_dir / f"job{number}.yaml.reason").write_text(text)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("is_submission", [False, True])
def test_refused_files_of_one_user_push_out_none_of_another(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, is_submission: bool
) -> None:
    """Somebody who has many files refused, the newest of all, loses the oldest of them; the others keep theirs."""
    monkeypatch.setattr(retention, "MAX_REJECTED", 5)
    alice, mallory = 12345, 12346
    for number in (1, 2):
        refusal_of(spool, number, alice, is_submission=is_submission)
    for number in range(3, 20):
        refusal_of(spool, number, mallory, is_submission=is_submission)
    database = Database(spool.layout.database_path)
    keeper = Housekeeper(spool.layout, Config(), spool, database, list)
    keeper.reload(Config())
    for _ in range(20):
        keeper.tend()
    left = [reason for path in refusals.listed(spool.rejected) if (reason := refusals.read(path)) is not None]
    kept = {path.name for path in spool.rejected_dir.iterdir() if path.suffix == ".yaml"}
    assert [reason.uid for reason in left].count(alice) == 2
    assert {"1.yaml", "2.yaml"} <= kept
    assert (len(left), len(kept)) == (5, 5)
    keeper.close()
    database.close()


def test_a_number_of_items_is_divided_among_their_users() -> None:
    """The greedy lose their oldest; who has no more than a share loses none, however old."""
    items = [Item(number, NOW + number, uid=uid) for number, uid in enumerate([1, 2, 2, 3, 3, 3, 3, 3, 3])]
    limits = Limits(max_count=6, is_divided=True)
    assert sorted(item.key for item in retention.excess(items, limits, now=NOW)) == [3, 4, 5]
    assert retention.excess(items, replace(limits, max_count=9), now=NOW) == []
    many = [Item(uid, NOW + uid, uid=uid) for uid in range(9)]
    assert [item.key for item in retention.excess(many, limits, now=NOW)] == [0, 1, 2]


def test_a_clock_that_was_set_ages_nothing(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that boots in 2035, until its clock is corrected, must not delete jobs as older than thirty days."""
    layout = spool.layout
    entry(spool, 1, State.SUCCEEDED)
    ticks, wall = [0.0], [spool.changed_at(Job(1, "", 0, "", 0, "", state=State.SUCCEEDED))]
    monkeypatch.setattr(housekeeper, "INTERVAL_SEC", 100.0)
    config = Config(retention=RetentionConfig(max_job_age_days=30))
    database = Database(layout.database_path)
    keeper = Housekeeper(layout, config, spool, database, list, clock=lambda: ticks[0], now=lambda: wall[0])

    def pass_by(seconds: float, *, jump: float = 0.0) -> None:
        ticks[0] += seconds
        wall[0] += seconds + jump
        for _ in range(20):
            keeper.tend()

    for _ in range(2):
        pass_by(200, jump=10 * 365 * DAY_SEC)
        assert spool.job(1) is not None
        pass_by(200)
        assert spool.job(1) is not None
        pass_by(200, jump=-10 * 365 * DAY_SEC)
        pass_by(200)
        assert spool.job(1) is not None
    pass_by(200, jump=365 * DAY_SEC)
    pass_by(28 * DAY_SEC)
    assert spool.job(1) is not None
    pass_by(3 * DAY_SEC)
    assert spool.job(1) is None
    keeper.close()
    database.close()


def test_ages_and_sizes_are_written_as_people_do() -> None:
    assert (pruning.span("30d"), pruning.span("1.5h"), pruning.span("2W")) == (30 * DAY_SEC, 5400, 14 * DAY_SEC)
    assert (pruning.size("200G"), pruning.size("1.5MiB"), pruning.size("7")) == (200 * 2**30, 3 * 2**19, 7)
    for wrong in ("30", "d", "-1d", "1y"):
        with pytest.raises(argparse.ArgumentTypeError):
            pruning.span(wrong)
    with pytest.raises(argparse.ArgumentTypeError):
        pruning.size("many")
