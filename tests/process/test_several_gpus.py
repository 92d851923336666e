"""A job on several GPUs under the real daemon, with GPUs that the test hands in and a fake worker."""

from __future__ import annotations

import json

from harness import Instance

from honed.job.job import State
from honed.job.spool import Spool
from waiting import wait_for

KEYS = [f"GPU-{number}" for number in range(4)]


def test_it_gets_all_its_gpus_at_once_and_nothing_later_keeps_them_from_it(instance: Instance) -> None:
    gpus = instance.root / "gpus.json"
    gpus.write_text(json.dumps([{"uuid": key, "free_bytes": 80 << 30} for key in KEYS]))
    instance.environment["HONED_TEST_GPUS"] = str(gpus)
    instance.start()
    instance.client.ask("pause")
    for name in ("until-2.first", "succeed-1.wide", "succeed-1.later"):
        instance.drop(name)
        instance.wait_state(name, State.QUEUED)
    instance.stop()
    # The check sees this machine, which has no four GPUs: the entry is what the daemon goes by.
    spool = Spool(instance.layout, lock=False)
    wide = instance.job("succeed-1.wide")
    assert wide is not None
    spool.update(wide, num_gpus=4)
    instance.start()
    instance.client.ask("resume")
    first = instance.wait_state("until-2.first", State.RUNNING)
    assert first.attempt.devices == ("GPU-0",)

    def waits(name: str, reason: str, detail: str) -> bool:
        why = instance.client.ask("show", id=name)["waiting_for"]
        return why is not None and why["reason"] == reason and detail in why["detail"]

    wide_waits = ("succeed-1.wide", "device", "needs 4 GPUs at the same time, and 3 are free")
    for each in (wide_waits, ("succeed-1.later", "turn", "waits for 4 GPUs")):
        wait_for(lambda each=each: waits(*each), what=str(each))  # type: ignore[misc]
    instance.go("until-2.first")
    ended = instance.wait_state("succeed-1.wide", State.SUCCEEDED)
    later = instance.wait_state("succeed-1.later", State.SUCCEEDED)
    assert ended.attempt.devices == tuple(KEYS)
    assert ",".join(KEYS) in instance.starts(ended)[0]
    assert later.attempt.started_at >= (ended.attempt.ended_at or 0.0)
