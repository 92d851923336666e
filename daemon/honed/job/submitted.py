"""What every user has in claimed/ that came over the control socket: it is on honed's disk, outside of their quota."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path


class Submitted:
    """The numbers and sizes of files that are neither jobs nor rejected yet, by user.

    Those that are gone are only looked for when there seems to be no room: a listing per submission would cost more
    the more files wait.
    """

    def __init__(self, places: Callable[[], Iterable[tuple[int, int | None, Path]]]) -> None:
        """`places` yields (number, submitter, directory) of all claims."""
        self._places = places
        self._sizes: dict[int, dict[int, int]] | None = None  # by user and number

    def add(self, uid: int, number: int, num_bytes: int) -> None:
        """Count a new file."""
        if self._sizes is not None:
            self._sizes.setdefault(uid, {})[number] = num_bytes

    def has_room(self, uid: int, num_bytes: int, *, max_files: int, max_bytes: int) -> bool:
        """Return True if a user may have another file of this size."""
        for is_new in (False, True):
            if is_new or self._sizes is None:
                self._sizes = self._list()
            theirs = self._sizes.get(uid, {})
            if len(theirs) < max_files and sum(theirs.values()) + num_bytes <= max_bytes:
                return True
        return False

    def _list(self) -> dict[int, dict[int, int]]:
        sizes: dict[int, dict[int, int]] = {}
        for number, uid, place in self._places():
            if uid is not None:
                known = (self._sizes or {}).get(uid, {}).get(number)
                sizes.setdefault(uid, {})[number] = known if known is not None else _num_bytes(place)
        return sizes


def _num_bytes(place: Path) -> int:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return 0
