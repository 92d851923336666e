"""The pulses of running workers: their signs of life, more often than their events (written by worker/pulse.py).

Every rank has its own. A rank that waits for another gives signs of life all the same, but rank 0 does not:
if nobody progresses, that is noticed. Which rank is the cause is then shown by the files `alive` (worker/parallel.py):
one whose process does not run, else one that has called the others less often than they have called it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from honed.job.event import ENDED
from honed.system import untrusted
from honed.system.clock import Moment
from honed.system.layout import AttemptFiles
from honed.system.personpath import PersonPath

#: Seconds by which the file of a rank whose process does not run is older than the newest one.
FROZEN_SEC = 3.0


class Pulse:
    """The pulse file of a worker: signs of life, more often than its events."""

    def __init__(self, path: PersonPath, now: float) -> None:
        self._path = path
        self._beat_at_ns = 0  # the file's time when it was last looked at
        self.heard_at = now  #: monotonic seconds
        self.phase = ""  #: the worker's phase
        self.learned_sec: float | None = None  #: how long it may be silent in that phase, learned from its own steps

    def feel(self, now: float) -> None:
        """Note whether the worker has moved since the last look."""
        try:
            beat_at_ns = untrusted.info(self._path).st_mtime_ns
            if beat_at_ns == self._beat_at_ns:
                return
            # A pulse from before this daemon's start says nothing of now, and setting the clock must not move a
            # deadline.
            self._beat_at_ns, self.heard_at = beat_at_ns, now
            record = json.loads(untrusted.read_plain(self._path, max_bytes=4096))
            learned_sec = record.get("limit_sec")
            is_number = isinstance(learned_sec, int | float) and learned_sec > 0
            self.phase, self.learned_sec = str(record.get("phase", ""))[:32], learned_sec if is_number else None
        except (OSError, ValueError, AttributeError, RecursionError):
            return  # there is no pulse file yet, or it is being written

    def last_beat(self) -> Moment | None:
        """Return the time of the last sign of life; None if there was none."""
        try:
            return Moment(untrusted.info(self._path).st_mtime)
        except OSError:
            return None

    @property
    def is_going(self) -> bool:
        """True if there was a sign of life, and it was not the last one."""
        return self._beat_at_ns != 0 and self.phase != ENDED


@dataclass(frozen=True)
class Silence:
    """How long a rank has been silent."""

    rank: int
    sec: float
    learned_sec: float | None  #: how long it may be


class Pulses:
    """The pulses of the ranks of one attempt; mostly there is one."""

    def __init__(self, layout: AttemptFiles, num_ranks: int, now: float) -> None:
        self._layout = layout
        self._each = [Pulse(layout.pulse_of(rank), now) for rank in range(num_ranks)]

    @property
    def first(self) -> Pulse:
        return self._each[0]

    def feel(self, now: float) -> None:
        """Note which ranks have moved since the last look."""
        for item in self._each:
            item.feel(now)

    def skip(self, seconds: float) -> None:
        """Let so many seconds count for no rank's silence."""
        for item in self._each:
            item.heard_at += seconds

    def silences(self, now: float, told_at: float) -> list[Silence]:
        """Return how long every rank has been silent, that has begun and not ended. `told_at`: when rank 0 reported an
        event."""
        first = Silence(0, now - max(told_at, self.first.heard_at), self.first.learned_sec)
        others = enumerate(self._each[1:], 1)
        return [
            first,
            *(Silence(rank, now - other.heard_at, other.learned_sec) for rank, other in others if other.is_going),
        ]

    def who_hangs(self, silent: Collection[int]) -> str:
        """Describe the ranks that the others wait for, `rank 1 of 2`; empty for one rank. `silent`: those that were
        silent for too long."""
        if len(self._each) == 1:
            return ""
        ranks = self._behind() or sorted(silent)
        words = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks[1:] else f"rank {ranks[0]}"
        return f"{words} of {len(self._each)}"

    def phase_of(self, silent: Collection[int]) -> str:
        """Return the phase of the rank that hangs; empty if unknown."""
        return self._each[min(self._behind() or silent)].phase

    def _behind(self) -> list[int]:
        """Return the ranks whose processes do not run, else those that have called the others least often; empty if
        that says nothing."""
        written: dict[int, float] = {}
        num_calls: dict[int, int] = {}
        for rank in range(len(self._each)):
            path = self._layout.alive_of(rank)
            with contextlib.suppress(OSError, ValueError):
                written[rank] = untrusted.info(path).st_mtime
                num_calls[rank] = int(untrusted.read_plain(path, max_bytes=64))
        if not written:
            return []
        newest = max(written.values())
        if frozen := [rank for rank in range(len(self._each)) if newest - written.get(rank, 0.0) > FROZEN_SEC]:
            return frozen
        least = min(num_calls.values(), default=0)
        behind = [rank for rank, number in sorted(num_calls.items()) if number == least]
        return behind if len(num_calls) == len(self._each) > len(behind) else []
