"""A job of several ranks has loopback in a network namespace of its own and nothing more, one of one rank nothing."""

from __future__ import annotations

import json

import pytest
from machine import ENVIRONMENT, Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

#: Two ranks add up over gloo; then everything else is tried.
PROBE = """\
import os, socket, subprocess, sys
if len(sys.argv) > 1:
    import torch.distributed as dist, torch
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=int(sys.argv[1]), world_size=2)
    value = torch.tensor([float(sys.argv[1]) + 1])
    dist.all_reduce(value)
    dist.destroy_process_group()
    raise SystemExit(0 if value.item() == 3.0 else 1)
def tried(family, address=None):
    try:
        with socket.socket(family, socket.SOCK_RAW if family == socket.AF_PACKET else socket.SOCK_STREAM) as opened:
            opened.settimeout(5)
            if address:
                opened.connect(address)
        return "yes"
    except OSError as error:
        return type(error).__name__ + " " + os.strerror(error.errno or 0)
told = {"inet": tried(socket.AF_INET), "packet": tried(socket.AF_PACKET)}
told["outside"] = tried(socket.AF_INET, ("192.0.2.1", 80))
if os.environ.get("HONED_NUM_RANKS"):
    ranks = [subprocess.Popen([sys.executable, "-B", __file__, str(rank)]) for rank in range(2)]
    told["ranks"] = [each.wait() for each in ranks]
told["interfaces"] = [name for _, name in socket.if_nameindex()] if told["inet"] == "yes" else []
import json
open("told.json", "w").write(json.dumps(told))
"""


@pytest.fixture(scope="module", autouse=True)
def installed(machine: Machine) -> None:
    machine.install()
    machine.run("systemctl", "stop", "honed")
    machine.write("/srv/probe.py", PROBE)
    machine.run("chmod", "a+r", "/srv/probe.py")


def tell(machine: Machine, number: int, ranks: int) -> dict[str, object]:
    """Start a job's unit with the probe in it; return what it told."""
    directory = f"/var/lib/honed/jobs/{number}"
    environment = {"HONED_NUM_RANKS": str(ranks)} if ranks > 1 else {}
    start = {"number": 1, "start": 1, "backend": "", "environment": environment, "watchdog_sec": 60}
    machine.sh(f"mkdir -p {directory}; chown honed-job:honed-job {directory}; chmod 0770 {directory}")
    machine.write(f"{directory}/plan.json", '{"may_read": null}')
    machine.write(f"{directory}/start.json", json.dumps({**start, "stop_timeout_sec": 60}))
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    machine.write(
        f"/etc/systemd/system/honed-job@{number}.service.d/probe.conf",
        f"[Service]\nType=oneshot\nExecStart=\nExecStart=/usr/bin/python3 -B /srv/probe.py\nExecStopPost=\n"
        f"Environment={variables} PYTHONPATH={ENVIRONMENT}/lib/python3.11/site-packages\nWatchdogSec=0\n",
    )
    machine.run("systemctl", "daemon-reload")
    done = machine.try_run("systemctl", "start", f"honed-job@{number}")
    assert done.returncode == 0, machine.run("journalctl", "--no-pager", "--lines=60")
    return dict(json.loads(machine.read(f"{directory}/told.json")))


def test_ranks_meet_over_loopback_and_reach_nothing_else(machine: Machine) -> None:
    told = tell(machine, 7, 2)
    assert told["ranks"] == [0, 0]
    assert told["interfaces"] == ["lo"]
    assert "unreachable" in str(told["outside"])
    assert told["packet"] != "yes"
    dropin = "/run/systemd/system/honed-job@7.service.d/50-several-ranks.conf"
    wait_for(lambda: not machine.exists(dropin), what="the end of the view")


def test_one_rank_has_no_network_at_all(machine: Machine) -> None:
    assert tell(machine, 8, 1)["inet"] != "yes"
    assert "several-ranks" not in machine.run("systemctl", "cat", "honed-job@8")
