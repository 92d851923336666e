"""The spool: the place of each file is its state, through every crash."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.job import query, refusals, retention
from honed.job import spool as spool_module
from honed.job.arrival import Arrivals, Claim, drop
from honed.job.job import MOVES, Attempt, Job, State
from honed.job.plan_file import PlanFile
from honed.job.spool import Spool
from honed.system.error import EnvironmentInvalidError, HonedError, SpecError
from honed.system.layout import Layout
from honed.system.part import joined
from honed.system.personpath import PersonPath

MAX_BYTES = 1000
#: A user who owns no file here.
SUBMITTER = 12345


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(Layout(tmp_path))
    yield made
    made.close()


def put(spool: Spool, name: str, text: str = "{}") -> Path:
    path = spool.incoming_dir / name
    path.write_text(text)
    return path


def job_of(claim: Claim, **changes: Any) -> Job:
    return Job(id=claim.id, name=claim.title, submitted_at=1.0, source=claim.name, uid=0, output_dir="/o", **changes)


def accept(spool: Spool, name: str = "a.json") -> Job:
    claim = Arrivals(spool).claim(PersonPath.of(put(spool, name), 1))
    assert claim is not None
    Arrivals(spool).copy(claim, max_bytes=MAX_BYTES)
    return Arrivals(spool).admit(job_of(claim), claim, PlanFile({"spec": {}}))


def test_an_accepted_arrival_is_one_entry_and_leaves_nothing_behind(spool: Spool) -> None:
    job = accept(spool)
    assert [found.id for found in spool.jobs(State.QUEUED)] == [job.id]
    assert list(spool.incoming_dir.iterdir()) == []
    assert list(spool.claimed_dir.iterdir()) == []
    assert spool.layout.job(job.id).spec_path.read_text() == "{}"


@pytest.mark.parametrize("places", [(State.QUEUED, State.HELD), (State.HELD, State.QUEUED)])
def test_a_reader_sees_a_job_that_moves_while_it_reads(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, places: tuple[State, State]
) -> None:
    """The job moves once its place is listed, before its entry is read there."""
    job = accept(spool)
    if places[0] is State.HELD:
        job = spool.move(job, State.HELD)
    read = spool_module.read_entry
    left = [job]

    def read_late(path: Path, state: State, *more: Any) -> Job | None:
        if left and state is places[0]:
            spool.move(left.pop(), places[1])
        return read(path, state, *more)

    monkeypatch.setattr(spool_module, "read_entry", read_late)
    reader = Spool(spool.layout, lock=False)
    assert [(found.id, found.state) for found in reader.all_jobs().values()] == [(job.id, places[1])]
    assert not left


def test_what_is_not_finished_is_left_alone(spool: Spool) -> None:
    for name in (".a.json", "a.json.tmp", "a.json~", "a.part", ".a.json.swp"):
        put(spool, name)
    assert Arrivals(spool).dropped() == []


def test_arrivals_come_in_the_order_in_which_they_came(spool: Spool) -> None:
    for name in ("c.json", "a.json", "b.json"):
        put(spool, name)
        time.sleep(0.01)
    assert [each.path.name for each in Arrivals(spool).dropped()] == ["c.json", "a.json", "b.json"]


def test_numbers_grow_and_are_never_used_again(spool: Spool) -> None:
    first, second = accept(spool), accept(spool)
    claim = Arrivals(spool).claim(PersonPath.of(put(spool, "gone.json"), 1))
    assert claim is not None
    Arrivals(spool).reject(claim, SpecError("no"), when="now")
    assert accept(spool).id > claim.id > second.id > first.id


def test_a_lost_sequence_goes_on_above_what_there_is(spool: Spool) -> None:
    job = accept(spool)
    (spool.dir / "seq").unlink()
    assert accept(spool).id == job.id + 1


def test_a_damaged_sequence_stops_the_start_with_a_remedy(spool: Spool) -> None:
    job = accept(spool)
    (spool.dir / "seq").write_text("seven\n")
    with pytest.raises(EnvironmentInvalidError, match="not a number") as caught:
        recovered(spool)
    assert f"at least {job.id}" in caught.value.hint


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "symbolic link"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_text("x" * (MAX_BYTES + 1)), "larger than"),
        (
            lambda path: (path.parent / ".other").write_text("{}") and path.hardlink_to(path.parent / ".other"),
            "hard link",
        ),
    ],
)
def test_what_is_not_a_plain_file_of_a_sane_size_is_refused(
    spool: Spool, make: Callable[[Path], Any], word: str
) -> None:
    path = spool.incoming_dir / "a.json"
    make(path)
    claim = Arrivals(spool).claim(PersonPath.of(path, 1))
    assert claim is not None
    with pytest.raises(SpecError, match=word):
        Arrivals(spool).copy(claim, max_bytes=MAX_BYTES)
    is_kept = stat.S_ISREG(Path(str(claim.path)).lstat().st_mode)
    path = Path(str(Arrivals(spool).reject(claim, SpecError("because"), when="now")))
    assert path == spool.rejected_dir / "a.json.reason"
    assert "because" in path.read_text()
    assert (spool.rejected_dir / f"{claim.id}.json").exists() == is_kept
    assert ("The file is kept as rejected/1.json." in path.read_text()) == is_kept
    assert not claim.place.exists()
    assert not spool.layout.job(claim.id).dir.exists()


def test_a_file_on_which_a_program_holds_a_lease_is_refused_and_not_waited_for(spool: Spool) -> None:
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    claim = Arrivals(spool).claim(PersonPath.of(put(spool, "a.json"), 1))
    assert claim is not None
    fd = os.open(str(claim.path), os.O_WRONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(SpecError, match="a lease"):
            Arrivals(spool).copy(claim, max_bytes=MAX_BYTES)
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


def test_a_jobs_file_is_found_among_any_number_of_names_like_it(tmp_path: Path) -> None:
    files = Layout(tmp_path).job(1)
    files.dir.mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        _ = files.spec_path
    for name in ("spec.a", "spec.zip", "spec.json.x", "spec.toml"):
        (files.dir / name).touch()
    assert files.spec_path.name == "spec.toml"
    if os.geteuid() == 0:
        (files.dir / "spec.json").touch()
        os.chown(files.dir / "spec.json", 4242, -1)  # its worker's
        assert files.spec_path.name == "spec.toml"


@pytest.mark.parametrize("name", ["job.txt", "job", "job.yaml\nrm -rf.json", "a\x1b[2J.json"])
def test_a_name_that_is_no_job_files_is_refused(spool: Spool, name: str) -> None:
    claim = Arrivals(spool).claim(PersonPath.of(put(spool, name), 1))
    assert claim is not None
    with pytest.raises(SpecError):
        Arrivals(spool).copy(claim, max_bytes=MAX_BYTES)
    assert Path(str(Arrivals(spool).reject(claim, SpecError("no"), when="now"))).exists()


def test_the_longest_name_can_be_refused_and_a_second_of_the_same_name_too(spool: Spool) -> None:
    for name in ("x" * 250 + ".json", "b.json", "b.json", "ü" * 125 + ".json"):
        claim = Arrivals(spool).claim(PersonPath.of(put(spool, name), 1))
        assert claim is not None
        path = Path(str(Arrivals(spool).reject(claim, SpecError("no"), when="now")))
        assert path.exists()
        assert (spool.rejected_dir / f"{claim.id}.json").exists()
        found = query.refusal(spool, name)
        assert found is not None
        assert found["file"] == name
    assert len(list(spool.rejected_dir.iterdir())) == 8


@pytest.mark.parametrize("is_name_taken", [False, True])
def test_a_rejection_of_which_a_power_cut_leaves_both_names_is_one(spool: Spool, is_name_taken: bool) -> None:
    arrivals = Arrivals(spool)
    for name in ("a.json", "a.json") if is_name_taken else ("a.json",):
        claim = arrivals.claim(PersonPath.of(put(spool, name), 1))
        assert claim is not None
        arrivals.reject(claim, SpecError("no"), when="now")
    assert claim is not None
    rejected = spool.rejected_dir / f"{claim.id}.json"
    others = {path: path.stat().st_ino for path in spool.rejected_dir.iterdir()}
    claim.place.mkdir()
    Path(str(claim.path)).hardlink_to(rejected)
    recovered(spool)
    assert arrivals.claims() == []
    assert list(spool.claimed_dir.iterdir()) == []
    assert {path: path.stat().st_ino for path in spool.rejected_dir.iterdir()} == others


def test_another_arrival_of_a_rejected_file_is_not_taken_for_the_rejected_one(spool: Spool) -> None:
    arrivals = Arrivals(spool)
    first = arrivals.claim(PersonPath.of(put(spool, "a.json"), 1))
    assert first is not None
    arrivals.reject(first, SpecError("no"), when="now")
    rejected = spool.rejected_dir / f"{first.id}.json"
    arrival = spool.incoming_dir / "a.json"
    arrival.hardlink_to(rejected)
    second = arrivals.claim(PersonPath.of(arrival, 1))
    assert second is not None
    recovered(spool)
    assert [claim.id for claim in arrivals.claims()] == [second.id]


def test_what_the_dropper_writes_after_the_claim_changes_nothing(spool: Spool) -> None:
    path = put(spool, "a.json", '{"first": 1}')
    with path.open("r+") as writer:
        claim = Arrivals(spool).claim(PersonPath.of(path, 1))
        assert claim is not None
        copy = Arrivals(spool).copy(claim, max_bytes=MAX_BYTES)
        writer.write('{"secon": 2}')
    assert Path(str(copy.path)).read_text() == '{"first": 1}'


def test_there_are_only_the_moves_of_the_table(spool: Spool) -> None:
    for source in State:
        for target in set(State) - MOVES[source]:
            job = dataclasses.replace(accept(spool), state=source)
            with pytest.raises(AssertionError):
                spool.move(job, target)


def test_an_entry_of_a_later_honed_is_read_and_a_damaged_one_passed_over(spool: Spool) -> None:
    job = accept(spool)
    entry = spool.dir / "queued" / f"{job.id}.json"
    entry.write_text(entry.read_text().replace('"name"', '"colour": "green",\n "name"'))
    (spool.dir / "queued" / "99.json").write_text('{"id": 99')
    (spool.dir / "queued" / "98.json").write_text("\x00" * 100)
    assert [found.name for found in spool.jobs(State.QUEUED)] == ["a"]


def test_an_entry_of_any_length_is_read(spool: Spool) -> None:
    job = spool.update(accept(spool), remark="r" * 300_000)
    spool.close()
    again = Spool(spool.layout)
    assert again.recover() == []
    assert again.job(job.id) == job
    again.close()


def test_of_two_copies_the_newer_wins(spool: Spool) -> None:
    job = accept(spool)
    old = (spool.dir / "queued" / f"{job.id}.json").read_bytes()
    attempt = Attempt(number=1, backend="transformers", started_at=2.0)
    spool.move(job, State.RUNNING, attempts=(attempt,))
    (spool.dir / "queued" / f"{job.id}.json").write_bytes(old)  # as a power cut leaves it on btrfs
    spool.recover()
    assert [found.id for found in spool.jobs(State.QUEUED)] == []
    (running,) = spool.jobs(State.RUNNING)
    assert running.attempts == (attempt,)


def test_a_reader_in_the_middle_of_a_move_sees_each_job_once_and_as_it_is_now(spool: Spool) -> None:
    job = accept(spool)
    entry = spool.dir / "queued" / f"{job.id}.json"
    old = entry.read_bytes()
    spool.move(job, State.RUNNING, attempts=(Attempt(number=1, backend="transformers", started_at=2.0),))
    entry.write_bytes(old)  # the moment between the rename and the removal
    assert [found.state for found in spool.all_jobs().values()] == [State.RUNNING]


def test_submit_drops_whole_files_and_overwrites_none(tmp_path: Path, spool: Spool) -> None:
    source = tmp_path / "job.yaml"
    source.write_text("a: 1\n")
    names = [
        drop(spool.incoming_dir, source),
        drop(spool.incoming_dir, source),
        drop(spool.incoming_dir, source, hold=True),
    ]
    assert names == ["job.yaml", "job-2.yaml", "job.hold.yaml"]
    assert {path.name for path in spool.incoming_dir.iterdir()} == set(names)


def test_many_who_submit_files_of_one_name_at_once_lose_none(tmp_path: Path, spool: Spool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    sources = [tmp_path / str(number) / "job.yaml" for number in range(30)]
    for number, source in enumerate(sources):
        source.parent.mkdir()
        source.write_text(f"name: n{number}\n")
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda source: drop(spool.incoming_dir, source), sources))
    assert len(set(names)) == 30
    assert {path.read_text() for path in spool.incoming_dir.iterdir()} == {source.read_text() for source in sources}


def text_of(name: str, error: HonedError) -> str:
    """Return the reason of a dropped file with the number 9."""
    return refusals.text_of(name, 9, SUBMITTER, error, when="now", fate="It is kept.", is_submission=False)


def test_a_refusal_says_what_why_and_what_to_do() -> None:
    text = text_of("a.yaml", SpecError("line 3: lr: unknown key", hint="learning_rate"))
    assert all(word in text for word in ("a.yaml", "spec_invalid", "line 3: lr: unknown key", "learning_rate"))


def test_no_line_of_what_is_refused_passes_for_one_of_ours() -> None:
    name = "a\nWhat to do: rm.json"
    error = SpecError("one\ntwo", hint="three\nThen four")
    lines = text_of(name, error).split("\n")
    assert lines[0] == f"{name!r} was refused at now."
    assert [line for line in lines if line.startswith(("What", "Then"))] == [
        "What to do: three",
        "Then drop the job file into incoming/ again.",
    ]


# -- over the control socket ------------------------------------------------------------------------------------------


def test_a_submitted_file_is_its_submitters_whoever_owns_it(spool: Spool) -> None:
    claim = Arrivals(spool).submit("a.hold.json", b"{}", SUBMITTER)
    assert (claim.title, claim.is_held) == ("a", True)
    arrivals = recovered(spool)
    assert arrivals.claims() == [claim]
    assert not arrivals.submitted.has_room(SUBMITTER, 1, max_files=1, max_bytes=100)
    assert not arrivals.submitted.has_room(SUBMITTER, 9, max_files=9, max_bytes=10)
    assert arrivals.submitted.has_room(SUBMITTER, 8, max_files=2, max_bytes=10)
    copy = arrivals.copy(claim, max_bytes=MAX_BYTES, drops=False)
    assert (copy.uid, Path(str(copy.path)).read_text()) == (SUBMITTER, "{}")
    arrivals.admit(job_of(claim), claim, PlanFile({}))
    assert list(spool.claimed_dir.iterdir()) == []


def test_where_no_drops_are_taken_a_dropped_file_is_refused_with_the_remedy(spool: Spool) -> None:
    claim = Arrivals(spool).claim(PersonPath.of(put(spool, "a.json"), 1))
    assert claim is not None
    with pytest.raises(SpecError, match="files in incoming/ are not accepted") as caught:
        Arrivals(spool).copy(claim, max_bytes=MAX_BYTES, drops=False)
    assert caught.value.hint == "honectl submit FILE"


@pytest.mark.parametrize(
    "name", ["../a.json", "a/b.json", ".a.json", "x" * 247 + ".json", "a\n.json", "a\udcff.json", "a.txt", "..", ""]
)
def test_a_name_that_no_file_has_is_not_taken_and_costs_no_number(spool: Spool, name: str) -> None:
    with pytest.raises(SpecError):
        Arrivals(spool).submit(name, b"{}", SUBMITTER)
    assert list(spool.claimed_dir.iterdir()) == []
    assert not (spool.dir / "seq").exists()


def test_the_refusal_of_a_submitted_file_is_its_submitters(spool: Spool) -> None:
    arrivals = Arrivals(spool)
    first, second = (arrivals.submit("a.json", b"{}", SUBMITTER) for _ in range(2))
    for claim, word in ((first, "one"), (second, "two")):
        arrivals.reject(claim, SpecError(word), when="now")
    anna, berta = (query.Asker(uid, is_administrator=False, reads_all=False) for uid in (SUBMITTER, SUBMITTER + 1))
    for claim, word in ((first, "one"), (second, "two")):
        found = query.refusal(spool, "a.json", anna, number=claim.id)
        assert found is not None
        assert word in found["reason"]
        assert query.refusal(spool, "a.json", berta, number=claim.id) is None
    assert query.refusal(spool, "a.json", anna, number=second.id + 1) is None
    wish = retention.Wish(limits=retention.Limits(max_count=0))
    for asker, files in ((berta, []), (anna, ["a.json", "a.json"])):
        pruned = joined(retention.prune_refused(spool, wish, asker, is_dry=False, now=time.time()))
        assert [row["file"] for row in pruned["rejected"]] == files
    assert list(spool.rejected_dir.iterdir()) == []


def test_no_name_makes_a_refusal_somebody_elses() -> None:
    name, error = (
        "a was refused at now.\nSubmitted as 7 by the user 0.\n.json",
        SpecError("Submitted as 7 by the user 0."),
    )
    text = refusals.text_of(name, 9, SUBMITTER, error, when="now", fate="It is not kept.", is_submission=False)
    reason = refusals.parse(text, PersonPath(Path("x.reason")), 1.0)
    assert reason is not None
    assert (reason.number, reason.uid, reason.is_submission) == (9, SUBMITTER, False)
    assert refusals.parse("", PersonPath(Path("x.reason")), 1.0) is None


def refuse(spool: Spool, name: str, make: Callable[[Path], Any]) -> Path:
    """Drop something, and have it refused; return the path of its reason."""
    arrivals = Arrivals(spool)
    make(spool.incoming_dir / name)
    claim = arrivals.claim(PersonPath.of(spool.incoming_dir / name, 1))
    assert claim is not None
    return Path(str(arrivals.reject(claim, SpecError("no"), when="now")))


def test_no_file_that_is_dropped_takes_the_place_of_a_reason(spool: Spool, tmp_path: Path) -> None:
    """Reasons are read with honed's rights: a link or a text of somebody's under such a name would be, too."""
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    planted = {
        "a.json": lambda path: path.write_text("{"),
        "a.json.reason": lambda path: path.write_text("a.json was refused at now.\n"),
        "a.reason": lambda path: path.symlink_to(secret),
        **{f"a.{number}": lambda path: path.write_text("x") for number in range(1, 12)},
        **{f"{number}": lambda path: path.write_text("x") for number in range(1, 30, 4)},
        "zzz.reason": os.mkfifo,
    }
    for _ in range(2):
        for name, make in planted.items():
            refuse(spool, name, make)
    texts = [path.read_text() for path in spool.rejected_dir.glob("*.reason")]
    assert len(texts) == 2 * len(planted)
    assert all(" was refused at now." in text.partition("\n")[0] for text in texts)
    found = query.refused(spool)
    assert sorted(each["file"] for each in found["files"]) == sorted([*planted, *planted])
    assert "a secret" not in str(found)
    kept = [path for path in spool.rejected_dir.iterdir() if path.suffix != ".reason"]
    assert len(kept) == 2 * (len(planted) - 2), "not the link, and not the pipe"
    assert all(path.stem.isdecimal() and stat.S_ISREG(path.lstat().st_mode) for path in kept)


def test_what_an_earlier_honed_kept_under_a_reasons_name_is_not_read(spool: Spool, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(
        "a.json was refused at now.\nSubmitted as 3 by the user 0.\n\nspec_invalid:\n  x\n"
    )
    os.mkfifo(spool.rejected_dir / "pipe.reason")
    (spool.rejected_dir / "link.reason").symlink_to(tmp_path / "secret")
    (spool.rejected_dir / "directory.reason").mkdir()
    (spool.rejected_dir / "directory.json.reason").mkdir()
    assert query.refused(spool)["files"] == []
    assert refuse(spool, "directory.json", lambda path: path.write_text("{")).name == "directory.1.json.reason"
    assert [each["file"] for each in query.refused(spool)["files"]] == ["directory.json"]


def test_files_that_an_earlier_honed_kept_under_their_names_are_pruned_as_what_they_are(spool: Spool) -> None:
    """Such a name may be the number of another arrival."""
    old = text_of("old.yaml", SpecError("no")).replace(" as 9, a file of the user 12345.\nIt is kept.", " as 7.")
    (spool.rejected_dir / "old.yaml.reason").write_text(old)
    for name in ("old.yaml", "7.yaml", "1.json"):
        (spool.rejected_dir / name).touch()
    assert refuse(spool, "new.json", lambda path: path.write_text("{")).name == "new.json.reason"
    assert (spool.rejected_dir / "1.json").read_bytes() == b""
    assert (spool.rejected_dir / "1-1.json").read_text() == "{"
    us = query.Asker(os.getuid(), is_administrator=False, reads_all=False)
    wish = retention.Wish(limits=retention.Limits(max_count=0))
    pruned = joined(retention.prune_refused(spool, wish, us, is_dry=False, now=time.time()))
    assert sorted(row["file"] for row in pruned["rejected"]) == ["new.json", "old.yaml"]
    assert sorted(path.name for path in spool.rejected_dir.iterdir()) == ["1.json", "7.yaml"]
    joined(retention.prune_refused(spool, wish, query.ANYBODY, is_dry=False, now=time.time()))
    assert list(spool.rejected_dir.iterdir()) == []


@pytest.mark.parametrize("name", ["a\nb.yaml", "a\udcff.yaml", "a\u2028.yaml"])
def test_a_refused_file_of_any_name_is_pruned_with_its_reason(spool: Spool, name: str) -> None:
    refuse(spool, name, lambda path: path.write_text("{"))
    assert len(list(spool.rejected_dir.iterdir())) == 2
    us = query.Asker(os.getuid(), is_administrator=False, reads_all=False)
    wish = retention.Wish(limits=retention.Limits(max_count=0))
    joined(retention.prune_refused(spool, wish, us, is_dry=False, now=time.time()))
    assert list(spool.rejected_dir.iterdir()) == []


def test_refused_files_are_pruned_a_file_at_a_time_and_what_was_interrupted_is_done_later(spool: Spool) -> None:
    for number in range(4):
        refuse(spool, f"{number}.json", lambda path: path.write_text("{"))
    (spool.rejected_dir / "900.json").touch()  # its reason is gone
    wish = retention.Wish(limits=retention.Limits(max_count=0))
    nums = [9]
    for _ in (begun := retention.prune_refused(spool, wish, query.ANYBODY, is_dry=False, now=time.time())):
        nums.append(len(list(spool.rejected_dir.iterdir())))
        if nums[-1] == 5:
            break
    del begun
    assert len(query.refused(spool)["files"]) == 2
    for _ in retention.prune_refused(spool, wish, query.ANYBODY, is_dry=False, now=time.time()):
        nums.append(len(list(spool.rejected_dir.iterdir())))
    assert nums[-1] == 0
    assert max(before - after for before, after in itertools.pairwise(nums)) == 2  # a file, and its reason
    assert len(nums) > 9 + 5  # each was looked at by itself


def test_a_file_that_is_refused_while_others_are_pruned_stays_with_its_reason(spool: Spool) -> None:
    refuse(spool, "old.json", lambda path: path.write_text("{"))
    (spool.rejected_dir / "900.json").touch()  # its reason is gone
    wish, names = retention.Wish(limits=retention.Limits(max_count=0)), set[str]()
    for part in retention.prune_refused(spool, wish, query.ANYBODY, is_dry=False, now=time.time()):
        if part is not None and part.get("rejected"):
            refuse(spool, "new.json", lambda path: path.write_text("{"))
            names = {path.name for path in spool.rejected_dir.iterdir()} - {"900.json"}
    assert {path.name for path in spool.rejected_dir.iterdir()} == names
    assert len(names) == 2


def test_a_directory_is_not_taken(spool: Spool) -> None:
    (spool.incoming_dir / "a.json").mkdir()
    with pytest.raises(IsADirectoryError):
        Arrivals(spool).claim(PersonPath.of(spool.incoming_dir / "a.json", 1))
    assert (spool.incoming_dir / "a.json").is_dir()
    assert list(spool.claimed_dir.iterdir()) == []


def test_a_directory_that_takes_the_place_of_a_claimed_file_is_set_aside_whole(spool: Spool) -> None:
    arrivals = Arrivals(spool)
    claim = arrivals.claim(PersonPath.of(put(spool, "a.json"), 1))
    assert claim is not None
    Path(str(claim.path)).unlink()
    Path(str(claim.path / "work")).mkdir(parents=True)
    reason = Path(str(arrivals.reject(claim, SpecError("no"), when="now")))
    assert "claimed/.1" in reason.read_text()
    assert (spool.claimed_dir / ".1/a.json/work").is_dir()
    recovered(spool)
    assert arrivals.claims() == []
    assert (spool.claimed_dir / ".1/a.json/work").is_dir()


def test_a_rejection_that_was_begun_is_begun_anew_or_not_at_all(spool: Spool) -> None:
    arrivals = Arrivals(spool)
    claim = arrivals.claim(PersonPath.of(put(spool, "a.json"), 1))
    assert claim is not None
    text = text_of("a.json", SpecError("old")).replace("incoming/ as 9", "incoming/ as 1")
    refusals.make(spool.rejected, "a.json", claim.id, os.getuid(), text)
    arrivals.reject(claim, SpecError("new"), when="now")
    assert [each["reason"].count("new") for each in query.refused(spool)["files"]] == [1]
    claim = arrivals.claim(PersonPath.of(put(spool, "b.json"), 1))
    assert claim is not None
    refusals.make(spool.rejected, "b.json", claim.id, os.getuid(), text.replace("incoming/ as 1", "incoming/ as 2"))
    recovered(spool)
    assert [each["file"] for each in query.refused(spool)["files"]] == ["a.json"]
    assert [each.id for each in arrivals.claims()] == [claim.id]


# -- every crash ------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of the process, which no code catches."""


OPERATIONS = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "rmdir")


class Faults:
    """A fault in the n-th file operation of Python's os module: a crash before or after it, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_seen = 0
        self.crash_at: int | None = None
        self.error: OSError | None = None
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **keys: Any) -> Any:
            if self.crash_at is None:
                return operation(*arguments, **keys)
            self.num_seen += 1
            if self.num_seen == self.crash_at:
                if self.error is not None:
                    raise self.error
                raise Crash
            if self.num_seen > self.crash_at and self.error is None:
                raise Crash  # nothing runs after the end: no finally clause mends what the kill left
            return operation(*arguments, **keys)

        return faulty


def recovered(spool: Spool) -> Arrivals:
    arrivals = Arrivals(spool)
    spool.recover()
    arrivals.recover()
    return arrivals


def life(spool: Spool, *, names: list[str]) -> None:
    """Run one pass: take the files from incoming/, reject some, run and finish the rest."""
    arrivals = recovered(spool)
    claims = arrivals.claims()
    claims += [claim for each in arrivals.dropped() if (claim := arrivals.claim(each.path)) is not None]
    for claim in claims:
        try:
            arrivals.copy(claim, max_bytes=MAX_BYTES)
        except SpecError as error:
            arrivals.reject(claim, error, when="now")
            continue
        if claim.name.startswith("bad"):
            arrivals.reject(claim, SpecError("no"), when="now")
        else:
            arrivals.admit(job_of(claim), claim, PlanFile({}))
    run(spool)


def run(spool: Spool) -> None:
    for job in list(spool.jobs(State.QUEUED)):
        spool.move(job, State.RUNNING, attempts=(Attempt(number=1, backend="transformers", started_at=2.0),))
    for job in list(spool.jobs(State.RUNNING)):
        spool.move(spool.update(job, outcome="succeeded"), State.SUCCEEDED)


def life_together(spool: Spool, *, names: list[str]) -> None:
    """Run the same pass with many arrivals at a time; an error returned in place of a result is raised."""

    def good(found: list[Any]) -> list[Any]:
        for error in [each for each in found if isinstance(each, Exception)]:
            raise error
        return [each for each in found if each is not None]

    arrivals = recovered(spool)
    claims = arrivals.claims() + good(arrivals.claim_all([each.path for each in arrivals.dropped()]))
    copies = dict(zip(claims, arrivals.copy_all(claims, max_bytes=MAX_BYTES), strict=True))
    for claim, copy in copies.items():
        if isinstance(copy, SpecError):
            claims.remove(claim)
            arrivals.reject(claim, copy, when="now")
    good([copies[claim] for claim in claims])
    good(
        arrivals.admit_all(
            [(job_of(claim), claim, PlanFile({})) for claim in claims if not claim.name.startswith("bad")]
        )
    )
    for claim in arrivals.claims():
        arrivals.reject(claim, SpecError("no"), when="now")
    run(spool)


def verify(spool: Spool, names: list[str]) -> None:
    """Check that each dropped file became exactly one job or one rejection, and that nothing else is left."""
    done = [job.source for job in spool.entries.of(State.SUCCEEDED)]
    refused = [each["file"] for each in query.refused(spool)["files"]]
    assert sorted(done + refused) == sorted(names)
    assert not [name for name in done if name.startswith("bad")]
    unreadable = {
        name for name in refused if not name.startswith("bad")
    }  # honed takes one EACCES for a file that its owner made unreadable
    assert all("honed cannot read it" in (spool.rejected_dir / f"{name}.reason").read_text() for name in unreadable)
    assert len(unreadable) <= 1
    for state in set(State) - {State.SUCCEEDED}:
        assert list(spool.state_dir(state).iterdir()) == [], state
    assert list(spool.incoming_dir.iterdir()) == []
    assert list(spool.claimed_dir.iterdir()) == []
    assert not list(spool.dir.rglob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("errno", [None, 28, 5, 13, 30])  # a crash; ENOSPC, EIO, EACCES, EROFS
@pytest.mark.parametrize("life", [life, life_together])
def test_no_crash_and_no_error_at_any_file_operation_loses_or_doubles_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno: int | None, life: Callable[..., None]
) -> None:
    faults = Faults(monkeypatch)
    names = ["a.json", "bad.json", "over-socket.json"]
    point = 0
    while True:
        point += 1
        root = tmp_path / str(point)
        spool = Spool(Layout(root))
        for name in names:
            put(spool, name) if "-" not in name else Arrivals(spool).submit(name, b"{}", SUBMITTER)
        faults.num_seen, faults.crash_at = 0, point
        faults.error = None if errno is None else OSError(errno, os.strerror(errno))
        try:
            life(spool, names=names)
        except (Crash, OSError):
            finished = False
        else:
            finished = faults.num_seen < point
        faults.crash_at = None
        spool.close()
        again = Spool(Layout(root))
        life(again, names=names)
        verify(again, names)
        again.close()
        if finished:
            break
    assert point > 60, "the faults were really met"


@pytest.mark.slow
@pytest.mark.parametrize("errno", [None, 28, 5, 13, 30])
def test_a_submission_hit_at_any_file_operation_is_there_whole_with_its_submitter_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno: int | None
) -> None:
    faults, point, claim = Faults(monkeypatch), 0, None
    while claim is None:
        point += 1
        spool = Spool(Layout(tmp_path / str(point)))
        faults.num_seen, faults.crash_at = 0, point
        faults.error = None if errno is None else OSError(errno, os.strerror(errno))
        with contextlib.suppress(Crash, OSError):
            claim = Arrivals(spool).submit("a.json", b'{"whole": 1}', SUBMITTER)
        faults.crash_at = None
        spool.close()
        again = Spool(Layout(tmp_path / str(point)))
        arrivals = recovered(again)
        found = arrivals.claims()
        assert len(found) <= 1
        for each in found:
            copy = arrivals.copy(each, max_bytes=MAX_BYTES, drops=False)
            assert (Path(str(copy.path)).read_text(), copy.uid) == ('{"whole": 1}', SUBMITTER)
        assert not found or claim == found[0] or errno is None, "who was told that it was not taken submits it again"
        assert (claim is None) or found, "what was said to be taken is there"
        assert len(list(again.claimed_dir.iterdir())) == len(found)
        assert not list(again.dir.rglob(".*"))
        again.close()
    assert point > 10, "the faults were really met"


def test_an_arrival_whose_entry_cannot_be_read_is_not_taken_for_one_that_was_not_accepted(spool: Spool) -> None:
    job = accept(spool)
    claim = Claim(job.id, PersonPath(spool.claimed_dir / str(job.id), (job.source,)), None)
    entry = spool.entries.path(job.id, State.QUEUED)
    beside = Arrivals(Spool(spool.layout, lock=False))  # it has no catalog
    assert beside.accepted(claim) == job
    text = entry.read_bytes()
    entry.unlink()
    assert beside.accepted(claim) is None
    entry.mkdir()
    with pytest.raises(OSError, match="cannot be read"):
        beside.accepted(claim)
    entry.rmdir()
    entry.write_bytes(text)


def test_an_arrival_that_has_begun_since_is_the_job_that_honed_knows(spool: Spool) -> None:
    """A move that failed half-way leaves a copy of the entry, which is not what the job is."""
    spool.recover()
    job = accept(spool)
    half = spool.entries.path(job.id, State.RUNNING)
    half.write_bytes(dataclasses.replace(job, state=State.RUNNING, revision=job.revision + 1).to_json())
    claim = Claim(job.id, PersonPath(spool.claimed_dir / str(job.id), (job.source,)), None)
    assert Arrivals(spool).accepted(claim) == job
    assert spool.job(job.id) == job


def test_a_start_removes_the_hidden_files_that_could_not_be_removed_before(spool: Spool) -> None:
    for place in ("edits", "corrupt", "queued", "."):
        (spool.dir / place).mkdir(exist_ok=True)
        (spool.dir / place / ".1.json.tmp").touch()
    spool.recover()
    assert list(spool.dir.rglob(".*.tmp")) == []
