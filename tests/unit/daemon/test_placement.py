"""How often the GPUs are asked for their free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from honed.daemon import placement
from honed.daemon.attempts import Attempts
from honed.daemon.availability import Availability
from honed.daemon.placement import Placement
from honed.job.spool import Spool
from honed.spec.config import Config
from honed.system.device import Device
from honed.system.layout import Layout


class Idle:
    """No job runs."""

    running: dict[int, Any] = {}  # noqa: RUF012

    def devices_in_use(self) -> set[str]:
        return set()


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
