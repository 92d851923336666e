"""scripts/install and scripts/setup: what is told while they work, and after a failure."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_an_installation_continues_though_the_reader_of_its_output_has_gone(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [SCRIPTS / "install", "--dry-run", "--destdir", str(tmp_path)]
    done = subprocess.run(command, stdout=write_fd, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_fd)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_packages_that_cannot_be_had_are_an_error_with_its_cause_above(tmp_path: Path) -> None:
    command = [SCRIPTS / "install", "--user", "--destdir", str(tmp_path)]
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "No matching distribution found for torch" in done.stdout
    assert "its packages could not be installed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_download_that_prints_nothing_is_told_of(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # an index that never answers
        variables = {"PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/", "PIP_DEFAULT_TIMEOUT": "600"}
        process = subprocess.Popen(
            [SCRIPTS / "setup", "--into", str(tmp_path / "made")],
            env={**os.environ, **variables, "PIP_CONFIG_FILE": os.devnull},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            assert any(re.match(r"setup: 0 min \d+ s, \S+ in .*/made$", line) for line in process.stdout)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
