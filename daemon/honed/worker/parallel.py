"""The ranks of a run: processes that train one model together, each on its own device. Most runs have one.

    attempts/<n>/ranks/rendezvous    where they meet (torch's FileStore): ranks of one machine need no port
                                     those of several machines meet at rank 0 (rendezvous.py)
    attempts/<n>/ranks/error.json    the first error of any rank, with which all end
    attempts/<n>/ranks/lost.json     a rank died by a signal (written by the shim): the others leave no result
    attempts/<n>/ranks/alive.<rank>  how many calls to the others this rank has made; written while its process runs

Rank 0 alone writes events, checkpoints, outputs and the result. What a clock, a signal or a disk decides is agreed
where all ranks pass: at the boundary between two steps, at the end of a round of predictions. All calls but `fail` and
`notice` are made by every rank, in the same order; with one rank they do nothing.

An error on one rank leaves the others in a call that never returns, or that reports a lost connection. So every rank
writes its error to a file before it ends, and a thread of the others looks for it: if the rank does not end by itself
in GRACE_SEC, the thread ends it, on rank 0 with that error as the result.

The same thread gives the signs of life of a rank that waits for another, but for rank 0: where nobody progresses, its
pulse stops. `alive` shows honed which rank it is that the others wait for (run/pulse.py).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from honed.job.event import ENDED, EventWriter
from honed.system.error import EnvironmentInvalidError, HonedError, InternalError, said
from honed.worker import message, rendezvous
from honed.worker.message import LostRankError
from honed.worker.pulse import Pulse
from honed.worker.stop import Stop

#: Seconds between looks for another rank's error, and those that this rank has to end by itself after one.
LOOK_INTERVAL_SEC, GRACE_SEC = 0.2, 3.0
#: Seconds between two signs of life of a rank that waits, and writes of `alive`.
ALIVE_INTERVAL_SEC = 0.6
#: Seconds for which a rank that lost its connection looks for the reason, and one that failed waits for the result.
REASON_SEC, RESULT_SEC = 4.0, 6.0
#: The last resort, far above what rank 0 may take for an export: a frozen rank is found by its pulse.
TIMEOUT = datetime.timedelta(hours=24)
#: Words of gloo, NCCL and torch about a rank that is gone.
_LOST_WORDS = ("closed by peer", "reset by peer", "Broken pipe", "gloo/", "NCCL", "ProcessGroup", "Socket Timeout")
_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")

T = TypeVar("T")


@message.carry
@dataclass(frozen=True)
class Asked:
    """A request of rank 0 to the ranks that wait for its result."""

    what: Any


@dataclass
class _Place:
    """This process's place among the ranks of its run, and what it does where another rank fails."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    dir: Path | None = None  #: what the ranks share
    meet_at: str = ""  #: the address of rank 0's machine; empty if it is this one for all
    pulse: Pulse | None = None
    num_calls: int = 0  #: to the others, and steps: the rank with the fewest is the one that they wait for
    _waits: bool = False  #: for another rank
    _has_noticed: bool = False  #: this rank ends by itself
    _end: Callable[[HonedError | None], None] = field(default=lambda _error: None)

    @property
    def is_zero(self) -> bool:
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        return self.world > 1

    def watch(self, end: Callable[[HonedError | None], None]) -> None:
        """Look for errors of other ranks from now on. `end` ends this process with one, or with None if a rank was
        lost, where this rank does not end by itself.
        """
        if self.are_several:
            self._end = end
            threading.Thread(target=self._look, name="ranks", daemon=True).start()

    def notice(self) -> None:
        """End by ourselves from now on, however long it takes."""
        self._has_noticed = True

    def fail(self, problem: Exception, error: HonedError) -> HonedError | None:
        """Return the error with which all ranks end after this one's, the first of any; None if a rank was lost."""
        self.notice()
        if self.dir is None:
            return error
        if not _is_lost(problem):
            if self._lost:
                return None
            _write_once(self.dir / "error.json", {"rank": self.rank, **message.error_record(error)})
        return self._first_error() if self._has_reason() else None

    def _has_reason(self) -> bool:
        """Wait, for a while, until another rank's error or its loss is known: the shim notes a loss a moment after the
        others' connections have broken. Return False if neither is."""
        deadline = time.monotonic() + REASON_SEC
        while not (has_reason := self._lost or self._first_error() is not None) and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_SEC)
        return has_reason

    def wait_for_result(self, path: Path) -> None:
        """Wait for rank 0's result before a rank ends with an error: its end has the shim end the others."""
        deadline = time.monotonic() + RESULT_SEC
        while not self.is_zero and not path.exists() and not self._lost and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_SEC / 4)

    @property
    def _lost(self) -> bool:
        return self.dir is not None and (self.dir / "lost.json").exists()

    def _first_error(self) -> HonedError | None:
        assert self.dir is not None
        try:
            record = json.loads((self.dir / "error.json").read_bytes())
        except (OSError, ValueError):
            return None
        return message.error_of(record)

    def _look(self) -> None:
        assert self.dir is not None
        marked_at, path = 0.0, self.dir / f"alive.{self.rank}"
        while not self._lost and not (self.dir / "error.json").exists():
            if time.monotonic() - marked_at >= ALIVE_INTERVAL_SEC:
                marked_at = time.monotonic()
                self._mark_alive(path)
            time.sleep(LOOK_INTERVAL_SEC)
        time.sleep(GRACE_SEC)
        if not self._has_noticed:
            self._end(None if self._lost else self._first_error())

    def _mark_alive(self, path: Path) -> None:
        with contextlib.suppress(OSError), path.open("r+b" if path.exists() else "wb") as file:  # a full disk
            file.write(b"%-20d" % self.num_calls)
        if self._waits and self.pulse is not None and not self.is_zero:
            self.pulse.touch()


@dataclass
class Ranks(_Place):
    """The ranks of a run, as this one calls them."""

    is_out_of_step: bool = False  #: rank 0 has failed in a call that the others are still in

    @classmethod
    def of(cls, attempt_dir: Path, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Return this process's place, from the shim's variables."""
        world = int(environment.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        meet_at = environment.get(rendezvous.VARIABLE, "")
        return cls(int(environment["RANK"]), world, int(environment["LOCAL_RANK"]), attempt_dir / "ranks", meet_at)

    def join(self) -> None:
        """Meet the other ranks. Afterwards all calls work."""
        if not self.are_several:
            return
        import torch
        from torch import distributed

        assert self.dir is not None
        vars(distributed.distributed_c10d)["_tensor_to_object"] = _refuse_pickle
        if not self.meet_at:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            torch.cuda.set_device(self.local_rank)
        try:
            with self._waiting():
                distributed.init_process_group(
                    "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
                    store=self._store(),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=TIMEOUT,
                )
            self.barrier()
        except RuntimeError as error:
            if _is_lost(error) and self._has_reason():  # a rank that was killed here has the network in order
                raise
            over, hint = "the loopback interface", "check that the interface lo is up, and that no drop-in of "
            hint += "honed-job@.service forbids it"
            if self.meet_at:
                over = f"the network, where rank 0 is {self.meet_at}"
                hint = "check that nodes reach each other's ports; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set"
            raise EnvironmentInvalidError(
                f"the {self.world} processes of the job cannot reach each other over {over}: {said(error)}", hint=hint
            ) from error

    def _store(self) -> Any:
        from torch import distributed

        assert self.dir is not None
        if self.meet_at:
            return rendezvous.store(self.dir, self.meet_at, rank=self.rank, world=self.world, timeout=TIMEOUT)
        return distributed.FileStore(str(self.dir / "rendezvous"), self.world)

    # --- what every rank calls --------------------------------------------------------------------------------------

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Return for every flag whether it is set on any rank."""
        return tuple(total > 0 for total in self.sum(*map(float, flags))) if self.are_several else flags

    def sum(self, *values: float) -> list[float]:
        """Return the sum of every value over all ranks, the same on all."""
        if not self.are_several:
            return list(values)
        import torch
        from torch import distributed

        sums = torch.tensor(values, dtype=torch.float64)
        with self._waiting():
            distributed.all_reduce(sums)
        return [float(value) for value in sums]

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, on all of them."""
        if not self.are_several:
            return [value]
        import torch
        from torch import distributed

        own = torch.frombuffer(bytearray(message.dump(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with self._waiting():
            distributed.all_gather(lengths, torch.tensor([len(own)]))
            for rank, length in enumerate(lengths):
                message.check_length(int(length), f"rank {rank}")
            longest = max(map(int, lengths))
            buffers = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
            distributed.all_gather(buffers, torch.nn.functional.pad(own, (0, longest - len(own))))
        values: list[T] = []
        for rank, (item, length) in enumerate(zip(buffers, lengths, strict=True)):
            values.append(message.load(item[: int(length)].numpy().tobytes(), f"rank {rank}"))
            message.check_alike(values[-1], value, f"rank {rank}")
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, on all ranks."""
        if not self.are_several:
            return value
        import torch
        from torch import distributed

        own = message.dump(value) if self.is_zero else b""
        length = torch.tensor([len(own)])
        with self._waiting():
            distributed.broadcast(length, src=0)
            message.check_length(int(length), "rank 0")
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if self.is_zero:
                buffer = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            distributed.broadcast(buffer, src=0)
        if self.is_zero:
            return value
        received: T = message.load(buffer.numpy().tobytes(), "rank 0")
        message.check_alike(received, value, "rank 0")
        return received

    def check(self, stop: Stop) -> None:
        """Give a sign of life, and raise InterruptedRunError on all ranks once one of them was asked to stop."""
        if self.are_several and any(self.agree(stop.is_set)):
            stop.is_set = True
        stop.check()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.agree(False)

    def by_zero(self, act: Callable[[], T], help_with: Callable[[Any], None] = lambda _what: None) -> T:
        """Have rank 0 do something, and return its result on all ranks, or raise its error.

        Meanwhile the others do `help_with` what rank 0 broadcasts as `Asked`.
        """
        if not self.are_several:
            return act()
        if not self.is_zero:
            received: Any = self.broadcast(None)
            while isinstance(received, Asked):
                help_with(received.what)
                received = self.broadcast(None)
            match received:
                case (made, None):
                    return made
                case (None, Exception() as problem):
                    raise problem
            raise message.refusal("rank 0", "it is not the result of what the other ranks wait for")
        try:
            value = act()
        except HonedError as error:
            if not self.is_out_of_step:
                self.broadcast((None, error))
            raise
        except Exception as error:
            if self.is_out_of_step:
                raise
            self.broadcast((None, LostRankError(f"rank 0 failed: {type(error).__name__}")))
            raise
        self.broadcast((value, None))
        return value

    def in_turn(self, act: Callable[[], T]) -> T:
        """Do something on rank 0, then on all others, which find what it has left on disk."""
        made = act() if self.is_zero else None
        self.barrier()
        return made if made is not None else act()

    def check_equal(self, model: Any) -> None:
        """Raise InternalError unless all ranks begin with the same trained weights."""
        if not self.are_several:
            return
        digests = self.gather(_digest(model))
        if other := next((rank for rank, item in enumerate(digests) if item != digests[0]), None):
            raise InternalError(
                f"ranks 0 and {other} would begin with different weights", hint="requeue the job, and report it"
            )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Call the others: until they answer, the silence is not this rank's."""
        self.num_calls += 1
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        if self.pulse is not None and not self.is_zero:
            self.pulse.resume()


class Unwritten(EventWriter):
    """The events of a rank that writes none: they only drive its pulse."""

    def __init__(self, report: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None) -> None:
        self._report = report

    def emit(self, kind: str, /, **data: Any) -> None:
        self._report(kind, data)

    def close(self) -> None:
        self._report("stage", {"stage": ENDED})


ALONE = Ranks()


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that trains alone, on the first of this one's devices."""
    left_out = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HONED_NUM_RANKS"}
    kept = {name: value for name, value in environment.items() if name not in left_out}
    if "CUDA_VISIBLE_DEVICES" in kept:
        kept["CUDA_VISIBLE_DEVICES"] = kept["CUDA_VISIBLE_DEVICES"].partition(",")[0]
    return kept


def told_repeats(trainer: Any, ranks: Ranks) -> Iterator[str]:
    """Yield what the owner should know about rows that come twice because all ranks must have as many."""
    args = trainer.args
    num_rows, num_together = len(trainer.train_dataset), args.per_device_train_batch_size * ranks.world
    if ranks.are_several and not args.dataloader_drop_last and (num_repeated := -num_rows % num_together):
        yield (
            f"{num_repeated} of {num_rows} rows are trained on twice in each epoch: the last batches are filled from "
            f"its beginning, so that {ranks.world} processes have as many; training.dataloader_drop_last leaves out "
            "the incomplete ones"
        )
    is_flat = (args.packing if args.eval_packing is None else args.eval_packing) or args.padding_free
    if ranks.are_several and is_flat and trainer.eval_dataset is not None:
        num_rows, num_together = len(trainer.eval_dataset), args.per_device_eval_batch_size * ranks.world
        if num_repeated := -num_rows % num_together:
            yield f"{num_repeated} of {num_rows} packed rows count twice in eval_loss, for {ranks.world} processes"


def real_rows(num_rows: int, batch_size: int, index: int, ranks: Ranks) -> int:
    """Return how many rows of this rank's batch at this place are not repeated ones, which come last in it.

    accelerate deals the batches to the ranks in turn.
    """
    begin = (index * ranks.world + ranks.rank) * batch_size
    return max(0, min(num_rows - begin, batch_size))


def _refuse_pickle(*_args: Any) -> Any:
    """Stand in for torch's unpickling of what another rank sends: whoever reaches the ports could run code by it."""
    raise InternalError(
        "a library would unpickle what another rank sends, which honed does not allow",
        hint="report it, with the log of the job's worker",
    )


def _write_once(path: Path, record: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # another was first, or the disk is full: the others then lose the connection
        temporary.write_text(json.dumps(record))
        os.link(temporary, path)


def _is_lost(problem: Exception) -> bool:
    """Return whether an error only says that another rank is gone."""
    if isinstance(problem, HonedError):
        return isinstance(problem, LostRankError)
    words = str(problem)
    return type(problem).__name__ in _LOST_TYPES or (
        isinstance(problem, RuntimeError) and any(word in words for word in _LOST_WORDS)
    )


#: Values of a trained weight that are compared, of a model without an adapter: its weights are those of one file.
_MAX_COMPARED = 4096


def _digest(model: Any) -> str:
    import hashlib

    import torch

    digest = hashlib.sha256()
    is_adapter = hasattr(model, "peft_config")
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            values = parameter.detach().flatten()
            stride = 1 if is_adapter else max(1, values.numel() // _MAX_COMPARED)
            digest.update(name.encode())
            digest.update(values[::stride].to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
