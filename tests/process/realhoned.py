"""The real daemon, whose real workers begin with their libraries imported: realhoned.py ROOT [--drain] [--verbose]."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed import daemon, log
from honed.layout import Layout
from honed.process_runner import ProcessRunner


def main() -> int:
    options = daemon.parser().parse_args(["--root", *sys.argv[1:]])
    layout = Layout(options.root)
    log.set_up(verbose=options.verbose)
    faulthandler.enable()
    return daemon.start(layout, runner=ProcessRunner(layout, popen=warm.Popen), drain=options.drain)


if __name__ == "__main__":
    sys.exit(main())
