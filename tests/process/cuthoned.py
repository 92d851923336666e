"""fakehoned that is cut off while it counts a job's use of the devices: at the place that HONED_TEST_CUT names it ends
at once, as if killed, or with `full` one step fails once, as on a full disk."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import fakehoned

from honed.daemon.housekeeper import Housekeeper
from honed.job.usage import Usage


def cut(place: str) -> None:
    if place == os.environ.get("HONED_TEST_CUT"):
        os._exit(137)


def charge(self: Usage, *arguments: Any, real: Any = Usage.charge) -> None:
    cut("before it is charged")
    real(self, *arguments)
    cut("between charge and flush")


def flush(self: Usage, real: Any = Usage.flush) -> None:
    had_attempts = any("job" in line for line in self._unwritten)
    real(self)
    if had_attempts:
        cut("after the flush")


def remove_copies(*arguments: Any, real: Any = Housekeeper.remove_copies) -> None:
    if os.environ.get("HONED_TEST_CUT") == "full":
        del os.environ["HONED_TEST_CUT"]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a copy")
    real(*arguments)


if __name__ == "__main__":
    Usage.charge, Usage.flush = charge, flush  # type: ignore[method-assign]
    Housekeeper.remove_copies = remove_copies  # type: ignore[method-assign]
    sys.exit(fakehoned.main())
