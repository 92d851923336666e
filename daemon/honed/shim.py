"""The shim: starts one worker, waits for it, and writes down how it ended, so that a daemon which was restarted
meanwhile can still read it. Run as `python -I -S shim.py ATTEMPT_DIR START COMMAND...`; imports nothing of honed.

It leads a session of its own, in which the worker is, and holds a lock on ATTEMPT_DIR/lock while the worker lives; the
lock file says who they are. SIGTERM is handed on to the worker alone, so that its data loaders live through the
checkpoint. If the shim itself is killed, the kernel kills the worker.

START counts the worker starts of one attempt (a fallback makes a second). An exit.json for this START that is there
already means that somebody else has settled it: then nothing is started.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> int:
    attempt_dir, start, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    lock_fd = os.open(f"{attempt_dir}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    if has_ended(attempt_dir, start):
        return 1
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{attempt_dir}/result.json")  # noqa: PTH108 - pathlib would double the shim's start
    shim_pid, worker_pid = os.getpid(), os.fork()
    if worker_pid == 0:
        run(command, shim_pid)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, json.dumps({"shim_pid": os.getpid(), "worker_pid": worker_pid, "start": start}).encode(), 0)
    status = wait(worker_pid)
    write_exit(attempt_dir, start, status)
    return 0


def run(command: list[str], shim_pid: int) -> None:
    """Become the worker; it dies with the shim."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim_pid:  # it died before the kernel was asked
            os._exit(127)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvp(command[0], command)
    except OSError as error:
        print(f"honed: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def wait(worker_pid: int) -> int:
    """Wait for the worker, handing SIGTERM on to it. Returns its wait status."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(worker_pid, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    while True:
        # Wait without reaping: the pid must stay the worker's while a SIGTERM may still be handed on.
        os.waitid(os.P_PID, worker_pid, os.WEXITED | os.WNOWAIT)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid, status = os.waitpid(worker_pid, 0)
        if pid == worker_pid:
            return status


def has_ended(attempt_dir: str, start: int) -> bool:
    try:
        with open(f"{attempt_dir}/exit.json", "rb") as file:  # noqa: PTH123
            return bool(json.load(file)["start"] >= start)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_exit(attempt_dir: str, start: int, status: int) -> None:
    """Whole and durable: beside, synced, renamed, the directory synced."""
    record = {
        "start": start,
        "status": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "ended_at": time.time(),
        "max_resident_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    temporary = f"{attempt_dir}/.exit.json.tmp"
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.write(fd, json.dumps(record).encode())
    os.fsync(fd)
    os.close(fd)
    os.rename(temporary, f"{attempt_dir}/exit.json")  # noqa: PTH104
    fd = os.open(attempt_dir, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
