"""fakehoned that cannot open some files for as long as there is a file `short` in its root, which names an error and
the end of their paths: `EMFILE jobs/2/.spec.json.tmp`."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import fakehoned

SHORT = Path(sys.argv[1], "short")


def be_short(name: str, arguments: tuple[object, ...]) -> None:
    if name != "open" or str(arguments[0]) == str(SHORT) or not SHORT.exists():
        return
    error, end = SHORT.read_text().split()
    if str(arguments[0]).endswith(end):
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number), str(arguments[0]))


if __name__ == "__main__":
    sys.addaudithook(be_short)
    sys.exit(fakehoned.main())
