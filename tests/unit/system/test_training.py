"""The training environment of the Debian package, as a process enters it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from honed.system import environment, training

CODE = """
import sys
from pathlib import Path
from honed.system import training
training.DIR = Path(sys.argv[1])
training.CURRENT = training.DIR / "current"
training.enter()
import fruit
print(fruit.name, flush=True)
sys.stdin.readline()
"""


def add_environment(directory: Path, name: str) -> Path:
    packages = training.packages_of(directory / name)
    packages.mkdir(parents=True)
    (packages / "fruit.py").write_text(f"name = {name!r}\n")
    (directory / name / training.STAMP).touch()
    return directory / name


def started(directory: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(directory)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def fruit(directory: Path, **variables: str) -> str:
    with started(directory, **variables) as process:
        return process.communicate("\n")[0].strip()


def test_a_process_stays_in_the_environment_that_its_parent_names(tmp_path: Path) -> None:
    apple, pear = (add_environment(tmp_path, name) for name in ("apple", "pear"))
    (tmp_path / "current").symlink_to(apple.name)
    assert fruit(tmp_path) == "apple"
    assert fruit(tmp_path, **{training.VARIABLE: str(pear)}) == "pear"


def test_an_environment_elsewhere_is_not_entered(tmp_path: Path) -> None:
    own = add_environment(tmp_path / "own", "pear")
    apple = add_environment(tmp_path / "all", "apple")
    (tmp_path / "all/current").symlink_to(apple.name)
    assert fruit(tmp_path / "all", **{training.VARIABLE: str(own)}) == "apple"


def test_a_process_holds_the_environment_that_it_has_entered(tmp_path: Path) -> None:
    from honed.cli import setup

    apple = add_environment(tmp_path, "apple")
    (tmp_path / "current").symlink_to(apple.name)
    with started(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "apple\n"
        assert not setup.is_free(apple)
        process.communicate("\n")
    assert setup.is_free(apple)


def test_a_process_is_found_by_the_environment_in_its_variables(tmp_path: Path) -> None:
    apple = add_environment(tmp_path, "apple")
    (tmp_path / "current").symlink_to(apple.name)
    with started(tmp_path, **{training.VARIABLE: str(apple)}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(environment.running_from(apple)) == [process.pid]
        assert not list(environment.running_from(tmp_path / "app"))
        process.communicate("\n")
