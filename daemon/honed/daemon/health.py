"""The daemon's health: failing steps of the loop, and faults of the machine such as a full disk.

A machine's fault does not end the daemon: at start the daemon waits and executes itself again, later the loop retries.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from honed.daemon import signal_notes
from honed.system import message
from honed.system.failures import Failures
from honed.system.log import about
from honed.system.notify import Notifier

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between tries to start while the machine has to be fixed, and the variable that keeps the last fault.
START_AGAIN_SEC = 5.0
FAULT_VARIABLE = "HONED_MACHINE_FAULT"
#: Seconds between passes of the loop, at most, while one of its steps keeps failing.
MAX_BROKEN_PAUSE_SEC = 30.0


class Health:
    """The faults of the machine and of the steps of the loop. `clock` is monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.failures = Failures(log)  #: of the steps, and of their items
        self.fault = last_fault()  #: what keeps honed from working, also across restarts; empty if nothing does
        self.is_sound = True  #: in the last pass no step failed, unless the machine prevented it
        self._num_broken_turns = 0
        self._pause_until = 0.0

    def run(self, steps: Iterable[Callable[[], None]]) -> str:
        """Run these steps, whatever the others do. Returns the machine's fault that kept one of them, or one of
        their items, from working."""
        self.failures.begin()
        num_broken = num_unforeseen = 0
        for step in steps:
            num_before = self.failures.num_unforeseen
            if not self._is_done(step):
                num_broken += 1
                num_unforeseen += self.failures.num_unforeseen > num_before
        self.is_sound = not num_unforeseen
        # A step that keeps failing is retried ever more slowly, and the restart is left to systemd's watchdog. An item
        # that fails leaves its step in order, and does neither.
        self._num_broken_turns = self._num_broken_turns + 1 if num_broken else 0
        self._pause_until = self._clock() + min(self._num_broken_turns, MAX_BROKEN_PAUSE_SEC)
        return self.failures.fault

    def _is_done(self, step: Callable[[], None]) -> bool:
        """Run one step. Returns False if it failed as a whole."""
        name = getattr(getattr(step, "func", step), "__qualname__", "a step")
        self.failures.step = name
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other steps go on
            self.failures.note(name, error)
            return False
        finally:
            self.failures.step = ""
        self.failures.succeed(name)
        return True

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the answer to a question of the loop's between its steps, or `otherwise` if it fails."""
        with self.failures.alone(getattr(question, "__qualname__", "a question")):
            return question()
        return otherwise

    def pause(self) -> float:
        """Return the seconds for which the next pass has to wait, even if something wakes the loop."""
        return self._pause_until - self._clock()

    def note(self, fault: str, notify: Callable[[str], None]) -> None:
        """Report a machine fault such as a full disk once, and once more when it is over; `notify` gets the
        fault, or nothing."""
        if fault and not self.fault:
            log.error("honed cannot work: %s", fault, extra=about(message=message.DEGRADED))
            notify(fault)
        elif self.fault and not fault:
            log.info("honed can work again", extra=about(message=message.RECOVERED))
            notify("")
        self.fault = fault


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
    if signal_notes.is_asked_to_end():  # before these handlers were reset
        sys.exit(0)
    notifier = Notifier()
    notifier.ready()
    notifier.status(f"degraded: {fault}; retried every {START_AGAIN_SEC:.0f} s")
    deadline = time.monotonic() + START_AGAIN_SEC
    while (left := deadline - time.monotonic()) > 0:
        notifier.watchdog()
        time.sleep(min(left, notifier.watchdog_interval_sec or left))
    # By exec, not by another try in here: a lock or a socket of the first try must not block the second.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
