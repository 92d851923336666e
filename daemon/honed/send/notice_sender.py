"""honed-send's delivery of notices: each is sent by webhook, chat or mail, and then removed.

    notices/<key>.json ── POST, Apprise, SMTP ── accepted (receipt.py) ──► removed
                             ├── 400, 422, …, an unknown mailbox ──► refused/, with the response
                             └── all else: no response, 5xx, 401, a login page ──► again, ever later, then, refused/

One thread per receiver with queued notices: a receiver that is down or slow delays neither the others nor the metrics.
A notice is removed after the response, so it arrives at least once; a duplicate has the same Idempotency-Key or
Message-ID. One that was answered and cannot be removed, as on a file system that became read-only, is not sent again by
this process: its removal is tried again.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import logging
import smtplib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as MAIL_POLICY
from pathlib import Path
from urllib.parse import urlsplit

from honed.send import chat, delivery, notification, receipt
from honed.send.delivery import Client, Verdict, deadline
from honed.send.notification import Notice
from honed.spec import recipient
from honed.spec.config import NotifyConfig
from honed.system import durable
from honed.system.backoff import Backoff
from honed.system.clock import Calendar
from honed.system.error import EnvironmentInvalidError
from honed.system.failures import Failures
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import NOTICE_REFUSED, NOTICE_TROUBLE

log = logging.getLogger("honed.send.sender")

#: Seconds between checks for notices.
POLL_SEC = 0.5
#: Receivers served at the same time.
MAX_THREADS = 8
#: Seconds between log messages about the same receiver.
COMPLAIN_EVERY_SEC = 3600.0
#: Bytes of a webhook's response that are read, and characters that are quoted.
MAX_ANSWER_BYTES, MAX_QUOTED = 4096, 300
DAY_SEC = 86400.0


@dataclass
class _Line:
    """The state of a receiver."""

    backoff: Backoff
    thread: threading.Thread | None = None
    not_before: float = 0.0
    complained_at: float | None = None


class Messenger:
    """Delivers notices until it is stopped. `clock` is monotonic seconds."""

    def __init__(self, layout: Layout, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout = layout
        self._clock = clock
        self._calendar = Calendar(clock=clock)
        self._calendar_lock = threading.Lock()
        self._config = NotifyConfig()
        self._is_loaded = False
        self._lines: dict[str, _Line] = {}
        self._receivers: dict[str, str] = {}  #: of every queued notice, by its file name
        self._answered: dict[str, tuple[Verdict, str]] = {}  #: notices whose files are still to be moved, by these
        self._failures = Failures(log)  #: of reading single notices
        self._stop = threading.Event()

    def reload(self, config: NotifyConfig) -> None:
        """Apply a configuration: retry queued notices at once, and after the first load also rejected ones once.

        Only a person knows what was fixed.
        """
        is_first, self._config, self._is_loaded = not self._is_loaded, config, True
        self._lines = {to: self._new_line(line.thread) for to, line in self._lines.items()}
        for name, (verdict, _) in list(self._answered.items()):  # its threads go on with it meanwhile
            if verdict is not Verdict.TAKEN:
                self._answered.pop(name, None)
        if not is_first:
            for path in notification.refused_dir(self._layout).glob("*.json"):
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                    notice = json.loads(path.read_bytes())["notice"] | {"created_at": time.time()}
                    durable.write_json(notification.notices_dir(self._layout) / path.name, notice, mode=0o640)
                    path.unlink()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Deliver in a background thread."""
        thread = threading.Thread(target=self._run, name="notices", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(2 * POLL_SEC)

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Wait until no notice is queued, or `is_over` returns true."""
        while notification.waiting(self._layout) and not is_over():
            self._stop.wait(POLL_SEC / 5)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._look()
            except Exception:
                log.exception("an error while processing notifications")
            self._stop.wait(POLL_SEC)

    def _look(self) -> None:
        """Start a thread for every receiver that has queued notices and may be retried."""
        with self._calendar_lock:
            self._calendar.look()
        by_receiver: dict[str, list[Path]] = {}
        waiting = notification.waiting(self._layout)
        # Read each notice once: its key, and so its file name, depends on its receiver, and thousands may be queued for
        # days.
        known, self._receivers = self._receivers, {}
        for path in waiting:
            to = known.get(path.name)
            if to is None:
                with self._failures.alone(str(path)):
                    to = json.dumps(notice.to, sort_keys=True) if (notice := self._read(path)) is not None else None
            if to is not None:
                self._receivers[path.name] = to
                by_receiver.setdefault(to, []).append(path)
        for to, paths in by_receiver.items():
            line = self._lines.setdefault(to, self._new_line())
            num_alive = sum(item.thread is not None and item.thread.is_alive() for item in self._lines.values())
            is_busy = line.thread is not None and line.thread.is_alive()
            if not is_busy and num_alive < MAX_THREADS and self._clock() >= line.not_before:
                line.thread = threading.Thread(target=self._deliver_all, args=(line, paths), daemon=True)
                line.thread.start()

    def _read(self, path: Path) -> Notice | None:
        """Return a notice; None if there is none, and for a damaged one, which is set aside. Raises OSError if the
        machine prevents reading it."""
        try:
            return Notice.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            if durable.machine_fault(error):
                raise
            log.error("%s: not a valid notification: %s", path, error)  # noqa: TRY400
            with contextlib.suppress(OSError):
                path.rename(notification.refused_dir(self._layout) / f"{path.name}.damaged")
            return None

    def _deliver_all(self, line: _Line, paths: list[Path]) -> None:
        """Deliver one receiver's notices in order, until one must be retried later."""
        fault = False
        for path in paths:
            if self._stop.is_set():
                return
            try:
                if not self._deliver_one(line, path):
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
                self._complain(line, path, error)
                fault = True
        if fault:
            line.not_before = self._clock() + line.backoff.next_sec()

    def _deliver_one(self, line: _Line, path: Path) -> bool:
        """Deliver a notice, and remove or set aside its file. Returns False if it must be retried later."""
        if (notice := self._read(path)) is None:
            return True
        verdict, said = self._answered.get(path.name) or self._deliver(notice)
        if verdict is Verdict.LATER and self._is_too_old(notice):
            verdict, said = Verdict.REFUSED, f"gave up after {self._config.give_up_days:g} days: {said}"
        if verdict is Verdict.LATER:
            self._wait(line, notice, said)
            return False
        self._answered[path.name] = verdict, said
        if verdict is Verdict.REFUSED:
            self._set_aside(path, notice, said)
        path.unlink(missing_ok=True)
        self._answered.pop(path.name, None)
        if verdict is Verdict.TAKEN:
            line.backoff.reset()
            line.complained_at = None
        return True

    def _complain(self, line: _Line, path: Path, error: Exception) -> None:
        """Log, from time to time, that a notice cannot be read or removed."""
        now = self._clock()
        if line.complained_at is None or now - line.complained_at >= COMPLAIN_EVERY_SEC:
            line.complained_at = now
            log.error("%s: a notification cannot be read or removed; retrying: %s", path, error, exc_info=error)

    def _new_line(self, thread: threading.Thread | None = None) -> _Line:
        config = self._config
        return _Line(Backoff(config.retry_delay_sec, config.max_retry_delay_sec, has_jitter=True), thread)

    def _is_too_old(self, notice: Notice) -> bool:
        with self._calendar_lock:  # each receiver has its thread
            self._calendar.look()
            return time.time() - self._calendar.date(notice.created_at) > self._config.give_up_days * DAY_SEC

    def _wait(self, line: _Line, notice: Notice, said: str) -> None:
        now = self._clock()
        line.not_before = now + line.backoff.next_sec()
        if line.complained_at is None or now - line.complained_at >= COMPLAIN_EVERY_SEC:
            line.complained_at = now
            log.warning(
                "a notification to %s was not delivered; retrying: %s",
                _shown(notice),
                said,
                extra=about(notice.payload.get("job_id"), NOTICE_TROUBLE),
            )

    def _set_aside(self, path: Path, notice: Notice, said: str) -> None:
        record = {"answer": said, "notice": asdict(notice)}
        durable.write_json(notification.refused_dir(self._layout) / path.name, record, mode=0o640)
        log.error(
            "a notification to %s was rejected and moved to %s: %s",
            _shown(notice),
            notification.refused_dir(self._layout),
            said,
            extra=about(notice.payload.get("job_id"), NOTICE_REFUSED),
        )

    # -- one notice ---------------------------------------------------------------------------------------------------

    def _deliver(self, notice: Notice) -> tuple[Verdict, str]:
        """Try to deliver once; errors are returned as results, too."""
        config = self._config
        try:
            match notice.to:
                case {"webhook": webhook}:
                    if not notice.is_own and (why := recipient.why_not_webhook(webhook, config)) is not None:
                        return Verdict.REFUSED, why
                    address, token = recipient.target(webhook, config)
                    if not address.lower().startswith(("http://", "https://")):
                        return chat.deliver(notice, address, config)
                    return post(notice, address, token, timeout_sec=config.timeout_sec)
                case {"mail": address}:
                    if not notice.is_own and (why := recipient.why_not_mail(address, config)) is not None:
                        return Verdict.REFUSED, why
                    return mail(notice, address, config)
                case _:
                    return Verdict.REFUSED, "it has no recipient"
        except EnvironmentInvalidError as error:
            return Verdict.LATER, error.message
        except ssl.SSLCertVerificationError as error:
            host = config.smtp_host if "mail" in notice.to else "the webhook's host"
            return Verdict.LATER, (
                f"{host} has a certificate that is not trusted: {error.verify_message}. For your own certificate "
                "authority, add it to the system's, or set SSL_CERT_FILE in honed-send's environment"
            )
        except Exception as error:  # noqa: BLE001 - a malformed response must not end the thread silently
            return Verdict.LATER, f"{type(error).__name__}: {error}"


def post(notice: Notice, address: str, token: str | None, *, timeout_sec: float) -> tuple[Verdict, str]:
    """Deliver by webhook."""
    response, data = Client().post(
        address,
        json.dumps(notice.payload, ensure_ascii=False).encode(errors="replace"),
        key=notice.key,
        token=token,
        timeout_sec=timeout_sec,
        max_bytes=MAX_ANSWER_BYTES,
    )
    said = delivery.words(data)[:MAX_QUOTED]
    text = f"{response.status} {response.reason}{f': {notification.plain(said)}' if said else ''}"
    if response.status == http.client.CONFLICT:  # it was sent, and we died before the response
        return Verdict.TAKEN, text
    verdict = delivery.verdict(response.status)
    if verdict is Verdict.TAKEN and (why := receipt.why_none(response, data, max_bytes=MAX_ANSWER_BYTES)):
        return Verdict.LATER, f"{why}: {text}"
    return verdict, text


def mail(notice: Notice, address: str, config: NotifyConfig) -> tuple[Verdict, str]:
    """Deliver by SMTP. Apprise tells no unknown mailbox from a busy server, and adds a random Message-ID to ours."""
    assert config.smtp_host is not None
    assert config.mail_from is not None
    message = compose(notice, address, config.mail_from)
    context = ssl.create_default_context()
    connection = socket.create_connection((config.smtp_host, config.smtp_port), config.timeout_sec)
    server = _Server()
    try:
        with deadline(connection, 2 * config.timeout_sec):
            if config.smtp_security == "tls":
                connection = context.wrap_socket(connection, server_hostname=config.smtp_host)
            server.begin(connection, config.smtp_host)
            if config.smtp_security == "starttls":
                server.starttls(context=context)
            if config.smtp_user is not None:
                server.login(config.smtp_user, recipient.password(config))
            server.send_message(message, from_addr=config.mail_from, to_addrs=[address])
    except smtplib.SMTPRecipientsRefused as error:
        ((code, said), *_) = error.recipients.values()
        return _judge_mail(code, said)
    except smtplib.SMTPDataError as error:
        return _judge_mail(error.smtp_code, error.smtp_error)
    else:
        assert server.sock is not None
        with contextlib.suppress(smtplib.SMTPException, OSError), deadline(server.sock, config.timeout_sec):
            server.quit()
        return Verdict.TAKEN, "taken"
    finally:
        server.close()
        connection.close()


class _Server(smtplib.SMTP):
    """SMTP on an existing connection: smtplib itself would read the greeting before a deadline could be set."""

    def begin(self, connection: socket.socket, host: str) -> None:
        self._connection = connection
        self._host = host  # STARTTLS checks the certificate against it
        code, said = self.connect(host)
        if code != 220:
            raise smtplib.SMTPConnectError(code, said)

    def _get_socket(self, *_given: object) -> socket.socket:
        return self._connection


def _judge_mail(code: int, said: bytes | str) -> tuple[Verdict, str]:
    words = said.decode(errors="replace") if isinstance(said, bytes) else said
    return Verdict.REFUSED if 500 <= code < 600 else Verdict.LATER, f"{code} {notification.plain(words)}"


def compose(notice: Notice, address: str, sender: str) -> EmailMessage:
    """Build the mail. Header values pass through `plain`, so that a job's name cannot inject a header."""
    payload = notice.payload
    message = EmailMessage(policy=MAIL_POLICY)
    first, *rest = str(payload["text"]).splitlines() or [""]
    message["Subject"] = notification.plain(first)[:200]
    message["From"] = Address(display_name="honed", addr_spec=sender)
    message["To"] = Address(addr_spec=address)
    message["Date"] = email.utils.formatdate(notice.created_at)
    message["Message-ID"] = f"<{notice.key}@honed.{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    facts = {
        "outcome": payload.get("outcome"),
        "attempts": payload.get("num_attempts"),
        "dropped": payload.get("submitted_at"),
        "started": payload.get("started_at"),
        "ended": payload.get("ended_at"),
        "output": payload.get("output_dir"),
        "report": payload.get("report"),
    }
    lines = [first, *rest, "", *(f"{name}: {notification.plain(str(value))}" for name, value in facts.items() if value)]
    metrics = payload.get("metrics") or {}
    lines += (
        [
            "",
            *(
                f"{notification.plain(name)}: {value:.6g}"
                for name, value in sorted(metrics.items())
                if isinstance(value, int | float)
            ),
        ]
        if metrics
        else []
    )
    message.set_content("\n".join(lines) + "\n")
    return message


def _shown(notice: Notice) -> str:
    """Return a receiver for the log: of a URL only its host, since its path may be a secret."""
    if "mail" in notice.to:
        return notice.to["mail"]
    webhook = notice.to.get("webhook", "")
    return (urlsplit(webhook).hostname or "") if "//" in webhook else webhook
