"""`honectl watch` on a worker: its memory, its share of the processor, and its GPU."""

from __future__ import annotations

from honed.cli.watch import Meter
from honed.system.device import Load


def glance(cpu_sec: float | None, **keys: object) -> dict[str, object]:
    return {"id": 1, "resident_bytes": 3 << 29, "estimated_bytes": None, "cpu_sec": cpu_sec, "device": "cpu", **keys}


def test_the_processors_share_is_that_between_two_looks() -> None:
    now = [100.0]
    meter = Meter(clock=lambda: now[0])
    assert meter.words(glance(10.0)) == "memory 1.5 GiB"
    now[0] = 102.0
    assert meter.words(glance(13.0)) == "memory 1.5 GiB, CPU 150 %"
    now[0] = 103.0
    assert meter.words(glance(13.5, estimated_bytes=2 << 30)) == (
        "memory 1.5 GiB (estimated for model and training: 2.0 GiB), CPU 50 %"
    )
    now[0] = 104.0
    assert meter.words(glance(0.5)) == "memory 1.5 GiB", "another worker, of the next attempt"
    assert meter.words(glance(None)) == "memory 1.5 GiB"
    assert meter.words(glance(None, resident_bytes=None)) == ""


def test_a_job_on_a_gpu_is_told_of_its_own() -> None:
    loads = [Load("GPU-0", "H100", 7, 1 << 30, 80 << 30), Load("GPU-1", "H100", 93, 61 << 30, 80 << 30)]
    words = Meter(clock=lambda: 0.0, gpu_loads=lambda: loads).words(glance(None, device="GPU-1"))
    assert words == "memory 1.5 GiB, GPU 93 % busy, 61.0 GiB of 80.0 GiB in use"
