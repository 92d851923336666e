"""The metrics API: the administrator's HTTP endpoint for metrics and predictions.

The body, by POST, UTF-8, with `Authorization: Bearer …`:

    {"metrics": [{idempotency_key, job_id, user_id, honed_job, attempt, step, epoch, name, value, created_at}],
     "predictions": [{idempotency_key, job_id, user_id, honed_job, attempt, step, epoch, sample_index, prompt,
                      ground_truth, prediction, created_at}]}
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from honed.send import delivery, receipt
from honed.send.delivery import Client, Verdict
from honed.send.outbox import Row
from honed.spec.config import ReportingConfig
from honed.system import quote, secret
from honed.system.error import EnvironmentInvalidError
from honed.system.printable import printable

log = logging.getLogger("honed.send.sender")

#: Bytes of a response that are read.
MAX_ANSWER_BYTES = 1024 * 1024
#: The credentials that hold the token: the name that jobs used before honed, and the unit's own.
CREDENTIALS = ("JOB_TOKEN", "honed.metrics-token")
#: The longest `Retry-After` that is respected, in seconds.
MAX_RETRY_AFTER_SEC = 3600.0


@dataclass(frozen=True)
class Answer:
    """The response; `status` is 0 if there was none. `retry_after_sec` is set if the server sent Retry-After."""

    verdict: Verdict
    status: int
    text: str  #: quotes of the server's words are marked
    retry_after_sec: float = 0.0


class Endpoint:
    """Takes rows, one request at a time. `config` and the token are read for every request, so that a change takes
    effect; `ping` is called before each."""

    def __init__(self, config: Callable[[], ReportingConfig], *, ping: Callable[[], None]) -> None:
        self._config = config
        self._ping = ping
        self._client = Client()

    def post(self, rows: Sequence[Row]) -> Answer:
        """Send rows once; errors are returned as answers, too."""
        config = self._config()
        address = config.address() or ""
        self._ping()
        try:
            response, data = self._client.post(
                address,
                _body(rows),
                key=hashlib.sha256("".join(row.key for row in rows).encode()).hexdigest()[:32],
                token=_read_token(config),
                timeout_sec=config.timeout_sec,
                max_bytes=MAX_ANSWER_BYTES,
                headers={"Accept": "application/json"},
            )
            return _judge(response, data)
        except EnvironmentInvalidError as error:
            return Answer(Verdict.LATER, 0, error.message)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: a malformed response that http.client does not check for.
            return Answer(Verdict.LATER, 0, f"{_shown(address)}: {type(error).__name__}: {error}")

    def hang_up(self) -> None:
        """Interrupt a request: its rows get no response, and are sent again. A signal handler may call this."""
        self._client.hang_up()


def log_settings(reporting: ReportingConfig) -> None:
    """Log where rows are sent, and warnings about a configuration that works but is unwise."""
    address = reporting.address()
    if address is None:
        log.info("no metrics API is configured: nothing is sent")
        return
    log.info("sends metrics and predictions to %s", _shown(address))
    path, parts = _token_path(reporting), urlsplit(address)
    if path is None:
        log.info("no token is configured: rows are sent without one")
        if "JOB_TOKEN" in os.environ:
            log.warning(
                "JOB_TOKEN in the environment is ignored, because every child process would inherit it. Put it in a "
                "file, and set reporting.token_file to that"
            )
        return
    with contextlib.suppress(OSError):
        if path.stat().st_mode & 0o004:
            log.warning("%s can be read by everyone: chmod o-r %s", path, path)
    if parts.scheme == "http" and parts.hostname not in {"localhost", "127.0.0.1", "::1"}:
        log.warning("%s: the token is sent unencrypted; use https", _shown(address))


def _judge(response: http.client.HTTPResponse, data: bytes) -> Answer:
    """Judge the meaning of a response for the rows that were sent."""
    status, text = response.status, f"{response.status} {response.reason}"
    said = printable(delivery.words(data[:500]))
    text += f": {quote.mark(said)}" if said else ""  # it may repeat the rows, as FastAPI's 422 does
    verdict = delivery.verdict(status)
    if verdict is Verdict.TAKEN and (why := receipt.why_none(response, data, max_bytes=MAX_ANSWER_BYTES)):
        return Answer(Verdict.LATER, status, f"{why}: {text[:200]}")
    return Answer(verdict, status, text, _retry_after(response.getheader("Retry-After")))


def _retry_after(value: str | None) -> float:
    """Return the Retry-After in seconds; for its other form, a date, 0: our own delay applies then."""
    return min(float(value), MAX_RETRY_AFTER_SEC) if value is not None and value.strip().isdecimal() else 0.0


def _read_token(reporting: ReportingConfig) -> str | None:
    path = _token_path(reporting)
    return secret.read(path, "token") if path is not None else None


def _token_path(reporting: ReportingConfig) -> Path | None:
    return secret.credential(*CREDENTIALS) or (Path(reporting.token_file) if reporting.token_file else None)


def _body(rows: Sequence[Row]) -> bytes:
    of_kind: dict[str, list[dict[str, Any]]] = {"metric": [], "prediction": []}
    for row in rows:
        of_kind.setdefault(str(row.data["kind"]), []).append(
            {key: value for key, value in row.data.items() if key != "kind"}
        )
    named = {f"{kind}s": of_it for kind, of_it in of_kind.items()}
    return json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _shown(address: str) -> str:
    """Return an address without its query, which may contain secrets."""
    return address.partition("?")[0]
