"""`policy.arrivals = "socket"`: jobs arrive over the control socket alone, and the kernel says who owns them."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import DEADLINE_SEC, Instance

from honed.daemon.arrivals import incoming
from honed.daemon.arrivals.acceptance import Acceptance
from honed.job.arrival import Arrivals
from honed.job.job import State
from honed.job.spool import Spool
from honed.spec.config import Config, SpoolConfig
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError, SpecError, UsageError
from waiting import wait_for
from zoo import plain

SOCKET = '[policy]\narrivals = "socket"\n'
#: A user and a group that do not exist on this machine.
UID, GID = 12345, 23456


def job_file(instance: Instance, name: str, /, **keys: Any) -> Path:
    path = instance.root / f"{name}.json"
    path.write_text(json.dumps(plain.spec(instance.model, instance.dataset, **keys)))
    return path


def become(uid: int, gid: int) -> list[str]:
    """Return the start of a command run as another user who may read everything (Python may lie in our home)."""
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    return ["setpriv", f"--reuid={uid}", f"--regid={UID}", f"--groups={gid}", *may_read]


def honectl(
    instance: Instance, *arguments: str, uid: int | None = None, gid: int = UID
) -> subprocess.CompletedProcess[str]:
    """Run honectl as root, or as another user."""
    if uid is None:
        return instance.honectl(*arguments)
    command = [*become(uid, gid), sys.executable, "-m", "honed.cli.honectl", "--root", str(instance.root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SEC, check=False)


@pytest.fixture
def users() -> None:
    """Other users."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, and setpriv, to be another user")


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that everybody can write to; others can only read pytest's."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


def submit(instance: Instance, name: str, /, **keys: Any) -> dict[str, Any]:
    """Submit a held job, and return the socket's answer."""
    data = json.dumps(plain.spec(instance.model, instance.dataset, **keys)).encode()
    answer: dict[str, Any] = instance.client.ask("submit", name=name, data=base64.b64encode(data).decode(), hold=True)
    return answer


def open_incoming(instance: Instance) -> None:
    """Give incoming/ its installed mode: the group's members can put files in."""
    os.chown(instance.incoming_dir, 0, GID)
    instance.incoming_dir.chmod(0o1730)


def test_a_dropped_file_is_refused_with_the_remedy_and_kept(instance: Instance) -> None:
    instance.configure(SOCKET)
    instance.start()
    text = instance.drop("dropped").read_text()
    wait_for(lambda: "dropped.json" in instance.rejected(), what="refused")
    reason = instance.rejected()["dropped.json"]
    assert "files in incoming/ are not accepted (policy.arrivals)" in reason
    assert "What to do: honectl submit FILE" in reason
    kept = instance.kept("dropped.json")
    wait_for(kept.exists, what="moved")  # after its reason was written
    assert kept.read_text() == text
    done = honectl(instance, "submit", "--wait", str(job_file(instance, "succeed")))
    assert done.returncode == 0, done.stderr
    assert instance.wait_state("succeed", State.SUCCEEDED).uid == os.getuid()


def test_who_submits_is_told_the_same_in_both_ways(tmp_path: Path) -> None:
    told: dict[str, list[str]] = {}
    for policy in ("spool", "socket"):
        made = Instance(tmp_path / policy)
        made.configure(f'[policy]\narrivals = "{policy}"\n')
        try:
            made.start()
            out = str(made.root / "out")
            first, second = (job_file(made, name, output_dir=out) for name in ("succeed", "succeed-2"))
            runs = [
                honectl(made, "submit", "--hold", str(first)),
                honectl(made, "submit", str(second)),
                honectl(made, "submit", "--json", "--hold", str(job_file(made, "explain"))),
                honectl(made, "submit", "--wait", str(job_file(made, "succeed-3"))),
                honectl(made, "submit", str(job_file(made, "bad", colour="red"))),
                honectl(made, "submit", "--stage", "--hold", str(job_file(made, "succeed-4"))),
            ]
        finally:
            made.end()
        text = "\n".join(f"{run.returncode}\n{run.stdout}{run.stderr}" for run in runs).replace(str(made.root), "ROOT")
        text = re.sub(r"20\d\d-\d\d-\d\d[T ]\S+", "TIME", text)
        text = re.sub(r"(?m)^job \d+ \(succeed-3\): (?!succeeded$).*\n", "", text)  # seen on the way, or not
        text = re.sub(r"(?<=\(succeed-3\), )(queued|running|succeeded)", "on its way", text)
        told[policy] = [re.sub(r"staged/\S+", "staged/…", line.strip()) for line in text.splitlines()]
    assert "output_dir: ROOT/out is already used: it is job 1's" in "\n".join(told["socket"])
    only_of_the_socket = [line for line in told["socket"] if line not in told["spool"]]
    assert only_of_the_socket == ["Submitted as 2 by the user 0.", "Then submit it again: honectl submit FILE."]
    assert [line for line in told["spool"] if line not in told["socket"]] == [
        "Taken from incoming/ as 2, a file of the user 0.",
        "Then drop the job file into incoming/ again.",
    ]


def test_whose_a_job_is_says_the_socket(instance: Instance, users: None, public_dir: Path) -> None:
    instance.configure(SOCKET)
    instance.start()
    open_incoming(instance)
    path = job_file(instance, "succeed", output_dir=str(public_dir / "out"))
    refused = honectl(instance, "submit", str(path), uid=UID, gid=UID)
    assert (refused.returncode, refused.stdout) == (77, "")
    assert "you have no write permission" in refused.stderr
    assert "honed-submit" in refused.stderr
    assert list((instance.layout.spool_dir / "claimed").iterdir()) == []
    done = honectl(instance, "submit", "--wait", str(path), uid=UID, gid=GID)
    assert done.returncode == 0, done.stderr
    job = instance.wait_state("succeed", State.SUCCEEDED)
    assert job.uid == UID
    assert honectl(instance, "cancel", str(job.id), uid=UID + 1, gid=GID).returncode == 77
    held, refused = (
        honectl(
            instance, "submit", "--hold", str(job_file(instance, name, output_dir=job.output_dir)), uid=UID, gid=GID
        )
        for name in ("held", "refused")
    )
    assert held.returncode == 0, held.stderr
    assert (refused.returncode, "is job 2's" in refused.stdout) == (1, True)
    stranger, owner = (
        honectl(instance, "prune", "--rejected", "--keep", "0", "--dry-run", uid=uid, gid=GID) for uid in (UID + 1, UID)
    )
    assert "1 rejected file" not in stranger.stdout
    assert "1 rejected file" in owner.stdout


def test_what_was_taken_when_honed_was_killed_is_accepted_for_its_submitter(instance: Instance, users: None) -> None:
    """The check stands still, so both files are taken and neither is accepted: a job whose named job is not there is
    rejected after some seconds, however slow the machine is."""
    instance.is_warm = False  # so that the helper is its child
    instance.configure(f"{SOCKET}[spool]\npreflight_helpers = 1\npreflight_timeout_sec = 3600\n")
    instance.start()
    open_incoming(instance)
    claimed_dir = instance.layout.spool_dir / "claimed"
    submit(instance, "before.json")
    wait_for(lambda: list(instance.spool.jobs(State.HELD)), what="a helper")
    (helper,) = instance.helpers()
    os.kill(helper, signal.SIGSTOP)
    names = ("succeed-2", "succeed-1")
    files = [
        job_file(instance, "succeed-2", name="succeed-2", depends_on=["succeed-1"]),
        job_file(instance, "succeed-1", name="succeed-1"),
    ]
    command = [*become(UID, GID), sys.executable, "-m", "honed.cli.honectl", "--root", str(instance.root), "submit"]
    waiting = [
        subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for path in files
    ]
    wait_for(lambda: len(list(claimed_dir.glob(f"*.{UID}/*.json"))) == 2, what="both taken")
    instance.kill(signal.SIGKILL)
    os.kill(helper, signal.SIGKILL)
    for each in waiting:
        each.communicate(timeout=DEADLINE_SEC)
    assert {path.stem for path in claimed_dir.glob(f"*.{UID}/*.json")} == set(names)
    instance.start()
    for name in names:
        assert instance.wait_state(name, State.SUCCEEDED).uid == UID
    assert list(claimed_dir.iterdir()) == []


def test_more_than_are_checked_at_a_time_are_all_taken_also_after_a_kill(instance: Instance) -> None:
    instance.configure(f"{SOCKET}[spool]\nrescan_interval_sec = 3600\n")
    instance.start()
    numbers = [submit(instance, f"job-{number}.json")["id"] for number in range(incoming.MAX_PENDING + 30)]
    instance.kill(signal.SIGKILL)
    instance.start()
    wait_for(lambda: len(list(instance.spool.jobs(State.HELD))) == len(numbers), what="all accepted")
    assert [job.id for job in instance.spool.jobs(State.HELD)] == sorted(numbers)
    assert {job.source for job in instance.spool.jobs(State.HELD)} == {f"job-{n}.hold.json" for n in range(94)}


def test_a_job_file_of_the_greatest_size_is_taken_and_a_larger_one_is_not(instance: Instance) -> None:
    instance.start()
    comment = "x" * (SpoolConfig().max_spec_bytes - 2000)
    assert submit(instance, "large.json", name=comment[:60], predictions={"prompts": [comment]})["id"] == 1
    with pytest.raises(HonedError, match="larger than 262144 bytes"):
        submit(instance, "huge.json", predictions={"prompts": [comment + 2000 * "x"]})
    with pytest.raises(UsageError, match="a request may have at most"):
        submit(instance, "endless.json", predictions={"prompts": [comment * 4]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 7, "data": ""},
        {"name": "a.json", "data": "{}"},
        {"data": ""},
        {"name": "a.json"},
        {"name": "../a.json", "data": "e30="},
        {"name": "a.json\n", "data": "e30="},
    ],
)
def test_what_is_no_submission_takes_nothing(instance: Instance, wrong: dict[str, Any]) -> None:
    instance.start()
    with pytest.raises(HonedError) as caught:
        instance.client.ask("submit", **wrong)
    assert caught.value.code in {"usage", "spec_invalid"}
    assert list((instance.layout.spool_dir / "claimed").iterdir()) == []


def test_half_a_submission_keeps_nobody_waiting_and_is_none(instance: Instance) -> None:
    instance.configure(SOCKET)
    instance.start()
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(f"/proc/self/fd/{os.open(instance.layout.runtime_dir, os.O_RDONLY)}/control.sock")
        slow.sendall(b'{"verb": "submit", "name": "half.json", "data": "e30')
        assert honectl(instance, "submit", "--wait", str(job_file(instance, "succeed"))).returncode == 0
    instance.stop()
    assert list((instance.layout.spool_dir / "claimed").iterdir()) == []


def test_the_policy_changes_with_a_reload(instance: Instance) -> None:
    instance.start()
    instance.drop("succeed")
    instance.wait_state("succeed", State.SUCCEEDED)
    instance.configure(SOCKET)
    assert instance.process is not None
    instance.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "configuration reloaded" in instance.log, what="reloaded")
    instance.drop("again")
    wait_for(lambda: "again.json" in instance.rejected(), what="refused")


def test_while_honed_is_down_nothing_is_dropped_that_it_would_refuse(instance: Instance) -> None:
    instance.configure(SOCKET)
    done = honectl(instance, "submit", str(job_file(instance, "succeed")))
    assert done.returncode != 0
    assert "honed is not running, and it accepts job files only over its socket (policy.arrivals)" in done.stderr
    assert list(instance.incoming_dir.iterdir()) == []


def test_what_cannot_be_written_is_not_taken_and_its_submitter_told(instance: Instance) -> None:
    instance.start()
    claimed_dir = instance.layout.spool_dir / "claimed"
    claimed_dir.rmdir()
    claimed_dir.touch()  # no directory can be made there, not by root either
    with pytest.raises(HonedError, match=r"a\.json could not be submitted: .*Not a directory"):
        submit(instance, "a.json")
    claimed_dir.unlink()
    claimed_dir.mkdir()
    assert submit(instance, "a.json")["name"] == "a.hold.json"


def test_the_files_of_one_user_that_wait_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "MAX_SUBMITTED", 2)
    spool = Spool(Instance(tmp_path).layout)
    nothing: Any = None
    taking = Acceptance(spool, Arrivals(spool), nothing, nothing, Config(), nothing)
    for _ in range(2):
        taking.incoming.submit("a.json", b"{}", UID)
    with pytest.raises(EnvironmentInvalidError, match="at most 2 of 64 MiB"):
        taking.incoming.submit("a.json", b"{}", UID)
    assert taking.incoming.submit("a.json", b"{}", UID + 1).submitter == UID + 1
    monkeypatch.setattr(incoming, "MAX_SUBMITTED", 10)
    monkeypatch.setattr(incoming, "MAX_SUBMITTED_BYTES", 0)  # one largest file
    largest = bytes(Config().spool.max_spec_bytes)
    claim = taking.incoming.submit("a.json", largest, UID + 2)
    for again in (taking, Acceptance(spool, Arrivals(spool), nothing, nothing, Config(), nothing)):
        with pytest.raises(EnvironmentInvalidError, match="too many job files"):
            again.incoming.submit("a.json", b"{}", UID + 2)
    shutil.rmtree(claim.place)
    assert taking.incoming.submit("a.json", largest, UID + 2).submitter == UID + 2
    with pytest.raises(SpecError, match="larger than"):
        taking.incoming.submit("a.json", bytes(Config().spool.max_spec_bytes + 1), UID)
    spool.close()


def test_a_trial_comes_over_the_socket_too(instance: Instance) -> None:
    instance.configure(f"{SOCKET}[jobs]\nretry_delay_sec = 0\n")
    instance.start()
    honectl(instance, "trial", str(job_file(instance, "succeed")))
    assert instance.rejected() == {}
    assert instance.job("trial of succeed") is not None


def test_a_user_of_no_group_is_not_let_in_by_the_verb(instance: Instance, users: None) -> None:
    """The daemon itself checks the group, whatever honectl does."""
    instance.start()
    open_incoming(instance)
    ask = (
        "import sys; from pathlib import Path; from honed.system.client import Client\n"
        "print(Client(Path(sys.argv[1])).ask('submit', name='a.json', data='e30=', uid=0))"
    )
    done = subprocess.run(
        [*become(UID, UID), sys.executable, "-c", ask, str(instance.layout.control_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SEC,
    )
    assert NotPermittedError.__name__ in done.stderr
    assert f"submit refused for user {UID}" in instance.log
