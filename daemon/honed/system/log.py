"""Logging: entries with custom fields if the journal reads our stderr, plain lines on stderr otherwise.

A log call names its subject: `log.info("job %d …", …, extra=about(job, message.STARTED))`. Log entries never contain
marked quotes of a job's files (quote.py), nor unchecked messages of exceptions, which may quote them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from honed.system import journal, quote
from honed.system.error import HonedError, said
from honed.system.journal import Journal
from honed.system.printable import printable

#: syslog(3) priorities.
PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}
STDERR_FD = 2
#: Maximum number of characters of an entry or a field; journald cuts lines that it reads at 48 KiB.
MAX_CHARS = 32_000
#: Exceptions of one traceback, each the cause of the next.
MAX_CHAIN = 8
#: The attribute of a log record that holds its fields.
FIELDS = "honed_fields"


def status_of(run: Callable[[], int], log: logging.Logger) -> int:
    """Return a program's exit status. Logs the errors that its user has to mend."""
    try:
        return run()
    except HonedError as error:
        log.critical("%s%s", error.message, f" ({error.hint})" if error.hint else "", stacklevel=2)
        return os.EX_CONFIG  # RestartPreventExitStatus= in the unit, as the next one
    except PermissionError as error:
        log.critical("%s: %s", error.filename, error.strerror, stacklevel=2)
        return os.EX_NOPERM


class Subject(Protocol):
    """A job, as far as a journal entry names it."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...


def about(job: Subject | int | None = None, message: str | None = None, **fields: object) -> dict[str, object]:
    """Return the `extra=` of a log call: the subject of the entry. `step=3` becomes HONED_STEP=3; None is left out.

    docs/monitoring.md lists the fields. By MESSAGE_ID `journalctl -x` explains the entry.
    """
    if isinstance(job, int):
        fields = {"job": job, **fields}
    elif job is not None:
        fields = {"job": job.id, "name": job.name, "state": job.state, **fields}
    named = {f"HONED_{key.upper()}": _plain(str(value)) for key, value in fields.items() if value not in {None, ""}}
    return {FIELDS: named | ({"MESSAGE_ID": message} if message else {})}


def _plain(text: str) -> str:
    """Hide quotes from job files, truncate the text, and replace characters that control a terminal."""
    text = quote.hide(text)
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}… ({len(text)} characters)"
    return printable(text, keep="\n")


def trace(error: BaseException) -> str:
    """Return a traceback that everybody may read: quotes in its messages are hidden."""
    parts: list[str] = []
    here: BaseException | None = error
    while here is not None and len(parts) < MAX_CHAIN:
        words = quote.hide(said(here))
        raised = f"{type(here).__qualname__}{f': {words}' if words else ''}"
        parts.append(
            "".join(["Traceback (most recent call last):\n", *traceback.format_tb(here.__traceback__), raised])
        )
        here = here.__cause__ or (None if here.__suppress_context__ else here.__context__)
    return "\n\nwhich led to:\n\n".join(reversed(parts))


def guard_tracebacks() -> None:
    """Print uncaught exceptions of any thread with `trace`: stderr is a log."""

    def log_uncaught(_kind: type[BaseException], error: BaseException | None, _places: TracebackType | None) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            print(trace(error), file=sys.stderr)

    sys.excepthook = log_uncaught
    threading.excepthook = lambda caught: log_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)


class _Tracer(logging.Formatter):
    def formatException(  # noqa: N802 - the library's name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return trace(ei[1]) if ei[1] is not None else ""


class _Formatter(_Tracer):
    def __init__(self, *, prefixed: bool) -> None:
        super().__init__("%(message)s" if prefixed else "%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._prefixed = prefixed

    def format(self, record: logging.LogRecord) -> str:
        # A reader of prefixed lines takes every line as one entry, so every line of a traceback needs the prefix. Later
        # lines are indented: text from a job or a worker must not look like an entry of ours.
        prefix = f"<{PRIORITIES.get(record.levelno, 6)}>" if self._prefixed else ""
        return prefix + f"\n{prefix}    ".join(_plain(super().format(record)).split("\n"))


class JournalHandler(logging.Handler):
    """Handler that sends records to the journal; records that it does not accept go to stderr, prefixed."""

    def __init__(self, to: Journal, *, identifier: str = "honed", fallback: TextIO | None = None) -> None:
        super().__init__()
        self._journal = to
        self._identifier = identifier
        self._fallback = logging.StreamHandler(fallback or sys.stderr)
        self._fallback.setFormatter(_Formatter(prefixed=True))
        self.setFormatter(_Tracer("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._journal.send(self._entry(record))
        except OSError:
            self._fallback.handle(record)

    def _entry(self, record: logging.LogRecord) -> dict[str, str | bytes | int | float]:
        return {
            "MESSAGE": _plain(self.format(record)),
            "PRIORITY": PRIORITIES.get(record.levelno, 6),
            "SYSLOG_IDENTIFIER": self._identifier,
            "SYSLOG_TIMESTAMP": time.strftime("%b %d %H:%M:%S ", time.localtime(record.created)),
            "CODE_FILE": record.pathname,
            "CODE_LINE": record.lineno,
            "CODE_FUNC": record.funcName or "",
            "HONED_LOGGER": record.name,
            **fields_of(record),
        }


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the fields of an entry that name its subject."""
    return {**_job_of(record), **getattr(record, FIELDS, {})}


def _job_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the job of an entry without fields: by our convention its text begins with it."""
    match record.args:
        case (int(number), *_) if record.msg.startswith("job %d"):
            return {"HONED_JOB": str(number)}
        case _:
            return {}


def set_up(*, verbose: bool, identifier: str = "honed") -> None:
    """Send all log records to the journal, or to stderr: prefixed unless it is a terminal."""
    guard_tracebacks()
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[_handler(identifier)], force=True)
    logging.getLogger("watchdog").setLevel(logging.WARNING)


def _handler(identifier: str = "honed") -> logging.Handler:
    if journal.is_read_from(STDERR_FD) and journal.SOCKET_PATH.exists():
        return JournalHandler(Journal(), identifier=identifier)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(prefixed="JOURNAL_STREAM" in os.environ or not sys.stderr.isatty()))
    return handler
