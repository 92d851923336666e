"""The real daemon with the GPUs of tests/gpus.py, whose jobs' ranks start with their libraries imported:
rankedhoned.py ROOT [--drain]."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed.daemon import loop
from honed.run.process import ProcessRunner
from honed.system import log
from honed.system.layout import Layout


def main() -> int:
    options = loop.parser().parse_args(["--root", *sys.argv[1:]])
    layout = Layout(options.root)
    log.set_up(verbose=False)
    os.environ[warm.ADDRESS.format("RANKS")] = os.environ.pop("HONED_TEST_RANKS")
    return loop.start(layout, runner=ProcessRunner(layout, popen=warm.RankPopen), drain=options.drain)


if __name__ == "__main__":
    sys.exit(main())
