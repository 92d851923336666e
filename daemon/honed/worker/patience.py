"""The silence after which a run counts as hung, learned from its own signs of life.

Every phase (train, evaluate, predict, save, and the stages that are one long call) has a rhythm of its own: steps take
seconds, a checkpoint may take minutes. Until a phase has shown its rhythm, only the administrator's
`jobs.stall_timeout_sec` applies, as for the first step, which may compile, and for the wait until a checkpoint is
sealed.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

#: The limit, as a multiple of the longest recent silence: a slow disk or another job is no reason to end a run.
FACTOR = 20.0
#: Number of recent silences that count.
NUM_RECENT = 100
#: Silences of a steady phase, and completed rounds of any other, before its limit is known.
MIN_SILENCES, MIN_ROUNDS = 10, 2
#: Phases without a rhythm: mostly there is nothing to wait for, so that the disk's worst moment would come unforeseen.
UNSTEADY = frozenset({"seal"})
#: Phases to which a run returns from the others, so that their rounds say nothing.
STEADY = frozenset({"train"})


class Patience:
    """Record of a run's signs of life, with times in seconds of any monotonic clock."""

    def __init__(self, now: float) -> None:
        self.phase = "starting"
        self._heard_at = now
        self._silences: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_RECENT))
        self._rounds: Counter[str] = Counter()

    def beat(self, now: float) -> None:
        self._silences[self.phase].append(now - self._heard_at)
        self._heard_at = now

    def enter(self, phase: str, now: float) -> None:
        """Enter another phase, which is also a sign of life of the one that ends."""
        self.beat(now)
        self._rounds[self.phase] += 1
        self.phase = phase

    def resume(self, now: float) -> None:
        """Go on after a silence that says nothing of this process."""
        self._heard_at = now

    @property
    def limit_sec(self) -> float | None:
        """The limit for the current phase; None where too little is known of it."""
        if self.phase in UNSTEADY:
            return None
        silences = self._silences[self.phase]
        is_known = len(silences) >= MIN_SILENCES if self.phase in STEADY else self._rounds[self.phase] >= MIN_ROUNDS
        return FACTOR * max(silences) if is_known and silences else None
