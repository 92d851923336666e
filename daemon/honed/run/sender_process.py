"""honed-send as a child of the daemon, where it does not run as a unit. It ends with the daemon or soon after: the end
of its standard input tells it that the daemon has ended, for whatever reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from honed.run.process import DAEMON_VARIABLES
from honed.system import python
from honed.system.backoff import Backoff
from honed.system.layout import Layout

log = logging.getLogger(__name__)

#: Seconds before a honed-send that died is restarted, doubled each time up to the second value.
RESTART_SEC = (1.0, 60.0)


def is_a_unit(layout: Layout, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether honed-send.service delivers: systemd started us as the system's instance, which has no network."""
    return layout.root == Path("/") and environment.get("SYSTEMD_EXEC_PID") == str(os.getpid())


class SendProcess:
    """At most one honed-send child. `clock` is monotonic seconds."""

    def __init__(self, layout: Layout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._backoff = Backoff(*RESTART_SEC)

    def tend(self, *, is_wanted: bool) -> None:
        """Keep the child running while it is wanted; one that died is restarted after a pause."""
        if self._process is not None and (status := self._process.poll()) is not None:
            log.warning("honed-send exited with status %d; metrics and predictions stay in the outbox", status)
            self._forget()
            self._start_at = self._clock() + self._backoff.next_sec()
        if is_wanted and self._process is None and self._clock() >= self._start_at:
            self._start()
        elif not is_wanted and self._process is not None:
            self.stop()

    def reload(self) -> None:
        """Have the child reload its configuration."""
        self._backoff.reset()
        self._start_at = 0.0
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Stop the child now; undelivered rows stay in the outbox."""
        if self._process is not None:
            self._process.terminate()
            self._wait(5.0)

    def finish(self, timeout_sec: float) -> None:
        """Let the child deliver queued rows for that long, and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._wait(timeout_sec + 5.0)  # it may still be starting

    def _start(self) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in DAEMON_VARIABLES}
        command = python.module("honed.send.sender", "--until-eof", "--root", str(self._layout.root))
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        except OSError as error:
            log.error("honed-send cannot be started: %s", error)  # noqa: TRY400
            self._start_at = self._clock() + RESTART_SEC[1]

    def _wait(self, timeout_sec: float) -> None:
        assert self._process is not None
        try:
            self._process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process = None
