"""fakehoned that dies, as by a power cut, where it would start a worker, while there is a file `cut` in its root:
before the worker's shim is started, or in its place if the file says `late`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import fakehoned

from honed.run.process import ProcessRunner


def start(self: ProcessRunner, *arguments: Any, real: Any = ProcessRunner.start, **keys: Any) -> None:
    if (cut := Path(sys.argv[1], "cut")).exists():
        if cut.read_text() == "late":
            self._popen = lambda *_, **__: os._exit(137)
            real(self, *arguments, **keys)
        os._exit(137)
    real(self, *arguments, **keys)


if __name__ == "__main__":
    ProcessRunner.start = start  # type: ignore[method-assign]
    sys.exit(fakehoned.main())
