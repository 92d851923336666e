"""The few rights of honed's units, in systemd's own security score and as seen from inside."""

from __future__ import annotations

import json

import pytest
from machine import CHECKOUT, FIND_WRITABLE, Machine

pytestmark = pytest.mark.systemd

#: The highest score allowed in `systemd-analyze security`: 0 is fully confined, 10 is unconfined.
MAX_EXPOSURE = {
    "honed.service": 0.5,
    "honed-job@1.service": 0.7,
    "honed-check@1000.service": 0.6,
    "honed-view@1.service": 4.0,
    "honed-fetch@1.service": 1.2,
    "honed-send.service": 1.2,
    "honed-web.service": 1.0,
    "honed-slurm@1.service": 2.2,
}


DAEMONS_DIRS = ("/var/lib/honed", "/var/spool/honed", "/var/cache/honed", "/run/honed")


@pytest.fixture(scope="module", autouse=True)
def installed(machine: Machine) -> None:
    machine.install()


def inside(machine: Machine, unit: str, script: str) -> str:
    """Run a shell script with a unit's user, sandbox and limits, and return its output."""
    text = machine.run("systemctl", "cat", unit)
    # The unit with another program in it, run once: transient ones cannot carry all of these settings.
    name = "probe-" + unit.replace("@", "-")
    left_out = ("Exec", "Type=", "Watchdog", "Standard", "Restart=", "#")
    lines = [line for line in text.splitlines() if not line.startswith(left_out)]
    unit_text = "\n".join(lines).replace("%i", unit.removesuffix(".service").partition("@")[2])
    begin, rest = unit_text.split("[Service]\n", 1)
    machine.write(
        f"/run/systemd/system/{name}",
        f"{begin}[Service]\nType=oneshot\nExecStart=sh /srv/probe.sh\nStandardOutput=truncate:/srv/said\n"
        f"StandardError=inherit\n{rest}",
    )
    machine.write("/srv/probe.sh", script)
    machine.sh("rm -f /srv/said; systemctl daemon-reload")
    machine.try_run("systemctl", "start", name)
    assert machine.exists("/srv/said"), machine.run("systemctl", "status", "--no-pager", name)
    return machine.read("/srv/said")


@pytest.mark.parametrize("unit", MAX_EXPOSURE)
def test_systemd_rates_the_exposure(machine: Machine, unit: str) -> None:
    rated = json.loads(machine.run("systemd-analyze", "security", "--no-pager", "--json=short", unit))
    found = machine.try_run(
        "systemd-analyze", "security", "--no-pager", f"--threshold={MAX_EXPOSURE[unit] * 10:.0f}", unit
    )
    assert found.returncode == 0, [item for item in rated if not item["set"]] + [found.stdout[-200:]]


def show_job(machine: Machine) -> None:
    """Create the directory and the view of a job 1."""
    machine.sh("install -d -o honed -g honed-job -m 2770 /var/lib/honed/jobs/1")
    machine.write("/var/lib/honed/jobs/1/plan.json", "{}")
    machine.run("systemctl", "start", "honed-view@1")


@pytest.mark.parametrize(
    ("unit", "own"),
    [
        ("honed-job@1.service", {"/var/lib/honed/jobs/1", "/dev/shm", "/dev/mqueue"}),
        ("honed-check@1000.service", {"/dev/mqueue", "/dev/shm"}),
        ("honed-fetch@1.service", {"/var/lib/honed/fetch", "/var/cache/honed", "/dev/mqueue", "/dev/shm"}),
        ("honed-send.service", {"/var/lib/honed", "/dev/mqueue", "/dev/shm"}),
        ("honed-web.service", {"/dev/mqueue", "/dev/shm"}),
        ("honed-slurm@1.service", set()),  # but for job directories, as their submitters
        ("honed.service", {*DAEMONS_DIRS, "/dev/mqueue", "/dev/shm"}),
    ],
)
def test_what_a_unit_can_write(machine: Machine, unit: str, own: set[str]) -> None:
    """Each unit can write only its own directories: ProtectSystem= omits /run, and everybody can write to /run/lock."""
    show_job(machine)
    if unit.startswith("honed-check"):
        machine.sh("id -u 1000 >/dev/null 2>&1 || useradd -u 1000 thousand")
    machine.sh(
        "install -d -o honed -g honed /var/lib/honed/fetch /var/cache/honed /var/lib/honed/outbox; "
        "touch /run/lock/there; chmod 666 /run/lock/there"
    )
    said = inside(
        machine,
        unit,
        FIND_WRITABLE,
    )
    places = {path for path in said.splitlines() if not path.startswith(tuple(f"{each}/" for each in own))}
    assert places - {"/tmp", "/var/tmp"} == own  # where there is a /tmp, it is the unit's


def test_a_job_sees_no_network_no_homes_and_no_spool(machine: Machine) -> None:
    show_job(machine)
    machine.write("/home/secret", "secret")
    said = inside(
        machine,
        "honed-job@1.service",
        """
        id -un; ls /home /root 2>&1; ls /var/spool/honed /etc/honed 2>&1; ls /sys/class/net
        touch /var/lib/honed/jobs/1/mine && echo own directory; touch /srv/theirs 2>&1; ls /dev | wc -l
        systemctl start honed 2>&1 | head -1; unshare -U true 2>&1; cat /dev/kmsg 2>&1 | head -1
        """,
    )
    assert said.splitlines()[0] == "honed-job"
    assert "secret" not in said
    assert "own directory" in said
    assert "cannot touch '/srv/theirs': Read-only file system" in said
    assert "cannot open directory '/var/spool/honed': Permission denied" in said
    assert "eth0" not in said
    assert "unshare: unshare failed: Operation not permitted" in said


def test_a_check_sees_what_its_user_may_read_and_no_network_no_homes_and_no_spool(machine: Machine) -> None:
    machine.add_user("anna", "honed-submit")
    uid = int(machine.run("id", "-u", "anna"))
    machine.sh(
        "umask 077; echo hers >/srv/hers; echo others >/srv/others; chown anna /srv/hers; echo secret >/home/secret"
    )
    said = inside(
        machine,
        f"honed-check@{uid}.service",
        """
        id -un; cat /srv/hers /srv/others 2>&1; ls /home /root /var/spool/honed /etc/honed /run/dbus 2>&1
        ls /sys/class/net; touch /srv/mine 2>&1; touch /tmp/mine && echo own tmp; unshare -U true 2>&1
        chroot / true 2>&1; systemctl start honed 2>&1 | head -1; echo $HOME
        """,
    )
    assert said.splitlines()[:2] == ["anna", "hers"]
    assert "cat: /srv/others: Permission denied" in said
    assert "secret" not in said
    assert said.count("cannot open directory") == 5
    assert "eth0" not in said
    assert "cannot touch '/srv/mine': Read-only file system" in said
    assert "own tmp" in said
    assert "unshare: unshare failed: Operation not permitted" in said
    assert "chroot: cannot change root directory to '/': Operation not permitted" in said
    assert said.splitlines()[-1] == "/nonexistent"


def test_a_fetch_sees_nothing_that_people_train_on_and_no_bus(machine: Machine) -> None:
    """A fetch has the network, and runs as honed's user."""
    machine.sh(
        "install -d -o honed -g honed /var/lib/honed/fetch /var/cache/honed && echo secret >/var/lib/honed/honed.db-wal"
    )
    said = inside(
        machine,
        "honed-fetch@1.service",
        """
        id -un; ls -A /var/lib/honed /var/spool/honed /run/dbus 2>&1
        touch /var/lib/honed/fetch/1.json && echo own requests; touch /var/lib/honed/mine 2>&1
        """,
    )
    assert said.splitlines()[0] == "honed"
    assert "/var/lib/honed:\nfetch\n" in said
    assert "own requests" in said
    assert "cannot touch '/var/lib/honed/mine': Read-only file system" in said
    assert said.count("Permission denied") == 2
    machine.sh("rm /var/lib/honed/honed.db-wal")


def test_one_step_opens_the_sandbox_to_the_administrators_directories(machine: Machine) -> None:
    """`policy.allowed_paths`, then `honectl sandbox`: writable directories, also one in a home and odd names."""
    odd = r"/srv/o%d: \"a\\"
    home = "/home/my data: 1"
    machine.run("mkdir", "-p", "/srv/out", odd, home)
    machine.run("chmod", "0777", "/srv/out", odd, home)
    machine.write(f"{home}/a", "row\n")
    machine.write(
        "/etc/honed/honed.toml.d/50-paths.toml", f"[policy]\nallowed_paths = ['/srv/out', '{odd}', '{home}']\n"
    )
    machine.run("honectl", "sandbox")
    show_job(machine)
    script = f"touch /srv/out/made '{odd}/made' && cat '{home}/a'; ls /home; touch /srv/other 2>&1"
    said = inside(machine, "honed-job@1.service", script)
    assert "row" in said
    assert "secret" not in said
    assert "cannot touch '/srv/other'" in said
    assert machine.exists("/srv/out/made")
    assert machine.exists(f"{odd}/made")
    for unit in ("honed.service", f"honed-check@{machine.run('id', '-u', 'anna').strip()}.service"):
        said = inside(machine, unit, f"cat '{home}/a'; touch '{home}/b' 2>&1")
        assert "row" in said
        assert "cannot touch" in said
    machine.write("/etc/honed/honed.toml.d/50-paths.toml", "")
    machine.run("honectl", "sandbox")
    for unit in ("honed-job@", "honed-check@"):
        assert not machine.exists(f"/etc/systemd/system/{unit}.service.d/50-allowed-paths.conf")


def test_a_directory_that_a_person_can_lead_elsewhere_opens_no_sandbox(machine: Machine) -> None:
    """A link to / in its place would put everything into each job's unit; a link to itself would block honed."""
    machine.write("/etc/honed/honed.toml.d/50-paths.toml", "[policy]\nallowed_paths = ['/srv/of-dora/data']\n")
    machine.add_user("dora", "honed-submit")
    machine.sh("install -d -o dora /srv/of-dora; ln -s / /srv/of-dora/data")
    dropin = "/etc/systemd/system/honed-job@.service.d/50-allowed-paths.conf"
    for arguments in ((), ("--dry-run",)):
        done = machine.try_run("honectl", "sandbox", *arguments)
        assert done.returncode == 2
        assert "/srv/of-dora/data: the user dora, the owner of /srv/of-dora, can replace it with a link" in done.stderr
        assert "use a directory inside one that only root can write" in done.stderr
        assert not machine.exists(dropin)
    machine.write(dropin, '[Service]\nReadWritePaths="-/srv/of-dora/data"\n')  # as honectl made it before
    machine.run("systemctl", "daemon-reload")
    found = machine.doctor()["sandbox"]
    assert found["status"] == "error"
    assert "/srv/of-dora/data: the user dora" in found["detail"]
    machine.run("rm", dropin)
    machine.write("/etc/honed/honed.toml.d/50-paths.toml", "[policy]\nallowed_paths = ['/srv/of-dora']\n")
    machine.run("honectl", "sandbox")  # its own name is root's
    assert "/srv/of-dora" in machine.read(dropin)
    machine.write("/etc/honed/honed.toml.d/50-paths.toml", "")
    machine.run("honectl", "sandbox")


def test_the_daemon_starts_job_units_and_nothing_else(machine: Machine) -> None:
    """The polkit rule denies honed's user other units, other verbs, and names that do not match the pattern."""
    call = (
        "busctl",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
    )

    def ask(method: str, *arguments: str, user: str = "honed") -> str:
        done = machine.try_run(*call, method, *arguments, user=user)
        return done.stdout.split()[0] if done.returncode == 0 else done.stderr.strip().split(": ", 1)[1]

    assert ask("StartUnit", "ss", "honed-job@4711.service", "fail") == "o"
    assert ask("StopUnit", "ss", "honed-job@4712.service", "fail") == "o"
    assert ask("StartUnit", "ss", "honed-check@1000.service", "fail") == "o"
    assert ask("StartUnit", "ss", "honed-check@4294967294.service", "fail") == "o"
    for unit in (
        "systemd-logind.service",
        "honed.service",
        "honed-job@a.service",
        "honed-job@.service",
        "xhoned-job@1.service",
        "honed-job@1.service.mount",
        "honed-jobs.slice",
        "honed-check@0.service",
        "honed-check@999.service",
        "honed-check@01000.service",
        "honed-check@anna.service",
        "honed-check@10000000000.service",
    ):
        assert ask("StartUnit", "ss", unit, "fail") != "o", unit
    for method, arguments in (
        ("RestartUnit", ("ss", "honed-job@1.service", "fail")),
        ("Reload", ()),
        ("EnableUnitFiles", ("asbb", "1", "cron.service", "true", "false")),
        ("SetUnitProperties", ("sba(sv)", "honed-job@1.service", "true", "1", "CPUWeight", "t", "1")),
        ("StartTransientUnit", ("ssa(sv)a(sa(sv))", "honed-job@9.service", "fail", "0", "0")),
        ("PowerOff", ()),
    ):
        assert ask(method, *arguments) not in {"o", ""}, method
    # The workers' user may not even do that.
    assert ask("StartUnit", "ss", "honed-job@4711.service", "fail", user="honed-job") != "o"


def test_rule_and_templates_come_and_go_together(machine: Machine) -> None:
    """With the rule alone, a systemd of 257 or later would let honed run anything as root."""
    machine.run(f"{CHECKOUT}/scripts/install", "--uninstall")
    left = machine.sh(
        "ls /usr/share/polkit-1/rules.d /etc/polkit-1/rules.d /usr/lib/systemd/system | grep honed || true"
    )
    assert left == ""
