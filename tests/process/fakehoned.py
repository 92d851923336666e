"""The real daemon with the fake worker, whose processes start with their imports done.

`HONED_TEST_GPUS` names a file that lists the GPUs and how full they are, `HONED_TEST_NOW` one with the wall clock's
time, in seconds since the epoch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm
from honed.daemon import loop
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


def now() -> float:
    path = os.environ.get("HONED_TEST_NOW")
    return time.time() if path is None else float(Path(path).read_text())


def main() -> int:
    layout = Layout(Path(sys.argv[1]))
    log.set_up(verbose=False)
    command = [sys.executable, str(Path(__file__).with_name("fakeworker.py"))]
    runner = ProcessRunner(layout, command=command, popen=warm.Popen if warm.warm_children() else subprocess.Popen)
    return loop.start(layout, runner=runner, probe=probe, now=now, drain="--drain" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
