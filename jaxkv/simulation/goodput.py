"""Goodput: requests a second that are served within limits on TTFT and ITL.

Two measures of it. At given arrivals: requests that met both limits, over the time that all took. And without: the
highest arrival rate at which a wanted share of the requests meets both limits (Y. Zhong et al., "DistServe", OSDI
2024), found by replaying the same trace faster or slower. The second tells settings apart wherever they differ; the
first only where arrivals are near what the device can do.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from jaxkv.core.metrics import EngineStats, RequestMetrics
from jaxkv.simulation.replay import LatencySummary

# A trace replayed so many times slower or faster than the first guess is as good as idle, or as all at once.
_FARTHEST = 2**12
# Nearer than this to the speed, by the slope on either side, another replay tells nothing new.
_NEAR = 0.01
# A next speed is so far off the ends of the bracket, in parts of it: else one end creeps.
_OFF_ENDS = 0.1


@dataclasses.dataclass(frozen=True)
class Goal:
    """Attributes:
    ttft: most seconds to the first token. itl: most seconds a token after it, on average over a request.
    share: of all requests, refused ones included, that are to meet both.
    """

    ttft: float
    itl: float
    share: float = 0.95

    def strain(self, metrics: RequestMetrics) -> float:
        """How many times its limits a request took: at most 1 where it met both."""
        if metrics.ttft is None:
            return math.inf
        return max(metrics.ttft / self.ttft, (metrics.tpot or 0.0) / self.itl)


@dataclasses.dataclass(frozen=True)
class Served:
    """What the users of a replay would have seen.

    Attributes:
      speed: arrivals came so many times as fast as the trace has them.
      attained: share of all requests that met the goal's limits; goodput: such requests a second.
      strain: so many times its limits would be met by the wanted share; at most 1 where the goal is reached.
      hit_rate: of prompt tokens. ttft_*, itl_*: seconds, NaN where there were none; itl is a request's mean a token.
      preemptions: times a running request gave its blocks back. evictions: full cached blocks that were overwritten.
    """

    speed: float
    attained: float
    goodput: float
    strain: float
    hit_rate: float
    ttft_mean: float
    ttft_p95: float
    itl_p95: float
    preemptions: int
    evictions: int
    refused: int

    @classmethod
    def of(
        cls,
        stats: EngineStats,
        goal: Goal,
        *,
        duration: float,
        num_refused: int = 0,
        num_evictions: int = 0,
        speed: float = 1.0,
    ) -> "Served":
        """What an engine's counters say, which kept all its requests; `duration`: first arrival to last token."""
        strains = sorted([*map(goal.strain, stats.requests), *[math.inf] * num_refused])
        count, met = len(strains), bisect.bisect_right(strains, 1.0)
        ttft = LatencySummary.of(metrics.ttft for metrics in stats.requests)
        return cls(
            speed=speed,
            attained=met / count if count else 0.0,
            goodput=met / duration if duration else 0.0,
            strain=strains[math.ceil(goal.share * count) - 1] if count else math.nan,
            hit_rate=stats.hit_rate,
            ttft_mean=ttft.mean,
            ttft_p95=ttft.p95,
            itl_p95=LatencySummary.of(metrics.tpot for metrics in stats.requests).p95,
            preemptions=stats.preemptions,
            evictions=num_evictions,
            refused=num_refused,
        )


@dataclasses.dataclass(frozen=True)
class HighestSpeed:
    """Where a strain that rises with the speed passes 1.

    Attributes:
      speed: 0 where the strain is always above 1; where it never is, the highest speed that was tried.
      kind: whether it was found, or the goal is met never or always.
    """

    speed: float
    kind: Literal["found", "never", "always"]


def highest_speed(
    strain_at: Callable[[float], float], *, start: float = 1.0, factor: float = 1.25, within: float = 1.05
) -> HighestSpeed:
    """The highest speed at which the strain is at most 1.

    From `start` by `factor`, then its square and so on, until the strain is at most 1 at one speed and above it at
    another; then by the Illinois variant of regula falsi on the logarithms (M. Dowell, P. Jarratt, BIT 11, 1971), in
    which strains are nearly straight lines, until one is near enough or the two are a factor of `within` apart. The
    rest is interpolated, so that small differences between settings show. Calls strain_at once a speed. Where it is not
    monotonic, some crossing is found, always the same.
    """
    low = high = math.log(start)
    low_strain = high_strain = _log(strain_at(start))
    step = math.log(factor)
    farthest = math.log(_FARTHEST)
    while high_strain <= 0:
        if high - math.log(start) >= farthest:
            return HighestSpeed(math.exp(high), "always")
        low, low_strain = high, high_strain
        high, step = high + step, 2 * step
        high_strain = _log(strain_at(math.exp(high)))
    step = math.log(factor)
    while low_strain > 0:
        if math.log(start) - low >= farthest:
            return HighestSpeed(0.0, "never")
        high, high_strain = low, low_strain
        low, step = low - step, 2 * step
        low_strain = _log(strain_at(math.exp(low)))
    low_weight = high_weight = 1.0
    last_passed = None
    while high - low > math.log(within):
        part = _zero(low_strain * low_weight, high_strain * high_weight)
        middle = low + min(1 - _OFF_ENDS, max(_OFF_ENDS, part)) * (high - low)
        strain = _log(strain_at(math.exp(middle)))
        passed = strain <= 0
        near = abs(strain) <= _NEAR * min(
            (strain - low_strain) / (middle - low), (high_strain - strain) / (high - middle)
        )
        # Illinois: an end that stays twice in a row counts half, or it might stay for ever.
        halved = 0.5 if passed == last_passed else 1.0
        if passed:
            low, low_strain, low_weight, high_weight = middle, strain, 1.0, high_weight * halved
        else:
            high, high_strain, low_weight, high_weight = middle, strain, low_weight * halved, 1.0
        last_passed = passed
        if near:
            break
    return HighestSpeed(math.exp(low + _zero(low_strain, high_strain) * (high - low)), "found")


def _zero(low: float, high: float) -> float:
    """Which part of the way from `low`, at most 0, to `high` a straight line is 0; half where it is none."""
    return 0.5 if math.isinf(low) or math.isinf(high) else low / (low - high)


def _log(strain: float) -> float:
    return math.log(strain) if strain > 0 else -math.inf
