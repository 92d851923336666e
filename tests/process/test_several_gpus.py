"""A job on several GPUs under the real daemon, with GPUs that the test hands in and a fake worker."""

from __future__ import annotations

import json

from harness import Instance, wait_for

from honed.job.job import State
from honed.job.spool import Spool

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
    wait_for(lambda: instance.client.ask("show", id="succeed-1.wide")["waiting_for"]["reason"] == "device", what="it")
    why = wait_for(lambda: instance.client.ask("show", id="succeed-1.later")["waiting_for"], what="its reason")
    assert why["reason"] == "turn", why
    assert "waits for 4 GPUs" in why["detail"]
    why = instance.client.ask("show", id="succeed-1.wide")["waiting_for"]
    assert why["reason"] == "device"
    assert "needs 4 GPUs at the same time, and 3 are free" in why["detail"]
    (instance.layout.job(first.id).dir / "go").touch()
    ended = instance.wait_state("succeed-1.wide", State.SUCCEEDED)
    later = instance.wait_state("succeed-1.later", State.SUCCEEDED)
    assert ended.attempt.devices == tuple(KEYS)
    assert ",".join(KEYS) in instance.starts(ended)[0]
    assert later.attempt.started_at >= (ended.attempt.ended_at or 0.0)
