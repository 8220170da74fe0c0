"""Run a list of requests through the real engine in simulated time, and report what their users would have seen."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats, RequestMetrics, percentile
from jaxkv.core.request import Request
from jaxkv.simulation.cost_model import CostModel
from jaxkv.simulation.sim_executor import SimExecutor


@dataclasses.dataclass(frozen=True)
class LatencySummary:
    """Seconds; all NaN when nothing was observed."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "LatencySummary":
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else math.nan
        return cls(len(known), mean, *(percentile(known, q) for q in (50, 90, 99)))


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What a replay gave.

    Attributes:
      refused: request id and reason of each request that could never fit.
      duration: from the first arrival to the last token.
      stats: the engine's own counters.
      requests: every finished request, in order of finishing.
    """

    refused: tuple[tuple[str, str], ...]
    duration: float
    stats: EngineStats
    requests: tuple[RequestMetrics, ...]
    queue_time: LatencySummary
    ttft: LatencySummary
    tpot: LatencySummary
    e2e: LatencySummary

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache."""
        return self.stats.hit_rate

    @property
    def output_tokens_per_second(self) -> float:
        return self.stats.generated_tokens / self.duration if self.duration else 0.0


def replay(
    requests: Sequence[Request],
    limits: ExecutorLimits,
    cost_model: CostModel,
    config: SchedulerConfig = SchedulerConfig(),
    *,
    max_in_flight: int = 2,
) -> ReplayReport:
    """Serve `requests` at their arrival times (None: at once) until all have ended.

    As with a real engine thread, requests that arrive while the host waits for a step are seen when it is over.
    """
    arrivals = collections.deque(sorted(requests, key=_arrival))
    start = _arrival(arrivals[0]) if arrivals else 0.0
    clock = SimulatedClock(start)
    stats = EngineStats(window=None)
    engine = Engine(
        SimExecutor(limits, cost_model, clock), config, clock=clock, max_in_flight=max_in_flight, stats=stats
    )
    refused = []
    while arrivals or engine.has_work():
        if not engine.has_work():
            clock.advance_to(max(clock.now(), _arrival(arrivals[0])))
        while arrivals and _arrival(arrivals[0]) <= clock.now():
            request = arrivals.popleft()
            try:
                engine.add(request)
            except RequestError as error:
                refused.append((request.request_id, str(error)))
        engine.step()
        if engine.failed is not None:
            raise RuntimeError(f"the replay broke the engine: {engine.failed}")
    finished = tuple(stats.requests)
    return ReplayReport(
        refused=tuple(refused),
        duration=clock.now() - start,
        stats=stats,
        requests=finished,
        queue_time=LatencySummary.of(metrics.queue_time for metrics in finished),
        ttft=LatencySummary.of(metrics.ttft for metrics in finished),
        tpot=LatencySummary.of(metrics.tpot for metrics in finished),
        e2e=LatencySummary.of(metrics.e2e for metrics in finished),
    )


def _arrival(request: Request) -> float:
    return 0.0 if request.arrival_time is None else request.arrival_time
