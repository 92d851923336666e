"""The users' caches of encoded rows: who may add to them, who goes first, and what is left of a user's data."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from honed.cli.pruning import Down
from honed.job import row_cache, tree
from honed.job.job import Attempt, Job, State
from honed.job.query import ANYBODY, Asker
from honed.job.retention import Limits, Wish, prune_rows
from honed.job.row_cache import FILES, VARIABLE, RowCache
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system.layout import Layout

ONE, TWO, THREE = ("0" * 31 + digit for digit in "123")
ANNA, BERTA = 4711, 4712


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "root")
    made.jobs_dir.mkdir(parents=True)
    return made


def cache_of(layout: Layout, max_bytes: int = 2**30, running: tuple[int, ...] = ()) -> RowCache:
    return RowCache(layout, lambda: max_bytes, working=lambda: dict.fromkeys(running, ANNA), now=Clock())


def job_of(layout: Layout, number: int, uid: int = ANNA, **spec: Any) -> Job:
    layout.job(number).dir.mkdir(exist_ok=True)
    layout.job(number).plan_path.write_text(json.dumps({"spec": spec}))
    return Job(number, f"job{number}", 0.0, "a.json", uid, "/srv/out", state=State.SUCCEEDED)


def encoded(layout: Layout, number: int, name: str, content: bytes = b"rows") -> Path:
    """Create the files of encoded rows in a job's directory, as its worker does."""
    directory = layout.job(number).rows_dir / name
    directory.mkdir(parents=True)
    for each in FILES:
        (directory / each).write_bytes(content)
    return directory


def made(cache: RowCache, layout: Layout, number: int, name: str, uid: int = ANNA, content: bytes = b"rows") -> Job:
    """Add an entry that a new job has made."""
    job = job_of(layout, number, uid)
    encoded(layout, number, name, content)
    cache.take(job, [name])
    return job


def reader_of(layout: Layout, number: int, name: str) -> Job:
    """Return a job whose worker has found an entry."""
    job = job_of(layout, number)
    linked = layout.job(number).rows_dir / name
    linked.mkdir(parents=True)
    for each in FILES:
        (linked / each).symlink_to(layout.rows_dir / str(ANNA) / name / each)
    return job


def held(layout: Layout) -> set[str]:
    return {str(path.parent.relative_to(layout.rows_dir)) for path in layout.rows_dir.glob("[0-9]*/*/MANIFEST.json")}


def test_an_entry_is_its_job_s_files_by_user_and_outlives_the_job_s_directory(layout: Layout) -> None:
    cache = cache_of(layout)
    made(cache, layout, 1, ONE)
    made(cache, layout, 2, ONE, BERTA, b"others")
    assert held(layout) == {f"{ANNA}/{ONE}", f"{BERTA}/{ONE}"}
    mine = layout.rows_dir / str(ANNA) / ONE
    assert all((mine / each).samefile(layout.job(1).rows_dir / ONE / each) for each in FILES)
    tree.remove(layout.job(1).rows_dir)
    assert (mine / FILES[0]).read_bytes() == b"rows"
    assert (cache.num_bytes(ANNA), cache.num_bytes()) == (12, 30)


def test_only_honed_may_write_and_only_the_user_may_enter(layout: Layout) -> None:
    cache = cache_of(layout)
    given = cache.environment(job_of(layout, 1))
    assert given == {VARIABLE: str(layout.rows_dir / str(ANNA))}
    assert oct(Path(given[VARIABLE]).stat().st_mode & 0o777) == "0o700"
    assert oct(layout.rows_dir.stat().st_mode & 0o777) == "0o711"


@pytest.mark.parametrize("plan", ["code", "replaced", "link", "damaged", "missing"])
def test_a_job_with_code_of_its_own_neither_reads_nor_adds(layout: Layout, plan: str) -> None:
    cache, job = cache_of(layout), job_of(layout, 1, trust_remote_code=plan == "code")
    encoded(layout, 1, ONE)
    path = layout.job(1).plan_path
    match plan:
        case "replaced":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(path, 4711, -1)
        case "link":
            path.rename(path.with_name("other"))
            path.symlink_to("other")
        case "damaged":
            path.write_text("{")
        case "missing":
            path.unlink()
    cache.take(job, [ONE])
    assert (cache.environment(job), held(layout)) == ({}, set())


@pytest.mark.parametrize("trick", ["link", "directory", "pipe", "rows", "name", "missing"])
def test_what_a_worker_puts_in_place_of_rows_is_not_taken(layout: Layout, trick: str, tmp_path: Path) -> None:
    cache, job, name = cache_of(layout), job_of(layout, 1), ONE
    directory, secret = encoded(layout, 1, ONE), tmp_path / "secret"
    secret.write_text("of another user")
    file = directory / FILES[0]
    match trick:
        case "link":
            file.unlink()
            file.symlink_to(secret)
        case "directory":
            directory.rename(tmp_path / "elsewhere")
            directory.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "rows":
            layout.job(1).rows_dir.rename(tmp_path / "elsewhere")
            layout.job(1).rows_dir.symlink_to(tmp_path / "elsewhere")
        case "name":
            name = "../rows/" + ONE
        case "missing":
            file.unlink()
    cache.take(job, [name])
    assert held(layout) == set()
    assert not list(layout.rows_dir.glob("*/.*.new"))


def test_rows_made_anew_replace_the_entry_and_the_same_ones_are_not_linked_again(layout: Layout) -> None:
    cache = cache_of(layout)
    made(cache, layout, 1, ONE, content=b"damaged")
    before = (layout.rows_dir / str(ANNA) / ONE).stat().st_ino
    cache.take(job_of(layout, 1), [ONE])  # resumed
    assert (layout.rows_dir / str(ANNA) / ONE).stat().st_ino == before
    made(cache, layout, 2, ONE)
    assert (layout.rows_dir / str(ANNA) / ONE / FILES[0]).read_bytes() == b"rows"
    assert cache.has_old


def test_a_job_that_has_succeeded_keeps_no_rows_of_its_own(layout: Layout, tmp_path: Path) -> None:
    cache = cache_of(layout)
    job = made(cache, layout, 1, ONE)
    cache.finish(job)
    assert not layout.job(1).rows_dir.exists()
    assert held(layout) == {f"{ANNA}/{ONE}"}
    kept = tmp_path / "kept"
    kept.mkdir()
    layout.job(1).rows_dir.symlink_to(kept)  # as its worker might
    cache.finish(job)
    assert not layout.job(1).rows_dir.is_symlink()
    tree.remove(row_cache.old_dir(layout))
    assert (kept.is_dir(), held(layout)) == (True, {f"{ANNA}/{ONE}"})


def test_an_entry_goes_with_the_last_job_that_used_it(layout: Layout) -> None:
    cache = cache_of(layout)
    made(cache, layout, 1, ONE)
    cache.take(reader_of(layout, 2, ONE), [ONE])
    again = cache_of(layout)  # after a restart
    again.forget([1])
    assert held(layout) == {f"{ANNA}/{ONE}"}
    again.forget([2])
    assert held(layout) == set()
    assert tree.remove(row_cache.old_dir(layout)).num_files > 0
    assert not list(layout.rows_dir.glob("**/*.arrow"))


def test_what_a_crash_leaves_is_removed_at_the_next_start(layout: Layout) -> None:
    cache = cache_of(layout)
    made(cache, layout, 1, ONE)
    made(cache, layout, 2, TWO)
    made(cache, layout, 3, THREE)
    mine = layout.rows_dir / str(ANNA)
    (mine / TWO / "USED").write_bytes(b"\0\0")
    (mine / f".{'4' * 32}.new").mkdir()
    again = cache_of(layout)
    again.forget_all_but({1})  # job 3 was pruned meanwhile
    assert [path.name for path in mine.iterdir()] == [ONE]
    assert again.has_old


def test_beyond_the_limit_the_largest_user_s_oldest_entry_goes_and_no_running_job_s(layout: Layout) -> None:
    cache = cache_of(layout, max_bytes=80, running=(1,))
    made(cache, layout, 1, ONE, content=b"x" * 10)
    made(cache, layout, 2, ONE, BERTA, content=b"x" * 8)
    made(cache, layout, 3, TWO, content=b"x" * 5)
    assert held(layout) == {f"{ANNA}/{ONE}", f"{BERTA}/{ONE}", f"{ANNA}/{TWO}"}
    made(cache, layout, 4, THREE, content=b"x" * 5)
    assert held(layout) == {f"{ANNA}/{ONE}", f"{BERTA}/{ONE}", f"{ANNA}/{THREE}"}


def test_a_user_whose_running_job_alone_exceeds_the_limit_takes_no_other_user_s_place(layout: Layout) -> None:
    cache = cache_of(layout, max_bytes=90, running=(3,))
    made(cache, layout, 1, ONE, BERTA, content=b"x" * 8)
    made(cache, layout, 2, TWO, content=b"x" * 5)
    made(cache, layout, 3, ONE, content=b"x" * 100)
    assert held(layout) == {f"{BERTA}/{ONE}", f"{ANNA}/{ONE}"}
    for number in range(4, 9):  # and they keep to their own share meanwhile
        made(cache, layout, number, f"{number}" * 32, BERTA, content=b"x" * 5)
    assert 24 < cache.num_bytes(BERTA) <= 45
    made(again := cache_of(layout, max_bytes=90), layout, 9, TWO, BERTA)  # its job has ended
    assert again.num_bytes(ANNA) == 0


def test_many_small_entries_of_one_user_take_no_other_user_s_place(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "MAX_ENTRIES", 4)
    cache = cache_of(layout)
    made(cache, layout, 1, ONE, BERTA, content=b"x" * 1000)
    for number in range(2, 9):
        made(cache, layout, number, f"{number}" * 32)
    assert f"{BERTA}/{ONE}" in held(layout)
    assert len(held(layout)) == 4


@pytest.mark.parametrize("end", ["the limit", "the maker is removed", "prune --rows"])
def test_an_entry_that_a_staged_job_has_found_stays_though_its_events_are_not_read_yet(
    layout: Layout, end: str
) -> None:
    cache = cache_of(layout, max_bytes=60, running=(2,))
    made(cache, layout, 1, ONE, content=b"x" * 10)
    reader_of(layout, 2, ONE)
    match end:
        case "the limit":
            made(cache, layout, 3, TWO, content=b"x" * 15)
        case "the maker is removed":
            cache.forget([1])
        case "prune --rows":
            assert cache.listed(uid=ANNA) == []
    assert f"{ANNA}/{ONE}" in held(layout)


def test_an_entry_whose_use_finds_no_room_on_the_disk_counts_all_the_same(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(layout, max_bytes=70)

    def full(*_arguments: Any, **_keys: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(RowCache, "_note", full)
        made(cache, layout, 1, ONE, content=b"x" * 10)
    assert cache.num_bytes() == 30
    made(cache, layout, 2, TWO, content=b"x" * 15)
    assert held(layout) == {f"{ANNA}/{TWO}"}


def test_a_limit_of_0_turns_it_off_and_removes_what_there_was(layout: Layout) -> None:
    made(cache_of(layout), layout, 1, ONE)
    cache = cache_of(layout, max_bytes=0)
    assert cache.environment(job_of(layout, 2)) == {}
    made(cache, layout, 2, TWO)
    cache.trim()
    assert held(layout) == set()


def test_a_person_prunes_their_own_rows_and_an_administrator_all(layout: Layout) -> None:
    cache = cache_of(layout, running=(3,))
    made(cache, layout, 1, ONE)
    made(cache, layout, 2, TWO, BERTA)
    made(cache, layout, 3, THREE)
    wish, anna = Wish(limits=Limits(max_count=0), rows=True), Asker(ANNA, is_administrator=False, reads_all=False)
    listed = prune_rows(cache, wish, anna, is_dry=True, now=0.0)
    assert listed == {"rows": [{"uid": ANNA, "key": ONE, "num_bytes": 12}], "is_measured": True}
    assert len(held(layout)) == 3
    prune_rows(cache, wish, anna, is_dry=False, now=0.0)
    assert held(layout) == {f"{BERTA}/{TWO}", f"{ANNA}/{THREE}"}
    prune_rows(cache, wish, ANYBODY, is_dry=False, now=0.0)
    assert held(layout) == {f"{ANNA}/{THREE}"}


def test_a_prune_while_honed_is_down_removes_the_job_s_rows(layout: Layout) -> None:
    spool = Spool(layout)
    (spool.dir / "seq").write_text("50\n")
    job = made(cache_of(layout), layout, 1, ONE)
    (spool.state_dir(State.SUCCEEDED) / "1.json").write_bytes(job.to_json())
    Down(spool, layout).ask("prune", ids=["1"], dry_run=False)
    assert not list(layout.rows_dir.glob("**/*.arrow"))


def test_rows_of_jobs_whose_workers_go_on_stay_while_honed_is_down(layout: Layout) -> None:
    spool, cache = Spool(layout), cache_of(layout)
    (spool.dir / "seq").write_text("50\n")
    names = [f"{number}" * 32 for number in range(1, 5)]
    running, staged, queued, done = (made(cache, layout, at + 1, name) for at, name in enumerate(names))
    running = replace(running, attempts=(Attempt(1, "transformers", 1.0),))
    staged = replace(staged, state=State.QUEUED, staged_at=1.0)
    for job, state in ((running, State.RUNNING), (staged, State.QUEUED), (queued, State.QUEUED), (done, done.state)):
        (spool.state_dir(state) / f"{job.id}.json").write_bytes(job.to_json())
    answer = Down(spool, layout).ask("prune", rows=True, keep=0, dry_run=False)
    assert {each["key"] for each in answer["rows"]} == set(names[2:])
    assert held(layout) == {f"{ANNA}/{name}" for name in names[:2]}
    assert not row_cache.old_dir(layout).exists()


def test_files_with_holes_take_nobody_s_place(layout: Layout) -> None:
    cache = cache_of(layout, max_bytes=2**20, running=(2,))
    made(cache, layout, 1, ONE)
    with (encoded(layout, 2, ONE) / FILES[0]).open("r+b") as file:
        file.truncate(2**40)
    cache.take(job_of(layout, 2, uid=ANNA + 1), [ONE])
    assert held(layout) == {f"{ANNA}/{ONE}", f"{ANNA + 1}/{ONE}"}
    assert cache.num_bytes() < 2**20
    assert cache_of(layout).num_bytes() == cache.num_bytes()


def test_two_jobs_that_made_the_same_rows_both_use_the_entry(layout: Layout) -> None:
    cache = cache_of(layout, running=(1,))
    made(cache, layout, 1, ONE)
    made(cache, layout, 2, ONE)
    cache.forget([2])
    assert held(layout)


def test_a_disk_that_takes_no_more_stops_neither_a_prune_nor_the_daemon(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(layout)
    made(cache, layout, 1, ONE)
    made(cache, layout, 2, ONE)

    def full(*_arguments: Any, **_keys: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(RowCache, "_note", full)
        cache.forget([1])
    with monkeypatch.context() as broken:
        broken.setattr(RowCache, "_set_aside", full)
        broken.setattr(row_cache, "MAX_ENTRIES", 0)
        cache.trim()  # does not try for ever
        cache.forget([2])
    cache_of(layout).forget_all_but(())
    assert not held(layout)


def test_the_default_is_on() -> None:
    assert Config().retention.max_row_bytes > 0
