"""Time as a dependency, so that a simulation can own it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary, fixed origin; never goes back."""
        ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class SimulatedClock:
    """Moves only when told to."""

    def __init__(self, start: float = 0.0):
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, when: float) -> None:
        assert when >= self._now, f"time cannot go back from {self._now} to {when}"
        self._now = when
