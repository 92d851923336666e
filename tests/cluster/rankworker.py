"""The fake worker on a cluster, one rank or one of several: rank 0 does what the job's name says, the others wait.

Like the real ones, a rank that another was lost to leaves no result, and rank 0 looks before its result whether its
start was settled meanwhile. `….fall-R` as the job's name: rank R kills itself in the first attempt.

    rank-R.txt   a line for each start of the rank
    alive        locked by rank 0 while it lives
    twice.txt    two lived at a time, though the end of neither was recorded; what must never be
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

PROCESS_DIR = Path(__file__).parents[1] / "process"
sys.path[:0] = [str(PROCESS_DIR)]


def main() -> int:
    job_dir, number = Path(sys.argv[1]), int(sys.argv[2])
    attempt_dir, rank = job_dir / "attempts" / str(number), int(os.environ.get("RANK", "0"))
    named = {key: os.environ.get(key, "") for key in ("WORLD_SIZE", "LOCAL_RANK", "SLURMD_NODENAME", "HONED_FENCE")}
    named["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with (job_dir / f"rank-{rank}.txt").open("a") as file:
        file.write(json.dumps({**named, "attempt": number, "pid": os.getpid()}) + "\n")
    if rank == 0:
        held = be_the_only_one(job_dir, attempt_dir / "exit.json")  # noqa: F841 - until we end
    name = json.loads((job_dir / "plan.json").read_bytes())["job"]["name"]
    grace_sec = 1.0 if name == "hang" else 0.0  # it may be writing its stacks
    leave = (attempt_dir / "ranks/lost.json", grace_sec)
    threading.Thread(target=leave_with, args=leave, daemon=True).start()
    if name.endswith(f".fall-{rank}") and number == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        import fakeworker

        return fakeworker.main()
    asked: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    while not (attempt_dir / "result.json").exists():
        time.sleep(0.05)
    return 75 if asked else 0


def be_the_only_one(job_dir: Path, exit_path: Path) -> int:
    """Lock the job's file, or tell who else lives; the worker of a settled start may, on a lost node."""
    fd = os.open(job_dir / "alive", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = Path(os.pread(fd, 4096, 0).decode())
        deadline = time.monotonic() + 60
        while not other.exists() and time.monotonic() < deadline:  # it is just ending
            time.sleep(0.1)
        if not other.exists():
            (job_dir / "twice.txt").open("a").write(f"{exit_path} while {other} lives\n")
    else:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(exit_path).encode(), 0)
    return fd


def leave_with(path: Path, grace_sec: float) -> None:
    """End without a result once another rank was lost."""
    while not path.exists():
        time.sleep(0.005)  # sooner than it is asked to stop, and obeys
    time.sleep(grace_sec)
    os._exit(87)


if __name__ == "__main__":
    sys.exit(main())
