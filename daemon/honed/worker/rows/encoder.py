"""Encoding of rows: the first ones here, the others by processes, in batches, and in order.

The processes are forks: they share the tokenizer, and what was learned of the template from the first rows, so a row's
tokens do not depend on how many there are. They never touch a GPU, ignore signals that ask for a stop, and die with the
worker. A thread for each passes it the rows and waits, so that no two sides wait for each other.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from honed.inputs.row import Example
from honed.system.error import DatasetError, HonedError, KilledError, OutOfMemoryError
from honed.text.chat import ChatFormat, Encoded
from honed.worker.rows import record
from honed.worker.rows.record import Batch, Builder
from honed.worker.stop import Stop

#: Rows that are encoded before other processes are started: for fewer, these would cost more than they save.
NUM_ALONE = 2000
#: Rows of a batch, and bytes of their examples, whichever is reached first.
BATCH_ROWS, BATCH_BYTES = 500, 2**20
#: Processes at most, so that their memory has a bound.
MAX_PROCESSES = 8
#: Batches per process that are read ahead.
NUM_AHEAD = 2
#: Seconds between signs of life while a batch is waited for.
LOOK_SEC = 0.5
_NO_MEMORY = "the machine's memory ran out while a process encoded rows"
_NO_MEMORY_HINT = (
    "wait until other programs need less of it, raise a limit (MemoryMax= of honed-jobs.slice, ulimit -v), or split "
    "very long rows"
)
#: A constant of Linux's prctl(2).
_PR_SET_PDEATHSIG = 1


@dataclass
class Encoder:
    """The conversion of examples to batches of encoded rows."""

    chat: ChatFormat
    max_length: int | None

    def encode(self, blobs: Sequence[bytes], stop: Stop | None = None) -> Batch:
        """Encode packed examples."""
        builder = Builder(self.max_length)
        for blob in blobs:
            if stop is not None:
                stop.check()
            example = record.unpacked(blob)
            builder.add(example, self.encoded(example))
        return builder.batch()

    def encoded(self, example: Example) -> Encoded | DatasetError:
        """Return the row, or the error that makes it unusable. Raises it if that is so of any conversation."""
        try:
            return self.chat.encode(example)
        except DatasetError as error:
            if example.kind == "messages":
                self.chat.renderer.require_template()
            return error


def batches(
    encoder: Encoder, blobs: Iterable[bytes], stop: Stop, *, num_processes: int
) -> Iterator[tuple[list[bytes], Batch]]:
    """Yield packed examples with their encoded rows, in order. Ends the processes when it ends or is closed."""
    num_done = 0
    pieces = cut(blobs)
    for piece in pieces:
        yield piece, encoder.encode(piece, stop)
        num_done += len(piece)
        if num_done >= NUM_ALONE and num_processes > 1:
            break
    else:
        return
    pool = Pool(encoder, num_processes)
    try:
        yield from pool.encode(pieces, stop)
    finally:
        pool.close()


def cut(blobs: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Cut a stream of examples into batches."""
    piece: list[bytes] = []
    num_bytes = 0
    for blob in blobs:
        piece.append(blob)
        num_bytes += len(blob)
        if len(piece) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece


def processes(*, is_ahead: bool = False) -> int:
    """Return the number of processes: one per core that this one may use. `is_ahead`: half of them, because
    another job trains meanwhile."""
    num_cores = len(os.sched_getaffinity(0))
    return min(max(1, num_cores // 2) if is_ahead else num_cores, MAX_PROCESSES)


class Pool:
    """Processes that encode."""

    def __init__(self, encoder: Encoder, number: int) -> None:
        gc.collect()
        gc.freeze()  # a collection in a process would otherwise copy the pages of all that was imported
        context = multiprocessing.get_context("fork")
        self._free: SimpleQueue[Connection] = SimpleQueue()
        self._number, self._processes, self._ends = number, [], []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, encoder, os.getpid()), daemon=True, name="rows")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)
            self._free.put(ours)
        self._threads = ThreadPoolExecutor(number, thread_name_prefix="rows")

    def encode(self, pieces: Iterable[list[bytes]], stop: Stop) -> Iterator[tuple[list[bytes], Batch]]:
        waiting: deque[tuple[list[bytes], Future[Batch]]] = deque()
        for piece in pieces:
            waiting.append((piece, self._threads.submit(self._pass, piece)))
            if len(waiting) > NUM_AHEAD * self._number:
                first, future = waiting.popleft()
                yield first, _result(future, stop)
        for first, future in waiting:
            yield first, _result(future, stop)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._threads.shutdown(cancel_futures=True)
        for end in self._ends:
            end.close()

    def _pass(self, piece: list[bytes]) -> Batch:
        """Have a free process encode a batch."""
        connection = self._free.get()
        try:
            connection.send(piece)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise KilledError(
                "a process that encodes rows was killed", hint="see the kernel's log: it may have run out of memory"
            ) from error
        finally:
            self._free.put(connection)
        if isinstance(answer, HonedError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"a process that encodes rows failed:\n{answer}")
        assert isinstance(answer, Batch)
        return answer


def _result(future: Future[Batch], stop: Stop) -> Batch:
    while not future.done():
        stop.check()
        wait([future], LOOK_SEC)
    stop.check()
    return future.result()


def _serve(connection: Connection, encoder: Encoder, parent: int) -> None:
    """Encode batches until the other end is closed, or the parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl took effect
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            piece = connection.recv()
        except EOFError:
            return
        except MemoryError:
            connection.send_bytes(_no_memory())
            continue
        connection.send_bytes(_answer(encoder, piece))


def _no_memory() -> bytes:
    return pickle.dumps(OutOfMemoryError(_NO_MEMORY, hint=_NO_MEMORY_HINT), 5)


def _answer(encoder: Encoder, piece: list[bytes]) -> bytes:
    try:
        return pickle.dumps(encoder.encode(piece), 5)
    except HonedError as error:
        return pickle.dumps(error, 5)
    except MemoryError:
        return _no_memory()
    except Exception:  # noqa: BLE001 - the worker reports it
        return pickle.dumps(traceback.format_exc(), 5)
