"""Queue and pool as they were every few seconds, for the dashboard; requests themselves are remembered by `Traffic`."""

import asyncio
import collections
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxkv.core.metrics import EngineSnapshot

SECONDS, MOST = 5.0, 180


class HistoryPoint(NamedTuple):
    """`time`: Unix time. Requests, and blocks of the pool."""

    time: float
    running: int
    waiting: int
    owned: int
    cached: int
    free: int


class History:
    """The last quarter of an hour."""

    def __init__(self):
        self._points: collections.deque[HistoryPoint] = collections.deque(maxlen=MOST)

    def add(self, when: float, now: EngineSnapshot) -> None:
        free = now.num_blocks - now.num_owned_blocks - now.num_cached_blocks
        self._points.append(
            HistoryPoint(when, now.num_running, now.num_waiting, now.num_owned_blocks, now.num_cached_blocks, free)
        )

    def points(self) -> list[HistoryPoint]:
        """Oldest first. May be called from any thread."""
        return list(self._points.copy())

    async def watch(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Adds points until it is cancelled."""
        while True:
            self.add(time.time(), snapshot())
            await asyncio.sleep(SECONDS)
