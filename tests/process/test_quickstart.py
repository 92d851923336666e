"""The README's first command, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_quickstart_shows_a_model_that_learns(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [ROOT / "scripts/quickstart", tmp_path / "quickstart"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"right: (\d+) of 48 before training \(step 0\), (\d+) of 48 after it", done.stdout)
    assert found is not None, done.stdout
    before, after = map(int, found.groups())
    assert before <= 4
    assert after >= 36
