"""The configuration of a cluster, and the fence of a worker whose start was settled."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from honed.job import fence
from honed.run import outcome, slurm, slurm_batch, slurm_job, slurm_request
from honed.run.runner import read_lock_record, seconds
from honed.run.slurm_batch import Handed, Listed
from honed.run.slurm_client import why_none
from honed.run.slurm_desk import Answer, Seen, Snapshot
from honed.spec import config
from honed.system import access
from honed.system.error import InterruptedRunError, SpecError
from honed.system.layout import AttemptFiles, JobFiles, JobLayout, Layout
from honed.system.personpath import PersonPath


def test_the_shared_instance_runs_no_jobs_on_a_cluster() -> None:
    assert "one user's own" in why_none(Layout(Path("/")))


@pytest.mark.parametrize(
    "option",
    [
        "--requeue",
        "--job-name=x",
        "-p main",
        "--mem=1G\n--requeue",
        "mem=1G",
        "--requ",
        "--arra=0-3",
        "--part=x",
        "--container=c",
    ],
)
def test_an_option_that_is_honeds_own_is_refused(tmp_path: Path, option: str) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(f"[slurm]\noptions = [{json.dumps(option)}]\n")
    with pytest.raises(SpecError, match="slurm"):
        config.load(layout)


def test_a_place_stands_for_each_job_that_may_be_handed_over(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text(
        '[jobs]\nrunner = "slurm"\n[slurm]\nmax_jobs = 3\ngpu_bytes = 1000\npartition = "big"\noptions = ["--mem=1G"]\n'
    )
    read = config.load(layout)
    assert len({each.key for each in config.devices(read)}) == 3
    assert read.slurm.as_options() == ["--partition=big", "--mem=1G"]


def test_a_worker_whose_start_was_settled_puts_nothing_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "exit.json"
    monkeypatch.setenv(fence.VARIABLE, f"2:{path}")
    fence.require_current()
    path.write_text('{"start": 1}')
    fence.require_current()
    path.write_text('{"start": 2}')
    with pytest.raises(InterruptedRunError):
        fence.require_current()


def test_one_profile_is_the_default_and_each_has_honeds_options_for_itself(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text("[slurm.profiles.a]\ndefault = true\n[slurm.profiles.b]\ndefault = true\n")
    with pytest.raises(SpecError, match=r"slurm\.profiles: a and b are the default"):
        config.load(layout)
    layout.config_path.write_text('[slurm.profiles.a]\noptions = ["--requeue"]\n')
    with pytest.raises(SpecError, match=r"slurm\.profiles\.a\.options.*--requeue is honed's own"):
        config.load(layout)
    layout.config_path.write_text('[slurm.profiles.a]\npartitoin = "x"\n')
    with pytest.raises(SpecError, match=r"slurm\.profiles\.a\.partitoin.*unknown key.*did you mean partition"):
        config.load(layout)


@pytest.mark.parametrize(
    ("words", "is_for_ever"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", True),
        ("sbatch: error: invalid partition specified: nope", True),
        ("Batch job submission failed: Invalid account or account/partition combination specified", True),
        ("sbatch: unrecognized option '--foo=1'", True),
        ("Batch job submission failed: Requested node configuration is not available", True),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", False),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", False),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size …)", False),
        ("sbatch did not end within 30 s", False),
        ("", False),
    ],
)
def test_only_what_no_waiting_changes_is_a_refusal(words: str, is_for_ever: bool) -> None:
    assert slurm_request.is_refusal(words) is is_for_ever


MARK = "5f" * 16


@pytest.mark.parametrize("end", ["\n", "\v", "\x1c", "\x85", "\u2028"])
def test_no_name_of_a_job_passes_for_another_job(end: str) -> None:
    forged = f"x{end}901|RUNNING|node1|1001|None|honed-0123abcd-5-99-1"
    text = (
        f"{MARK}7|RUNNING|node1|1000|None|{forged}\n"
        f"{MARK}8|PENDING||1002|Priority|honed-0123abcd-6-1-1\n"
        f"{MARK}9|RUNNING|node1|1000|a|b|honed-0123abcd-5-1-1\n"
        f"{MARK}9|RUNNING|node1|me|None|honed-0123abcd-5-1-1\n"
    )
    assert slurm_batch.listed(text, MARK) == [
        Listed("8", "PENDING", "", 1002, "Priority", "honed-0123abcd-6-1-1"),
    ]
    (only,) = slurm_batch.listed(text, MARK)
    assert Listed.parse(str(only)) == only


def test_a_start_file_counts_if_it_is_honeds_own(tmp_path: Path) -> None:
    job = JobLayout(tmp_path / "7")
    job.dir.mkdir()
    handed = Handed(1, 2, "honed-0123abcd-7-1-2", "cpu", time_left_sec=60)
    handed.write(JobFiles(PersonPath(job.dir)))
    assert slurm.read(JobFiles(PersonPath(job.dir))) == handed
    (tmp_path / "other").hardlink_to(job.start_path)
    with pytest.raises(PermissionError, match="not a file of honed's own"):
        slurm.read(JobFiles(PersonPath(job.dir)))
    job.start_path.unlink()
    os.mkfifo(job.start_path)
    with pytest.raises(OSError, match="not a regular file"):
        slurm.read(JobFiles(PersonPath(job.dir)))
    job.start_path.unlink()
    job.start_path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        slurm.read(JobFiles(PersonPath(job.dir)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to a user")
def test_a_start_file_of_a_submitter_does_not_count(tmp_path: Path) -> None:
    job = JobLayout(tmp_path)
    Handed(1, 2, "honed-0123abcd-7-1-2", "cpu").write(JobFiles(PersonPath(job.dir)))
    os.chown(job.start_path, 1000, -1)
    with pytest.raises(PermissionError, match="not a file of honed's own"):
        slurm.read(JobFiles(PersonPath(job.dir)))


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "[]", "{}", '{"number": 1}'),
        '{"number": 1, "start": 1, "name": "n", "device": [1]}',
        '{"number": 1, "start": 1, "name": "n", "device": "cpu", "environment": {"A": 1}}',
        '{"number": 1, "start": 1, "name": "n", "device": "cpu", "more": 1}',
    ],
    ids=lambda text: text[:60],
)
def test_a_start_file_that_was_changed_is_an_error_of_its_own(text: str) -> None:
    with pytest.raises(ValueError, match="not a start file of a Slurm job"):
        slurm_batch.parse(text.encode())


@pytest.mark.parametrize("written", ["9" * 400, "1e999", "-1e300", '"now"', "true", "NaN"])
def test_a_begin_that_nobody_could_have_seen_is_none(tmp_path: Path, written: str) -> None:
    (tmp_path / "lock").write_text(f'{{"start": 1, "started_at": {written}}}')
    assert seconds(read_lock_record(AttemptFiles(PersonPath(tmp_path)), 1), "started_at") is None


def test_a_command_that_leaves_a_child_with_its_pipes_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    said = slurm_request.run(["sh", "-c", "trap '' TERM; sleep 60"], {}, timeout_sec=0.2)
    assert said == ("", "sh did not end within 0 s")
    assert time.monotonic() - began < 50, "it was waited for"


def test_a_job_of_slurm_is_a_worker_of_ours_if_honed_has_recorded_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "is_of_system", property(lambda _: True))
    desk = SimpleNamespace(snapshot=None, fault="")  # the real one has threads, which outlive a test
    monkeypatch.setattr(slurm, "Desk", lambda *_args, **_keys: desk)
    layout = Layout(tmp_path)
    runner = slurm.SlurmRunner(layout, config.SlurmConfig)
    job, prefix = layout.job(7), f"honed-{(layout.state_dir / 'slurm-instance').read_text().strip()}-7"
    job.dir.mkdir(parents=True)
    handed = Handed(1, 1, f"{prefix}-1-1", "cpu")

    def live(*starts: str) -> list[tuple[int, int] | None]:
        seen = {f"{prefix}-{start}": (Seen("5", "PENDING", "None", ""),) for start in starts}
        desk.snapshot = Snapshot(0.0, seen)
        return [each.attempt for each in runner.live()]

    assert live("1-1") == []
    handed.write(JobFiles(PersonPath(job.dir)))
    assert live("1-1", "99-1") == [(1, 1)]
    replace(handed, is_over=True).write(JobFiles(PersonPath(job.dir)))
    assert live("1-1") == []


class FakeDesk:
    """A Slurm that cancels each launch at once, and lists it for `keeps_sec`; `submits` tells whether sbatch works."""

    def __init__(self, keeps_sec: float) -> None:
        self.keeps_sec = keeps_sec
        self.now = 0.0
        self.fault = ""
        self.submits = True
        self.state, self.reason = "CANCELLED", "None"
        self.commands: list[list[str]] = []
        self.launched: dict[str, float] = {}  #: ids, and when
        self.lanes: list[int] = []
        self.name = ""

    def run(self, name: str, commands: list[list[str]], *, environment: object, lane: int) -> None:  # noqa: ARG002
        self.name = name
        self.commands += commands
        self.lanes.append(lane)
        if self.submits:
            self.launched[str(100 + len(self.launched))] = self.now

    def answer(self, _name: str) -> Answer:
        return Answer(at=self.now, fault="" if self.submits else "sbatch did not end within 30 s")

    def forget(self, _name: str) -> None:
        pass

    @property
    def snapshot(self) -> Snapshot:
        listed = [each for each, at in self.launched.items() if self.now - at < self.keeps_sec]
        return Snapshot(self.now, {self.name: tuple(Seen(each, self.state, self.reason, "node7") for each in listed)})


@pytest.fixture
def of_fake_desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], tuple[FakeDesk, slurm.SlurmRunner]]:
    def make(keeps_sec: float) -> tuple[FakeDesk, slurm.SlurmRunner]:
        desk = FakeDesk(keeps_sec)  # the real one has threads, which outlive a test
        monkeypatch.setattr(slurm, "Desk", lambda *_args, **_keys: desk)
        runner = slurm.SlurmRunner(Layout(tmp_path), config.SlurmConfig, clock=lambda: desk.now)
        Layout(tmp_path).job(7).dir.mkdir(parents=True)
        return desk, runner

    return make


MakeDesk = Callable[[float], tuple[FakeDesk, slurm.SlurmRunner]]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_job_of_slurm_whose_record_a_server_does_not_return_is_not_handed_over_twice(
    tmp_path: Path, of_fake_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It waits in Slurm's queue, and so has left no other trace."""
    desk, runner = of_fake_desk(300.0)
    runner.start(7, 1, 1, backend="transformers", environment={})
    another, real = slurm.SlurmRunner(Layout(tmp_path), config.SlurmConfig, clock=lambda: desk.now), os.open

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if path == "start.json":
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"start\.json"):
        patch.setattr(os, "open", fail)
        another.adopt(7, 1, 1)
    assert another.adopt(7, 1, 1)
    assert len(desk.launched) == 1


@pytest.mark.parametrize("keeps_sec", [5.0, 300.0, 3_600.0])
def test_a_node_that_cannot_launch_a_job_ends_its_start_after_five_launches(
    of_fake_desk: MakeDesk, keeps_sec: float
) -> None:
    desk, runner = of_fake_desk(keeps_sec)
    runner.start(7, 1, 1, backend="transformers", environment={})
    ended = None
    while ended is None and desk.now < 3_600:
        desk.now += 1
        ended = runner.poll(7)
    assert ended is not None
    assert len(desk.launched) == slurm_job.NUM_CANCELLED
    assert not ended.ran
    error = outcome._died(ended)
    assert error.code == "killed"
    assert "cancelled each of its launches before its worker began, the last on node7" in error.message
    assert "scontrol update" in error.hint


@pytest.mark.parametrize(
    ("state", "is_suspended"),
    [
        *((state, False) for state in ("RUNNING", "COMPLETING", "CONFIGURING", "CANCELLED", "TIMEOUT")),
        *((state, True) for state in ("SUSPENDED", "STOPPED", "PENDING", "REQUEUED", "REQUEUE_HOLD")),
    ],
)
def test_a_job_that_slurm_suspends_or_queues_again_does_not_run(
    of_fake_desk: MakeDesk, state: str, is_suspended: bool
) -> None:
    desk, runner = of_fake_desk(3_600.0)
    runner.start(7, 1, 1, backend="transformers", environment={})
    desk.state = state
    assert runner.is_suspended(7) is is_suspended


@pytest.mark.parametrize(
    ("state", "reason", "is_again"),
    [
        ("PENDING", "BeginTime", True),
        ("REQUEUED", "None", True),
        ("PENDING", "JobHeldAdmin", False),  # scontrol requeuehold
        ("REQUEUE_HOLD", "None", False),
        ("CANCELLED", "None", False),
    ],
)
def test_a_job_that_an_administrator_of_slurm_requeues_is_queued_again(
    of_fake_desk: MakeDesk, tmp_path: Path, state: str, reason: str, is_again: bool
) -> None:
    desk, runner = of_fake_desk(3_600.0)
    runner.start(7, 1, 1, backend="transformers", environment={})
    attempt = Layout(tmp_path).job(7).attempt(1)
    attempt.dir.mkdir(parents=True, exist_ok=True)
    attempt.exit_path.write_text(json.dumps({"start": 1, "status": 75, "signal": None, "was_asked": True}))
    desk.state, desk.reason = state, reason
    ended = None
    while ended is None:
        desk.now += 1
        ended = runner.poll(7)
    assert ended.is_machine_going_down is is_again
    assert (desk.now < slurm_job.WORD_SEC) is (is_again or state == "CANCELLED")
    assert any("--state=PENDING" in command for command in desk.commands) is is_again


def test_a_failing_sbatch_is_no_launch_that_was_cancelled(of_fake_desk: MakeDesk, tmp_path: Path) -> None:
    desk, runner = of_fake_desk(3_600.0)
    runner.start(7, 1, 1, backend="transformers", environment={})
    desk.submits = False
    for _ in range(3_000):
        desk.now += 1
        assert runner.poll(7) is None
    assert len(desk.launched) == 1
    told = slurm.read(Layout(tmp_path).files(7)).reason
    assert told == "Slurm has cancelled 1 of 5 launches, the last on node7; sbatch did not end within 30 s"


@pytest.mark.skipif(not access.has_acls(Path("/tmp")), reason="needs POSIX ACLs in /tmp")
def test_the_commands_of_each_submitter_have_a_lane_of_their_own(
    of_fake_desk: MakeDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "is_of_system", property(lambda _: True))
    desk, runner = of_fake_desk(1.0)
    for job_id, uid in ((7, 1001), (8, 1002), (9, 1001), (10, None)):
        files = Layout(tmp_path).job(job_id)
        files.dir.mkdir(parents=True, exist_ok=True)
        if uid is not None:
            access.set_acl(files.dir, access.Acl(7, 7, 0, {uid: 7}, {}))
        runner.start(job_id, 1, 1, backend="transformers", environment={})
    runner.stop(8)
    assert desk.lanes == [1001, 1002, 1001, -10, 1002]
