"""The status line: what honed does and what is wrong, for `systemctl status` and honectl."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from honed import __version__
from honed.daemon.arrivals.intake import Intake
from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.health import Health
from honed.daemon.placement import Placement
from honed.daemon.signals import Configuration, Shutdown
from honed.daemon.verb import Right, verb
from honed.job import query, shape
from honed.job.progress import together
from honed.job.spool import Spool
from honed.system import training
from honed.system.control import Request
from honed.system.notify import Notifier

#: Seconds asked of systemd at a time while workers write their checkpoints.
STOP_EXTENSION_SEC = 30.0


@dataclass(frozen=True)
class Status:
    """The status line, and the report to systemd in every turn."""

    notifier: Notifier
    health: Health
    configuration: Configuration
    shutdown: Shutdown
    spool: Spool
    intake: Intake
    attempts: Attempts
    backlog: Backlog
    placement: Placement

    @verb("status")
    def answer(self, _request: Request, asker: query.Asker) -> shape.Status:
        return {
            "status": self.line(asker),
            "pid": os.getpid(),
            "version": __version__,
            "is_watching": self.intake.is_watching,
            "is_paused": self.spool.is_paused,
            "takes_drops": self.configuration.get().policy.arrivals == "spool",
            "num_arriving": self.intake.acceptance.incoming.num_seen,
            "limit": self.intake.acceptance.incoming.beyond(asker.uid),
            "devices": self.placement.availability.rows(self.placement.all()),
            "arrivals": [row.seen_by(asker) for row in self.intake.acceptance.fetches.rows()],
        }

    @verb("pause", "resume", right=Right.ADMINISTRATOR, wakes=True)
    def pause(self, request: Request, _asker: query.Asker) -> str:
        """Stop starting jobs, or start them again. Returns the status line."""
        self.spool.pause(request.verb == "pause")
        return self.line()

    def report(self) -> None:
        """Report to systemd that the loop has made a pass, and in which state honed is."""
        with self.health.failures.alone("the status line"):  # systemd's watchdog asks for the loop alone
            fault = self.health.fault or self.placement.fault or self._damage()
            trouble = f"degraded: {fault}; " if fault else ""
            trouble += "" if self.health.is_sound else "errors in the loop, see the journal; "
            self.notifier.status(trouble + self.public_line())
        if self.health.is_sound:
            self.notifier.watchdog()
        if self.shutdown.is_asked and self.attempts.running:
            self.notifier.extend_timeout(STOP_EXTENSION_SEC)

    def _damage(self) -> str:
        corrupt, num = self.spool.corrupt, 0
        with contextlib.suppress(OSError):
            num = len(corrupt.names())
        return f"{num} damaged {'entry' if num == 1 else 'entries'} in {corrupt.dir}: honectl doctor" if num else ""

    def public_line(self) -> str:
        """Return the line for the readers of STATUS=: every user of the machine, in `systemctl status`."""
        reads_all = self.configuration.get().policy.share_results
        return self.line(query.Asker(query.NOBODY_UID, is_administrator=False, reads_all=reads_all))

    def line(self, asker: query.Asker = query.ANYBODY) -> str:
        """Return one line for people, without the names of jobs that the asker may not read."""
        running = [
            f"{item.job.name} ({item.job.id}) {item.following.narrator.words()}"
            if asker.may_read(item.job)
            else f"job {item.job.id}"
            for _, item in sorted(self.attempts.running.items())
        ]
        parts = [f"running {', '.join(running)}" if running else "idle", f"{self.backlog.num_queued} queued"]
        parts += [f"{self.backlog.num_held} held"] if self.backlog.num_held else []
        parts += [f"{self.backlog.num_short} waiting for disk space"] if self.backlog.num_short else []
        parts += self.intake.status(is_named=asker.reads_all)
        parts += ["paused"] if self.spool.is_paused else []
        rows = self.placement.availability.rows(self.placement.all())
        parts += together((row["label"], closure["detail"]) for row in rows for closure in row["closures"])
        parts += ["stopping"] if self.shutdown.is_asked else []
        parts += [f"{training.MISSING}: {training.REMEDY}"] if training.is_missing() else []
        fault = self.configuration.fault
        parts += [f"NOT reloaded, the old configuration stays in force: {fault}"] if fault else []
        return "; ".join(parts)
