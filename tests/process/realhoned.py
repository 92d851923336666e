"""The real daemon, whose real workers start with their libraries imported: realhoned.py ROOT [--drain] [--verbose]."""

from __future__ import annotations

import faulthandler
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
    warm.warm_children()
    layout = Layout(options.root)
    log.set_up(verbose=options.verbose)
    faulthandler.enable()
    return loop.start(layout, runner=ProcessRunner(layout, popen=warm.WorkerPopen), drain=options.drain)


if __name__ == "__main__":
    sys.exit(main())
