"""Checks of whether this machine can train: compatible versions, GPU, compiled libraries that load, disk, permissions.

Checks that need torch run in child processes with a deadline, since a broken installation may hang or crash.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from honed.check.policy import nearest_existing
from honed.cli import commands, sandbox, setup, terminal
from honed.cli.instance import Instance
from honed.job import leftover
from honed.job.corrupt import Corrupt
from honed.job.progress import gib
from honed.run import choice
from honed.send import notification, outbox
from honed.spec import config as configs
from honed.spec.config import Config
from honed.system import access, device, installed, message, python, training
from honed.system.client import Client
from honed.system.error import EnvironmentInvalidError, HonedError
from honed.system.layout import Layout, UserLayout
from honed.system.printable import printable

Status = Literal["ok", "warning", "error"]

#: Seconds that a child may take; `import torch` from a cold disk has been seen to take 30.
CHILD_TIMEOUT_SEC = 120.0
#: Seconds that a notice may wait before the doctor warns.
NOTICE_PATIENCE_SEC = 600.0
#: Bytes of free disk below which one job's checkpoints may not fit.
LOW_DISK_BYTES = 20 * 2**30
#: Bytes of free disk below which not even honed's own files are safe.
NO_DISK_BYTES = 1 * 2**30

_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda,
                  "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}))
"""
_TORCHVISION = """
import json, torch, torchvision
kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
print(json.dumps({"version": torchvision.__version__, "kept": len(kept)}))
"""
_TORCHVISION_MENDED = """
import json
from honed.worker.model import torchvision as mended
mended.mend()
import torch, torchvision.transforms.v2.functional as functional
print(json.dumps({"size": list(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape)}))
"""
_BITSANDBYTES = """
import json, bitsandbytes, bitsandbytes.cextension as native
print(json.dumps({"version": bitsandbytes.__version__, "library": type(native.lib).__name__}))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    detail: str
    hint: str = ""


def doctor(instance: Instance, options: argparse.Namespace) -> int:
    with terminal.doing("looking at the configuration, the packages and the devices …"):
        findings = [asdict(finding) for finding in examine(instance.layout)]
    if options.json:
        terminal.say_json(findings)
    else:
        terminal.table(
            ["check", "status", "detail", "hint"],
            [[*item.values()] for item in findings],
        )
    return int(any(item["status"] == "error" for item in findings))


def examine(layout: Layout, config: Config | None = None, *, imports: bool = True) -> list[Finding]:
    """Run all checks, in the order in which a person would fix their findings. Takes as long as importing torch,
    seconds; `imports`: with the checks that do."""
    try:
        config = config or configs.load(layout)
        configured = [Finding("configuration", "warning", words) for words in config.outdated]
        configured = configured or [Finding("configuration", "ok", f"{layout.config_path}")]
    except HonedError as error:
        config, configured = Config(), [Finding("configuration", "error", error.message, error.hint)]
    with ThreadPoolExecutor() as pool:
        # The children run in threads, which only wait for them.
        looks = () if training.is_missing() or not imports else (_torch, _torchvision, _bitsandbytes)
        compiled = [pool.submit(look) for look in looks]
        packages = [] if training.is_missing() else [*_packages(), *_beside_unsloth()]
        # Our metadata excludes older versions of Python; one too new for torch's wheels shows by torch's absence.
        python = Finding("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")
        machine = [python, *_training(), *packages, _gpu(config)]
        return [
            *configured,
            *machine,
            *(answer.result() for answer in compiled),
            *(Finding(*finding) for finding in choice.findings(layout, config)),
            *_instance(layout, config),
            *_reporting(layout, config),
            *_notices(layout),
        ]


def _instance(layout: Layout, config: Config) -> list[Finding]:
    directories = {"state": layout.state_dir, "spool": layout.spool_dir, "cache": layout.cache_dir}
    return [
        *(_disk(name, path) for name, path in directories.items()),
        _permissions(layout),
        _entries(layout),
        *_leftovers(layout),
        _acls(layout),
        _systemd(layout),
        *(_machine(config) if layout.is_of_system and Path("/run/systemd/system").is_dir() else ()),
        _daemon(layout),
        *_devices(layout),
    ]


# --- Packages ---------------------------------------------------------------------------------------------------------


def _training() -> list[Finding]:
    """Check the training environment, which only the Debian package's honed has apart from its own."""
    if training.is_missing():
        return [Finding("training environment", "error", f"{training.MISSING}: jobs are rejected", training.REMEDY)]
    if training.recipe_dir() is None:
        return []
    directory = os.environ.get(training.VARIABLE, "")
    if not setup.is_current():
        detail = f"{directory}: of another version of the package; jobs are trained with its packages"
        return [Finding("training environment", "warning", detail, training.REMEDY)]
    return [Finding("training environment", "ok", directory)]


def _packages() -> list[Finding]:
    needed = [_package(name, window, is_needed=True) for name, window in installed.WINDOWS.items()]
    return needed + [_package(name, window, is_needed=False) for name, window in installed.OPTIONAL_WINDOWS.items()]


#: The purpose of every optional package.
_USES = {
    "bitsandbytes": "quantization: 4bit and 8bit",
    "huggingface_hub": "policy.hub: models and data sets that honed fetches",
    "unsloth": "backend: unsloth",
    "unsloth_zoo": "backend: unsloth",
    "pillow": "rows with images",
    "av": "rows with videos and sound",
    "torchvision": "the processors of vision models",
}


def _package(name: str, window: str, *, is_needed: bool) -> Finding:
    version = installed.version(name)
    install = commands.pip(f"{name}{window}")
    if version is None and is_needed:
        return Finding(name, "error", "not installed: no job can be trained", install)
    if version is None:
        return Finding(name, "warning", f"not installed; needed for {_USES[name]}", install)
    for broken, versions, why in installed.BROKEN:
        if broken == name and installed.fits(version, versions):
            return Finding(name, "error", f"{version} {why}", install)
    if not installed.fits(version, window):
        return Finding(name, "warning", f"{version} is outside the tested versions ({window})", install)
    return Finding(name, "ok", version)


def _beside_unsloth() -> list[Finding]:
    unsloth, zoo = installed.version("unsloth"), installed.version("unsloth_zoo")
    if unsloth is None:
        return []
    trouble = [
        f"{name} {version} {why}"
        for name, versions, why in installed.BROKEN_BESIDE_UNSLOTH
        if (version := installed.version(name)) is not None and installed.fits(version, versions)
    ]
    if zoo != unsloth:
        trouble.append(f"unsloth_zoo {zoo or 'is missing, and'} must have the same version, {unsloth}")
    if trouble:
        hint = f"run {commands.pip('honed[unsloth]')} again; until then write backend: transformers"
        return [Finding("unsloth fits", "error", "; ".join(trouble), hint)]
    return [Finding("unsloth fits", "ok", f"{unsloth} with the versions above")]


# --- Checks that import a package, in a process of their own ---------------------------------------------------------


def ask(code: str, *, timeout_sec: float = CHILD_TIMEOUT_SEC) -> dict[str, Any]:
    """Return the JSON that a child process prints as its last line. Raises EnvironmentInvalidError with its last error
    line."""
    try:
        done = subprocess.run(
            python.code(code),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_sec,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentInvalidError(f"no response within {timeout_sec:g} s") from error
    if done.returncode:
        last = next(
            (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit status {done.returncode}"
        )
        raise EnvironmentInvalidError(last.strip()[:300])
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _torch() -> Finding:
    """Check that torch loads, and sees as many GPUs as the driver."""
    if installed.version("torch") is None:
        return Finding("torch loads", "error", "not installed", commands.pip("honed[train]"))
    try:
        answer = ask(_TORCH)
    except EnvironmentInvalidError as error:
        return Finding("torch loads", "error", f"import torch: {error.message}", "install torch again")
    num_gpus = len(device.cuda_devices())
    detail = f"{answer['version']}, built for {'CUDA ' + answer['built_for'] if answer['built_for'] else 'the CPU'}"
    if num_gpus > answer["num_gpus"]:
        hint = (
            "install torch from PyPI"
            if answer["built_for"] is None
            else "is the driver recent enough for that CUDA version?"
        )
        return Finding("torch loads", "error", f"{detail}; it sees {answer['num_gpus']} of {num_gpus} GPUs", hint)
    seen = {0: "no GPU", 1: "1 GPU"}.get(answer["num_gpus"], f"{answer['num_gpus']} GPUs")
    return Finding("torch loads", "ok", f"{detail}; it sees {seen}")


def _torchvision() -> Finding:
    """Check that torchvision loads: one built for another torch breaks imports whose errors do not mention it."""
    if installed.version("torchvision") is None:
        return Finding("torchvision loads", "ok", "not installed; text models do not need it")
    try:
        return Finding("torchvision loads", "ok", ask(_TORCHVISION)["version"])
    except EnvironmentInvalidError as error:
        hint = "install the torchvision that matches this torch, from the same index, or uninstall it"
        # torchvision's own message then lists every possible cause.
        detail = f"{installed.version('torchvision')} does not load: {error.message.split('. ')[0]}"
    try:
        ask(_TORCHVISION_MENDED)
    except EnvironmentInvalidError:
        return Finding("torchvision loads", "error", detail, hint)
    return Finding("torchvision loads", "warning", f"{detail}; workers work around this", hint)


def _bitsandbytes() -> Finding:
    if installed.version("bitsandbytes") is None:
        return Finding(
            "bitsandbytes loads", "warning", "not installed; needed for 4bit and 8bit", commands.pip("bitsandbytes")
        )
    try:
        answer = ask(_BITSANDBYTES)
    except EnvironmentInvalidError as error:
        return Finding("bitsandbytes loads", "error", f"import bitsandbytes: {error.message}", "reinstall it")
    if "Mock" in answer["library"] and device.cuda_devices():
        detail = f"{answer['version']}: no native library for this GPU"
        return Finding("bitsandbytes loads", "error", detail, "python -m bitsandbytes has details")
    return Finding("bitsandbytes loads", "ok", answer["version"])


def _gpu(config: Config) -> Finding:
    gpus = device.cuda_devices()
    if not gpus:
        return _no_gpu()
    indices = [item.index for item in gpus]
    if missing := [index for index in config.device.gpus or [] if index not in indices]:
        detail = f"device.gpus lists {missing}, but the machine has {indices}"
        return Finding("gpu", "error", detail, "correct it in honed.toml")
    names = ", ".join(f"{item.index}: {item.name}, {gib(item.total_bytes)}" for item in gpus)
    return Finding("gpu", "ok", f"{names}; driver {device.driver_version()}")


def _no_gpu() -> Finding:
    try:
        device.driver_version()
    except EnvironmentInvalidError as error:
        has_hardware = any(Path("/proc/driver/nvidia/gpus").glob("*"))
        status: Status = "error" if has_hardware else "warning"
        cpu = device.probe([])[0]
        detail = f"no NVIDIA GPU ({error.message}): jobs train on {cpu.name}, {gib(cpu.total_bytes)}"
        return Finding("gpu", status, detail, error.hint if has_hardware else "small models only")
    return Finding("gpu", "error", "the driver is installed, but no GPU responds", "see nvidia-smi and journalctl -k")


# --- This instance ----------------------------------------------------------------------------------------------------


_FREE_SOME = "free disk space; du -sh jobs/* in honed's state directory shows the large jobs"


def _disk(name: str, path: Path) -> Finding:
    free = shutil.disk_usage(nearest_existing(path)).free
    detail = f"{gib(free)} free for {path}"
    if free < NO_DISK_BYTES:
        return Finding(f"disk: {name}", "error", detail, _FREE_SOME)
    if free < LOW_DISK_BYTES and name != "spool":
        return Finding(f"disk: {name}", "warning", detail, f"checkpoints of a large model will not fit: {_FREE_SOME}")
    return Finding(f"disk: {name}", "ok", detail)


def _permissions(layout: Layout) -> Finding:
    """Check the files that honed writes; before its first start there are none yet."""
    if not layout.spool_dir.is_dir():
        return Finding(
            "permissions",
            "warning",
            f"{layout.spool_dir} does not exist yet",
            f"honed creates it at its first start: {commands.of(layout).start}",
        )
    directories = (layout.spool_dir, layout.spool_dir / "incoming", layout.state_dir, layout.jobs_dir)
    missing = [str(path) for path in directories if not path.is_dir()]
    if missing:
        return Finding(
            "permissions", "error", f"missing: {', '.join(missing)}", f"honed creates them: {commands.of(layout).start}"
        )
    if layout.spool_dir.stat().st_mode & 0o002:
        return Finding("permissions", "error", f"{layout.spool_dir} is world-writable", f"chmod o-w {layout.spool_dir}")
    if len({path.stat().st_dev for path in (layout.spool_dir, layout.spool_dir / "incoming")}) > 1:
        detail = f"{layout.spool_dir}/incoming is on another file system: arrivals cannot be claimed by a rename"
        return Finding("permissions", "error", detail, "put both on one file system")
    mode = (layout.spool_dir / "incoming").stat().st_mode
    if mode & 0o002 and not mode & stat.S_ISVTX:
        detail = (
            f"{layout.spool_dir}/incoming: everyone may remove and replace other users' files (mode {mode & 0o7777:o})"
        )
        mode_words = "1730" if layout.is_of_system else "700"
        return Finding("permissions", "error", detail, f"chmod {mode_words} {layout.spool_dir}/incoming")
    if not os.access(layout.spool_dir / "incoming", os.W_OK | os.X_OK):
        hint = (
            "join the group honed-submit"
            if layout.is_of_system
            else f"it belongs to another user: ls -ld {layout.root}"
        )
        return Finding("permissions", "warning", "you may not submit jobs", hint)
    return Finding("permissions", "ok", f"{layout.spool_dir} and {layout.state_dir} have the right owners and modes")


def _systemd(layout: Layout) -> Finding:
    if not Path("/run/systemd/system").is_dir():
        return Finding(
            "systemd", "ok", "systemd is not running here: honed runs in the foreground, with workers as its children"
        )
    if not (layout.is_of_system or isinstance(layout, UserLayout)):
        return Finding(
            "systemd", "ok", "not needed: this instance runs in the foreground, with workers as its children"
        )
    try:
        import sdnotify  # noqa: F401, PLC0415
    except ImportError:
        return Finding(
            "systemd", "error", "the package sdnotify is missing: honed cannot report READY", commands.pip("sdnotify")
        )
    return Finding("systemd", "ok", "running; honed reports its status to it")


def _entries(layout: Layout) -> Finding:
    corrupt = Corrupt(layout.spool_dir)
    try:
        names = corrupt.names()
    except OSError as error:
        return Finding("entries", "warning", f"{corrupt.dir}: {error.strerror}", "run it as honed's user")
    if not names:
        return Finding("entries", "ok", "no damaged job entry")
    hint = f"read {corrupt.dir}/*.reason, then remove the files there"
    return Finding("entries", "error", f"damaged job entries in {corrupt.dir}: {', '.join(names)}", hint)


def _leftovers(layout: Layout) -> list[Finding]:
    """Name what honed could not remove."""
    try:
        left = leftover.listed(layout)
    except OSError as error:
        return [Finding("leftovers", "warning", f"{layout.left_path}: {error.strerror}", "run it as honed's user")]
    if not left:
        return []
    detail = f"honed could not remove {'; '.join(f'{printable(item.path)}: {item.problem}' for item in left[:5])}"
    more = f", and {len(left) - 5} more; all are in {layout.left_path}" if len(left) > 5 else ""
    hint = "honed tries it again; unmount what is mounted there, or as root, rm -r it"
    return [Finding("leftovers", "warning", printable(detail + more), hint)]


def _acls(layout: Layout) -> Finding:
    directory = nearest_existing(layout.jobs_dir)
    try:
        os.getxattr(directory, access.ACCESS_XATTR)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            hint = "mount it with ACLs, or let users read their results with honectl"
            return Finding("ACLs", "warning", f"the file system of {directory} does not support ACLs", hint)
    return Finding("ACLs", "ok", "submitters can read the directories of their jobs")


# --- The system's own instance ----------------------------------------------------------------------------------------


def _machine(config: Config) -> list[Finding]:
    """Check the units and their dependencies."""
    service, job, check = (_unit(name) for name in ("honed.service", "honed-job@0.service", "honed-check@1000.service"))
    has_templates = all(unit.get("LoadState") == "loaded" for unit in (job, check))
    return [
        _service(service),
        _template(
            "honed-job@.service",
            job,
            ("warning", "not installed: jobs run as honed's children, without limits"),
            "each job runs in its own unit",
        ),
        *_check_unit(config, job, check),
        *_fetch_unit(config, job),
        _polkit(has_templates=has_templates),
        _users(),
        _user_database(),
        _sandbox(config, job),
        _catalog(),
        _kept_journal(),
        _limits(),
    ]


UNIT_PROPERTIES = (
    "LoadState",
    "LoadError",
    "ActiveState",
    "Result",
    "UnitFileState",
    "NeedDaemonReload",
    "NRestarts",
    "StatusText",
    "ReadWritePaths",
    "BindPaths",
)
INSTALL = "apt-get install --reinstall honed" if training.recipe_dir() else "run scripts/install as root"
OPEN = "as root, run honectl sandbox"


def _unit(name: str) -> dict[str, str]:
    command = ["systemctl", "show", name, f"--property={','.join(UNIT_PROPERTIES)}"]
    return dict(line.split("=", 1) for line in _lines(command) if "=" in line)


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def _service(unit: dict[str, str]) -> Finding:
    """Check honed.service: installed, loaded from its current file, up, and healthy."""
    check = "honed.service"
    if unit.get("LoadState") != "loaded":
        return Finding(check, "warning", f"{unit.get('LoadState', 'systemd does not answer')}", INSTALL)
    if unit["NeedDaemonReload"] == "yes":
        return Finding(check, "warning", "its unit file changed after systemd read it", "systemctl daemon-reload")
    if unit["ActiveState"] == "failed":
        detail = f"failed ({unit['Result']}){': ' if unit['StatusText'] else ''}{unit['StatusText']}"
        return Finding(check, "error", detail, "journalctl -xeu honed; then systemctl start honed")
    if any(word in unit["StatusText"] for word in ("degraded:", "NOT reloaded", "not checked:")):
        return Finding(check, "error", unit["StatusText"], "journalctl -xeu honed")
    if int(unit.get("NRestarts") or 0) > 3:
        return Finding(check, "warning", f"systemd has restarted it {unit['NRestarts']} times", "journalctl -xeu honed")
    if unit["UnitFileState"] == "disabled":
        return Finding(
            check,
            "warning",
            f"{unit['ActiveState']}; it is not enabled at boot",
            "systemctl enable --now honed",
        )
    return Finding(check, "ok", f"{unit['ActiveState']}: {unit['StatusText']}")


def _template(check: str, unit: dict[str, str], absent: tuple[Status, str], words: str) -> Finding:
    if unit.get("LoadState") != "loaded":
        return Finding(check, *absent, INSTALL)
    if unit.get("NeedDaemonReload") == "yes":
        return Finding(check, "warning", "changed after systemd read it", "systemctl daemon-reload")
    return Finding(check, "ok", words)


def _check_unit(config: Config, job: dict[str, str], unit: dict[str, str]) -> list[Finding]:
    """Check honed-check@.service: without it, no person's job file is accepted where jobs are units."""
    if config.jobs.runner == "process" or job.get("LoadState") != "loaded":
        return []
    return [
        _template(
            "honed-check@.service",
            unit,
            ("error", f"{unit.get('LoadState') or 'not known'}: users' job files wait"),
            "job files are checked with the permissions of their submitters",
        )
    ]


def _fetch_unit(config: Config, job: dict[str, str], unit: dict[str, str] | None = None) -> list[Finding]:
    """Check honed-fetch@.service, if policy.hub needs it: where jobs are units, honed itself has no network."""
    if not config.policy.hub or job.get("LoadState") != "loaded":
        return []
    unit = unit if unit is not None else _unit("honed-fetch@0.service")
    return [
        _template(
            "honed-fetch@.service",
            unit,
            ("error", f"policy.hub is on, but the unit is {unit.get('LoadState') or 'not known'}: nothing is fetched"),
            "models and data sets are fetched from the hub",
        )
    ]


def _sandbox(config: Config, unit: dict[str, str]) -> Finding:
    """Check that the jobs' unit is open to the paths that jobs may write, and to no path that others can replace."""
    binds = unit.get("BindPaths", "")
    # systemctl quotes paths with spaces in ReadWritePaths, and nothing in BindPaths.
    writable = shlex.split(unit.get("ReadWritePaths", ""))
    # Entries with a `-` are honectl's or administrators': the units' own have none.
    added = [path[1:] for path in writable if path.startswith("-")] + re.findall(r"-(/.+?):\1:", binds)
    if dangers := [danger for path in sorted(added) if (danger := sandbox.danger_of(Path(path)))]:
        return Finding(
            "sandbox", "error", f"the jobs' unit has access to {'; '.join(dangers)}", f"{sandbox.MEND}; then {OPEN}"
        )
    opened = [Path(part.lstrip("-+")) for part in [*writable, *binds.replace(":", " ").split()]]
    named = config.policy.allowed_paths if unit.get("LoadState") == "loaded" else None
    asked = [path for path in named or () if f"{path}:{path}:" not in binds]
    closed = [path for path in asked if not any(Path(path).is_relative_to(allowed) for allowed in opened)]
    if closed:
        detail = (
            f"jobs may write to {', '.join(closed)}, but their unit has no access to it: their output would be lost"
        )
        return Finding("sandbox", "error", detail, f"{OPEN} gives it access")
    return Finding("sandbox", "ok", "has access to the directories of policy.allowed_paths")


def _polkit(*, has_templates: bool) -> Finding:
    """Check the rule and the templates: a rule without the templates allows a transient unit of such a name, as
    root."""
    directories = [
        Path(directory, "polkit-1/rules.d") for directory in ("/usr/share", "/etc", "/usr/local/share", "/run")
    ]
    rules = [path for directory in directories for path in directory.glob("*honed*.rules")]
    if rules and not has_templates:
        detail = f"{rules[0]} lets honed start units that are not installed: on systemd 257 it could run anything"
        return Finding("polkit", "error", detail, f"rm {rules[0]}, or install the units again")
    hidden = [directory for directory in directories if directory.is_dir() and not os.access(directory, os.R_OK)]
    if not rules and has_templates and hidden:
        return Finding("polkit", "ok", f"unknown: you cannot read {hidden[0]}", "run sudo honectl doctor")
    if not rules and has_templates:
        return Finding("polkit", "warning", "no rule: honed may not start its job units", INSTALL)
    if rules and not any(Path(directory, "polkitd").exists() for directory in ("/usr/lib/polkit-1", "/usr/libexec")):
        return Finding(
            "polkit", "warning", "polkitd is not installed: honed may not start its job units", "apt install polkitd"
        )
    return Finding("polkit", "ok", "honed may start its own job units" if rules else "no rule is needed")


def _users() -> Finding:
    people = {name: access.person(name) for name in (access.DAEMON_USER, access.WORKERS_USER)}
    missing = [name for name, person in people.items() if person is None]
    missing += [] if access.group_id(access.DROPPERS_GROUP) is not None else [access.DROPPERS_GROUP]
    if missing:
        return Finding("users", "warning", f"missing: {', '.join(missing)}", "systemd-sysusers, or " + INSTALL)
    daemon, workers = people[access.DAEMON_USER], access.group_id(access.WORKERS_USER)
    if daemon is not None and workers not in daemon.gids:
        return Finding(
            "users",
            "error",
            "honed is not a member of honed-job: it cannot give jobs their directories",
            "usermod -aG honed-job honed; systemctl restart honed",
        )
    return Finding("users", "ok", "honed, honed-job and the group honed-submit")


def _user_database() -> Finding:
    """Check nss-systemd: jobs' units run as users that honed-view@ registers in /run/userdb, found through it."""
    try:
        text = Path("/etc/nsswitch.conf").read_text(encoding="utf-8")
    except OSError as error:
        return Finding("user database", "error", f"/etc/nsswitch.conf: {error.strerror}", "apt install libnss-systemd")
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))
    missing = [name for name in ("passwd", "group") if "systemd" not in lines.get(name, "").split()]
    if missing:
        return Finding(
            "user database",
            "error",
            f"no `systemd` in /etc/nsswitch.conf: {', '.join(missing)}; jobs cannot run as their submitters",
            "apt install libnss-systemd, or add the word to these lines",
        )
    return Finding("user database", "ok", "jobs run as their submitters")


def _catalog() -> Finding:
    if any(message.READY in line for line in _lines(["journalctl", "--list-catalog"])):
        return Finding("journal catalog", "ok", "journalctl -x explains honed's entries")
    return Finding("journal catalog", "warning", "journalctl -x has no explanations", "journalctl --update-catalog")


def _kept_journal() -> Finding:
    if Path("/var/log/journal").is_dir():
        return Finding("journal", "ok", "kept when the machine restarts")
    return Finding("journal", "warning", "lost when the machine restarts", "mkdir /var/log/journal")


def _limits() -> Finding:
    try:
        controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        controllers = []
    if "memory" in controllers:
        return Finding("memory limits", "ok", "MemoryMax= of jobs is enforced")
    return Finding(
        "memory limits",
        "warning",
        "MemoryMax= is not enforced: cgroup2 has no memory controller",
        "boot with systemd.unified_cgroup_hierarchy=1",
    )


# --- The daemon -------------------------------------------------------------------------------------------------------


def _reporting(layout: Layout, config: Config) -> list[Finding]:
    """Check the delivery to the metrics API, if one is configured."""
    path, check = layout.outbox_dir, "metrics API"
    address = config.reporting.metrics_api_url
    if address is None or not path.is_dir():
        return [] if address is None else [Finding(check, "ok", f"{address}; nothing has been sent yet")]
    if not os.access(path, os.R_OK | os.X_OK):
        return [Finding(check, "ok", f"{address}; only honed can see the waiting rows")]
    try:
        waiting = f"{outbox.num_waiting_bytes(path)} bytes waiting"
        trouble, num_lost = outbox.read_trouble(path), outbox.num_lost(path)
    except OSError as error:
        return [Finding(check, "error", f"{error.filename}: {error.strerror}", "see the kernel's log: journalctl -k")]
    if trouble is not None:
        return [Finding(check, "warning", f"{waiting}: {trouble}", "they are retried automatically")]
    if num_refused := len(list(outbox.refused_dir(path).glob("*.json"))):
        detail = f"{waiting}; {num_refused} rows were rejected; they are in {outbox.refused_dir(path)}"
        return [Finding(check, "warning", detail, f"to retry them: {commands.of(layout).resend}; or remove them")]
    if num_lost:
        detail = f"{waiting}; {num_lost} rows were discarded because the outbox was full"
        return [Finding(check, "warning", detail, f"raise reporting.max_outbox_bytes; then rm {path}/lost.json")]
    return [Finding(check, "ok", f"{address}; {waiting}")]


def _notices(layout: Layout) -> list[Finding]:
    """Check the notices about finished jobs, for stuck and rejected ones."""
    check, directory = "notices", notification.notices_dir(layout)
    if not os.access(directory, os.R_OK | os.X_OK):
        return []
    waiting, rejected = notification.waiting(layout), list(notification.refused_dir(layout).glob("*.json"))
    old = [path for path in waiting if time.time() - _changed_at(path) > NOTICE_PATIENCE_SEC]
    if old:
        return [Finding(check, "warning", f"{len(old)} are not delivered", f"see {commands.of(layout).send_log}")]
    if rejected:
        detail = f"{len(rejected)} were rejected; they are in {notification.refused_dir(layout)}"
        return [Finding(check, "warning", detail, f"to retry them: {commands.of(layout).resend}; or remove them")]
    return [Finding(check, "ok", f"{len(waiting)} wait")] if waiting else []


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # delivered
        return time.time()


def _daemon(layout: Layout) -> Finding:
    try:
        Client(layout.control_path, timeout_sec=2.0).connect().close()
    except OSError as error:
        detail = f"does not respond at {layout.control_path}: {error.strerror or error}"
        return Finding("honed", "warning", detail, commands.of(layout).start)
    return Finding("honed", "ok", "running")


def _devices(layout: Layout) -> list[Finding]:
    """Return the devices that are closed or reserved, as honed sees them."""
    try:
        rows = Client(layout.control_path, timeout_sec=10.0).ask("status")["devices"]
    except (HonedError, KeyError):
        return []
    honectl = commands.of(layout).honectl
    return [
        Finding("device", "warning", f"{row['label']} is {closure['detail']}", f"{honectl} undrain {row['device']}")
        if closure["reason"] == "drained"
        else Finding("device", "ok", f"{row['label']} is {closure['detail']}")
        for row in rows
        for closure in row["closures"]
    ]
