"""fakehoned that cannot rename anything to one path for as long as there is a file `short` in its root, which names an
error and the end of the path: `EMFILE jobs/2/spec.json`."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import fakehoned

SHORT = Path(sys.argv[1], "short")


def be_short(name: str, arguments: tuple[Any, ...]) -> None:
    if name != "os.rename" or not SHORT.exists():
        return
    error, end = SHORT.read_text().split()
    _, to, _, directory_fd = arguments
    path = str(to) if directory_fd == -1 else f"{Path('/proc/self/fd', str(directory_fd)).readlink()}/{to}"
    if path.endswith(end):
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number), path)


if __name__ == "__main__":
    sys.addaudithook(be_short)
    sys.exit(fakehoned.main())
