"""The shim: starts one worker, waits for it, and records how it ended, so that a daemon that was restarted meanwhile
can still read it. Run as `python -I -S shim.py [--relay] ATTEMPT_DIR START COMMAND...`; imports nothing of honed.

It leads its own session, which contains the worker, and holds a lock on ATTEMPT_DIR/lock while the worker lives; the
lock file names their pids. SIGTERM and SIGABRT are forwarded to the worker alone, so that its data loaders live through
the checkpoint, and its stacks are dumped. If the shim itself is killed, the kernel kills the worker.

With `--relay` it is the main process of the worker's unit: it copies the worker's output to ATTEMPT_DIR/worker.log,
where the output also goes without it. The journal, which more people can read, gets only the stacks of a worker that
hangs or crashes: a library, a metric or a traceback may print rows. While the worker writes its last checkpoint, the
shim asks systemd for more time, up to $HONED_STOP_TIMEOUT_SEC. It ends as the worker did, so that `systemctl status`
shows the actual result.

Where the shim itself cannot run (it was frozen or stopped with the worker, as by a cluster that suspends a job), it
writes how many seconds did not pass for the job, so far in this start: the worker's time limit is as much later.

    paused    seconds, as text; absent while there were none

START counts the worker starts of one attempt (a fallback makes a second). If exit.json for this START already exists,
another process has settled it, and nothing is started; nor on a cluster if the lock file names this START.

With $HONED_NUM_RANKS above 1 it starts that many workers, with their RANK, LOCAL_RANK, WORLD_SIZE and
LOCAL_WORLD_SIZE. Signals are forwarded to all. If one dies by a signal or with a status other than 0, the others are
asked to stop, and killed RANK_END_SEC later. The first death is the one in exit.json, with its rank.

    ranks/            what the ranks share; emptied before they start. They meet at `rendezvous` (worker/parallel.py)
    ranks/lost.json   {"rank", "signal"} of a rank that died by a signal: the others leave no result

With $HONED_NUM_NODES above 1, on a cluster, its COMMAND is srun, which starts on every node, with the node's number as
$HONED_NODE and the address of the first one as $HONED_MEET_AT,

    shim.py --node ATTEMPT_DIR COMMAND...

with the ranks of that node. The signals to the shim are not forwarded, since srun would kill all, and send them to the
data loaders, too: the shim writes them into a file, which the nodes look at. The first node at which a rank
fails writes ranks/end.json, which is the end in exit.json; the others look for it, and their ranks have as long to end
as those beside it. The failed node's own end, with status 1, comes after rank 0's result if there will be one, and then
srun kills what is left (--kill-on-bad-exit).

    ranks/end.json    {"rank", "status", "signal", "was_out_of_memory"} of the first failure on any node
    ranks/orders      the numbers of the signals, one a line. Read by opening it, as NFS needs
    ranks/asked.json  a node was asked to stop by others than the shim
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
#: Signals that are forwarded to the worker.
HANDED_ON = (signal.SIGTERM, signal.SIGABRT)
#: Seconds between reads of the kernel's count of out-of-memory kills. A kill since the read before the last one counts
#: as the cause of a SIGKILL, because a large process takes a while to die. The cgroup's count, which we share with the
#: worker, excludes kills elsewhere; the machine's count is the fallback.
LOOK_INTERVAL_SEC = 10.0
#: Seconds requested from systemd at a time, and how often, while the worker stops.
EXTENSION_SEC, EXTEND_INTERVAL_SEC = 20.0, 5.0
#: Size of the lock file, in bytes: more than its record takes, with a pid per rank.
LOCK_BYTES = 4096
#: Seconds for which output of a dead worker's children is still read.
DRAIN_SEC = 2.0
#: Seconds. A shorter pause is what a busy machine makes (system/pauses.py).
MIN_PAUSE_SEC = 5.0
#: Seconds after a pause in which a worker ends whose watchdog has passed meanwhile.
AFTER_PAUSE_SEC = 60.0
#: Seconds between two looks for a pause: so much of it may be missed.
PAUSE_LOOK_SEC = 1.0
#: Seconds that the other ranks have to end by themselves after the first death.
RANK_END_SEC = 10.0
#: Seconds between a node's looks for the end of another, and those that a node, after the end of its own ranks, waits
#: for rank 0's result, where a rank died by a signal and where it left an error.
NODE_LOOK_SEC, LOST_RESULT_SEC, RESULT_SEC = 0.5, 5.0, 15.0
#: Exit status of a rank that ended because another was lost (KilledError's): it is not the cause.
LOST_STATUS = 87
#: Bytes. The journal cuts longer lines, too.
MAX_LINE_BYTES = 32 * 1024
#: The first line of faulthandler's output, in a worker that is sent SIGABRT because it hangs, or that crashes.
FATAL = [
    b"Fatal Python error: " + what
    for what in (b"Aborted", b"Segmentation fault", b"Bus error", b"Illegal instruction", b"Floating-point exception")
]


def main() -> int:
    arguments = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})
    if arguments[0] == "--node":
        return run_node(arguments[1], arguments[2:])
    relays = arguments[0] == "--relay"
    arguments = arguments[relays:]
    attempt_dir, start, command = arguments[0], int(arguments[1]), arguments[2:]
    # honed may be another user of our group, and tests the lock to see whether we are alive.
    lock_fd = os.open(f"{attempt_dir}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o664)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1
    if has_ended(attempt_dir, start) or ("HONED_FENCE" in os.environ and has_begun(lock_fd, start)):
        return 1
    for left in ("result.json", "paused"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{attempt_dir}/{left}")  # noqa: PTH108 - pathlib would double the shim's start
    pipe = os.pipe2(os.O_CLOEXEC) if relays else None
    is_spread = int(os.environ.get("HONED_NUM_NODES", "1")) > 1  # the command is srun
    num_ranks = 1 if is_spread else int(os.environ.get("HONED_NUM_RANKS", "1"))
    if num_ranks > 1 or is_spread:
        make_shared(f"{attempt_dir}/ranks")
    if is_spread:
        append(f"{attempt_dir}/ranks/orders", b"")
    if num_ranks > 1:
        os.environ.update(as_rank(0, num_ranks))
    worker_pids = start_ranks(command, num_ranks, output_fd=pipe[1] if pipe else None)
    who: dict[str, object] = {"shim_pid": os.getpid(), "worker_pid": worker_pids[0], "start": start}
    if num_ranks > 1:
        who["worker_pids"] = worker_pids
    if "HONED_FENCE" in os.environ:  # on a cluster, where it may have waited
        who["started_at"] = time.time()
    note(lock_fd, who)
    relay = None
    if pipe:
        os.close(pipe[1])
        relay = Relay(pipe[0], f"{attempt_dir}/worker.log")
    watch = Watch(
        worker_pids,
        relay,
        lambda: note(lock_fd, {**who, "was_asked": True}),
        f"{attempt_dir}/ranks/lost.json",
        orders_path=f"{attempt_dir}/ranks/orders" if is_spread else "",
        paused_path=f"{attempt_dir}/paused",
    )
    status, was_out_of_memory = watch.wait()
    if is_spread and os.WIFSIGNALED(status):
        return 1  # without srun the ranks go on: the cluster ends them now, and says when they are gone
    rank = {"rank": watch.rank} if num_ranks > 1 else {}
    end = {**end_of(status), "was_out_of_memory": was_out_of_memory, "was_asked": watch.was_asked, **rank}
    end |= {"paused_sec": watch.paused_sec, "is_after_pause": watch.is_after_pause}
    write_exit(attempt_dir, start, end_of_nodes(f"{attempt_dir}/ranks", end) if is_spread else end)
    return end_as(status) if relays else 0


def run_node(attempt_dir: str, command: list[str]) -> int:
    """Run the ranks of one node. Returns 0 if all have ended well."""
    shared, node = f"{attempt_dir}/ranks", int(os.environ["HONED_NODE"])
    num_here, num_nodes = int(os.environ.get("HONED_NUM_RANKS", "1")), int(os.environ["HONED_NUM_NODES"])
    first = node * num_here
    watch = Watch(
        start_ranks(command, num_here, first=first, world=num_nodes * num_here),
        None,
        lambda: write_once(f"{shared}/asked.json", {}),
        f"{shared}/lost.json",
        nodes=Nodes(shared, first),
    )
    status, _ = watch.wait()
    if status == 0:
        return 0
    # Whoever ends with an error first has srun kill the others.
    is_lost = os.path.exists(f"{shared}/lost.json") or os.WEXITSTATUS(status) == LOST_STATUS  # noqa: PTH110
    until = time.monotonic() + (LOST_RESULT_SEC if is_lost else RESULT_SEC)
    while time.monotonic() < until and not os.path.exists(f"{attempt_dir}/result.json"):  # noqa: PTH110
        time.sleep(0.1)
    return 1


def end_of(status: int) -> dict[str, object]:
    """Return a wait status as exit.json has it."""
    return {
        "status": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
    }


def end_of_nodes(shared: str, srun: dict[str, object]) -> dict[str, object]:
    """Return the end of ranks on several nodes: the first failure, else srun's own end."""
    end = dict(srun)
    if isinstance(status := end["status"], int) and status > 128:
        end |= {"status": None, "signal": status - 128}  # a node's shim was killed
    with contextlib.suppress(OSError, ValueError, TypeError), open(f"{shared}/end.json", "rb") as file:  # noqa: PTH123
        end |= json.load(file)
    if os.path.exists(f"{shared}/asked.json"):  # noqa: PTH110
        end["was_asked"] = True
    return end


def append(path: str, data: bytes) -> None:
    """Append to a file, which there is from now on; a full disk must not end the worker."""
    with contextlib.suppress(OSError), open(path, "ab") as file:  # noqa: PTH123
        file.write(data)


def note(lock_fd: int, record: dict[str, object]) -> None:
    """Write a record into the lock file. One write of one size, without truncation: others read it at any moment, and
    must not see it empty, or with the end of an earlier start's.
    """
    os.pwrite(lock_fd, json.dumps(record).encode().ljust(LOCK_BYTES), 0)


def write_once(path: str, record: dict[str, object]) -> None:
    """Write a file unless there is one, whole at once; a full disk must not end the worker."""
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(temporary, "w", encoding="ascii") as file:  # noqa: PTH123
            json.dump(record, file)
        os.link(temporary, path)
    with contextlib.suppress(OSError):
        os.unlink(temporary)  # noqa: PTH108


def make_shared(directory: str) -> None:
    """Make the directory that the ranks of one start share, without what an earlier start has left in it."""
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - pathlib would double the shim's start
    for name in os.listdir(directory):  # noqa: PTH208
        os.unlink(f"{directory}/{name}")  # noqa: PTH108


def start_ranks(
    command: list[str], num_here: int, *, first: int = 0, world: int = 0, output_fd: int | None = None
) -> list[int]:
    """Start the workers of this machine's ranks, and return their pids."""
    shim_pid, pids = os.getpid(), []
    for rank in range(num_here):
        pid = os.fork()
        if pid == 0:
            if num_here > 1 or world > 1:
                os.environ.update(as_rank(rank, num_here, first=first, world=world))
            run(command, shim_pid, output_fd=output_fd)
        pids.append(pid)
    return pids


def as_rank(rank: int, num_here: int, *, first: int = 0, world: int = 0) -> dict[str, str]:
    """Return the variables by which a worker knows its rank: the number on this machine, from `first` on of `world`,
    by default all that there are."""
    return {
        "RANK": str(first + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world or num_here),
        "LOCAL_WORLD_SIZE": str(num_here),
    }


def run(command: list[str], shim_pid: int, *, output_fd: int | None = None) -> None:
    """Become the worker; it dies with the shim."""
    try:
        if output_fd is not None:
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim_pid:  # the shim died before prctl took effect
            os._exit(127)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvp(command[0], command)
    except OSError as error:
        print(f"honed: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


class Relay:
    """Copies the worker's output to its log, and the stacks of a worker that hangs or crashes also to the journal."""

    def __init__(self, fd: int, log_path: str) -> None:
        self.fd = fd
        self.is_open = True
        self._log_fd = os.open(log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rest = b""
        self._is_dying = False  # the following lines are its stacks

    def pump(self) -> None:
        """Copy available output; blocks if there is none."""
        data = os.read(self.fd, 64 * 1024)
        self.is_open = bool(data)
        write(self._log_fd, data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._forward_stacks(lines)

    def flush(self) -> None:
        """Handle a last line without a newline."""
        self._forward_stacks([self._rest])
        self._rest = b""

    def _forward_stacks(self, lines: list[bytes]) -> None:
        for line in lines:
            for first in FATAL:
                if line.endswith(first):  # behind a line that was not ended: a progress bar's
                    self._is_dying, line = True, first  # noqa: PLW2901
            if self._is_dying and is_of_stacks(line):  # logged as a warning; the unit's other lines are debug
                write(2, b"<4>%s\n" % _plain(line))


def is_of_stacks(line: bytes) -> bool:
    """Tell whether faulthandler writes such a line: a thread, or a place in the code."""
    is_place = line.startswith(b'  File "') and line.rpartition(b" in ")[0][-1:].isdigit()
    return is_place or line in FATAL or line.startswith((b"Thread 0x", b"Current thread 0x", b"  ..."))


class Nodes:
    """What the shims of several nodes exchange, by files in `directory`; `first_rank` is this node's."""

    def __init__(self, directory: str, first_rank: int) -> None:
        self._end_path = f"{directory}/end.json"
        self._orders_path = f"{directory}/orders"
        self.first_rank = first_rank
        self._num_read = 0  # bytes of the orders

    def orders(self) -> set[int]:
        """Return the signals that the shim of all nodes has got since the last look."""
        with contextlib.suppress(OSError), open(self._orders_path, "rb") as file:  # noqa: PTH123
            file.seek(self._num_read)
            whole = file.read().rpartition(b"\n")[0]
            self._num_read += len(whole) + 1 if whole else 0
            return {int(word) for word in whole.split()}
        return set()

    @property
    def has_failure(self) -> bool:
        """True if a rank has failed, here or elsewhere."""
        return os.path.exists(self._end_path)  # noqa: PTH110

    def report_failure(self, rank: int, status: int, *, was_out_of_memory: bool) -> None:
        """Tell the others of the failure of this node's `rank`, unless one has failed before."""
        end = {"status": status, "signal": None} if status > 0 else {"status": None, "signal": -status}
        write_once(self._end_path, {"rank": self.first_rank + rank, **end, "was_out_of_memory": was_out_of_memory})


class MemoryKills:
    """The kernel's count of out-of-memory kills, and what it was a while ago."""

    def __init__(self) -> None:
        self._counts = [out_of_memory_kills()] * 2
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """Read the count, from time to time."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_INTERVAL_SEC:
            self._looked_at = now
            self._counts = [self._counts[1], out_of_memory_kills()]

    @property
    def are_recent(self) -> bool:
        """True if there was one since the look before the last."""
        (path, count), (path_before, count_before) = out_of_memory_kills(), self._counts[0]
        return count > (count_before if path == path_before else 0)


class Watch:
    """Waits for the end of the worker, or of its ranks."""

    def __init__(
        self,
        worker_pids: list[int],
        relay: Relay | None,
        note_stop: Callable[[], object],
        lost_path: str,
        *,
        orders_path: str = "",
        paused_path: str = "",
        nodes: Nodes | None = None,
    ) -> None:
        """Create a watch of the ranks' workers. `note_stop` records that they were asked to stop: the shim is killed,
        too, if that takes too long. `lost_path` is written if one of several dies by a signal. `orders_path`: signals
        are written there, and not forwarded. `paused_path`: the seconds in which the shim could not run are written
        there. `nodes`: what this node and others share; signals are read there, and the
        first failure of a rank ends the others.
        """
        self._pids = worker_pids
        self._relay = relay
        self._note_stop = note_stop
        self._lost_path = lost_path
        self._orders_path = orders_path
        self._paused_path = paused_path
        self.paused_sec = 0.0
        self._paused_until: float | None = None
        self._nodes = nodes
        self.rank = 0  #: whose end is that of the attempt
        self._alive = set(range(len(worker_pids)))
        self._kill_at: float | None = None  #: when the ranks that are left are killed
        self._kills = MemoryKills()
        self._stop_asked_at: float | None = None
        self._extend_at = 0.0

    def wait(self) -> tuple[int, bool]:
        """Return the worker's wait status, and whether the kernel killed it because memory ran out."""
        wake_read_fd, wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write_fd, warn_on_full_buffer=False)
        for number in HANDED_ON:
            signal.signal(number, self._hand_on)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        poll = select.poll()
        poll.register(wake_read_fd, select.POLLIN)
        if self._relay is not None:
            poll.register(self._relay.fd, select.POLLIN)
        looked_at = time.monotonic()
        # Without reaping: the pid must stay the worker's while a signal may still be forwarded.
        while self._are_alive():
            self._kills.look()
            self._extend()
            patience_sec = min(self._patience_sec(), PAUSE_LOOK_SEC)
            ready = {fd for fd, _ in poll.poll(patience_sec * 1000)}
            looked_at, before = time.monotonic(), looked_at
            self._note_pause(looked_at - before - patience_sec)
            if wake_read_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read_fd, 4096)
            if self._relay is not None and self._relay.fd in ready:
                self._relay.pump()
                if not self._relay.is_open:
                    poll.unregister(self._relay.fd)
        self._drain()
        signal.pthread_sigmask(signal.SIG_BLOCK, set(HANDED_ON))
        status = [os.waitpid(pid, 0)[1] for pid in self._pids][self.rank]
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return status, was_killed and self._kills.are_recent

    def _note_pause(self, seconds: float) -> None:
        """Note by how many seconds the last round took longer than its sleep could."""
        if seconds < MIN_PAUSE_SEC:
            return
        self.paused_sec, self._paused_until = self.paused_sec + seconds, time.monotonic()
        if self._kill_at is not None:
            self._kill_at += seconds
        with contextlib.suppress(OSError):
            if self._paused_path:
                temporary = f"{self._paused_path}.{os.getpid()}"
                with open(temporary, "w", encoding="ascii") as file:  # noqa: PTH123
                    file.write(f"{self.paused_sec:.3f}\n")
                os.rename(temporary, self._paused_path)  # noqa: PTH104 - others read it at any moment

    @property
    def is_after_pause(self) -> bool:
        """True if the worker's watchdog may have passed in a pause: systemd's clock went on."""
        return self._paused_until is not None and time.monotonic() - self._paused_until < AFTER_PAUSE_SEC

    @property
    def was_asked(self) -> bool:
        return self._stop_asked_at is not None

    def _hand_on(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM and self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
            self._note_stop()
        if self._orders_path:
            append(self._orders_path, b"%d\n" % number)
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        for rank in self._alive:
            os.kill(self._pids[rank], number)
            os.kill(self._pids[rank], signal.SIGCONT)  # a stopped process would not handle the signal

    def _are_alive(self) -> bool:
        """Look for ends, and end the ranks that are left after one that failed. Return False once all have ended."""
        for number in self._nodes.orders() if self._nodes else ():
            with contextlib.suppress(OSError):  # no signal's number
                self._send(number)
        ended = {}
        for rank in sorted(self._alive):
            end = os.waitid(os.P_PID, self._pids[rank], os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if end is not None:
                ended[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        self._alive -= ended.keys()
        failed = {rank: status for rank, status in ended.items() if status}
        if failed and self._kill_at is None:
            # Of several that are seen at once, the cause is a death by a signal, and never a loss of another rank.
            self.rank = min(failed, key=lambda rank: (failed[rank] > 0, failed[rank] == LOST_STATUS, rank))
            self._kill_at = time.monotonic() + RANK_END_SEC
            if self._alive or self._nodes:
                self._end_others(failed[self.rank])
        elif self._alive and self._kill_at is None and self._nodes and self._nodes.has_failure:
            self._kill_at = time.monotonic() + RANK_END_SEC
            self._send(signal.SIGTERM)
        elif self._alive and self._kill_at is not None and time.monotonic() >= self._kill_at:
            for rank in self._alive:
                os.kill(self._pids[rank], signal.SIGKILL)
        return bool(self._alive)

    def _end_others(self, status: int) -> None:
        if status < 0:
            first = self._nodes.first_rank if self._nodes else 0
            write_once(self._lost_path, {"rank": first + self.rank, "signal": -status})
        # A rank that only lost another one is never the cause: that one's node tells.
        if self._nodes and status != LOST_STATUS:
            was_out_of_memory = status == -signal.SIGKILL and self._kills.are_recent
            self._nodes.report_failure(self.rank, status, was_out_of_memory=was_out_of_memory)
        self._send(signal.SIGTERM)

    def _patience_sec(self) -> float:
        if self._nodes and self._kill_at is None:
            return NODE_LOOK_SEC
        if self._kill_at is not None:
            return max(0.05, min(LOOK_INTERVAL_SEC, self._kill_at - time.monotonic()))
        return LOOK_INTERVAL_SEC if self._stop_asked_at is None else EXTEND_INTERVAL_SEC / 2

    def _extend(self) -> None:
        """Ask systemd for more time while a stopping worker writes its checkpoint: it reports no steps meanwhile, so
        the watchdog, which stays active until the unit has ended, would kill it.
        """
        now = time.monotonic()
        if self._relay is None or self._stop_asked_at is None or now < self._extend_at:
            return
        self._extend_at = now + EXTEND_INTERVAL_SEC
        left_sec = self._stop_asked_at + float(os.environ.get("HONED_STOP_TIMEOUT_SEC", "0")) - now
        if left_sec > 0:
            extension = int(min(left_sec, EXTENSION_SEC) * 1e6)
            notify(
                f"EXTEND_TIMEOUT_USEC={extension}\nWATCHDOG_USEC={int((left_sec + EXTENSION_SEC) * 1e6)}\nWATCHDOG=1"
            )

    def _drain(self) -> None:
        """Read all output that the worker had written, including its last lines."""
        if self._relay is None:
            return
        poll = select.poll()
        poll.register(self._relay.fd, select.POLLIN)
        # Its children may hold the pipe open and write forever: systemd ends them after us.
        deadline = time.monotonic() + DRAIN_SEC
        while self._relay.is_open and poll.poll(0) and time.monotonic() < deadline:
            self._relay.pump()
        self._relay.flush()


def _plain(line: bytes) -> bytes:
    """Replace characters that control a terminal: journalctl would print them, or show the line as a blob."""
    text = line.decode(errors="replace")
    return "".join(char if char.isprintable() or char == "\t" else "\ufffd" for char in text).encode()


def write(fd: int, data: bytes) -> None:
    """Write all data; a full disk or a missing journal must not end the worker."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(fd, view) :]


def notify(message: str) -> None:
    """Notify systemd if NOTIFY_SOCKET is set, and its queue is not full."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    import socket  # noqa: PLC0415 - most shims never need it

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
        target = "\0" + address[1:] if address[0] == "@" else address
        end.sendto(message.encode(), socket.MSG_DONTWAIT, target)  # systemd may be busy; the worker is not to wait


def out_of_memory_kills(sysfs: str = "/sys/fs/cgroup", proc: str = "/proc") -> tuple[str, int]:
    """Return the path and value of the kernel's count of out-of-memory kills: of our memory cgroup (v1 or v2), else of
    the machine since its boot.
    """
    paths = [f"{proc}/vmstat"]
    with contextlib.suppress(OSError, ValueError), open(f"{proc}/self/cgroup") as file:  # noqa: PTH123
        for line in file:
            _, controllers, group = line.rstrip("/\n").split(":", 2)
            if "memory" in controllers.split(","):
                paths.insert(0, f"{sysfs}/memory{group}/memory.oom_control")
            elif not controllers:
                paths.insert(0, f"{sysfs}{group}/memory.events.local")
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:  # noqa: PTH123
            for words in map(bytes.split, file):
                if words[:1] == [b"oom_kill"]:
                    return path, int(words[1])
    return "", 0


def has_begun(lock_fd: int, start: int) -> bool:
    """Tell whether a shim of this START was killed: on a cluster, a second job of it may have waited for that."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return bool(json.loads(os.pread(lock_fd, 4096, 0))["start"] == start)
    return False


def has_ended(attempt_dir: str, start: int) -> bool:
    try:
        with open(f"{attempt_dir}/exit.json", "rb") as file:  # noqa: PTH123
            return bool(json.load(file)["start"] >= start)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return False
    except OSError:  # unknown: a worker that is not started is retried, but starting one twice cannot be undone
        return True


def write_exit(attempt_dir: str, start: int, end: dict[str, object]) -> None:
    """Write exit.json atomically and durably: temporary file, sync, rename, sync of the directory."""
    record = {
        **end,
        "start": start,
        "ended_at": time.time(),
        "ended_monotonic": time.clock_gettime(time.CLOCK_MONOTONIC),
        "boot_id": boot_id(),
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


def boot_id() -> str | None:
    """Return the boot that CLOCK_MONOTONIC belongs to, as in clock.py."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip() or None
    return None


def end_as(status: int) -> int:
    """End by the signal that ended the worker, or return its exit status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.kill(os.getpid(), number)
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main())
