"""The silence after which a run counts as hung, learned from its own signs of life.

Each phase (train, evaluate, predict, save, and the stages that are one long call) has a rhythm of its own: steps come
by the second, a checkpoint may take minutes. What a phase has not shown yet is not known: then the administrator's
`jobs.stall_timeout_sec` alone holds, as for the first step, which may compile.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

#: The limit is so many times the longest of the last silences: a slow disk or another job is no reason to end a run.
FACTOR = 20.0
#: Silences that are looked at.
NUM_RECENT = 100
#: Silences of a phase before its limit is known; of one that comes and goes, so many times that it has ended well.
MIN_SILENCES, MIN_ROUNDS = 10, 2
#: Phases that a run goes back to from the others, so that their rounds say nothing.
STEADY = frozenset({"train"})


class Patience:
    """Told of each sign of life with its time, in seconds of any clock that never goes back."""

    def __init__(self, now: float) -> None:
        self.phase = "starting"
        self._heard_at = now
        self._silences: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_RECENT))
        self._rounds: Counter[str] = Counter()

    def beat(self, now: float) -> None:
        self._silences[self.phase].append(now - self._heard_at)
        self._heard_at = now

    def enter(self, phase: str, now: float) -> None:
        """Another phase begins, which is a sign of life of the one that ends."""
        self.beat(now)
        self._rounds[self.phase] += 1
        self.phase = phase

    @property
    def limit_sec(self) -> float | None:
        """For the phase that it is in; None where too little is known of it."""
        silences = self._silences[self.phase]
        is_known = len(silences) >= MIN_SILENCES if self.phase in STEADY else self._rounds[self.phase] >= MIN_ROUNDS
        return FACTOR * max(silences) if is_known and silences else None
