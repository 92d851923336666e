"""scripts/uv_settings.py: pip's configuration for uv."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/uv_settings.py"


def translated(listed: str) -> list[str] | None:
    """Return the variables for what `pip config list` printed, None where pip itself has to install."""
    done = subprocess.run([sys.executable, SCRIPT], input=listed, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines() if done.returncode == 0 else None


def test_pips_indexes_and_constraints_become_uvs() -> None:
    listed = (
        "global.extra-index-url='\\nhttps://a.example/simple\\nhttps://b.example/simple'\n"
        "global.find-links='/srv/wheels\\n/opt/wheels'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "global.constraint='/etc/pip/constraints.txt'\n"
    )
    assert translated(listed) == [
        "UV_INDEX=https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS=/srv/wheels,/opt/wheels",
        "UV_DEFAULT_INDEX=https://mirror.example/simple",
        "UV_CONSTRAINT=/etc/pip/constraints.txt",
    ]


def test_the_environment_goes_before_install_and_that_before_global() -> None:
    listed = "global.index-url='https://g'\ninstall.index-url='https://i'\n"
    assert translated(listed) == ["UV_DEFAULT_INDEX=https://i"]
    assert translated(listed + ":env:.index-url='https://e'\n") == ["UV_DEFAULT_INDEX=https://e"]


@pytest.mark.parametrize("listed", ["", "global.no-color='true'\n", "list.format='columns'\n"])
def test_what_does_not_concern_an_installation_is_left_out(listed: str) -> None:
    assert translated(listed) == []


@pytest.mark.parametrize("key", ["trusted-host", "client-cert", "proxy", "no-binary", "keyring-provider"])
def test_pip_installs_where_it_has_a_setting_of_another_kind(key: str) -> None:
    assert translated(f"global.{key}='x'\n") is None
