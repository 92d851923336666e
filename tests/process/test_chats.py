"""Chats as receivers of notices: by Apprise, in a child of honed-send, to real servers on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from harness import DEADLINE_SEC, Instance, command_of
from hostile import ALL
from listener import Listener, Quiet, drip
from postbox import show_a_login_page

from honed.send import chat, notification
from honed.send.delivery import Verdict
from honed.send.notification import Notice
from honed.spec.config import CHAT_SCHEMAS, NotifyConfig
from honed.system.error import EnvironmentInvalidError
from waiting import wait_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("apprise") is None, reason="needs apprise")

KEY = "tk_s3cret0123"


class _Request(Quiet):
    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        server: Chat = self.server.owner  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.commands |= {command_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
        reply = server.replies.pop(0) if server.replies else 200
        if callable(reply):
            reply(self)
            return
        if reply == 200:
            server.paths.append(self.path)
            server.keys.append(self.headers["Authorization"])
            server.posts.append(json.loads(body))
        self.send_response(reply)
        self.send_header("Location", f"http://127.0.0.1:{server.port}/elsewhere")
        self.end_headers()
        self.wfile.write(f'{{"error": "{KEY} <hidden>"}}'.encode())

    do_GET = do_PUT = do_POST  # noqa: N815 - http.server's names


class Chat(Listener):
    """A chat's server, as ntfy and Mattermost are: each message is a POST of JSON."""

    request_class = _Request

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.posts: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.commands: set[bytes] = set()  #: command lines of all processes while a message arrived
        self.replies: list[int | Callable[[Any], None]] = []
        super().__init__()
        if tls is not None:
            assert self._server is not None
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)


@pytest.fixture
def server() -> Iterator[Chat]:
    made = Chat()
    yield made
    made.down()


def name_chat(instance: Instance, address: str, *more: str, mode: int = 0o600) -> Path:
    """Let jobs name the chat `team`, whose address is in a file."""
    path = instance.root / "team"
    path.write_text(f"{address}\n")
    path.chmod(mode)
    lines = ["retry_delay_sec = 0.05", "max_retry_delay_sec = 0.2", *more]
    if not any("chat_schemas" in line for line in more):
        lines.append('chat_schemas = ["ntfy", "ntfys"]')
    instance.configure("\n".join(["[notify]", *lines, "[notify.webhook_files]", f'team = "{path}"', ""]))
    return path


def refused(instance: Instance) -> list[Path]:
    return list(notification.refused_dir(instance.layout).glob("*.json"))


def tell(address: str, *, text: str = "job 1 (a) succeeded", **settings: Any) -> tuple[Verdict, str]:
    notice = Notice("key", {"webhook": "team"}, is_own=False, payload={"text": text, "state": "failed"}, created_at=0.0)
    return chat.deliver(notice, address, NotifyConfig(**{"chat_schemas": ["ntfy", "mmost"], **settings}))


def test_a_chat_is_told_of_a_jobs_end_and_its_address_is_seen_nowhere(instance: Instance, server: Chat) -> None:
    name_chat(instance, f"ntfy://127.0.0.1:{server.port}/jobs?auth=token&token={KEY}", 'admin_webhook = "team"')
    instance.drop("a", name="succeed.a", notify={"webhook": "team"})
    instance.drop("b", name="explain.b")
    assert instance.drain() == 0
    told = {post["title"]: post["message"] for post in server.posts}
    [failed] = [title for title in told if title.endswith("job 2 (explain.b) failed: mask_invalid")]
    assert told[failed] == "trained on the prompt\nWhat to do: see preview\ntrain_loss 0.5"
    assert [title for title in told if "job 1 (succeed.a) succeeded" in title]
    assert {post["topic"] for post in server.posts} == {"jobs"}
    assert server.keys == [f"Bearer {KEY}"] * 2
    assert any(b"honed.send.chat" in command for command in server.commands)
    assert not any(KEY.encode() in command for command in server.commands)
    assert KEY not in instance.log
    kept = [path for path in instance.root.rglob("*") if path.is_file() and path.name != "team"]
    assert [path for path in kept if KEY.encode() in path.read_bytes()] == []
    assert notification.waiting(instance.layout) == []


def test_a_chat_that_is_down_slow_or_answers_no_gets_it_in_the_end_and_only_a_cause_is_logged(
    instance: Instance, server: Chat
) -> None:
    server.replies = [500, drip, 403, 302, 429]
    name_chat(instance, f"ntfy://anna:{KEY}@127.0.0.1:{server.port}/jobs", "timeout_sec = 5")
    server.down()
    instance.start()
    instance.drop("a", name="succeed.a", notify={"webhook": "team"})
    said = wait_for(lambda: [line for line in instance.log.splitlines() if "retrying" in line], what="the word")
    assert "a notification to team was not delivered; retrying: ntfy: it cannot be reached" in said[0]
    server.up()
    wait_for(lambda: not notification.waiting(instance.layout), what="the message")
    assert len(server.posts) == 1
    assert server.paths == ["/"]
    assert server.replies == []
    assert KEY not in instance.log


def test_a_proxys_login_page_is_no_chat(server: Chat) -> None:
    server.replies = [show_a_login_page]
    assert tell(f"ntfy://127.0.0.1:{server.port}/jobs") == (Verdict.LATER, "ntfy: its response is an HTML page")
    assert tell(f"ntfy://127.0.0.1:{server.port}/jobs") == (Verdict.TAKEN, "taken")
    assert len(server.posts) == 1


def test_a_message_that_no_chat_takes_is_set_aside_in_the_end(instance: Instance, server: Chat) -> None:
    server.replies = [404] * 1000
    name_chat(instance, f"ntfy://127.0.0.1:{server.port}/jobs", "give_up_days = 0.00003")
    instance.drop("a", name="succeed.a", notify={"webhook": "team"})
    instance.start()
    [path] = wait_for(lambda: refused(instance), what="set aside")
    assert json.loads(path.read_bytes())["answer"] == "gave up after 3e-05 days: ntfy: it responded with 404"


@pytest.mark.parametrize(
    ("schemas", "mode", "why"),
    [
        ("[]", 0o600, "a URL whose scheme is not in notify.chat_schemas"),
        ('["ntfy"]', 0o604, "can be read by everyone: chmod o-r"),
    ],
    ids=["not allowed", "readable"],
)
def test_a_message_waits_until_the_administrator_has_allowed_the_chat_and_hidden_its_key(
    instance: Instance, server: Chat, schemas: str, mode: int, why: str
) -> None:
    address = f"ntfy://127.0.0.1:{server.port}/jobs?auth=token&token={KEY}"
    name_chat(instance, address, f"chat_schemas = {schemas}", mode=mode)
    instance.drop("a", name="succeed.a", notify={"webhook": "team"})
    instance.start()
    wait_for(lambda: why in instance.log, what="the word")
    assert server.commands == set()
    assert KEY not in instance.log
    instance.stop()
    name_chat(instance, address)
    assert instance.drain() == 0
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    "address",
    [
        "syslog://",
        "dbus://",
        "gnome://",
        "windows://",
        "macosx://",
        "exec://id",
        "file:///etc/passwd",
        "json://{server}/",
        "mailto://{server}/?to=a@b.org&from=a@b.org",
        "apprise://{server}/token",
        "mmost://{server}/token?template=/etc/passwd&verify=no",
        "ntfy://{server}/jobs?verify=no",
        "ntfy://{server}/jobs?redirect=yes",
        "ntfy://{server}/jobs/others",
        "include http://{server}/config.yml",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7F",
        "NTFY://{server}/jobs",
        "",
    ],
)
def test_an_address_of_another_kind_or_that_weakens_its_delivery_is_called_by_nobody(
    server: Chat, address: str
) -> None:
    verdict, said = tell(address.format(server=f"127.0.0.1:{server.port}"))
    assert verdict is Verdict.LATER
    assert "its URL" in said
    assert server.commands == set()


@pytest.mark.parametrize("template", ["/etc/passwd", "file:///etc/passwd", "http://{server}/template"])
@pytest.mark.parametrize(
    "address", ["discord://4174216298/JHMHI8qBe7bk2ZwO5U711o3dV_js", "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrI"]
)
def test_no_address_has_a_file_or_another_address_read(server: Chat, address: str, template: str) -> None:
    address = f"{address}?template={template.format(server=f'127.0.0.1:{server.port}')}"
    assert tell(address, chat_schemas=["discord", "slack"]) == (
        Verdict.LATER,
        "its URL is not supported by Apprise, or refers to a file",
    )
    assert server.commands == set()


@pytest.mark.parametrize("schema", ["dbus", "syslog", "windows", "mailto", "https", "file://", "Slack"])
def test_no_configuration_allows_a_schema_that_acts_on_this_machine(schema: str) -> None:
    with pytest.raises(ValueError, match="chat"):
        NotifyConfig(chat_schemas=[schema])


def test_a_message_longer_than_a_chat_takes_arrives_in_parts(server: Chat) -> None:
    lines = [f"line {number} of what went wrong" for number in range(180)]
    verdict, said = tell(f"mmost://127.0.0.1:{server.port}/token", text="\n".join(["job 1 (a) failed", *lines]))
    assert (verdict, said) == (Verdict.TAKEN, "taken")
    assert len(server.posts) == 2
    assert all(any(line in post["text"] for post in server.posts) for line in lines)


@pytest.mark.parametrize("schema", ["ntfy", "mmost"])
def test_a_hostile_text_arrives_as_it_was_sent(server: Chat, schema: str) -> None:
    text = f"job 1 ({notification.plain(ALL)}) failed\nsee {{{{app_title}}}} :smile: \\u0041 *x* &amp; µ"
    assert tell(f"{schema}://127.0.0.1:{server.port}/token", text=text) == (Verdict.TAKEN, "taken")
    [post] = server.posts
    assert post.get("message", post.get("text")) == text
    assert tell(f"{schema}://127.0.0.1:{server.port}/token", text="a\ud800b")[0] is Verdict.TAKEN


def test_the_schemas_allowed_by_default_are_known_to_apprise_and_use_tls() -> None:
    script = (
        "import sys\nfrom apprise.manager_plugins import NotificationManager as Manager\n"
        "for name in sys.argv[1:]: assert name in Manager()[name].secure_protocol, name"
    )
    assert (
        subprocess.run([sys.executable, "-c", script, *CHAT_SCHEMAS], check=False, timeout=DEADLINE_SEC).returncode == 0
    )


def test_honed_send_itself_never_imports_apprise() -> None:
    script = "import sys, honed.send.sender, honed.daemon.loop; sys.exit('apprise' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=DEADLINE_SEC).returncode == 0


def test_a_chat_over_tls_is_told_if_its_authority_is_known_here(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_tls = Chat(authority.server_side)
    try:
        address = f"ntfys://localhost:{over_tls.port}/jobs"
        assert tell(address, chat_schemas=["ntfys"]) == (Verdict.LATER, "ntfy: its certificate is not trusted")
        assert over_tls.posts == []
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        assert tell(address, chat_schemas=["ntfys"])[0] is Verdict.TAKEN
        assert len(over_tls.posts) == 1
    finally:
        over_tls.down()


def test_where_apprise_is_not_installed_the_message_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        EnvironmentInvalidError, match="Apprise is not installed in honed-send's environment: pip install"
    ):
        tell("ntfy://127.0.0.1:1/jobs")
