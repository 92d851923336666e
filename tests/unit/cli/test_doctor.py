"""The doctor, on this machine and on deliberately broken packages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import _pydantic_core

from honed.cli import commands, doctor
from honed.cli.doctor import Finding
from honed.spec.config import Config, JobsConfig, PolicyConfig
from honed.system import installed
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout, user_root
from honed.system.layout import of as layout_of

SOURCE = Path(doctor.__file__).parents[2]


def pretend(site: Path, name: str, version: str, code: str | None = None) -> None:
    """Install a package that has only metadata, and optionally a module with that code."""
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if code is not None:
        (site / f"{name}.py").write_text(code)


def ask_with(site: Path, code: str) -> str:
    """Return the output of a fresh process that finds those packages first."""
    environment = os.environ | {"PYTHONPATH": f"{site}:{SOURCE}", "LD_LIBRARY_PATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", f"from honed.cli.doctor import *\nfrom honed.cli import doctor\n{code}"],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout


def status_of(found: list[Finding], check: str) -> str:
    return next(finding.status for finding in found if finding.check == check)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of a fresh process on this machine, and the heavy libraries that it imported itself."""
    root = tmp_path_factory.mktemp("root")
    code = (
        "import json\nfrom dataclasses import asdict\n"
        f"found = [asdict(f) for f in examine(Layout(Path({str(root)!r})), Config())]\n"
        "imported = [name for name in ('torch', 'bitsandbytes') if name in sys.modules]\n"
        "print(json.dumps({'found': found, 'imported': imported}))"
    )
    told: dict[str, Any] = json.loads(ask_with(root / "none", code))
    return told


@pytest.mark.slow
@pytest.mark.skipif(installed.version("torch") is None, reason="needs the training stack")
def test_this_machine_can_train(examined: dict[str, Any]) -> None:
    found = {finding["check"]: finding for finding in examined["found"]}
    assert set(found) >= {
        "python",
        "torch",
        "transformers",
        "gpu",
        "torch loads",
        "torchvision",
        "bitsandbytes loads",
        "disk: state",
        "disk: spool",
        "disk: cache",
        "permissions",
        "systemd",
        "honed",
    }
    assert found["torch loads"]["status"] == "ok"
    assert found["honed"]["status"] == "warning"
    for finding in found.values():
        assert set(finding) == {"check", "status", "detail", "hint"}
        assert finding["status"] == "ok" or finding["hint"], finding


@pytest.mark.slow
def test_examining_imports_no_torch_here(examined: dict[str, Any]) -> None:
    assert examined["imported"] == []


def test_the_version_whose_own_bug_it_was_is_named(tmp_path: Path) -> None:
    pretend(tmp_path, "transformers", "4.57.2")
    found = ask_with(tmp_path, "print([f for f in doctor._packages() if f.check == 'transformers'])")
    assert "status='error'" in found
    assert "'dict' object has no attribute 'model_type'" in found


def test_versions_outside_their_window_are_told(tmp_path: Path) -> None:
    pretend(tmp_path, "trl", "1.15.0")
    found = ask_with(tmp_path, "print([f for f in doctor._packages() if f.check == 'trl'])")
    assert "status='warning'" in found
    assert "1.15.0 is outside the tested versions (>=1.9,<1.15)" in found


def test_packages_that_unsloth_refuses_are_told(tmp_path: Path) -> None:
    pretend(tmp_path, "unsloth", "2026.10.9")
    pretend(tmp_path, "unsloth_zoo", "2026.10.4")
    pretend(tmp_path, "datasets", "4.4.1")
    found = ask_with(tmp_path, "print(doctor._beside_unsloth())")
    assert "datasets 4.4.1 is not supported by Unsloth" in found
    assert "unsloth_zoo 2026.10.4 must have the same version, 2026.10.9" in found


def test_a_torchvision_that_does_not_load_is_found(tmp_path: Path) -> None:
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    pretend(tmp_path, "torchvision", "0.28.0", broken)
    # A torchvision that has the operator is left alone by the repair that scripts/setup may have put into the venv.
    pretend(tmp_path, "torch", "2.13.0", "class ops:\n    class torchvision:\n        nms = None\n")
    found = ask_with(tmp_path, "print(doctor._torchvision())")
    assert "status='error'" in found
    assert "operator torchvision::nms does not exist" in found
    assert "uninstall it" in found


def test_a_torchvision_that_workers_mend_is_only_warned_of(tmp_path: Path) -> None:
    pretend(tmp_path, "torchvision", "0.28.0")
    inner = tmp_path / "torchvision/transforms/v2"
    inner.mkdir(parents=True)
    for directory in (inner, *inner.parents[:2]):
        (directory / "__init__.py").touch()
    (inner / "functional.py").write_text("class resized:\n    shape = (3, 4, 4)\nresize = lambda *_: resized\n")
    # It has no torchvision.ops.nms, so it fails; in a worker it does what processors need.
    torch = "class ops:\n    class torchvision:\n        nms = None\nzeros = lambda *_: None\n"
    pretend(tmp_path, "torch", "2.13.0", torch)
    found = ask_with(tmp_path, "print(doctor._torchvision())")
    assert "status='warning'" in found, found
    assert "workers work around this" in found


def test_a_torch_that_does_not_import_is_found(tmp_path: Path) -> None:
    pretend(tmp_path, "torch", "2.13.0", "raise OSError('libcudart.so.12: cannot open shared object file')")
    found = ask_with(tmp_path, "print(doctor._torch())")
    assert "status='error'" in found
    assert "libcudart.so.12" in found


def test_a_child_that_hangs_or_crashes_is_not_waited_for() -> None:
    with pytest.raises(EnvironmentInvalidError, match=r"no response within 0\.5 s"):
        doctor.ask("import time; time.sleep(60)", timeout_sec=0.5)
    with pytest.raises(EnvironmentInvalidError, match="status -11"):
        doctor.ask("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_gpu_that_the_configuration_names_and_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").symlink_to(_pydantic_core.__file__)  # any library: the module is the fake
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\nclass NVMLError_NotSupported(NVMLError): pass\n"
        "class M: total = free = 80 * 2**30\n"
        "nvmlInit = nvmlShutdown = lambda: None\nnvmlDeviceGetCount = lambda: 1\n"
        "nvmlDeviceGetHandleByIndex = lambda i: i\nnvmlDeviceGetName = lambda h: 'NVIDIA H100'\n"
        "nvmlDeviceGetUUID = lambda h: 'GPU-0'\nnvmlDeviceGetCudaComputeCapability = lambda h: (9, 0)\n"
        "nvmlDeviceGetMemoryInfo = lambda h: M\nnvmlSystemGetDriverVersion = lambda: '570.1'\n"
    )
    code = (
        "from honed.spec.config import DeviceConfig\n"
        "print(doctor._gpu(Config(device=DeviceConfig(gpus=[0, 3]))), doctor._gpu(Config()))"
    )
    found = ask_with(tmp_path, code)
    assert "device.gpus lists [3], but the machine has [0]" in found
    assert "0: NVIDIA H100, 80.0 GiB; driver 570.1" in found


def test_a_driver_that_sees_more_than_torch_is_told(tmp_path: Path) -> None:
    pretend(
        tmp_path,
        "torch",
        "2.13.0+cpu",
        (
            "__version__ = '2.13.0+cpu'\nclass version: cuda = None\n"
            "class cuda:\n    is_available = staticmethod(lambda: False)\n"
        ),
    )
    code = "doctor.device.cuda_devices = lambda: [0]\nprint(doctor._torch())"
    found = ask_with(tmp_path, code)
    assert "it sees 0 of 1 GPUs" in found
    assert "from PyPI" in found


def test_the_spool_is_looked_at(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    assert doctor._permissions(layout).status == "warning"
    (layout.spool_dir / "incoming").mkdir(parents=True)
    assert doctor._permissions(layout).status == "error"
    layout.jobs_dir.mkdir(parents=True)
    assert doctor._permissions(layout).status == "ok"
    layout.spool_dir.chmod(0o777)
    assert "is world-writable" in doctor._permissions(layout).detail


def test_a_running_honed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path)
    layout.runtime_dir.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        monkeypatch.chdir(layout.runtime_dir)  # a socket's path has 108 bytes at most
        server.bind("control.sock")
        server.listen()
        assert doctor._daemon(layout).status == "ok"
    assert doctor._daemon(layout).status == "warning"


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 100 * 2**20}))
    assert doctor._disk("state", tmp_path).status == "error"


def test_a_broken_configuration_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.config_path.parent.mkdir(parents=True)
    layout.config_path.write_text("[jobs]\nretry_delay = 3\n")
    # Findings that need an import of the package are not tested here, since an import takes seconds.
    without = "def ask(*_, **__): raise EnvironmentInvalidError('not asked')\ndoctor.ask = ask"
    code = (
        f"{without}\nfound = examine(Layout(Path({str(tmp_path)!r})))\n"
        "print([f for f in found if f.check in ('configuration', 'python')])"
    )
    found = ask_with(tmp_path / "none", code)
    assert "check='configuration', status='error'" in found
    assert "jobs.retry_delay" in found
    assert "check='python', status='ok'" in found


#: The output of `systemctl show` for a healthy unit.
WELL = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "Result": "success",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "no",
    "NRestarts": "0",
    "StatusText": "idle; 0 queued",
    "ReadWritePaths": "/var/lib/honed/jobs/0",
}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "idle"),
        ({"LoadState": "not-found"}, "warning", "scripts/install"),
        ({"NeedDaemonReload": "yes"}, "warning", "systemctl daemon-reload"),
        ({"ActiveState": "failed", "Result": "watchdog"}, "error", "watchdog"),
        ({"StatusText": "degraded: /var/lib/honed: No space left on device; idle"}, "error", "No space left"),
        ({"StatusText": "idle; NOT reloaded, the old configuration is in force: x"}, "error", "NOT reloaded"),
        (
            {"StatusText": "idle; 3 not checked: systemd does not start honed-check@1000.service"},
            "error",
            "3 not checked",
        ),
        ({"NRestarts": "7"}, "warning", "restarted it 7 times"),
        ({"UnitFileState": "disabled"}, "warning", "systemctl enable"),
    ],
)
def test_what_is_wrong_with_the_unit_is_told(changes: dict[str, str], status: str, words: str) -> None:
    found = doctor._service({**WELL, **changes})
    assert found.status == status
    assert words in f"{found.detail} {found.hint}"


def test_a_unit_that_is_closed_to_what_the_configuration_allows_is_told() -> None:
    config = Config(policy=PolicyConfig(allowed_paths=["/srv/out", "/srv/data"]))
    assert doctor._sandbox(Config(), WELL).status == "ok"
    found = doctor._sandbox(config, {**WELL, "ReadWritePaths": "/var/lib/honed/jobs/0 -/srv/data"})
    assert found.status == "error"
    assert "/srv/out" in found.detail
    assert "/srv/data" not in found.detail
    assert doctor._sandbox(config, {**WELL, "ReadWritePaths": "/var/lib/honed/jobs/0 /srv"}).status == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_a_unit_that_is_open_to_what_somebody_else_can_lead_elsewhere_is_told(tmp_path: Path) -> None:
    """The unit was opened by an earlier honectl, or by hand."""
    for name in ("to write", "home", "good"):
        (tmp_path / name).mkdir()
    os.chown(tmp_path / "to write", 54321, 0)
    os.chown(tmp_path / "home", 54321, 0)
    shown = {
        "ReadWritePaths": f"/var/lib/honed/jobs/0 '-{tmp_path}/to write/x' -{tmp_path}/good",
        "BindPaths": f"/var/lib/honed/jobs/0:/var/lib/honed/jobs/0:rbind -{(y := f'{tmp_path}/home/y: 1')}:{y}:rbind",
    }
    found = doctor._sandbox(Config(), {**WELL, **shown})
    assert found.status == "error"
    assert (
        f"{tmp_path}/to write/x: the user 54321, the owner of {tmp_path}/to write, can replace it with a link"
        in found.detail
    )
    assert f"{tmp_path}/home/y: 1: the user" in found.detail
    assert "good" not in found.detail
    os.chown(tmp_path / "to write", 0, 0)
    os.chown(tmp_path / "home", 0, 0)
    assert doctor._sandbox(Config(), {**WELL, **shown}).status == "ok"


def test_a_missing_unit_for_fetches_is_told_where_the_configuration_fetches() -> None:
    config = Config(policy=PolicyConfig(hub=True))
    assert doctor._fetch_unit(Config(), WELL, {"LoadState": "not-found"}) == []
    assert doctor._fetch_unit(config, {"LoadState": "not-found"}, {"LoadState": "not-found"}) == []  # jobs are children
    [found] = doctor._fetch_unit(config, WELL, {"LoadState": "not-found"})
    assert found.status == "error"
    assert "nothing is fetched" in found.detail
    assert [each.status for each in doctor._fetch_unit(config, WELL, WELL)] == ["ok"]
    assert [each.status for each in doctor._fetch_unit(config, WELL, {**WELL, "NeedDaemonReload": "yes"})] == [
        "warning"
    ]


def test_a_missing_unit_for_checks_is_told_where_jobs_are_units() -> None:
    missing = {"LoadState": "not-found"}
    assert doctor._check_unit(Config(), missing, missing) == []
    assert doctor._check_unit(Config(jobs=JobsConfig(runner="process")), WELL, missing) == []
    [found] = doctor._check_unit(Config(), WELL, missing)
    assert (found.check, found.status) == ("honed-check@.service", "error")
    assert "users' job files wait" in found.detail
    [found] = doctor._check_unit(Config(), WELL, {**WELL, "NeedDaemonReload": "yes"})
    assert found.status == "warning"
    assert [each.status for each in doctor._check_unit(Config(), WELL, WELL)] == ["ok"]


def test_odd_names_are_known_as_systemctl_shows_them() -> None:
    odd = ["/srv/we ird", '/srv/q"uote', "/srv/back\\slash", "/home/anna/my data: 1"]
    shown = {
        "ReadWritePaths": '/var/lib/honed/jobs/0 "-/srv/we ird" "-/srv/q\\"uote" "-/srv/back\\\\slash"',
        "BindPaths": "-/home/anna/my data: 1:/home/anna/my data: 1:rbind",
    }
    assert doctor._sandbox(Config(policy=PolicyConfig(allowed_paths=odd)), {**WELL, **shown}).status == "ok"


def test_an_incoming_that_everyone_may_tidy_up_is_an_error(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    (layout.spool_dir / "incoming").mkdir(parents=True)
    layout.jobs_dir.mkdir(parents=True)
    (layout.spool_dir / "incoming").chmod(0o777)
    assert "remove and replace" in doctor._permissions(layout).detail
    (layout.spool_dir / "incoming").chmod(0o1777)
    assert doctor._permissions(layout).status == "ok"


def test_the_commands_are_those_of_this_kind_of_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONED_ROOT", raising=False)
    root = tmp_path / "my root"
    assert doctor._daemon(Layout(Path("/"))).hint in ("systemctl start honed", "")
    assert doctor._daemon(Layout(root)).hint == f"honed --root '{root}'"
    assert commands.of(Layout(root)).honectl == f"honectl --root '{root}'"
    monkeypatch.setenv("HONED_ROOT", str(root))
    assert commands.of(Layout(root)).honectl == "honectl"
    for name in ("CONFIG_HOME", "STATE_HOME", "RUNTIME_DIR"):
        monkeypatch.setenv(f"XDG_{name}", str(tmp_path / name))
    own = layout_of(user_root())
    assert doctor._daemon(own).hint == "honed --user"  # without a unit
    (tmp_path / "CONFIG_HOME/systemd/user").mkdir(parents=True)
    (tmp_path / "CONFIG_HOME/systemd/user/honed.service").touch()
    (tmp_path / "RUNTIME_DIR/systemd").mkdir(parents=True)
    assert doctor._daemon(own).hint == "systemctl --user start honed"
    assert commands.of(own).log.startswith("journalctl --user ")
    spoken = [doctor._daemon(each).hint + doctor._permissions(each).hint for each in (own, Layout(root))]
    assert not [words for words in spoken if "honed-submit" in words or "systemctl start" in words]


def test_a_training_environment_of_another_version_of_the_package_is_a_warning(tmp_path: Path) -> None:
    prefix, here = tmp_path / "honed", tmp_path / "environments"
    (prefix / "training").mkdir(parents=True)
    (prefix / "training/requirements.txt").write_text("torch\n")
    code = (
        "from honed.cli import setup\n"
        f"sys.prefix = {str(prefix)!r}\n"
        f"training.DIR, training.CURRENT = Path({str(here)!r}), Path({str(here)!r}, 'current')\n"
        "name = f'cpu-{setup._digest(training.recipe_dir())}'\n"
        "training.packages_of(training.DIR / name).mkdir(parents=True)\n"
        "training.CURRENT.symlink_to(name)\n"
        "print(doctor._training()[0].status)\n"
        "Path(sys.prefix, 'training/requirements.txt').write_text('torch>2\\n')\n"
        "print(doctor._training()[0].status)\n"
    )
    assert ask_with(tmp_path / "site", code).split() == ["ok", "warning"]
