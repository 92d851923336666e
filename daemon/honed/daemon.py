"""honed: watches the spool and runs what is dropped into it, one job per free device.

The loop is a list of named steps, each of which does what can be done now and waits for nothing:

    obey signals · settle what ended · follow events · take arrivals · plan what waited for others · start what can ·
    end what must · have rows sent and pages made · report

Signals, arrivals, the preflight helper and the control socket only wake it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import selectors
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from honed import __version__, access, config, control, device, durable, foreign, message, query, staged
from honed import layout as layouts
from honed import log as logs
from honed.acceptance import Acceptance
from honed.attempts import Attempts
from honed.checker import Checker
from honed.config import Config
from honed.database import Database
from honed.dbus import Systemd
from honed.device import Device
from honed.error import (
    EnvironmentInvalidError,
    HonedError,
    InternalError,
    ModelError,
    NotPermittedError,
    UsageError,
    from_dict,
)
from honed.fetcher import Fetcher, FetchRunner, ProcessFetchRunner
from honed.job import Job, State, Stop
from honed.layout import Layout
from honed.log import about
from honed.message import of_error
from honed.notify import Notifier
from honed.outbox import Outbox
from honed.process_runner import ProcessRunner
from honed.progress import progress_text
from honed.rebuild import catch_up, rebuild
from honed.reporter import Reporter
from honed.runner import Runner
from honed.send_process import SendProcess, is_a_unit
from honed.spool import Spool
from honed.systemd_fetch import UnitFetchRunner
from honed.systemd_runner import SystemdRunner, why_not
from honed.watcher import Watcher

log = logging.getLogger("honed")

#: Seconds for which a free device waits for arrivals that are still being taken, so that of many files dropped at once
#: the most urgent one starts first.
ARRIVAL_GRACE_SEC = 10.0
#: Seconds between looks at the GPUs while a job waits for one that others hold.
DEVICE_PROBE_INTERVAL_SEC = 2.0
#: Seconds between passes of the loop, at most, while one of its steps keeps failing.
MAX_BROKEN_PAUSE_SEC = 30.0
#: Share of a GPU's memory by which two of one kind may differ.
DEVICE_TOLERANCE = 0.02
#: Seconds between tries to start on a machine that has to be mended first, and where the last fault is kept.
START_AGAIN_SEC = 5.0
FAULT_VARIABLE = "HONED_MACHINE_FAULT"
#: Seconds before a job is tried again whose worker could not be started, for no fault of its own.
NOT_NOW_SEC = 10.0
#: Seconds asked of systemd at a time while workers write their checkpoints.
STOP_EXTENSION_SEC = 30.0


_ENDED = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}


class Daemon:
    """One instance. Time, the look at the devices and the runner come in, so that a test can hand in its own."""

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
        self._probe = probe
        self._clock = clock
        self._drain = drain
        self._signals: set[int] = set()
        self._is_stopping = False
        self._num_broken_turns = 0
        self._config_fault = ""  # why the last reload was refused
        self._device_fault = ""
        self._machine_fault = os.environ.pop(FAULT_VARIABLE, "")  # what keeps us from working, restarted or not
        self._pause_until = 0.0
        self._rescan_at = 0.0
        self._free_since: float | None = None
        self._waiting: set[int] = set()  # jobs of which it was said that they wait
        self._not_before: dict[int, float] = {}
        self._probed_at = -DEVICE_PROBE_INTERVAL_SEC
        self._devices: list[Device] = []
        self._planned_for: dict[int, Device | None] = {}  # read from the plans once
        self._asked_for: dict[int, Device] = {}  # jobs that are planned again, for that device
        self._unfit: dict[int, set[str]] = {}  # devices on which a job was found not to fit
        self._spool = Spool(layout)
        self._queue: dict[int, Job] = {}  # queued and held
        self._notifier = Notifier()
        self._selector = selectors.DefaultSelector()
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read_fd, selectors.EVENT_READ, self._drain_wake)
        self._watcher = Watcher(self._spool.incoming_dir, settle_sec=config.spool.settle_sec, wake=self.wake)
        self._client = Checker(layout, self._selector_changed)
        self._systemd: Systemd | None = None  # where workers and fetches are units
        runner = runner or self._choose_runner()
        self._fetcher = Fetcher(layout, config, fetch_runner or self._choose_fetch_runner(), clock=clock)
        self._acceptance = Acceptance(self._spool, self._watcher, self._client, config, self._unfinished, self._fetcher)
        self._database = Database(layout.database_path)
        self._attempts = Attempts(layout, config, self._spool, self._database, runner, clock=clock)
        self._sender = None if is_a_unit(layout) else SendProcess(layout, clock=clock)
        self._reporter = Reporter(layout, clock=clock)
        self._set_reporting()
        self._server = control.Server(layout.control_path, self._selector, self._answer)

    def _choose_runner(self) -> Runner:
        """Units where they can be, processes elsewhere; which and why is said. Raises EnvironmentInvalidError."""
        asked = self._config.jobs.runner
        systemd = Systemd()
        reason = "the configuration says so" if asked == "process" else why_not(self._layout, systemd)
        if reason is None:
            log.info("workers are units, honed-job@ID.service")
            self._systemd = systemd
            return SystemdRunner(
                self._layout,
                systemd,
                watchdog_sec=lambda: self._config.jobs.stall_timeout_sec,
                stop_timeout_sec=lambda: self._config.jobs.stop_timeout_sec,
                clock=self._clock,
            )
        systemd.close()
        if asked == "systemd":
            raise EnvironmentInvalidError(
                f"jobs.runner is systemd, but workers cannot be units: {reason}",
                hint='honectl doctor; or runner = "auto"',
            )
        # Below another directory nobody expects units; of the system's own instance the administrator should know.
        is_expected = asked == "process" or self._layout.root != Path("/")
        log.log(logging.INFO if is_expected else logging.WARNING, "workers are processes of honed's own: %s", reason)
        return ProcessRunner(self._layout)

    def _choose_fetch_runner(self) -> FetchRunner:
        if self._systemd is not None:
            return UnitFetchRunner(self._layout, self._systemd)
        if self._config.policy.hub and is_a_unit(self._layout):
            log.warning("policy.hub is on, but fetches are processes of honed's own, whose unit has no network")
        return ProcessFetchRunner(self._layout)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until a signal, or until all is done with `--drain`. Returns the exit status."""
        self._catch_signals()
        self._recover()
        self._notifier.status(self._status())  # first: who waits for us to be ready looks at it then
        self._notifier.ready()
        log.info("honed %s ready: %s", __version__, self._status(), extra=about(message=message.READY))
        self._tell_of_machine("")
        self._tell_of_devices()
        try:
            while not self._is_over():
                self._turn()
        finally:
            self._close()
        log.info("honed ends: %s", self._status())
        return 0

    def _tell_of_devices(self) -> None:
        """What jobs will train on; a GPU that is there and does not answer is the administrator's affair."""
        self._devices, self._probed_at = self._probe(self._config.device.gpus), self._clock()
        names = ", ".join(found.name for found in self._devices) or "nothing"
        if any(found.kind == "cuda" for found in self._devices) or self._config.device.gpus == []:
            log.info("jobs train on %s", names)
        elif any(Path("/proc/driver/nvidia/gpus").glob("*")):
            self._device_fault = "the machine has a GPU that does not answer: honectl doctor"
            log.error("%s; jobs train on %s", self._device_fault, names, extra=about(message=message.DEGRADED))
        else:
            log.info("no NVIDIA GPU here: jobs train on %s", names)

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            key.data(events)
        steps = (self._tend_database, self._obey_signals, self._settle, self._attempts.follow, self._take_arrivals,
                 self._plan_deferred, self._start_next, self._attempts.enforce, self._tend_sender,
                 self._tend_reporter)  # fmt: skip
        faults: list[str] = []
        num_broken = sum(not self._is_done(step, faults) for step in steps)
        self._tell_of_machine(faults[0] if faults else self._attempts.fault or self._acceptance.fault)
        self._report(is_healthy=num_broken == len(faults))
        # What keeps breaking is tried again at leisure, and its restart is left to systemd's watchdog.
        self._num_broken_turns = self._num_broken_turns + 1 if num_broken else 0
        self._pause_until = self._clock() + min(self._num_broken_turns, MAX_BROKEN_PAUSE_SEC)

    def _is_done(self, step: Callable[[], None], faults: list[str]) -> bool:
        """One step; what nobody foresaw in it is logged, and the other steps go on. What is the machine's is told."""
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
        """A full disk and the like: said once, and when it is over."""
        if fault and not self._machine_fault:
            log.error("honed cannot work: %s", fault, extra=about(message=message.DEGRADED))
        elif self._machine_fault and not fault:
            log.info("honed works again", extra=about(message=message.RECOVERED))
        self._machine_fault = fault

    def wake(self) -> None:
        """Make the loop go round now; safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write_fd, b".")

    def _drain_wake(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._wake_read_fd, 4096)) == 4096:
                pass
        self._rescan_at = 0.0

    def _selector_changed(self, old_fd: int | None, new_fd: int | None) -> None:
        """The preflight helper was started or is gone."""
        if old_fd is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(old_fd)
        if new_fd is not None:
            self._selector.register(new_fd, selectors.EVENT_READ, lambda _events: None)

    def _patience(self) -> float:
        """Seconds that the loop may sleep when nothing wakes it."""
        now = self._clock()
        waits = [self._rescan_at - now]
        if self._attempts.running or self._acceptance.num_fetching:
            waits.append(self._config.jobs.poll_interval_sec)
        if self._acceptance.num_unsettled:
            waits.append(min(0.1, self._config.spool.settle_sec))
        if self._acceptance.is_busy or self._acceptance.num_waiting:
            waits.append(0.2)
        elif any(job.state is State.QUEUED for job in self._queue.values()) and not self._spool.is_paused:
            waits.append(DEVICE_PROBE_INTERVAL_SEC)
        waits += [when - now for when in self._not_before.values() if when > now]
        if self._notifier.watchdog_interval_sec is not None:
            waits.append(self._notifier.watchdog_interval_sec / 2)
        return max(0.0, self._pause_until - now, min(waits))

    def _is_over(self) -> bool:
        if self._is_stopping:
            return all(self._is_left(job_id) for job_id in self._attempts.running)
        if self._attempts.running:
            return False
        on_their_way = self._acceptance.num_waiting + self._acceptance.num_fetching
        is_taken = not self._acceptance.is_busy and not on_their_way
        return self._drain and is_taken and all(self._waits_for_a_person(job) for job in self._queue.values())

    def _is_left(self, job_id: int) -> bool:
        """Whether a running job goes on while honed is down."""
        return self._config.jobs.on_stop == "leave" and self._attempts.is_left(job_id)

    def _waits_for_a_person(self, job: Job, seen: frozenset[int] = frozenset()) -> bool:
        """Whether a job is held, or queued behind one that is."""
        if job.state is not State.QUEUED:
            return job.state is State.HELD
        before = [self._find_any(reference) for reference in job.depends_on]
        ahead = [other for other in before if other is not None and other.id not in {*seen, job.id}]
        return any(self._waits_for_a_person(other, seen | {job.id}) for other in ahead)

    # -- start and end ------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._spool.recover()
        for state in (State.QUEUED, State.HELD):
            self._queue |= {job.id: job for job in self._spool.jobs(state)}
        if self._database.is_new:
            rebuild(self._database, self._spool, self._layout, outbox=self._attempts.outbox)
        catch_up(self._database, self._spool, self._layout)
        for job in list(self._spool.jobs(State.RUNNING)):
            self._attempts.adopt(job)
        self._watcher.start()
        self._fetcher.recover({*self._queue, *(claim.id for claim in self._spool.claims())})
        self._acceptance.scan()
        self._tend_sender()  # rows may wait though there is nothing else to do

    def _close(self) -> None:
        self._server.close()
        self._watcher.stop()
        self._client.close()
        self._fetcher.close()
        if self._sender is not None:
            # What `--drain` leaves behind may never run again; elsewhere the rows wait for the next start.
            is_last = self._drain and not self._is_stopping
            self._sender.finish(self._config.reporting.flush_sec) if is_last else self._sender.stop()
        self._reporter.finish(self._config.policy)
        self._database.close()
        self._spool.close()
        self._selector.close()

    def _catch_signals(self) -> None:
        def note(number: int, _frame: object) -> None:
            self._signals.add(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, note)
        # The kernel's word that somebody opens a file on which the watcher holds a lease, for the moment of a look.
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)

    def _obey_signals(self) -> None:
        signals, self._signals = self._signals, set()
        if signals & {signal.SIGTERM, signal.SIGINT} and not self._is_stopping:
            self._is_stopping = True
            self._attempts.is_stopping = True
            self._notifier.stopping()
            left = [job_id for job_id in self._attempts.running if self._is_left(job_id)]
            asked = [job_id for job_id in self._attempts.running if job_id not in left]
            log.info("asked to stop; %d running jobs go on, %d are asked for a checkpoint", len(left), len(asked))
        if signal.SIGHUP in signals:
            self._reload()
        if self._is_stopping:  # each time: a full disk may have kept the word from one of them
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
            self._acceptance.config = self._attempts.config = self._fetcher.config = self._config
            self._watcher.settle_sec = self._config.spool.settle_sec
            self._set_reporting()
            if self._sender is not None:
                self._sender.reload()
            log.info("configuration reloaded", extra=about(message=message.RELOADED))
        self._notifier.ready()

    def _set_reporting(self) -> None:
        """Keep rows for the metrics API, where one is configured. Raises SpecError for an address that is none."""
        reporting = self._config.reporting
        is_wanted = reporting.address() is not None
        limit = reporting.max_outbox_bytes
        self._attempts.outbox = Outbox(self._layout.outbox_dir, max_bytes=limit) if is_wanted else None

    # -- steps --------------------------------------------------------------------------------------------------------

    def _tend_database(self) -> None:
        """Make the database again where somebody has removed it, or a disk has damaged it."""
        if self._database.is_lost:
            self._database.renew()
        if self._database.is_new:
            followed = {number: running.offset for number, running in self._attempts.running.items()}
            rebuild(self._database, self._spool, self._layout, followed=followed)
        if self._database.is_behind:
            self._database.is_behind = False  # what fails now sets it again
            try:
                catch_up(self._database, self._spool, self._layout)
            except BaseException:
                self._database.is_behind = True
                raise

    def _tend_sender(self) -> None:
        if self._sender is not None:
            self._sender.tend(is_wanted=self._attempts.outbox is not None)

    def _tend_reporter(self) -> None:
        moved, self._database.moved = self._database.moved, set()
        self._reporter.tend(moved=moved, running=set(self._attempts.running), policy=self._config.policy)

    def _settle(self) -> None:
        settled = self._attempts.reap()
        for job in self._attempts.put_back():
            if job.state in {State.QUEUED, State.HELD}:
                self._queue[job.id] = job
                self._not_before[job.id] = self._clock() + NOT_NOW_SEC
        for job in settled:
            if job.state in {State.QUEUED, State.HELD}:
                self._queue[job.id] = job
            if job.state is State.QUEUED and job.num_failures > 1:
                # The first retry follows at once; each one after it waits twice as long as the one before.
                delay = self._config.jobs.retry_delay_sec * 2 ** (job.num_failures - 2)
                self._not_before[job.id] = self._clock() + delay
                log.info("job %d (%s): tried again in %.0f s", job.id, job.name, delay)
            if job.state is State.SUCCEEDED:
                self._remove_staged(job)

    def _remove_staged(self, job: Job) -> None:
        """Of a job that is done, what `submit --stage` had copied; what another job of the same person names stays."""
        places = staged.places(self._spec_of(job), self._layout, job.uid)
        others = [other for other in self._unfinished() if other.uid == job.uid] if places else []
        needed = {place for other in others for place in staged.places(self._spec_of(other), self._layout, other.uid)}
        for place in set(places) - needed:
            # Aside: a hundred thousand images take their time.
            threading.Thread(target=_remove, args=(job, place)).start()

    def _spec_of(self, job: Job) -> dict[str, Any]:
        try:
            return dict(json.loads(foreign.read_plain(self._layout.job(job.id).plan_path, num_names=1))["spec"])
        except (OSError, ValueError, KeyError, TypeError):  # told elsewhere, where it matters
            return {}

    def _take_arrivals(self) -> None:
        self._acceptance.settle_fetched()
        for job in self._acceptance.settle():
            self._queue[job.id] = job
            self._database.put_job(job)
        if self._is_stopping:
            return
        now = self._clock()
        if now >= self._rescan_at or self._acceptance.num_unsettled:
            self._rescan_at = now + self._config.spool.rescan_interval_sec
            self._watcher.rearm()
            self._acceptance.scan()
        # After the look at incoming/: what was dropped together is known together.
        while (waited := self._acceptance.settle_waiting()) is not None:
            self._queue[waited.id] = waited
            self._database.put_job(waited)

    def _plan_deferred(self) -> None:
        """Have the jobs planned whose inputs are made by now; a fault that is found then ends the job."""
        for done in self._acceptance.replanned():
            job, found = self._queue.get(done.job_id), self._asked_for.pop(done.job_id, None)
            if job is not None and job.state is State.QUEUED:
                self._replanned(job, done.answer, found)
        if self._is_stopping:
            return
        deferred = [job for job in self._queue.values() if job.is_deferred and job.state is State.QUEUED]
        for job in deferred:
            if not self._acceptance.is_asked_again(job.id) and self._dependencies_are_met(job):
                self._acceptance.plan_again(job, self._made_for(job))

    def _made_for(self, job: Job) -> dict[str, Path]:
        """What other jobs have made for this one: by the names under which it asks for it."""
        makers = {name: self._spool.job(number) for name, number in job.inputs.items()}
        return {name: Path(maker.output_dir) for name, maker in makers.items() if maker is not None}

    def _replanned(self, job: Job, answer: dict[str, Any], found: Device | None) -> None:
        """`found`: the device that it was planned again for, where it was that and not an input that was new."""
        if answer["ok"] and not answer["waits_for"]:
            durable.write_json(self._layout.job(job.id).plan_path, self._acceptance.plan_of(job, answer))
            self._planned_for.pop(job.id, None)
            self._queue[job.id] = self._spool.update(job, is_deferred=False)
            log.info(
                "job %d (%s): planned again, for %s", job.id, job.name, found.name if found else "what is there now"
            )
            for warning in answer["warnings"]:
                log.warning("job %d (%s): %s", job.id, job.name, warning)
            return
        problem = from_dict(answer["error"]) if not answer["ok"] else ModelError("what it starts from is not there")
        if found is not None:  # it cannot run there; it was accepted, so it can elsewhere
            self._unfit.setdefault(job.id, set()).add(found.uuid or found.kind)
            log.info("job %d (%s): not on %s: %s", job.id, job.name, found.name, problem.message)
            return
        del self._queue[job.id]
        self._fail(job, problem)

    def _start_next(self) -> None:
        while not self._is_stopping and not self._spool.is_paused and self._has_slot():
            chosen = self._choose()
            if chosen is None:
                self._free_since = None
                return
            if self._must_wait_for_arrivals():
                return
            job, free = chosen
            self._free_since = None
            self._waiting.discard(job.id)
            for of_waiting in (self._not_before, self._planned_for, self._unfit, self._queue):
                of_waiting.pop(job.id, None)
            try:
                backend = self._backend(job)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if durable.machine_fault(error):
                    self._queue[job.id] = job
                    raise
                self._fail(job, InternalError(f"its plan cannot be read: {error}", hint="drop the job again"))
                continue
            try:
                self._attempts.start(job, free, backend)
            except BaseException:  # a full disk: it lies where it was
                self._queue[job.id] = job
                raise

    def _choose(self) -> tuple[Job, Device] | None:
        """The most urgent job that fits on a free device: highest priority, then first come."""
        now = self._clock()
        ready = [job for job in self._queue.values() if job.state is State.QUEUED and not job.is_deferred]
        ready = [job for job in ready if self._not_before.get(job.id, now) <= now]
        for job in sorted(ready, key=lambda job: (-job.priority, job.id)):
            if self._acceptance.is_asked_again(job.id) or (job.depends_on and not self._dependencies_are_met(job)):
                continue
            if (free := self._free_device(job)) is not None:
                if self._holds_on(job, free):
                    return job, free
                self._asked_for[job.id] = free
                self._acceptance.plan_again(job, self._made_for(job), free)
                continue
            if not self._attempts.running and job.id not in self._waiting:
                self._waiting.add(job.id)
                log.info("job %d (%s): waits for a GPU: others hold their memory", job.id, job.name)
        return None

    def _fail(self, job: Job, error: HonedError) -> None:
        """End a queued job that cannot be started."""
        log.error("job %d (%s): %s", job.id, job.name, error.message,
                  extra=about(job, of_error(error.code), state="failed", code=error.code, hint=error.hint))  # fmt: skip
        try:
            self._database.put_job(self._spool.move(job, State.FAILED, outcome=error.code, error=error.as_dict()))
        except OSError:
            self._queue[job.id] = job
            raise

    def _dependencies_are_met(self, job: Job) -> bool:
        for reference in job.depends_on:
            found = self._find_any(reference)
            if found is None or found.state in {State.FAILED, State.CANCELLED}:
                self._hold(job, found, reference)
                return False
            if found.state is not State.SUCCEEDED:
                return False
        return True

    def _hold(self, job: Job, found: Job | None, reference: str) -> None:
        """Leave a job whose dependency will not succeed by itself to a person."""
        ended = f"({found.name}), which {_ENDED[found.state]}" if found else "which is gone"
        what = f"job {found.id if found else reference} {ended}"
        again = f"honectl requeue {found.id}, then honectl release {job.id}; or " if found else ""
        problem = EnvironmentInvalidError(f"it depends on {what}", hint=f"{again}honectl cancel {job.id}")
        log.warning("job %d (%s): held: %s", job.id, job.name, problem.message,
                    extra=about(job, message.HELD, state=State.HELD, hint=problem.hint))  # fmt: skip
        self._queue[job.id] = self._spool.move(job, State.HELD, error=problem.as_dict())
        self._database.put_job(self._queue[job.id])

    def _find_any(self, reference: str) -> Job | None:
        """The job of that number, else the newest of that name."""
        if reference.isdecimal() and (job := self._spool.job(int(reference))) is not None:
            return job
        named = [job for job in self._spool.all_jobs().values() if job.name == reference]
        return max(named, key=lambda job: job.id, default=None)

    def _has_slot(self) -> bool:
        limit = self._config.jobs.max_running
        return limit is None or len(self._attempts.running) < limit

    def _must_wait_for_arrivals(self) -> bool:
        """Whether what is being accepted may be more urgent than what could start now."""
        now = self._clock()
        self._free_since = self._free_since if self._free_since is not None else now
        return self._acceptance.is_busy and now - self._free_since < ARRIVAL_GRACE_SEC

    def _holds_on(self, job: Job, found: Device) -> bool:
        """Whether a job's plan, made for one GPU, holds on this one: what its precision and its memory go by."""
        if job.id not in self._planned_for:
            self._planned_for[job.id] = None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # its start will tell
                plan = json.loads(foreign.read_plain(self._layout.job(job.id).plan_path, num_names=1))
                self._planned_for[job.id] = Device.from_dict(plan["device"])
        planned = self._planned_for[job.id]
        if planned is None or planned.kind != "cuda" or found.kind != "cuda":
            return True
        is_alike = planned.compute_capability == found.compute_capability
        return is_alike and found.total_bytes >= planned.total_bytes * (1 - DEVICE_TOLERANCE)

    def _free_device(self, job: Job) -> Device | None:
        """A device that neither a job of ours nor anybody else uses; GPUs are asked again every few seconds.

        Of several, one for which the job's plan holds as it is.
        """
        now = self._clock()
        if now - self._probed_at >= DEVICE_PROBE_INTERVAL_SEC:
            self._devices, self._probed_at = self._probe(self._config.device.gpus), now
        in_use = self._attempts.devices_in_use()
        wants_gpu = job.num_gpus > 0 and any(found.kind == "cuda" for found in self._devices)
        taken = in_use | self._unfit.get(job.id, set())
        free = [
            found for found in (self._devices if wants_gpu else [_cpu(self._devices)])
            if (found.uuid or found.kind) not in taken and (found.kind == "cuda") == wants_gpu
            and (found.kind != "cuda" or device.is_free(found, self._config.device.busy_bytes))
        ]  # fmt: skip
        return next((found for found in free if self._holds_on(job, found)), free[0] if free else None)

    def _backend(self, job: Job) -> str:
        plan = json.loads(foreign.read_plain(self._layout.job(job.id).plan_path, num_names=1))
        name: str = plan["backend"]["name"]
        if job.attempts and job.attempts[-1].num_starts > 1:
            name = job.attempts[-1].backend  # it fell back before; it would again
        return name

    def _report(self, *, is_healthy: bool) -> None:
        fault = self._machine_fault or self._device_fault
        trouble = f"degraded: {fault}; " if fault else ""
        trouble += "" if is_healthy else "a step of the loop fails, see the log; "
        self._notifier.status(trouble + self._status())
        if is_healthy:
            self._notifier.watchdog()
        if self._is_stopping and self._attempts.running:
            self._notifier.extend_timeout(STOP_EXTENSION_SEC)

    def _status(self, asker: query.Asker = query.ANYBODY) -> str:
        """One line that a person wants to read; without the names of jobs that are not the asker's to read."""
        running = [
            f"{item.job.name} ({item.job.id}) {progress_text(item.progress) if item.progress else item.stage}"
            if asker.may_read(item.job)
            else f"job {item.job.id}"
            for item in self._attempts.running.values()
        ]
        num_queued = sum(job.state is State.QUEUED for job in self._queue.values())
        parts = [f"running {', '.join(running)}" if running else "idle", f"{num_queued} queued"]
        num_held = len(self._queue) - num_queued
        parts += [f"{num_held} held"] if num_held else []
        parts += self._fetcher.status() if asker.reads_all else []
        parts += ["paused"] if self._spool.is_paused else []
        parts += ["stopping"] if self._is_stopping else []
        parts += (
            [f"NOT reloaded, the old configuration is in force: {self._config_fault}"] if self._config_fault else []
        )
        return "; ".join(parts)

    # -- what honectl asks --------------------------------------------------------------------------------------------

    def _unfinished(self) -> Iterable[Job]:
        yield from self._queue.values()
        yield from (item.job for item in self._attempts.running.values())

    def _answer(self, request: control.Request) -> Any:
        verb, reference = request.verb, str(request.arguments.get("id", ""))
        match verb:
            case "show" if (found := self._arrival(reference, self._asker(request))) is not None:
                fetched = f"{found['repo_id']} at {found['revision']}"
                raise UsageError(f"{reference!r} is no job yet: {fetched} is fetched first", hint="honectl list")
            case str() if verb in query.READING_VERBS:
                return query.READING_VERBS[verb](self._spool, self._layout, reference, self._asker(request))
            case "status":
                asker = self._asker(request)
                return {"status": self._status(asker), "pid": os.getpid(), "version": __version__,
                        "is_watching": self._watcher.is_watching, "is_paused": self._spool.is_paused,
                        "arrivals": [arrival_row(each, asker) for each in self._acceptance.fetching()]}  # fmt: skip
            case "pause" | "resume":
                if not self._asker(request).is_administrator:
                    raise NotPermittedError(f"{verb} is for everybody's jobs", hint="root and policy.admin_group may")
                self._spool.pause(verb == "pause")
                self.wake()
                return self._status()
            case "cancel" if (found := self._arrival(reference, self._asker(request))) is not None:
                self._require_owner(request, found["id"], found["uid"])
                self._acceptance.cancel(found["id"])
                return {**found, "state": "rejected"}
            case "cancel" | "hold" | "release" | "requeue":
                job = query.find(self._spool, reference, self._asker(request))
                self._require_owner(request, job.id, job.uid)
                changed = self._change(verb, job, from_start=bool(request.arguments.get("from_start")))
                self.wake()
                return query.summary(changed, {})
            case _:
                raise UsageError(f"no verb {verb!r}")

    def _arrival(self, reference: str, asker: query.Asker) -> dict[str, Any] | None:
        """What waits for a model and is no job yet, by its number or, where no job has it, its name. Raises
        NotPermittedError for somebody else's number; their names are not looked at."""
        found = [each for each in self._acceptance.fetching() if each["source"] is not None]
        closed = [each for each in found if not (asker.reads_all or each["uid"] == asker.uid)]
        if any(str(each["id"]) == reference for each in closed):
            raise NotPermittedError(f"job {reference} is another user's", hint="honectl list shows your own")
        found = [each for each in found if each not in closed]
        if any(job.name == reference for job in self._unfinished()):
            found = [each for each in found if str(each["id"]) == reference]
        named = [each for each in found if reference in {str(each["id"]), each["name"]}]
        return named[0] if len(named) == 1 else None

    def _asker(self, request: control.Request) -> query.Asker:
        policy = self._config.policy
        is_member = access.group_id(policy.admin_group) in request.gids
        is_administrator = request.uid in {0, os.getuid()} or is_member
        return query.Asker(request.uid, is_administrator, is_administrator or policy.share_results)

    def _require_owner(self, request: control.Request, job_id: int, uid: int | None) -> None:
        if request.uid != uid and not self._asker(request).is_administrator:
            log.warning("job %d: %s refused to user %d: it is another user's", job_id, request.verb, request.uid,
                        extra=about(job_id, of_error(NotPermittedError.code), code=NotPermittedError.code))  # fmt: skip
            raise NotPermittedError(
                f"job {job_id} is another user's", hint="its owner, root and the administrators' group may change it"
            )

    def _change(self, verb: str, job: Job, *, from_start: bool) -> Job:
        if job.id in self._attempts.running and verb in {"cancel", "hold"}:
            self._attempts.stop(job.id, Stop(verb))
            return self._attempts.running[job.id].job
        changed = change(self._spool, self._layout, verb, job, from_start=from_start)
        self._queue.pop(job.id, None)
        self._not_before.pop(job.id, None)
        if changed.state in {State.QUEUED, State.HELD}:
            self._queue[job.id] = changed
        if verb == "requeue":
            for other in [other for other in self._queue.values() if job.id in other.inputs.values()]:
                # What it starts from is made anew, so it is planned anew.
                self._queue[other.id] = self._spool.update(other, is_deferred=True)
        self._database.put_job(changed)
        if verb == "requeue":  # from here on its state alone does not tell whether its rows are up to date
            with contextlib.suppress(sqlite3.Error):
                self._database.sync()
        kind = {State.HELD: message.HELD, State.CANCELLED: message.CANCELLED}.get(changed.state)
        log.info("job %d (%s): %s; now %s", job.id, job.name, verb, changed.state, extra=about(changed, kind))
        return changed


def change(spool: Spool, layout: Layout, verb: str, job: Job, *, from_start: bool = False) -> Job:
    """Do what a person asks of a job that is not running. Raises UsageError where its state does not allow it."""
    match verb, job.state:
        case "cancel", State.QUEUED | State.HELD:
            return spool.move(job, State.CANCELLED, outcome="cancelled")
        case "hold", State.QUEUED:
            return spool.move(job, State.HELD)
        case "release", State.HELD:
            return spool.move(job, State.QUEUED, error=None)
        case "requeue", State.SUCCEEDED | State.FAILED | State.CANCELLED:
            if from_start or job.state is State.SUCCEEDED:
                shutil.rmtree(layout.job(job.id).checkpoints_dir, ignore_errors=True)
            is_deferred = bool(job.inputs)  # what it starts from may have changed since
            return spool.move(
                job, State.QUEUED, outcome=None, error=None, num_failures=0, stop=None, is_deferred=is_deferred
            )
        case _, State.RUNNING if verb in {"cancel", "hold"}:
            raise EnvironmentInvalidError(
                f"job {job.id} ({job.name}) is running, and honed is not", hint="start honed; it then stops the job"
            )
        case _:
            allowed = {"cancel": "queued, held or running", "hold": "queued or running", "release": "held",
                       "requeue": "succeeded, failed or cancelled"}[verb]  # fmt: skip
            raise UsageError(f"job {job.id} ({job.name}) is {job.state}; {verb} takes one that is {allowed}")


def _remove(job: Job, place: Path) -> None:
    try:
        shutil.rmtree(place)
    except OSError as error:
        log.warning("job %d (%s): its staged copies stay: %s", job.id, job.name, error, extra=about(job))
    else:
        log.info("job %d (%s): removed its staged copies, %s", job.id, job.name, place, extra=about(job))


def arrival_row(found: dict[str, Any], asker: query.Asker) -> dict[str, Any]:
    """What waits for a model, as query's rows are: of somebody else's, that it is there."""
    if asker.reads_all or found["uid"] == asker.uid:
        return found
    return {**found, "name": "", "source": None, "repo_id": None, "revision": None, "problem": None}


def _cpu(devices: list[Device]) -> Device:
    return next((found for found in devices if found.kind != "cuda"), None) or device.cpu()


def parser() -> argparse.ArgumentParser:
    """The command line; the man page is made from it."""
    made = argparse.ArgumentParser(prog="honed", description="Watch the spool and fine-tune what is dropped into it.")
    made.add_argument("--root", type=Path, default=Path(os.environ.get("HONED_ROOT", "/")),
                        help="put the whole instance below this directory (default: $HONED_ROOT or /)")  # fmt: skip
    made.add_argument("--user", action="store_const", dest="root", const=layouts.user_root(),
                        help="one's own instance, where XDG says; for systemctl --user")  # fmt: skip
    made.add_argument("--drain", action="store_true", help="end once nothing is left to do")
    made.add_argument("--verbose", action="store_true", help="log what only a developer wants to know")
    made.add_argument("--version", action="version", version=f"honed {__version__}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The `honed` command."""
    options = parser().parse_args(arguments)
    logs.set_up(verbose=options.verbose)
    faulthandler.enable()  # the watchdog's SIGABRT: the stack of a loop that hangs goes to the journal
    return start(layouts.of(options.root), drain=options.drain)


def start(layout: Layout, *, drain: bool = False, **parts: Any) -> int:
    """Run one instance. Returns the exit status: 0, or what keeps systemd from starting it again in vain."""
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
        _start_again_later(fault)


def _start_again_later(fault: str) -> NoReturn:
    """Say what is wrong with the machine, wait, and begin anew: to systemd the same process, not restarted."""
    if os.environ.get(FAULT_VARIABLE) != fault:
        log.error("honed cannot work: %s", fault, extra=about(message=message.DEGRADED))
    os.environ[FAULT_VARIABLE] = fault
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    notifier = Notifier()
    notifier.ready()
    notifier.status(f"degraded: {fault}; tried again every {START_AGAIN_SEC:.0f} s")
    deadline = time.monotonic() + START_AGAIN_SEC
    while (left := deadline - time.monotonic()) > 0:
        notifier.watchdog()
        time.sleep(min(left, notifier.watchdog_interval_sec or left))
    # Anew, and not once more in here: a lock or a socket of the first try must not be in the way of the second.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
