"""The commands that act on one instance: the system's own, a user's (`--user`), or one below a directory (`--root`)."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from honed.system import layout as layouts
from honed.system.layout import Layout, UserLayout


@dataclass(frozen=True)
class Commands:
    """Commands for people, as one types them in a shell."""

    start: str
    reload: str  #: honed's configuration
    resend: str  #: has undelivered metrics and notices tried again
    log: str  #: honed's messages
    send_log: str  #: those of its deliveries
    honectl: str


def of(layout: Layout) -> Commands:
    if layout.is_of_system:
        return Commands(
            start="systemctl start honed",
            reload="systemctl reload honed",
            resend="systemctl reload honed-send",
            log="journalctl -xeu honed",
            send_log="journalctl -u honed-send",
            honectl=_honectl(layout, ""),
        )
    if isinstance(layout, UserLayout) and _has_user_unit():
        return Commands(
            start="systemctl --user start honed",
            reload="systemctl --user reload honed",
            resend="systemctl --user reload honed",
            log="journalctl --user -xeu honed",
            send_log="journalctl --user -u honed",
            honectl=_honectl(layout, "--user"),
        )
    option = "--user" if isinstance(layout, UserLayout) else f"--root {shlex.quote(str(layout.root))}"
    return Commands(
        start=f"honed {option}",
        reload=f"kill -HUP the process of honed {option}",
        resend=f"kill -HUP the process of honed {option}",
        log=f"the output of honed {option}",
        send_log=f"the output of honed {option}",
        honectl=_honectl(layout, option),
    )


def pip(requirement: str) -> str:
    """Return the command that installs a package into the environment that runs this program."""
    return f"{shlex.quote(sys.executable)} -m pip install '{requirement}'"


def _honectl(layout: Layout, option: str) -> str:
    return f"honectl {option}" if option and layout.root != layouts.default_root() else "honectl"


def _has_user_unit() -> bool:
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    config_dir = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    is_there = Path(config_dir, "systemd/user/honed.service").exists()
    return is_there and bool(runtime_dir) and Path(runtime_dir, "systemd").is_dir()
