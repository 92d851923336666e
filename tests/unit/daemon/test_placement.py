"""How often the GPUs are asked for their free memory, and which of them a job gets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from honed.daemon import placement
from honed.daemon.attempts import Attempts
from honed.daemon.availability import Availability
from honed.daemon.placement import Placement
from honed.job.job import Attempt, Job, State
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.layout import Layout


class Idle:
    """No job runs."""

    running: dict[int, Any] = {}  # noqa: RUF012


def test_after_the_end_of_a_job_the_gpus_are_asked_at_once_and_often_for_a_while(tmp_path: Path) -> None:
    now, probed = [100.0], []

    def probe(_gpus: list[int] | None) -> list[Device]:
        probed.append(now[0])
        return [Device("cuda", "GPU", index=0, uuid="GPU-a", total_bytes=80 << 30, free_bytes=1 << 30)]

    layout, config = Layout(tmp_path), Config()
    spool = Spool(layout, lock=False)
    made = Placement(
        layout,
        lambda: config,
        cast("Attempts", Idle()),
        Availability(spool, lambda: config, now=lambda: now[0]),
        probe=probe,
        clock=lambda: now[0],
    )

    def asked_within(seconds: float) -> int:
        before = len(probed)
        for _ in range(round(seconds / 0.05)):
            made.is_any_free(wants_gpu=True)
            now[0] += 0.05
        return len(probed) - before

    asked_within(0.1)
    assert asked_within(1.8) == 0
    made.hurry()
    assert asked_within(0.1) == 1
    assert asked_within(placement.HURRY_SEC) >= 20
    assert asked_within(4.0) <= 3


GIB = 1 << 30


def gpu(index: int, capability: tuple[int, int] = (9, 0), gib: int = 80) -> Device:
    return Device("cuda", "GPU", index, f"GPU-{index}", capability, gib * GIB, gib * GIB)


class Busy(Idle):
    """Jobs run on some of the devices."""

    def __init__(self, *keys: str) -> None:
        attempt = Attempt(1, "transformers", 0.0, device=",".join(keys))
        self.running = {9: SimpleNamespace(job=SimpleNamespace(id=9, attempt=attempt))} if keys else {}


def placed(tmp_path: Path, devices: list[Device], *busy: str) -> Placement:
    layout, config = Layout(tmp_path), Config()
    availability = Availability(Spool(layout, lock=False), lambda: config, now=lambda: 0.0)
    attempts = cast("Attempts", Busy(*busy))
    made = Placement(layout, lambda: config, attempts, availability, probe=lambda _: devices, clock=lambda: 100.0)
    made.report()
    return made


def wanting(number: int) -> Job:
    return Job(1, "j", 0.0, "j.yaml", 1000, "/o", num_gpus=number)


def test_a_job_gets_all_its_devices_at_once_and_alike(tmp_path: Path) -> None:
    devices = [gpu(0), gpu(1, (8, 0)), gpu(2), gpu(3), gpu(4, gib=40)]
    made = placed(tmp_path, devices)
    assert [each.index for each in made.free_devices(wanting(3)) or ()] == [0, 2, 3]
    assert made.free_devices(wanting(4)) is None
    assert made.obstacle(wanting(3)) is None
    reason, detail = made.obstacle(wanting(4)) or ("", "")
    assert (reason, "at most 3 alike" in detail) == ("unfit", True)


def test_devices_of_a_job_on_several_are_all_taken(tmp_path: Path) -> None:
    made = placed(tmp_path, [gpu(0), gpu(1), gpu(2)], "GPU-0", "GPU-2")
    assert [each.index for each in made.free_devices(wanting(1)) or ()] == [1]
    assert made.free_devices(wanting(2)) is None
    reason, detail = made.obstacle(wanting(2)) or ("", "")
    assert reason == "device"
    assert "needs 2 GPUs at the same time, and 1 are free" in detail


def test_an_entry_of_an_earlier_version_names_one_device() -> None:
    entry = dataclasses.replace(wanting(1), attempts=(Attempt(1, "transformers", 0.0, device="GPU-0"),))
    old = json.loads(entry.to_json())
    del old["attempts"][0]["passed"]
    assert Job.from_json(json.dumps(old).encode(), State.QUEUED).attempt.devices == ("GPU-0",)
    new = dataclasses.replace(entry, attempts=(Attempt(1, "t", 0.0, device="GPU-0,GPU-1", passed=(7,)),))
    again = Job.from_json(new.to_json(), State.QUEUED)
    assert again == new
    assert again.attempt.devices == ("GPU-0", "GPU-1")
