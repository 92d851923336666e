"""The arrivals' side of the loop: the watch of incoming/, the checks, the fetches, and the times at which they are due.

watcher ── hints ──► acceptance ◄── answers ── checkers (preflight helpers)
                         └──────◄── results ── fetcher (models and data sets from the hub)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.arrivals.checkers import Checkers, default_num_helpers
from honed.daemon.arrivals.watcher import Watcher
from honed.job.arrival import Arrivals
from honed.job.entitlement import Entitlements
from honed.job.job import Job
from honed.job.spool import Spool
from honed.run.choice import choose_fetch_runner
from honed.run.fetcher import Fetcher, FetchRunner
from honed.run.helper import Watch, children
from honed.run.systemd_check import CheckUnits
from honed.spec.config import Config
from honed.system.dbus import Systemd
from honed.system.failures import Failures
from honed.system.layout import Layout


class Intake:
    """Takes what arrives. `systemd` is set where checks and fetches are units; `follow` gets the
    descriptors to be watched: of preflight helpers, and of the events of incoming/."""

    def __init__(
        self,
        layout: Layout,
        spool: Spool,
        config: Callable[[], Config],
        systemd: Systemd | None,
        fetch_runner: FetchRunner | None,
        *,
        failures: Failures,
        follow: Watch,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._clock = clock
        self._rescan_at = 0.0
        self._arrivals = Arrivals(spool)
        self._watcher = Watcher(spool.incoming_dir, settle_sec=config().spool.settle_sec, follow=follow)
        start_as = CheckUnits(layout, systemd, clock=clock).of if systemd is not None else None
        num_helpers = config().spool.preflight_helpers or default_num_helpers()
        self._checkers = Checkers(
            children(layout),
            start_as,
            follow,
            clock=clock,
            num_helpers=num_helpers,
            weight=Entitlements(config).weight,
        )
        self._fetcher = Fetcher(
            layout, config(), fetch_runner or choose_fetch_runner(layout, config(), systemd), clock=clock
        )
        self.acceptance = Acceptance(
            spool, self._arrivals, self._watcher, self._checkers, config(), self._fetcher, failures=failures
        )

    @property
    def is_watching(self) -> bool:
        return self._watcher.is_watching

    @property
    def is_empty(self) -> bool:
        """True if nothing is being taken or waits to be taken, but for files whose users have too many queued jobs, and
        arrivals that wait for a job among those files."""
        acceptance = self.acceptance
        on_their_way = acceptance.num_settling + len(acceptance.fetches.numbers) + acceptance.num_stuck
        return not acceptance.is_busy and not on_their_way

    def status(self, *, is_named: bool) -> list[str]:
        """Return a short text for every thing that holds up arrivals. `is_named`: with the names of models."""
        num_stuck = self.acceptance.num_stuck
        stuck = [f"{num_stuck} not checked: {self._checkers.fault}"] if num_stuck else []
        num_beyond = self.acceptance.incoming.num_beyond
        files = "1 file waits" if num_beyond == 1 else f"{num_beyond} files wait"
        stuck += [f"{files} until fewer jobs of their users are queued"] if num_beyond else []
        return stuck + self._fetcher.status(is_named=is_named)

    def patience(self) -> float:
        """Return the seconds until a step is due."""
        now, config = self._clock(), self._config()
        waits = [self._rescan_at - now]
        if self.acceptance.fetches.numbers:
            waits.append(config.jobs.poll_interval_sec)
        if self.acceptance.incoming.num_unsettled:
            waits.append(min(0.1, config.spool.settle_sec))
        if self.acceptance.is_busy or self.acceptance.naming.numbers:
            waits.append(0.2)
        if self._checkers.deadline is not None:
            waits.append(self._checkers.deadline - now)
        return min(waits)

    def rescan(self) -> None:
        """Have incoming/ scanned in the next pass."""
        self._rescan_at = 0.0

    # -- start and end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finish what a crash interrupted, after the spool's own recovery."""
        self.acceptance.sweeps.recover()
        self._arrivals.recover()

    def start(self, jobs: Iterable[Job]) -> None:
        """Watch incoming/, and take up the fetches for claimed arrivals and for these queued and held jobs."""
        self._watcher.start()
        self._fetcher.recover({*(job.id for job in jobs), *(claim.id for claim in self._arrivals.claims())})
        self.acceptance.scan()

    def reload(self) -> None:
        """Apply a new configuration."""
        self.acceptance.config = self._fetcher.config = self._config()
        self._watcher.settle_sec = self._config().spool.settle_sec

    def stop(self) -> None:
        """Stop watching, and end the checks and fetches."""
        self._watcher.stop()
        self._checkers.close()
        self._fetcher.close()

    def close(self) -> None:
        """Remove what rejected arrivals have left. Call it before the spool is closed."""
        self._arrivals.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def settle(self) -> list[Job]:
        """Take the events of incoming/ and the results of fetches and checks. Returns the accepted jobs."""
        if self._watcher.read():
            self.rescan()
        self.acceptance.fetches.settle()
        return self.acceptance.settle()

    def scan(self) -> list[Job]:
        """Take what has arrived, and settle the arrivals that name other jobs. Returns the accepted jobs."""
        now = self._clock()
        if now >= self._rescan_at or self.acceptance.incoming.num_unsettled:
            self._rescan_at = now + self._config().spool.rescan_interval_sec
            self._watcher.rearm()
            self.acceptance.scan()
        # After the scan of incoming/: files that were dropped together are then all known.
        return self.acceptance.settle_waiting()
