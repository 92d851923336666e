"""Check of a directory's files against their sizes and sha256: read in pieces, by a few threads at a time.

A file of one piece has its plain sha256; a larger one a list, one for every piece, so that a single file of many
gigabytes is read by all threads. hashlib releases Python's lock, so they really run in parallel.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from honed.system import durable

#: Bytes. Small enough for all threads to get a share of a checkpoint, large enough that starting one costs nothing.
PIECE_BYTES = 64 * 1024 * 1024
#: Disks are no faster with more readers than this.
MAX_THREADS = 8
_READ_BYTES = 1024 * 1024

Beat = Callable[[], None]
#: A file's hash, or the hashes of its pieces.
Hash = str | list[str]


def take(directory: Path, names: Iterable[str], *, beat: Beat) -> dict[str, dict[str, int | Hash]]:
    """Make files durable, and return their sizes and hashes. `beat` is called meanwhile."""
    names = list(names)
    with ThreadPoolExecutor(_num_threads()) as pool:
        # Sync first: the disk takes the longest, and the hashes are computed from memory meanwhile.
        syncs = [pool.submit(durable.sync_file, directory / name) for name in names]
        sizes = {name: _open_size(directory / name) for name in names}
        hashes = _hash(pool, directory, sizes, beat)
        for future in as_completed(syncs):
            future.result()
            beat()
    return {name: {"size": size, "sha256": hashes[name]} for name, size in sizes.items()}


def fault(directory: Path, entries: Mapping[str, Mapping[str, Any]], *, beat: Beat) -> str | None:
    """Return the fault of the first file that does not match its entry; None if all match. Raises OSError."""
    for name, entry in entries.items():
        try:
            size = _open_size(directory / name)
        except FileNotFoundError:
            return f"{name} is missing"
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    with ThreadPoolExecutor(_num_threads()) as pool:
        sizes = {name: int(entry["size"]) for name, entry in entries.items()}
        hashes = _hash(pool, directory, sizes, beat)
    return next((f"{name} was changed" for name, digest in hashes.items() if digest != entries[name]["sha256"]), None)


def _hash(pool: ThreadPoolExecutor, directory: Path, sizes: Mapping[str, int], beat: Beat) -> dict[str, Hash]:
    pieces: dict[str, list[Future[str]]] = {
        name: [pool.submit(_hash_piece, directory / name, start) for start in range(0, max(size, 1), PIECE_BYTES)]
        for name, size in sizes.items()
    }
    try:
        for future in as_completed([future for futures in pieces.values() for future in futures]):
            future.result()
            beat()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    done = {name: [future.result() for future in futures] for name, futures in pieces.items()}
    return {name: hashes if len(hashes) > 1 else hashes[0] for name, hashes in done.items()}


def _hash_piece(path: Path, start: int) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        position, end = start, start + PIECE_BYTES
        while position < end and (count := os.preadv(fd, [memoryview(buffer)[: end - position]], position)):
            digest.update(memoryview(buffer)[:count])
            position += count
    finally:
        os.close(fd)
    return digest.hexdigest()


def _open_size(path: Path) -> int:
    """Return a file's size. Raises OSError unless it is a plain file: a link leads to what others may change."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    return status.st_size


def _num_threads() -> int:
    return max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS))
