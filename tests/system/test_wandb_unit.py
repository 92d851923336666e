"""wandb's runs are sent from honed-send's sandbox: the key comes as a credential, and wandb works in the sandbox."""

from __future__ import annotations

import importlib.util

import pytest
from machine import CHECKOUT, ENVIRONMENT, Machine

from waiting import wait_for

pytestmark = [
    pytest.mark.systemd,
    pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb"),
]

KEY = "0123456789abcdef0123456789abcdef01234567"
PYTHON = f"{ENVIRONMENT}/bin/python"
#: wandb's server, which keeps in a file what it got.
SERVER = f"""
import sys, time
from http.server import ThreadingHTTPServer
sys.path.insert(0, "{CHECKOUT}/tests/process")
import wandbserver
class Fixed(ThreadingHTTPServer):
    def __init__(self, address, handler):
        super().__init__(("127.0.0.1", 8098), handler)
wandbserver.ThreadingHTTPServer = Fixed
with wandbserver.running() as server:
    while True:
        time.sleep(0.2)
        open("/srv/runs", "w").write(" ".join(server.runs))
"""
MAKE = "import wandb\nrun = wandb.init(project='p', name='n')\nrun.log({'loss': 1.5})\nrun.finish()\n"


def test_a_run_is_sent_with_the_key_of_the_credential(machine: Machine) -> None:
    machine.install()
    machine.run("ip", "link", "set", "lo", "up")
    machine.write("/etc/credstore/honed.wandb-key", f"{KEY}\n", mode=0o600)
    machine.write(
        "/etc/honed/honed.toml.d/50-wandb.toml",
        '[reporting]\nsync_wandb = true\nwandb_base_url = "http://127.0.0.1:8098"\n',
    )
    machine.write("/srv/server.py", SERVER)
    machine.run("systemd-run", "--unit=server", PYTHON, "/srv/server.py")
    machine.run("mkdir", "/srv/made")
    machine.run(
        PYTHON,
        "-c",
        MAKE,
        environment={
            "WANDB_MODE": "offline",
            "WANDB_DIR": "/srv/made",
            "HOME": "/srv/made",
            "WANDB_ERROR_REPORTING": "false",
        },
    )
    machine.sh(
        "install -d -o honed -g honed -m 0750 /var/lib/honed/outbox /var/lib/honed/outbox/wandb"
        " && cd /srv/made/wandb && for run in offline-run-*; do"
        " install -d -o honed -g honed -m 0750 /var/lib/honed/outbox/wandb/1.$run;"
        " install -o honed -g honed -m 0640 $run/run-*.wandb /var/lib/honed/outbox/wandb/1.$run/; done"
    )
    machine.run("systemctl", "start", "honed-send")
    machine.wait_message("sent to wandb: 1.offline-run-", "--unit=honed-send")
    assert wait_for(lambda: machine.try_run("cat", "/srv/runs").stdout, what="the run at the server")
    assert not any(KEY in message for message in machine.messages())
