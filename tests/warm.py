"""Processes that begin with their imports done: `Popen` for subprocess.Popen, `run` for subprocess.run.

The imports of a worker take longer than all that most tests look at, and those of honectl or the daemon as long as what
they then do. A server imports once for all test processes, and a process is a fork of it that has only imported. From
there it is what its command line asks for: the shim forks, the worker is the shim's child, signals, sessions and exit
statuses are a cold one's. Not so /proc/PID/environ and cmdline (the server's), the children of a daemon (the server's,
so that it gets no SIGCHLD of them), the descriptors that an exec would close, what Python does at its end, and the seed
of str hashes (one for all). There are two servers: a worker's has torch, transformers and
TRL, and all others are forks of one that has honed without them. A worker that would import otherwise (Unsloth,
bitsandbytes, wandb, torchvision, a merge) begins anew, by exec, and so does a process with a sitecustomize. Tests that
train several vision models, several quantized ones or some through Unsloth have a server for such workers, too
(`address`).

Tests of these, of how a process starts and what it imports, and those that put other modules in the place of some use
subprocess.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from waiting import wait_for

#: The server's socket, for this process and for those that it starts, of processes of that kind.
ADDRESS = "HONED_TEST_WARM_{}"
#: The directory of all servers of a run of tests. They end with the process that holds its `life` open: the first.
DIRECTORY = "HONED_TEST_WARM_DIR"
#: `cgroup.procs` of the cgroup of a test process, which what is forked for it enters: see costs.py.
CGROUP = "HONED_TEST_CGROUP"
MAX_REQUEST_BYTES = 1 << 18
START_SEC = 600.0

#: The servers of workers, and the packages that such a worker hides: of a text model that is not quantized, of a vision
#: model, of a quantized text model, and of a model through Unsloth, which patches what it finds.
HIDDEN = {
    "worker": ["wandb", "aiohttp", "torchvision", "bitsandbytes"],
    "seeing": ["wandb", "aiohttp", "bitsandbytes"],
    "quantized": ["wandb", "aiohttp", "torchvision"],
    "unsloth": ["wandb"],
}

COLD_POPEN = subprocess.Popen
#: Of the server that this process is a fork of.
KIND = sys.argv[2] if __name__ == "__main__" else ""
#: Variables that libraries set as they are imported, and that they read later.
_set_by_imports: dict[str, str] = {}


# -- in tests ---------------------------------------------------------------------------------------------------------


class Popen:
    """A process of honed's but a worker, that a server forks for us. It lives on where we end."""

    kind = "plain"

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        restore_signals: bool = True,
        preexec_fn: Callable[[], None] | None = None,  # noqa: ARG002 - not called: it ends a child with its parent
    ) -> None:
        assert restore_signals
        request = {
            "command": list(command),
            "cwd": str(cwd or Path.cwd()),
            "start_new_session": start_new_session,
            "environment": dict(os.environ if env is None else env),
            "cgroup": os.environ.get(CGROUP, ""),
        }
        self.stdin: IO[bytes] | None = None
        place = address(self.kind)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as own:

            def fd_of(stream: Any, inherited_fd: int) -> int:
                if stream == subprocess.PIPE:
                    read_fd, write_fd = os.pipe()
                    own.callback(os.close, read_fd)
                    self.stdin = os.fdopen(write_fd, "wb", buffering=0)
                    return read_fd
                if stream == subprocess.DEVNULL:
                    null_fd = os.open(os.devnull, os.O_RDWR)
                    own.callback(os.close, null_fd)
                    return null_fd
                if stream is None:
                    return inherited_fd
                return int(stream if isinstance(stream, int) else stream.fileno())

            assert subprocess.PIPE not in (stdout, stderr)
            output_fd = fd_of(stdout, 1)
            error_fd = output_fd if stderr == subprocess.STDOUT else fd_of(stderr, 2)
            fds = [fd_of(stdin, 0), output_fd, error_fd]
            self._socket.connect(place)
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            self.pid = int(self._socket.recv(100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._socket], [], [], timeout)[0]:
            self.returncode = int(self._socket.recv(100))
            self._socket.close()
        return self.returncode


class WorkerPopen(Popen):
    """A worker, its shim, or what else trains."""

    def __init__(self, command: Sequence[str], **keys: Any) -> None:
        self.kind = kind_of(command)
        super().__init__(command, **keys)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
    popen: type[Popen] = Popen,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, and take what it has written."""
    with tempfile.TemporaryFile("w+", newline="") as output, tempfile.TemporaryFile("w+", newline="") as errors:
        process = popen(command, stdout=output, stderr=errors, env=env)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        output.seek(0)
        errors.seek(0)
        done = subprocess.CompletedProcess(list(command), status, output.read(), errors.read())
    assert not check or status == 0, done
    return done


def warm_popen(command: Any, *arguments: Any, **keys: Any) -> Any:
    """Start a process in place of subprocess.Popen: warm where its command is `python … -m honed.…`."""
    words = [] if isinstance(command, str) else list(command)
    is_ours = words[:1] == [sys.executable] and any(word.startswith("honed.") for word in words[1:4])
    if not is_ours:
        return COLD_POPEN(command, *arguments, **keys)
    is_worker = any(word.startswith("honed.worker") for word in words[1:4])
    return (WorkerPopen if is_worker else Popen)(words, *arguments, **keys)


def warm_children() -> bool:
    """From now on start processes of honed's modules warm, and all others as ever. False, and nothing changes, where no
    server is known."""
    if ADDRESS.format("PLAIN") not in os.environ:
        return False
    subprocess.Popen = warm_popen  # type: ignore[assignment,misc]
    return True


@contextlib.contextmanager
def forks_of_us() -> Iterator[None]:
    """Processes but workers that are started meanwhile are forks of this one, in its namespaces, and not of a server
    that others use, too. So nothing should have happened here but imports."""
    variable = ADDRESS.format("PLAIN")
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory(prefix="honed-warm-") as directory:
        listener = listen(f"{directory}/socket")
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write_fd)
            os.dup2(read_fd, 0)
            try:
                serve(listener)
            finally:
                os._exit(0)
        os.close(read_fd)
        listener.close()
        os.environ[variable] = f"{directory}/socket"
        try:
            yield
        finally:
            os.close(write_fd)
            os.waitpid(pid, 0)
            os.environ.pop(variable)
            os.environ |= {} if before is None else {variable: before}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that knows no server."""
    return {key: value for key, value in environment.items() if not key.startswith(ADDRESS.format(""))}


def kind_of(command: Sequence[str]) -> str:
    """Return which server's imports are those of a shim's worker, of those servers that are known."""
    from honed.job.plan_file import PlanFile
    from honed.worker import imports

    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        # `JOB_DIR ATTEMPT --backend NAME` ends what a shim starts, whatever program the worker is.
        has_backend = "--backend" in command
        place = command.index("--backend") - 2 if has_backend else command.index("honed.worker") + 1
        plan = PlanFile.from_json(Path(command[place], "plan.json").read_bytes())
        backend = command[place + 3] if has_backend else plan.backend.name
        hidden = imports.hidden(plan, backend)
        for kind, names in HIDDEN.items():
            if names == hidden and backend_of(kind) == backend and ADDRESS.format(kind.upper()) in os.environ:
                return kind
    return "worker"


def directory() -> Path:
    """The directory of the servers of this run. The first process that asks makes it, and they end with it: pytest, or
    a program of the tests that is run by itself."""
    if DIRECTORY not in os.environ:
        made = Path(tempfile.mkdtemp(prefix="honed-warm-"))
        os.mkfifo(made / "life")
        os.open(made / "life", os.O_RDWR)
        atexit.register(_remove, made, os.getpid())
        os.environ[DIRECTORY] = str(made)
    return Path(os.environ[DIRECTORY])


def _remove(made: Path, pid: int) -> None:
    import shutil

    if os.getpid() == pid:
        shutil.rmtree(made, ignore_errors=True)


def backend_of(kind: str) -> str:
    return "unsloth" if kind == "unsloth" else "transformers"


def address(kind: str) -> str:
    """The server's socket. It is started where there is none; processes that we start find it by the environment."""
    variable = ADDRESS.format(kind.upper())
    if variable not in os.environ:
        place = directory() / kind
        place.mkdir(exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "socket").exists():
                _start(kind, place)
        os.environ[variable] = str(place / "socket")
    return os.environ[variable]


def _start(kind: str, place: Path) -> None:
    """Start a server and wait until it has imported all."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HOME": str(place)}
    with (directory() / "life").open("rb", buffering=0) as life, (place / "log").open("wb") as log:
        server = COLD_POPEN(
            [sys.executable, __file__, str(place / "socket"), kind], stdin=life, stdout=log, stderr=log, env=environment
        )
    path, log_of = place / "socket", (place / "log").read_text
    try:
        wait_for(
            lambda: path.exists() or server.poll() is not None, START_SEC, what=f"the {kind} server", account=log_of
        )
    except BaseException:
        server.kill()  # else it would bind the socket of the next one
        server.wait()
        raise
    assert path.exists(), log_of()


class RankPopen(Popen):
    """A shim with several ranks: their libraries know torch.distributed, which a single worker's do without."""

    kind = "ranks"


class TestsPopen(Popen):
    """A process that runs tests: see forked.py."""

    kind = "tests"


class UnslothPopen(Popen):
    """A process that has imported Unsloth."""

    kind = "unsloth"


class JumpingPopen(Popen):
    """A process of honed's but a worker, whose clock is set: see crash/jumping.py."""

    kind = "jumping"


# -- the server -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve until the run of tests ends: our standard input is then closed."""
    if sys.argv[2] == "jumping":
        from crash import jumping

        jumping.plant()
    if sys.argv[2] == "tests":
        import_of_tests()
    elif sys.argv[2] in (*HIDDEN, "ranks"):
        import_of_worker(HIDDEN.get(sys.argv[2]))
    else:
        import_of_others()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; see who waits for its tests to end
    serve(listen(sys.argv[1]))
    os._exit(0)


def listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(socket.SOMAXCONN)
    Path(f"{path}.new").rename(path)  # whoever sees it can connect
    return listener


def serve(listener: socket.socket) -> None:
    """Fork what is asked for, until our standard input is closed."""
    wake_read_fd, wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting: list[socket.socket] = []  # connections without their request: who connected may be stopped before it
    clients: dict[int, socket.socket] = {}
    while True:
        ready = select.select([0, listener, wake_read_fd, *waiting], [], [])[0]
        if 0 in ready and not os.read(0, 1):
            return
        if wake_read_fd in ready:
            os.read(wake_read_fd, 4096)
            tell_ends(clients)
        if listener in ready:
            waiting.append(listener.accept()[0])
        for client in [each for each in waiting if each in ready]:
            waiting.remove(client)
            message, fds, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 3)
            if not message:
                client.close()
                continue
            if (pid := os.fork()) == 0:
                for each in (listener, client, *waiting, *clients.values()):
                    each.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                become(json.loads(message), fds)
            for fd in fds:
                os.close(fd)
            clients[pid] = client
            with contextlib.suppress(OSError):  # who asked may have been killed
                client.send(str(pid).encode())


def tell_ends(clients: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with contextlib.suppress(OSError), clients.pop(pid) as client:  # who asked may be gone
            client.send(str(os.waitstatus_to_exitcode(status)).encode())


def import_of_others() -> None:
    """Import all of honed but the worker."""
    gc.disable()
    import honed

    for module in pkgutil.walk_packages(honed.__path__, "honed."):
        if not module.name.startswith("honed.worker") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    sys.modules["honed.page.page"].load()  # a report compiles its templates for half of its time


def import_of_tests() -> None:
    """Import what the modules of tests do: the training stack with all that it finds. Not what pytest rewrites."""
    import_of_others()
    from honed.worker.model import load, torchvision

    torchvision.mend()
    with contextlib.suppress(ImportError):
        load.choose("transformers").import_libraries()
        import torchvision.transforms.v2
        from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer  # noqa: F401
        from trl import SFTTrainer  # noqa: F401

        import honed.worker.preview
        import honed.worker.run
        import honed.worker.train.callback
        import honed.worker.train.trainer  # noqa: F401


def import_of_worker(hidden: list[str] | None) -> None:
    """Import what a worker does, and hide what it hides; for several ranks nothing."""
    gc.disable()
    from honed.worker.__main__ import ENVIRONMENT

    del sys.modules["honed.worker.__main__"]
    os.environ.update(ENVIRONMENT)
    from honed.worker.model import load, torchvision

    before = dict(os.environ)
    if hidden is not None:
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    if KIND in ("seeing", "unsloth"):
        torchvision.mend()
    load.choose(backend_of(KIND)).import_libraries()
    _set_by_imports.update((name, value) for name, value in os.environ.items() if before.get(name) != value)
    import honed.worker.preview
    import honed.worker.rows.data
    import honed.worker.run
    import honed.worker.train.callback
    import honed.worker.train.trainer
    import honed.worker.train.usage  # noqa: F401


# -- a process that it made -------------------------------------------------------------------------------------------


def become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Be the process that was asked for."""
    if request["cgroup"]:
        Path(request["cgroup"]).write_text("0")
    if request["start_new_session"]:
        os.setsid()
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(_set_by_imports | request["environment"])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    if "FORCE_COLOR" in os.environ or sys.stdout.isatty():  # honectl looks at its terminal as it is imported
        for name in [name for name in sys.modules if name.startswith("honed.cli")]:
            del sys.modules[name]
    exec_anew = os.execvp
    if any(Path(place, "sitecustomize.py").exists() for place in places if place):
        exec_anew(request["command"][0], request["command"])  # what it plants, only a start of Python runs

    def execvp(_file: str, command: Sequence[str]) -> NoReturn:
        go_on_as(list(command), exec_anew)

    os.execvp = execvp  # type: ignore[assignment]
    go_on_as(request["command"], exec_anew)


def go_on_as(command: list[str], exec_anew: Callable[[str, Sequence[str]], NoReturn]) -> NoReturn:
    """Be `python … -m MODULE ARGUMENTS`, `… FILE ARGUMENTS` or `… -c CODE`, or exec it where its imports are others."""
    words = command[1:]
    while words[0] in ("-I", "-S", "-P", "-u"):
        del words[0]
    status = 1
    try:
        sys.orig_argv = list(command)
        if words[0] == "-c":
            sys.argv = words[:1]
            sys.modules["__main__"] = ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
            atexit._run_exitfuncs()
        elif words[0] != "-m":
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        elif words[1] == "honed.worker" and KIND != "ranks" and not has_usual_imports(words[2:]):
            exec_anew(command[0], command)
        else:
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)
            if words[1].startswith("honed.worker"):  # what it is to do otherwise
                exec(os.environ.get(f"HONED_TEST_RANK_{os.environ.get('RANK', '0')}", ""), {})
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def has_usual_imports(words: list[str]) -> bool:
    """Tell whether a worker with these arguments imports no more and no less than we have."""
    from honed.worker import assignment, imports

    backend = words[words.index("--backend") + 1] if "--backend" in words else None
    try:
        job = assignment.read(Path(words[0]).resolve(), int(words[1]), backend=backend)
    except Exception:  # noqa: BLE001 - the worker is to say so
        return False
    hidden = [name for name in HIDDEN["worker"] if sys.modules.get(name, sys) is None]
    is_known = KIND == "unsloth" or imports.is_known(job.plan, job.backend)
    return job.backend == backend_of(KIND) and imports.hidden(job.plan, job.backend) == hidden and is_known


if __name__ == "__main__":
    main()
