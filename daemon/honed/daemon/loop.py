"""honed: watches the spool and runs the jobs that are dropped into it, one job per free device.

The loop is a list of named steps. Each does what can be done now, and never blocks:

    obey signals · settle what ended · follow events · take arrivals · plan what waited for others · start what can ·
    end what must · notify · have rows sent and pages made · keep house ·
    report

Signals, arrivals, the preflight helpers and the control socket only wake it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import logging
import os
import selectors
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from honed import __version__
from honed.daemon import restart
from honed.daemon.arrivals.acceptance import Acceptance
from honed.daemon.arrivals.checkers import Checkers
from honed.daemon.arrivals.watcher import Watcher
from honed.daemon.attempts import Attempts
from honed.daemon.backlog import Backlog
from honed.daemon.housekeeper import Housekeeper
from honed.daemon.placement import DEVICE_PROBE_INTERVAL_SEC, Placement
from honed.daemon.publishing import Publishing
from honed.daemon.rebuild import catch_up, rebuild
from honed.daemon.verbs import Answers
from honed.daemon.wake import Wake
from honed.job import query, unstage
from honed.job.arrival import Arrivals
from honed.job.database import Database
from honed.job.job import Job, State, Stop
from honed.job.spool import Spool
from honed.run.choice import choose_fetch_runner, choose_runner
from honed.run.fetcher import Fetcher, FetchRunner
from honed.run.helper import children
from honed.run.runner import Runner
from honed.run.systemd_check import CheckUnits
from honed.send.notification import Notices
from honed.spec import config
from honed.spec.config import Config
from honed.system import control, device, durable, message
from honed.system import layout as layouts
from honed.system import log as logs
from honed.system.device import Device
from honed.system.error import HonedError, InternalError, said
from honed.system.layout import Layout
from honed.system.log import about
from honed.system.notify import Notifier

log = logging.getLogger("honed")

#: Seconds for which a free device waits for arrivals that are still being taken, so that the most urgent of many files
#: dropped together starts first.
ARRIVAL_GRACE_SEC = 10.0
#: Seconds between passes of the loop, at most, while one of its steps keeps failing.
MAX_BROKEN_PAUSE_SEC = 30.0
#: Seconds before the retry of a job whose worker could not be started, for no fault of its own.
NOT_NOW_SEC = 10.0
#: Seconds asked of systemd at a time while workers write their checkpoints.
STOP_EXTENSION_SEC = 30.0
#: The same while the database is rebuilt, job by job.
START_EXTENSION_SEC = 60.0


class Daemon:
    """One instance. Clock, device probe and runners are parameters, so that tests can replace them."""

    def __init__(
        self,
        layout: Layout,
        config: Config,
        *,
        runner: Runner | None = None,
        fetch_runner: FetchRunner | None = None,
        probe: Callable[[list[int] | None], list[Device]] = device.probe,
        clock: Callable[[], float] = time.monotonic,
        drain: bool = False,
    ) -> None:
        for path in (layout.state_dir, layout.runtime_dir, layout.cache_dir, layout.jobs_dir):
            durable.make_dir(path)
        self._layout = layout
        self._config = config
        self._clock = clock
        self._drain = drain
        self._is_stopping = False
        self._num_broken_turns = 0
        self._config_fault = ""  # why the last reload was refused
        self._machine_fault = restart.last_fault()  # what keeps us from working, also across restarts
        self._pause_until = 0.0
        self._rescan_at = 0.0
        self._free_since: float | None = None
        self._spool = Spool(layout)
        self._arrivals = Arrivals(self._spool)
        self._notifier = Notifier()
        self._selector = selectors.DefaultSelector()
        self._wake = Wake(self._selector, self._rescan)
        self._watcher = Watcher(self._spool.incoming_dir, settle_sec=config.spool.settle_sec, wake=self._wake.wake)
        systemd = None  # where workers, fetches and checks are units
        if runner is None:
            runner, systemd = choose_runner(layout, lambda: self._config, clock=clock)
        check_units = CheckUnits(layout, systemd, clock=clock) if systemd is not None else None
        self._checkers = Checkers(
            children(layout), check_units.of if check_units is not None else None, self._selector_changed, clock=clock
        )
        self._fetcher = Fetcher(
            layout, config, fetch_runner or choose_fetch_runner(layout, config, systemd), clock=clock
        )
        self._acceptance = Acceptance(self._spool, self._arrivals, self._watcher, self._checkers, config, self._fetcher)
        self._database = Database(layout.database_path)
        self._attempts = Attempts(layout, config, self._spool, self._database, runner, clock=clock)
        self._placement = Placement(layout, config, self._attempts, probe=probe, clock=clock)
        self._backlog = Backlog(
            layout, self._spool, self._database, self._acceptance, self._attempts, self._placement, clock=clock
        )
        self._notices = Notices(layout, config.notify, self._spool)
        self._publishing = Publishing(
            layout, config, self._database, self._attempts, self._notices, job_of=self._spool.job, clock=clock
        )
        self._housekeeper = Housekeeper(layout, config, self._spool, self._database, self._unfinished, clock=clock)
        self._answers = Answers(
            layout,
            config,
            self._spool,
            self._database,
            self._watcher,
            self._acceptance,
            self._attempts,
            self._backlog,
            housekeeper=self._housekeeper,
            unfinished=self._unfinished,
            status=self._status,
            wake=self._wake.wake,
        )
        self._server = control.Server(
            layout.control_path,
            self._selector,
            self._answers.answer,
            max_request_bytes=control.with_file(config.spool.max_spec_bytes),
        )

    def _unfinished(self) -> Iterable[Job]:
        yield from self._backlog.jobs()
        yield from (item.job for item in self._attempts.running.values())

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until a signal, or until all is done with `--drain`. Returns the exit status."""
        self._wake.catch_signals()
        self._recover()
        self._notifier.status(self._status(self._everybody()))  # before READY=1: then it is read at once
        self._notifier.ready()
        log.info("honed %s ready: %s", __version__, self._status(), extra=about(message=message.READY))
        self._tell_of_machine("")
        self._placement.tell()
        if self._placement.fault:
            self._notices.tell_of_machine(self._placement.fault)
        try:
            while not self._is_over():
                self._turn()
            self._is_done(self._tend_database, [])  # writes that the database did not take in the last turn
        finally:
            self._close()
        log.info("honed ends: %s", self._status())
        return 0

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            key.data(events)
        steps = (
            self._tend_database,
            self._obey_signals,
            self._settle,
            self._attempts.follow,
            self._take_arrivals,
            self._plan_deferred,
            self._start_next,
            self._attempts.enforce,
            self._notices.tend,
            self._publishing.tend_sender,
            self._publishing.tend_reporter,
            self._housekeeper.tend,
        )
        faults: list[str] = []
        num_broken = sum(not self._is_done(step, faults) for step in steps)
        self._tell_of_machine(faults[0] if faults else self._attempts.fault or self._acceptance.fault)
        self._report(is_healthy=num_broken == len(faults))
        # A step that keeps failing is retried ever more slowly, and the restart is left to systemd's watchdog.
        self._num_broken_turns = self._num_broken_turns + 1 if num_broken else 0
        self._pause_until = self._clock() + min(self._num_broken_turns, MAX_BROKEN_PAUSE_SEC)

    def _is_done(self, step: Callable[[], None], faults: list[str]) -> bool:
        """Run one step. Log unforeseen errors, so that the other steps continue; add machine faults to `faults`."""
        try:
            step()
        except Exception as error:
            if fault := durable.machine_fault(error):
                faults.append(fault)
            else:
                log.exception("a step of the loop failed")
            return False
        return True

    def _tell_of_machine(self, fault: str) -> None:
        """Report a machine fault such as a full disk once, and once more when it is over."""
        if fault and not self._machine_fault:
            log.error("honed cannot work: %s", fault, extra=about(message=message.DEGRADED))
            self._notices.tell_of_machine(fault)
        elif self._machine_fault and not fault:
            log.info("honed works again", extra=about(message=message.RECOVERED))
            self._notices.tell_of_machine("")
        self._machine_fault = fault

    def _rescan(self) -> None:
        self._rescan_at = 0.0

    def _selector_changed(self, old_fd: int | None, new_fd: int | None) -> None:
        """Follow the start or the end of a preflight helper."""
        if old_fd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(old_fd)
        if new_fd is not None:
            self._selector.register(new_fd, selectors.EVENT_READ, lambda _events: None)

    def _patience(self) -> float:
        """Return the seconds that the loop may sleep if nothing wakes it."""
        now = self._clock()
        waits = [self._rescan_at - now, self._housekeeper.patience(), self._publishing.patience()]
        if self._attempts.running or self._acceptance.fetches.numbers:
            waits.append(self._config.jobs.poll_interval_sec)
        if self._acceptance.incoming.num_unsettled:
            waits.append(min(0.1, self._config.spool.settle_sec))
        if self._acceptance.is_busy or self._acceptance.num_waiting:
            waits.append(0.2)
        elif self._backlog.has_queued and not self._spool.is_paused:
            waits.append(DEVICE_PROBE_INTERVAL_SEC)
        waits += [at - now for at in (self._backlog.next_retry_at(), self._checkers.deadline) if at is not None]
        if self._notifier.watchdog_interval_sec is not None:
            waits.append(self._notifier.watchdog_interval_sec / 2)
        return max(0.0, self._pause_until - now, min(waits))

    def _is_over(self) -> bool:
        if self._is_stopping:
            return all(self._is_left(job_id) for job_id in self._attempts.running)
        if self._attempts.running:
            return False
        on_their_way = self._acceptance.num_waiting + len(self._acceptance.fetches.numbers) + self._acceptance.num_stuck
        is_taken = not self._acceptance.is_busy and not on_their_way
        return self._drain and is_taken and self._backlog.all_wait_for_a_person()

    def _is_left(self, job_id: int) -> bool:
        """Return True if a running job continues while honed is down."""
        return self._config.jobs.on_stop == "leave" and self._attempts.is_left(job_id)

    # -- start and end ------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._spool.recover()
        self._arrivals.recover()
        if self._database.is_new:
            alive = functools.partial(self._notifier.extend_timeout, START_EXTENSION_SEC)
            rebuild(self._database, self._spool, self._layout, outbox=self._attempts.outbox, alive=alive)
        catch_up(self._database, self._spool, self._layout)
        self._backlog.recover()
        for job in list(self._spool.jobs(State.RUNNING)):
            self._attempts.adopt(job)
        self._watcher.start()
        self._fetcher.recover(
            {*(job.id for job in self._backlog.jobs()), *(claim.id for claim in self._arrivals.claims())}
        )
        self._acceptance.scan()
        with contextlib.suppress(OSError):  # the notices are sent now, or in a turn of the loop
            self._notices.tend()
        self._publishing.tend_sender()  # rows may wait although there is nothing else to do

    def _close(self) -> None:
        self._server.close()
        self._watcher.stop()
        self._checkers.close()
        self._fetcher.close()
        self._housekeeper.close()
        # After `--drain` nothing may ever run again to send the rest.
        self._publishing.close(is_last=self._drain and not self._is_stopping)
        self._database.close()
        self._arrivals.close()
        self._spool.close()
        self._selector.close()

    def _obey_signals(self) -> None:
        signals = self._wake.signals()
        if signals & {signal.SIGTERM, signal.SIGINT} and not self._is_stopping:
            self._is_stopping = True
            self._attempts.is_stopping = True
            self._notifier.stopping()
            left = [job_id for job_id in self._attempts.running if self._is_left(job_id)]
            asked = [job_id for job_id in self._attempts.running if job_id not in left]
            log.info("asked to stop; %d running jobs go on, %d are asked for a checkpoint", len(left), len(asked))
        if signal.SIGHUP in signals:
            self._reload()
        if self._is_stopping:  # in each turn: a full disk may have prevented it for one of them
            for job_id in [job_id for job_id in self._attempts.running if not self._is_left(job_id)]:
                self._attempts.stop(job_id, Stop.SHUTDOWN)

    def _reload(self) -> None:
        self._notifier.reloading()
        try:
            self._config = config.load(self._layout)
        except HonedError as error:
            log.error(  # noqa: TRY400
                "the configuration is wrong and the old one stays: %s",
                error.message,
                extra=about(message=message.CONFIG_REFUSED, code=error.code, hint=error.hint),
            )
            self._config_fault = error.message
        else:
            self._config_fault = ""
            for part in (
                self._acceptance,
                self._attempts,
                self._fetcher,
                self._placement,
                self._answers,
                self._housekeeper,
            ):
                part.config = self._config
            self._watcher.settle_sec = self._config.spool.settle_sec
            self._server.max_request_bytes = control.with_file(self._config.spool.max_spec_bytes)
            self._publishing.reload(self._config)
            log.info("configuration reloaded", extra=about(message=message.RELOADED))
        self._notifier.ready()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _tend_database(self) -> None:
        """Rebuild the database if somebody has removed it, or a disk has damaged it."""
        if self._database.is_lost:
            self._database.renew()
        if self._database.is_new:
            followed = {number: running.offset for number, running in self._attempts.running.items()}
            rebuild(self._database, self._spool, self._layout, followed=followed)
        if self._database.is_behind:
            self._database.is_behind = False  # a failure sets it again
            try:
                catch_up(self._database, self._spool, self._layout)
            except BaseException:
                self._database.is_behind = True
                raise

    def _settle(self) -> None:
        settled = self._attempts.reap()
        for job in self._attempts.put_back():
            self._backlog.put_back(job, delay_sec=NOT_NOW_SEC)
        for job in settled:
            self._backlog.put_back(job, delay_sec=self._retry_delay_sec(job))
        for job in settled:
            if job.state is State.SUCCEEDED:
                unstage.remove_copies(self._layout, job, self._unfinished())

    def _retry_delay_sec(self, job: Job) -> float:
        """Return the delay before a retry: none before the first, then twice as long each time."""
        if job.state is not State.QUEUED or job.num_failures <= 1:
            return 0.0
        delay: float = self._config.jobs.retry_delay_sec * 2 ** (job.num_failures - 2)
        log.info("job %d (%s): tried again in %.0f s", job.id, job.name, delay)
        return delay

    def _take_arrivals(self) -> None:
        self._acceptance.fetches.settle()
        for job in self._acceptance.settle():
            self._backlog.add(job)
        if self._is_stopping:
            return
        now = self._clock()
        if now >= self._rescan_at or self._acceptance.incoming.num_unsettled:
            self._rescan_at = now + self._config.spool.rescan_interval_sec
            self._watcher.rearm()
            self._acceptance.scan()
        # After the scan of incoming/: files that were dropped together are then all known.
        for job in self._acceptance.settle_waiting():
            self._backlog.add(job)

    def _plan_deferred(self) -> None:
        self._backlog.settle_replanned()
        if not self._is_stopping:
            self._backlog.plan_deferred()

    def _start_next(self) -> None:
        while not self._is_stopping and not self._spool.is_paused and self._has_slot():
            chosen = self._backlog.next_that_fits()
            if chosen is None:
                self._free_since = None
                return
            if self._must_wait_for_arrivals():
                return
            job, free = chosen
            self._free_since = None
            self._backlog.take(job)
            try:
                backend = self._backlog.backend_of(job)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if durable.machine_fault(error):
                    self._backlog.put_back(job)
                    raise
                self._backlog.fail(
                    job, InternalError(f"its plan cannot be read: {said(error)}", hint="drop the job again")
                )
                continue
            try:
                self._attempts.start(job, free, backend)
            except BaseException:  # e.g. a full disk: the job is still in queued/
                self._backlog.put_back(job)
                raise

    def _has_slot(self) -> bool:
        limit = self._config.jobs.max_running
        return limit is None or len(self._attempts.running) < limit

    def _must_wait_for_arrivals(self) -> bool:
        """Return True if an arrival that is being accepted may be more urgent than the job that could start now."""
        now = self._clock()
        self._free_since = self._free_since if self._free_since is not None else now
        return self._acceptance.is_busy and now - self._free_since < ARRIVAL_GRACE_SEC

    def _report(self, *, is_healthy: bool) -> None:
        fault = self._machine_fault or self._placement.fault
        trouble = f"degraded: {fault}; " if fault else ""
        trouble += "" if is_healthy else "a step of the loop fails, see the log; "
        self._notifier.status(trouble + self._status(self._everybody()))
        if is_healthy:
            self._notifier.watchdog()
        if self._is_stopping and self._attempts.running:
            self._notifier.extend_timeout(STOP_EXTENSION_SEC)

    def _everybody(self) -> query.Asker:
        """Return the asker that stands for the readers of STATUS=: every user of the machine, in `systemctl status`."""
        return query.Asker(query.NOBODY_UID, is_administrator=False, reads_all=self._config.policy.share_results)

    def _status(self, asker: query.Asker = query.ANYBODY) -> str:
        """Return one line for people, without the names of jobs that the asker may not read."""
        running = [
            f"{item.job.name} ({item.job.id}) {item.narrator.words()}"
            if asker.may_read(item.job)
            else f"job {item.job.id}"
            for item in self._attempts.running.values()
        ]
        parts = [f"running {', '.join(running)}" if running else "idle", f"{self._backlog.num_queued} queued"]
        parts += [f"{self._backlog.num_held} held"] if self._backlog.num_held else []
        parts += [f"{self._backlog.num_short} waiting for disk space"] if self._backlog.num_short else []
        parts += (
            [f"{num_stuck} not checked: {self._checkers.fault}"] if (num_stuck := self._acceptance.num_stuck) else []
        )
        parts += self._fetcher.status(is_named=asker.reads_all)
        parts += ["paused"] if self._spool.is_paused else []
        parts += ["stopping"] if self._is_stopping else []
        parts += (
            [f"NOT reloaded, the old configuration is in force: {self._config_fault}"] if self._config_fault else []
        )
        return "; ".join(parts)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the man page is generated from it."""
    made = argparse.ArgumentParser(
        prog="honed", description="Watch the spool and run the training jobs dropped into it."
    )
    made.add_argument(
        "--root",
        type=Path,
        default=layouts.default_root(),
        help="root directory of the instance (default: $HONED_ROOT or /)",
    )
    made.add_argument(
        "--user",
        action="store_const",
        dest="root",
        const=layouts.user_root(),
        help="your per-user instance, in the XDG directories; for systemctl --user",
    )
    made.add_argument("--drain", action="store_true", help="exit when no work is left; held jobs do not count")
    made.add_argument("--verbose", action="store_true", help="log debug messages")
    made.add_argument("--version", action="version", version=f"honed {__version__}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `honed` command."""
    options = parser().parse_args(arguments)
    logs.set_up(verbose=options.verbose)
    faulthandler.enable()  # for the watchdog's SIGABRT: the stack of a hanging loop goes to the journal
    return start(layouts.of(options.root), drain=options.drain)


def start(layout: Layout, *, drain: bool = False, **parts: Any) -> int:
    """Run one instance. Returns the exit status: 0, or one with which systemd does not restart it in vain."""
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
        restart.start_again_later(fault)


if __name__ == "__main__":
    sys.exit(main())
