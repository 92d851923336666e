"""What the crash tests need of the machine; where it lacks that they are skipped, with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def is_whole(request: pytest.FixtureRequest) -> bool:
    """Whether the matrices are run whole."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def strace() -> None:
    """strace that may trace and inject here."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    tried = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "-e", "trace=close", "-e", "inject=close:signal=SIGKILL:when=1", "true"],
        capture_output=True,
        check=False,
    )
    if tried.returncode != -9:
        pytest.skip(f"strace cannot trace here: {tried.stderr.decode().strip()}")


@pytest.fixture
def mounts(strace: None) -> None:
    """Root that may mount loop devices."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount loop devices")
    tried = subprocess.run(["unshare", "--mount", "losetup", "--find"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"there are no loop devices here: {tried.stderr.decode().strip()}")
