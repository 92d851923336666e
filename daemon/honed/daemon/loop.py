"""honed: watches the spool and runs the jobs that are dropped into it, one job per free device.

The loop is a list of named steps. Each does what can be done now, and never blocks:

    obey signals · settle what ended · follow events · halve sweeps · take arrivals · plan what waited for others ·
    look for workers without entries · vacate closed devices · start what can · stage what is next ·
    end what must · notify · have rows sent and pages made · keep house · keep the socket · report

Signals, arrivals, the preflight helpers and the control socket only wake it. The control socket is served between the
steps, too, so that no answer waits for a whole turn.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from honed import __version__
from honed.daemon import owning, signal_notes, verbs
from honed.daemon.ahead import JOBS_GROUP
from honed.daemon.arrivals.intake import Intake
from honed.daemon.attempts import Attempts
from honed.daemon.dispatch import Dispatch
from honed.daemon.health import Health, start_again_later
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.publishing import Publishing
from honed.daemon.rebuild import begin, tend
from honed.daemon.signals import Configuration, Shutdown
from honed.daemon.status import Status
from honed.daemon.wake import Wake
from honed.job import recovery
from honed.job.database import Database
from honed.job.job import State
from honed.job.spool import Spool
from honed.run.choice import choose_runner
from honed.run.fetcher import FetchRunner
from honed.run.runner import Runner
from honed.spec import config
from honed.spec.config import Config
from honed.system import argument, durable, log_quota, message, python
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.device import Device
from honed.system.error import HonedError
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.notify import Notifier

log = logging.getLogger("honed")

#: Seconds that the loop sleeps if an error keeps it from finding out when the next step is due.
UNPLANNED_SEC = 1.0


class Daemon:
    """One instance. Clocks, device probe and runners are parameters, so that tests can replace them."""

    def __init__(
        self,
        layout: Layout,
        config: Config,
        *,
        runner: Runner | None = None,
        fetch_runner: FetchRunner | None = None,
        probe: Callable[[list[int] | None], list[Device]] | None = None,
        clock: Callable[[], float] | None = None,
        now: Callable[[], float] = time.time,
        drain: bool = False,
    ) -> None:
        for path in (layout.state_dir, layout.runtime_dir, layout.cache_dir, layout.jobs_dir):
            durable.make_dir(path)
        self._configuration = Configuration(layout, config)
        in_force = self._configuration.get
        self._wake = Wake()
        clock, steady = (self._wake.clock, time.monotonic) if clock is None else (clock, clock)
        self._health = Health(clock=clock)
        self._notifier = Notifier()
        self._spool = Spool(layout, lock=functools.partial(owning.take, notifier=self._notifier))
        # Systemd is where workers, fetches and checks are units; a cluster goes on while honed cannot run.
        runner, systemd = (runner, None) if runner is not None else choose_runner(layout, in_force, clock=steady)
        self._intake = Intake(
            layout,
            self._spool,
            in_force,
            systemd,
            fetch_runner,
            failures=self._health.failures,
            follow=self._wake.follow,
            clock=clock,
        )
        self._database = Database(layout.database_path)
        self._attempts = Attempts(
            layout, config, self._spool, self._database, runner, failures=self._health.failures, clock=clock
        )
        self._dispatch = Dispatch(
            self._spool,
            self._database,
            in_force,
            runner,
            self._intake.acceptance,
            self._attempts,
            probe=probe or runner.devices,
            housekeeper=lambda: self._housekeeper,  # it is made below
            group=JOBS_GROUP if systemd is not None else "",
            clock=clock,
            now=now,
        )
        self._shutdown = Shutdown(self._attempts, self._dispatch.staging, in_force, drain=drain)
        self._publishing = Publishing(
            layout, config, self._database, self._attempts, self._spool, self._dispatch.selection.queue, clock=clock
        )
        self._housekeeper = Housekeeper(
            layout, config, self._spool, self._database, self._dispatch.unfinished, self._attempts.rows, clock=clock
        )
        self._status = Status(
            self._notifier,
            self._health,
            self._configuration,
            self._shutdown,
            self._spool,
            self._intake,
            self._attempts,
            self._dispatch.backlog,
            self._dispatch.placement,
        )
        self._answers = verbs.answers(
            layout,
            in_force,
            self._wake,
            self._spool,
            self._database,
            self._intake,
            self._attempts,
            self._housekeeper,
            self._status,
            self._dispatch,
        )

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until a signal, or until all is done with `--drain`. Returns the exit status."""
        self._wake.catch_signals()
        with _without_collection():
            self._recover()
        placement = self._dispatch.placement
        placement.report()
        if placement.fault:
            self._publishing.notices.tell_of_machine(placement.fault)
        self._note_fault(self._health.failures.fault)
        self._status.report()  # before READY=1: a client that waited for that reads it, and what is wrong
        self._notifier.ready()
        line = self._health.ask(self._status.line, "")
        log.info("honed %s ready: %s", __version__, line, extra=about(message=message.READY))
        try:
            while not self._health.ask(self._is_over, otherwise=False):
                self._turn()
            # What could not be written in the last turn, or was not due.
            self._health.run([self._tend_database, functools.partial(self._publishing.counters.tend, is_last=True)])
        finally:
            self._close()
        log.info("honed is stopping: %s", self._health.ask(self._status.line, ""))
        return 0

    def _turn(self) -> None:
        if self._wake.sleep(self._health.ask(self._patience, otherwise=UNPLANNED_SEC)):
            self._intake.rescan()
        steps = [
            self._tend_database,
            self._obey_signals,
            self._dispatch.settle,
            self._dispatch.settle_staged,
            self._attempts.follow,
            self._dispatch.halvings.tend,
            self._take_arrivals,
            self._dispatch.plan_deferred,
            self._dispatch.look_around,
            self._dispatch.vacate,
            self._dispatch.start_next,
            self._dispatch.stage_next,
            self._attempts.enforce,
            self._publishing.notices.tend,
            self._publishing.tend_sender,
            self._publishing.tend_reporter,
            self._publishing.counters.tend,
            self._housekeeper.tend,
            self._answers.tend,
        ]
        self._note_fault(self._health.run(item for step in steps for item in (step, self._answers.serve)))
        self._status.report()

    def _note_fault(self, fault: str) -> None:
        """Note the machine's fault that kept a step from working, or one that a part of the daemon has found."""
        fault = fault or self._dispatch.fence.fault or self._intake.acceptance.fault
        self._health.note(fault, self._publishing.notices.tell_of_machine)

    def _patience(self) -> float:
        parts = (self._dispatch, self._housekeeper, self._publishing, self._notifier)
        waits = [part.patience() for part in parts]
        if not self._shutdown.is_asked:  # then no file is taken any more
            waits.append(self._intake.patience())
        if self._database.is_catching_up:
            waits.append(0.0)
        return max(0.0, self._health.pause(), min(waits))

    def _is_over(self) -> bool:
        if self._shutdown.is_asked:
            return self._shutdown.is_over
        return self._shutdown.is_drain and self._intake.is_empty and self._dispatch.is_idle

    # -- start and end ------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        alive = functools.partial(owning.keep_starting, self._notifier)
        recovery.recover(self._spool, alive)
        log_quota.begin(self._spool.catalog.uid_of)
        self._publishing.recover()
        self._intake.acceptance.listen(self._publishing.counters.count_rejection)
        self._intake.acceptance.fetches.listen(self._publishing.counters.count_fetched)
        self._housekeeper.listen(self._publishing.counters.count_removed)
        self._dispatch.fence.look()  # before anything is started; what it finds is adopted below
        self._intake.recover()
        begin(self._database, self._spool, outbox=self._attempts.outbox, failures=self._health.failures, alive=alive)
        self._dispatch.recover()
        for job in list(self._spool.jobs(State.RUNNING)):
            self._attempts.adopt(job)
        self._intake.start(self._dispatch.backlog.jobs())
        for tend_now in (self._publishing.notices.tend, self._publishing.tend_sender):  # else in a turn of the loop
            with self._health.failures.alone(tend_now.__qualname__):
                tend_now()

    def _close(self) -> None:
        self._answers.close()
        self._intake.stop()
        self._housekeeper.close()
        self._publishing.close(is_last=self._shutdown.is_drain)
        self._database.close()
        self._intake.close()
        self._spool.close()
        self._wake.close()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _tend_database(self) -> None:
        tend(
            self._database,
            self._spool,
            lambda: {number: running.following.offset for number, running in self._attempts.running.items()},
            failures=self._health.failures,
            alive=self._notifier.watchdog,
        )

    def _obey_signals(self) -> None:
        signals = self._wake.signals()
        if signals & {signal.SIGTERM, signal.SIGINT} and not self._shutdown.is_asked:
            self._notifier.stopping()
            self._shutdown.ask()
        if signal.SIGHUP in signals:
            self._reload()
        if self._shutdown.is_asked:
            self._shutdown.stop_jobs()

    def _reload(self) -> None:
        self._notifier.reloading()
        if self._configuration.reload():
            self._attempts.config = self._configuration.get()
            self._housekeeper.reload(self._configuration.get())
            self._intake.reload()
            self._answers.reload()
            self._dispatch.backlog.reorder()
            self._dispatch.placement.reload()
            self._publishing.reload(self._configuration.get())
            log.info("configuration reloaded", extra=about(message=message.RELOADED))
        self._notifier.ready()

    def _take_arrivals(self) -> None:
        accepted = self._intake.settle()
        if not self._shutdown.is_asked:
            accepted += self._intake.scan()
        for number in [job.id for job in accepted]:  # one that was found late may have moved on meanwhile
            if (job := self._spool.job(number)) is not None:
                self._database.put_job(job)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Read the jobs without Python's cyclic garbage collection. They are no garbage, and no later collection visits
    them: 50,000 jobs have a million objects."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the man page is generated from it."""
    made = argparse.ArgumentParser(
        prog="honed", description="Watch the spool and run the training jobs dropped into it."
    )
    argument.add_root(made)
    made.add_argument(
        "--user",
        action="store_const",
        dest="root",
        const=layouts.user_root(),
        help="your per-user instance, in the XDG directories; for systemctl --user",
    )
    made.add_argument("--drain", action="store_true", help="exit when no work is left; held jobs do not count")
    argument.add_verbose(made)
    argument.add_version(made)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed` command."""
    python.protect()
    options = parser().parse_args(arguments)
    logs.set_up(verbose=options.verbose)
    faulthandler.enable()  # for the watchdog's SIGABRT: the stack of a hanging loop goes to the journal
    return start(layouts.of(options.root), drain=options.drain)


def start(layout: Layout, *, drain: bool = False, **parts: Any) -> int:
    """Run one instance. Returns the exit status: 0, or one with which systemd does not restart it."""
    if signal_notes.is_asked_to_end():
        return 0
    try:
        return Daemon(layout, config.load(layout), drain=drain, **parts).run()
    except HonedError as error:
        log.critical("%s%s", error.message, f" ({error.hint})" if error.hint else "")
        return 78  # EX_CONFIG: RestartPreventExitStatus= in the unit
    except PermissionError as error:
        log.critical("%s: %s (run as honed's user, or give --root DIR)", error.filename, error.strerror)
        return 77  # EX_NOPERM
    except (OSError, sqlite3.Error) as error:
        fault = durable.machine_fault(error)
        if fault is None:
            raise
        if drain or "NOTIFY_SOCKET" not in os.environ:
            log.critical("%s", fault)
            return 73  # EX_CANTCREAT
        start_again_later(fault)


if __name__ == "__main__":
    sys.exit(main())
