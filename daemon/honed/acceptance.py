"""From a file in incoming/ to an entry in queued/, or to rejected/ with its reason.

    arrival ── whole ──► claimed/<id>/ ── copied, checked by the preflight helper ──► queued/ or held/, or rejected/

Nothing here waits: the helper answers when it has looked at the files that a job names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.checker import Checker
from honed.config import Config
from honed.database import timestamp
from honed.error import HonedError, SpecError, from_dict
from honed.job import Job, State
from honed.spool import Claim, Copy, Spool, refusal
from honed.watcher import Watcher

log = logging.getLogger(__name__)

#: How many arrivals are claimed in one pass, so that a flood does not hold the loop.
MAX_CLAIMS_PER_PASS = 50


@dataclass(frozen=True)
class _Pending:
    claim: Claim
    copy: Copy


class Acceptance:
    """The way in. `others` tells of the jobs that are not over, for what only one of them may have."""

    def __init__(
        self,
        spool: Spool,
        watcher: Watcher,
        client: Checker,
        config: Config,
        others: Callable[[], Iterable[Job]],
    ) -> None:
        self._spool = spool
        self._watcher = watcher
        self._client = client
        self.config = config
        self._others = others
        self._pending: dict[int, _Pending] = {}
        self._num_unsettled = 0

    @property
    def is_busy(self) -> bool:
        """Whether something lies in incoming/ or is being checked."""
        return bool(self._pending or self._num_unsettled)

    @property
    def num_unsettled(self) -> int:
        """Arrivals that may still be being written."""
        return self._num_unsettled

    def scan(self) -> None:
        """Claim every arrival that is whole, and check again what was claimed before and could not be settled then."""
        for claim in self._spool.claims():
            if claim.id not in self._pending:
                self._check(claim)
        arrivals = self._spool.arrivals()
        self._watcher.keep({path.name for path in arrivals})
        self._num_unsettled = len(arrivals)
        for path in [path for path in arrivals if self._watcher.is_whole(path)][:MAX_CLAIMS_PER_PASS]:
            taken = self._spool.claim(path)
            self._watcher.forget(path.name)
            self._num_unsettled -= 1
            if taken is not None:
                self._check(taken)

    def _check(self, claim: Claim) -> None:
        try:
            copy = self._spool.copy(claim, max_bytes=self.config.spool.max_spec_bytes)
        except HonedError as error:
            self._refuse(claim, error)
            return
        except OSError as error:
            log.error("%r waits in %s: %s", claim.name, claim.path.parent, error)  # noqa: TRY400
            return
        self._pending[claim.id] = _Pending(claim, copy)
        self._client.submit(claim.id, copy.path, self.config)

    def settle(self) -> list[Job]:
        """Accept or refuse what the helper has answered on. Returns the jobs accepted."""
        accepted = []
        for answer in self._client.poll():
            pending = self._pending.pop(answer["id"])
            if not answer["ok"]:
                self._refuse(pending.claim, from_dict(answer["error"]))
                continue
            job = self._job(pending, answer)
            try:
                self._check_against_others(job)
                accepted.append(self._admit(pending.claim, job, answer))
            except HonedError as error:
                self._refuse(pending.claim, error)
            except OSError as error:
                log.error("%r waits in %s: %s", pending.claim.name, pending.claim.path.parent, error)  # noqa: TRY400
        return accepted

    def _admit(self, claim: Claim, job: Job, answer: dict[str, Any]) -> Job:
        identity = {"id": job.id, "name": job.name, "user_id": str(job.uid), "instance": str(self._spool.root)}
        plan = {**answer["plan"], "job": identity, "spec": answer["spec"], "output_dir": job.output_dir}
        job = self._spool.admit(job, claim, plan)
        log.info("job %d (%s): accepted from %s, %s", job.id, job.name, job.source, job.state)
        for warning in answer.get("warnings", []):
            log.warning("job %d (%s): %s", job.id, job.name, warning)
        return job

    def _job(self, pending: _Pending, answer: dict[str, Any]) -> Job:
        spec = answer["spec"]
        return Job(
            id=pending.claim.id,
            name=spec.get("name") or pending.claim.title,
            submitted_at=time.time(),
            source=pending.claim.name,
            uid=pending.copy.uid,
            output_dir=answer["output_dir"],
            priority=spec.get("priority", 0),
            max_attempts=spec["retry"]["max_attempts"],
            num_gpus=spec["resources"]["gpus"],
            depends_on=tuple(map(str, spec.get("depends_on") or ())),
            state=State.HELD if pending.claim.is_held else State.QUEUED,
        )

    def _check_against_others(self, job: Job) -> None:
        ours = Path(job.output_dir).resolve()
        names = set()
        for other in self._others():
            theirs = Path(other.output_dir).resolve()
            if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
                raise SpecError(
                    f"output_dir: {ours} is job {other.id}'s ({other.name}, {other.state}: {theirs})",
                    hint="give this job a directory of its own, or leave output_dir out",
                )
            names |= {other.name, str(other.id)}
        for reference in job.depends_on:
            known = reference in names or any(
                reference in {other.name, str(other.id)} for other in self._spool.all_jobs().values()
            )
            if not known:
                raise SpecError(f"depends_on: there is no job {reference!r}", hint="drop that job first; honectl list")

    def _refuse(self, claim: Claim, error: HonedError) -> None:
        try:
            self._reject(claim, error)
        except OSError as problem:
            log.error("%r waits in %s: %s", claim.name, claim.path.parent, problem)  # noqa: TRY400

    def _reject(self, claim: Claim, error: HonedError) -> None:
        target = self._spool.reject(claim, refusal(claim.name, error, when=timestamp(time.time())))
        first = error.message.splitlines()[0] if error.message else ""
        more = f" (and {len(error.message.splitlines()) - 1} more)" if "\n" in error.message else ""
        log.warning("%r refused: %s: %s%s; see %s.reason", claim.name, error.code, first, more, target)
