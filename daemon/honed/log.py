"""Logging to stderr: a line an entry, with the journal's priority in front where the journal reads it."""

from __future__ import annotations

import logging
import os
import sys

#: syslog(3) priorities.
PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}


class _Formatter(logging.Formatter):
    def __init__(self, *, prefixed: bool) -> None:
        super().__init__("%(message)s" if prefixed else "%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._prefixed = prefixed

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        # The journal takes one line as one entry, so every line of a traceback needs its prefix; and what a job file
        # says must not paint the administrator's terminal.
        lines = ["".join(char if char.isprintable() else "\ufffd" for char in line) for line in text.split("\n")]
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>" if self._prefixed else ""
        return "\n".join(prefix + line for line in lines)


def set_up(*, verbose: bool) -> None:
    """Send every logger's records to stderr; prefixed unless a person sits there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(prefixed="JOURNAL_STREAM" in os.environ or not sys.stderr.isatty()))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    logging.getLogger("watchdog").setLevel(logging.WARNING)
