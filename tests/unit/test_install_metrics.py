"""scripts/install.py: an upgrade keeps the metrics that an administrator added."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest

INSTALL = runpy.run_path(str(Path(__file__).parents[2] / "scripts/install.py"))


def add_package(packages: Path, name: str, *, has_metrics: bool, has_record: bool = True) -> None:
    """Put a package into an environment as pip does."""
    info = packages / f"{name}-1.0.dist-info"
    (packages / name).mkdir(parents=True)
    info.mkdir()
    (packages / name / "__init__.py").write_text("def vowels(text, truth): return 0.5\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if has_metrics:
        (info / "entry_points.txt").write_text(f"[honed.metrics]\nvowels = {name}:vowels\n")
    if has_record:
        names = [
            f"{name}/__init__.py",
            f"../../../bin/{name}",
            *(f"{info.name}/{path.name}" for path in info.iterdir()),
        ]
        (info / "RECORD").write_text("".join(f"{each},,\n" for each in [*names, f"{info.name}/RECORD"]))


def take_over(tmp_path: Path) -> Path:
    """Do an upgrade's step for an environment beside the one in use. Returns its packages."""
    installer = INSTALL["Installer"](argparse.Namespace(user=False, destdir=str(tmp_path), dry_run=False))
    packages = tmp_path / "opt/honed/0.2.0/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    installer._take_over_metrics(packages)
    return packages


@pytest.fixture
def before(tmp_path: Path) -> Path:
    packages = tmp_path / "opt/honed/0.1.0/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "opt/honed/current").symlink_to("0.1.0")
    return packages


def test_packages_with_metrics_are_copied_and_no_others(
    tmp_path: Path, before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(before, "house_metrics", has_metrics=True)
    add_package(before, "numbers_of_ours", has_metrics=False)
    packages = take_over(tmp_path)
    copied = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    info = "house_metrics-1.0.dist-info"
    assert copied == {
        "house_metrics/__init__.py",
        *(f"{info}/{name}" for name in ("METADATA", "entry_points.txt", "RECORD")),
    }
    assert "house_metrics 1.0: copied, as it has metrics" in capsys.readouterr().out


def test_one_whose_files_nobody_knows_is_named(
    tmp_path: Path, before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_package(before, "house_metrics", has_metrics=True, has_record=False)
    assert not list(take_over(tmp_path).iterdir())
    assert "warning: house_metrics has metrics but no list of its files: install it again" in capsys.readouterr().out


def test_a_first_installation_has_none_to_copy(tmp_path: Path) -> None:
    assert not list(take_over(tmp_path).iterdir())
