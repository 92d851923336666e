"""honed-send's delivery of rows, in order, from the cursor of the outbox on.

    outbox ── the next rows ──► POST ── 2xx ──► cursor advances
                                 ├── 413 ──► split in half; a single row: refused
                                 ├── 400, 422, … ──► split in half, until the bad row is alone: refused
                                 └── all else: no response, 5xx, 401, an HTML page ──► the same rows again, later

The cursor advances after the response. So a row arrives at least once, even after a crash, and a duplicate has the same
idempotency_key. While the cursor cannot be written, as on a full disk, nothing is sent: this process goes on from where
it was once it can.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from honed.send import outbox
from honed.send.delivery import Verdict
from honed.send.endpoint import Answer, Endpoint
from honed.send.lifetime import Lifetime
from honed.send.outbox import Row
from honed.send.refused_rows import RefusedRows
from honed.spec.config import ReportingConfig
from honed.system import durable, quote
from honed.system.backoff import Backoff
from honed.system.log import about
from honed.system.message import SEND_TROUBLE
from honed.system.notify import Notifier

log = logging.getLogger("honed.send.sender")

#: Maximum rows and bytes of one request.
BATCH_ROWS = 500
BATCH_BYTES = 512 * 1024
#: Seconds between checks of an empty outbox.
POLL_SEC = 1.0
#: Seconds between checks if no address is configured.
IDLE_SEC = 3600.0
#: Seconds between tries while the machine fails, at most.
MAX_FAULT_SEC = 30.0
#: Seconds between log messages about the same problem.
COMPLAIN_EVERY_SEC = 600.0


class RowSender:
    """Delivers an outbox, one request at a time, until it is stopped. `config` returns the current configuration;
    `obey_reload` loads another one if that was asked for, and returns True then."""

    def __init__(
        self,
        path: Path,
        config: Callable[[], ReportingConfig],
        endpoint: Endpoint,
        refused: RefusedRows,
        lifetime: Lifetime,
        notifier: Notifier,
        *,
        obey_reload: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._config = config
        self._endpoint = endpoint
        self._refused = refused
        self._lifetime = lifetime
        self._notifier = notifier
        self._obey_reload = obey_reload
        self._trouble = _Trouble(path, self._report, clock=clock)
        self._batch_bytes = BATCH_BYTES
        self._num_delivered = 0
        self._must_send_refused = False
        self._position = outbox.Position(0, 0)
        self._is_unwritten = False  # the cursor does not have the position yet

    def send_refused_later(self) -> None:
        """Send the refused rows once more as soon as there is an address: only a person knows if the server was
        fixed."""
        self._must_send_refused = True

    def deliver_all(self) -> None:
        """Deliver rows until asked to end; a fault of the machine is waited for."""
        self._position = outbox.read_cursor(self._path)
        backoff, fault = Backoff(POLL_SEC, MAX_FAULT_SEC), None
        while not self._lifetime.must_end():
            try:
                is_over = self._deliver_next()
                if fault is not None:
                    backoff.reset()
                    self._trouble.end()
                    fault = None
                if is_over:
                    return
            except OSError as error:
                if (fault := durable.machine_fault(error)) is None:
                    raise
                self._trouble.report(Answer(Verdict.LATER, 0, fault))
                self._lifetime.wait(backoff.next_sec(), at_the_end_sec=POLL_SEC)

    def _deliver_next(self) -> bool:
        """Deliver the next rows, or wait for some. Returns True once there is nothing left to do."""
        self._obey_reload()
        if self._is_unwritten:
            self._advance(self._position)
        if self._must_send_refused and self._config().address() is not None:
            self._must_send_refused = False
            self._must_send_refused |= not self._refused.send_again(self._send_until_answered)
        if self._config().address() is None:
            if self._lifetime.is_flushing:
                return True
            self._report("no metrics API is configured")
            self._lifetime.wait(IDLE_SEC)
            return False
        position = self._position
        rows, after, num_bad = outbox.read(self._path, position, max_rows=BATCH_ROWS, max_bytes=self._batch_bytes)
        if num_bad:
            log.warning("%s: skipped %d lines that are not rows: was there a power failure?", self._path, num_bad)
        if rows and not self._deliver(rows):
            return False
        if after != position:
            self._advance(after)
        elif self._lifetime.is_flushing:
            return True
        else:
            self._report("no rows are waiting")
            self._lifetime.wait(POLL_SEC)
        return False

    def _advance(self, position: outbox.Position) -> None:
        """Note that all rows before a position are settled. Raises OSError; then the cursor is written later."""
        self._position, self._is_unwritten = position, True
        outbox.write_cursor(self._path, position)
        self._is_unwritten = False

    def _deliver(self, rows: Sequence[Row]) -> bool:
        """Deliver rows or set them aside, in order, advancing the cursor. Returns False if asked to stop early."""
        pieces = [list(rows)]
        while pieces:
            piece = pieces.pop(0)
            answer = self._send_until_answered(piece)
            match answer.verdict:
                case Verdict.LATER:
                    return False
                case Verdict.REFUSED if len(piece) > 1:
                    if answer.status == http.client.REQUEST_ENTITY_TOO_LARGE:
                        self._batch_bytes = max(1, sum(row.num_bytes for row in piece) // 2)
                    middle = len(piece) // 2
                    pieces = [piece[:middle], piece[middle:], *pieces]
                    continue
                case Verdict.REFUSED if answer.status == http.client.CONFLICT:
                    log.info("%s already exists", piece[0].key)  # it was sent, and we died before the response
                case Verdict.REFUSED:
                    self._refused.set_aside(piece[0], answer)
                case Verdict.TAKEN:
                    self._num_delivered += len(piece)
            self._advance(piece[-1].end)
        return True

    def _send_until_answered(self, rows: Sequence[Row]) -> Answer:
        """Return a response that settles these rows; LATER only if we must stop, or no address is configured."""
        backoff = Backoff(self._config().retry_delay_sec, self._config().max_retry_delay_sec, has_jitter=True)
        while True:
            answer = self._endpoint.post(rows)
            if answer.verdict is not Verdict.LATER:
                self._trouble.end()
                return answer
            if self._lifetime.must_end():
                return answer
            self._trouble.report(answer)
            self._lifetime.wait(max(answer.retry_after_sec, backoff.next_sec()), at_the_end_sec=POLL_SEC)
            if self._lifetime.must_end():
                return answer
            if self._obey_reload():
                backoff.limit(self._config().max_retry_delay_sec)
                if self._config().address() is None:
                    return answer

    def _report(self, what: str) -> None:
        waiting = outbox.num_waiting_bytes(self._path)
        counts = f"{self._num_delivered} rows delivered, {self._refused.num_set_aside} rejected"
        self._notifier.status(f"{what}; {counts}, {waiting} bytes waiting")


class _Trouble:
    """The problem that prevents delivery: logged now and then, reported, and stored for `honectl doctor`."""

    def __init__(self, path: Path, report: Callable[[str], None], *, clock: Callable[[], float]) -> None:
        self._path = path
        self._report = report
        self._clock = clock
        self._since: float | None = None
        self._told_at: float | None = None
        self._is_noted: bool | None = None  # None: an earlier process may have noted one

    def report(self, answer: Answer) -> None:
        """Tell of a failed try."""
        now = self._clock()
        if self._since is None:
            self._since = now
        if self._told_at is None or now - self._told_at >= COMPLAIN_EVERY_SEC:
            self._told_at = now
            # A wrong token or address is for the administrator to fix; the rest recovers by itself.
            level = logging.ERROR if 400 <= answer.status < 500 and not answer.retry_after_sec else logging.WARNING
            log.log(level, "not delivered, retrying: %s", answer.text, extra=about(message=SEND_TROUBLE))
        self._report(f"not delivered, retrying: {answer.text}")
        self._note(quote.show(answer.text))

    def end(self) -> None:
        """Tell, after a delivery, that there is no problem any more."""
        if self._since is not None:
            log.info("delivering again, after %.0f s", self._clock() - self._since)
        self._since = self._told_at = None
        self._note(None)

    def _note(self, trouble: str | None) -> None:
        """Store the problem where `honectl doctor` finds it; only when it starts or ends, not at every try."""
        if self._is_noted is not (trouble is not None):
            with contextlib.suppress(OSError):  # e.g. a full disk: at the next try
                outbox.write_trouble(self._path, trouble)
                self._is_noted = trouble is not None
