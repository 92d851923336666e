"""Workers that die at a chosen moment: `python cutter.py BACKEND`, then one job a line on its standard input.

The libraries are imported once; each attempt runs in a fork of a process that has only imported them. Nothing of the
worker is replaced: it is observed, through its checks of the stop flag and Python's audit events, until the chosen
moment, and then sends itself the signal.

    {"job_dir": …, "attempt": 1, "cut": "evaluation", "step": 8, "signal": 9}   ──►   {"status": -9}
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from honed.worker.__main__ import ENVIRONMENT
from honed.worker.stop import Stop

#: Cuts made at a check of the stop flag: the function that checks it.
LOOKS = {
    "accumulation": "on_substep_end",
    "step": "on_step_end",
    "evaluation": "on_prediction_step",
    "predictions": "ask",
}


def files(job_dir: Path, step: int) -> dict[str, tuple[str, str]]:
    """Return the cuts that are made at an operation on a file: the operation, and its path."""
    new = job_dir / f"checkpoints/.new/checkpoint-{step}"
    return {
        "checkpoint": ("open", f"{new}/.MANIFEST.json.tmp"),  # all files written, and no manifest
        "put": ("os.rename", str(new)),  # a manifest, and not in its place
        "export": ("open", f"{job_dir}/.output.tmp/README.md"),
        "place": ("os.rename", f"{job_dir}/.output.tmp"),
    }


def at_step(step: int, name: str) -> bool:
    """Tell whether a function of this name is on the call stack, during this step."""
    frame, is_called = sys._getframe(1), False
    while frame is not None:
        is_called = is_called or frame.f_code.co_name == name
        if is_called and (state := frame.f_locals.get("state")) is not None and hasattr(state, "global_step"):
            return bool(state.global_step == step)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def once(number: int) -> Callable[[], None]:
    """Return a function that sends this process a signal the first time that it is called."""
    is_sent = False

    def send() -> None:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            os.kill(os.getpid(), number)

    return send


def work(job_dir: Path, attempt: int, cut: str | None = None, step: int = 0, number: int = signal.SIGKILL) -> int:
    from honed.worker.run import run

    send, stop = once(number), Stop()
    signal.signal(signal.SIGTERM, stop.on_signal)
    if cut in LOOKS:
        stop.beat = lambda: send() if at_step(step, LOOKS[cut]) else None
    elif cut is not None:
        operation, path = files(job_dir, step)[cut]

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if event == operation and str(arguments[0]) == path:
                send()

        sys.addaudithook(look)
    return run(job_dir, attempt, stop=stop)


def main(answers: TextIO) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from honed.worker.model import load, torchvision

    torchvision.mend()
    load.choose(sys.argv[1]).import_libraries()
    import honed.worker.rows.data
    import honed.worker.train.callback
    import honed.worker.train.trainer
    import honed.worker.train.usage  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if (pid := os.fork()) == 0:
            log_path = Path(asked["job_dir"], f"attempts/{asked['attempt']}/worker.log")
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = os.open(log_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(asked["job_dir"])
            os._exit(
                work(
                    Path(asked["job_dir"]),
                    asked["attempt"],
                    asked.get("cut"),
                    asked.get("step", 0),
                    asked.get("signal", signal.SIGKILL),
                )
            )
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.write(json.dumps({"status": status}) + "\n")
        answers.flush()


if __name__ == "__main__":
    descriptor = os.dup(1)
    os.dup2(2, 1)  # libraries print
    main(os.fdopen(descriptor, "w"))
