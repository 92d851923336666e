"""A path can be swapped between its check and its opening: no job may read files that its submitter may not.

The tests run the real code of the check and of the worker, in the real units, against an attacker who swaps paths
between any two of their steps: see swaps.py. The kernel itself reports each opening of another user's file, whatever
the path. Prompts are text in the job file: no file is opened for them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from machine import CHECKOUT, Machine
from PIL import Image
from swaps import CASES, INPUTS

from waiting import wait_for
from zoo import plain

pytestmark = pytest.mark.systemd

PROGRAM = f"{CHECKOUT}/tests/system/swaps.py"
PYTHON = "/opt/honed/current/bin/python"
INCOMING = "/var/spool/honed/incoming"
#: Replaces the program of a unit, and keeps its sandbox and its user unless another is named.
DROPIN = """\
[Service]
Type=oneshot
NotifyAccess=none
WatchdogSec=0
TimeoutStartSec=10min
ExecStart=
ExecStart={command}
ExecStopPost=
StandardInput=null
StandardOutput=truncate:/srv/told
StandardError=inherit
{more}
"""
#: A file of berta's that nothing but the tests opens.
SENTINEL = "/srv/swaps/theirs/sentinel"
#: Opens berta's files to the users of honed, as an administrator may have done.
OPEN = """
import pwd
from pathlib import Path
from honed.system.access import Acl, set_acl
users = {pwd.getpwnam(name).pw_uid: 4 for name in ("honed", "honed-job")}
for path in Path("/srv/swaps/theirs").rglob("*"):
    if path.is_file():
        assert set_acl(path, Acl(6, 0, 0, users, {}))
"""


@dataclass
class Field:
    """The machine, with the attacker and the witness running."""

    honed: Machine
    mallory_uid: int
    job_id: int  #: of mallory's
    witness_path: Path
    num_calls: int = 0

    def look(self, unit: str, kind: str, *cases: str, every: int = 1, races: int = 0, user: str = "") -> list[Any]:
        """Run the subject in a unit, and return its looks."""
        command = f"{PYTHON} {PROGRAM} {kind} {self.mallory_uid} {every} {races} {' '.join(cases)}"
        dropin = f"/etc/systemd/system/{unit.partition('@')[0]}@.service.d/swaps.conf"
        self.honed.write(dropin, DROPIN.format(command=command, more=f"User={user}" if user else ""))
        self.honed.sh(f"systemctl stop {unit}; systemctl daemon-reload; rm -f /srv/told")
        self.honed.try_run("systemctl", "start", unit, timeout_sec=900)
        self.honed.sh(f"rm {dropin}; systemctl daemon-reload")
        told = [json.loads(line) for line in self.honed.read("/srv/told").splitlines() if line.startswith("{")]
        assert told and told[-1] == {"over": True}, self.honed.run("journalctl", "--no-pager", "-n", "40", "-u", unit)
        return told[:-1]

    def opened(self) -> Counter[str]:
        """Count the openings of berta's files since the last call, by input.

        The witness reports them in order, and late on a busy machine: the opening of the sentinel is the last one.
        """
        self.num_calls += 1
        self.honed.run("cat", SENTINEL)
        wait_for(lambda: self._paths().count(SENTINEL) >= self.num_calls, what="the witness")
        paths = self._paths()
        ends = [at for at, path in enumerate(paths) if path == SENTINEL]
        since = ends[-2] + 1 if len(ends) > 1 else 0
        return Counter(
            Path(path).relative_to("/srv/swaps/theirs").parts[0] if path.startswith("/srv") else "chain"
            for path in paths[since : ends[-1]]
        )

    def _paths(self) -> list[str]:
        text = self.witness_path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()[1:]
        return [json.loads(line)["opened"] for line in lines]

    @property
    def check(self) -> str:
        return f"honed-check@{self.mallory_uid}.service"

    @property
    def job(self) -> str:
        return f"honed-job@{self.job_id}.service"


def build(place: Path) -> None:
    """Build mallory's files; berta's are the same, but private."""
    from zoo import vision

    own = place / "own"
    for name in ("base_model", "adapter", "chat_template", "training_chat_template", "datasets", "media"):
        (own / name / "sub").mkdir(parents=True)
    plain.write_base_model(own / "base_model/model")
    plain.write_adapter(own / "adapter/adapter")
    for name in ("chat_template", "training_chat_template"):
        (own / name / "template.jinja").write_text(plain.TEMPLATE)
    plain.write_dataset(own / "datasets/rows.jsonl")
    Image.new("RGB", (40, 40), "red").save(own / "media/picture.png")
    shutil.copytree(own, place / "theirs")
    (place / "theirs/sentinel").touch()
    vision.build_vision_checkpoint(own / "seeing", "qwen2_5_vl")


@pytest.fixture(scope="module")
def field(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    machine.install()
    for name in ("berta", "mallory"):
        machine.add_user(name, "honed-submit")
    machine.write("/etc/honed/honed.toml.d/50-test.toml", "[spool]\nsettle_sec = 0.2\n")
    build(machine.host_path("/srv/swaps"))
    machine.run("systemctl", "enable", "--now", "honed")
    machine.run("honectl", "pause")
    machine.sh(
        "chmod -R a+rX /srv/swaps/own; chown -R mallory /srv/swaps/own; chown -R berta /srv/swaps/theirs; "
        "find /srv/swaps/theirs -type f -exec chmod 600 {} +; install -d -o mallory /srv/swaps/work; "
        "mkfifo -m 666 /srv/swaps/ask /srv/swaps/answer; install -m 644 -o mallory /dev/null /srv/swaps/holder"
    )
    machine.run(PYTHON, "-c", OPEN)
    numbers = {}
    for name in ("mallory", "berta"):
        base, rows = Path("/srv/swaps/own/base_model/model"), Path("/srv/swaps/own/datasets/rows.jsonl")
        machine.run(
            "sh",
            "-ec",
            f'cat >"{INCOMING}/.{name}" && mv "{INCOMING}/.{name}" "{INCOMING}/{name}.json"',
            user=name,
            stdin=json.dumps(plain.spec(base, rows, name=name)),
        )
        numbers[name] = job_id = wait_for(lambda: number_of(machine, name), what="accepted")  # noqa: B023
        own = f"/var/lib/honed/jobs/{job_id}/own"
        machine.sh(f"mkdir -p {own}/sub; cp -r /srv/swaps/own/adapter/adapter {own}/output", user=name)
    machine.write("/srv/swaps/chain.json", json.dumps(list(numbers.values())))
    machine.run(PYTHON, PROGRAM, "prepare")
    machine.sh(
        f"chown -hR mallory /srv/swaps/work; find /srv/swaps/theirs -type f -exec chown berta {{}} +; "
        f"chown -hR mallory /var/lib/honed/jobs/{numbers['mallory']}/*/"
    )
    for path in ("/srv/swaps/theirs", f"/var/lib/honed/jobs/{numbers['berta']}/own"):
        machine.sh(f"chown -R berta {path}")
    witness_path = tmp_path_factory.mktemp("swaps") / "opened"
    with witness_path.open("wb") as file:
        witness = machine.popen(PYTHON, PROGRAM, "watch", stdout=file)
    attacker = machine.popen(
        "unshare", "--mount", "runuser", "-u", "mallory", "--", PYTHON, PROGRAM, "turn", stdout=subprocess.PIPE
    )
    assert attacker.stdout is not None
    assert attacker.stdout.readline() == b"ready\n"
    wait_for(witness_path.read_text, what="the witness")
    yield Field(machine, int(machine.run("id", "-u", "mallory")), numbers["mallory"], witness_path)
    for process in (attacker, witness):
        process.kill()


def number_of(honed: Machine, name: str) -> int | None:
    assert not (refused := honed.refusal(name)), refused
    return honed.jobs().get(name, {}).get("id")


@pytest.mark.parametrize("kind", ["check", "work"])
def test_whenever_it_is_swapped_nothing_of_anothers_is_opened(
    field: Field, kind: str, request: pytest.FixtureRequest
) -> None:
    every = 1 if kind == "work" or request.config.getoption("all") else 67
    looks = field.look(field.check if kind == "check" else field.job, kind, every=every)
    assert {(each["input"], each["swap"]) for each in looks} == set(CASES)
    undisturbed = {(each["input"], each["swap"]): each["outcome"] for each in looks if each["at"] is None}
    # A process of another mount namespace, or user namespace, is no way to name a file of this one.
    assert {case for case, outcome in undisturbed.items() if outcome != "in order"} <= {
        (name, swap) for name in INPUTS for swap in ("proc", "root")
    }, undisturbed
    refused = [each for each in looks if each["at"] is not None and "ermission denied" in each["outcome"]]
    told = [each for each in looks if each["at"] is not None and "by the user mallory" in each["outcome"]]
    assert {each["input"] for each in refused + told} == set(INPUTS)
    assert told
    assert field.opened() == Counter()


def test_where_the_right_is_honeds_own_each_swap_reads_what_is_anothers(field: Field) -> None:
    """Prove that the witness sees openings and that the files are readable: honed's own user may open berta's."""
    field.look(field.check, "check", "link", every=31, user="honed")
    assert set(field.opened()) == set(INPUTS)


@pytest.mark.parametrize("kind", ["check", "work"])
def test_in_a_race_nothing_of_anothers_is_opened(field: Field, kind: str, request: pytest.FixtureRequest) -> None:
    num_races = request.config.getoption("races")
    looks = field.look(field.check if kind == "check" else field.job, kind, races=num_races)
    assert len(looks) == num_races
    assert all(each["num_turns"] for each in looks)
    assert field.opened() == Counter()
    outcomes = Counter(each["outcome"] == "in order" for each in looks)
    print(
        f"{kind}: {num_races} races, {sum(each['num_turns'] for each in looks)} swaps, {outcomes[False]} refused, "
        f"files of the other opened: 0"
    )
