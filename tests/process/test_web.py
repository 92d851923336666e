"""honed-web: the real program with the real daemon, queried as people, browsers, Prometheus and attackers do."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from harness import DEADLINE_SEC, Instance, children_of, command_of, is_alive
from prometheus_client.parser import text_string_to_metric_families
from test_report import HOSTILE, Page, write_events

import warm
from honed.job.event import EventWriter
from honed.job.job import Job, State
from honed.page import api
from waiting import wait_for

TOKEN = "0123456789abcdef-s3cret"
SHARED = "[policy]\nshare_results = true\n"


def command(instance: Instance, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "honed.page.server", "--root", str(instance.root), *arguments]


class Web:
    """One honed-web process of an instance, on a port of its own."""

    def __init__(self, instance: Instance, *arguments: str) -> None:
        self.log_path = instance.root / f"web-{time.monotonic_ns()}.log"
        words = command(instance, "--listen", "127.0.0.1:0", *arguments)
        with self.log_path.open("wb") as file:
            self.process = warm.Popen(words, stdout=file, stderr=file, env=instance.environment)
        wait_for(lambda: "is listening on" in self.log or self.process.poll() is not None, what="honed-web")
        found = re.search(r"is listening on http://([0-9.]+):(\d+)/", self.log)
        assert found is not None, self.log
        self.host, self.port = found[1], int(found[2])

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_SEC)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        told = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        connection.close()
        return told

    def json(self, path: str, **headers: str) -> Any:
        status, _, body = self.ask(path, **headers)
        assert status == 200, body
        return json.loads(body)

    def pages(self, path: str, key: str) -> tuple[list[dict[str, Any]], int]:
        """Return all rows by following `next`, and the number of pages."""
        rows, count, after = [], 0, path
        while after:
            told = self.json(after)
            rows += told[key]
            count, after = count + 1, told["next"]
        return rows, count

    def open(self, request: bytes = b"") -> socket.socket:
        made = socket.create_connection((self.host, self.port), timeout=DEADLINE_SEC)
        made.sendall(request)
        return made

    def stream(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_SEC)
        connection.request("GET", path)
        return connection.getresponse()

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) * 1024

    def pages_in_work(self) -> list[int]:
        """Return the pids of the processes that make a page, past their exec: until then their parent, the server,
        waits in vfork."""
        return [pid for pid in children_of(self.process.pid) if b"honed.page.report" in command_of(pid)]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SEC)


@contextlib.contextmanager
def serving(instance: Instance, *arguments: str) -> Iterator[Web]:
    web = Web(instance, *arguments)
    try:
        yield web
    finally:
        if web.process.poll() is None:
            web.process.kill()
            web.process.wait()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    """An instance with a job that reported much, hostile text included, and one that failed; honed is down."""
    instance = Instance(tmp_path_factory.mktemp("told"))
    instance.configure(SHARED)
    for name in ("succeed", "explain"):
        drain(instance, name)
    tell_much(instance, answer=HOSTILE + "x" * 50_000)
    return instance


def drain(instance: Instance, name: str = "succeed") -> None:
    instance.drop(name)
    assert instance.drain() == 0


def tell_much(instance: Instance, *, answer: str) -> None:
    """Give job 1 this answer in its predictions: honed rebuilds its database from the job's events."""
    write_events(instance, 1, answer=answer)
    instance.layout.database_path.unlink()
    assert instance.drain() == 0


def run(instance: Instance, name: str) -> Job:
    """Start honed with a job, and return the job once it runs."""
    instance.drop(name)
    instance.start()
    return instance.wait_state(name, State.RUNNING)


def bearer(token: str) -> str:
    return f"Bearer {token}"


def request_head(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def events(stream: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in iter(stream.readline, b""):
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


# -- the API ----------------------------------------------------------------------------------------------------------


def test_pages_of_any_size_hold_every_row_once_and_in_order(asked: Web) -> None:
    web = asked
    assert [row["id"] for row in web.pages("/api/jobs?limit=1", "jobs")[0]] == [2, 1]
    assert [row["id"] for row in web.json("/api/jobs?state=failed")["jobs"]] == [2]
    whole, _ = web.pages("/api/jobs/1/metrics?limit=500", "metrics")
    some, count = web.pages("/api/jobs/1/metrics?limit=7", "metrics")
    assert some == whole
    assert count == -(-len(whole) // 7)
    losses, _ = web.pages("/api/jobs/1/metrics?name=loss&limit=9", "metrics")
    assert losses == [row for row in whole if row["name"] == "loss"]
    assert {row["step"] for row in losses} == set(range(1, 61))

    rows, count = web.pages("/api/jobs/1/predictions?limit=2", "predictions")
    assert [(row["step"], row["sample_index"]) for row in rows] == [(s, n) for s in range(10, 61, 10) for n in range(3)]
    assert count == 9
    one, _ = web.pages("/api/jobs/1/predictions?sample_index=1&limit=1", "predictions")
    assert [row["step"] for row in one] == list(range(10, 61, 10))
    assert rows[0]["prediction"].startswith(HOSTILE[:40])
    assert "\x00" in rows[0]["prediction"]
    assert len(web.json("/api/jobs/1/predictions?step=60")["predictions"]) == 3


def test_a_page_of_long_texts_ends_early(instance: Instance) -> None:
    instance.configure(SHARED)
    drain(instance)
    tell_much(instance, answer="é" * 400_000)
    with serving(instance) as web:
        status, headers, body = web.ask("/api/jobs/1/predictions?limit=500")
        assert status == 200
        assert len(body) < 3_000_000  # of more than 12 MB
        assert headers["link"].endswith('rel="next"')
        assert len(web.pages("/api/jobs/1/predictions?limit=500", "predictions")[0]) == 18


def test_what_the_description_says_is_what_comes(asked: Web) -> None:
    web = asked
    described = web.json("/openapi.json")
    assert described["openapi"].startswith("3.")
    whole = json.dumps(described)
    for reference in re.findall(r'"#/components/schemas/(\w+)"', whole):
        assert reference in described["components"]["schemas"]
    names = [each["get"]["operationId"] for each in described["paths"].values()]
    assert len(set(names)) == len(names)
    for endpoint in api.ENDPOINTS:
        said = described["paths"][endpoint.path]["get"]
        assert {each["name"] for each in said["parameters"] if each["in"] == "query"} == set(
            endpoint.parameters.model_fields
        )
        status, headers, body = web.ask(endpoint.path.replace("{job_id}", "1"))
        assert status == (503 if endpoint.path == "/healthz" else 200)
        assert headers["content-type"] == "application/json"
        endpoint.answer.model_validate_json(body)
        status, _, body = web.ask(endpoint.path.replace("{job_id}", "1") + "?nonsense=1")
        assert status == 400
        api.Failure.model_validate_json(body)
    for path in described["paths"]:
        if not path.endswith("/events"):
            assert web.ask(path.replace("{job_id}", "1"))[0] in {200, 503}, path


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/jobs/99", 404, "no job 99"),
        ("/api/jobs/99999999999999999999999999", 404, "no job"),
        ("/api/jobs/one", 404, "no page at this address"),
        ("/jobs/99", 404, "no job 99"),
        ("/api/jobs/99/events", 404, "no job 99"),
        ("/api/jobs?limit=0", 400, "limit"),
        ("/api/jobs?limit=501", 400, "limit"),
        ("/api/jobs?state=late", 400, "state"),
        ("/api/jobs?cursor=%FF", 400, "cursor"),
        ("/api/jobs/1/metrics?cursor=WzEwLCAwXQ", 400, "cursor"),
        ("/api/jobs/1/predictions?cursor=W1tbW1tbW1tb", 400, "cursor"),
        ("/api/jobs/1/predictions?step=99999999999999999999", 400, "step"),
        ("/?before=x", 400, "before"),
        ("/../../etc/passwd", 404, "no page at this address"),
        ("/jobs/1/../../honed.db", 404, "no page at this address"),
    ],
)
def test_a_wrong_question_is_told_what_is_wrong(asked: Web, path: str, status: int, words: str) -> None:
    found, headers, body = asked.ask(path)
    error = api.Failure.model_validate_json(body).error
    assert (found, headers["content-type"]) == (status, "application/json")
    assert words in error.message
    assert error.hint


def test_a_browser_gets_an_error_as_a_page_and_a_program_as_json(asked: Web) -> None:
    for path, status, words in (
        ("/jobs/99", 404, "no job 99"),
        (f"/{HOSTILE[:30]}".replace(" ", "%20"), 404, "no page at this address"),
        ("/?before=x", 400, "not a job number"),
    ):
        found, headers, body = asked.ask(path, Accept="text/html,application/xhtml+xml,*/*;q=0.8")
        assert (found, headers["content-type"]) == (status, "text/html; charset=utf-8")
        page = Page(body.decode())
        assert words in page.shown
        assert ("a", {"href": "/"}) in page.elements
        assert not {tag for tag, _ in page.elements} & {"script", "img"}
        assert "unsafe" not in headers["content-security-policy"]
        for accept in ("application/json", "*/*"):
            assert asked.ask(path, Accept=accept)[1]["content-type"] == "application/json"
    assert asked.ask("/api/jobs/99", Accept="text/html")[1]["content-type"] == "application/json"
    found, headers, body = asked.ask("/", Accept="text/html", Host="evil.example")
    assert (found, headers["content-type"]) == (421, "text/html; charset=utf-8")
    assert b"not a name of this machine" in body


@pytest.fixture(scope="module")
def asked(told: Instance) -> Iterator[Web]:
    """One honed-web for all tests that only read."""
    with serving(told) as web:
        yield web


def test_nothing_is_changed_by_asking(asked: Web) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
        status, headers, _ = asked.ask("/api/jobs/1", method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    whole, head = asked.ask("/api/jobs/1"), asked.ask("/api/jobs/1", method="HEAD")
    assert head[0] == 200
    assert head[1]["content-length"] == whole[1]["content-length"]
    assert head[2] == b""
    assert asked.ask("/api/jobs/1/events", method="HEAD")[1]["content-type"].startswith("text/event-stream")


def test_a_page_from_elsewhere_gets_nothing_by_naming_our_address(asked: Web) -> None:
    for host in (
        "evil.example",
        f"evil.example:{asked.port}",
        "127.0.0.1.evil.example",
        "",
        "localhost.evil.example:80",
    ):
        assert asked.ask("/api/jobs", Host=host)[0] == 421, host
    for host in ("localhost", f"localhost:{asked.port}", f"127.0.0.1:{asked.port}", "[::1]:80", "LOCALHOST"):
        assert asked.ask("/api/jobs", Host=host)[0] == 200, host
    for path in ("/", "/jobs/1", "/api/jobs", "/metrics", "/nothing"):
        headers = asked.ask(path)[1]
        assert "access-control-allow-origin" not in headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_without_a_token_others_jobs_show_their_number_and_state(instance: Instance) -> None:
    drain(instance)
    token_path = instance.root / "token"
    token_path.write_text(f"{TOKEN}\n")
    with serving(instance) as web:
        (row,) = web.json("/api/jobs")["jobs"]
        assert (row["id"], row["state"], row["name"], row["outcome"]) == (1, "succeeded", "", None)
        assert row["progress"]["loss"] is None
        for path in ("/api/jobs/1", "/api/jobs/1/metrics", "/api/jobs/1/predictions", "/api/jobs/1/events", "/jobs/1"):
            assert web.ask(path)[0] == 403, path
        assert b"job 1" in web.ask("/")[2]
        assert b"succeed.json" not in web.ask("/")[2]
        assert web.ask("/api/jobs/1", Authorization=bearer(TOKEN))[0] == 403  # no token is configured
    instance.configure(f'[web]\ntoken_file = "{token_path}"\n')
    with serving(instance) as web:
        assert web.json("/api/jobs")["jobs"][0]["name"] == ""
        assert b'<a href="/login">' in web.ask("/")[2]
        for path in ("/jobs/1", "/login"):
            status, headers, _ = web.ask(path)
            assert (status, headers["www-authenticate"][:5]) == (401, "Basic")
        assert web.ask("/login", Authorization=bearer(TOKEN))[1]["location"] == "/"
        password = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
        for right in (bearer(TOKEN), f"Basic {password}"):
            assert web.json("/api/jobs/1", Authorization=right)["name"] == "succeed"
            assert web.ask("/jobs/1", Authorization=right)[0] == 200
        for wrong in (
            bearer(f"{TOKEN}x"),
            bearer(""),
            "Basic !",
            "Digest x",
            f"Basic {password[:-4]}",
            bearer("é" * 20),
        ):
            assert web.ask("/api/jobs", Authorization=wrong)[0] == 401, wrong
        assert TOKEN not in web.log


def test_it_does_not_listen_where_other_machines_reach_it_without_a_token(instance: Instance) -> None:
    def start(address: str) -> subprocess.CompletedProcess[str]:
        words = command(instance, "--listen", address)
        return subprocess.run(
            words, capture_output=True, text=True, timeout=DEADLINE_SEC, check=False, env=instance.environment
        )

    refused = start("0.0.0.0:0")
    assert refused.returncode == 78
    assert "other machines can reach it, but there is no token" in refused.stderr
    assert start("localhost:80").returncode == 78
    assert "web.listen" in start("127.0.0.1:99999").stderr
    right = instance.root / "right"
    right.write_text(f"{TOKEN}\n")
    instance.configure(f'{SHARED}[web]\ntoken_file = "{right}"\n')
    with serving(instance, "--listen", "0.0.0.0:0") as web:
        for path in ("/", "/healthz", "/metrics", "/live.js", "/nothing"):
            assert web.ask(path)[0] == 401, path
            assert web.ask(path, Authorization=bearer(TOKEN), Host="any.example")[0] != 401, path
        assert "unencrypted" in web.log
    short = instance.root / "token"
    short.write_text("short\n")
    instance.configure(f'[web]\ntoken_file = "{short}"\n')
    refused = start("127.0.0.1:0")
    assert refused.returncode == 78
    assert "16 characters" in refused.stderr
    assert "short\n" not in refused.stderr


def test_over_a_unix_socket_its_own_user_reads_everything(instance: Instance) -> None:
    drain(instance)
    path = instance.root / "web.sock"
    words = command(instance, "--listen", str(path))
    process = subprocess.Popen(words, env=instance.environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(path.exists, what="the socket")
        connection = http.client.HTTPConnection("anything.example", timeout=DEADLINE_SEC)
        connection.sock = socket.socket(socket.AF_UNIX)
        wait_for(lambda: connection.sock.connect_ex(str(path)) == 0, what="a connection")
        connection.request("GET", "/api/jobs/1")
        assert json.loads(connection.getresponse().read())["name"] == "succeed"
        connection.close()
        path.unlink()
        wait_for(path.exists, what="the socket again")
        with socket.socket(socket.AF_UNIX) as again:
            wait_for(lambda: again.connect_ex(str(path)) == 0, what="a connection")
            again.sendall(request_head("/healthz"))
            assert again.recv(9) == b"HTTP/1.1 "
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SEC) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


# -- pages ------------------------------------------------------------------------------------------------------------


def test_hostile_text_is_text_on_its_pages(asked: Web) -> None:
    web = asked
    # What is over is not live.
    for path, names in (("/", ["/list.js", "/live.js"]), ("/jobs/1", ["/uplot.js", "/plots.js"])):
        status, headers, body = web.ask(path)
        assert status == 200
        page = Page(body.decode())
        scripts = [keys for tag, keys in page.elements if tag == "script"]
        nonce = re.findall(r"script-src 'nonce-([^']+)'", headers["content-security-policy"])[0]
        assert [keys["src"] for keys in scripts] == names
        assert all(keys["nonce"] == nonce for keys in scripts)
        assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object", "form", "base"}
        assert not [key for _, keys in page.elements for key in keys if key.startswith("on")]
    assert "x" * 50_000 in page.shown
    assert page.shown.count("<script>document.title='owned'</script>") >= 6
    assert "U+0000" in page.shown
    assert ("a", {"href": "/jobs/1"}) in Page(web.ask("/")[2].decode()).elements
    assert web.ask("/jobs/1/report.html")[1]["location"] == "/jobs/1"
    assert web.ask("/jobs/1")[1]["content-security-policy"] != headers["content-security-policy"]  # each its nonce


def test_a_page_that_hangs_does_not_delay_the_end_and_its_process_ends_too(told: Instance) -> None:
    with serving(told) as web:
        connection = web.open(request_head("/jobs/1"))
        (pid,) = wait_for(web.pages_in_work, what="the process of the page")
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert web.end() == 0
        assert time.monotonic() - began < 30
        wait_for(lambda: not is_alive(pid), what="the end of its process")
        connection.close()


def test_events_tell_of_a_job_from_the_queue_to_its_end(instance: Instance) -> None:
    instance.configure(SHARED)
    instance.start()
    instance.client.ask("pause")
    instance.drop("slow-200")
    instance.wait_state("slow-200", State.QUEUED)
    with serving(instance) as web:
        stream = web.stream("/api/jobs/1/events")
        assert stream.getheader("content-type", "").startswith("text/event-stream")
        instance.client.ask("resume")
        found = list(events(stream))
    kinds = [kind for kind, _ in found]
    assert kinds[-1] == "ended"
    assert found[-1][1] == {"state": "succeeded", "outcome": "succeeded"}
    steps = [told["progress"]["step"] or 0 for kind, told in found if kind == "progress"]
    assert len(steps) >= 3
    assert steps == sorted(steps)
    assert any(told["line"].startswith("running: step") for kind, told in found if kind == "progress")


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_a_running_job_live_and_complains_of_nothing(instance: Instance) -> None:
    instance.configure(SHARED)
    job = run(instance, "slow-4000")
    with serving(instance) as web, browser.opened(instance.root) as chromium:
        chromium.expected = (f"{web.address}/", "data:")
        for width in (390, 1280):
            seen = chromium.visit(f"{web.address}/jobs/1", width=width)
            assert seen["complaints"] == []
            assert "running" in seen["text"]
        # The same document from here on: a load would forget this.
        chromium.value("window.isSame = true")
        path = instance.layout.job(1).attempt(job.attempt.number).events_path
        wait_for(path.exists, what="the worker's first event")
        events = EventWriter(path)
        rows = [
            {
                "sample_index": 0,
                "prompt": f"Was? {HOSTILE}",
                "ground_truth": "Köln",
                "prediction": HOSTILE + "x" * 50_000,
            }
        ]
        events.emit("predictions", step=1, epoch=0.1, num_failed=0, rows=rows, scores={})
        events.close()
        wait_for(lambda: "Was?" in chromium.value("document.body.innerText"), what="the prediction")
        line = chromium.value("document.querySelector('.outcome').textContent")
        wait_for(lambda: chromium.value("document.querySelector('.outcome').textContent") != line, what="the next step")
        for width in (1280, 390):
            chromium.ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
            )
            seen = chromium.seen()
            assert seen["complaints"] == []
            assert seen["scrolls"] <= seen["width"] == width  # nothing hangs out at the side
            assert "<script>document.title='owned'</script>" in seen["text"]
            assert "U+0000" in seen["text"]
            assert seen["title"].startswith("slow-4000: running")
            assert seen["figures"]
        assert chromium.value("window.isSame") is True
        assert "slow-4000" in chromium.visit(f"{web.address}/", width=390)["text"]
        chromium.value("window.isSame = true")
        instance.client.ask("cancel", id="1")
        wait_for(lambda: "cancelled" in chromium.value("document.body.innerText"), what="the end in the index")
        assert chromium.value("window.isSame") is True
        assert chromium.seen()["complaints"] == []


# -- health -----------------------------------------------------------------------------------------------------------


def test_health_says_what_is_not_well(instance: Instance) -> None:
    instance.configure(SHARED)
    run(instance, "slow")
    with serving(instance) as web:
        wait_for(lambda: web.ask("/healthz")[0] == 200, what="an answer of honed in time")
        stream = web.stream("/api/jobs/1/events")
        instance.kill(signal.SIGKILL)
        status, _, body = web.ask("/healthz")
        told = json.loads(body)
        assert (status, told["status"], told["honed"]["is_up"], told["database"]["is_open"]) == (
            503,
            "failing",
            False,
            True,
        )
        for suffix in ("-wal", "-shm"):
            Path(f"{instance.layout.database_path}{suffix}").unlink()
        instance.layout.database_path.write_bytes(b"nonsense" * 1000)
        told = json.loads(web.ask("/healthz")[2])
        assert "not a database" in told["database"]["detail"]
        for path in ("/api/jobs/1/metrics", "/api/jobs/1", "/api/jobs", "/"):
            status, _, body = web.ask(path)
            assert status == 503, path
            assert "not a database" in api.Failure.model_validate_json(body).error.message
        assert web.ask("/metrics")[0] == 200
        stream.read()  # it has an end, and a plain one
        wait_for(lambda: "a stream of events ended" in web.log, what="a word of it")
        assert "Traceback" not in web.log
        instance.layout.database_path.unlink()
        instance.spool.state_dir(State.HELD).rmdir()
        wait_for(lambda: web.ask("/api/jobs")[0] == 503, what="a look at the spool")
        body = web.ask("/api/jobs")[2]
        assert "held: No such file or directory" in api.Failure.model_validate_json(body).error.message


def test_where_honed_never_ran_it_says_so_and_makes_nothing(instance: Instance) -> None:
    (instance.root / "empty").mkdir()
    instance.root = instance.root / "empty"
    with serving(instance) as web:
        status, headers, body = web.ask("/api/jobs")
        assert (status, headers["retry-after"]) == (503, "5")
        assert b"has honed ever run on this machine?" in body
        assert b"honed_up 0.0" in web.ask("/metrics")[2]
    assert [path.suffix for path in instance.root.iterdir()] == [".log"]


def test_prometheus_gets_the_queue_the_running_job_and_the_outcomes(instance: Instance) -> None:
    drain(instance)
    running = run(instance, "slow-4000")
    path = instance.layout.job(running.id).attempt(1).events_path
    wait_for(path.exists, what="the worker's first event")
    told = EventWriter(path)
    told.emit("data", num_tokens=81234)
    told.emit("evaluation", step=1, metrics={"eval_loss": 2.5, "eval_num_tokens": 512})
    told.close()
    instance.drop("waits", name="slow")
    instance.wait_state("slow", State.QUEUED)

    def scraped(web: Web) -> dict[str, dict[tuple[str, ...], float]]:
        status, headers, body = web.ask("/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(body.decode()))
        assert all(each.documentation and each.type in {"gauge", "counter", "histogram"} for each in families)
        return {each.name: {tuple(one.labels.values()): one.value for one in each.samples} for each in families}

    with serving(instance) as web:

        def complete() -> dict[str, dict[tuple[str, ...], float]] | None:
            found = scraped(web)
            is_answered = found["honed_up"] == {(): 1}  # honed-web waits for honed's answer for a few seconds
            return found if is_answered and found["honed_job_step"].get(("2",), 0) > 3 else None

        found = wait_for(complete, what="a step")
        assert found is not None
        assert found["honed_jobs"][("running",)] == found["honed_jobs"][("queued",)] == 1
        assert found["honed_outcomes"] == {("succeeded",): 1}
        assert found["honed_queue_age_seconds"][()] > 0
        assert found["honed_job_steps"] == {("2",): 4000}
        assert found["honed_job_loss"] == found["honed_job_tokens"] == {}  # results are not shared
        assert found["honed_outbox_waiting_bytes"] == {(): 0}
        assert found["process_resident_memory_bytes"][()] > 1e6
        assert found["honed_process_resident_memory_bytes"][()] > 1e6
        assert found["honed_jobs_waiting"] == {("device",): 1}
        instance.configure(SHARED)
        web.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "configuration reloaded" in web.log, what="a reload")
        found = scraped(web)
        assert 0 < found["honed_job_loss"][("2",)] < 1
        assert found["honed_job_tokens"] == {("2",): 512}
        assert found["honed_job_data_tokens"] == {("2",): 81234}
        instance.configure("[web]\nnonsense = 1\n")
        web.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "the old one stays" in web.log, what="a refusal")
        assert scraped(web)["honed_job_loss"]


# -- many, and slow ones ----------------------------------------------------------------------------------------------


def test_streams_are_bounded_and_one_that_ends_makes_room(instance: Instance) -> None:
    instance.configure(SHARED)
    run(instance, "slow-4000")
    with serving(instance) as web:
        streams = [web.open(request_head("/api/jobs/1/events")) for _ in range(32)]
        for each in streams:
            assert b"200 OK" in each.recv(4096)
        refused = web.stream("/api/jobs/1/events")
        assert (refused.status, refused.getheader("retry-after")) == (503, "5")
        assert b"32 pages are already receiving live updates" in refused.read()
        assert web.ask("/api/jobs")[0] == 200  # plain requests are still answered
        streams.pop().close()
        wait_for(lambda: web.stream("/api/jobs/1/events").status == 200, what="room")
        assert web.resident_bytes() < 120 * 2**20
        assert web.end() == 0  # open streams do not delay its end
        for each in streams:
            each.close()


def test_who_says_nothing_or_does_not_read_is_shown_out(told: Instance) -> None:
    # More connections than the limit, some of them in the middle of a header. Nothing here ends because of its time.
    with serving(told, "--patience-sec", "3600") as web:
        idle = [web.open(b"GET / HT" if number % 2 else b"") for number in range(140)]
        assert b"503 Service Unavailable" in idle[0].recv(4096)
        assert web.ask("/api/jobs")[0] == 200
        for each in idle:
            each.close()
    with serving(told, "--patience-sec", "4") as web:
        idle = [web.open(b"GET / HT" if number % 2 else b"") for number in range(4)]
        for each in idle:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(4096) == b""
            each.close()
        # Clients that request megabytes and read nothing.
        slow = []
        for _ in range(20):
            each = socket.socket()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.settimeout(DEADLINE_SEC)
            each.connect((web.host, web.port))
            for _ in range(20):
                each.sendall(request_head("/api/jobs/1/predictions?limit=500"))
            slow.append(each)
        fds = Path(f"/proc/{web.process.pid}/fd")
        wait_for(lambda: len(list(fds.iterdir())) > 25, what="their connections")
        wait_for(lambda: len(list(fds.iterdir())) < 25, what="their end")
        for each in slow:
            each.close()
        assert web.ask("/api/jobs")[0] == 200
        assert web.resident_bytes() < 160 * 2**20


def test_garbage_is_no_matter(asked: Web) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 50_000,
        b"GET " + b"/a" * 20_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000,
        b"GET /%00%ff%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with contextlib.suppress(OSError), contextlib.closing(asked.open()) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert asked.ask("/api/jobs")[0] == 200
    assert "Traceback" not in asked.log
