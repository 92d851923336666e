"""Python for xdist: `python forked.py -u -c CODE` is a fork of one process that has imported what tests do.

Each process of tests would import the training stack for itself, which takes longer than to read all tests.
"""

from __future__ import annotations

import os
import signal
import sys

import warm

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork gets it, too, and tells when it has ended
    process = warm.TestsPopen([sys.executable, *sys.argv[1:]], stdin=0, stdout=1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):  # who reads is to see when the fork has ended
        os.dup2(null_fd, fd)
    status = process.wait()
    sys.exit(status if status >= 0 else 128 - status)
