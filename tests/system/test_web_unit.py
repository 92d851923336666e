"""honed-web.socket and its service: started by the first request, read-only, with hardly any rights."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import tinyjob
from machine import CHECKOUT, ENVIRONMENT, Machine

from waiting import wait_for

pytestmark = pytest.mark.systemd

TOKEN = "0123456789abcdef-s3cret"
SOCKET = "/run/honed-web.sock"
LOOPBACK = "127.0.0.1:8470"
#: Sends a request to one address over TCP or a unix socket, and prints the response.
ASK = """
import http.client, json, socket, sys
where, path, *headers = sys.argv[1:]
connection = http.client.HTTPConnection(where if ":" in where else "localhost", timeout=180)
if where.startswith("/"):
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(180)
    connection.sock.connect(where)
connection.request("GET", path, headers=dict(each.split(": ", 1) for each in headers))
answer = connection.getresponse()
print(json.dumps({"status": answer.status, "body": answer.read().decode()}))
"""
#: Keeps many connections open that send nothing, and replaces each that is refused, until its input ends.
FLOOD = """
import select, socket, sys
def fresh():
    return socket.create_connection(("127.0.0.1", 8470))
held = [fresh() for _ in range(160)]
print("flooding", flush=True)
while sys.stdin not in (ready := select.select([sys.stdin, *held], [], [])[0]):
    for each in ready:
        each.close()
        held.remove(each)
        held.append(fresh())
"""
SPEC = tinyjob.evaluated("facts", num_steps=4)


def ask(machine: Machine, where: str, path: str, *headers: str, user: str | None = None) -> tuple[int, str]:
    done = machine.try_run("/usr/bin/python3", "/srv/ask.py", where, path, *headers, user=user)
    assert done.returncode == 0, (done.stderr, machine.messages("--unit=honed-web"))
    told = json.loads(done.stdout)
    return told["status"], told["body"]


def ask_json(machine: Machine, where: str, path: str, *headers: str, user: str | None = None) -> Any:
    status, body = ask(machine, where, path, *headers, user=user)
    assert status == 200, body
    return json.loads(body)


def healthy(machine: Machine, user: str | None = None) -> dict[str, Any]:
    """Return what honed-web says of its health, nothing if it is not well."""
    status, body = ask(machine, LOOPBACK, "/healthz", user=user)
    told: dict[str, Any] = json.loads(body)
    return told if (status, told["status"]) == (200, "ok") else {}


@pytest.fixture(scope="module", autouse=True)
def trained(machine: Machine, model: str) -> None:
    """A machine on which honed is installed, and a job of anna's has run."""
    machine.write("/srv/ask.py", ASK)
    machine.run("ip", "link", "set", "lo", "up")
    machine.install()
    machine.run("systemctl", "enable", "--now", "honed")
    machine.add_user("anna", "honed-submit")
    machine.add_user("berta")
    machine.write("/home/anna/facts.json", json.dumps(SPEC), user="anna")
    machine.run("cp", "/home/anna/facts.json", "/var/spool/honed/incoming", user="anna")
    wait_for(
        lambda: machine.jobs().get("facts", {}).get("state") == "succeeded",
        what="the job",
        deadline_sec=400,
    )


def test_it_is_off_until_its_socket_is_enabled_and_starts_with_the_first_request(machine: Machine) -> None:
    assert machine.try_run("systemctl", "is-enabled", "honed-web.socket").stdout.strip() == "disabled"
    assert machine.property("honed-web.socket", "ActiveState") == "inactive"
    machine.run("systemctl", "enable", "--now", "honed-web.socket")
    assert machine.property("honed-web", "ActiveState") == "inactive"
    told = wait_for(lambda: healthy(machine), what="honed's answer, which honed-web waits for a few seconds")
    assert told["honed"]["is_up"]
    assert told["database"] == {"is_open": True, "num_jobs": 1, "detail": None}
    assert machine.property("honed-web", "ActiveState") == "active"
    assert "connections" in machine.property("honed-web", "StatusText")


def test_over_loopback_everybody_sees_numbers_and_states(machine: Machine) -> None:
    """Any user of the machine has access; results are not shared by default."""
    (job,) = ask_json(machine, LOOPBACK, "/api/jobs", user="berta")["jobs"]
    assert (job["id"], job["state"], job["name"]) == (1, "succeeded", "")
    for path in ("/api/jobs/1", "/api/jobs/1/metrics", "/api/jobs/1/predictions", "/jobs/1", "/api/jobs/1/events"):
        assert ask(machine, LOOPBACK, path)[0] == 403, path
    assert ask(machine, LOOPBACK, "/api/jobs", "Host: evil.example")[0] == 421
    ended = 'honed_jobs_finished_total{outcome="succeeded"} 1.0'  # from a file, which its user can read
    of_socket = 'honed_degraded{kind="machine"} 0.0'  # from the control socket, if honed answers in time

    def complete() -> str:
        metrics = ask(machine, LOOPBACK, "/metrics")[1]
        return metrics if ended in metrics and of_socket in metrics else ""

    metrics = wait_for(complete, what="the counters, and honed's own figures")
    assert 'honed_jobs{state="succeeded"} 1.0' in metrics
    assert "\nprocess_resident_memory_bytes " in metrics  # its own, although the unit hides most of /proc


def test_over_the_unix_socket_people_read_what_is_theirs(machine: Machine) -> None:
    for user in ("anna", "root"):
        shown = ask_json(machine, SOCKET, "/api/jobs/1", user=user)
        assert shown["name"] == "facts"
        assert shown["spec"]["base_model"] == "/srv/models/tiny"
        assert shown["plan"]["precision"]["load_dtype"]
        assert shown["artifacts"]["output_dir"] == "/var/lib/honed/jobs/1/output"
        predicted = ask_json(machine, SOCKET, "/api/jobs/1/predictions", user=user)["predictions"]
        assert {row["step"] for row in predicted} >= {0, 2, 4}
        page = ask(machine, SOCKET, "/jobs/1", user=user)[1]
        assert "succeeded: loss" in page
        assert "PeftModel.from_pretrained" in page
    assert ask(machine, SOCKET, "/api/jobs/1", user="berta")[0] == 403


def test_a_user_who_floods_it_over_loopback_shuts_out_nobody(machine: Machine) -> None:
    machine.write("/srv/flood.py", FLOOD)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with machine.popen("/usr/bin/python3", "/srv/flood.py", user="berta", **pipes) as flood:
        assert flood.stdin is not None
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"flooding\n"
        for _ in range(4):
            for path in ("/healthz", "/api/jobs/1"):
                assert ask(machine, SOCKET, path)[0] == 200
                assert ask(machine, SOCKET, path, user="anna")[0] == 200
            assert ask(machine, LOOPBACK, "/healthz")[0] in {200, 503}
        assert flood.poll() is None
        flood.stdin.close()
        assert flood.wait(180) == 0


def test_a_reload_of_honed_shares_results(machine: Machine) -> None:
    machine.write("/etc/honed/honed.toml.d/50-web.toml", "[policy]\nshare_results = true\n")
    machine.run("systemctl", "reload", "honed")
    machine.wait_message("configuration reloaded", "--unit=honed-web")
    assert ask_json(machine, LOOPBACK, "/api/jobs/1")["name"] == "facts"
    figures = ask_json(machine, LOOPBACK, "/api/jobs/1/metrics?name=loss")["metrics"]
    assert [row["step"] for row in figures] == [1, 2, 3, 4]


def test_it_can_write_nothing_and_do_nothing_to_honed(machine: Machine) -> None:
    pid = machine.main_pid("honed-web")
    status = machine.sh(f"cat /proc/{pid}/status")
    uid = next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:"))
    assert uid not in {"0", machine.run("id", "-u", "honed").strip(), machine.run("id", "-u", "honed-job").strip()}
    into = ("nsenter", f"--target={pid}", "--mount", "--net")
    groups = next(line.split(":")[1].split() for line in status.splitlines() if line.startswith("Groups:"))
    be = ("setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={','.join(groups)}", "--")
    for path in ("/var/lib/honed/jobs/1/mine", "/var/lib/honed/mine", "/var/spool/honed/incoming/mine", "/etc/mine"):
        assert machine.try_run(*into, *be, "touch", path).returncode != 0, path
    assert machine.try_run(*into, *be, "ls", "/run/dbus/system_bus_socket").returncode != 0
    links = machine.run("nsenter", f"--target={pid}", "--net", "ip", "-brief", "link").splitlines()
    assert [line.split()[0] for line in links] == ["lo"]  # of its own, and not up
    held = machine.try_run(*be, "honectl", "cancel", "1")
    assert held.returncode != 0
    memory = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")))
    assert memory < 100 * 1024  # kB


def test_it_reads_on_while_honed_is_down(machine: Machine) -> None:
    """Nobody writes to the database then, and its -wal and -shm files cannot be created in a read-only directory."""
    machine.run("systemctl", "stop", "honed")
    assert not machine.exists("/var/lib/honed/honed.db-wal")
    status, body = ask(machine, LOOPBACK, "/healthz")
    assert status == 503
    told = json.loads(body)
    assert not told["honed"]["is_up"]
    assert told["database"]["is_open"]
    assert len(ask_json(machine, LOOPBACK, "/api/jobs/1/metrics?name=loss")["metrics"]) == 4
    assert ask_json(machine, LOOPBACK, "/api/jobs")["jobs"][0]["progress"]["step"] == 4
    machine.run("systemctl", "start", "honed")
    machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "honed")  # a crash leaves its files, too
    assert len(ask_json(machine, LOOPBACK, "/api/jobs/1/metrics?name=loss")["metrics"]) == 4
    machine.wait_property("honed", "ActiveState", "active")


def test_where_other_machines_reach_it_it_wants_a_token(machine: Machine) -> None:
    machine.write("/etc/systemd/system/honed-web.socket.d/50-open.conf", "[Socket]\nListenStream=0.0.0.0:8471\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "stop", "honed-web.service", "honed-web.socket")
    machine.run("systemctl", "start", "honed-web.socket")
    machine.try_run("/usr/bin/python3", "/srv/ask.py", "127.0.0.1:8471", "/healthz", timeout_sec=180)
    machine.wait_message("other machines can reach it, but there is no token", "--unit=honed-web")
    machine.try_run("systemctl", "stop", "honed-web.service", "honed-web.socket")

    machine.write("/etc/credstore/honed.web-token", f"{TOKEN}\n", mode=0o600)
    machine.run("systemctl", "reset-failed")
    machine.run("systemctl", "start", "honed-web.socket")
    for where in ("127.0.0.1:8471", LOOPBACK):
        assert ask(machine, where, "/api/jobs")[0] == 401
        assert ask(machine, where, "/api/jobs", "Authorization: Bearer wrong-wrong-wrong-wrong")[0] == 401
        assert ask_json(machine, where, "/api/jobs/1", f"Authorization: Bearer {TOKEN}")["name"] == "facts"
    assert ask_json(machine, SOCKET, "/api/jobs/1", user="anna")["name"] == "facts"
    assert not any(TOKEN in message for message in machine.messages())


def test_it_ends_when_nobody_asks_and_comes_again_with_the_next_request(machine: Machine) -> None:
    machine.write(
        "/etc/systemd/system/honed-web.service.d/50-idle.conf",
        "[Service]\nExecStart=\nExecStart=/opt/honed/current/bin/honed-web --idle-sec 2\n",
    )
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "honed-web")
    machine.wait_property("honed-web", "ActiveState", "inactive")
    assert machine.property("honed-web", "Result") == "success"
    assert ask_json(machine, SOCKET, "/api/jobs/1", user="anna")["name"] == "facts"


def test_an_uninstall_takes_it_away(machine: Machine) -> None:
    machine.sh("rm -r /etc/systemd/system/honed-web.service.d /etc/systemd/system/honed-web.socket.d")
    machine.run(f"{CHECKOUT}/scripts/install", "--uninstall", "--purge")
    left = machine.sh("find /etc /opt /run /usr /var -name '*honed-web*' -not -path '/run/systemd/*'")
    assert left == ""
    assert machine.try_run("systemctl", "is-active", "honed-web.socket").stdout.strip() == "inactive"


def test_one_person_has_their_own(machine: Machine) -> None:
    """honed-web runs without root, for the instance below the user's home."""
    machine.run("loginctl", "enable-linger", "berta")
    runtime_dir = f"/run/user/{machine.run('id', '-u', 'berta').strip()}"
    own = {"HOME": "/home/berta", "XDG_RUNTIME_DIR": runtime_dir, "PATH": "/home/berta/.local/bin:/usr/bin:/bin"}
    wait_for(lambda: machine.exists(f"{runtime_dir}/systemd/private"), what="berta's systemd")

    def run(*words: str) -> str:
        return machine.run(*words, user="berta", environment=own)

    run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT, "--user")
    run("systemctl", "--user", "enable", "--now", "honed", "honed-web.socket")
    wait_for(lambda: healthy(machine, user="berta"), what="her honed's answer")
    assert ask_json(machine, f"{runtime_dir}/honed-web.sock", "/api/jobs", user="berta") == {"jobs": [], "next": None}
    run(f"{CHECKOUT}/scripts/install", "--user", "--uninstall", "--purge")
    assert machine.sh("find /home/berta -name '*honed*'") == ""
