"""Hours, drains and reservations: which of them holds now, when that changes, and what a full disk leaves."""

from __future__ import annotations

import datetime
import errno
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.availability import Availability
from honed.daemon.loop import Daemon
from honed.job.job import Attempt, Job, Preemption, State
from honed.job.spool import Spool
from honed.spec.config import Config, DeviceConfig, JobsConfig
from honed.system import device, durable
from honed.system.control import Request
from honed.system.device import Device
from honed.system.error import EnvironmentInvalidError
from honed.system.layout import Layout

GPUS = [Device("cuda", "card", index=n, uuid=f"GPU-{n}", total_bytes=1, free_bytes=1) for n in (0, 1)]


class Desk:
    """A daemon whose wall clock, devices and configuration are set by a test."""

    def __init__(self, path: Path) -> None:
        self.now = at("2026-11-23 12:00")
        self.gpus = GPUS
        self.layout = Layout(path)
        self.begin({})

    def begin(self, keys: dict[str, Any]) -> None:
        config = Config(jobs=JobsConfig(runner="process"), device=DeviceConfig(**keys))
        self.daemon = Daemon(self.layout, config, probe=lambda _gpus: self.gpus or [device.cpu()], now=lambda: self.now)
        self.daemon._spool.recover()
        self.placement = self.daemon._dispatch.placement
        self.placement.report()

    def again(self, **keys: Any) -> None:
        """Restart it, with these keys of [device]."""
        self.daemon._close()
        self.begin(keys)

    def ask(self, verb: str, reference: str, **arguments: Any) -> Any:
        return self.daemon._answers.answer(Request(verb, {"id": reference, **arguments}, os.getuid()))

    def closures(self) -> dict[str, list[str]]:
        rows = self.placement.availability.rows(self.placement.all())
        return {row["device"]: [each["detail"] for each in row["closures"]] for row in rows if row["closures"]}

    def change_in(self) -> float:
        return self.placement.availability.next_change(self.placement.all())


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.daemon._close()


def test_the_hours_of_one_device_take_the_place_of_those_of_all(desk: Desk) -> None:
    desk.again(hours="20:00-08:00", hours_of={"GPU-1": "12:00-14:00", "1": "00:00-24:00", "cpu": "00:00-24:00"})
    assert desk.closures() == {"GPU-0": ["closed until Mon 20:00 (in 8 h): device.hours"]}
    assert desk.change_in() == 2 * 3600
    desk.now = at("2026-11-23 19:59:30")
    assert desk.closures() == {
        "GPU-0": ["closed until Mon 20:00 (in 1 min): device.hours"],
        "GPU-1": ["closed until Tue 12:00 (in 16 h): device.hours"],
    }
    assert desk.change_in() == 30
    desk.now = at("2026-11-23 20:00")
    assert list(desk.closures()) == ["GPU-1"]
    desk.now = at("2026-11-23 12:00")  # the clock is set back
    assert list(desk.closures()) == ["GPU-0"]


def test_without_hours_and_reservations_nothing_changes_by_itself(desk: Desk) -> None:
    assert desk.change_in() == math.inf
    desk.ask("drain", "0")
    assert desk.change_in() == math.inf
    desk.ask("reserve", "1", owner="0", for_sec=90.0)
    assert desk.change_in() == 90


def test_all_closes_every_device_and_opens_it_again(desk: Desk) -> None:
    desk.ask("drain", "all", reason="the cooling is off")
    desk.again()
    assert desk.closures() == {
        "GPU-0": ["drained: the cooling is off"],
        "GPU-1": ["drained: the cooling is off"],
        "cpu": ["drained: the cooling is off"],
    }
    line = desk.ask("status", "")["status"]
    assert "; GPU 0, GPU 1, the CPU are drained: the cooling is off" in line
    desk.ask("undrain", "1")
    assert list(desk.closures()) == ["GPU-0", "cpu"]
    desk.ask("undrain", "all")
    assert not desk.closures()


def test_a_device_that_has_vanished_is_still_listed_and_can_be_undrained(desk: Desk) -> None:
    desk.ask("drain", "GPU-1")
    desk.gpus = GPUS[:1]
    desk.again()
    assert desk.closures() == {"GPU-1": ["drained"]}
    desk.ask("undrain", "GPU-1")
    assert not desk.closures()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_changes_nothing_and_is_told_in_a_sentence(
    desk: Desk, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.ask("drain", "0", reason="a fan")
    desk.ask("reserve", "1", owner="0", for_sec=60)
    before = desk.closures()

    def fails(path: Path, *_arguments: Any, **_keys: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(durable, "write_json", fails)
        for verb, keys in (("drain", {}), ("undrain", {}), ("reserve", {"owner": "0"}), ("unreserve", {})):
            with pytest.raises(EnvironmentInvalidError, match=r"nothing was changed: .*devices\.json: ") as caught:
                desk.ask(verb, "0" if "drain" in verb else "1", **keys)
            assert os.strerror(number) in caught.value.message
            assert desk.closures() == before
        desk.now += 60
        with pytest.raises(OSError, match=r"devices\.json"):  # a step of the loop, which tells a fault once
            desk.daemon._dispatch.vacate()
        assert list(desk.closures()) == ["GPU-0"], "the reservation is over whether it can be removed or not"
    desk.daemon._dispatch.vacate()
    desk.again()
    assert list(desk.closures()) == ["GPU-0"]


def test_an_entry_keeps_its_preemptions_and_one_of_an_earlier_honed_has_none() -> None:
    attempts = tuple(
        Attempt(number, "transformers", 0.0, preemption=Preemption("r", 2.5) if number < 3 else None)
        for number in (1, 2, 3)
    )
    job = Job(1, "j", 0.0, "j", 0, "/o", attempts=attempts)
    read = Job.from_json(job.to_json(), State.QUEUED)
    assert read == job
    assert (read.num_preemptions, read.preemption) == (2, None)
    old = job.to_json().replace(b'"preemption"', b'"other"')
    assert Job.from_json(old, State.QUEUED).num_preemptions == 0


def test_a_start_without_a_free_descriptor_does_not_take_the_record_of_drains_for_damaged(tmp_path: Path) -> None:
    """Else all devices would be drained until somebody gave up what was drained."""
    spool = Spool(Layout(tmp_path), lock=False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            Availability(spool, Config)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
