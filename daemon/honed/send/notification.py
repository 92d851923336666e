"""Notifications of a job's end: their text, and the queue of notices for honed-send.

    a job ends ── spool/ended/<id>: mark its end as pending ── its entry moves ── write a notice for every receiver

    var/lib/honed/outbox/notices/
        <key>.json      one notice for one receiver; the daemon writes it, honed-send removes it after delivery
        refused/        notices that a receiver rejected, or did not accept for days, with its response

The mark in ended/ is durable before the move and removed after the notices are written: an end is reported at least
once, whichever process is killed, and a notice that is written again has the same key and so the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from honed.job import query
from honed.job.damaged import is_of_item
from honed.job.database import timestamp
from honed.job.job import Job, Notify
from honed.job.shape import Shown
from honed.job.spool import Spool
from honed.spec.config import NotifyConfig
from honed.system import durable
from honed.system.failures import Failures
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.message import NOTICE_REFUSED
from honed.system.printable import printable

log = logging.getLogger(__name__)

#: Messages about the machine that are kept while the disk is full.
MAX_WORDS = 100
#: Maximum number of characters of a message and of a hint in a notice's text.
MAX_TEXT = 2000
#: Mentions of all participants: Mattermost's, Discord's and Matrix' words. Slack's are in angle brackets.
_EVERYBODY = re.compile(r"@(?=(?:all|channel|everyone|here|room)\b)", re.IGNORECASE)


class Payload(TypedDict, total=False):
    """The content of a notice, about a job's end or about the machine."""

    event: str
    text: str  #: for people, as chat servers show it
    host: str
    created_at: str  #: about the machine
    job_id: int
    name: str
    user_id: str
    state: str
    outcome: str | None
    remark: str
    error: dict[str, str] | None
    metrics: dict[str, float]
    output_dir: str | None  #: None of an evaluation
    report: str | None
    num_attempts: int
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    idempotency_key: str


@dataclass(frozen=True)
class Notice:
    """A notification for one receiver."""

    key: str
    to: dict[str, str]  #: webhook or mail
    is_own: bool  #: sent to the administrator: no job has named the receiver
    payload: Payload
    created_at: float

    @classmethod
    def from_json(cls, data: Any) -> Notice:
        """Parse a notice. Raises ValueError if it is invalid."""
        try:
            made = cls(**data)
        except TypeError as error:
            raise ValueError(str(error)) from error
        if not (isinstance(made.to, dict) and all(isinstance(item, str) for item in made.to.values())):
            raise ValueError("its receiver is none")
        if not (isinstance(made.key, str) and isinstance(made.payload, dict)):
            raise ValueError("it has no key or no content")
        if not isinstance(made.created_at, int | float) or not math.isfinite(made.created_at):
            raise ValueError("its date is none")
        return made


def notices_dir(layout: Layout) -> Path:
    return layout.outbox_dir / "notices"


def refused_dir(layout: Layout) -> Path:
    return notices_dir(layout) / "refused"


def waiting(layout: Layout) -> list[Path]:
    """Return the files of the queued notices, oldest first."""
    jobs = []
    for path in notices_dir(layout).glob("*.json"):
        try:
            jobs.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:
            continue
    return [path for _, path in sorted(jobs)]


def is_wanted(config: NotifyConfig) -> bool:
    """Tell whether any notification may have to be delivered."""
    own = config.admin_webhook is not None or config.admin_mail
    return bool(own or config.allowed_webhooks or config.webhook_files or config.allowed_mail_domains)


class Notices:
    """The daemon's side of the notices."""

    def __init__(
        self, layout: Layout, config: NotifyConfig, spool: Spool, *, now: Callable[[], float] = time.time
    ) -> None:
        self._layout = layout
        self._spool = spool
        self._failures = Failures(log)
        self._now = now
        self._words: list[tuple[str, str, float]] = []
        self._has_complained = False
        self._dated_ns = 0
        self.reload(config)

    def reload(self, config: NotifyConfig) -> None:
        self._config = config
        self._spool.tells_every_end = bool(config.admin_states) and bool(_own(config))

    @property
    def is_wanted(self) -> bool:
        return is_wanted(self._config)

    def tell_of_machine(self, fault: str) -> None:
        """Queue a message to the administrator that honed cannot work or, if `fault` is empty, that it works again."""
        if self._config.admin_degraded and len(self._words) < MAX_WORDS:
            event = "degraded" if fault else "recovered"
            self._words.append((event, fault or "honed can work again", self._now()))

    def tend(self) -> None:
        """Write the notices that are due. Raises OSError if the disk accepts none; they stay due."""
        while self._words:
            event, text, when = self._words[0]
            host = socket.gethostname()
            payload: Payload = {
                "event": event,
                "text": f"honed on {host}: {plain(text)}",
                "host": host,
                "created_at": timestamp(when),
            }
            for to in _own(self._config):
                self._put(Notice(_key(event, text, when, to), to, True, payload, when))
            self._words.pop(0)
        for mark in sorted(self._spool.ended_dir.iterdir()):
            if mark.name.isdecimal():
                self._tell_end_alone(int(mark.name), mark)

    def _tell_end_alone(self, job_id: int, mark: Path) -> None:
        """Write the notices of one job's end: a mark that is damaged holds up no other's."""
        try:
            self._tell_end(job_id, mark)
        except Exception as error:
            if not is_of_item(error):
                raise
            self._failures.note(str(mark), error)

    def _tell_end(self, job_id: int, mark: Path) -> None:
        job = self._spool.job(job_id)
        if job is not None and job.state.is_final:
            revision = mark.read_text(encoding="ascii").strip()
            receivers = [
                *((to, True) for to in _own(self._config) if job.state in self._config.admin_states),
                *((to, False) for to in _of_job(job)),
            ]
            if receivers:
                notice = payload(job, query.show(self._spool, self._layout, str(job.id)))
                notice["report"] = str(self._layout.files(job.id).report_path)  # it is written a moment later
                for to, is_own in receivers:
                    key = _key(job.id, job.submitted_at, revision, to)
                    self._put(Notice(key, to, is_own, {**notice, "idempotency_key": key}, self._now()))
        mark.unlink(missing_ok=True)
        durable.sync_dir(mark.parent)

    def _put(self, notice: Notice) -> None:
        directory = notices_dir(self._layout)
        for item in (self._layout.outbox_dir, directory, refused_dir(self._layout)):
            durable.make_dir(item, mode=0o750)
        if len(list(directory.glob("*.json"))) >= self._config.max_waiting:
            if not self._has_complained:
                log.error(
                    "%s contains notify.max_waiting (%d) notifications: discarding a new one; is honed-send "
                    "delivering?",
                    directory,
                    self._config.max_waiting,
                    extra=about(message=NOTICE_REFUSED),
                )
            self._has_complained = True
            return
        self._has_complained = False
        path = directory / f"{notice.key}.json"
        durable.write_json(path, asdict(notice), mode=0o640)
        # Notices are ordered by modification time: the clock has a coarse resolution and may have been set back.
        self._dated_ns = max(int(self._now() * 1e9), self._dated_ns + 1)
        with contextlib.suppress(FileNotFoundError):  # already delivered
            os.utime(path, ns=(self._dated_ns, self._dated_ns))


def _own(config: NotifyConfig) -> list[dict[str, str]]:
    hooks = [{"webhook": config.admin_webhook}] if config.admin_webhook is not None else []
    return [*hooks, *({"mail": address} for address in config.admin_mail)]


def _of_job(job: Job) -> list[dict[str, str]]:
    """Return the receivers that a job names, if they asked to be notified of its final state."""
    notify = job.notify or Notify()
    if job.state.value not in notify.get("states", ()):
        return []
    named = {"webhook": notify.get("webhook"), "mail": notify.get("mail")}
    return [{kind: str(address)} for kind, address in named.items() if address]


def _key(*what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def payload(job: Job, shown: Shown) -> Payload:
    """Return the payload about a job's end."""
    host, error = socket.gethostname(), shown["error"]
    lines = [f"honed on {host}: job {job.id} ({plain(job.name)}) {'was ' * (job.state == 'cancelled')}{job.state}"]
    if job.remark:
        lines[0] += f", but {plain(job.remark)}"
    if error:
        lines[0] += f": {error['code']}"
        lines.append(plain(error["message"])[:MAX_TEXT])
        lines += [f"What to do: {plain(error['hint'])[:MAX_TEXT]}"] if error.get("hint") else []
    losses = [
        f"{name} {value:.4g}"
        for name in ("train_loss", "eval_loss")
        if isinstance(value := shown["metrics"].get(name), int | float)
    ]
    lines += [", ".join(losses)] if losses else []
    ended = next((item["ended_at"] for item in reversed(shown["attempts"]) if item["ended_at"]), None)
    return {
        "event": "job_ended",
        "text": "\n".join(lines),
        "host": host,
        "job_id": job.id,
        "name": job.name,
        "user_id": str(job.uid),
        "state": job.state.value,
        "outcome": job.outcome,
        "remark": job.remark,
        # A receiver may not be allowed to read the job: neither the message's quotes nor values of the job file are
        # sent.
        "error": {"code": error["code"], "message": error["message"], "hint": error["hint"]} if error else None,
        "metrics": shown["metrics"],
        "output_dir": shown["artifacts"]["output_dir"],
        "report": shown["artifacts"]["report"],
        "num_attempts": len(job.attempts),
        "submitted_at": shown["submitted_at"],
        "started_at": shown["attempts"][0]["started_at"] if shown["attempts"] else None,
        "ended_at": ended,
    }


def plain(text: str) -> str:
    """Return text from a job file made safe for a chat or a mail: without markup, hidden links or images, mentions of
    everybody, or new headers.
    """
    text = _EVERYBODY.sub("\N{FULLWIDTH COMMERCIAL AT}", printable(str(text), instead=" ")).replace("](", "] (")
    return text.replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}").replace(
        ">", "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
    )
