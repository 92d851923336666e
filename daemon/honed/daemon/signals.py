"""The two requests made by signals: SIGTERM and SIGINT end honed, SIGHUP reloads its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from honed.daemon.attempts import Attempts
from honed.daemon.staging import StagedWorkers
from honed.job.job import Stop
from honed.spec import config
from honed.spec.config import Config
from honed.system import message
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)


class Configuration:
    """The configuration in force."""

    def __init__(self, layout: Layout, current: Config) -> None:
        self._layout = layout
        self._current = current
        self.fault = ""  #: why the last reload was rejected
        self._warn()

    def get(self) -> Config:
        return self._current

    def reload(self) -> bool:
        """Load the configuration again. Returns False if it is wrong: then the old one stays."""
        try:
            self._current = config.load(self._layout)
        except HonedError as error:
            log.error(  # noqa: TRY400
                "the new configuration is invalid, so the old one stays in force: %s",
                error.message,
                extra=about(message=message.CONFIG_REFUSED, code=error.code, hint=error.hint),
            )
            self.fault = error.message
            return False
        self.fault = ""
        self._warn()
        return True

    def _warn(self) -> None:
        for words in self._current.outdated:
            log.warning("%s", words)


class Shutdown:
    """The end of honed: when a signal asks for it, or with `--drain` when no work is left."""

    def __init__(
        self, attempts: Attempts, staging: StagedWorkers, config: Callable[[], Config], *, drain: bool
    ) -> None:
        self._attempts = attempts
        self._staging = staging
        self._config = config
        self._drain = drain
        self.is_asked = False

    @property
    def is_drain(self) -> bool:
        """True if honed ends when no work is left; then nothing may ever run again to send the rest."""
        return self._drain and not self.is_asked

    @property
    def is_over(self) -> bool:
        """True if honed was asked to end, and every worker that still lives continues without it."""
        is_left = all(self._is_left(job_id) for job_id in self._attempts.running)
        return self.is_asked and is_left and not len(self._staging)

    def ask(self) -> None:
        """Begin to end."""
        self.is_asked = True
        self._attempts.is_stopping = True
        asked = self._not_left()
        num_left = len(self._attempts.running) - len(asked)
        log.info("asked to stop; %d running jobs continue, %d write a checkpoint", num_left, len(asked))

    def stop_jobs(self) -> None:
        """Stop the workers that do not continue. Call it in every turn: a full disk may prevent it for one of them."""
        for job_id in self._not_left():
            with self._attempts.failures.alone(f"job {job_id}"):
                self._attempts.stop(job_id, Stop.SHUTDOWN)
        self._staging.drop_all()

    def _not_left(self) -> list[int]:
        return [job_id for job_id in self._attempts.running if not self._is_left(job_id)]

    def _is_left(self, job_id: int) -> bool:
        return self._config().jobs.on_stop == "leave" and self._attempts.is_left(job_id)
