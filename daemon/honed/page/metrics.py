"""Metrics for Prometheus: the queue and running jobs, counters and histograms, honed's health, GPUs, outbox."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from honed import __version__
from honed.job import counters
from honed.job.job import State
from honed.job.query import Asker
from honed.job.shape import Gpu
from honed.page.source import Source
from honed.send import outbox
from honed.system.error import HonedError
from honed.system.usage import Usage, usage

#: The progress of a running job: key in `progress`, metric name, help text.
_PROGRESS = (
    ("step", "honed_job_step", "Optimizer steps completed by a running job"),
    ("num_steps", "honed_job_steps", "Total optimizer steps of a running job"),
    ("epoch", "honed_job_epoch", "Passes over the training data of a running job"),
    ("loss", "honed_job_loss", "Training loss of a running job at its last step"),
    ("eta_sec", "honed_job_eta_seconds", "Seconds until a running job ends, by its own estimate"),
    ("num_trained", "honed_job_tokens", "Tokens that a running job had trained on at its last evaluation"),
    ("num_tokens", "honed_job_data_tokens", "Tokens of a running job's training data"),
)
#: The load of a GPU: key in `Gpu`, factor, metric name, help text.
_GPU = (
    ("busy_percent", 0.01, "honed_gpu_utilization_ratio", "Share of the last second in which a GPU was busy, 0 to 1"),
    ("used_bytes", 1, "honed_gpu_memory_used_bytes", "Used memory of a GPU"),
    ("total_bytes", 1, "honed_gpu_memory_total_bytes", "Memory of a GPU"),
    ("power_watts", 1, "honed_gpu_power_watts", "Power draw of a GPU"),
    ("temperature_celsius", 1, "honed_gpu_temperature_celsius", "Temperature of a GPU"),
    ("num_jobs", 1, "honed_gpu_jobs", "Jobs of honed on a GPU"),
)
#: The resource use of a process: key in `Usage`, help text.
_PROCESS = {
    "resident_memory_bytes": "Resident memory size in bytes.",
    "virtual_memory_bytes": "Virtual memory size in bytes.",
    "start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "open_fds": "Number of open file descriptors.",
    "max_fds": "Maximum number of open file descriptors.",
}


class Figures(Collector):
    """The metrics of one scrape. For jobs that the asker may not read, it has only that they run, and their
    progress."""

    def __init__(self, source: Source, asker: Asker, *, with_process: bool) -> None:
        self._source = source
        self._asker = asker
        self._with_process = with_process

    def collect(self) -> Iterator[Metric]:
        health = self._source.health()
        yield GaugeMetricFamily("honed_up", "Whether honed responds", value=health.honed.is_up)
        yield GaugeMetricFamily("honed_database_up", "Whether honed.db can be read", value=health.database.is_open)
        yield _gauge("honed_web_info", "The version of honed-web", "version", [(__version__, 1)])
        with contextlib.suppress(HonedError):  # honed has never run here: the two metrics above show it
            yield from self._queue()
            yield from self._running()
        yield from _outbox(self._source.layout.outbox_dir)
        yield from self._file_systems()
        if (values := counters.read(self._source.layout.counters_path)) is not None:
            yield from _counted(values)
        if (telemetry := self._source.telemetry()) is not None:
            words = "Whether honed is degraded, by kind of fault"
            yield _gauge("honed_degraded", words, "kind", telemetry["faults"].items())
            yield GaugeMetricFamily(
                "honed_damaged_entries", "Damaged entries in corrupt/", value=telemetry["num_damaged"]
            )
            yield from _loads(telemetry["gpus"])
            yield from _process("honed_process", telemetry["process"])
        if self._with_process:
            with contextlib.suppress(OSError):
                yield from _process("process", usage())

    def _queue(self) -> Iterator[Metric]:
        jobs = self._source.entries.all_jobs().values()
        states = Counter(job.state for job in jobs)
        yield _gauge("honed_jobs", "Jobs by state", "state", [(state, states[state]) for state in State])
        outcomes = sorted(Counter(job.outcome for job in jobs if job.state.is_final).items(), key=str)
        counts = [(outcome or "none", count) for outcome, count in outcomes]
        yield _gauge("honed_outcomes", "Finished jobs that are kept, by outcome", "outcome", counts)
        waiting = [job.submitted_at for job in jobs if job.state is State.QUEUED]
        age = max(0.0, time.time() - min(waiting)) if waiting else 0.0
        yield GaugeMetricFamily("honed_queue_age_seconds", "Age of the job that has been queued the longest", value=age)
        words = "Why the first 500 queued jobs wait, by the code of the reason"
        yield _gauge("honed_jobs_waiting", words, "reason", sorted(self._source.waiting().items()))
        yield GaugeMetricFamily("honed_paused", "Whether the queue is paused", value=self._source.entries.is_paused)

    def _running(self) -> Iterator[Metric]:
        running = {job.id: job for job in self._source.entries.all_jobs().values() if job.state is State.RUNNING}
        running_rows = self._source.running(sorted(running))
        for key, name, words in _PROGRESS:
            family = GaugeMetricFamily(name, words, labels=("job",))
            for job_id, progress in running_rows.items():
                is_open = key in {"step", "num_steps", "eta_sec"} or self._asker.may_read(running[job_id])
                if is_open and isinstance(value := progress.get(key), int | float):
                    family.add_metric((str(job_id),), value)
            yield family
        started = [(str(job_id), job.attempt.started_at) for job_id, job in running.items() if job.attempts]
        words = "Start time of a running job's attempt"
        yield _gauge("honed_job_started_timestamp_seconds", words, "job", started)

    def _file_systems(self) -> Iterator[Metric]:
        systems: dict[str, os.statvfs_result] = {}
        for directory in (self._source.layout.state_dir, self._source.layout.spool_dir):
            with contextlib.suppress(OSError):
                systems[str(directory)] = os.statvfs(directory)
        sizes = [(name, item.f_blocks * item.f_frsize) for name, item in systems.items()]
        free = [(name, item.f_bavail * item.f_frsize) for name, item in systems.items()]
        yield _gauge("honed_filesystem_size_bytes", "Size of a file system", "directory", sizes)
        yield _gauge("honed_filesystem_avail_bytes", "Bytes that honed can still write", "directory", free)


def _gauge(name: str, words: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=(label,))
    for item, value in values:
        family.add_metric((item,), value)
    return family


def _outbox(path: Path) -> Iterator[Metric]:
    """Yield what waits for honed-send; nothing where the disk does not return it: the other metrics show that."""
    rejected_dir = outbox.refused_dir(path)
    try:
        num_refused = sum(1 for _ in rejected_dir.glob("*.json")) if rejected_dir.is_dir() else 0
        waiting = (
            (
                "waiting_bytes",
                "Bytes of metrics and predictions waiting for honed-send",
                outbox.num_waiting_bytes(path),
            ),
            ("refused_rows", "Rows that the metrics API rejected", num_refused),
            ("lost_rows", "Rows discarded because the outbox was full", outbox.num_lost(path)),
            (
                "failing",
                "Whether honed-send failed to deliver at its last attempt",
                outbox.read_trouble(path) is not None,
            ),
        )
    except OSError:
        return
    for name, words, value in waiting:
        yield GaugeMetricFamily(f"honed_outbox_{name}", words, value=value)


def _counted(values: counters.Values) -> Iterator[Metric]:
    for name, counter in counters.COUNTERS.items():
        family = CounterMetricFamily(name, counter.words, labels=(counter.label,) if counter.label else ())
        for label, value in sorted(values["counters"][name].items()):
            family.add_metric((label,) if counter.label else (), value)
        yield family
    for name, histogram in counters.HISTOGRAMS.items():
        buckets = HistogramMetricFamily(name, histogram.words, labels=(histogram.label,) if histogram.label else ())
        for label, observed in sorted(values["histograms"][name].items()):
            bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
            sums = list(zip(bounds, itertools.accumulate(observed["counts"]), strict=True))
            buckets.add_metric((label,) if histogram.label else (), sums, observed["sum"])
        yield buckets


def _loads(gpus: Sequence[Gpu]) -> Iterator[Metric]:
    for key, factor, name, words in _GPU:
        family = GaugeMetricFamily(name, words, labels=("gpu", "uuid", "name"))
        for gpu in gpus:
            if isinstance(value := gpu.get(key), int | float):
                family.add_metric((str(gpu["index"]), gpu["uuid"], gpu["name"]), value * factor)
        yield family


def _process(prefix: str, used: Usage) -> Iterator[Metric]:
    """Yield the standard metrics of a process. prometheus_client's own collector needs files that the sandbox hides."""
    for key, words in _PROCESS.items():
        yield GaugeMetricFamily(f"{prefix}_{key}", words, value=used[key])  # type: ignore[literal-required]
    yield CounterMetricFamily(
        f"{prefix}_cpu_seconds", "Total user and system CPU time spent in seconds.", value=used["cpu_seconds"]
    )


def scrape(source: Source, asker: Asker, *, with_process: bool = True) -> bytes:
    """Return all metrics in Prometheus' text format; `with_process`: those of this process, too."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(source, asker, with_process=with_process))
    return generate_latest(registry)
