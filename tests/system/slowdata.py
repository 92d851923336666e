"""Data sets that do not answer, as on a dead network file system: a process holds leases on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from machine import Machine

#: Seconds after which the kernel breaks a lease, see fs.lease-break-time in proc_sys_fs(5).
LEASE_SEC = 45
#: Holds leases on its arguments, so that opening one of them blocks, as on a file system that does not answer.
HOLD = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, lambda *_: None)
fds = [os.open(path, os.O_RDWR) for path in sys.argv[1:]]
for fd in fds: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
while True: time.sleep(600)
"""


@contextlib.contextmanager
def slow_data(machine: Machine, user: str, source: str, number: int) -> Iterator[list[str]]:
    """Make copies of a data set for a user that are not opened before LEASE_SEC are over. Yields their paths."""
    machine.sh(f"mkdir /dev/shm/{user}")
    paths = [f"/dev/shm/{user}/{each}.jsonl" for each in range(number)]
    machine.sh(f"for i in $(seq 0 {number - 1}); do cp {source} /dev/shm/{user}/$i.jsonl; done")
    machine.sh(f"chown -R {user} /dev/shm/{user}")
    with machine.popen("python3", "-c", HOLD, *paths, user=user, stdout=-1) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield paths
        finally:
            process.kill()
            machine.try_run("pkill", "--full", "F_SETLEASE")
