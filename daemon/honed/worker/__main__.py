"""The process of one training run: `python -m honed.worker JOB_DIR ATTEMPT [--backend NAME]`."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

from honed.system import python
from honed.system.layout import JobLayout
from honed.worker import assignment, imports
from honed.worker.gate import Gate
from honed.worker.parallel import Ranks
from honed.worker.pulse import Pulse
from honed.worker.stop import Stop

#: Set before any library is imported; values that the daemon or the administrator has set stay.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a job's worker never calls out
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "warning",
    "TQDM_DISABLE": "1",
    "WANDB_MODE": "offline",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def main() -> int:
    """Train one job. The exit status is 0 for success alone; see error.py for the others."""
    python.protect()
    parser = argparse.ArgumentParser(prog="python -m honed.worker", description=__doc__)
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("attempt", type=int)
    parser.add_argument("--backend", choices=["transformers", "unsloth"], help="backend to use instead of the plan's")
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    attempt_layout = JobLayout(arguments.job_dir.resolve()).attempt(arguments.attempt)
    ranks = Ranks.of(attempt_layout.dir)
    if not ranks.is_zero:
        os.environ.pop("NOTIFY_SOCKET", None)  # systemd hears rank 0, honed the others
    pulse = ranks.pulse = Pulse(path=attempt_layout.pulse_of(ranks.rank))
    timeout = os.environ.get("HONED_STOP_TIMEOUT_SEC")
    stop = Stop(pulse.beat, pulse.enter, timeout_sec=float(timeout) if timeout else None)
    gate = Gate(JobLayout(arguments.job_dir.resolve()), arguments.attempt, beat=stop.check)
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.on_signal)
    faulthandler.enable()  # a worker that hangs is sent SIGABRT: its stacks go to worker.log

    with imports.quick():
        from honed.worker.run import run

    job_dir = arguments.job_dir.resolve()
    with contextlib.suppress(Exception):  # the run reports any problem with it
        imports.prepare(assignment.read(job_dir, arguments.attempt, backend=arguments.backend))
    return run(
        job_dir,
        arguments.attempt,
        backend=arguments.backend,
        stop=stop,
        gate=gate,
        report=pulse.report,
        ranks=ranks,
    )


def end(status: int) -> NoReturn:
    """End the process as Python does, but leave its modules to the kernel: taking them apart takes 0.2 s."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # worker.log may be on a full disk; the result is already durable
                stream.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    end(main())
