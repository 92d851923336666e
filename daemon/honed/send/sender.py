"""honed-send: delivers the outbox to where honed.toml says. It is a separate program, the only one of an instance that
has network access while jobs run; nothing waits for it.

    rows           row_sender, endpoint    the main thread         the metrics API
    notices        notice_sender           a thread per receiver   webhooks and mail
    wandb's runs   wandb_sync              a thread                `wandb sync`
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from honed.send import endpoint, outbox
from honed.send.endpoint import Endpoint
from honed.send.lifetime import Lifetime
from honed.send.notice_sender import Messenger
from honed.send.refused_rows import RefusedRows
from honed.send.row_sender import RowSender
from honed.send.wandb_sync import Syncer
from honed.spec import config
from honed.spec.config import ReportingConfig
from honed.system import argument, python
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.error import EnvironmentInvalidError, HonedError
from honed.system.layout import Layout
from honed.system.notify import Notifier

log = logging.getLogger("honed.send.sender")

#: Seconds between checks whether another honed-send has ended.
POLL_SEC = 1.0


class Sender:
    """Delivers rows, notices and wandb's runs until it is stopped, and reloads its configuration when asked to."""

    def __init__(self, layout: Layout, *, stdin: IO[Any] | None = None, clock: Callable[[], float] = time.monotonic):
        self._layout = layout
        self._path = layout.outbox_dir
        self._reporting = ReportingConfig()
        self._notifier = Notifier()
        self._lifetime = Lifetime(self._notifier, flush_sec=lambda: self._reporting.flush_sec, stdin=stdin, clock=clock)
        self._endpoint = Endpoint(lambda: self._reporting, ping=self._notifier.watchdog)
        self._refused = RefusedRows(self._path, lambda: self._reporting, clock=clock)
        self._rows = RowSender(
            self._path,
            lambda: self._reporting,
            self._endpoint,
            self._refused,
            self._lifetime,
            self._notifier,
            obey_reload=self._obey_reload,
            clock=clock,
        )
        self._messenger = Messenger(layout)
        self._syncer = Syncer(self._path, reporting=lambda: self._reporting)

    def run(self) -> int:
        """Deliver until asked to stop. Returns the exit status."""
        self._lifetime.catch_signals(self._endpoint.hang_up)
        self._load()
        outbox.make_dirs(self._path)
        with self._alone() as is_alone:
            self._notifier.ready()
            if is_alone:
                self._syncer.start()
                try:
                    with self._messenger.running():
                        self._rows.deliver_all()
                        if self._lifetime.is_flushing:  # the daemon has ended; its notices may still be queued
                            self._messenger.finish(self._lifetime.must_end)
                finally:
                    self._syncer.finish(self._lifetime.left_sec())
        self._notifier.stopping()
        return 0

    def send_again(self) -> int:
        """Send each refused row once more. Returns 1 if any remains."""
        self._load()
        if self._reporting.address() is None:
            raise EnvironmentInvalidError(
                "no metrics API is configured", hint="set reporting.metrics_api_url in honed.toml"
            )
        self._refused.send_again(self._endpoint.post)
        return 1 if self._refused.has_any else 0

    def _load(self) -> None:
        configured = config.load(self._layout)
        self._reporting = configured.reporting
        self._messenger.reload(configured.notify)
        endpoint.log_settings(self._reporting)

    def _obey_reload(self) -> bool:
        if not self._lifetime.take_reload():
            return False
        self._notifier.reloading()
        try:
            self._load()
        except HonedError as error:
            log.error("the new configuration is invalid, so the old one stays in force: %s", error.message)  # noqa: TRY400
        else:
            log.info("configuration reloaded")
            self._rows.send_refused_later()
        self._notifier.ready()
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock: one process delivers at a time. The honed-send before a restart may be finishing."""
        fd = os.open(outbox.sender_dir(self._path) / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)
        try:
            has_said = False
            while not self._lifetime.must_end():
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not has_said:
                        log.info("waiting: another honed-send is running")
                    has_said = True
                    self._lifetime.wait(POLL_SEC, at_the_end_sec=POLL_SEC)
                    self._obey_reload()
                else:
                    yield True
                    return
            yield False
        finally:
            os.close(fd)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed-send` command."""
    python.protect()
    parser = argparse.ArgumentParser(
        prog="honed-send", description="Send metrics, predictions and notices to the addresses in honed.toml."
    )
    argument.add_root(parser)
    parser.add_argument(
        "--until-eof", action="store_true", help="exit at the end of standard input, after sending queued rows"
    )
    parser.add_argument("--again", action="store_true", help="retry rejected rows once, then exit")
    argument.add_verbose(parser)
    options = parser.parse_args(arguments)
    logs.set_up(verbose=options.verbose, identifier="honed-send")
    sender = Sender(layouts.of(options.root), stdin=sys.stdin if options.until_eof else None)
    return logs.status_of(sender.send_again if options.again else sender.run, log)


if __name__ == "__main__":
    sys.exit(main())
