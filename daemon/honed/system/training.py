"""The training environment of the Debian package: torch and all other packages that workers need beside honed's own.

    /usr/lib/honed/<version>/         honed and its small environment, from the package
    /opt/honed-env/<device>-<hash>/   a training environment, made by honed-setup; never changed once it is complete
    /opt/honed-env/current            → the one of new processes

A honed-training.pth in honed's environment calls `enter` whenever its Python starts, so this module imports little. In
other installations (scripts/install, pip) all packages are in one environment, and nothing here applies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import site
import sys
from pathlib import Path

DIR = Path("/opt/honed-env")
CURRENT = DIR / "current"
#: The environment of this process, passed on to the processes that it starts: a worker and its children stay in one.
VARIABLE = "HONED_TRAINING_ENVIRONMENT"
#: The file written last into an environment, and locked (shared) by every process that uses it.
STAMP = "honed-content"
#: The message and the hint of all that needs a training environment and finds none.
MISSING = "no training environment is installed"
REMEDY = "run honed-setup as root"


def enter() -> None:
    """Add the training environment's packages to the end of sys.path, if there is one for this version of Python."""
    path = Path(os.environ.get(VARIABLE, ""))
    if path.parent != DIR or not path.is_dir():
        path = CURRENT.resolve()
    packages = packages_of(path)
    if packages.is_dir():
        os.environ[VARIABLE] = str(path)
        with contextlib.suppress(OSError):  # `honed-setup --remove-old` keeps what a process holds
            fcntl.flock(os.open(path / STAMP, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)
        site.addsitedir(str(packages))


def packages_of(environment: Path) -> Path:
    """Return the directory of an environment's packages for this version of Python."""
    return environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def recipe_dir() -> Path | None:
    """Return the directory that tells the content of a training environment; None where there is no package."""
    directory = Path(sys.prefix, "training")
    return directory if directory.is_dir() else None


def is_missing() -> bool:
    """Tell whether this is the package's honed, and there is no training environment for it yet."""
    return recipe_dir() is not None and not packages_of(CURRENT).is_dir()
