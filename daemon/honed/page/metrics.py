"""Metrics of honed-web for Prometheus: current queue, running jobs, outcomes and outbox."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from honed import __version__
from honed.job.job import State
from honed.job.query import Asker
from honed.page.source import Source
from honed.send import outbox
from honed.system.error import HonedError

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


class Figures(Collector):
    """The metrics of one scrape. For jobs that the asker may not read, it has only that they run, and their
    progress."""

    def __init__(self, source: Source, asker: Asker) -> None:
        self._source = source
        self._asker = asker

    def collect(self) -> Iterator[GaugeMetricFamily]:
        health = self._source.health()
        yield GaugeMetricFamily("honed_up", "Whether honed responds", value=health["honed"]["is_up"])
        yield GaugeMetricFamily(
            "honed_database_up", "Whether honed.db can be read", value=health["database"]["is_open"]
        )
        version = GaugeMetricFamily("honed_web_info", "The version of honed-web", labels=("version",))
        version.add_metric((__version__,), 1)
        yield version
        with contextlib.suppress(HonedError):  # honed has never run here: the two metrics above show it
            yield from self._queue()
            yield from self._running()
        yield from self._outbox()

    def _queue(self) -> Iterator[GaugeMetricFamily]:
        jobs = self._source.entries.all_jobs().values()
        states = Counter(job.state for job in jobs)
        by_state = GaugeMetricFamily("honed_jobs", "Jobs by state", labels=("state",))
        for state in State:
            by_state.add_metric((state,), states[state])
        yield by_state
        outcomes = GaugeMetricFamily("honed_outcomes", "Finished jobs that are kept, by outcome", labels=("outcome",))
        for outcome, count in sorted(Counter(job.outcome for job in jobs if job.state.is_final).items(), key=str):
            outcomes.add_metric((outcome or "none",), count)
        yield outcomes
        waiting = [job.submitted_at for job in jobs if job.state is State.QUEUED]
        age = max(0.0, time.time() - min(waiting)) if waiting else 0.0
        yield GaugeMetricFamily("honed_queue_age_seconds", "Age of the job that has been queued the longest", value=age)
        yield GaugeMetricFamily("honed_paused", "Whether the queue is paused", value=self._source.entries.is_paused)

    def _running(self) -> Iterator[GaugeMetricFamily]:
        running = {job.id: job for job in self._source.entries.all_jobs().values() if job.state is State.RUNNING}
        told = self._source.running(sorted(running))
        for key, name, words in _PROGRESS:
            family = GaugeMetricFamily(name, words, labels=("job",))
            for job_id, progress in told.items():
                is_open = key in {"step", "num_steps", "eta_sec"} or self._asker.may_read(running[job_id])
                if is_open and isinstance(value := progress.get(key), int | float):
                    family.add_metric((str(job_id),), value)
            yield family
        started = GaugeMetricFamily(
            "honed_job_started_timestamp_seconds", "Start time of a running job's attempt", labels=("job",)
        )
        for job_id, job in running.items():
            if job.attempts:
                started.add_metric((str(job_id),), job.attempt.started_at)
        yield started

    def _outbox(self) -> Iterator[GaugeMetricFamily]:
        path = self._source.layout.outbox_dir
        refused = outbox.refused_dir(path)
        num_refused = sum(1 for _ in refused.glob("*.json")) if refused.is_dir() else 0
        for name, words, value in (
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
        ):
            yield GaugeMetricFamily(f"honed_outbox_{name}", words, value=value)


def scrape(source: Source, asker: Asker) -> bytes:
    """Return all metrics, and honed-web's own resource use, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures(source, asker))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
