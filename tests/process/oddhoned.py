"""fakehoned in which each opening of one file, or rename to it, raises an error: of a worker's result, an unforeseen
one; or with `odd:PATH:ERRNO` as the first argument, of a file whose path ends so, that OSError.
"""

from __future__ import annotations

import os
import sys

import fakehoned


def be_odd(name: str, arguments: tuple[object, ...]) -> None:
    found = arguments[0] if name == "open" else arguments[1] if name == "os.rename" else ""
    if str(found).endswith(path):
        number = int(errno)
        raise OSError(number, os.strerror(number), str(found)) if number else LookupError("odd")


if __name__ == "__main__":
    asked = sys.argv.pop(1) if sys.argv[1].startswith("odd:") else "odd:result.json:0"
    _, path, errno = asked.split(":")
    sys.addaudithook(be_odd)
    sys.exit(fakehoned.main())
