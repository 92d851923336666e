"""The border between the daemon's side and the worker's is drawn around every module."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

from honed import honectl

ROOT = Path(__file__).parents[2]


def test_every_module_outside_the_worker_is_under_the_import_rule() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = project["tool"]["importlinter"]["contracts"]
    modules = {f"honed.{path.stem}" for path in (ROOT / "daemon/honed").glob("*.py")} - {"honed.__init__"}
    assert set(contract["source_modules"]) == modules


def modules_of(code: str) -> set[str]:
    """The modules that are there when a program of its own has run."""
    code = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_daemon_and_honectl_load_no_training_library() -> None:
    loaded = modules_of(
        "import honed.daemon, honed.doctor, honed.preflight\nfrom honed import honectl\n"
        f"for place in {sorted(places())!r}: honectl.find(place)"
    )
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "transformers", "trl", "numpy"})


def test_every_verb_of_honectl_is_where_its_line_says() -> None:
    assert all(callable(honectl.find(place)) for place in places())


def places() -> set[str]:
    verbs = next(
        action.choices.values()
        for action in honectl.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {verb.get_default("run") for verb in verbs}


def test_the_daemon_knows_no_model_and_no_data() -> None:
    """It stays small, and it is there at once: what judges a job lies in the helper."""
    judges = {
        "spec",
        "training",
        "memory",
        "activation",
        "loss",
        "precision",
        "plan",
        "basemodel",
        "dataset",
        "preflight",
    }
    assert modules_of("import honed.daemon").isdisjoint({f"honed.{name}" for name in judges})


def test_a_tab_of_honectl_loads_only_its_command_line() -> None:
    loaded = modules_of("from honed import honectl\nhonectl.parser()")
    assert loaded.isdisjoint({"pydantic", "rich", "yaml", "honed.instance", "honed.config"})
