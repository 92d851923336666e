"""One job writes events as fast as it can: what others notice, and how large honed.db becomes. See scripts/torture.

Meanwhile `honectl list` runs again and again, a job file of another user is dropped from time to time, and the times
between the pings of systemd's watchdog are taken. Status 1 where a bound is passed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/process"))

from harness import Instance

from honed.job import thinning
from honed.job.job import State

#: Bounds, in seconds: of 99 of 100 lists, of an acceptance, and between two pings, half of what systemd waits for.
MAX_LIST_SEC = 1.0
MAX_ACCEPT_SEC = 2.0
WATCHDOG_SEC = 60.0
#: Another user, whom the files that are dropped meanwhile belong to; and the seconds between two of them.
OTHER_UID = 4711
DROP_SEC = 5.0


class Pings:
    """The times of the watchdog's pings, as systemd would get them."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.2)
        self._is_over = threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                if b"WATCHDOG=1" in self._socket.recv(65536):
                    self.times.append(time.monotonic())

    def longest_sec(self, since: float) -> float:
        times = [since, *(each for each in self.times if each > since), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._socket.close()


def timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def drop_of_another(instance: Instance, name: str) -> None:
    hidden = instance.incoming_dir / f".{name}"
    hidden.write_bytes((instance.root / "other.json").read_bytes())
    if os.geteuid() == 0:
        os.chown(hidden, OTHER_UID, OTHER_UID)
    hidden.rename(instance.incoming_dir / f"{name}.json")


def accepted_after(instance: Instance, name: str) -> float:
    """Return the seconds from the drop of a file to its entry."""
    began = time.monotonic()
    drop_of_another(instance, name)
    while instance.job(name) is None and time.monotonic() < began + 60:
        time.sleep(0.05)
    return time.monotonic() - began


def rows(instance: Instance) -> tuple[int, int]:
    """Return the rows of metrics of the job that has the most, and the bytes of honed.db with its journal."""
    path = instance.layout.database_path
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
        sql = "SELECT coalesce(max(num), 0) FROM (SELECT count(*) AS num FROM metrics GROUP BY job_id)"
        (num_rows,) = db.execute(sql).fetchone()
    places = (path.with_name(path.name + suffix) for suffix in ("", "-wal"))
    return num_rows, sum(each.stat().st_size for each in places if each.exists())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="how long the job writes")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="honed-events-")))
        pings = Pings(root / "notify")
        stack.callback(pings.close)
        instance = Instance(root)
        instance.is_warm = False
        instance.environment |= {"NOTIFY_SOCKET": str(root / "notify"), "WATCHDOG_USEC": f"{WATCHDOG_SEC * 1e6:.0f}"}
        stack.callback(instance.end)
        instance.drop("hidden", name=None)
        (instance.incoming_dir / "hidden.json").rename(root / "other.json")
        instance.start()
        command = [str(Path(sys.executable).with_name("honectl")), "--root", str(root), "list"]
        idle = sorted(timed(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(7))[3]
        instance.drop("flood", name=f"flood-{options.seconds:g}")
        instance.wait_state(f"flood-{options.seconds:g}", State.RUNNING)
        began = time.monotonic()
        lists, asked, accepts = list[float](), list[float](), list[float]()
        while time.monotonic() < began + options.seconds:
            accepts.append(accepted_after(instance, f"succeed.other{len(accepts)}"))
            until = time.monotonic() + DROP_SEC
            while time.monotonic() < min(until, began + options.seconds):
                lists.append(timed(lambda: subprocess.run(command, check=True, capture_output=True)))
                asked += [timed(lambda: instance.client.ask("list")) for _ in range(5)]
        lists.sort()
        asked.sort()
        late_sec = pings.longest_sec(began)
        num_rows, num_bytes = rows(instance)
        events = sum(path.stat().st_size for path in instance.layout.jobs_dir.glob("*/attempts/*/events.jsonl"))
        median, slow, accept = lists[len(lists) // 2], lists[int(len(lists) * 0.99)], max(accepts)
        print(f"events written | {events / 2**20:.0f} MiB in {options.seconds:g} s")
        print(f"honectl list | median {median:.2f} s, 99 % {slow:.2f} s, of {len(lists)}; before it {idle:.2f} s")
        print(f"its answer alone | median {asked[len(asked) // 2]:.3f} s, longest {asked[-1]:.3f} s, of {len(asked)}")
        print(f"another user's file accepted | after {accept:.2f} s at most, of {len(accepts)}")
        print(f"between two pings of the watchdog | {late_sec:.1f} s at most")
        print(f"honed.db | {num_bytes / 2**20:.0f} MiB, {num_rows:,} rows of metrics")
        broken = [
            *([f"99 % of the lists took {slow:.2f} s"] if slow >= MAX_LIST_SEC else []),
            *([f"a file was accepted after {accept:.2f} s"] if accept >= MAX_ACCEPT_SEC else []),
            *([f"no ping of the watchdog for {late_sec:.1f} s"] if late_sec >= WATCHDOG_SEC else []),
            *([f"{num_rows:,} rows of metrics"] if num_rows > thinning.MAX_METRIC_ROWS else []),
        ]
        for words in broken:
            print(f"BROKEN: {words}")
        return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
