"""A real instance refuses before the queue what peft would refuse after the load, on a busy machine too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import Instance

from honed.run import rehearsed
from waiting import wait_for

PISSA: dict[str, Any] = {"lora": {"init_lora_weights": "pissa"}, "quantization": "4bit"}
#: Seconds by the clock for a rehearsal of 5 s of CPU time that has a twentieth of a core.
BUSY_SEC = 240.0


@contextmanager
def busy(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def refuse(instance: Instance, name: str) -> str:
    instance.drop(name, **PISSA)
    file = f"{name}.json"
    wait_for(lambda: file in instance.rejected(), what="refused", account=instance.account, deadline_sec=BUSY_SEC)
    assert instance.spool.all_jobs() == {}
    return instance.rejected()[file]


@pytest.mark.parametrize("num_loops", [0, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_what_peft_refuses_is_refused_before_the_queue_and_the_answer_is_kept(
    instance: Instance, num_loops: int
) -> None:
    instance.configure("[spool]\nsettle_sec = 0.1\n")
    instance.start()
    with busy(num_loops):
        first = refuse(instance, "first")
    assert "Please initialize PiSSA under" in first and "lora.init_lora_weights: removed" in first
    place = rehearsed.directory(instance.layout.cache_dir, os.getuid())
    (kept,) = wait_for(lambda: [*place.glob("*.json")], what="the kept answer", account=instance.account)
    answer = rehearsed.read(kept.parent, kept.stem)
    assert answer is not None and answer.error is not None
    # What the next job of the kind gets is the kept answer.
    rehearsed.write(kept.parent, rehearsed.Kept(kept.stem, rehearsed.Rehearsed("unknown", why="kept so")))
    instance.drop("second", **PISSA)
    wait_for(lambda: instance.job("second"), what="accepted", account=instance.account)
    wait_for(lambda: "kept so" in instance.log, what="its warning, which follows", account=instance.account)
    instance.drop("third", **PISSA | {"lora": {}})
    wait_for(lambda: instance.job("third"), what="the remedy accepted", account=instance.account)
