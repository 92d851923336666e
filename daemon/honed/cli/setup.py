"""`honed-setup`, as root: makes the training environment that the Debian package does without, and replaces it.

    /opt/honed-env/<device>-<hash>/   an environment; the hash is of its recipe, which the package has
    /opt/honed-env/<device>-<hash>/honed-content    written last: without it the environment is incomplete
    /opt/honed-env/current            → the one of new processes, replaced by one rename

An incomplete environment is continued. Workers stay in the environment in which they started.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from honed.cli import terminal
from honed.job import tree
from honed.system import argument, device, durable, environment, python, training
from honed.system.environment import say
from honed.system.error import EnvironmentInvalidError, HonedError, NotPermittedError
from honed.system.installed import WINDOWS

#: The versions of honed, from the package.
VERSIONS = Path("/usr/lib/honed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed-setup` command."""
    options = parser().parse_args(arguments)
    os.umask(0o022)
    try:
        if options.status:
            return status()
        with _alone():
            return remove_old() if options.remove_old else install(options)
    except HonedError as error:
        terminal.complain(error, prefix="honed-setup: ")
        return terminal.status_of(error)
    except OSError as error:
        print(f"honed-setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("honed-setup: interrupted; the next honed-setup continues", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="honed-setup",
        description="Install the training environment of honed's Debian package, as root, or continue to. Running jobs "
        "keep the environment in which they started.",
    )
    made.add_argument("--device", choices=("cpu", "cuda"), help="the build of torch (default: cuda if there is a GPU)")
    made.add_argument("--index-url", metavar="URL", help="take packages from this index instead of pip's default")
    made.add_argument("--find-links", metavar="DIR", help="take wheels from this directory, too")
    made.add_argument("--no-index", action="store_true", help="with --find-links: from there alone, without a network")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="list the environments; exit with 0 if one is ready to use")
    what.add_argument(
        "--remove-old", action="store_true", help="remove environments and versions of honed that nothing uses"
    )
    argument.add_version(made)
    return made


def install(options: argparse.Namespace) -> int:
    """Make the environment of the package's recipe, unless it is there, and switch to it. Returns the exit status."""
    recipe = _recipe()
    kind = options.device or ("cuda" if device.cuda_devices() else "cpu")
    at = training.DIR / f"{kind}-{_digest(recipe)}"
    if not (at / training.STAMP).exists():
        say(f"honed-setup: {at}: {'continued' if at.exists() else 'a new environment'}")
        _forget_unfinished(at)
        variables = {**os.environ, "PYTHON": os.path.realpath(sys.executable)}
        variables.pop(training.VARIABLE, None)
        given = {"PIP_INDEX_URL": options.index_url, "PIP_FIND_LINKS": options.find_links}
        variables |= {name: str(value) for name, value in given.items() if value}
        variables |= {"PIP_NO_INDEX": "1"} if options.no_index else {}
        command = [recipe / "scripts/setup", "--into", at, "--device", kind]
        if status := environment.run_shown(command, environment=variables):
            raise EnvironmentInvalidError(
                f"{at}: incomplete (exit status {status}); the lines above say why",
                hint="fix that and run honed-setup again, which continues; --index-url and --find-links name sources",
            )
        _check(at)
        if training.CURRENT.exists():
            before = training.packages_of(training.CURRENT.resolve())
            for line in environment.copy_metrics(before, training.packages_of(at)):
                say(f"honed-setup: {line}")
        durable.write(at / training.STAMP, f"{kind}\n".encode())
    if training.CURRENT.resolve() == at:
        say(f"honed-setup: {at}: installed already")
        return 0
    _switch(at)
    # honed and its children find the new packages; running jobs are units of their own.
    words = ["systemctl", "try-restart", "honed.service", "honed-send.service"]
    if Path("/run/systemd/system").is_dir():
        say(f"honed-setup: {' '.join(words)}")
        subprocess.run(words, check=False)
    say(f"honed-setup: done: new jobs use {at}; honectl doctor checks it")
    return 0


def status() -> int:
    """List the environments. Returns 0 if the one in use is complete and of the installed package, else 1."""
    digest, current = _digest(_recipe()), training.CURRENT.resolve()
    for at in _environments():
        users = list(environment.running_from(at))
        notes = [
            "in use" if at == current else "unused",
            "" if (at / training.STAMP).exists() else "incomplete: run honed-setup again",
            "" if at.name.endswith(digest) else "of another version of the package",
            f"processes: {', '.join(map(str, users))}" if users else "",
        ]
        say(f"{at}: {'; '.join(filter(None, notes))}")
    if not current.is_dir():
        say(f"{training.MISSING}: {training.REMEDY}")
    elif not is_current():
        say(f"the environment in use is of another version of the package: {training.REMEDY}")
    else:
        return 0
    return 1


def is_current() -> bool:
    """Tell whether the environment in use is the one of the installed package."""
    return training.CURRENT.resolve().name.endswith(_digest(_recipe()))


def remove_old() -> int:
    """Remove the environments and the versions of honed that no process uses, but not those for new processes."""
    kept = {training.CURRENT.resolve(), Path(sys.prefix).resolve(), (VERSIONS / "current").resolve(), VERSIONS / "dist"}
    versions = [path for path in VERSIONS.glob("*") if path.is_dir() and not path.is_symlink()]
    for at in [*_environments(), *versions]:
        if at in kept:
            continue
        if users := list(environment.running_from(at)):
            say(f"honed-setup: {at}: kept, process {', '.join(map(str, users))} runs from it")
        elif not is_free(at):
            say(f"honed-setup: {at}: kept, a process uses it")
        else:
            say(f"honed-setup: remove {at}")
            tree.clear(at)
    return 0


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock of honed-setup. Raises NotPermittedError for others than root, EnvironmentInvalidError if it runs
    already.
    """
    if os.geteuid() != 0:
        raise NotPermittedError("only root installs the training environment", hint="sudo honed-setup")
    durable.make_dir(training.DIR)
    fd = os.open(training.DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentInvalidError("another honed-setup is running", hint="wait for its end") from None
        yield
    finally:
        os.close(fd)


def _recipe() -> Path:
    if (directory := training.recipe_dir()) is None:
        raise EnvironmentInvalidError(
            "this honed is not from its Debian package: its environment has the training packages already",
            hint="scripts/install of a new version replaces it",
        )
    return directory


def _digest(recipe: Path) -> str:
    digest = hashlib.sha256(f"{sys.version_info.major}.{sys.version_info.minor}\0".encode())
    for path in sorted(path for path in recipe.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(recipe)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def _environments() -> list[Path]:
    return sorted(path for path in training.DIR.glob("*-*") if path.is_dir() and not path.is_symlink())


def _forget_unfinished(at: Path) -> None:
    """Have packages whose installation was cut off installed again: pip writes their RECORD last."""
    for info in at.glob("lib/python3.*/site-packages/*.dist-info"):
        if not (info / "RECORD").exists():
            tree.clear(info)


def _check(at: Path) -> None:
    """Raise EnvironmentInvalidError if honed does not find the packages of an environment."""
    code = (
        "import sys; from honed.system import installed; print(*[n for n in sys.argv[1:] if not installed.version(n)])"
    )
    command = python.code(code, *WINDOWS)
    done = subprocess.run(
        command, env={**os.environ, training.VARIABLE: str(at)}, capture_output=True, text=True, check=False
    )
    if missing := done.stdout.split() or done.stderr.split("\n")[-2:-1]:
        raise EnvironmentInvalidError(
            f"{at}: without {', '.join(missing)}",
            hint="run honed-setup again, or move it away first",
        )


def is_free(at: Path) -> bool:
    """Tell whether no process has entered an environment."""
    try:
        fd = os.open(at / training.STAMP, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # incomplete, or a version of honed
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _switch(at: Path) -> None:
    temporary_path = training.CURRENT.with_name(".current.new")
    temporary_path.unlink(missing_ok=True)
    temporary_path.symlink_to(at.name)
    temporary_path.rename(training.CURRENT)
    durable.sync_dir(training.DIR)


if __name__ == "__main__":
    sys.exit(main())
