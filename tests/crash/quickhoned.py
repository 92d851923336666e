"""The real daemon with the quick worker: `python quickhoned.py ROOT [--drain]`. Checks and reports start warm; shims
and workers, which honed finds by their command lines, cold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import warm
from crash import traced
from honed.daemon import loop
from honed.job import counters
from honed.run.process import ProcessRunner
from honed.system import device, log
from honed.system.layout import Layout


def main() -> int:
    traced.begin()
    warm.warm_children()
    layout = Layout(Path(sys.argv[1]))
    log.set_up(verbose=False)
    counters.WRITE_INTERVAL_SEC = 3600.0  # else its writes come by the clock, and shift the numbers of later calls
    if "HONED_TEST_HIT" in os.environ:
        sys.executable = str(Path(__file__).with_name("hitshim"))
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("quickworker.py"))]
    return loop.start(
        layout,
        runner=ProcessRunner(layout, command=command),
        probe=lambda _gpus: [device.cpu()],
        drain="--drain" in sys.argv,
    )


if __name__ == "__main__":
    sys.exit(main())
