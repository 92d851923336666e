"""Long run of tests/zoo/fuzz.py: see scripts/fuzz."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import traceback
import warnings
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from zoo import fuzz

#: Bytes of address space of one reader, including Python, pyarrow and FFmpeg; as for the helper that checks jobs.
MAX_BYTES = 4 * 2**30
#: Maximum CPU seconds of one example; a slower one is a fault, too.
SLOW_SEC = 10.0
#: Examples between two checks of the time.
BATCH = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Feed honed's readers what is made up.")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all readers together (default: %(default)s)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(target.name for target in fuzz.TARGETS))
    options = parser.parse_args()
    if options.one:
        return feed(options.one, options.minutes * 60)
    names = options.names or [target.name for target in fuzz.TARGETS]
    failed, total, began = [], 0, time.monotonic()
    print(f"{'reader':24}{'examples':>10}{'a second':>10}{'slowest':>10}{'memory':>11}", flush=True)
    for name in names:
        told = run(name, options.minutes / len(names))
        total += told["num_examples"]
        print(
            f"{name:24}{told['num_examples']:>10,}{told['num_examples'] / told['seconds']:>10,.0f}"
            f"{told['slowest_sec'] * 1000:>7,.0f} ms{told['peak_bytes'] / 2**20:>7,.0f} MiB"
            f"{'' if told['ok'] else '  FAILED'}",
            flush=True,
        )
        failed += [] if told["ok"] else [name]
        if not told["ok"]:
            print(told["fault"], flush=True)
    seconds = time.monotonic() - began
    print(
        f"{total:,} examples in {seconds / 60:.1f} minutes, {total / seconds:,.0f} a second; "
        f"{'failed: ' + ', '.join(failed) if failed else 'no fault'}"
    )
    return int(bool(failed))


def run(name: str, minutes: float) -> dict[str, Any]:
    """Run one reader in a child; if it died, the result has the reason."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--one", name, "--minutes", str(minutes)]
    done = subprocess.run(command, capture_output=True, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        fault = f"it ended with status {done.returncode}\n{done.stderr.decode(errors='replace')[-3000:]}"
        told = {"ok": False, "num_examples": 0, "slowest_sec": 0.0, "peak_bytes": 0, "fault": fault}
    return {"seconds": time.monotonic() - began, **told}


def feed(name: str, seconds: float) -> int:
    """Feed one reader until the time is over; the last line of stdout is the result."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    target = next(target for target in fuzz.TARGETS if target.name == name)
    told: dict[str, Any] = {"ok": True, "num_examples": 0, "slowest_sec": 0.0}
    began, number = time.monotonic(), 0
    with fuzz.directory() as directory:

        def feed_one(example: object) -> None:
            before = time.process_time()
            target.run(directory, example)
            taken = time.process_time() - before
            told["num_examples"] += 1
            told["slowest_sec"] = max(told["slowest_sec"], taken)
            assert taken < SLOW_SEC, f"it takes {taken:.0f} s"

        while told["ok"] and time.monotonic() - began < seconds:
            number += 1
            fed = settings(
                max_examples=min(BATCH, 50 * number),
                deadline=None,
                database=None,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            )(given(target.examples)(feed_one))
            try:
                seed(int.from_bytes(os.urandom(8)))(fed)()
            except BaseException:  # noqa: BLE001 - whatever it is, it is what we look for
                told |= {"ok": False, "fault": traceback.format_exc()[-6000:]}
    told |= {
        "seconds": time.monotonic() - began,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(told))
    return int(not told["ok"])


if __name__ == "__main__":
    sys.exit(main())
