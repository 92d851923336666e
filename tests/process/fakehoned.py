"""The real daemon with the fake worker, whose processes start with their imports done.

`HONED_TEST_GPUS` names a file that lists the GPUs and how full they are, `HONED_TEST_NOW` one with the wall clock's
time, in seconds since the epoch. With `HONED_TEST_COLD_WORKERS` its workers and their shims start as an installation's,
so that /proc tells whose they are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed.daemon import loop, telemetry
from honed.run.process import ProcessRunner
from honed.system import device, log
from honed.system.layout import Layout


def probe(_gpus: list[int] | None) -> list[device.Device]:
    path = os.environ.get("HONED_TEST_GPUS")
    if path is None:
        return [device.cpu()]
    return [
        device.Device(
            kind="cuda",
            name="test GPU",
            index=index,
            uuid=gpu["uuid"],
            compute_capability=(8, 0),
            total_bytes=80 << 30,
            free_bytes=gpu["free_bytes"],
        )
        for index, gpu in enumerate(json.loads(Path(path).read_text()))
    ]


def loads() -> list[device.Load]:
    """Return the load of those test GPUs that have one."""
    found = []
    for index, gpu in enumerate(json.loads(Path(os.environ["HONED_TEST_GPUS"]).read_text())):
        more = {key: value for key, value in gpu.items() if key not in ("uuid", "free_bytes")}
        if more:
            found.append(device.Load(gpu["uuid"], "test GPU", total_bytes=80 << 30, index=index, **more))
    return found


def now() -> float:
    path = os.environ.get("HONED_TEST_NOW")
    return time.time() if path is None else float(Path(path).read_text())


def main() -> int:
    layout = Layout(Path(sys.argv[1]))
    if "HONED_TEST_GPUS" in os.environ:
        telemetry.Gpus.__init__.__defaults__ = (loads,)  # type: ignore[attr-defined]
    log.set_up(verbose=False)
    command = [sys.executable, str(Path(__file__).with_name("fakeworker.py"))]
    has_warm_workers = warm.warm_children() and "HONED_TEST_COLD_WORKERS" not in os.environ
    runner = ProcessRunner(layout, command=command, popen=warm.Popen if has_warm_workers else warm.COLD_POPEN)
    return loop.start(layout, runner=runner, probe=probe, now=now, drain="--drain" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
