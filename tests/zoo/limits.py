"""A function run in a child process with limits, so that a test survives it when it eats memory, hangs or crashes."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import traceback
from collections.abc import Callable
from typing import Any


def in_child(function: Callable[[], Any], *, max_bytes: int, cpu_sec: int) -> Any:
    """Return the function's result, as JSON carries it. Raises AssertionError with the cause otherwise.

    `max_bytes` limits the additional address space, `cpu_sec` the processor time: a busy machine changes nothing.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(function, write_fd, max_bytes=max_bytes, cpu_sec=cpu_sec)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise AssertionError(f"ended by {name}" + (f": more than {cpu_sec} s" if name == "SIGXCPU" else ""))
    kind, value = json.loads(said)
    if kind != "returned":
        raise AssertionError(value)
    return value


def _become(function: Callable[[], Any], write_fd: int, *, max_bytes: int, cpu_sec: int) -> None:
    said = ["raised", "nothing"]
    try:
        faulthandler.disable()
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (held + max_bytes, held + max_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_sec, cpu_sec + 1))
        said = ["returned", function()]
    except BaseException:  # noqa: BLE001 - whatever it is, it is the answer
        said = ["raised", traceback.format_exc()[-3000:]]
    finally:
        os.write(write_fd, json.dumps(said).encode()[:60_000])
        os._exit(0)
