"""Growing pauses between the tries of something that fails."""

from __future__ import annotations

import random


class Backoff:
    """Pauses for one series of tries: the first one, then each twice as long as the last one, up to the longest.

    `has_jitter` shortens each by up to a half, so that many machines do not retry at the same moment.
    """

    def __init__(self, first_sec: float, max_sec: float, *, has_jitter: bool = False) -> None:
        self._first_sec = first_sec
        self._max_sec = max_sec
        self._has_jitter = has_jitter
        self._last_sec = 0.0

    def next_sec(self) -> float:
        """Return the seconds to wait before the next try, after one that failed."""
        self._last_sec = min(2 * self._last_sec or self._first_sec, self._max_sec)
        return self._last_sec * (random.uniform(0.5, 1) if self._has_jitter else 1)

    def limit(self, max_sec: float) -> None:
        """Change the longest pause, from the next one on."""
        self._max_sec = max_sec

    def reset(self) -> None:
        """Begin with the first pause again, after a try that succeeded."""
        self._last_sec = 0.0
