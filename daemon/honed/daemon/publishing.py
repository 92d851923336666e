"""Publishing of jobs' data: rows for a metrics API, notices, report pages, counters, and the processes that send or
make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from honed.daemon.attempts import Attempts
from honed.daemon.reporter import Reporter
from honed.job.brief import Listed
from honed.job.counters import Counters
from honed.job.database import Database
from honed.job.job import Job
from honed.job.spool import Spool
from honed.run.sender_process import SendProcess, is_a_unit
from honed.send.notification import Notices
from honed.send.outbox import Outbox
from honed.send.wandb_runs import Collector
from honed.spec.config import Config
from honed.system.layout import Layout


class Publishing:
    """Notices, reporter, and the sender unless it is a unit of its own. Raises SpecError for an invalid address."""

    def __init__(
        self,
        layout: Layout,
        config: Config,
        database: Database,
        attempts: Attempts,
        spool: Spool,
        queue: Callable[[], Iterator[Job]],
        *,
        clock: Callable[[], float],
    ) -> None:
        """`queue` returns the queued jobs in the order in which they start."""
        self._layout = layout
        self._config = config
        self._database = database
        self._attempts = attempts
        self._spool = spool
        self.counters = Counters(layout.counters_path, spool, clock=clock)
        self.notices = Notices(layout, config.notify, spool)
        self._sender = None if is_a_unit(layout) else SendProcess(layout, clock=clock)
        self._reporter = Reporter(layout, queue, clock=clock)
        self._offline_runs = Collector(layout, spool.pruned.get)
        self._set_outbox()

    def recover(self) -> None:
        """Take up the counters, and follow the spool's changes. Raises OSError as the counters do."""
        self.counters.recover()
        self._spool.catalog.listen(self._follow)

    def _follow(self, old: Listed | None, new: Job | None) -> None:
        """Have the index written when a queued job gets a worker ahead of its turn, or loses it: its state stays."""
        if isinstance(old, Job) and new is not None and (old.staged_at is None) != (new.staged_at is None):
            self._database.moved.add(new.id)

    def reload(self, config: Config) -> None:
        """Apply a new configuration. Raises SpecError for an invalid address."""
        self._config = config
        self._set_outbox()
        self.notices.reload(config.notify)
        if self._sender is not None:
            self._sender.reload()

    def _set_outbox(self) -> None:
        reporting = self._config.reporting
        is_wanted = reporting.address() is not None
        limit = reporting.max_outbox_bytes
        self._attempts.outbox = Outbox(self._layout.outbox_dir, max_bytes=limit) if is_wanted else None

    def tend_sender(self) -> None:
        if self._sender is not None:
            has_rows = self._attempts.outbox is not None
            is_wanted = has_rows or self.notices.is_wanted or self._config.reporting.sync_wandb
            self._sender.tend(is_wanted=is_wanted)

    def tend_reporter(self) -> None:
        moved, self._database.moved = self._database.moved, set()
        self._reporter.tend(moved=moved, running=set(self._attempts.running), policy=self._config.policy)
        # Last, since it raises if the disk is full, and pages would then miss changes.
        self._offline_runs.tend(moved=moved, job_of=self._spool.listed, is_wanted=self._config.reporting.sync_wandb)

    def patience(self) -> float:
        """Return the seconds until a page or the counters are due, or a running child is to be checked."""
        return min(self._reporter.patience(), self.counters.patience(), self._offline_runs.patience())

    def close(self, *, is_last: bool) -> None:
        """Stop the sender and finish the reports. `is_last`: rows left behind may never be sent, so the sender gets
        `flush_sec` to send them; else they wait for the next start."""
        if self._sender is not None:
            self._sender.finish(self._config.reporting.flush_sec) if is_last else self._sender.stop()
        self._reporter.finish(self._config.policy)
