"""`honectl web`: the owner of an instance sees everything, by a link whose token nobody else can read."""

from __future__ import annotations

import http.server
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import browser
import pytest
from harness import DEADLINE_SEC, Instance
from test_web import Web, drain, serving

from honed.page import session
from waiting import wait_for

_LINK = re.compile(r"(http://127\.0\.0\.1:(\d+)/)login\?token=([\w-]{40,})\n")


class OwnWeb(Web):
    """A `honectl web`, with what it has printed."""

    def __init__(self, instance: Instance, *arguments: str, **environment: str) -> None:
        self.log_path, self.printed_path = instance.root / "own.log", instance.root / "own.out"
        words = [sys.executable, "-m", "honed.cli.honectl", "--root", str(instance.root), "web", *arguments]
        bare = {key: value for key, value in os.environ.items() if key not in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")}
        with self.printed_path.open("wb") as out, self.log_path.open("wb") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err, env=bare | environment)
        wait_for(lambda: "until you press" in self.log or self.process.poll() is not None, what="the link")
        found = _LINK.fullmatch(self.printed_path.read_text())
        assert found is not None, self.log
        self.host, self.port, self.token = "127.0.0.1", int(found[2]), found[3]

    def log_in(self) -> str:
        """Exchange the token for the cookie."""
        status, headers, body = self.ask(f"/login?token={self.token}")
        assert status == 200
        assert b'http-equiv="refresh" content="0;url=/"' in body
        cookie, *rest = headers["set-cookie"].split("; ")
        assert rest == ["Path=/", "HttpOnly", "SameSite=Strict"]
        return cookie


@contextmanager
def own(instance: Instance, *arguments: str, **environment: str) -> Iterator[OwnWeb]:
    web = OwnWeb(instance, *arguments, **environment)
    try:
        yield web
    finally:
        if web.process.poll() is None:
            web.process.kill()
            web.process.wait()


def test_the_owner_of_an_instance_sees_everything_by_the_link(instance: Instance) -> None:
    drain(instance)
    link_path = instance.layout.runtime_dir / "web.json"
    with own(instance, "--no-open") as web:
        assert web.ask("/jobs/1")[0] == web.ask("/api/jobs/1")[0] == 403
        page = web.ask("/jobs/1", Accept="text/html")[2].decode()
        assert "<code>honectl web</code> prints" in web.ask("/")[2].decode()
        assert "`honectl web` prints a link" in page
        cookie = web.log_in()
        for path in ("/jobs/1", "/api/jobs/1", "/api/jobs/1/metrics", "/"):
            assert web.ask(path, Cookie=f"other=1; {cookie}; more=2")[0] == 200, path
        assert b"succeed" in web.ask("/", Cookie=cookie)[2]
        assert web.ask("/", method="POST", Cookie=cookie)[0] == 405  # a session only reads

        for wrong in (
            cookie[:-1],
            cookie + "0",
            cookie.replace("=", "=x"),
            cookie.replace(str(web.port), "1"),
            f"honed-{web.port}={web.token}",
            "",
        ):
            assert web.ask("/api/jobs/1", Cookie=wrong)[0] == 403, wrong
        for wrong in (web.token[:-1], web.token + "x", "", "é"):
            status, headers, _ = web.ask(f"/login?token={wrong.encode('ascii', 'ignore').decode()}")
            assert (status, "set-cookie" in headers) == (403, False)
        # A page whose name was pointed to 127.0.0.1 gets nothing, whatever it sends.
        for path in ("/api/jobs/1", f"/login?token={web.token}"):
            status, headers, _ = web.ask(path, Host=f"evil.example:{web.port}", Cookie=cookie)
            assert (status, "set-cookie" in headers) == (421, False)
        assert web.ask("/api/jobs/1", Authorization=f"Bearer {web.token}")[0] == 403  # the link's token is for a login

        assert link_path.stat().st_mode & 0o777 == 0o600
        assert web.token not in Path(f"/proc/{web.process.pid}/cmdline").read_text()
        assert web.token not in Path(f"/proc/{web.process.pid}/environ").read_text()
        again = instance.honectl("web", "--no-open")
        assert (again.returncode, again.stdout) == (0, web.printed_path.read_text())
        with serving(instance) as other:  # it leaves the session to the first
            assert other.ask("/api/jobs/1", Cookie=cookie)[0] == 403
        web.process.send_signal(signal.SIGINT)
        assert web.process.wait(DEADLINE_SEC) == 0
        assert web.token not in web.log
    assert session.find(instance.layout) is None
    assert link_path.read_bytes() == b""
    with own(instance, "--no-open") as web:
        assert web.token not in again.stdout
        assert web.ask("/api/jobs/1", Cookie=cookie)[0] == 403


def test_a_browser_is_given_a_file_that_leads_to_the_link(instance: Instance) -> None:
    drain(instance)
    asked = instance.root / "asked"
    opens = instance.root / "opens"
    opens.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" >'{asked}.new' && mv '{asked}.new' '{asked}'\n")
    opens.chmod(0o755)
    path = session.opening_path(instance.layout)
    with own(instance, BROWSER=str(opens)) as web:
        wait_for(asked.exists, what="the browser")
        assert asked.read_text() == path.as_uri()
        assert path.stat().st_mode & 0o777 == 0o600
        assert f"url={web.address}/login?token={web.token}" in path.read_text()
        wait_for(lambda: "open the link above by hand" in web.log, what="the way without that file")
        assert web.end() == 0
    assert not path.exists()


def test_what_cannot_be_served_is_said(instance: Instance) -> None:
    told = instance.honectl("--root", "/", "web", "--no-open").stderr
    assert "for an instance in a directory (--root DIR)" in " ".join(told.split())
    instance.root = instance.root / "empty"
    done = instance.honectl("web", "--no-open")
    assert done.returncode != 0
    assert "the spool does not exist" in " ".join(done.stderr.split())


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"address": 1}'])
def test_a_file_that_no_honed_web_has_locked_leads_nowhere(instance: Instance, content: bytes) -> None:
    instance.layout.runtime_dir.mkdir(parents=True, exist_ok=True)
    path = instance.layout.runtime_dir / "web.json"
    path.write_bytes(content)
    assert session.find(instance.layout) is None
    begun = session.begin(instance.layout, "http://127.0.0.1:1/")
    assert begun is not None
    assert path.stat().st_mode & 0o777 == 0o600
    assert session.begin(instance.layout, "http://127.0.0.1:2/") is None
    assert session.find(instance.layout) == begun.link
    begun.end()
    path.unlink()
    path.symlink_to(instance.root / "elsewhere")
    assert session.begin(instance.layout, "http://127.0.0.1:1/") is None
    assert not (instance.root / "elsewhere").exists()


#: Asks as another user, and prints the status and whether a cookie came.
ASK = """
import encodings.idna, http.client, os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
connection.request("GET", sys.argv[2], headers={"Cookie": sys.argv[3]} if sys.argv[3] else {})
answer = connection.getresponse()
print(answer.status, answer.getheader("set-cookie") is not None, answer.read().decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_nothing_with_a_stolen_link_or_cookie(instance: Instance) -> None:
    """A browser sends the cookie to every port of 127.0.0.1, also to one where another user listens."""
    drain(instance)
    with own(instance, "--no-open") as web:
        cookie = web.log_in()

        def ask(path: str, cookie: str = "") -> str:
            words = [sys.executable, "-c", ASK, str(web.port), path, cookie]
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout

        for path in ("/api/jobs/1", "/jobs/1", "/api/jobs/1/predictions", "/compare?ids=1,1"):
            assert ask(path, cookie).startswith(("403 False", "400 False")), path
        assert ask("/api/jobs", cookie) == ask("/api/jobs")
        told = ask(f"/login?token={web.token}")
        assert told.startswith("403 False")
        assert "only for programs of the user who started honed-web (uid 0)" in told
        assert "comes from a process of uid 65534" in told
        assert "web.token_file" in told
        assert web.ask("/api/jobs/1", Cookie=cookie)[0] == 200


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A page at another port of 127.0.0.1, which notes the cookies that it gets."""

    cookies: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.cookies.append(self.headers.get("Cookie", ""))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium here")
def test_a_browser_with_the_link_sees_live_pages_and_a_page_of_another_port_does_not(
    instance: Instance, tmp_path: Path
) -> None:
    drain(instance)
    with (
        own(instance, "--no-open") as web,
        browser.opened(tmp_path / "profile") as chromium,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere,
    ):
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        chromium.ask("Page.navigate", url=f"{web.address}/login?token={web.token}")
        here = "document.readyState + location.href"
        wait_for(lambda: chromium.value(here) == f"complete{web.address}/", what="the list")
        assert "succeed" in chromium.value("document.body.innerText")
        told = "window.told = ''; new EventSource('/api/jobs/1/events').addEventListener('ended', () => told = 'ended')"
        chromium.value(told)
        wait_for(lambda: chromium.value("told") == "ended", what="the event of the job")

        address = f"http://127.0.0.1:{elsewhere.server_address[1]}/"
        chromium.visit(address, width=1280)
        # A cookie knows no port: the page has it, but it is of no use there.
        assert any(f"honed-{web.port}=" in each for each in Elsewhere.cookies)
        for mode in ("no-cors", "cors"):
            fetch = f"fetch('{web.address}/api/jobs/1', {{mode: '{mode}', credentials: 'include'}})"
            chromium.value(f"window.told = ''; {fetch}.then(one => told = 'read ' + one.type, () => told = 'refused')")
            wait_for(lambda: chromium.value("told"), what="an answer")
            assert chromium.value("told") == "refused", mode
        elsewhere.shutdown()


def test_a_page_of_another_port_gets_nothing_with_the_owners_browser(instance: Instance) -> None:
    drain(instance)
    with own(instance, "--no-open") as web:
        cookie = web.log_in()
        for site, mode, dest, status in (
            ("same-origin", "cors", "empty", 200),  # our own page
            ("none", "navigate", "document", 200),  # an address that was typed
            ("cross-site", "navigate", "document", 200),  # a link to us, as from the terminal
            ("same-site", "no-cors", "image", 403),
            ("same-site", "cors", "empty", 403),
            ("same-site", "navigate", "iframe", 403),
            ("cross-site", "no-cors", "script", 403),
        ):
            told = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": dest}
            assert web.ask("/jobs/1", Cookie=cookie, **told)[0] == status, told
