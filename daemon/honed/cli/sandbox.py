"""The one step by which `policy.allowed_paths` opens the sandbox of honed's units: `honectl sandbox`, as root.

    honed-job@.service.d/50-allowed-paths.conf      what jobs may write; directories in homes, which are hidden else
    honed.service.d, honed-check@.service.d/…       directories in homes, to read: jobs are checked before they start

Everything else is readable without it, as far as modes and ACLs let the users honed and honed-job. A unit takes it when
it starts next: honed is restarted, running jobs keep the sandbox that they have.

The units are opened to whatever lies at a path when they start. So a path whose name others than root can give to
another directory, or to a link, is refused: they would open to every job what they like.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from honed.spec.config import Config
from honed.system import access, durable
from honed.system.error import EnvironmentInvalidError, UsageError

UNIT_DIR = Path("/etc/systemd/system")
NAME = "50-allowed-paths.conf"
_HEAD = """\
# Made by `honectl sandbox` from policy.allowed_paths in honed.toml; run it again after a change there.
[Service]
"""


def dropins(config: Config) -> dict[str, str]:
    """For each unit the text of its drop-in, empty where it needs none. Raises UsageError for what cannot be opened."""
    allowed = [Path(path) for path in config.policy.allowed_paths or []]
    for path in allowed:
        if path == Path("/") or any(not char.isprintable() for char in str(path)):
            raise UsageError(f"policy.allowed_paths: {str(path)!r} cannot be opened", hint="name directories of data")
        if danger := danger_of(path):
            raise UsageError(f"policy.allowed_paths: {danger}", hint=MEND)
    hidden = [path for path in allowed if access.home_above(path) is not None]
    plain = [path for path in allowed if path not in hidden]
    # What lies in a hidden directory cannot be shown; in an empty one it can.
    homes = ["ProtectHome=tmpfs"] if hidden else []
    job = [*homes, *_lines("BindPaths", hidden), *_lines("ReadWritePaths", plain)]
    check = [*homes, *_lines("BindReadOnlyPaths", hidden)]
    return {
        unit: _HEAD + "\n".join(lines) + "\n" if lines else ""
        for unit, lines in (("honed-job@.service", job), ("honed-check@.service", check), ("honed.service", check))
    }


#: What is to be done where a path is in others' hands.
MEND = "name a directory in one that only root can write, such as /srv/data, or a whole home, such as /home/anna"


def danger_of(path: Path) -> str:
    """Why the units cannot be opened to a path, as a sentence: it is another's to replace. Empty where they can."""
    try:
        who = access.replacer(path)
    except OSError as error:
        is_ours_to_see = os.geteuid() == 0 or not isinstance(error, PermissionError)
        return f"{path}: {error.strerror}" if is_ours_to_see else ""
    return f"{path}: {who}, can put a link in its place, which would open any directory to every job" if who else ""


def _lines(setting: str, paths: Sequence[Path]) -> list[str]:
    """`-`: a directory that is not there, on a disk that is not mounted, does not keep the unit from starting."""
    return [f'{setting}="-{_quoted(path)}"' for path in paths]


def _quoted(path: Path) -> str:
    # In a unit `%` begins a specifier; within quotes `:` does not end the source of a bind.
    return str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def open_up(config: Config, *, unit_dir: Path = UNIT_DIR) -> list[Path]:
    """Write the drop-ins, or remove those that nothing is left of. Returns what changed."""
    changed = []
    for unit, text in dropins(config).items():
        path = unit_dir / f"{unit}.d" / NAME
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before == text:
            continue
        changed.append(path)
        if text:
            durable.make_dir(path.parent)
            durable.write(path, text.encode())
        else:
            path.unlink()
    return changed


def restart() -> None:
    """Have systemd read the units again, and honed start in its new sandbox; running jobs go on."""
    for command in (["daemon-reload"], ["try-restart", "honed.service"]):
        done = subprocess.run(["systemctl", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentInvalidError(
                f"systemctl {' '.join(command)}: {done.stderr.strip()}", hint="journalctl -u honed tells more"
            )
