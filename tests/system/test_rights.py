"""Users' rights in an installed honed: two people who drop jobs, one administrator, and one without any rights.

Every misuse of the spool and the socket that a person without root can try is rejected, and harms nobody else.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from machine import Machine

from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

INCOMING = "/var/spool/honed/incoming"
REJECTED = "/var/spool/honed/rejected"
JOBS = "/var/lib/honed/jobs"
#: A process that says one line to the control socket, and prints the answer.
ASK = """
import socket, sys
peer = socket.socket(socket.AF_UNIX); peer.connect("/run/honed/control.sock"); peer.settimeout(180)
peer.sendall(sys.argv[1].encode() + b"\\n"); print(peer.makefile().readline())
"""


@pytest.fixture(scope="module")
def honed(machine: Machine) -> Machine:
    """A machine with honed running and the starting of jobs paused: these tests are about the steps before."""
    machine.install()
    machine.add_user("anna", "honed-submit")
    machine.add_user("berta", "honed-submit")
    machine.add_user("chief", "honed-submit", "adm")
    machine.add_user("mallory")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", '[policy]\nadmin_group = "adm"\n[spool]\nsettle_sec = 0.2\n')
    plain.write_base_model(machine.host_path("/srv/model"))
    plain.write_dataset(machine.host_path("/srv/rows.jsonl"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    return machine


def spec(**keys: Any) -> str:
    return json.dumps(plain.spec(Path("/srv/model"), Path("/srv/rows.jsonl"), **keys))


def drop(honed: Machine, user: str, name: str, text: str | None = None) -> None:
    """Drop a file as `mv` within one file system does: complete from the first moment."""
    honed.run(
        "sh",
        "-ec",
        f'cat >"{INCOMING}/.$1" && mv "{INCOMING}/.$1" "{INCOMING}/$1"',
        "sh",
        name,
        user=user,
        stdin=spec() if text is None else text,
    )


def ask(honed: Machine, who: str, verb: str, **arguments: Any) -> dict[str, Any]:
    request = json.dumps({"verb": verb, **arguments})
    answer: dict[str, Any] = json.loads(honed.run("python3", "-c", ASK, request, user=who))
    return answer


def number_of(honed: Machine, name: str) -> int:
    """Return the number of a job, once it is accepted."""

    def accepted() -> int | None:
        rows = ask(honed, "root", "list")["result"]
        return max((row["id"] for row in rows if row["name"] == name), default=None)

    return int(wait_for(accepted, what=f"{name} accepted") or 0)


def job_of(honed: Machine, user: str, name: str, file: str = "", **keys: Any) -> int:
    """Drop a job and wait until it is accepted. Returns its number."""
    drop(honed, user, f"{file or name}.json", spec(name=name, **keys))
    wait_for(lambda: not honed.exists(f"{INCOMING}/{file or name}.json"), what="taken")
    return number_of(honed, name)


def reason(honed: Machine, name: str) -> str:
    """Return the reason why honed rejected a file."""
    wait_for(lambda: honed.exists(f"{REJECTED}/{name}.reason"), what=f"{name} refused")
    return honed.read(f"{REJECTED}/{name}.reason")


def kept(honed: Machine, name: str) -> str:
    """Return where a rejected file is."""
    found = re.search(r"^The file is kept as rejected/(\S+)\.$", honed.read(f"{REJECTED}/{name}.reason"), re.MULTILINE)
    assert found is not None
    wait_for(
        lambda: honed.exists(f"{REJECTED}/{found[1]}"), what="it is there"
    )  # it is moved after its reason was written
    return f"{REJECTED}/{found[1]}"


# --- Dropping ---------------------------------------------------------------------------------------------------------


def test_a_member_of_honed_submit_drops_and_their_uid_is_known_from_the_file(honed: Machine) -> None:
    number = job_of(honed, "anna", "annas-first")
    shown = json.loads(honed.run("honectl", "show", "--json", str(number), user="anna"))
    assert shown["uid"] == int(honed.run("id", "-u", "anna"))
    assert shown["state"] == "queued"


def test_nobody_else_drops(honed: Machine) -> None:
    assert honed.try_run("sh", "-c", f"echo x >{INCOMING}/a.json", user="mallory").returncode != 0
    done = honed.try_run("honectl", "submit", "/srv/rows.jsonl", user="mallory")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_a_file_that_its_dropper_keeps_to_herself_is_read_all_the_same(honed: Machine) -> None:
    """Files in incoming/ inherit its ACL: a umask of 077 excludes other users, but not honed."""
    honed.run(
        "sh",
        "-ec",
        f"umask 077; cat >{INCOMING}/.u && mv {INCOMING}/.u {INCOMING}/private.json",
        user="anna",
        stdin=spec(name="private"),
    )
    wait_for(lambda: "private" in honed.run("honectl", "list"), what="accepted")


#: Things that a person can put into incoming/, as shell, and the message of their rejection.
MISUSES = {
    "a symbolic link": ("ln -s /etc/shadow {}/link.json", "link.json", "a symbolic link"),
    "a link to another person's file": ("ln -s /home/berta/x.json {}/theirs.json", "theirs.json", "a symbolic link"),
    "a hard link": ("echo x >{0}/.one && ln {0}/.one {0}/hard.json", "hard.json", "a hard link to another file"),
    "a pipe, on which reading would wait": ("mkfifo {}/pipe.json", "pipe.json", "not a regular file"),
    "a socket": (
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"{}/sock.json\")'",
        "sock.json",
        "not a regular file",
    ),
    "a name with a line break": ('echo x >"{}/a\nb.json"', "a\nb.json", "a name with control characters"),
    "a name that is no job file's": ("echo x >{}/job.txt", "job.txt", "not a job file's name"),
    "a file of a gigabyte": ("truncate -s 1G {}/huge.json", "huge.json", "larger than 262144 bytes"),
    "a file that honed cannot read": (
        "cp /dev/null {0}/.m && chmod 000 {0}/.m && mv {0}/.m {0}/closed.json",
        "closed.json",
        "honed cannot read it",
    ),
    "a path with dots": ('echo \'{{"base_model": "/srv/../../etc", "datasets": []}}\' >{}/dots.json', "dots.json", ""),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_is_no_plain_job_file_is_refused_and_not_followed(honed: Machine, misuse: str) -> None:
    script, name, words = MISUSES[misuse]
    honed.sh(script.format(INCOMING), user="anna")
    assert words in reason(honed, name)


def test_a_name_of_255_bytes_is_taken(honed: Machine) -> None:
    name = "n" * 250 + ".json"
    honed.run("sh", "-ec", f'cat >"{INCOMING}/$1"', "sh", name, user="anna", stdin="not a job")

    def refused() -> bool:
        names = honed.run("ls", REJECTED).splitlines()
        return any(each.startswith("nnnn") and each.endswith(".reason") for each in names)

    wait_for(refused, what="refused")


def test_no_device_can_be_dropped_at_all(honed: Machine) -> None:
    assert honed.try_run("mknod", f"{INCOMING}/device.json", "c", "1", "3", user="anna").returncode != 0


def test_a_directory_is_left_where_it_lies_and_holds_nobody_up(honed: Machine) -> None:
    """Only its owner can move a directory: a rename changes its `..`."""
    honed.run("mkdir", "-m", "700", f"{INCOMING}/dir.json", user="anna")
    honed.wait_message("'dir.json' in")
    job_of(honed, "berta", "after-the-directory")
    honed.run("rmdir", f"{INCOMING}/dir.json", user="anna")


def test_a_file_that_is_changed_after_it_was_taken_changes_nothing(honed: Machine) -> None:
    """The user who dropped the file still holds it open."""
    writer = (
        "import os, sys, time\n"
        f"fd = os.open('{INCOMING}/.open', os.O_RDWR | os.O_CREAT, 0o644)\n"
        "os.write(fd, sys.argv[1].encode())\n"
        f"os.rename('{INCOMING}/.open', '{INCOMING}/open.json')\n"
        "deadline = time.monotonic() + 300\n"
        f"while os.path.exists('{INCOMING}/open.json') and time.monotonic() < deadline: time.sleep(0.01)\n"
        "time.sleep(1)\n"
        'os.pwrite(fd, b\'{"base_model": "/etc", \', 0)\n'
    )
    honed.run("python3", "-c", writer, spec(name="held-open"), user="anna")
    number = number_of(honed, "held-open")
    assert json.loads(honed.read(f"{JOBS}/{number}/spec.json"))["base_model"] == "/srv/model"


def test_a_flood_of_bad_files_leaves_room_for_the_others(honed: Machine) -> None:
    honed.sh(f"for n in $(seq 60); do echo x >{INCOMING}/flood-$n.json; done", user="anna")
    job_of(honed, "berta", "in-the-flood")


# --- Other people's files ---------------------------------------------------------------------------------------------


FORBIDDEN = {
    "listing what others drop": f"ls {INCOMING}",
    "reading what others drop": f"cat {INCOMING}/.annas",
    "removing it": f"rm -f {INCOMING}/.annas",
    "putting another in its place": f"mv -f /tmp/mine {INCOMING}/.annas",
    "reading the queue's entries": "cat /var/spool/honed/queued/1.json",
    "putting a job into the queue": "echo '{}' >/var/spool/honed/queued/999.json",
    "changing the next number": "echo 5 >/var/spool/honed/seq",
    "listing what was refused": f"ls {REJECTED}",
    "removing what was refused": f"rm -f {REJECTED}/link.json.reason",
    "listing others' jobs": f"ls {JOBS}",
    "reading another's job": f"cat {JOBS}/1/spec.json",
    "reading another's plan": f"cat {JOBS}/1/plan.json",
    "writing into another's job": f"touch {JOBS}/1/checkpoints",
    "reading the database": "cat /var/lib/honed/honed.db",
    "listing what others staged": "ls /var/lib/honed/staged",
    "reading why another's file was refused": f"cat {REJECTED}/link.json.reason",
    "starting a job's unit": "systemctl start --no-ask-password honed-job@1.service",
    "stopping honed": "systemctl stop --no-ask-password honed.service",
    "killing honed": "kill $(systemctl show -P MainPID honed)",
    "replacing the socket": "rm -f /run/honed/control.sock",
}


@pytest.mark.parametrize("attempt", FORBIDDEN)
def test_berta_gets_at_nothing_of_annas(honed: Machine, attempt: str) -> None:
    honed.sh(f"echo mine >{INCOMING}/.annas", user="anna")
    honed.sh("echo mine >/tmp/mine", user="berta")
    before = honed.property("honed.service", "MainPID")
    assert honed.try_run("sh", "-ec", FORBIDDEN[attempt], user="berta").returncode != 0
    assert honed.sh(f"cat {INCOMING}/.annas", user="anna") == "mine\n"
    assert honed.property("honed.service", "MainPID") == before


def test_the_dropper_reads_her_own_refusals_and_jobs_from_the_files(honed: Machine) -> None:
    drop(honed, "anna", "wrong.json", '{"base_model": 7}')
    reason(honed, "wrong.json")
    assert "spec_invalid" in honed.run("cat", f"{REJECTED}/wrong.json.reason", user="anna")
    number = job_of(honed, "anna", "annas-own")
    assert "/srv/model" in honed.run("cat", f"{JOBS}/{number}/spec.json", f"{JOBS}/{number}/plan.json", user="anna")
    # Files that her worker makes have her uid; honed's files do not.
    for name in ("spec.json", "plan.json"):
        assert honed.try_run("sh", "-c", f"echo >{JOBS}/{number}/{name}", user="anna").returncode != 0
        assert honed.try_run("rm", "-f", f"{JOBS}/{number}/{name}", user="anna").returncode != 0
    assert honed.try_run("touch", f"{JOBS}/{number}/mine", user="berta").returncode != 0


def test_a_jobs_directory_is_the_workers_to_write_and_inherits_its_rights(honed: Machine) -> None:
    number = job_of(honed, "anna", "rights")
    assert honed.run("stat", "-c", "%U:%G %a", f"{JOBS}/{number}") == "honed:honed-job 3770\n"
    honed.run(
        "sh", "-ec", f"umask 007; mkdir {JOBS}/{number}/output; echo weights >{JOBS}/{number}/output/a", user="anna"
    )
    assert honed.run("cat", f"{JOBS}/{number}/output/a", user="honed") == "weights\n"
    assert honed.try_run("cat", f"{JOBS}/{number}/output/a", user="berta").returncode != 0
    honed.run("rm", "-r", f"{JOBS}/{number}/output", user="honed")


# --- The control socket -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["cancel", "hold", "release", "requeue"])
def test_who_asks_is_known_from_the_socket_and_not_from_the_text(honed: Machine, verb: str) -> None:
    number = job_of(honed, "anna", f"not-bertas-to-{verb}")
    answer = ask(honed, "berta", verb, id=str(number), uid=0, user="root", from_start=True)
    assert answer["error"]["code"] == "not_permitted"
    assert answer["error"]["message"] == f"job {number} belongs to another user"
    assert ask(honed, "root", "show", id=str(number))["result"]["state"] == "queued"
    entry = honed.wait_message(f"job {number}: {verb} refused for user")
    assert entry["HONED_CODE"] == "not_permitted"


def test_the_owner_and_the_administrators_may(honed: Machine) -> None:
    number = job_of(honed, "anna", "everybodys")
    assert honed.try_run("honectl", "hold", str(number), user="anna").returncode == 0
    assert honed.try_run("honectl", "release", str(number), user="chief").returncode == 0
    done = honed.try_run("honectl", "cancel", str(number), user="berta")
    assert done.returncode == 77
    assert "belongs to another user" in done.stderr
    assert honed.try_run("honectl", "cancel", str(number)).returncode == 0


def test_the_queue_shows_others_jobs_without_what_they_are(honed: Machine) -> None:
    number = job_of(honed, "anna", "secret-project")
    rows = {row["id"]: row for row in json.loads(honed.run("honectl", "list", "--json", user="berta"))}
    assert rows[number]["state"] == "queued"
    assert "secret-project" not in json.dumps(rows)
    for verb in ("show", "predictions", "losses"):
        assert ask(honed, "berta", verb, id=str(number))["error"]["code"] == "not_permitted"
        assert ask(honed, "berta", verb, id="secret-project")["error"]["code"] == "usage"
        assert ask(honed, "chief", verb, id=str(number))["ok"]
    watched = honed.try_run("script", "-qec", "timeout 3 honectl watch", "/dev/null", user="berta")
    assert "another user's" not in watched.stdout + watched.stderr
    assert ask(honed, "berta", "refusal", id="wrong.json")["result"] is None
    assert "spec_invalid" in ask(honed, "anna", "refusal", id="wrong.json")["result"]["reason"]


def test_everybodys_jobs_are_paused_by_administrators_alone(honed: Machine) -> None:
    assert ask(honed, "anna", "resume")["error"]["code"] == "not_permitted"
    assert ask(honed, "chief", "pause")["ok"]


@pytest.mark.parametrize(
    "line",
    [
        "x" * 200_000,
        "[" * 60_000,
        '{"verb": 7}',
        '{"verb": "show", "id": "../../etc/passwd"}',
        '{"verb": "refusal", "id": "../../../etc/passwd"}',
        '{"verb": "dance"}',
        "\x00\xff",
    ],
)
def test_nonsense_on_the_socket_costs_its_sender_alone(honed: Machine, line: str) -> None:
    before = honed.property("honed.service", "MainPID")
    honed.try_run(
        "python3", "-c", ASK.replace("sys.argv[1].encode()", "sys.stdin.buffer.read()"), user="mallory", stdin=line
    )
    assert ask(honed, "mallory", "status")["ok"]
    assert honed.property("honed.service", "MainPID") == before


def test_one_who_holds_connections_open_keeps_nobody_out(honed: Machine) -> None:
    code = (
        "import socket, time\nheld = []\n"
        "for _ in range(300):\n"
        "    peer = socket.socket(socket.AF_UNIX); peer.connect('/run/honed/control.sock'); held.append(peer)\n"
        "print('held', flush=True); time.sleep(300)"
    )
    with honed.popen("python3", "-c", code, user="mallory", stdout=-1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert ask(honed, "anna", "status")["ok"]
        finally:
            process.kill()


def test_one_who_asks_without_end_holds_nobody_up(honed: Machine) -> None:
    """Each request costs honed time; thousands from one user are answered in turn with those of others."""
    code = (
        "import contextlib, os, socket\nprint('asking', flush=True)\n"
        "while not os.path.exists('/tmp/enough'):\n"
        "    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:\n"
        "        peer.settimeout(1); peer.connect('/run/honed/control.sock')\n"
        '        while True: peer.sendall(b\'{"verb": "list"}\\n\' * 10_000)'
    )
    with honed.popen("python3", "-c", code, user="mallory", stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asking\n"
        time.sleep(1.0)
        assert ask(honed, "anna", "status")["ok"]
        assert process.poll() is None  # it goes on asking
        honed.run("touch", "/tmp/enough", user="mallory")
        process.wait()


# --- What a job names -------------------------------------------------------------------------------------------------


def test_a_job_cannot_name_what_only_honed_may_read(honed: Machine) -> None:
    """The check runs as honed: it must not give access to honed's own files, or to another person's results."""
    theirs = job_of(honed, "anna", "annas-data")
    honed.sh(f"mkdir {JOBS}/{theirs}/output && cp /srv/rows.jsonl {JOBS}/{theirs}/output/")
    cases = {
        "results": f"{JOBS}/{theirs}/output/rows.jsonl",
        "refused": kept(honed, "wrong.json"),
        "database": "/var/lib/honed/honed.db",
        "config": "/etc/honed/honed.toml.d/50-test.toml",
    }
    for name, path in cases.items():
        drop(honed, "berta", f"{name}.json", spec(datasets=[{"path": path}]))
        if name != "config":
            text = reason(honed, f"{name}.json")
            assert "belongs to honed or to another user" in text or "cannot be" in text, text
    drop(honed, "berta", "chain.json", spec(base_model=f"job:{theirs}"))
    assert f"there is no job '{theirs}'" in reason(honed, "chain.json")
    mine = job_of(honed, "anna", "annas-again", datasets=[{"path": cases["results"]}])
    assert mine > theirs


def test_a_link_below_what_a_job_names_is_not_the_way_to_anothers_results(honed: Machine) -> None:
    theirs = job_of(honed, "anna", "annas-results")
    honed.sh(f"mkdir {JOBS}/{theirs}/output && cp /srv/rows.jsonl {JOBS}/{theirs}/output/")
    honed.sh("mkdir -p /srv/bertas/train && chown -R berta /srv/bertas")
    honed.sh(f"ln -s {JOBS}/{theirs}/output/rows.jsonl /srv/bertas/train/", user="berta")
    drop(honed, "berta", "split.json", spec(datasets=[{"path": "/srv/bertas", "split": "train"}]))
    told = reason(honed, "split.json")
    assert "belongs to honed or to another user" in told or "rows.jsonl: Permission denied" in told
    honed.sh("rm /srv/bertas/train/rows.jsonl && cp /srv/rows.jsonl /srv/bertas/train/", user="berta")
    number = job_of(honed, "berta", "bertas-split", datasets=[{"path": "/srv/bertas", "split": "train"}])
    may_read = json.loads(honed.read(f"{JOBS}/{number}/plan.json"))["may_read"]  # the worker asks again
    assert may_read["inputs"] == ["/srv/model", "/srv/bertas"]
    assert "/var/lib/honed" in may_read["closed"]


def test_a_name_means_ones_own_job_and_nobodys_newer_one(honed: Machine) -> None:
    first = job_of(honed, "anna", "base", lora=None)
    drop(honed, "berta", "bertas.json", spec(name="base", lora=None))
    wait_for(lambda: number_of(honed, "base") > first, what="berta's")
    second = job_of(honed, "anna", "on-base", base_model="job:base")
    shown = ask(honed, "root", "show", id=str(second))["result"]
    assert shown["depends_on"] == [str(first)]


def test_files_in_a_home_are_refused_with_the_way_out_and_staged_by_it(honed: Machine) -> None:
    plain.write_dataset(honed.host_path("/home/anna/rows.jsonl"))
    honed.run("chown", "anna:anna", "/home/anna/rows.jsonl")
    honed.write(
        "/home/anna/job.json", spec(name="from-home", datasets=[{"path": "/home/anna/rows.jsonl"}]), user="anna"
    )
    done = honed.try_run("honectl", "submit", "/home/anna/job.json", user="anna")
    assert done.returncode == 1
    assert "is below /home, which honed's services cannot access" in done.stderr
    assert "honectl submit --stage" in done.stderr
    drop(honed, "anna", "home.json", honed.read("/home/anna/job.json"))
    assert "submit --stage" in reason(honed, "home.json")

    staged = honed.run("honectl", "submit", "--stage", "/home/anna/job.json", user="anna")
    assert "datasets.0.path: /home/anna/rows.jsonl copied to /var/lib/honed/staged/" in staged
    assert "(from-home), queued" in staged
    number = json.loads(honed.run("honectl", "show", "--json", "from-home", user="anna"))["id"]
    path = json.loads(honed.read(f"{JOBS}/{number}/plan.json"))["spec"]["datasets"][0]["path"]
    assert honed.run("head", "-c1", path, user="honed") == "{"
    assert honed.try_run("cat", path, user="berta").returncode != 0


def test_files_that_cannot_be_read_are_named_with_their_mode(honed: Machine) -> None:
    honed.sh("mkdir -m 750 /srv/closed && cp /srv/rows.jsonl /srv/closed && chgrp anna /srv/closed")
    drop(honed, "anna", "closed-dir.json", spec(name="hers", datasets=[{"path": "/srv/closed/rows.jsonl"}]))
    number_of(honed, "hers")  # her check and her worker read with her rights: it need not be open to honed
    drop(honed, "berta", "steal.json", spec(datasets=[{"path": "/srv/closed/rows.jsonl"}]))
    text = reason(honed, "steal.json")
    assert "/srv/closed (mode 0750, root:anna) cannot be entered by the user berta, the submitter of the job" in text
    honed.write("/home/berta/steal.json", spec(datasets=[{"path": "/srv/closed/rows.jsonl"}]), user="berta")
    for verb in ("check", "preview"):
        done = honed.try_run("honectl", verb, "/home/berta/steal.json", user="berta")
        assert done.returncode != 0, verb


def test_a_file_that_others_can_write_is_no_proof_of_who_submits(honed: Machine) -> None:
    """A file of anna's that berta may write could be filled by berta and moved into the spool as anna's job."""
    honed.sh("groupadd -f project; usermod -aG project anna; usermod -aG project berta")
    spool = "/var/spool/project"
    honed.sh(f"mkdir -p {spool} && chgrp project {spool} && chmod 2775 {spool}")
    honed.sh(f"umask 002; echo draft >{spool}/notes.json", user="anna")
    honed.run(
        "sh",
        "-ec",
        f"cat >{spool}/notes.json; mv {spool}/notes.json {INCOMING}/spoof.json",
        user="berta",
        stdin=spec(name="spoof"),
    )
    text = reason(honed, "spoof.json")
    assert "other users (the group project) can write it" in text
    assert "honectl submit" in text
    # A file of her own, writable for her private group by her umask, is accepted as hers.
    honed.run(
        "sh",
        "-ec",
        f"umask 002; cat >/var/spool/project/.own && chgrp anna {spool}/.own && mv {spool}/.own {INCOMING}/own.json",
        user="anna",
        stdin=spec(name="own"),
    )
    number_of(honed, "own")


def test_output_elsewhere_is_the_administrators_to_allow(honed: Machine) -> None:
    honed.sh("mkdir -p /srv/out && chmod 777 /srv/out")
    drop(honed, "anna", "out.json", spec(output_dir="/srv/out/a"))
    assert "outside the directories that jobs may write" in reason(honed, "out.json")
    honed.write("/etc/honed/honed.toml.d/60-paths.toml", '[policy]\nallowed_paths = ["/srv"]\n')
    honed.run("systemctl", "reload", "honed")
    honed.wait_message("configuration reloaded")
    job_of(honed, "anna", "out-allowed", output_dir="/srv/out/a")
    drop(honed, "anna", "etc.json", spec(datasets=[{"path": "/etc/passwd"}]))
    assert "outside the directories that jobs may read" in reason(honed, "etc.json")
    honed.run("rm", "/etc/honed/honed.toml.d/60-paths.toml")
    honed.run("systemctl", "reload", "honed")


def test_where_only_the_socket_is_open_no_file_that_somebody_moved_starts_a_job(honed: Machine) -> None:
    honed.write("/etc/honed/honed.toml.d/60-socket.toml", '[policy]\narrivals = "socket"\n')
    honed.run("systemctl", "reload", "honed")
    honed.wait_message("configuration reloaded")
    try:
        honed.run("install", "-d", "-m", "0777", "/var/spool/shared")
        honed.run("sh", "-ec", "cat >/var/spool/shared/annas.json", user="anna", stdin=spec(name="annas-draft"))
        honed.run("mv", "/var/spool/shared/annas.json", f"{INCOMING}/annas.json", user="berta")
        assert "honectl submit FILE" in reason(honed, "annas.json")
        honed.run("sh", "-ec", "cat >/home/anna/socket.json", user="anna", stdin=spec(name="over-the-socket"))
        done = honed.run("honectl", "submit", "--json", "/home/anna/socket.json", user="anna")
        number = json.loads(done)[0]["id"]
        assert ask(honed, "root", "show", id=str(number))["result"]["uid"] == int(honed.run("id", "-u", "anna"))
        assert "spec.json" in honed.run("ls", f"{JOBS}/{number}", user="anna")
        assert honed.try_run("ls", f"{JOBS}/{number}", user="berta").returncode != 0
        assert ask(honed, "nobody", "submit", name="x.json", data="e30=")["error"]["code"] == "not_permitted"
        # Only she can read a rejected file of hers and its reason.
        taken = ask(honed, "anna", "submit", name="wrong-one.json", data="e30=")["result"]
        assert f"Submitted as {taken['id']} by the user" in reason(honed, "wrong-one.json")
        for path in (kept(honed, "wrong-one.json"), f"{REJECTED}/wrong-one.json.reason"):
            assert honed.try_run("cat", path, user="anna").returncode == 0
            assert honed.try_run("cat", path, user="berta").returncode != 0
        assert ask(honed, "berta", "refusal", id="wrong-one.json")["result"] is None
        assert ask(honed, "anna", "refusal", id="wrong-one.json", number=taken["id"])["result"] is not None
    finally:
        honed.run("rm", "/etc/honed/honed.toml.d/60-socket.toml")
        honed.run("systemctl", "reload", "honed")


# --- Secrets ----------------------------------------------------------------------------------------------------------


def test_a_token_in_a_job_file_is_refused_and_repeated_nowhere(honed: Machine) -> None:
    token = "hf_" + "Zq" * 17
    for name, keys in {
        "token": {"hf_token": token},
        "value": {"base_model": token},
        "url": {"revision": token},
    }.items():
        drop(honed, "anna", f"{name}.json", spec(**keys))
        assert "a job file must not contain secrets" in reason(honed, f"{name}.json")
        honed.run("rm", "-f", kept(honed, f"{name}.json"))  # the person's own file, as it was dropped
    found = honed.try_run("grep", "-rl", token, "/var/lib/honed", "/var/spool/honed", "/run/honed")
    assert found.stdout == ""
    assert all(token not in json.dumps(entry) for entry in honed.journal())


def test_nothing_of_the_environment_of_whoever_started_it_is_in_honeds(honed: Machine) -> None:
    pid = honed.property("honed.service", "MainPID")
    names = {line.partition("=")[0] for line in honed.run("cat", f"/proc/{pid}/environ").split("\0") if line}
    assert not {name for name in names if "TOKEN" in name or "KEY" in name or "SECRET" in name}


def test_the_tests_were_right_that_the_daemon_never_died(honed: Machine) -> None:
    assert honed.property("honed.service", "NRestarts") == "0"
    assert honed.journal("-p", "crit", "-u", "honed") == []
    assert not [entry for entry in honed.journal("-u", "honed") if "Traceback" in str(entry.get("MESSAGE"))]
