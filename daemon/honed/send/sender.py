"""honed-send: delivers the outbox to an HTTP endpoint. It is a separate program, the only one of an instance that has
network access while jobs run; nothing waits for it.

    outbox ── the next rows ──► POST ── 2xx ──► cursor advances
                                 ├── 413 ──► split in half; a single row: refused
                                 ├── 400, 422, … ──► split in half, until the bad row is alone: refused
                                 └── all else: no response, 5xx, 401, an HTML page ──► the same rows again, later

The cursor advances after the response. So a row arrives at least once, even after a crash, and a duplicate has the same
idempotency_key. The body, by POST, UTF-8, with `Authorization: Bearer …`:

    {"metrics": [{idempotency_key, job_id, user_id, honed_job, attempt, step, epoch, name, value, created_at}],
     "predictions": [{idempotency_key, job_id, user_id, honed_job, attempt, step, epoch, sample_index, prompt,
                      ground_truth, prediction, created_at}]}
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from honed import __version__
from honed.send import outbox
from honed.send.notice_sender import Messenger
from honed.send.outbox import Row
from honed.send.wandb_sync import Syncer
from honed.spec import config
from honed.spec.config import ReportingConfig
from honed.system import durable, quote, secret
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.error import EnvironmentInvalidError, HonedError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import ROW_REFUSED, SEND_TROUBLE
from honed.system.notify import Notifier

log = logging.getLogger("honed.send.sender")

#: Maximum rows and bytes of one request.
BATCH_ROWS = 500
BATCH_BYTES = 512 * 1024
#: Seconds between checks of an empty outbox.
POLL_SEC = 1.0
#: Seconds between checks if no address is configured.
IDLE_SEC = 3600.0
#: Seconds between log messages about the same problem.
COMPLAIN_EVERY_SEC = 600.0
#: Bytes of a response that are read.
MAX_ANSWER_BYTES = 1024 * 1024
#: Statuses that concern us or the moment, not the rows: the same rows may be accepted later. A wrong address and an
#: expired token are the administrator's to fix, and must not lose a row.
NOT_ABOUT_THE_ROWS = {401, 402, 403, 404, 405, 407, 408, 410, 421, 423, 425, 426, 429, 451}
#: The credentials that hold the token: the name that jobs used before honed, and the unit's own.
CREDENTIALS = ("JOB_TOKEN", "honed.metrics-token")
#: The longest `Retry-After` that is respected, in seconds.
MAX_RETRY_AFTER_SEC = 3600.0


class Verdict(Enum):
    """The meaning of a response for the rows that were sent."""

    DELIVERED = auto()
    TOO_LARGE = auto()  #: send fewer at a time
    REFUSED = auto()  #: at least one of them will never be accepted
    LATER = auto()


@dataclass(frozen=True)
class Answer:
    """The response; `status` is 0 if there was none. `retry_after_sec` is set if the server sent Retry-After."""

    verdict: Verdict
    status: int
    text: str  #: quotes of the server's words are marked
    retry_after_sec: float = 0.0


class Sender:
    """Delivers an outbox, one request at a time, until it is stopped."""

    def __init__(self, layout: Layout, *, stdin: IO[Any] | None = None, clock: Callable[[], float] = time.monotonic):
        self._layout = layout
        self._stdin = stdin  #: its end means that the daemon that started us has ended
        self._clock = clock
        self._path = layout.outbox_dir
        self._config = ReportingConfig()
        self._batch_bytes = BATCH_BYTES
        self._signals: set[int] = set()
        self._ends_at: float | None = None
        self._notifier = Notifier()
        self._connection: socket.socket | None = None
        self._complained_at: float | None = None
        self._failing_since: float | None = None
        self._noted: str | None = None
        self._noted_once = False
        self._is_again_asked = False
        self._refused_at: dict[str, float] = {}  # when a response was last logged, by its text
        self._refused_bytes: int | None = None  # the total; computed at the first refused row
        self._syncer = Syncer(self._path, reporting=lambda: self._config)
        self._counts = {"num_delivered": 0, "num_refused": 0}
        self._messenger = Messenger(layout)
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Deliver until told to stop. Returns the exit status."""
        self._catch_signals()
        self._load()
        outbox.make_dirs(self._path)
        with self._alone() as is_alone:
            self._notifier.ready()
            if is_alone:
                self._syncer.start()
                try:
                    with self._messenger.running():
                        self._deliver_all()
                        if self._ends_at is not None:  # the daemon has ended; its notices may still be queued
                            self._messenger.finish(self._must_end)
                finally:
                    self._syncer.finish(self._left_sec())
        self._notifier.stopping()
        return 0

    def _deliver_all(self) -> None:
        position = outbox.read_cursor(self._path)
        while not self._must_end():
            self._obey_reload()
            if self._is_again_asked and self._config.address() is not None:
                self._is_again_asked = False
                self._send_refused()  # the server may have been fixed; only a person knows
            if self._config.address() is None:
                if self._ends_at is not None:
                    return
                self._report("no metrics API is configured")
                self._wait(IDLE_SEC)
                continue
            rows, after, num_bad = outbox.read(self._path, position, max_rows=BATCH_ROWS, max_bytes=self._batch_bytes)
            if num_bad:
                log.warning(
                    "%s: %d lines that are no rows are passed over: did the machine lose power?", self._path, num_bad
                )
            if rows and not self._deliver(rows):
                position = outbox.read_cursor(self._path)
                continue
            if after != position:
                outbox.write_cursor(self._path, after)
                position = after
            elif self._ends_at is not None:
                return
            else:
                self._report("nothing waits")
                self._wait(POLL_SEC)

    def _deliver(self, rows: Sequence[Row]) -> bool:
        """Deliver rows or set them aside, in order, advancing the cursor. Returns False if told to stop early."""
        pieces = [list(rows)]
        while pieces:
            piece = pieces.pop(0)
            answer = self._send_until_answered(piece)
            match answer.verdict:
                case Verdict.LATER:
                    return False
                case Verdict.TOO_LARGE | Verdict.REFUSED if len(piece) > 1:
                    if answer.verdict is Verdict.TOO_LARGE:
                        self._batch_bytes = max(1, sum(row.num_bytes for row in piece) // 2)
                    middle = len(piece) // 2
                    pieces = [piece[:middle], piece[middle:], *pieces]
                    continue
                case Verdict.REFUSED if answer.status == http.client.CONFLICT:
                    log.info("%s is there already", piece[0].key)  # it was sent, and we died before the response
                case Verdict.TOO_LARGE | Verdict.REFUSED:
                    self._set_aside(piece[0], answer)
                case Verdict.DELIVERED:
                    self._counts["num_delivered"] += len(piece)
            outbox.write_cursor(self._path, piece[-1].end)
        return True

    def _send_until_answered(self, rows: Sequence[Row]) -> Answer:
        """Return a response that settles these rows; LATER only if we must stop, or no address is configured."""
        delay_sec = self._config.retry_delay_sec
        while True:
            answer = self.post(rows)
            if answer.verdict is not Verdict.LATER:
                self._recovered()
                return answer
            if self._must_end():
                return answer
            self._complain(answer)
            # Jitter, so that many machines do not retry at the same moment.
            pause_sec = max(answer.retry_after_sec, delay_sec * random.uniform(0.5, 1))
            self._wait(pause_sec, at_the_end_sec=POLL_SEC)
            if self._must_end():
                return answer
            delay_sec = min(2 * delay_sec, self._config.max_retry_delay_sec)
            if self._obey_reload() and self._config.address() is None:
                return answer

    def _set_aside(self, row: Row, answer: Answer) -> None:
        """Store a rejected row with the response; its file name is its key, so that a repetition overwrites it."""
        directory = outbox.refused_dir(self._path)
        self._counts["num_refused"] += 1
        # Log one message for many rows of one kind: an endpoint that rejects everything must not flood the journal.
        said = quote.hide(answer.text)
        is_new = self._clock() - self._refused_at.get(said, -COMPLAIN_EVERY_SEC) >= COMPLAIN_EVERY_SEC
        if is_new:
            self._refused_at = {**self._refused_at, said: self._clock()} if len(self._refused_at) < 100 else {}
        log.log(
            logging.ERROR if is_new else logging.DEBUG,
            "a %s of job %s (step %s) is refused with %d and set aside in %s: %s",
            row.data["kind"],
            row.data.get("job_id"),
            row.data.get("step"),
            answer.status,
            directory,
            said,
            extra=about(row.data.get("honed_job"), ROW_REFUSED, step=row.data.get("step")),
        )
        if self._refused_bytes is None:
            self._refused_bytes = sum(path.stat().st_size for path in directory.glob("*.json"))
        if self._refused_bytes + row.num_bytes > self._config.max_outbox_bytes:
            log.error("%s holds reporting.max_outbox_bytes: %s is dropped; honed.db has it", directory, row.key)
            return
        self._refused_bytes += row.num_bytes
        record = {"status": answer.status, "answer": quote.show(answer.text), "row": row.data}
        durable.write_json(directory / f"{row.key}.json", record, mode=0o640)

    def send_again(self) -> int:
        """Send each rejected row once more, one per request. Returns 1 if any remains."""
        self._load()
        if self._config.address() is None:
            raise EnvironmentInvalidError(
                "no metrics API is configured", hint="reporting.metrics_api_url in honed.toml"
            )
        return 0 if self._send_refused() else 1

    def _send_refused(self) -> bool:
        """Return True if no rejected row remains. Stops as soon as the server is down; the rest then remains."""
        self._refused_bytes = None
        num_sent, paths = 0, sorted(outbox.refused_dir(self._path).glob("*.json"))
        for path in paths:
            data = json.loads(path.read_bytes())["row"]
            answer = self.post([Row(data, outbox.Position(0, 0), 0)])
            if answer.verdict is Verdict.DELIVERED or answer.status == http.client.CONFLICT:
                path.unlink()
                num_sent += 1
            elif answer.verdict is Verdict.LATER:
                log.warning("not delivered: %s", answer.text)
                break
            else:
                log.warning("%s: %s", path.name, answer.text)
        if paths:
            log.info("%d of %d rows that had been refused are delivered", num_sent, len(paths))
        return num_sent == len(paths)

    # -- one request --------------------------------------------------------------------------------------------------

    def post(self, rows: Sequence[Row]) -> Answer:
        """Send rows once; errors are returned as answers, too."""
        address = self._config.address() or ""
        self._notifier.watchdog()
        try:
            headers = self._headers(rows)
            return self._exchange(address, _body(rows), headers)
        except EnvironmentInvalidError as error:
            return Answer(Verdict.LATER, 0, error.message)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: a malformed response that http.client does not check for.
            return Answer(Verdict.LATER, 0, f"{_shown(address)}: {type(error).__name__}: {error}")

    def _headers(self, rows: Sequence[Row]) -> dict[str, str]:
        keys = "".join(row.key for row in rows)
        headers = {
            "Content-Type": "application/json; charset=utf-8",
            "Accept": "application/json",
            "User-Agent": f"honed/{__version__}",
            "Idempotency-Key": hashlib.sha256(keys.encode()).hexdigest()[:32],
            "Connection": "close",
        }
        token = read_token(self._config)
        return headers | ({"Authorization": f"Bearer {token}"} if token else {})

    def _exchange(self, address: str, body: bytes, headers: dict[str, str]) -> Answer:
        parts = urlsplit(address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._config.timeout_sec)
        try:
            connection.connect()
            with self._deadline(connection.sock):
                connection.request(
                    "POST", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}", body, headers
                )
                response = connection.getresponse()
                data = response.read(MAX_ANSWER_BYTES)
            if response.length and len(data) < MAX_ANSWER_BYTES:
                raise http.client.IncompleteRead(data, response.length)
            return judge(response, data)
        finally:
            connection.close()

    @contextlib.contextmanager
    def _deadline(self, connection: socket.socket) -> Iterator[None]:
        """Limit the whole exchange to timeout_sec: a socket's own timeout restarts with every received byte."""
        self._connection = connection
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            _hang_up(connection)

        timer = threading.Timer(self._config.timeout_sec, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._connection = None
        if is_over.is_set():
            raise TimeoutError("no whole answer in time")

    # -- when to do what ----------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        def note(number: int, _frame: object) -> None:
            self._signals.add(number)
            if number != signal.SIGHUP and self._connection is not None:
                _hang_up(self._connection)  # interrupts a read; the rows got no response and are sent again

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, note)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)

    def _must_end(self) -> bool:
        self._look(0)
        if self._signals & {signal.SIGTERM, signal.SIGINT}:
            return True
        return self._ends_at is not None and self._clock() >= self._ends_at

    def _left_sec(self) -> float:
        """Return the seconds left for the last deliveries; 0 if we were told to stop."""
        return max(0.0, self._ends_at - self._clock()) if self._ends_at is not None and not self._signals else 0.0

    def _wait(self, seconds: float, *, at_the_end_sec: float = 0.0) -> None:
        """Sleep; a signal wakes us. Once the daemon has ended, sleep at most `at_the_end_sec`."""
        began = self._clock()
        while not self._signals:
            patience = seconds if self._ends_at is None else min(seconds, at_the_end_sec)
            if (left := began + patience - self._clock()) <= 0:
                return
            self._notifier.watchdog()
            self._look(min(left, (self._notifier.watchdog_interval_sec or left) / 2))

    def _look(self, seconds: float) -> None:
        """Check whether the daemon has ended; returns before `seconds` have passed for that and for a signal."""
        watched: list[Any] = [self._wake_read_fd]
        if self._stdin is not None and self._ends_at is None:
            watched.append(self._stdin)
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake_read_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read_fd, 4096)
        if self._stdin is not None and self._stdin in ready and not os.read(self._stdin.fileno(), 4096):
            self._ends_at = self._clock() + self._config.flush_sec

    def _load(self) -> None:
        configured = config.load(self._layout)
        self._config = configured.reporting
        self._messenger.reload(configured.notify)
        address = self._config.address()
        if address is None:
            log.info("no metrics API is configured: nothing is sent")
        else:
            log.info("sends metrics and predictions to %s", _shown(address))
            _warn_of(self._config, address)

    def _obey_reload(self) -> bool:
        if signal.SIGHUP not in self._signals:
            return False
        self._signals.discard(signal.SIGHUP)
        self._notifier.reloading()
        try:
            self._load()
        except HonedError as error:
            log.error("the configuration is wrong and the old one stays: %s", error.message)  # noqa: TRY400
        else:
            log.info("configuration reloaded")
            self._is_again_asked = True
        self._notifier.ready()
        return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock: one process delivers at a time. An earlier honed-send may be finishing."""
        fd = os.open(outbox.sender_dir(self._path) / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o640)
        try:
            has_said = False
            while not self._must_end():
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not has_said:
                        log.info("waits: another honed-send is at work")
                    has_said = True
                    self._wait(POLL_SEC, at_the_end_sec=POLL_SEC)
                    self._obey_reload()
                else:
                    yield True
                    return
            yield False
        finally:
            os.close(fd)

    # -- what is said -------------------------------------------------------------------------------------------------

    def _complain(self, answer: Answer) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if self._complained_at is None or now - self._complained_at >= COMPLAIN_EVERY_SEC:
            self._complained_at = now
            # A wrong token or address is for the administrator to fix; the rest recovers by itself.
            level = logging.ERROR if 400 <= answer.status < 500 and not answer.retry_after_sec else logging.WARNING
            log.log(level, "not delivered, and tried again: %s", answer.text, extra=about(message=SEND_TROUBLE))
        self._report(f"not delivered, and tried again: {answer.text}")
        self._note(quote.show(answer.text))

    def _recovered(self) -> None:
        if self._failing_since is not None:
            log.info("delivers again, after %.0f s", self._clock() - self._failing_since)
        self._failing_since = self._complained_at = None
        self._note(None)

    def _note(self, trouble: str | None) -> None:
        """Store the delivery problem where `honectl doctor` finds it; only when it starts or ends, not at each try."""
        if (trouble is None) == (self._noted is None) and self._noted_once:
            return
        self._noted, self._noted_once = trouble, True
        outbox.write_trouble(self._path, trouble)

    def _report(self, what: str) -> None:
        waiting = outbox.num_waiting_bytes(self._path)
        counts = f"{self._counts['num_delivered']} rows delivered, {self._counts['num_refused']} refused"
        self._notifier.status(f"{what}; {counts}, {waiting} bytes wait")


def judge(response: http.client.HTTPResponse, data: bytes) -> Answer:
    """Judge the meaning of a response for the rows that were sent."""
    status, text = response.status, f"{response.status} {response.reason}"
    said = " ".join(data[:500].decode(errors="replace").split())
    said = "".join(char if char.isprintable() else "\ufffd" for char in said)
    text += f": {quote.mark(said)}" if said else ""  # it may repeat the rows, as FastAPI's 422 does
    match status:
        case _ if 200 <= status < 300:
            if (why := _is_no_receipt(response, data)) is not None:
                return Answer(Verdict.LATER, status, f"{why}: {text[:200]}")
            return Answer(Verdict.DELIVERED, status, text)
        case http.client.REQUEST_ENTITY_TOO_LARGE:
            return Answer(Verdict.TOO_LARGE, status, text)
        case _ if 400 <= status < 500 and status not in NOT_ABOUT_THE_ROWS:
            return Answer(Verdict.REFUSED, status, text)
        case _:
            return Answer(Verdict.LATER, status, text, _retry_after(response.getheader("Retry-After")))


def _is_no_receipt(response: http.client.HTTPResponse, data: bytes) -> str | None:
    """Return why a 2xx does not prove delivery, or None: a proxy's login page has status 200, too."""
    kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    if kind == "text/html":
        return "the answer is a page for people"
    if kind == "application/json" and 0 < len(data) < MAX_ANSWER_BYTES:
        try:
            json.loads(data)
        except ValueError:
            return "the answer is cut short or garbled"
    return None


def _retry_after(value: str | None) -> float:
    """Return the Retry-After in seconds; for its other form, a date, 0: our own delay applies then."""
    return min(float(value), MAX_RETRY_AFTER_SEC) if value is not None and value.strip().isdecimal() else 0.0


def read_token(reporting: ReportingConfig) -> str | None:
    """Return the bearer token. Raises EnvironmentInvalidError."""
    path = token_path(reporting)
    return secret.read(path, "token") if path is not None else None


def token_path(reporting: ReportingConfig) -> Path | None:
    """Return the path of systemd's credential, or of the file that the configuration names."""
    return secret.credential(*CREDENTIALS) or (Path(reporting.token_file) if reporting.token_file else None)


def _warn_of(reporting: ReportingConfig, address: str) -> None:
    """Log warnings about a configuration that works but is unwise."""
    path, parts = token_path(reporting), urlsplit(address)
    if path is None:
        log.info("no token is configured: rows are sent without one")
        if "JOB_TOKEN" in os.environ:
            log.warning(
                "JOB_TOKEN in the environment is not read: every child would have it. Put it into a file, "
                "and name that as reporting.token_file"
            )
        return
    with contextlib.suppress(OSError):
        if path.stat().st_mode & 0o004:
            log.warning("%s can be read by everyone: chmod o-r %s", path, path)
    if parts.scheme == "http" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
        log.warning("%s: the token goes over the network in the clear; take https", _shown(address))


def _body(rows: Sequence[Row]) -> bytes:
    of_kind: dict[str, list[dict[str, Any]]] = {"metric": [], "prediction": []}
    for row in rows:
        of_kind.setdefault(str(row.data["kind"]), []).append(
            {key: value for key, value in row.data.items() if key != "kind"}
        )
    named = {f"{kind}s": found for kind, found in of_kind.items()}
    return json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _hang_up(connection: socket.socket) -> None:
    # socket's method, not ssl's, which would take the session away from the reading thread.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _shown(address: str) -> str:
    """Return an address without its query, which may contain secrets."""
    return address.partition("?")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed-send` command."""
    parser = argparse.ArgumentParser(
        prog="honed-send", description="Send metrics, predictions and notices to the addresses in honed.toml."
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=layouts.default_root(),
        help="root directory of the instance (default: $HONED_ROOT or /)",
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="exit at the end of standard input, after sending queued rows"
    )
    parser.add_argument("--again", action="store_true", help="retry rejected rows once, then exit")
    parser.add_argument("--verbose", action="store_true", help="log debug messages")
    options = parser.parse_args(arguments)
    logs.set_up(verbose=options.verbose, identifier="honed-send")
    sender = Sender(layouts.of(options.root), stdin=sys.stdin if options.until_eof else None)
    try:
        return sender.send_again() if options.again else sender.run()
    except HonedError as error:
        log.critical("%s%s", error.message, f" ({error.hint})" if error.hint else "")
        return 78  # EX_CONFIG: RestartPreventExitStatus= in the unit
    except PermissionError as error:
        log.critical("%s: %s", error.filename, error.strerror)
        return 77  # EX_NOPERM


if __name__ == "__main__":
    sys.exit(main())
