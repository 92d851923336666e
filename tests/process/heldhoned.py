"""fakehoned that stops at the end of each turn, where it lists damaged entries, if its directory has the file `hold`:
at the N-th time it makes `at-N`, and goes on once there is `go-N`."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import fakehoned

ROOT = Path(sys.argv[1])
numbers = itertools.count(1)


def hold(name: str, arguments: tuple[object, ...]) -> None:
    if name in {"os.listdir", "os.scandir"} and str(arguments[0]).endswith("corrupt") and (ROOT / "hold").exists():
        number = next(numbers)
        (ROOT / f"at-{number}").touch()
        while not (ROOT / f"go-{number}").exists():
            time.sleep(0.01)


if __name__ == "__main__":
    sys.addaudithook(hold)
    sys.exit(fakehoned.main())
