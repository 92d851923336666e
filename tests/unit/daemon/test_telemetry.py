"""The GPUs' load is read when asked, not too often, and a driver that hangs holds up nobody."""

from __future__ import annotations

import mmap
import os
import threading
import time

import pytest

from honed.daemon import telemetry
from honed.daemon.telemetry import Gpus
from honed.system.device import Load
from honed.system.usage import usage
from waiting import wait_for

H200 = Load("GPU-0", "H200", 93, 1 << 30, 139 << 30, 0, 512.5, 61)


def test_gpus_are_read_when_asked_and_at_most_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "WAIT_SEC", 60.0)  # the thread ends by itself
    now, reads = [100.0], []

    def read() -> list[Load]:
        reads.append(now[0])
        return [H200]

    gpus = Gpus(read, clock=lambda: now[0])
    assert reads == []
    for now[0] in (100.0, 101.0, 104.9, 105.0, 109.0, 200.0):
        assert gpus.loads() == [H200]
    assert reads == [100.0, 105.0, 200.0]


def test_a_driver_that_hangs_is_waited_for_once_and_its_old_load_is_not_told_for_ever() -> None:
    now, is_over, num_reads = [100.0], threading.Event(), []

    def read() -> list[Load]:
        num_reads.append(1)
        if len(num_reads) > 1:
            is_over.wait()
        return [H200]

    gpus = Gpus(read, clock=lambda: now[0])
    wait_for(gpus.loads, what="the first reading")  # it may take longer than honed waits for it
    for now[0] in (110.0, 130.0, 159.9):
        assert gpus.loads() == [H200]
    for now[0] in (160.0, 1000.0):
        assert gpus.loads() == []
    assert len(num_reads) == 2
    is_over.set()
    assert gpus._reading is not None
    gpus._reading.join()
    assert gpus.loads() == [H200]


def test_the_use_of_a_process_is_that_of_the_process() -> None:
    before = usage()
    kept = mmap.mmap(-1, 2**26)  # new to the process, unlike memory of its heap
    for place in range(0, len(kept), mmap.PAGESIZE):
        kept[place] = 1
    fd = os.open("/dev/null", os.O_RDONLY)
    after = usage()
    os.close(fd)
    assert after["resident_memory_bytes"] - before["resident_memory_bytes"] > len(kept) // 2
    assert after["open_fds"] == before["open_fds"] + 1
    assert after["open_fds"] <= after["max_fds"]
    assert after["cpu_seconds"] >= before["cpu_seconds"] > 0
    assert abs(after["start_time_seconds"] - before["start_time_seconds"]) < 1
    assert after["start_time_seconds"] < time.time()
