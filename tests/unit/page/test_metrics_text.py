"""The text for Prometheus: GPUs, and histograms with their cumulative buckets."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from honed.cli import doctor
from honed.job import counters
from honed.job.shape import Gpu
from honed.page.metrics import _counted, _loads, _outbox
from honed.send import outbox
from honed.spec.config import Config, ReportingConfig
from honed.system.layout import Layout


class Given(Collector):
    def __init__(self, metrics: Iterator[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def text_of(metrics: Iterator[Metric]) -> list[str]:
    """Return the lines of samples."""
    registry = CollectorRegistry()
    registry.register(Given(metrics))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_gpu_is_told_in_base_units_and_without_what_it_does_not_report() -> None:
    common = {"used_bytes": 2**30, "total_bytes": 2**37}
    gpus: list[Gpu] = [
        {"index": 0, "uuid": "GPU-0", "name": "H200", "busy_percent": 93, "power_watts": 312.5, **common, "num_jobs": 1}
        | {"temperature_celsius": 61},
        {"index": 1, "uuid": "MIG-1", "name": "H200", "busy_percent": None, "power_watts": None, **common}
        | {"num_jobs": 0, "temperature_celsius": None},
    ]
    labels, other = '{gpu="0",name="H200",uuid="GPU-0"}', '{gpu="1",name="H200",uuid="MIG-1"}'
    lines = set(text_of(_loads(gpus)))
    assert {line for line in lines if "utilization" in line} == {f"honed_gpu_utilization_ratio{labels} 0.93"}
    assert f"honed_gpu_power_watts{labels} 312.5" in lines
    assert f"honed_gpu_temperature_celsius{labels} 61.0" in lines
    assert f"honed_gpu_jobs{other} 0.0" in lines
    assert f"honed_gpu_memory_used_bytes{other} 1.073741824e+09" in lines


def test_buckets_are_cumulative_and_the_last_one_is_the_count(tmp_path: Path) -> None:
    num = len(counters.HISTOGRAMS["honed_queue_wait_seconds"].bounds) + 1
    told = {"counts": [2, 0, 3, *[0] * (num - 4), 1], "sum": 1e6}
    path = tmp_path / "counters.json"
    data = {"counters": {"honed_jobs_finished_total": {"killed": 3}, "honed_later_total": {"": 1}}}
    path.write_text(json.dumps({**data, "histograms": {"honed_queue_wait_seconds": {"": told}}}))
    values = counters.read(path)
    assert values is not None
    lines = text_of(_counted(values))
    assert 'honed_jobs_finished_total{outcome="killed"} 3.0' in lines
    assert "honed_fallbacks_total 0.0" in lines  # it is there before the first one
    assert not any("later" in line for line in lines)
    buckets = [line.rpartition(" ")[2] for line in lines if line.startswith("honed_queue_wait_seconds_bucket")]
    assert buckets == ["2.0", "2.0", *["5.0"] * (num - 3), "6.0"]
    assert 'honed_queue_wait_seconds_bucket{le="+Inf"} 6.0' in lines
    assert "honed_queue_wait_seconds_count 6.0" in lines
    assert "honed_queue_wait_seconds_sum 1e+06" in lines


@pytest.mark.parametrize("name", ["cursor.json", "trouble.json", "lost.json"])
def test_a_file_of_the_outbox_that_the_disk_does_not_return_leaves_all_else_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It ended the whole scrape, and `honectl doctor`."""
    layout = Layout(tmp_path)
    outbox.make_dirs(layout.outbox_dir)
    config, real = Config(reporting=ReportingConfig(metrics_api_url="http://127.0.0.1:1/rows")), os.open
    assert "honed_outbox_lost_rows 0.0" in text_of(_outbox(layout.outbox_dir))

    def fail(path: object, *arguments: object, **keys: object) -> int:
        if str(path).endswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **keys)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", fail)
    assert text_of(_outbox(layout.outbox_dir)) == []
    [finding] = doctor._reporting(layout, config)
    assert (finding.status, name in finding.detail) == ("error", True)
