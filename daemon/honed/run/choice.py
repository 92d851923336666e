"""The choice between systemd units and child processes for workers and fetches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from honed.run.fetcher import FetchRunner, ProcessFetchRunner
from honed.run.process import ProcessRunner
from honed.run.runner import Runner
from honed.run.sender_process import is_a_unit
from honed.run.systemd import SystemdRunner, why_not
from honed.run.systemd_fetch import UnitFetchRunner
from honed.spec.config import Config
from honed.system.dbus import Systemd
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout

log = logging.getLogger(__name__)

Status = Literal["ok", "warning", "error"]


def choose_runner(
    layout: Layout, config: Callable[[], Config], *, clock: Callable[[], float]
) -> tuple[Runner, Systemd | None]:
    """Return the runner to use, units if possible, and the systemd connection if workers, or checks and fetches alone,
    are units; log which and why.

    `config` is called whenever a worker starts, since it may have been reloaded. Raises EnvironmentInvalidError.
    """
    asked = config().jobs.runner
    if config().jobs.has_cluster:
        from honed.run.slurm import SlurmRunner
        from honed.run.slurm_client import why_none

        if problem := why_none(layout):
            raise EnvironmentInvalidError(
                f"jobs.runner is slurm, but {problem}", hint="see cluster.md in the documentation"
            )
        who = "each job's submitter" if layout.is_of_system else "this instance's own user"
        log.info("workers are jobs of the Slurm cluster, and run there as %s", who)
        units = _units(layout) if layout.is_of_system else None
        return SlurmRunner(layout, lambda: config().slurm, clock=clock), units
    systemd = Systemd()
    reason = "as configured" if asked == "process" else why_not(layout, systemd)
    if reason is None:
        log.info("workers are units, honed-job@ID.service")
        runner = SystemdRunner(
            layout,
            systemd,
            watchdog_sec=lambda: config().jobs.stall_timeout_sec,
            stop_timeout_sec=lambda: config().jobs.stop_timeout_sec,
            clock=clock,
        )
        return runner, systemd
    systemd.close()
    if asked == "systemd":
        raise EnvironmentInvalidError(
            f"jobs.runner is systemd, but workers cannot run as units: {reason}",
            hint='see honectl doctor; or set runner = "auto"',
        )
    # Below another root nobody expects units; for the system's own instance the administrator should know.
    is_expected = asked == "process" or layout.root != Path("/")
    log.log(logging.INFO if is_expected else logging.WARNING, "workers run as child processes of honed: %s", reason)
    return ProcessRunner(layout), None


def _units(layout: Layout) -> Systemd | None:
    """Return the systemd connection for the checks and fetches of an instance whose workers run elsewhere."""
    systemd = Systemd()
    if (reason := why_not(layout, systemd)) is None:
        return systemd
    systemd.close()
    log.warning("checks and fetches run as child processes of honed: %s", reason)
    return None


def findings(layout: Layout, config: Config) -> Iterator[tuple[str, Status, str, str]]:
    """Yield the name, status, detail and hint of every check of the workers' cluster, for `honectl doctor`."""
    if config.jobs.has_cluster:
        from honed.run import slurm_doctor

        yield from (("Slurm", *finding) for finding in slurm_doctor.findings(layout, config))


def choose_fetch_runner(layout: Layout, config: Config, systemd: Systemd | None) -> FetchRunner:
    """Return the runner of fetches. `systemd` is set if workers run as units."""
    if systemd is not None:
        return UnitFetchRunner(layout, systemd)
    if config.policy.hub and is_a_unit(layout):
        log.warning("policy.hub is on, but fetches run as child processes of honed, whose unit has no network")
    return ProcessFetchRunner(layout)
