"""`honectl sandbox`, as root: opens the sandbox of honed's units to `policy.allowed_paths`.

    honed-job@.service.d/50-allowed-paths.conf      paths that jobs may write; directories in homes, else hidden
    honed.service.d, honed-check@.service.d/…       directories in homes, to read: jobs are checked before they start

All other paths are readable without it, as far as modes and ACLs let the users honed and honed-job. A drop-in takes
effect at a unit's next start: honed is restarted, running jobs keep their sandbox.

The units are opened to whatever lies at a path when they start. So a path is rejected if others than root can put
another directory, or a link, in its place: they could open any directory to every job.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from honed.cli import terminal
from honed.cli.instance import Instance
from honed.spec import config as configs
from honed.spec.config import Config
from honed.system import access, durable
from honed.system.error import EnvironmentInvalidError, UsageError

UNIT_DIR = Path("/etc/systemd/system")
NAME = "50-allowed-paths.conf"
_HEAD = (
    "# Made by `honectl sandbox` from policy.allowed_paths in honed.toml; run it again after changing that.\n"
    "[Service]\n"
)


def sandbox(instance: Instance, options: argparse.Namespace) -> int:
    config = configs.load(instance.layout)
    if options.dry_run:
        for unit, text in dropins(config).items():
            terminal.say(f"{unit}: {'nothing to open' if not text else ''}")
            print(text, end="")
        return 0
    if instance.layout.root != Path("/"):
        raise UsageError("only the instance at / runs in a sandbox", hint="omit --root and --user")
    changed = open_up(config)
    for path in changed:
        terminal.say(str(path))
    if not changed:
        terminal.say("the sandbox already matches policy.allowed_paths")
    else:
        restart()
        terminal.say("honed and all jobs started from now on run in the new sandbox")
    return 0


def dropins(config: Config) -> dict[str, str]:
    """Return the text of every unit's drop-in, empty if it needs none. Raises UsageError for a path that cannot be
    opened."""
    allowed = [Path(path) for path in config.policy.allowed_paths or []]
    for path in allowed:
        if path == Path("/") or any(not char.isprintable() for char in str(path)):
            raise UsageError(f"policy.allowed_paths: {str(path)!r} cannot be opened", hint="list directories of data")
        if danger := danger_of(path):
            raise UsageError(f"policy.allowed_paths: {danger}", hint=MEND)
    hidden = [path for path in allowed if access.home_above(path) is not None]
    plain = [path for path in allowed if path not in hidden]
    # A directory within a hidden home cannot be shown; within an empty home it can.
    homes = ["ProtectHome=tmpfs"] if hidden else []
    job = [*homes, *_lines("BindPaths", hidden), *_lines("ReadWritePaths", plain)]
    check = [*homes, *_lines("BindReadOnlyPaths", hidden)]
    return {
        unit: _HEAD + "\n".join(lines) + "\n" if lines else ""
        for unit, lines in (("honed-job@.service", job), ("honed-check@.service", check), ("honed.service", check))
    }


#: The remedy for a path that others can replace.
MEND = "use a directory inside one that only root can write, such as /srv/data, or a complete home, such as /home/anna"


def danger_of(path: Path) -> str:
    """Return, as a sentence, why the units cannot be opened to a path: others can replace it. Empty if they can."""
    try:
        who = access.replacer(path)
    except OSError as error:
        is_ours_to_see = os.geteuid() == 0 or not isinstance(error, PermissionError)
        return f"{path}: {error.strerror}" if is_ours_to_see else ""
    return (
        f"{path}: {who}, can replace it with a link, which would give every job access to any directory" if who else ""
    )


def _lines(setting: str, paths: Sequence[Path]) -> list[str]:
    """Return a setting's lines. With `-`, a missing directory, as on an unmounted disk, does not prevent the unit's
    start."""
    return [f'{setting}="-{_quoted(path)}"' for path in paths]


def _quoted(path: Path) -> str:
    # In a unit file `%` begins a specifier; within quotes `:` does not end the source of a bind.
    return str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def open_up(config: Config, *, unit_dir: Path = UNIT_DIR) -> list[Path]:
    """Write the drop-ins, and remove those that are now empty. Returns the changed paths."""
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
    """Reload systemd's units, and restart honed in its new sandbox; running jobs continue."""
    for command in (["daemon-reload"], ["try-restart", "honed.service"]):
        done = subprocess.run(["systemctl", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentInvalidError(
                f"systemctl {' '.join(command)}: {done.stderr.strip()}", hint="see journalctl -u honed"
            )
