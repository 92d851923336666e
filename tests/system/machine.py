"""A private machine for a test: a real systemd as PID 1, in namespaces, on an overlay that nobody else sees.

    with Machine() as machine:
        machine.run("systemctl", "is-system-running")
        machine.write("/etc/honed/honed.toml", "[jobs]\\n")
        machine.reboot()

Nothing written inside reaches the host. /tmp and /run of the guest are empty; the checkout lies at `CHECKOUT` and the
environment that runs the tests at `ENVIRONMENT`, wherever they are on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import warm
from waiting import DEADLINE_SEC, wait_for

HERE = Path(__file__).parent
#: The paths of the checkout and of the tests' environment in the guest.
CHECKOUT = "/srv/checkout"
ENVIRONMENT = "/srv/environment"
#: The size of the guest's disk, which is memory.
DISK_BYTES = 4 * 2**30
#: However the tests end, no guest is left behind.
_ORPHANS_DIE = ("setpriv", "--pdeathsig", "KILL")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


#: A shell's list of directories and files that can be written, but for processes, devices and measurements, and for
#: what no other machine has: the checkout and its environment. Only what is mounted to be written is walked through.
FIND_WRITABLE = (
    "awk '$6 ~ /^rw/ && $NF ~ /^rw/ { print $5 }' /proc/self/mountinfo | sort -u | while read -r place; do "
    'find "$(printf %b "$place")" -xdev \\( -path \'/proc/[0-9]*\' -o -path /proc/pressure -o -path /dev/pts '
    f"{' '.join(f'-o -path {place}' for place in (CHECKOUT, ENVIRONMENT, HERE.parents[1], sys.prefix))} \\) -prune -o "
    "-not -path '/dev/*' \\( -type d -o -type f \\) -writable -print -o -path '/dev/*' -type d -writable -print; "
    "done 2>/dev/null | sort -u"
)


def why_not() -> str | None:
    """Return the reason why no systemd can be booted here, or None where it can."""
    if os.geteuid() != 0:
        return "needs root, to boot a systemd in namespaces"
    programs = ("unshare", "nsenter", "runuser", "systemctl", "systemd-analyze", "dbus-daemon")
    missing = [program for program in programs if shutil.which(program) is None]
    missing += [path for path in ("/usr/lib/systemd/systemd", "/usr/lib/polkit-1/polkitd") if not Path(path).exists()]
    places = [path for pattern in ("lib*", "lib/*") for path in Path("/usr").glob(f"{pattern}/libnss_systemd.so.2")]
    missing += [] if places else ["libnss_systemd.so.2"]
    if missing:
        return f"needs {', '.join(missing)} (Debian: systemd dbus polkitd libnss-systemd util-linux)"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--cgroup", "--net", "true"], capture_output=True, check=False
    )
    return f"needs namespaces: {tried.stderr.decode().strip()}" if tried.returncode else None


class Machine:
    """One guest. It boots when it is created; call `end`, or use it in a `with`."""

    def __init__(self, *, mounts: Mapping[str | Path, str] | None = None) -> None:
        """Boot the guest. `mounts` are more directories of the host, each with its path in the guest."""
        self._mounts = {HERE.parents[1]: CHECKOUT, Path(sys.prefix): ENVIRONMENT, **(mounts or {})}
        self._stage_dir = Path(tempfile.mkdtemp(prefix="honed-machine-"))
        # The disk is a tmpfs in a mount namespace of its own: it outlives a reboot and dies with its keeper.
        self._keeper = subprocess.Popen(
            [
                *_ORPHANS_DIE,
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "--kill-child",
                "sh",
                "-c",
                f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {self._stage_dir} && echo ready && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n"
        self._cgroup_dir = _cgroup2_dir() / f"honed-machine-{self._keeper.pid}"
        self._launcher: subprocess.Popen[bytes] | None = None
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._going_on: list[subprocess.Popen[bytes]] = []
        self.pid = 0  #: of the guest's PID 1, as the host counts
        self.boot()

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    # -- power --------------------------------------------------------------------------------------------------------

    def boot(self, *, unit: str = "multi-user.target") -> None:
        """Start, and wait until systemd says that it is up."""
        self._cgroup_dir.mkdir(exist_ok=True)
        pairs = [str(word) for pair in self._mounts.items() for word in pair]
        # A cgroup namespace's root is the cgroup of the process that enters it; without its own it would be the host's.
        enter = 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"'
        self._launcher = subprocess.Popen(
            [
                *_ORPHANS_DIE,
                "nsenter",
                "--target",
                str(self._keeper.pid),
                "--mount",
                "sh",
                "-c",
                enter,
                "sh",
                str(self._cgroup_dir),
                "unshare",
                "--fork",
                "--pid",
                "--mount",
                "--cgroup",
                "--net",
                "--uts",
                "--ipc",
                "--kill-child",
                str(HERE / "boot.sh"),
                str(self._stage_dir),
                unit,
                *pairs,
            ],
            stdin=subprocess.DEVNULL,
            stderr=self._complaints,
        )
        self.pid = wait_for(self._find_init, what="PID 1")
        wait_for(self._is_up, what="boot")

    def _find_init(self) -> int | None:
        """Return the pid of the launcher's child once it is systemd."""
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            self._complaints.seek(0)
            raise AssertionError(f"the guest did not boot: {self._complaints.read().decode()}")
        launcher = self._launcher.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split()
        if not children:
            return None
        name = Path(f"/proc/{children[0]}/comm").read_text(encoding="ascii").strip()
        return int(children[0]) if name == "systemd" else None

    def _is_up(self) -> bool:
        state = self.try_run("systemctl", "is-system-running").stdout.strip()
        return state in {"running", "degraded"}

    def power_off(self, *, deadline_sec: float = DEADLINE_SEC) -> None:
        """Shut down as an administrator does, and wait until it is off. `boot` starts it again, with its disk."""
        assert self._launcher is not None
        self.try_run("systemctl", "poweroff", "--no-block")
        self._wait_end(deadline_sec)

    def cut_power(self) -> None:
        """End every process of the guest at once. (Its disk is memory, so nothing that was written is lost.)"""
        assert self._launcher is not None
        if self._launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self._launcher.pid, signal.SIGKILL)
        self._wait_end(DEADLINE_SEC)

    def _wait_end(self, deadline_sec: float) -> None:
        def is_over() -> bool:
            # A shutdown stops every process before it ends them. nsenter then stops itself, too, and no longer reaps
            # its child; the namespace's end would wait for that forever.
            for process in self._going_on:
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
            return self._launcher is None or self._launcher.poll() is not None

        wait_for(is_over, what="the guest's end", deadline_sec=deadline_sec)
        self._going_on.clear()
        self._remove_cgroups()

    def reboot(self) -> None:
        self.power_off()
        self.boot()

    def end(self) -> None:
        self.cut_power()
        self._keeper.kill()
        self._keeper.wait()
        self._complaints.close()
        with contextlib.suppress(OSError):
            self._stage_dir.rmdir()

    def _remove_cgroups(self) -> None:
        def remove() -> bool:
            for path in sorted(self._cgroup_dir.rglob("*/"), key=lambda path: len(path.parts), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            with contextlib.suppress(OSError):
                self._cgroup_dir.rmdir()
            return not self._cgroup_dir.exists()

        wait_for(remove, what="empty cgroups")

    # -- commands -----------------------------------------------------------------------------------------------------

    def command(
        self, *words: str | Path, user: str | None = None, environment: Mapping[str, str] | None = None, cwd: str = "/"
    ) -> list[str]:
        """Return the host's command line for a command in the guest; `user` has all groups of the guest's user."""
        variables = {"PATH": _PATH, "LANG": "C.UTF-8", "TERM": "dumb", "COLUMNS": "200", **(environment or {})}
        inside = ["env", "-i", f"--chdir={cwd}", *(f"{name}={value}" for name, value in variables.items())]
        if user is not None:
            inside = ["runuser", "-u", user, "--", *inside]
        into = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--"]
        return [*into, *inside, *map(str, words)]

    def try_run(
        self,
        *words: str | Path,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: str | bytes = b"",
        timeout_sec: float = 2 * DEADLINE_SEC,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the guest; its exit status may be anything."""
        done = subprocess.run(
            self.command(*words, user=user, environment=environment, cwd=cwd),
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=timeout_sec,
            check=False,
        )
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(list(map(str, words)), done.returncode, out, err)

    def run(
        self,
        *words: str | Path,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: str = "/",
        stdin: str | bytes = b"",
        timeout_sec: float = 2 * DEADLINE_SEC,
    ) -> str:
        """Run a command in the guest that must succeed. Returns its output."""
        done = self.try_run(*words, user=user, environment=environment, cwd=cwd, stdin=stdin, timeout_sec=timeout_sec)
        assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def sh(self, script: str, *, user: str | None = None) -> str:
        """Run a line of shell that must succeed."""
        return self.run("sh", "-ec", script, user=user)

    def popen(self, *words: str | Path, user: str | None = None, **keys: Any) -> subprocess.Popen[bytes]:
        """Start a command in the guest without waiting; the pid is nsenter's on the host, not the command's."""
        self._going_on.append(subprocess.Popen(self.command(*words, user=user), **keys))
        return self._going_on[-1]

    # -- files --------------------------------------------------------------------------------------------------------

    def host_path(self, path: str | Path) -> Path:
        """Return the host's path of a guest's path while the guest runs (absolute links in it lead astray)."""
        return Path(f"/proc/{self.pid}/root") / str(path).lstrip("/")

    def read(self, path: str | Path) -> str:
        return self.host_path(path).read_text(encoding="utf-8")

    def read_json(self, path: str | Path) -> Any:
        return json.loads(self.read(path))

    def exists(self, path: str | Path) -> bool:
        return self.try_run("test", "-e", path).returncode == 0

    def write(self, path: str | Path, text: str, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, as root or as `user`, with the directories above it."""
        self.run(
            "sh",
            "-ec",
            'mkdir -p "$(dirname "$1")"; cat >"$1"; chmod "$2" "$1"',
            "sh",
            path,
            f"{mode:o}",
            user=user,
            stdin=text,
        )

    def put(self, source: Path, target: str) -> None:
        """Copy a file or a directory of the host into the guest, readable for all."""
        packed = subprocess.run(
            ["tar", "--create", "--directory", source.parent, source.name], capture_output=True, check=True
        ).stdout
        target_dir, name = target.rsplit("/", 1)
        self.run("mkdir", "-p", target_dir or "/")
        self.run(
            "tar",
            "--extract",
            "--no-same-owner",
            "--directory",
            target_dir or "/",
            f"--transform=s,^{source.name},{name},",
            stdin=packed,
        )
        self.run("chmod", "-R", "a+rX", target)

    # -- honed --------------------------------------------------------------------------------------------------------

    def install(self) -> str:
        """Run scripts/install, which finds the Python environment that it made for the first of all machines, and all
        else. Returns what it said."""
        packed = warm.directory() / "environment.tar"
        with packed.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not packed.exists():
                said = self._install()
                kept = ("--exclude=opt/honed/files", "--exclude=opt/honed/current", "opt/honed")
                with packed.with_suffix(".new").open("wb") as file:
                    subprocess.run(self.command("tar", "--create", "--directory=/", *kept), stdout=file, check=True)
                packed.with_suffix(".new").rename(packed)
                return said
        self.run("tar", "--extract", "--directory=/", stdin=packed.read_bytes())
        return self._install()

    def _install(self) -> str:
        return self.run(f"{CHECKOUT}/scripts/install", "--environment", ENVIRONMENT)

    def doctor(self) -> dict[str, dict[str, str]]:
        """Return the findings of `honectl doctor` by their checks, without those that import the training stack."""
        code = (
            "import json, pathlib; from dataclasses import asdict; "
            "from honed.cli import doctor; from honed.system.layout import Layout; "
            "print(json.dumps([asdict(each) for each in doctor.examine(Layout(pathlib.Path('/')), imports=False)]))"
        )
        found = json.loads(self.run("/opt/honed/current/bin/python", "-P", "-c", code))
        return {each["check"]: each for each in found}

    def entries(self, root: str = "") -> dict[int, dict[str, Any]]:
        """Return the entries of all accepted jobs by their ids, each with its state. Looks at the spool from outside:
        no process is started."""
        found: dict[int, dict[str, Any]] = {}
        # The second round has what moved in the first, to a place that was read before.
        for state in 2 * ("queued", "held", "running", "succeeded", "failed", "cancelled"):
            for path in self.host_path(f"{root}/var/spool/honed/{state}").glob("*.json"):
                try:
                    entry = json.loads(path.read_text())
                except FileNotFoundError:  # moved meanwhile
                    continue
                if entry["revision"] >= found.get(entry["id"], entry)["revision"]:
                    found[entry["id"]] = {**entry, "state": state}
        return found

    def jobs(self, root: str = "") -> dict[str, dict[str, Any]]:
        """Return the entries of all accepted jobs by their names; of namesakes, the latest."""
        return {entry["name"]: entry for _, entry in sorted(self.entries(root).items())}

    def refusal(self, name: str, root: str = "") -> str:
        """Return the reason for which a job file was rejected; empty where it was not."""
        reason = self.host_path(f"{root}/var/spool/honed/rejected/{name}.json.reason")
        return reason.read_text() if reason.exists() else ""

    # -- systemd ------------------------------------------------------------------------------------------------------

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return properties of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def property(self, unit: str, name: str) -> str:
        return self.show(unit, name).get(name, "")

    def wait_property(self, unit: str, name: str, *values: str, deadline_sec: float = DEADLINE_SEC) -> str:
        """Wait until a property of a unit has one of the values."""

        def reached() -> str | None:
            value = self.property(unit, name)
            return value if value in values else None

        found = wait_for(reached, what=f"{name} of {unit} in {values}", deadline_sec=deadline_sec)
        assert found is not None
        return found

    def main_pid(self, unit: str) -> int:
        """Return the guest's pid of a unit's main process; 0 where there is none."""
        return int(self.property(unit, "MainPID"))

    def host_pid(self, pid: int) -> int:
        """Return the host's pid of a process of the guest."""
        found = subprocess.run(
            ["lsns", "--noheadings", "--output", "NS", "--type", "pid", "--task", str(self.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()[0]
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if str((status.parent / "ns/pid").readlink()) == f"pid:[{found}]":
                    numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:"))
                    if int(numbers.split()[-1]) == pid:
                        return int(status.parent.name)
        raise ProcessLookupError(pid)

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """Return entries of the guest's journal, oldest first; matches and options as for journalctl."""
        self.run("journalctl", "--sync")
        lines = self.run("journalctl", "--output=json", "--all", "--no-pager", *matches).splitlines()
        return [json.loads(line) for line in lines]

    def messages(self, *matches: str) -> list[str]:
        """Return the journal's messages alone."""
        return [str(entry.get("MESSAGE")) for entry in self.journal(*matches)]

    def wait_message(self, text: str, *matches: str, deadline_sec: float = DEADLINE_SEC) -> dict[str, Any]:
        """Wait for an entry whose message contains `text`."""

        def found() -> dict[str, Any] | None:
            self.run("journalctl", "--sync")
            words = ("journalctl", "--output=json", "--all", "--no-pager", f"--grep={re.escape(text)}")
            lines = self.try_run(*words, *matches).stdout.splitlines()  # 1 where there is none
            return next((item for item in map(json.loads, lines) if text in str(item.get("MESSAGE"))), None)

        entry = wait_for(found, what=f"{text!r} in the journal of {matches}", deadline_sec=deadline_sec)
        assert entry is not None
        return entry

    def add_user(self, name: str, *groups: str) -> None:
        """Add an ordinary user with a home of mode 0700."""
        more = ["--groups", ",".join(groups)] if groups else []
        self.run("useradd", "--create-home", "--shell", "/bin/bash", *more, name)
        self.run("chmod", "0700", f"/home/{name}")


def _cgroup2_dir() -> Path:
    """Return the host's cgroup2 hierarchy, which is not at the top in a hybrid layout."""
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return Path(next(line.split()[1] for line in lines if line.split()[2] == "cgroup2"))
