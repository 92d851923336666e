"""honed-send, the program, with an endpoint that misbehaves on demand: whatever happens, each row arrives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import endpoint as api
import pytest
from endpoint import Endpoint, Reply, Request, refuse
from harness import DEADLINE_SEC
from listener import drip

import warm
from honed.cli import doctor
from honed.job.event import Event, Reading
from honed.job.job import Attempt, Job
from honed.send import outbox
from honed.send.outbox import Outbox
from honed.spec import config
from honed.system.layout import Layout
from waiting import wait_for

JOB = Job(
    id=7,
    name="j",
    submitted_at=0,
    source="j",
    uid=1000,
    output_dir="/o",
    attempts=(Attempt(number=1, backend="transformers", started_at=0),),
)
TOKEN = "s3cret-t0ken"


class Sending:
    """An instance's outbox, and a honed-send process that reads it."""

    def __init__(self, root: Path, endpoint: Endpoint) -> None:
        self.layout = Layout(root)
        self.endpoint = endpoint
        self.log_path = root / "send.log"
        self.token_path = root / "token"
        self.token_path.write_text(f"{TOKEN}\n")
        self.token_path.chmod(0o640)
        self.process: warm.Popen | None = None
        self.configure()

    def configure(self, **keys: Any) -> None:
        figures = {"flush_sec": DEADLINE_SEC, "retry_delay_sec": 0.05, "max_retry_delay_sec": 0.2, **keys}
        texts = {"metrics_api_url": self.endpoint.url, "token_file": self.token_path}
        lines = [*(f'{key} = "{text}"' for key, text in texts.items()), *(f"{key} = {n}" for key, n in figures.items())]
        self.layout.config_path.parent.mkdir(parents=True, exist_ok=True)
        self.layout.config_path.write_text("\n".join(["[reporting]", *lines, ""]))

    def put(self, num_steps: int, *, first: int = 1, text: str = "p") -> set[str]:
        """Put a metric and a prediction for each step into the outbox. Returns their keys."""
        events = []
        for step in range(first, first + num_steps):
            answers = [{"sample_index": 0, "prompt": text, "ground_truth": "t", "prediction": f"{step}"}]
            events += [
                Event("step", 1000.0 + step, {"step": step, "epoch": 0.5, "loss": 1 / step}),
                Event("predictions", 1000.0 + step, {"step": step, "epoch": 0.5, "rows": answers}),
            ]
        assert Outbox(self.layout.outbox_dir, max_bytes=1 << 30).put(JOB, Reading(events, 0, 0)) == 0
        return {str(row["idempotency_key"]) for event in events for row in outbox.rows(JOB, event)}

    def start(self, *arguments: str, **environment: str) -> None:
        command = [sys.executable, "-m", "honed.send.sender", "--root", str(self.layout.root), *arguments]
        with self.log_path.open("ab") as file:
            self.process = warm.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=file, env={**os.environ, **environment}
            )

    def finish(self) -> int:
        """Let it deliver the queued rows, and wait for its end."""
        assert self.process is not None
        if self.process.stdin is not None:
            self.process.stdin.close()
        return self.process.wait(DEADLINE_SEC)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_arrived(self, keys: set[str]) -> None:
        wait_for(lambda: keys <= set(self.endpoint.rows), what="all rows")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def refused(self) -> list[dict[str, Any]]:
        found = []
        for path in outbox.refused_dir(self.layout.outbox_dir).glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # delivered since
                found.append(json.loads(path.read_text()))
        return found


@pytest.fixture
def sending(tmp_path: Path) -> Iterator[Sending]:
    with api.running() as endpoint:
        made = Sending(tmp_path, endpoint)
        yield made
        made.kill()


def test_rows_arrive_with_their_token_and_their_keys(sending: Sending) -> None:
    keys = sending.put(3)
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    (request,) = sending.endpoint.requests
    assert request.headers["Authorization"] == f"Bearer {TOKEN}"
    metric = next(row for row in sending.endpoint.named("value") if row["step"] == 2)
    assert {key: metric[key] for key in ("job_id", "user_id", "attempt", "epoch", "name", "value")} == {
        "job_id": "7",
        "user_id": "1000",
        "attempt": 1,
        "epoch": 0.5,
        "name": "loss",
        "value": 0.5,
    }
    prediction = next(row for row in sending.endpoint.named("prediction") if row["step"] == 2)
    assert prediction["prediction"] == "2"
    assert prediction["created_at"] == "1970-01-01T00:16:42.000+00:00"


@pytest.mark.parametrize(
    "trouble",
    [
        refuse(500),
        refuse(503, b"busy", Retry_After="0"),
        refuse(429),
        refuse(401),
        refuse(404),
        refuse(302, Location="http://127.0.0.1:9/"),
        api.speak_no_http,
        api.hang_up,
        api.show_a_login_page,
        api.cut_the_answer_short,
        drip,
        api.keep_and_hang_up,
    ],
    ids=[
        "500",
        "503",
        "429",
        "401",
        "404",
        "redirect",
        "garbage",
        "hangs-up",
        "login-page",
        "cut-short",
        "drips",
        "kept-without-a-word",
    ],
)
def test_what_goes_wrong_for_a_while_costs_no_row(sending: Sending, trouble: Reply) -> None:
    if trouble is drip:
        sending.configure(timeout_sec=3)
    keys = sending.put(2)
    sending.endpoint.replies = [trouble, trouble]
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    assert sending.refused == []
    assert sending.log.count("not delivered, retrying") == 1  # said once, not at each try
    assert "delivering again" in sending.log


def test_an_endpoint_that_is_down_is_waited_for(sending: Sending) -> None:
    sending.endpoint.down()
    keys = sending.put(2)
    sending.start()
    wait_for(lambda: "Connection refused" in sending.log, what="a word")
    wait_for(lambda: outbox.read_trouble(sending.layout.outbox_dir), what="a word for the doctor")
    (finding,) = doctor._reporting(sending.layout, config.load(sending.layout))
    assert "Connection refused" in finding.detail
    keys |= sending.put(2, first=3)
    sending.endpoint.up()
    sending.wait_arrived(keys)
    wait_for(lambda: outbox.num_waiting_bytes(sending.layout.outbox_dir) == 0, what="the cursor")
    assert outbox.read_trouble(sending.layout.outbox_dir) is None


def test_a_batch_that_is_too_large_is_sent_in_parts(sending: Sending) -> None:
    def at_most_three(request: Request) -> None:
        request.answer(413) if len(request.rows) > 3 else request.accept()

    sending.endpoint.default = at_most_three
    keys = sending.put(20)
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    assert max(sending.endpoint.num_times.values()) == 1


def test_a_row_that_is_refused_is_set_aside_and_can_be_sent_again(sending: Sending) -> None:
    def picky(request: Request) -> None:
        if any(row["step"] == 5 and "prediction" in row for row in request.rows):
            request.answer(422, b'{"error": "prediction: not in my world"}')
        else:
            request.accept()

    sending.endpoint.default = picky
    keys = sending.put(10)
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert len(keys - set(sending.endpoint.rows)) == 1
    (refused,) = sending.refused
    assert (refused["status"], refused["row"]["step"]) == (422, 5)
    assert "a prediction of job 7 (step 5) was rejected with 422" in sending.log
    assert "not in my world" in refused["answer"]
    assert "not in my world" not in sending.log, "it may be the row itself"
    (finding,) = doctor._reporting(sending.layout, config.load(sending.layout))
    assert finding.status == "warning"
    assert "1 rows were rejected" in finding.detail

    sending.start("--again")
    assert sending.finish() == 1
    assert len(sending.refused) == 1
    sending.endpoint.default = Request.accept
    sending.start("--again")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    assert sending.refused == []


def test_an_endpoint_that_refuses_everything_fills_neither_disk_nor_log(sending: Sending) -> None:
    sending.configure(max_outbox_bytes=1500)
    sending.endpoint.default = refuse(400, b"no")
    keys = sending.put(10)
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert 0 < len(sending.refused) < len(keys)
    assert sending.log.count("was rejected with 400") == 1
    assert sending.log.count("; honed.db has it") == len(keys) - len(sending.refused)


def test_a_reload_sends_what_was_refused_once_more(sending: Sending) -> None:
    sending.endpoint.default = refuse(400)
    keys = sending.put(2)
    sending.start()
    wait_for(lambda: len(sending.refused) == len(keys), what="refusals")
    sending.endpoint.default = Request.accept
    assert sending.process is not None
    sending.process.send_signal(signal.SIGHUP)
    sending.wait_arrived(keys)
    wait_for(lambda: not sending.refused, what="their removal")


def test_refused_rows_are_sent_once_more_though_the_server_is_down_at_first(sending: Sending) -> None:
    sending.endpoint.default = refuse(400)
    keys = sending.put(2)
    sending.start()
    wait_for(lambda: len(sending.refused) == len(keys), what="refusals")
    sending.endpoint.replies = [Request.accept, refuse(503, b"busy", Retry_After="0"), api.hang_up]
    sending.endpoint.default = Request.accept
    assert sending.process is not None
    sending.process.send_signal(signal.SIGHUP)
    sending.wait_arrived(keys)
    wait_for(lambda: not sending.refused, what="their removal")


def test_a_row_that_is_there_already_counts_as_delivered(sending: Sending) -> None:
    def knows_them(request: Request) -> None:
        new = [row for row in request.rows if row["idempotency_key"] not in request.server.owner.rows]  # type: ignore[attr-defined]
        request.accept() if new == request.rows else request.answer(409)

    keys = sending.put(4)
    sending.endpoint.replies = [api.keep_and_hang_up]
    sending.endpoint.default = knows_them
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    assert sending.refused == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_the_answer_loses_no_row(sending: Sending, when: str) -> None:
    def kill(request: Request) -> None:
        assert sending.process is not None
        if when == "after":
            with sending.endpoint.lock:
                sending.endpoint.rows |= {row["idempotency_key"]: row for row in request.rows}
        os.kill(sending.process.pid, signal.SIGKILL)

    keys: set[str] = set()
    for turn in range(6):
        keys |= sending.put(5, first=1 + 5 * turn)
        sending.endpoint.replies = [kill]
        sending.start()
        assert sending.process is not None
        assert sending.process.wait(DEADLINE_SEC) == -signal.SIGKILL
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys
    sent = [row for request in sending.endpoint.requests for row in request.rows]
    assert len({json.dumps(row, sort_keys=True) for row in sent}) == len(keys)  # the same row under the same key


def test_a_stop_ends_it_at_once_even_within_a_slow_answer(sending: Sending) -> None:
    sending.configure(timeout_sec=120)
    sending.endpoint.replies = [drip]
    keys = sending.put(2)
    sending.start()
    wait_for(lambda: sending.endpoint.requests, what="a request")
    assert sending.process is not None
    sending.process.terminate()
    assert sending.process.wait(DEADLINE_SEC / 2) == 0
    sending.start("--until-eof")
    assert sending.finish() == 0
    assert set(sending.endpoint.rows) == keys


def test_a_new_token_is_taken_without_a_restart(sending: Sending) -> None:
    def guarded(request: Request) -> None:
        request.accept() if request.headers["Authorization"] == "Bearer new" else request.answer(401, b"expired")

    sending.endpoint.default = guarded
    keys = sending.put(1)
    sending.start()
    wait_for(lambda: "401 Unauthorized: …" in sending.log, what="a word")
    wait_for(lambda: "expired" in (outbox.read_trouble(sending.layout.outbox_dir) or ""), what="a word for doctor")
    sending.token_path.unlink()
    sending.token_path.write_text("new\n")
    sending.wait_arrived(keys)


def test_a_credential_goes_before_the_token_file(sending: Sending) -> None:
    directory = sending.layout.root / "credentials"
    directory.mkdir()
    (directory / "JOB_TOKEN").write_text("from-systemd")
    sending.put(1)
    sending.start("--until-eof", CREDENTIALS_DIRECTORY=str(directory))
    assert sending.finish() == 0
    assert sending.endpoint.requests[0].headers["Authorization"] == "Bearer from-systemd"


def test_a_token_is_never_shown(sending: Sending) -> None:
    for bad in ("two words", "line\nbreak", "\x07bell", "ünicode"):
        sending.token_path.write_text(f"{TOKEN} {bad}")
        sending.put(1)
        sending.configure(flush_sec=0.3)
        sending.start("--until-eof", "--verbose")
        assert sending.finish() == 0
    assert sending.endpoint.requests == []
    assert "token" in sending.log
    assert TOKEN not in sending.log
    for path in sending.layout.outbox_dir.rglob("*"):
        assert path.is_dir() or TOKEN not in path.read_text()


def test_a_reload_takes_a_new_address_and_refuses_a_broken_one(sending: Sending) -> None:
    sending.endpoint.down()
    keys = sending.put(1)
    sending.start()
    wait_for(lambda: "Connection refused" in sending.log, what="a word")
    with api.running() as other:
        sending.layout.config_path.write_text('[reporting]\nmetrics_api_url = "ftp://x"\n')
        assert sending.process is not None
        sending.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "not an HTTP or HTTPS URL" in sending.log, what="the refusal")
        sending.endpoint = other
        sending.configure()
        sending.process.send_signal(signal.SIGHUP)
        sending.wait_arrived(keys)


def test_only_one_delivers_at_a_time(sending: Sending) -> None:
    sending.start()
    wait_for(lambda: "sends metrics" in sending.log, what="the first")
    wait_for((outbox.sender_dir(sending.layout.outbox_dir) / "lock").exists, what="its lock")
    first, sending.process = sending.process, None
    assert first is not None
    try:
        sending.start()
        wait_for(lambda: "another honed-send is running" in sending.log, what="the second")
        keys = sending.put(2)
        sending.wait_arrived(keys)
        wait_for(lambda: outbox.num_waiting_bytes(sending.layout.outbox_dir) == 0, what="the cursor")
        first.kill()
        first.wait()
        keys |= sending.put(2, first=3)
        sending.wait_arrived(keys)
    finally:
        first.kill()
    assert max(sending.endpoint.num_times.values()) == 1
