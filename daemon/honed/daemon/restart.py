"""Restarting on a machine that has to be fixed first: a full disk, a read-only file system."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import NoReturn

from honed.system import message
from honed.system.log import about
from honed.system.notify import Notifier

log = logging.getLogger(__name__)

#: Seconds between tries to start while the machine has to be fixed, and the variable that keeps the last fault.
START_AGAIN_SEC = 5.0
FAULT_VARIABLE = "HONED_MACHINE_FAULT"


def last_fault() -> str:
    """Return the fault of the previous try to start, or an empty string, and remove it from the environment."""
    return os.environ.pop(FAULT_VARIABLE, "")


def start_again_later(fault: str) -> NoReturn:
    """Report the machine's fault, wait, and start again in the same process: systemd does not see a restart."""
    if os.environ.get(FAULT_VARIABLE) != fault:
        log.error("honed cannot work: %s", fault, extra=about(message=message.DEGRADED))
    os.environ[FAULT_VARIABLE] = fault
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    notifier = Notifier()
    notifier.ready()
    notifier.status(f"degraded: {fault}; tried again every {START_AGAIN_SEC:.0f} s")
    deadline = time.monotonic() + START_AGAIN_SEC
    while (left := deadline - time.monotonic()) > 0:
        notifier.watchdog()
        time.sleep(min(left, notifier.watchdog_interval_sec or left))
    # By exec, not by another try in here: a lock or a socket of the first try must not block the second.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
