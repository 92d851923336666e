"""The real daemon, whose real workers have a memory limit: `limitedhoned.py ROOT --bytes N [--drain]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed.daemon import loop
from honed.run.process import ProcessRunner
from honed.system import device, log
from honed.system.layout import Layout


def main() -> int:
    warm.warm_children()
    layout = Layout(Path(sys.argv[1]))
    log.set_up(verbose=False)
    num_bytes = sys.argv[sys.argv.index("--bytes") + 1]
    command = [sys.executable, str(Path(__file__).with_name("limitedworker.py")), num_bytes]
    runner = ProcessRunner(layout, command=command, popen=warm.WorkerPopen)
    return loop.start(layout, runner=runner, probe=lambda _gpus: [device.cpu()], drain="--drain" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
