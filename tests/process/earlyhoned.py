"""The `honed` command, which gets a signal (HONED_TEST_SIGNAL) while it imports its loop, or as it opens the file that
HONED_TEST_OPENS names."""

from __future__ import annotations

import os
import signal
import sys

from honed.daemon import starting


def interrupt(name: str, arguments: tuple[object, ...]) -> None:
    opens = os.environ.get("HONED_TEST_OPENS")
    is_time = name == "open" and arguments[0] == opens if opens else arguments[:1] == ("honed.daemon.dispatch",)
    if is_time and "HONED_TEST_SIGNAL" in os.environ:
        os.kill(os.getpid(), signal.Signals[os.environ.pop("HONED_TEST_SIGNAL")])


if __name__ == "__main__":
    sys.addaudithook(interrupt)
    sys.exit(starting.main(["--root", sys.argv[1]]))
