"""The Debian package: built, installed, upgraded while it trains, removed and purged. To be read, and run, in order.

Its training environment is made of wheels that contain nothing but names; the packages themselves are those of the
tests' environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from machine import ENVIRONMENT, Machine
from test_install import drop, show, steps, wait_for_job, worker_pid

from honed import __version__
from waiting import wait_for

pytestmark = pytest.mark.systemd

REPOSITORY = Path(__file__).parents[2]
SETUP = ("honed-setup", "--device", "cpu", "--find-links", "/srv/wheels", "--no-index")
NEXT = "99.1.0"
#: The number of the job `long`: the rejected file and `capitals` took one, too.
LONG = 3
QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("dpkg-deb", "dpkg", "debconf", "deb-systemd-invoke") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: dpkg debconf init-system-helpers)")
    output = tmp_path_factory.mktemp("package")
    environment = {**os.environ, "DPKG_DEB_COMPRESSOR_TYPE": "gzip"}
    command = [REPOSITORY / "scripts/package", "--output", output]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(output.glob("*.deb"))


@pytest.fixture(scope="module")
def next_package(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package as that of the next version, with another recipe of the training environment."""
    root = tmp_path_factory.mktemp("next") / "root"
    subprocess.run(["dpkg-deb", "--raw-extract", package, root], check=True)
    dist = root / "usr/lib/honed/dist"
    digest = (dist / "honed-content").read_text()
    (honed_dir,) = dist.glob("lib/python3.*/site-packages/honed")
    named = [root / "DEBIAN/control", root / "DEBIAN/postinst", honed_dir / "__init__.py"]
    for path in [*named, dist / "pyvenv.cfg", *(dist / "bin").iterdir()]:
        if not path.is_symlink():
            path.write_text(path.read_text().replace(__version__, NEXT))
    (dist / "honed-content").write_text(digest[::-1].strip() + "\n")
    with (dist / "training/constraints.txt").open("a") as file:
        file.write("# the next version\n")
    command = ["dpkg-deb", "--build", "-Znone", "--root-owner-group", root, root.with_name("next.deb")]
    subprocess.run(command, check=True)
    return root.with_name("next.deb")


def write_wheel(directory: Path, name: str, version: str, **files: str) -> None:
    """Write a wheel with its metadata and these files alone."""
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def wheels(machine: Machine, package: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wheels of all that honed-setup installs, but for trl's, in the machine's /srv/wheels."""
    python = machine.sh(f"ls -d {ENVIRONMENT}/lib/python3.*").strip()
    if f"/{Path(os.path.realpath('/usr/bin/python3')).name}" not in python:
        pytest.skip(f"the tests' environment has another Python than Debian: {python}")
    directory = tmp_path_factory.mktemp("wheels")
    recipe = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
    prefix = "./usr/lib/honed/dist/training"
    read = ["tar", "--extract", "--to-stdout", f"{prefix}/requirements.txt", f"{prefix}/constraints.txt"]
    lines = subprocess.run(read, input=recipe, capture_output=True, check=True).stdout.decode().splitlines()
    # The pins of constraints.txt come last, and count.
    versions = dict(
        found.groups()
        for line in sorted(lines, key=lambda line: "==" in line)
        if (found := re.match(r"([\w-]+)[>=]=([\d.]+)", line))
    )
    for name, version in versions.items():
        write_wheel(directory, name.replace("-", "_"), version)
    setup = (REPOSITORY / "scripts/setup").read_text()
    pinned = dict(re.findall(r"^(TORCH|TORCHVISION|UNSLOTH)=(.*)$", setup, re.MULTILINE))
    write_wheel(directory, "torch", f"{pinned['TORCH']}+cpu")
    write_wheel(directory, "torchvision", f"{pinned['TORCHVISION']}+cpu")
    write_wheel(directory, "unsloth_zoo", pinned["UNSLOTH"])
    # The last one: pip takes what it finds at the places that such a file names as installed.
    write_wheel(directory, "unsloth", pinned["UNSLOTH"], **{"tests.pth": f"{python}/site-packages\n"})
    machine.put(directory, "/srv/wheels")
    machine.sh("mkdir /srv/late && mv /srv/wheels/trl-* /srv/late")


# -- install ----------------------------------------------------------------------------------------------------------


def test_lintian_finds_no_error(package: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("needs lintian")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", package], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_beside_scripts_install_it_is_not_installed(machine: Machine, package: Path) -> None:
    machine.put(package, "/srv/honed.deb")
    machine.run("rm", "-f", "/usr/sbin/policy-rc.d")  # containers have one that forbids to start units
    machine.run("rm", "-f", "/var/lib/man-db/auto-update")  # or each of dpkg's runs makes the index of all man pages
    machine.write("/opt/honed/files", "/usr/lib/systemd/system/honed.service\n")
    done = machine.try_run("dpkg", "--install", "/srv/honed.deb", environment=QUIET)
    assert done.returncode != 0
    assert "scripts/install --uninstall keeps jobs" in done.stderr
    assert not machine.exists("/usr/lib/honed")
    machine.run("rm", "-r", "/opt/honed")


def test_without_a_training_environment_jobs_are_rejected_with_the_command(machine: Machine, model: str) -> None:
    done = machine.try_run("dpkg", "--install", "/srv/honed.deb", environment=QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run honed-setup as root" in done.stderr
    machine.wait_property("honed", "ActiveState", "active")
    assert machine.run("systemctl", "is-enabled", "honed").strip() == "enabled"
    assert "run honed-setup as root" in machine.property("honed", "StatusText")
    assert "no training environment is installed" in machine.try_run("honectl", "doctor").stdout
    machine.add_user("anna", "honed-submit")
    drop(machine, "anna", "early", 2)
    reason = "/var/spool/honed/rejected/early.json.reason"
    wait_for(lambda: machine.exists(reason), what="the reason")
    assert "no training environment is installed" in machine.read(reason)
    assert "run honed-setup as root" in machine.read(reason)


def test_honed_setup_is_continued_and_switched_to_when_it_is_complete(machine: Machine, wheels: None) -> None:
    done = machine.try_run(*SETUP)
    assert done.returncode == 69, done.stdout + done.stderr
    assert "run honed-setup again, which continues" in done.stderr
    assert "Successfully installed torch-" in done.stdout, "it shows what it does"
    assert not machine.exists("/opt/honed-env/current")
    done = machine.try_run("honed-setup", "--status")
    assert (done.returncode, "incomplete" in done.stdout) == (1, True)
    machine.sh("mv /srv/late/* /srv/wheels")
    said = machine.run(*SETUP)
    assert ": continued" in said
    assert "Successfully installed torch-" not in said
    assert "in use" in machine.run("honed-setup", "--status")
    assert "installed already" in machine.run(*SETUP)
    machine.wait_property("honed", "StatusText", "idle; 0 queued")


def test_a_job_is_trained(machine: Machine, wheels: None) -> None:
    drop(machine, "anna", "capitals", 5)
    job = wait_for_job(machine, "capitals", "succeeded")
    assert steps(machine, job["id"]) == [1, 2, 3, 4, 5]


# -- upgrade ----------------------------------------------------------------------------------------------------------


def test_an_upgrade_leaves_a_running_job_to_its_version_and_its_environment(
    machine: Machine, wheels: None, next_package: Path
) -> None:
    first, environment = (
        machine.run("readlink", "-f", f"{path}/current").strip() for path in ("/usr/lib/honed", "/opt/honed-env")
    )
    # Its worker is stopped below, and is not to be ended as one that hangs, however long the upgrade takes.
    patience = "[jobs]\nstall_timeout_sec = 86400\nmin_stall_timeout_sec = 86400\n"
    machine.write("/etc/honed/honed.toml.d/40-patience.toml", patience)
    machine.run("systemctl", "reload", "honed")
    # A queued job waits for an environment, too.
    machine.run("honectl", "pause")
    drop(machine, "anna", "long", 150)
    wait_for_job(machine, "long", "queued")
    machine.run("mv", "/opt/honed-env/current", "/srv/current")
    machine.run("honectl", "resume")
    assert "run honed-setup as root" in machine.run("honectl", "show", "long")
    machine.run("mv", "/srv/current", "/opt/honed-env/current")
    events = machine.host_path(f"/var/lib/honed/jobs/{LONG}/attempts/1/events.jsonl")
    wait_for(lambda: events.exists() and 3 in steps(machine, LONG), what="step 3", deadline_sec=400)
    pid = worker_pid(machine, LONG)
    machine.run("kill", "-STOP", str(pid))
    before = machine.sh(f"find {first} -type f | sort")
    machine.write("/etc/honed/honed.toml.d/50-local.toml", "[jobs]\nretry_delay_sec = 7\n")

    machine.put(next_package, "/srv/next.deb")
    done = machine.try_run("dpkg", "--install", "/srv/next.deb", environment=QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{first}: kept, running jobs started in it" in done.stderr
    assert machine.run("honed", "--version").strip() == f"honed {NEXT}"
    machine.wait_message(f"honed {NEXT} ready", "--unit=honed")
    assert machine.sh(f"find {first} -type f | sort") == before

    done = machine.try_run("honed-setup", "--status")
    assert (done.returncode, "of another version of the package" in done.stdout) == (1, True)
    assert "of another version of the package" in machine.try_run("honectl", "doctor").stdout
    machine.run(*SETUP)
    assert machine.run("readlink", "-f", "/opt/honed-env/current").strip() != environment
    said = machine.run("honed-setup", "--remove-old")
    assert f"{first}: kept, process" in said
    assert f"{environment}: kept, process" in said

    assert worker_pid(machine, LONG) == pid
    assert machine.property(f"honed-job@{LONG}", "ActiveState") == "active"
    assert machine.read(f"/proc/{pid}/cmdline").startswith(f"{first}/bin/python\0")
    machine.run("kill", "-CONT", str(pid))
    job = wait_for_job(machine, "long", "succeeded")
    assert [attempt["number"] for attempt in job["attempts"]] == [1]
    assert steps(machine, LONG) == list(range(1, 151))
    said = machine.run("honed-setup", "--remove-old")
    assert f"remove {first}" in said
    assert f"remove {environment}" in said


# -- away -------------------------------------------------------------------------------------------------------------


def test_remove_keeps_all_but_the_programs(machine: Machine, wheels: None) -> None:
    machine.run("dpkg", "--remove", "honed", environment=QUIET)
    for path in ("/usr/lib/honed", "/usr/bin/honectl", "/usr/share/polkit-1/rules.d/50-honed.rules"):
        assert not machine.exists(path), path
    assert machine.try_run("systemctl", "cat", "honed-job@1").returncode != 0
    for path in ("/etc/honed/honed.toml.d/50-local.toml", "/opt/honed-env/current", "/var/lib/honed/honed.db"):
        assert machine.exists(path), path


def test_purge_keeps_jobs_and_says_where_they_are(machine: Machine, wheels: None) -> None:
    done = machine.try_run("dpkg", "--purge", "honed", environment=QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "honed: kept jobs and results: /var/lib/honed/jobs /var/spool/honed" in done.stderr
    assert machine.exists(f"/var/lib/honed/jobs/{LONG}/output/adapter_model.safetensors")
    left = machine.sh(
        "find /etc /opt /usr /var -name '*honed*' -not -path '/var/lib/honed/*' -not -path '/var/spool/honed/*'"
        " -not -path '/var/log/*' -not -path '/var/lib/systemd/*'"
    )
    assert sorted(left.split()) == ["/var/lib/honed", "/var/spool/honed"]
    assert machine.sh("ls -A /var/lib/honed").split() == ["jobs", "staged"]


def test_installed_again_it_knows_its_jobs_and_purges_them_if_debconf_says_so(machine: Machine, wheels: None) -> None:
    machine.run("dpkg", "--install", "/srv/next.deb", environment=QUIET)
    wait_for(lambda: machine.try_run("honectl", "list").returncode == 0, what="honed")
    assert show(machine, "long")["state"] == "succeeded"
    machine.run("debconf-set-selections", stdin="honed honed/purge-jobs boolean true\n")
    machine.run("dpkg", "--purge", "honed", environment=QUIET)
    assert not machine.exists("/var/lib/honed")
    assert not machine.exists("/var/spool/honed")
    assert "honed" not in machine.read("/etc/passwd")
