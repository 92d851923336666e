"""Somebody sets the clock, by a day, forward and back: no order changes, and no timeout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from honed.job.job import State
from honed.send import notification
from process.harness import Instance, is_alive
from process.listener import Listener, Quiet
from waiting import wait_for

DAY_SEC = 86_400.0
#: Writes the files that it is told to, and holds them open until its input ends: until then they are not whole.
HOLDER = """
import json, sys
held = []
for line in sys.stdin:
    path, text = json.loads(line)
    held.append(open(path, "w"))
    held[-1].write(text)
    held[-1].flush()
    print(flush=True)
for file in held:  # one after the other: an end of ours would close the last one first
    file.close()
"""


class Jumping(Instance):
    """Its time of day is off by what `set_clock` says."""

    popen = warm.JumpingPopen

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.clock_path = root / "clock"
        self.set_clock(0.0)
        # Its children start at the same server.
        server = {warm.ADDRESS.format("PLAIN"): warm.address(self.popen.kind)}
        self.environment |= {"HONED_TEST_CLOCK": str(self.clock_path), **server}

    def set_clock(self, offset_sec: float) -> None:
        temporary = self.clock_path.with_suffix(".new")
        temporary.write_text(str(offset_sec))
        temporary.rename(self.clock_path)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Jumping]:
    made = Jumping(tmp_path)
    made.configure(
        "[spool]\nsettle_sec = 0.5\n[jobs]\nretry_delay_sec = 0.5\nstall_timeout_sec = 120\ntime_limit_grace_sec = 0\n"
    )
    yield made
    made.end()


def test_the_clock_of_these_tests_jumps(instance: Jumping) -> None:
    instance.set_clock(86400.0)
    instance.drop("succeed-1")
    assert instance.drain() == 0
    job = instance.job("succeed-1")
    assert job is not None
    assert job.submitted_at > time.time() + 80000


@pytest.mark.parametrize("jump_sec", [DAY_SEC, -DAY_SEC])
def test_a_clock_that_jumps_changes_no_order_and_no_timeout(instance: Jumping, jump_sec: float) -> None:
    instance.start()
    instance.drop("until-40", name="until-40", time_limit_sec=600)
    instance.wait_state("until-40", State.RUNNING)
    for number, name in enumerate(("c", "a", "b")):  # of equal priority: as they came
        instance.set_clock(jump_sec * (number % 2))
        instance.drop(f"succeed-{name}", name=f"succeed-1.{name}")
        instance.wait_state(f"succeed-1.{name}", State.QUEUED)
    # A file as `cp -p` or a camera dates it: of tomorrow, of yesterday.
    for name, offset_sec in (("later", DAY_SEC), ("earlier", -DAY_SEC)):
        path = instance.drop(f"succeed-{name}", name=f"succeed-1.{name}")
        os.utime(path, (path.stat().st_mtime + offset_sec,) * 2)
    instance.drop("killer", name="killer", retry={"max_attempts": 3}, backend="transformers", time_limit_sec=600)
    instance.set_clock(jump_sec)
    instance.go("until-40")
    instance.wait_state("until-40", State.SUCCEEDED)  # it would be stalled, or cancelled, by the clock on the wall
    for name in ("c", "a", "b", "later", "earlier"):
        instance.wait_state(f"succeed-1.{name}", State.SUCCEEDED)
    killer = instance.wait_state("killer", State.FAILED)
    assert [attempt.outcome for attempt in killer.attempts] == ["killed"] * 3
    started = [line for line in instance.log.splitlines() if "attempt 1 starts" in line]
    names = [line.partition("(")[2].partition(")")[0] for line in started]
    assert [name for name in names if name[-1] in "abc"] == ["succeed-1.c", "succeed-1.a", "succeed-1.b"]
    assert "hangs" not in instance.log


@pytest.mark.parametrize("jump_sec", [DAY_SEC, -DAY_SEC])
def test_a_time_limit_counts_what_attempts_took_whatever_the_clock_says(instance: Jumping, jump_sec: float) -> None:
    """The worker of the first attempt dies, honed is killed, and it is another day each time."""
    instance.drop("a", name="slow-9999", time_limit_sec=600)
    instance.start()
    steps_path = instance.layout.job(1).checkpoints_dir / "step"

    def go_on() -> None:
        """Wait until the worker has taken a step more: it is there, and honed has had its turns."""
        before = steps_path.read_text() if steps_path.exists() else ""
        wait_for(lambda: steps_path.exists() and steps_path.read_text() not in {"", before}, what="a step")

    def worker() -> int:
        attempt = instance.layout.job(1).attempt(instance.wait_state("slow-9999", State.RUNNING).attempt.number)
        return int(json.loads((attempt.dir / "lock").read_text())["worker_pid"])

    go_on()
    instance.set_clock(jump_sec)
    os.kill(worker(), signal.SIGKILL)
    wait_for(lambda: "attempt 2 starts" in instance.log, what="the second attempt")
    go_on()
    pid = worker()
    instance.kill(signal.SIGKILL)
    instance.set_clock(2 * jump_sec)
    instance.start()
    go_on()
    instance.set_clock(4 * jump_sec)  # it ends while honed is down
    instance.kill(signal.SIGKILL)
    attempt = instance.layout.job(1).attempt(2)
    os.kill(pid, signal.SIGKILL)
    wait_for(attempt.exit_path.exists, what="its end")
    instance.set_clock(8 * jump_sec)
    instance.start()
    wait_for(lambda: "attempt 3 starts" in instance.log, what="the third attempt")
    go_on()
    job = instance.wait_state("slow-9999", State.RUNNING)
    assert [each.outcome for each in job.attempts] == ["killed", "killed", None]
    assert sum(each.spent_sec for each in job.attempts) < DAY_SEC / 2
    assert "time limit" not in instance.log


@pytest.mark.parametrize("has_pulse", [True, False])
def test_the_days_that_a_machine_is_off_are_no_time_of_a_jobs(instance: Jumping, has_pulse: bool) -> None:
    instance.drop("a", name="slow-9999", time_limit_sec=600)
    instance.start()
    wait_for(lambda: "step 1" in instance.log, what="a step")
    instance.kill(signal.SIGKILL)
    (job,) = instance.spool.jobs(State.RUNNING)
    attempt = instance.layout.job(1).attempt(1)
    record = json.loads((attempt.dir / "lock").read_text())
    os.kill(record["shim_pid"], signal.SIGKILL)  # as a power cut does
    wait_for(lambda: not is_alive(record["worker_pid"]), what="the end of its worker's pulse")
    # Its files, as if all that had been in an earlier boot, three days ago.
    entry_path = instance.layout.spool_dir / "running/1.json"
    entry = json.loads(entry_path.read_text())
    entry["attempts"][0] |= {"started_at": job.attempt.started_at - 3 * DAY_SEC, "boot_id": "an earlier one"}
    entry_path.write_text(json.dumps(entry))
    os.utime(attempt.pulse_path, (attempt.pulse_path.stat().st_mtime - 3 * DAY_SEC,) * 2)
    if not has_pulse:  # it had given no sign of life yet
        attempt.pulse_path.unlink()
    instance.start()
    wait_for(lambda: "attempt 2 starts" in instance.log, what="the second attempt")
    assert instance.wait_state("slow-9999", State.RUNNING).attempts[0].spent_sec < DAY_SEC
    wait_for(lambda: "resumes from" in instance.log, what="the worker again")
    assert "time limit" not in instance.log


class _Refuse(Quiet):
    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.owner.replies.append(500 if len(self.server.owner.replies) < 6 else 200)  # type: ignore[attr-defined]
        self.send_response(self.server.owner.replies[-1])  # type: ignore[attr-defined]
        self.end_headers()


class Busy(Listener):
    """Takes nothing at first."""

    request_class = _Refuse

    def __init__(self) -> None:
        self.replies: list[int] = []
        super().__init__()


def test_a_notice_that_waits_is_not_given_up_because_the_clock_is_set(instance: Jumping) -> None:
    hook = Busy()
    url = f"http://127.0.0.1:{hook.port}/"
    instance.configure(
        f'[notify]\nallowed_webhooks = ["{url}"]\ngive_up_days = 0.5\n'
        "retry_delay_sec = 0.2\nmax_retry_delay_sec = 0.2\n"
    )
    instance.drop("a", name="succeed.a", notify={"webhook": url})
    instance.start()
    wait_for(lambda: hook.replies, what="the first try")
    instance.set_clock(DAY_SEC)
    wait_for(lambda: 200 in hook.replies, what="the last try")
    instance.stop()
    hook.down()
    assert not list(notification.refused_dir(instance.layout).glob("*"))


def test_files_seen_in_one_order_are_taken_in_it_whatever_their_times_say(instance: Jumping) -> None:
    instance.configure("[spool]\nsettle_sec = 0.5\nrescan_interval_sec = 0.1\n")
    template = instance.drop("template", name="x")
    text = template.read_text()
    template.unlink()
    instance.start()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    for number, name in enumerate(("first", "second"), 1):
        written = [str(instance.incoming_dir / f"{name}.json"), text.replace('"x"', f'"succeed-1.{name}"')]
        print(json.dumps(written), file=holder.stdin, flush=True)
        holder.stdout.readline()
        wait_for(lambda wanted=number: instance.client.ask("status")["num_arriving"] == wanted, what="it is seen")
    (instance.incoming_dir / "first.json").chmod(0o640)  # by its times it is the younger one now
    holder.stdin.close()
    holder.wait()
    for name in ("first", "second"):
        instance.wait_state(f"succeed-1.{name}", State.SUCCEEDED)
    first, second = instance.job("succeed-1.first"), instance.job("succeed-1.second")
    assert first is not None
    assert second is not None
    assert first.id < second.id
