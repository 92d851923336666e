"""The border between the daemon's side and the worker's is drawn around every module."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_outside_the_worker_is_under_the_import_rule() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    modules = {f"honed.{path.stem}" for path in (ROOT / "daemon/honed").glob("*.py")} - {"honed.__init__"}
    assert set(contract["source_modules"]) == modules


def test_the_daemon_and_honectl_load_no_training_library() -> None:
    code = (
        "import sys, honed.daemon, honed.honectl, honed.doctor, honed.preflight\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'trl', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
