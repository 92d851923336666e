"""Chats are told from honed-send's sandbox: the address comes as a credential, and Apprise works in the sandbox."""

from __future__ import annotations

import importlib.util
import json

import pytest
from machine import Machine

from waiting import wait_for

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(importlib.util.find_spec("apprise") is None, reason="needs apprise"),
]

KEY = "tk_s3cret0123"
#: A chat's server in the machine, which stores its requests in a file.
SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        with open("/srv/received", "ab") as file:
            file.write(self.rfile.read(int(self.headers["Content-Length"])) + b"\\n")
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", 8097), Handler).serve_forever()
"""
CONFIG = """
[notify]
chat_schemas = ["ntfy"]
[notify.webhook_files]
team = "/run/credentials/honed-send.service/team"
"""


def test_a_chat_is_told_whose_address_is_a_credential(machine: Machine) -> None:
    machine.install()
    machine.run("ip", "link", "set", "lo", "up")
    machine.run("install", "-d", "-m", "0700", "/etc/honed/private", "/etc/systemd/system/honed-send.service.d")
    machine.write("/etc/honed/private/team", f"ntfy://127.0.0.1:8097/jobs?auth=token&token={KEY}\n", mode=0o600)
    machine.write(
        "/etc/systemd/system/honed-send.service.d/team.conf", "[Service]\nLoadCredential=team:/etc/honed/private/team\n"
    )
    machine.write("/etc/honed/honed.toml.d/50-chat.toml", CONFIG)
    machine.write("/srv/server.py", SERVER)
    machine.run("systemd-run", "--unit=server", "/usr/bin/python3", "/srv/server.py")
    payload = {"event": "job_ended", "text": "job 1 (a) failed: mask_invalid\ntrained on the prompt", "state": "failed"}
    notice = {"key": "a" * 32, "to": {"webhook": "team"}, "is_own": False, "payload": payload, "created_at": 4e9}
    machine.write("/srv/notice", json.dumps(notice))
    machine.sh(
        "install -d -o honed -g honed -m 0750 /var/lib/honed/outbox /var/lib/honed/outbox/notices"
        " && install -o honed -g honed -m 0640 /srv/notice /var/lib/honed/outbox/notices/" + "a" * 32 + ".json"
    )
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "honed-send")
    told = wait_for(lambda: machine.try_run("cat", "/srv/received").stdout, what="the message")
    assert json.loads(told) == {
        "topic": "jobs",
        "title": "job 1 (a) failed: mask_invalid",
        "message": "trained on the prompt",
    }
    waiting = "/var/lib/honed/outbox/notices/" + "a" * 32 + ".json"
    wait_for(lambda: not machine.exists(waiting), what="the notice delivered")
    assert not any(KEY in message for message in machine.messages())
