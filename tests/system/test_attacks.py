"""What a user of the machine plants where honed looks: each kind in incoming/, in a job's directory and beside staged
copies. Nobody reads what is another's, nothing of another's changes, everybody gets their answers. docs/security.md has
what each kind gave; HONED_WRITE_TABLES=1 writes it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, Machine
from planted import ALICES, KINDS, MOUNTED, OVER, ROOTS
from tables import holds

from honed.job import refusals
from waiting import DEADLINE_SEC, wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
JOBS = "/var/lib/honed/jobs"
PYTHON = "/opt/honed/current/bin/python"
SECRETS = ("alices-word", "roots-word", "HONED_", "SQLite format")
#: What a worker writes, and honed reads or replaces, below its job's directory.
FIXED = (
    *(f"attempts/1/{name}" for name in ("events.jsonl", "result.json", "worker.log", "pulse", "exit.json", "lock")),
    *("attempts/2", "checkpoints", "output", "report.html", ".report.html.tmp", "gate.json", "trial", "rows", "wandb"),
)
OF_ONE = ("show", "glance", "predictions", "losses")
OF_ALL = ("list", "overview", "refused", "status", "numbers", "names", "prune", "metrics")
#: Sends each request, a connection for each, and prints answers and seconds.
ASK = """
import json, socket, sys, time
said = []
for request in json.load(sys.stdin):
    began = time.monotonic(); peer = socket.socket(socket.AF_UNIX); peer.settimeout(120)
    peer.connect("/run/honed/control.sock"); peer.sendall(json.dumps(request).encode() + b"\\n")
    line = peer.makefile("rb").readline(); peer.close()
    said.append([json.loads(line) if line.endswith(b"\\n") else None, time.monotonic() - began])
print(json.dumps(said))
"""
#: Runs honectl's commands, all in one process, and prints what each said and its status.
COMMANDS = """
import json, os, signal, sys, tempfile
from honed.cli import honectl
class Hangs(BaseException): pass
def late(*_): raise Hangs
signal.signal(signal.SIGALRM, late)
said = []
answer_fd = os.dup(1)
for words in json.load(sys.stdin):
    out = tempfile.TemporaryFile(); os.dup2(out.fileno(), 1); os.dup2(out.fileno(), 2)
    signal.alarm(300)
    try: status = honectl.main(words)
    except SystemExit as end: status = end.code
    except Hangs: status = "hangs"
    except Exception as error: status = repr(error)
    signal.alarm(0); sys.stdout.flush(); sys.stderr.flush(); out.seek(0)
    said.append([status, out.read(1_000_000).decode(errors="replace")]); out.close()
os.dup2(answer_fd, 1)
print(json.dumps(said))
"""


#: What of a job only its submitter can remove: directories that honed may not enter.
CLOSED = ("directory of 1,500 levels", "directory of 3,000 names", "directory with one that is closed to all")


@dataclass
class Attack:
    """What was planted, and what came of it."""

    machine: Machine
    jobs: dict[str, int] = field(default_factory=dict)  #: mallory's, by kind
    names: dict[str, str] = field(default_factory=dict)  #: what each kind was dropped as
    failed: dict[str, list[str]] = field(default_factory=dict)  #: what the kernel did not let her make
    before: str = ""  #: what is others'
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)  #: by user, then verb and job
    said: dict[str, dict[str, Any]] = field(default_factory=dict)  #: honectl, by user, then command and job
    reasons: dict[str, str] = field(default_factory=dict)  #: by kind
    left: set[str] = field(default_factory=set)  #: kinds that are still in incoming/
    worst_sec: float = 0.0
    mounts: subprocess.Popen[bytes] | None = None  #: serves what is mounted
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)


def spec(**keys: Any) -> str:
    return json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), **keys))


def others(machine: Machine) -> str:
    """What is alice's and root's, each file with its hash, owner, mode and time of change."""
    jobs = " ".join(f"{JOBS}/{entry['id']}" for name, entry in machine.jobs().items() if name.startswith("alices"))
    return machine.sh(
        f"find {ALICES} {ROOTS} {jobs} /home/alice /etc/shadow -type f -not -name report.html "
        "-exec sha256sum {} + -exec stat -c '%n %U %a %y' {} + | sort"
    )


def drop(machine: Machine, user: str, name: str, text: str) -> None:
    words = ("sh", "-ec", f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1"', "sh", name)
    machine.run(*words, user=user, stdin=text)


def accepted(machine: Machine, name: str) -> None:
    drop(machine, "alice", f"{name}.hold.json", spec(name=name))
    wait_for(
        lambda: name in machine.jobs(), what=f"{name} accepted", account=lambda: machine.messages("--unit=honed")[-20:]
    )


def ask(attack: Attack, user: str) -> None:
    about = [
        {"verb": verb, "id": str(job)}
        for verb in ("show", "glance", "predictions", "losses")
        for job in attack.jobs.values()
    ]
    requests = [
        {"verb": verb} for verb in ("list", "overview", "refused", "status", "numbers", "names", "prune", "metrics")
    ]
    said = json.loads(attack.machine.run("/usr/bin/python3", "-c", ASK, user=user, stdin=json.dumps(requests + about)))
    for request, (answer, seconds) in zip(requests + about, said, strict=True):
        attack.asked.setdefault(user, {})[f"{request['verb']} {request.get('id', '')}".strip()] = answer
        attack.worst_sec = max(attack.worst_sec, seconds)


def mount(attack: Attack, order: list[tuple[str, list[str]]]) -> None:
    """Mount mallory's file systems over what she made for them."""
    machine = attack.machine
    places = [(path, *MOUNTED[kind]) for kind, paths in order for path in paths]
    words = ("/usr/bin/python3", f"{CHECKOUT}/tests/system/fuse_mounts.py", machine.run("id", "-u", "mallory").strip())
    attack.mounts = machine.popen(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert attack.mounts.stdin is not None and attack.mounts.stdout is not None
    attack.mounts.stdin.write(json.dumps(places).encode() + b"\n")
    attack.mounts.stdin.flush()
    assert attack.mounts.stdout.readline() == b"mounted\n"


@pytest.fixture(scope="module")
def attack(machine: Machine, people: None) -> Attack:
    """A machine with a job of mallory's for each kind, on which all was planted and asked for, and honed restarted."""
    machine.write("/etc/honed/honed.toml.d/50-test.toml", "[spool]\nsettle_sec = 0.2\nrescan_interval_sec = 2\n")
    machine.sh(
        f"echo alices-word >{ALICES}; chown alice {ALICES}; chmod 600 {ALICES}; install -d -o mallory /srv/mallorys; "
        f"echo roots-word >{ROOTS}; chown root:honed {ROOTS}; chmod 640 {ROOTS}; "
        "setfacl -m u:honed:r /srv/alices 2>/dev/null || true"
    )
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    found = Attack(machine)
    accepted(machine, "alices-first")
    drop(machine, "alice", "alices-word-refused.json", spec(nonsense="alices-word"))
    for number, kind in enumerate(KINDS):
        found.names[kind] = KINDS[kind][0].replace("#", f"k{number}-")
    text = spec()
    machine.sh(
        f"cd {INCOMING}; for n in $(seq 0 {len(KINDS) - 1}); do printf %s '{text}' >.m$n; mv .m$n m$n.hold.json; done",
        user="mallory",
    )
    wait_for(
        lambda: len(machine.jobs()) > len(KINDS),
        what="mallory's jobs",
        account=lambda: machine.messages("--unit=honed")[-9:],
    )
    by_source = {entry["source"]: entry["id"] for entry in machine.entries().values()}
    found.jobs = {kind: by_source[f"m{number}.hold.json"] for number, kind in enumerate(KINDS)}
    found.before = others(machine)
    order = []
    for kind, name in found.names.items():
        job = f"{JOBS}/{found.jobs[kind]}"
        order.append(
            (
                kind,
                [
                    f"{INCOMING}/{name}",
                    f"/var/lib/honed/staged/{name}",
                    f"{job}/{name}",
                    *(f"{job}/{each}" for each in FIXED),
                ],
            )
        )
    words = ("/usr/bin/python3", f"{CHECKOUT}/tests/system/planted.py")
    found.failed = json.loads(
        machine.run(*words, user="mallory", stdin=json.dumps([each for each in order if each[0] not in MOUNTED]))
    )
    machine.run("systemctl", "kill", "--signal=STOP", "honed")  # or it takes the files before they are mounted over
    mounted = [each for each in order if each[0] in MOUNTED]
    pages = " ".join(f"{JOBS}/{found.jobs[kind]}/report.html" for kind, _ in mounted)
    machine.sh(f"rm -f {pages}")  # honed may have written them by now
    assert json.loads(machine.run(*words, user="mallory", stdin=json.dumps(mounted))) == {}
    of_eve = json.loads(machine.run(*words, user="eve", stdin=json.dumps(order)))
    made = {kind for kind, paths in order if len(of_eve.get(kind, ())) < len(paths)}
    assert made == set(), f"eve has made {made}"
    mount(found, mounted)
    machine.run("systemctl", "kill", "--signal=CONT", "honed")
    accepted(machine, "alices-second")
    wait_for(lambda: settled(found), what="incoming/ settled", account=lambda: found.left)
    for user in ("alice", "mallory", "eve", "root"):
        ask(found, user)
    commands = [[word, str(job)] for job in found.jobs.values() for word in ("show", "logs")]
    for user in ("root", "mallory"):
        said = json.loads(machine.run(PYTHON, "-P", "-c", COMMANDS, user=user, stdin=json.dumps(commands)))
        found.said[user] = {" ".join(words): each for words, each in zip(commands, said, strict=True)}
    machine.run("systemctl", "restart", "honed")
    accepted(machine, "alices-third")
    return found


#: These wait in incoming/ for as long as the attack lasts; and these honed overlooks there.
WAITING = {"file that grows", "file with a lease"}
OVERLOOKED = {*MOUNTED, *(kind for kind in KINDS if kind.startswith("directory"))}


def settled(attack: Attack) -> bool:
    """Whether each dropped file has been refused, or waits because of what it is."""
    listed = attack.machine.sh(f"cd {INCOMING}; python3 -c 'import json, os; print(json.dumps(os.listdir(\".\")))'")
    attack.left = {kind for kind, name in attack.names.items() if name in json.loads(listed)}
    return attack.left <= WAITING | OVERLOOKED


def reasons(attack: Attack) -> dict[str, str]:
    """Why each was refused, as root is told, by the number in its name."""
    files = attack.asked["root"]["refused"]["result"]["files"]
    return {match[1]: str(each["reason"]) for each in files if (match := re.search(r"\bk(\d+)-", each["file"]))}


def outcome(attack: Attack, kind: str) -> tuple[str, str]:
    """What became of a dropped file, and what its dropper is told."""
    if any(f" {INCOMING}" in each for each in attack.failed.get(kind, ())):
        return "the kernel does not let her", ""
    if kind in attack.left | WAITING:
        return ("waits" if kind in WAITING else "overlooked"), ""
    text = reasons(attack)[str([*KINDS].index(kind))]
    head, _, rest = text.partition("\n\n")
    message = rest.splitlines()[1].strip().rpartition(f"{kind_name(attack, kind)}: ")[2]
    message = re.sub(r"/\S+/", "…/", message.encode("unicode_escape").decode())
    return "refused" if "is kept" in head else "refused, and not kept", message[:120]


def kind_name(attack: Attack, kind: str) -> str:
    return refusals.shown(attack.names[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_thing_shows_nothing_and_stops_nobody(attack: Attack, kind: str) -> None:
    job = attack.jobs[kind]
    for user in ("alice", "mallory", "eve", "root"):
        for verb in OF_ONE:
            answer = attack.asked[user][f"{verb} {job}"]
            assert answer is not None, (user, verb)
            assert answer["ok"] == (user in {"mallory", "root"}) or verb in {"predictions", "losses"}, (
                user,
                verb,
                answer,
            )
            if not answer["ok"]:
                assert answer["error"]["code"] not in {"internal_error", "error"}, (user, verb, answer)
            if user != "root":
                assert not any(word in json.dumps(answer) for word in SECRETS), (user, verb)
    for user in ("root", "mallory"):
        for command in ("show", "logs"):
            status, text = attack.said[user][f"{command} {job}"]
            assert status == 0, (user, command, status, text[-2000:])
            assert not any(word in text for word in SECRETS), (user, command)
    attack.rows[kind] = (kind, *outcome(attack, kind))


def test_others_read_and_lose_nothing_and_get_their_answers(attack: Attack) -> None:
    for user in ("mallory", "eve"):
        for name, answer in attack.asked[user].items():
            assert answer is not None, (user, name)
            assert not any(word in json.dumps(answer) for word in ("alices-word", "roots-word")), (user, name)
    assert {*attack.before.splitlines()} <= {*others(attack.machine).splitlines()}
    assert not attack.machine.exists("/srv/mallorys/ran")
    assert not any("Traceback" in line for line in attack.machine.messages("--unit=honed"))
    print(f"not made: { {kind: len(paths) for kind, paths in attack.failed.items()} }")
    print(f"the slowest answer took {attack.worst_sec:.2f} s")


def test_pages_and_the_doctor_wait_for_no_file_system(attack: Attack) -> None:
    machine = attack.machine
    machine.run("systemctl", "start", "honed-web.socket")
    get = ("curl", "--silent", "--max-time", "300", "--output", "/dev/null", "--write-out", "%{http_code}")
    for kind in MOUNTED:
        job = attack.jobs[kind]
        for path in (f"/jobs/{job}", f"/api/jobs/{job}", f"/api/jobs/{job}/metrics", f"/api/jobs/{job}/predictions"):
            said = machine.try_run(*get, "--unix-socket", "/run/honed-web.sock", f"http://localhost{path}").stdout
            assert said == "200", (kind, path, said)
    assert machine.doctor()["honed.service"]["status"] != "error"


def test_what_is_planted_in_a_job_goes_with_it(attack: Attack) -> None:
    machine = attack.machine
    machine.sh(f"touch {OVER}")
    numbers = [str(job) for job in attack.jobs.values()]
    machine.run("honectl", "cancel", *numbers)
    said = machine.try_run("honectl", "prune", *numbers)
    assert f"{len(numbers)} jobs were removed" in said.stdout + said.stderr
    names = {*machine.sh(f"ls {JOBS}").split()}
    stubborn = {str(attack.jobs[kind]) for kind in CLOSED}
    assert names - stubborn == {str(entry["id"]) for entry in machine.entries().values()}
    mounted = {f".{attack.jobs[kind]}.left" for kind in MOUNTED}
    assert mounted <= left_in_jobs(machine)
    assert attack.mounts is not None and attack.mounts.stdin is not None
    attack.mounts.stdin.close()
    attack.mounts.wait(DEADLINE_SEC)
    machine.run("systemctl", "restart", "honed")
    accepted(machine, "alices-last")
    wait_for(lambda: not mounted & left_in_jobs(machine), what="what was mounted removed")


def left_in_jobs(machine: Machine) -> set[str]:
    return {*machine.sh(f"ls -A {JOBS}").split()}


def test_the_page_says_what_each_kind_gives(attack: Attack) -> None:
    assert [*attack.rows] == [*KINDS]
    head = ("planted", "dropped into `incoming/`", "its dropper reads")
    holds("attacks", head, [*attack.rows.values()])
