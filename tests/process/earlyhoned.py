"""The `honed` command, which gets a signal (HONED_TEST_SIGNAL) while it imports its loop."""

from __future__ import annotations

import os
import signal
import sys

from honed.daemon import starting


def interrupt(name: str, arguments: tuple[object, ...]) -> None:
    if name == "import" and arguments[0] == "honed.daemon.dispatch" and "HONED_TEST_SIGNAL" in os.environ:
        os.kill(os.getpid(), signal.Signals[os.environ.pop("HONED_TEST_SIGNAL")])


if __name__ == "__main__":
    sys.addaudithook(interrupt)
    sys.exit(starting.main(["--root", sys.argv[1]]))
