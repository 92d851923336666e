"""Versions and their windows, read without importing the packages."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from honed.system import installed

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_the_windows_are_those_of_pyproject() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    known = installed.WINDOWS | installed.OPTIONAL_WINDOWS
    wanted = [line for line in (*extras["train"], *extras["unsloth"]) if not line.startswith("honed")]
    assert sorted(f"{name}{window}" for name, window in known.items()) == sorted(wanted)


@pytest.mark.parametrize(
    ("found", "window", "fits"),
    [
        ("5.17.0", ">=5.2,<=5.17", True),
        ("5.17.1", ">=5.2,<=5.17", False),
        ("5.1.9", ">=5.2,<=5.17", False),
        ("2.13.0+cpu", ">=2.6,<2.15", True),
        ("2.15.0", ">=2.6,<2.15", False),
        ("5.0.0", ">=4.6,<5", False),
        ("4.4.2", "==4.4.*", True),
        ("4.40.0", "==4.4.*", False),
        ("4.57.2", "==4.57.2", True),
        ("4.57.3", "==4.57.2", False),
        ("2026.10.9", ">=2026.10.4", True),
    ],
)
def test_versions_are_compared_as_numbers(found: str, window: str, fits: bool) -> None:
    assert installed.fits(found, window) is fits


def test_looking_imports_nothing_of_the_training_stack() -> None:
    code = (
        "import sys; from honed.system import installed; installed.look(); installed.known_model_types();"
        "print([name for name in ('torch', 'transformers', 'trl', 'peft', 'unsloth') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(installed.__file__).parents[2])},
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(installed.version("transformers") is None, reason="needs transformers")
def test_the_architectures_of_transformers_are_read_from_its_source() -> None:
    known, causal = installed.known_model_types()
    assert {"llama", "qwen3", "mistral", "gemma2", "gpt2"} <= causal
    assert "t5" in known - causal
    assert not set(installed.MODEL_TYPE_ALIASES) & causal - {"qwen"}
    assert set(installed.MODEL_TYPE_ALIASES.values()) <= causal
