"""Observations as the engine keeps them: counted by bucket for ever, the latest ones for percentiles."""

import collections
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between the two nearest values; NaN of nothing."""
    return percentile_of_sorted(sorted(values), q)


def percentile_of_sorted(ordered: Sequence[float], q: float) -> float:
    """The same where several are wanted of values that were sorted once."""
    if not 0 <= q <= 100:
        raise ValueError(f"Expected a percentile between 0 and 100, got {q=}")
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Histogram(NamedTuple):
    """How observations are distributed.

    Attributes:
      bounds: ascending. buckets: how many were at most each bound and above the one before; last, above all bounds.
    """

    bounds: tuple[float, ...]
    buckets: tuple[int, ...]
    total: float


class Samples:
    """Count, sum and distribution of all observations, and the latest ones for percentiles.

    Attributes:
      bounds, buckets, total: as in Histogram.
      latest: the last `window` observations (None: all of them), oldest first.
    """

    def __init__(self, window: int | None = 4096, bounds: Sequence[float] = ()):
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.latest: collections.deque[float] = collections.deque(maxlen=window)
        self._histogram: Histogram | None = None

    def histogram(self) -> Histogram:
        """The distribution as of now. Kept until the next observation: most change once a request, not once a step."""
        if self._histogram is None:
            self._histogram = Histogram(self.bounds, tuple(self.buckets), self.total)
        return self._histogram

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.latest.append(value)
        self._histogram = None

    def extend(self, values: Sequence[float]) -> None:
        """Cheap where most are alike, as the rows of a step are: sorting is then one pass, and a bound costs 0.1 us."""
        if not values:
            return
        ordered, start = sorted(values), 0
        last = bisect_left(self.bounds, ordered[-1])
        for place in range(bisect_left(self.bounds, ordered[0]), last):
            end = bisect_right(ordered, self.bounds[place])
            self.buckets[place] += end - start
            start = end
        self.buckets[last] += len(ordered) - start
        self.total += sum(values)
        self.latest.extend(values)
        self._histogram = None

    @property
    def count(self) -> int:
        return sum(self.buckets)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, q: float) -> float:
        return percentile(tuple(self.latest), q)
