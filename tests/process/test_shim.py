"""The shim on its own: the arguments it passes on, the signals and output it relays, and the files it writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cgroup import limited_to
from harness import DEADLINE_SEC

from honed.run import jobunit, shim
from honed.run.runner import exit_of, read_exit_record
from honed.system.layout import Layout
from waiting import wait_for

SHIM = Path(shim.__file__)


class Shim:
    """One shim whose worker is a line of Python, started as its unit starts it."""

    def __init__(self, attempt_dir: Path, code: str, **environment: str) -> None:
        self.dir = attempt_dir
        self.dir.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SHIM), "--relay", str(self.dir), "1", sys.executable, "-uc", code],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    @property
    def log(self) -> str:
        path = self.dir / "worker.log"
        return path.read_text() if path.exists() else ""

    @property
    def worker_pid(self) -> int:
        return int(json.loads((self.dir / "lock").read_text())["worker_pid"])

    def tell(self, line: str) -> None:
        """Write a line to the worker's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, dict[str, Any]]:
        """(exit status, what went to the journal, exit.json)."""
        _, told = self.process.communicate(timeout=DEADLINE_SEC)
        return self.process.returncode, told.decode(), json.loads((self.dir / "exit.json").read_text())


Start = Callable[..., Shim]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return lambda code, **environment: Shim(tmp_path / "1", code, **environment)


def test_what_a_worker_writes_goes_to_its_log_and_not_to_the_journal(start: Start) -> None:
    """The journal has many more readers, and the output may contain rows."""
    code = r"import sys; print('one'); sys.stderr.write('10%\r20%\r100%\n<4>heed me\n\nno end')"
    made = start(code)
    status, told, record = made.end()
    assert (status, record["status"], record["signal"], record["was_out_of_memory"]) == (0, 0, None, False)
    assert told == ""
    assert (made.dir / "worker.log").read_bytes() == b"one\n10%\r20%\r100%\n<4>heed me\n\nno end"


def test_what_a_worker_prints_is_in_its_log_alone(start: Start, tmp_path: Path) -> None:
    """The journal has more readers, and a terminal interprets control sequences."""
    lines = ["<0>fire", "<3>error", "<7>calm", "\x1b[31mred \u202eturned\u202c\x9b2J", "a\ttab, é and 日本"]
    assert start(f"for line in {lines!r}: print(line)").end()[1] == ""
    assert (tmp_path / "1/worker.log").read_text() == "\n".join(lines) + "\n"


def test_the_log_has_it_as_it_was(start: Start, tmp_path: Path) -> None:
    start(r"print('a\rb'); print('c' * 100000)").end()
    assert (tmp_path / "1/worker.log").read_bytes() == b"a\rb\n" + b"c" * 100000 + b"\n"


def test_the_last_words_of_a_worker_that_dies_arrive(start: Start) -> None:
    made = start("import os; os.write(2, b'x' * 60000 + b'last'); os.abort()")
    status, _, record = made.end()
    assert (status, record["signal"]) == (-signal.SIGABRT, signal.SIGABRT)
    assert made.log.endswith("xlast")


def test_the_shim_ends_as_the_worker_did(start: Start) -> None:
    assert start("raise SystemExit(75)").end()[0] == 75


def test_a_stopped_worker_is_woken_to_dump_its_stacks_which_stand_out_in_the_journal(start: Start) -> None:
    made = start("import faulthandler, time; faulthandler.enable(); print('up'); time.sleep(900)")
    wait_for(lambda: "up" in made.log, what="the worker")
    os.kill(made.worker_pid, signal.SIGSTOP)
    made.process.send_signal(signal.SIGABRT)
    status, told, record = made.end()
    assert (status, record["signal"]) == (-signal.SIGABRT, signal.SIGABRT)
    assert "<4>Fatal Python error: Aborted" in told
    assert 'File "<string>", line 1 in <module>' in told


def test_stacks_behind_a_line_that_was_not_ended_are_in_the_journal_without_it(start: Start) -> None:
    """As a progress bar is while a worker hangs."""
    made = start("import faulthandler, os; faulthandler.enable(); os.write(2, b'a row: 50%'); os.abort()")
    status, told, _ = made.end()
    assert status == -signal.SIGABRT
    assert told.startswith("<4>Fatal Python error: Aborted\n<4>")
    assert "row" not in told
    assert "a row: 50%Fatal" in made.log


def test_the_stacks_of_a_crash_are_in_the_journal_and_nothing_that_is_printed_beside_them(start: Start) -> None:
    printed = r"Fatal Python error: of a row\n  File \"row\", line 7 in it\nThread 0x7 of a row"
    crash = "import ctypes, faulthandler, sys; faulthandler.enable()\n"
    made = start(f'{crash}print("{printed}", flush=True)\nctypes.string_at(0)')
    status, told, _ = made.end()
    assert status == -signal.SIGSEGV
    assert told.startswith("<4>Fatal Python error: Segmentation fault\n<4>")
    assert "line 3 in <module>" in told
    assert "row" not in told
    assert "of a row" in made.log


def test_children_that_a_worker_leaves_behind_do_not_hold_up_its_end(start: Start) -> None:
    child = "import time\nwhile True: print('still here', flush=True); time.sleep(0.001)"
    made = start(f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)")
    wait_for((made.dir / "exit.json").exists, what="the end")
    os.kill(int(made.log.split()[0]), signal.SIGKILL)
    assert made.end()[0] == 0


def test_systemd_is_asked_for_more_time_while_a_worker_that_is_to_stop_writes_its_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(DEADLINE_SEC)
        save = "import signal, time; signal.signal(15, lambda *_: (time.sleep(0.3), exit(75)))"
        code = f"{save}; print('up'); time.sleep(900)"
        made = start(code, NOTIFY_SOCKET=str(tmp_path / "notify"), HONED_STOP_TIMEOUT_SEC="15")
        wait_for(lambda: "up" in made.log, what="the worker")
        made.process.terminate()
        extension, watchdog, beat = systemd.recv(200).decode().splitlines()
        status, _, record = made.end()
    assert (status, record["was_asked"], beat) == (75, True, "WATCHDOG=1")
    assert 0 < int(extension.removeprefix("EXTEND_TIMEOUT_USEC=")) <= 15e6
    assert int(watchdog.removeprefix("WATCHDOG_USEC=")) > 20e6


def test_a_systemd_that_reads_nothing_holds_up_no_worker_that_is_to_stop(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            while True:
                other.sendto(b"X_OTHER=1", systemd.getsockname())
        save = "import signal, time; signal.signal(15, lambda *_: (time.sleep(0.3), exit(75)))"
        made = start(
            f"{save}; print('up'); time.sleep(900)", NOTIFY_SOCKET=systemd.getsockname(), HONED_STOP_TIMEOUT_SEC="15"
        )
        wait_for(lambda: "up" in made.log, what="the worker")
        made.process.terminate()
        assert made.end()[0] == 75


# -- the kernel's out-of-memory killer ---------------------------------------------------------------------------------

EAT = "import sys; print('up'); sys.stdin.readline(); eaten = []\nwhile True: eaten.append(b'x' * (1 << 20))"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with limited_to(64 << 20, "shim") as made:
        yield made


def put_into(cgroup: Path, *pids: int) -> None:
    for pid in pids:
        (cgroup / "cgroup.procs").write_text(str(pid))


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_told_from_one_that_was_killed_meanwhile(
    tmp_path: Path, cgroup: Path
) -> None:
    bystander = Shim(tmp_path / "bystander", "import time; print('up'); time.sleep(900)")
    eater = Shim(tmp_path / "eater", EAT)
    wait_for(lambda: "up" in bystander.log and "up" in eater.log, what="the workers")
    put_into(cgroup, eater.process.pid, eater.worker_pid)
    eater.tell("eat")
    status, _, record = eater.end()
    assert (status, record["signal"], record["was_out_of_memory"]) == (-signal.SIGKILL, signal.SIGKILL, True)
    os.kill(bystander.worker_pid, signal.SIGKILL)
    status, _, record = bystander.end()
    assert (status, record["signal"], record["was_out_of_memory"]) == (-signal.SIGKILL, signal.SIGKILL, False)


@pytest.mark.parametrize(
    ("group", "counter"),
    [
        ("4:memory:/a/b", "fs/memory/a/b/memory.oom_control"),
        ("0::/a/b", "fs/a/b/memory.events.local"),
        ("4:cpu,memory:/", "fs/memory/memory.oom_control"),
        ("0::/a/b", None),
        ("3:cpu:/a", None),
        (None, None),
    ],
)
def test_kills_are_counted_in_our_cgroup_and_on_the_machine_where_there_is_none(
    tmp_path: Path, group: str | None, counter: str | None
) -> None:
    counters = {"proc/vmstat": "nr_free_pages 7\noom_kill 13\n"}
    if counter is not None:
        counters[counter] = "oom_kill_disable 0\nunder_oom 0\nlow 2\noom_kill 3\noom_group_kill 9\n"
    if group is not None:
        counters["proc/self/cgroup"] = f"9:name=systemd:/x\n{group}\n"
    for name, text in counters.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = shim.out_of_memory_kills(str(tmp_path / "fs"), str(tmp_path / "proc"))
    assert found == ((str(tmp_path / counter), 3) if counter else (str(tmp_path / "proc/vmstat"), 13))


def test_where_nothing_is_counted_nothing_is_taken_for_it(tmp_path: Path) -> None:
    assert shim.out_of_memory_kills(str(tmp_path), str(tmp_path)) == ("", 0)


# -- the ends of a unit ------------------------------------------------------------------------------------------------

START = jobunit.Start(2, 1, "transformers", {"A": "b"}, 60.0, 30.0)
KILLED = {"SERVICE_RESULT": "oom-kill", "EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}


def test_a_start_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Layout(tmp_path).files(7)
    job.place.mkdir(parents=True)
    START.write(job)
    assert jobunit.read(job) == START


def test_where_the_shim_was_killed_the_units_end_is_written_down(tmp_path: Path) -> None:
    job = Layout(tmp_path).files(7)
    job.place.mkdir(parents=True)
    START.write(job)
    jobunit.end(job, KILLED)
    ended = exit_of(read_exit_record(job.attempt(2), 1))
    assert (ended.status, ended.signal, ended.service_result, ended.ran) == (None, signal.SIGKILL, "oom-kill", False)


def test_what_systemd_knows_is_added_to_what_the_shim_has_written_and_once(tmp_path: Path) -> None:
    job, attempt = Layout(tmp_path).files(7), Layout(tmp_path).job(7).attempt(2)
    attempt.dir.mkdir(parents=True)
    START.write(job)
    attempt.exit_path.write_text(json.dumps({"start": 1, "status": 75, "signal": None}))
    stopped = {"SERVICE_RESULT": "success", "EXIT_CODE": "exited", "EXIT_STATUS": "75"}
    jobunit.end(job, stopped, system_state="stopping")
    again = jobunit.end(job, {**KILLED})
    assert (again["status"], again["service_result"], again["system_state"]) == (75, "success", "stopping")
    assert exit_of(again).is_machine_going_down


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"number": 1}', '{"start": "\\ud800"}'])
def test_a_start_that_honed_did_not_write_starts_nothing(tmp_path: Path, text: str) -> None:
    job = Layout(tmp_path).job(7)
    job.dir.mkdir(parents=True)
    job.start_path.write_text(text)
    assert "start.json" in jobunit.start(Layout(tmp_path).files(7))


# -- several ranks -----------------------------------------------------------------------------------------------------

#: A rank that says who it is, and handles its signals as a worker does.
RANK = """
import os, signal, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
os.write(1, (" ".join(f"{name}={os.environ[name]}" for name in names) + "\\n").encode())
"""


def has_all(made: Shim, word: str, number: int) -> Callable[[], bool]:
    return lambda: made.log.count(word) == number


def worker_pids(made: Shim) -> list[int]:
    return list(json.loads((made.dir / "lock").read_text())["worker_pids"])


def test_each_rank_knows_its_place_and_all_end_well(start: Start) -> None:
    made = start(RANK, HONED_NUM_RANKS="3")
    status, _, record = made.end()
    assert (status, record["status"], record["rank"]) == (0, 0, 0)
    assert sorted(made.log.splitlines()) == [
        f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=3 LOCAL_WORLD_SIZE=3" for rank in range(3)
    ]


def test_a_stop_reaches_all_ranks(start: Start) -> None:
    stopped = "signal.signal(15, lambda *_: exit(75)); print('up', flush=True); time.sleep(900)"
    made = start(RANK + stopped, HONED_NUM_RANKS="2")
    wait_for(has_all(made, "up", 2), what="the ranks")
    made.process.terminate()
    status, _, record = made.end()
    assert (status, record["status"], record["was_asked"]) == (75, 75, True)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_one_rank_is_the_attempts_end_and_the_others_are_asked_to_stop(start: Start, rank: int) -> None:
    stopped = "signal.signal(15, lambda *_: exit(87)); print('up', flush=True); time.sleep(900)"
    made = start(RANK + stopped, HONED_NUM_RANKS="3")
    wait_for(has_all(made, "up", 3), what="the ranks")
    pids = worker_pids(made)
    os.kill(pids[rank], signal.SIGKILL)
    status, _, record = made.end()
    assert (status, record["signal"], record["rank"], record["was_asked"]) == (-signal.SIGKILL, 9, rank, False)
    assert json.loads((made.dir / "ranks/lost.json").read_text()) == {"rank": rank, "signal": 9}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_ranks_that_do_not_end_after_a_failure_are_killed(start: Start) -> None:
    """One of them stands still, and another ignores it."""
    code = (
        "signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
        "if os.environ['RANK'] == '2': sys.stdin.readline(); exit(81)\n"
        "time.sleep(900)"
    )
    made = start(RANK + code, HONED_NUM_RANKS="3")
    wait_for(has_all(made, "up", 3), what="the ranks")
    pids = worker_pids(made)
    os.kill(pids[0], signal.SIGSTOP)
    made.tell("fail")
    status, _, record = made.end()
    assert (status, record["status"], record["signal"], record["rank"]) == (81, 81, None, 2)
    assert not (made.dir / "ranks/lost.json").exists()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_no_rank_outlives_the_shim_and_the_next_start_finds_nothing_of_it(start: Start, tmp_path: Path) -> None:
    made = start(RANK + "print('up', flush=True); time.sleep(900)", HONED_NUM_RANKS="2")
    wait_for(has_all(made, "up", 2), what="the ranks")
    pids = worker_pids(made)
    (made.dir / "ranks/error.json").write_text("{}")
    made.process.kill()
    made.process.communicate()
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], what="the end of the ranks")
    command = [sys.executable, "-I", "-S", str(SHIM), str(made.dir), "2", sys.executable, "-c", RANK]
    subprocess.run(command, check=True, env={**os.environ, "HONED_NUM_RANKS": "2"}, timeout=DEADLINE_SEC)
    assert not list((made.dir / "ranks").iterdir())
