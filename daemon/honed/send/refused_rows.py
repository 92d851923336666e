"""Rows that the metrics API has refused: each is a file in the outbox, with the response, until it is sent again."""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from honed.send import outbox
from honed.send.delivery import Verdict
from honed.send.endpoint import Answer
from honed.send.outbox import Row
from honed.spec.config import ReportingConfig
from honed.system import durable, quote
from honed.system.log import about
from honed.system.message import ROW_REFUSED

log = logging.getLogger("honed.send.sender")

#: Seconds between log messages about the same response.
COMPLAIN_EVERY_SEC = 600.0


class RefusedRows:
    """The refused rows of an outbox. `config` is read each time, so that a reload takes effect."""

    def __init__(
        self,
        path: Path,
        config: Callable[[], ReportingConfig],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dir = outbox.refused_dir(path)
        self._config = config
        self._clock = clock
        self._said_at: dict[str, float] = {}  # when a response was last logged, by its text
        self._num_bytes: int | None = None  # the total; computed at the first refused row
        self.num_set_aside = 0  #: by this process

    def set_aside(self, row: Row, answer: Answer) -> None:
        """Store a refused row with the response; its file name is its key, so that a repetition overwrites it."""
        # Log one message for many rows of one kind: an endpoint that rejects everything must not flood the journal.
        said = quote.hide(answer.text)
        is_new = self._clock() - self._said_at.get(said, -COMPLAIN_EVERY_SEC) >= COMPLAIN_EVERY_SEC
        if is_new:
            self._said_at = {**self._said_at, said: self._clock()} if len(self._said_at) < 100 else {}
        log.log(
            logging.ERROR if is_new else logging.DEBUG,
            "a %s of job %s (step %s) was rejected with %d and moved to %s: %s",
            row.data["kind"],
            row.data.get("job_id"),
            row.data.get("step"),
            answer.status,
            self._dir,
            said,
            extra=about(row.data.get("honed_job"), ROW_REFUSED, step=row.data.get("step")),
        )
        if self._num_bytes is None:
            self._num_bytes = sum(path.stat().st_size for path in self._dir.glob("*.json"))
        if self._num_bytes + row.num_bytes > self._config().max_outbox_bytes:
            log.error("%s has reached reporting.max_outbox_bytes: discarded %s; honed.db has it", self._dir, row.key)
            self.num_set_aside += 1
            return
        record = {"status": answer.status, "answer": quote.show(answer.text), "row": row.data}
        durable.write_json(self._dir / f"{row.key}.json", record, mode=0o640)
        self._num_bytes += row.num_bytes
        self.num_set_aside += 1

    @property
    def has_any(self) -> bool:
        return any(True for _ in self._dir.glob("*.json"))

    def send_again(self, send: Callable[[Sequence[Row]], Answer]) -> bool:
        """Send each row once more, one per request. Returns False if `send` gave up before all were answered."""
        self._num_bytes = None
        num_sent, paths = 0, sorted(self._dir.glob("*.json"))
        for path in paths:
            answer = send([Row(json.loads(path.read_bytes())["row"], outbox.Position(0, 0), 0)])
            if answer.verdict is Verdict.TAKEN or answer.status == http.client.CONFLICT:
                path.unlink()
                num_sent += 1
            elif answer.verdict is Verdict.LATER:
                return False
            else:
                log.warning("%s: %s", path.name, answer.text)
        if paths:
            log.info("delivered %d of %d rows that had been rejected", num_sent, len(paths))
        return True
