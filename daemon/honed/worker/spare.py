"""A spare: a worker that has imported its libraries, and waits for a job of its user that needs the same ones.

    python -m honed.worker --spare NEEDS      its standard input is a socket; shim.py says what goes over it

It is a process of its own, not a fork: what libraries draw or start when they are imported, each worker has for itself.
It has no data and no device; CUDA must not be initialised in it. When it is given a job it becomes the worker that
would have been started: environment, working directory, output, arguments. It declines, and the job starts anew, if
anything that it has imported has changed since, or if the job needs other imports.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import site
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from honed.job.needs import Needs
from honed.system import usage
from honed.worker import assignment, imports
from honed.worker.background import Background
from honed.worker.gate import NVML_CHECK

#: Bytes of a message; see shim.py.
MAX_MESSAGE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Job:
    """The job that a spare was given."""

    words: list[str]  #: the arguments of its worker
    asked: list[int]  #: not empty once it was asked to stop; until other signal handlers take over
    age_sec: float  #: how long the spare had waited for it


class RefusalError(Exception):
    """The spare is of no use for the job."""


def wait(needs: Needs, load: Callable[[Needs], None] | None = None) -> Job:
    """Import what such a job needs, wait for one, and be its worker from then on. Ends the process if there is none, or
    if it cannot be that worker. `load` imports, instead of what a worker's libraries need."""
    link_fd, own_place = _take_link(), os.getcwd()  # noqa: PTH109 - a text, as those in sys.path
    background = Background()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.append(1))
    os.environ[NVML_CHECK] = "1"
    (load or _import)(needs)
    files, ready_at = dict(_files(own_place)), time.monotonic()
    began_ns = usage.usage()["start_time_seconds"] * 1e9
    if changed := [name for name, state in files.items() if state is not None and state[3] >= began_ns]:
        _leave(f"{changed[0]} has changed meanwhile")
    os.write(link_fd, b"ready")
    if not (message := os.read(link_fd, MAX_MESSAGE_BYTES)):
        os._exit(0)
    job: dict[str, Any] = json.loads(message)
    _redirect(job["log"])
    try:
        changed = [name for name, state in files.items() if _state(name) != state]
        if changed:
            raise RefusalError(f"{changed[0]} has changed")
        words = _become(job, needs, own_place)
    except RefusalError as refusal:
        _leave(str(refusal))
    background.end()
    os.write(link_fd, b"taken")
    os.close(link_fd)
    return Job(words, asked, time.monotonic() - ready_at)


def _take_link() -> int:
    """Return the socket, and leave an empty standard input, so that no child has the socket."""
    link_fd = os.dup(0)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    return link_fd


def _leave(why: str) -> NoReturn:
    print(f"honed: the spare worker is of no use: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _import(needs: Needs) -> None:
    with imports.quick():
        importlib.import_module("honed.worker.run")
    imports.narrow(needs.hidden, defers=needs.is_plain)
    imports.ahead(needs)
    _check_plain()


def _check_plain() -> None:
    """End the process if an import has done more than import: a device that is in use, or a thread."""
    import torch

    if torch.cuda.is_initialized():
        _leave("CUDA was initialised")
    if others := [each.name for each in threading.enumerate() if each is not threading.main_thread()]:
        _leave(f"it has threads: {', '.join(others)}")


# -- what it has imported ----------------------------------------------------------------------------------------------

#: Inode, bytes, and the times of the last changes of its content and of anything of it, in ns; None if there is none.
_State = tuple[int, int, int, int] | None


def _files(own_place: str) -> Iterator[tuple[str, _State]]:
    """Yield the files and directories that decide what a worker imports, each with its state."""
    places = [place for place in sys.path if place != own_place]
    names = {sys.executable, str(Path(sys.prefix) / "pyvenv.cfg"), *places}
    for module in list(sys.modules.values()):
        if module is not None and isinstance(name := vars(module).get("__file__"), str):
            names.add(name)
    for place in {*site.getsitepackages(), *places}:
        names.update(map(str, Path(place).glob("*.pth")))
    for name in sorted(names):
        yield name, _state(name)


def _state(name: str) -> _State:
    try:
        info = os.stat(name)  # noqa: PTH116 - of thousands of files
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


# -- the job -----------------------------------------------------------------------------------------------------------


def _redirect(path: str) -> None:
    """Have all that this process writes go to the job's log from now on."""
    log_fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream, place in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log_fd, place)
    os.close(log_fd)


def _become(job: dict[str, Any], needs: Needs, own_place: str) -> list[str]:
    """Take over what a process has from its start. Returns the worker's arguments. Raises RefusalError."""
    command: list[str] = job["command"]
    words = command[sys.orig_argv.index("--spare") :]  # ours begins with the same program
    os.environ.clear()
    os.environ.update(job["environment"])
    if own_place in sys.path:  # by an empty part of PYTHONPATH
        sys.path[sys.path.index(own_place)] = job["dir"]
    os.chdir(job["dir"])
    sys.argv[1:] = words
    sys.orig_argv[:] = command
    importlib.invalidate_caches()
    if "WORLD_SIZE" in os.environ:
        raise RefusalError("the job has several ranks, which import more")
    try:
        wanted = imports.of(assignment.read(Path(words[0]).resolve(), int(words[1]), backend=words[3]))
    except Exception as problem:
        raise RefusalError(f"the job's assignment cannot be read: {problem}") from problem
    if wanted != needs:
        raise RefusalError("the job needs other libraries")
    return words
