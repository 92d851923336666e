"""The real daemon with the real Slurm runner, which starts the fake worker, or the real one with HONED_TEST_REAL."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROCESS_DIR = Path(__file__).parents[1] / "process"
sys.path[:0] = [str(PROCESS_DIR.parent), str(PROCESS_DIR)]

from honed.daemon import loop  # noqa: E402
from honed.run.slurm import SlurmRunner  # noqa: E402
from honed.spec import config  # noqa: E402
from honed.system import log  # noqa: E402
from honed.system.layout import Layout  # noqa: E402


def main() -> int:
    layout = Layout(Path(sys.argv[1]))
    log.set_up(verbose=False)
    is_real = "HONED_TEST_REAL" in os.environ
    command = None if is_real else [sys.executable, str(Path(__file__).with_name("rankworker.py"))]
    runner = SlurmRunner(layout, lambda: config.load(layout).slurm, command=command)
    return loop.start(layout, runner=runner, drain="--drain" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
