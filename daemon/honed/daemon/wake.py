"""Sleeping and waking of the loop: a byte in a pipe, written by threads, and by Python itself when a signal arrives."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal

from honed.daemon import signal_notes
from honed.system.pauses import Pauses


class Wake:
    """The files that the loop watches, the pipe among them, and the signals received."""

    def __init__(self) -> None:
        self.clock = Pauses()  #: knows of every sleep, and so of the time in which the loop could not run
        self.selector = selectors.DefaultSelector()
        self._is_woken = False
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._read_fd, selectors.EVENT_READ, self._drain)

    def sleep(self, seconds: float) -> bool:
        """Wait for a watched file, at most this long, and pass its events on. Returns True if `wake` was called, or a
        signal arrived."""
        self._is_woken = False
        with self.clock.asleep(seconds):
            ready = self.selector.select(seconds)
        for key, events in ready:
            key.data(events)
        return self._is_woken

    def wake(self) -> None:
        """Start the loop's next turn now; safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b".")

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read_fd, 4096)) == 4096:
                pass
        self._is_woken = True

    def follow(self, old_fd: int | None, new_fd: int | None) -> None:
        """Watch the new descriptor, whose owner looks at it in every turn, instead of the old one."""
        if old_fd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(old_fd)
        if new_fd is not None:
            self.selector.register(new_fd, selectors.EVENT_READ, lambda _events: None)

    def catch_signals(self) -> None:
        """Record signals from now on, and wake the loop with every one."""

        signal_notes.listen()
        signal.signal(signal.SIGCHLD, signal_notes.note)
        # The kernel sends SIGIO when somebody opens a file during the moment in which the watcher holds a lease on it.
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if signal_notes.has_noted():  # before
            self.wake()

    def signals(self) -> set[int]:
        """Return the signals received since the last call."""
        return signal_notes.take()

    def close(self) -> None:
        self.selector.close()
