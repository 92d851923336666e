"""Arrivals that are not accepted: rejected with a reason, or left to the next scan by a fault of the machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from honed.job.arrival import Arrivals, Claim
from honed.job.database import timestamp
from honed.system import durable, message, quote
from honed.system.error import HonedError, said
from honed.system.log import about

log = logging.getLogger(__name__)


class Rejection:
    """Rejects arrivals; one that the machine keeps from being rejected is left to the next scan."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.listeners: list[Callable[[int, str, float], None]] = []  #: get a number, a code and `Claim.arrived_at`
        self.fault = ""  #: the machine's fault that kept the last scan's arrivals from being settled

    def reject(self, claim: Claim, error: HonedError) -> None:
        """Reject an arrival for this reason."""
        try:
            self._reject(claim, error)
        except Exception as problem:  # noqa: BLE001 - whatever it is, others are rejected all the same
            self.postpone(claim, problem)

    def postpone(self, claim: Claim, error: Exception) -> None:
        """Leave an arrival, which a fault of the machine keeps from being settled, to the next scan."""
        self.fault = durable.machine_fault(error) or quote.hide(said(error))
        unforeseen = None if isinstance(error, OSError) else error
        log.error(
            "%r is waiting in %s: %s",
            claim.name,
            claim.place,
            said(error),
            exc_info=unforeseen,
            extra=about(claim.id, file=claim.name),
        )

    def _reject(self, claim: Claim, error: HonedError) -> None:
        uid = claim.uid
        reason_path = self._arrivals.reject(claim, error, when=timestamp(time.time()))
        for listener in self.listeners:
            listener(claim.id, error.code, claim.arrived_at)
        first = error.message.splitlines()[0] if error.message else ""
        more = f" (and {len(error.message.splitlines()) - 1} more)" if "\n" in error.message else ""
        log.warning(
            "%r refused: %s: %s%s; see %s",
            claim.name,
            error.code,
            first,
            more,
            reason_path,
            extra=about(
                claim.id,
                message.of_error(error.code),
                state="rejected",
                code=error.code,
                file=claim.name,
                hint=error.hint,
                uid=uid,
            ),
        )
