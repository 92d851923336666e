"""The write-ahead log of honed.db (SQLite's WAL). A thread copies it into honed.db: that waits for the disk, and the
daemon's loop must not."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from pathlib import Path
from urllib.parse import quote

log = logging.getLogger(__name__)

#: Bytes of the log from which on it is copied. The next write after that begins the log anew.
COPY_BYTES = 4 * 2**20
#: Pages of 4 KiB after which a commit copies what is left: while the loop writes on, a thread never copies all.
MAX_PAGES = 4000
#: Seconds for which the end of honed waits for the thread.
END_SEC = 5.0


class Wal:
    """The log of the database at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal_path = path.with_name(path.name + "-wal")
        self._copying: threading.Thread | None = None
        self._copied = (0, 0)  # size and time of the log before it was copied last

    def begin(self, db: sqlite3.Connection) -> None:
        """Let a connection that writes leave the log to `tend`."""
        db.execute(f"PRAGMA wal_autocheckpoint = {MAX_PAGES}")
        db.execute("PRAGMA journal_size_limit = 0")  # so that its size tells how much is in it

    @property
    def is_copying(self) -> bool:
        """True while the thread works: then no other file may get the database's name, or what it has opened of the
        one is copied into the other."""
        return self._copying is not None and self._copying.is_alive()

    def tend(self) -> None:
        """Have the log copied if it is long. Never waits."""
        if self.is_copying:
            return
        with contextlib.suppress(OSError):
            info = self._wal_path.stat()
            stamp = (info.st_size, info.st_mtime_ns)
            if info.st_size >= COPY_BYTES and stamp != self._copied:
                self._copied = stamp
                thread = threading.Thread(target=self._copy, name="wal", daemon=True)
                with contextlib.suppress(RuntimeError):  # there are too many: a commit copies it
                    thread.start()
                    self._copying = thread

    def _copy(self) -> None:
        # A connection of its own: the loop's is not used by two threads. `rw` makes no file where somebody removed it.
        try:
            address = f"file:{quote(str(self._path))}?mode=rw"
            with contextlib.closing(sqlite3.connect(address, uri=True, timeout=0, isolation_level=None)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:  # the loop's own commits meet it, too, and say so
            log.debug("%s: %s", self._wal_path, error)

    def close(self) -> None:
        """Wait for the thread, for a while: the connection that is closed last removes the log."""
        if self._copying is not None:
            self._copying.join(END_SEC)
