"""Who may do what: each user, each verb of the control socket, each kind of object, and the same for honed-web and for
files. docs/security.md has what is found here as tables; HONED_WRITE_TABLES=1 writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machine import Machine
from tables import holds

from honed.daemon.arrivals.submission import Submission
from honed.daemon.changes import Changes
from honed.daemon.editing import Editing
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.maintenance import Maintenance
from honed.daemon.reading import Reading
from honed.daemon.status import Status
from honed.daemon.telemetry import Observer
from honed.daemon.verb import Right, declared
from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
JOBS = "/var/lib/honed/jobs"
SOCKET, WEB = "/run/honed/control.sock", "/run/honed-web.sock"
USERS = ("alice", "mallory", "eve", "root")
#: What only alice, and who may read everything, may see.
SECRET = "alices-word"
GONE = 9999
#: What no job is called.
HOSTILE = (
    *(
        "",
        "../1",
        "/etc/shadow",
        "-1",
        "0x1",
        "1e3",
        "9" * 400,
        "\u0661",
        "1\n",
        "\0",
        "*",
        "' OR 1=1 --",
        "x" * 100_000,
    ),
    *(None, True, 1.5, [], [1], {}, {"id": 1}, "\ud800"),
)
#: Sends each request of its input on a connection of its own, and prints the answers.
ASK = """
import json, socket, sys, time
said = []
for request in json.load(sys.stdin):
    peer = socket.socket(socket.AF_UNIX); peer.settimeout(120); peer.connect(sys.argv[1])
    peer.sendall(json.dumps(request).encode() + b"\\n"); line = peer.makefile("rb").readline(); peer.close()
    said.append(json.loads(line) if line.endswith(b"\\n") else None)
print(json.dumps(said))
"""
#: The same for paths of honed-web, of which it prints the status and the start of the body.
GET = """
import http.client, json, socket, sys
said = []
for path in json.load(sys.stdin):
    web = http.client.HTTPConnection("localhost", timeout=120)
    web.sock = socket.socket(socket.AF_UNIX); web.sock.settimeout(120); web.sock.connect(sys.argv[1])
    web.putrequest("GET", path, skip_host=False); web.endheaders(); answer = web.getresponse()
    body = b"" if "events" in path else answer.read(300_000)
    said.append([answer.status, body.decode(errors="replace")]); web.close()
print(json.dumps(said))
"""
#: What its user may do with each path of its input, as the kernel says when it is tried.
TRY = """
import json, os, stat, sys
def can(path, flags):
    try: os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError: return False
    return True
def reaches(path):
    try: os.stat(path)
    except OSError: return False
    return True
said = {}
for path in json.load(sys.stdin):
    is_dir = os.path.isdir(path)
    words = ["list" if is_dir else "read"] * can(path, os.O_RDONLY)
    words += ["add" if is_dir else "write"] * (os.access(path, os.W_OK | os.X_OK) if is_dir else can(path, os.O_WRONLY))
    words += ["enter"] * (is_dir and os.access(path, os.X_OK) and "list" not in words)
    words += ["connect"] * (stat.S_ISSOCK(os.stat(path).st_mode) and os.access(path, os.W_OK)) if reaches(path) else []
    said[path] = ", ".join(words)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def honed(machine: Machine, people: None) -> Machine:
    """A machine with a held job of alice's and one of mallory's, and a refused file of each; no job starts."""
    machine.run("ip", "link", "set", "lo", "up")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", "[spool]\nsettle_sec = 0.2\n")
    machine.run("systemctl", "enable", "--now", "honed", "honed-web.socket")
    machine.run("honectl", "pause")
    for user in ("alice", "mallory"):
        for name, text in (
            (f"{user}s-word.hold.json", spec(name=f"{user}s-word")),
            (f"{user}s-word-refused.json", spec(nonsense=f"{user}s-word")),
        ):
            machine.run(
                *("sh", "-ec", f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1"', "sh", name),
                user=user,
                stdin=text,
            )
    wait_for(lambda: len(machine.jobs()) == 2, what="both jobs accepted")
    wait_for(
        lambda: all(machine.refusal(f"{user}s-word-refused") for user in ("alice", "mallory")), what="both refusals"
    )
    for user in ("alice", "mallory"):
        attempt = f"{JOBS}/{number(machine, user)}/attempts/1"
        machine.sh(
            f"mkdir -p {attempt}; echo {user}s-word >{attempt}/worker.log; echo '{{}}' >{attempt}/events.jsonl",
            user=user,
        )
    wait_for(lambda: machine.exists(f"{JOBS}/{number(machine, 'alice')}/report.html"), what="the page of alice's job")
    return machine


def spec(**keys: Any) -> str:
    return json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), **keys))


def number(machine: Machine, user: str) -> int:
    return int(machine.jobs()[f"{user}s-word"]["id"])


def ask(machine: Machine, user: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = json.loads(
        machine.run("/usr/bin/python3", "-c", ASK, SOCKET, user=user, stdin=json.dumps(requests))
    )
    assert None not in said, (user, [request for request, answer in zip(requests, said, strict=True) if answer is None])
    return said


def names_of_verbs() -> dict[str, Right]:
    """The verbs that there are, and who may use them, by the table that honed has."""
    services = (Reading, Status, Observer, Submission, Housekeeper, Changes, Editing, Maintenance)
    declarations = [declaration for service in services for _, declaration in declared(service)]
    declarations.sort(key=lambda declaration: declaration.right.value)
    return {name: declaration.right for declaration in declarations for name in declaration.names}


#: Verbs that answer about one item, by what they ask for it.
ABOUT_ONE = dict.fromkeys(("show", "glance", "predictions", "losses", "group", "accepted", "refusal"), "id")
ABOUT_ONE |= dict.fromkeys(("cancel", "hold", "release", "requeue", "edit", "edited", "pin", "unpin"), "id")
ABOUT_ONE |= {"prune": "ids", "pruned": "ids"}
#: What they need besides.
MORE: dict[str, dict[str, Any]] = {
    "edit": {"data": "e30="},
    "submit": {"name": "x.json", "data": "e30="},
    "prune": {"dry_run": False},
    "drain": {"devices": []},
}


def request(verb: str, item: Any = None) -> dict[str, Any]:
    found = {"verb": verb, **MORE.get(verb, {})}
    if (key := ABOUT_ONE.get(verb)) is not None:
        found[key] = [item] if key == "ids" else item
    return found


def verdict(answer: dict[str, Any]) -> str:
    """One word for an answer: what it says is looked at elsewhere."""
    if answer["ok"]:
        return "nothing" if answer["result"] in (None, [], {}) else "answered"
    code = answer["error"]["code"]
    return {"not_permitted": "refused"}.get(code, code)


def test_each_verb_does_for_each_user_what_the_table_says(honed: Machine) -> None:
    alices, mallorys = number(honed, "alice"), number(honed, "mallory")
    before = {path: honed.read(path) for path in entries_of(honed, alices)}
    rights = names_of_verbs()
    rows = []
    for verb, right in rights.items():
        cells = []
        for user, item in (("mallory", alices), ("eve", alices), ("mallory", GONE)):
            if verb not in ABOUT_ONE and item == GONE:
                cells.append("")
                continue
            [answer] = ask(honed, user, [request(verb, str(item))])
            text = json.dumps(answer)
            assert SECRET not in text, (user, verb, text[:2000])
            assert answer["ok"] or answer["error"]["code"] not in {"internal_error", "error"}, (user, verb, text)
            cells.append(verdict(answer))
        who = {"ANYBODY": "everybody", "OWNER": "its owner", "ADMINISTRATOR": "administrators"}[right.name]
        rows.append((f"`{verb}`", who, *cells))
        if right is not Right.ANYBODY:
            assert cells[0] == cells[1] == "refused", rows[-1]
    assert {path: honed.read(path) for path in entries_of(honed, alices)} == before
    assert mallorys in honed.entries()
    holds("verbs", ("verb", "for", "mallory, of alice's job", "eve, of alice's job", "mallory, of no job"), rows)


def entries_of(machine: Machine, job: int) -> list[str]:
    """The files that say what a job is."""
    found = machine.sh(f"ls /var/spool/honed/*/{job}.json {JOBS}/{job}/spec.json {JOBS}/{job}/plan.json").split()
    assert len(found) == 3
    return found


def test_its_owner_and_root_may_do_what_changes_a_job(honed: Machine) -> None:
    for user in ("alice", "root"):
        job = str(number(honed, "alice"))
        for verb in ("show", "pin", "unpin", "release", "hold", "edited"):
            [answer] = ask(honed, user, [request(verb, job)])
            assert answer["ok"], (user, verb, answer)
        assert SECRET in json.dumps(ask(honed, user, [{"verb": "list"}, {"verb": "refused"}])), user


@pytest.mark.parametrize("user", ["mallory", "eve"])
def test_what_no_job_is_called_is_an_error_of_the_asker(honed: Machine, user: str) -> None:
    requests = [request(verb, item) for verb in names_of_verbs() for item in HOSTILE if verb in ABOUT_ONE]
    requests = [each for each in requests if each["verb"] != "prune" or each["ids"] not in ([[]], [None])]
    answers = ask(honed, user, requests)
    wrong = [
        (each, answer)
        for each, answer in zip(requests, answers, strict=True)
        if SECRET in json.dumps(answer) or (not answer["ok"] and answer["error"]["code"] in {"internal_error", "error"})
    ]
    assert [(str(each)[:200], str(answer)[:300]) for each, answer in wrong] == []
    assert not any("Traceback" in line for line in honed.messages("--unit=honed"))


def test_honed_web_shows_each_user_what_the_table_says(honed: Machine) -> None:
    job = number(honed, "alice")
    paths = [
        "/api/jobs",
        f"/api/jobs/{job}",
        f"/api/jobs/{job}/metrics",
        f"/api/jobs/{job}/predictions",
        f"/jobs/{job}",
    ]
    paths += [f"/api/jobs/{job}/events", "/", f"/compare?jobs={job}", "/metrics", "/healthz", f"/api/jobs/{GONE}"]
    paths += ["/jobs/..%2f..%2fetc%2fshadow", "/%2e%2e/etc/shadow", "/api/jobs/-1", f"/api/jobs/{'9' * 400}"]
    rows: dict[str, list[str]] = {}
    for user in USERS:
        said = json.loads(honed.run("/usr/bin/python3", "-c", GET, WEB, user=user, stdin=json.dumps(paths)))
        for path, (status, body) in zip(paths, said, strict=True):
            assert status < 500, (user, path, status, body)
            shows = SECRET in body
            assert not shows or user in {"alice", "root"}, (user, path)
            words = {200: "read" if shows else "answered", 403: "refused"}.get(status, str(status))
            name = path.replace(f"/{job}", "/N").replace(f"={job}", "=N").replace("9" * 400, "999…")
            rows.setdefault(name, []).append(words)
    holds("web", ("address", *USERS), [(f"`{path}`", *cells) for path, cells in rows.items()])


def test_each_user_may_do_with_each_file_what_the_table_says(honed: Machine) -> None:
    job = number(honed, "alice")
    listed = honed.sh(
        "find /var/spool/honed /var/lib/honed /var/cache/honed /etc/honed /run/honed "
        f"-maxdepth 3 -not -path '*/jobs/*' | sort; find {JOBS}/{job} | sort; echo {WEB}"
    ).splitlines()
    kinds: dict[str, str] = {}
    for path in listed:
        kinds.setdefault(kind_of(path, job), path)
    tried = {
        user: json.loads(honed.run("/usr/bin/python3", "-c", TRY, user=user, stdin=json.dumps([*kinds.values()])))
        for user in USERS[:3]
    }
    rows = [(f"`{kind}`", *(tried[user][path] for user in USERS[:3])) for kind, path in kinds.items()]
    for kind, _, mallory, eve in rows:
        assert "write" not in mallory + eve, kind
        assert "read" not in mallory + eve or not kind.startswith(f"`{JOBS}/N/"), kind
        assert {*eve.split(", ")} - {""} <= {*mallory.split(", ")}, kind
    holds("files", ("path", "alice, whose job N is", "mallory", "eve"), [row for row in rows if any(row[1:])])


def kind_of(path: str, job: int) -> str:
    """A path without what differs from job to job, and from machine to machine."""
    parts = path.split("/")
    if parts[-1].endswith((".json", ".reason", ".hold")) and "/spool/" in path:
        parts[-1] = {"reason": "NAME.json.reason"}.get(parts[-1].rpartition(".")[2], "N.json")
    return "/".join("N" if part in {str(job), "1"} else part for part in parts).replace(
        "jobs/N/attempts/N", "jobs/N/attempts/A"
    )
