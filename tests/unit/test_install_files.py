"""What scripts/install and the Debian package put on a machine, and what their removal takes away."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = {path.name for kind in ("service", "slice", "socket") for path in ROOT.glob(f"units/*.{kind}")}


@pytest.fixture
def installed(tmp_path: Path) -> set[Path]:
    options = argparse.Namespace(user=False, destdir=str(tmp_path), dry_run=False)
    return {target for _, target in runpy.run_path(str(ROOT / "scripts/install.py"))["Installer"](options)._list()}


@pytest.fixture
def packaged(tmp_path: Path) -> set[Path]:
    package = runpy.run_path(str(ROOT / "scripts/package.py"))["Package"](tmp_path, "/usr/bin/python3")
    return {target for _, target in package._installer._list()}


def test_only_the_package_has_honed_setup_and_so_its_page(installed: set[Path], packaged: set[Path]) -> None:
    assert packaged - installed == {Path("/usr/share/man/man8/honed-setup.8")}
    assert installed <= packaged


def test_every_unit_page_and_example_of_the_checkout_is_in_the_package(packaged: set[Path]) -> None:
    names = {path.name for path in packaged}
    assert names >= UNITS
    for pattern in ("docs/man/*", "etc/examples/*", "etc/grafana/*", "etc/prometheus/*", "docs/**/*.md"):
        assert names >= {path.name for path in ROOT.glob(pattern)}


def test_a_purge_removes_the_drop_ins_of_every_unit(tmp_path: Path) -> None:
    wanted = {f"/etc/systemd/system/{name}.d" for name in UNITS}
    options = argparse.Namespace(user=False, destdir=str(tmp_path), dry_run=False)
    data = runpy.run_path(str(ROOT / "scripts/install.py"))["Installer"](options)._data()
    assert {str(path) for path in data if path.suffix == ".d"} == wanted
    postrm = (ROOT / "scripts/debian/postrm").read_text()
    lines = re.search(r"for unit in .*?(?=\n    rm -f )", postrm, re.DOTALL)
    assert lines is not None
    script = f'rm() {{ shift; printf "%s\\n" "$@"; }}\n{lines[0]}'
    assert (
        set(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split()) == wanted
    )
