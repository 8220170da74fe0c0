"""Run a list of requests through the real engine in simulated time, and report what their users would have seen."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats, RequestMetrics
from jaxkv.core.request import Request
from jaxkv.core.samples import percentile_of_sorted
from jaxkv.simulation.cost_model import CostModel
from jaxkv.simulation.garbage import no_garbage_collection
from jaxkv.simulation.sim_executor import SimExecutor

_TOLD_AT_ONCE = 100


@dataclasses.dataclass(frozen=True)
class LatencySummary:
    """Seconds; all NaN when nothing was observed."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "LatencySummary":
        known = sorted([value for value in values if value is not None])
        mean = sum(known) / len(known) if known else math.nan
        return cls(len(known), mean, *(percentile_of_sorted(known, q) for q in (50, 90, 95, 99)))


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """What a replay gave.

    Attributes:
      refused: request id and reason of each request that could never fit.
      duration: from the first arrival to the last token.
      stats: the engine's own counters.
      requests: every finished request, in order of finishing.
      queue_time, ttft, tpot, e2e: of these; itl: between deliveries to a request.
      busy_share: of the duration in which the device computed.
      mean_usage / peak_usage: share of the pool that running requests owned, by time; cached blocks count as free.
      evictions: full cached blocks that were overwritten.
    """

    refused: tuple[tuple[str, str], ...]
    duration: float
    stats: EngineStats
    requests: tuple[RequestMetrics, ...]
    queue_time: LatencySummary
    ttft: LatencySummary
    tpot: LatencySummary
    itl: LatencySummary
    e2e: LatencySummary
    busy_share: float
    mean_usage: float
    peak_usage: float
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache."""
        return self.stats.hit_rate

    @property
    def output_tokens_per_second(self) -> float:
        return self.stats.generated_tokens / self.duration if self.duration else 0.0


def replay(
    requests: Iterable[Request],
    limits: ExecutorLimits,
    cost_model: CostModel,
    config: SchedulerConfig = SchedulerConfig(),
    *,
    max_in_flight: int = 2,
    sequences: Mapping[str, Sequence[int]] | None = None,
    on_ended: Callable[[int], None] = lambda count: None,
) -> ReplayReport:
    """Serve `requests` at their arrival times (None: at once) until all have ended.

    As with a real engine thread, requests that arrive while the host waits for a step are seen when it is over.

    Args:
      sequences: see SimExecutor.
      on_ended: called with the number of requests that have ended, now and then.
    """
    arrivals = collections.deque(sorted(requests, key=_arrival))
    start = _arrival(arrivals[0]) if arrivals else 0.0
    clock = SimulatedClock(start)
    stats = EngineStats(window=None)
    executor = SimExecutor(limits, cost_model, clock, sequences=sequences)
    engine = Engine(executor, config, clock=clock, max_in_flight=max_in_flight, stats=stats)
    refused = []
    usage = _Usage(start)
    num_told = 0
    with no_garbage_collection():
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
            usage.note(clock.now(), engine.kv_cache_usage)
            if len(stats.requests) + len(refused) >= num_told + _TOLD_AT_ONCE:
                num_told = len(stats.requests) + len(refused)
                on_ended(num_told)
    on_ended(len(stats.requests) + len(refused))
    duration = clock.now() - start
    finished = tuple(stats.requests)
    return ReplayReport(
        refused=tuple(refused),
        duration=duration,
        stats=stats,
        requests=finished,
        queue_time=LatencySummary.of(metrics.queue_time for metrics in finished),
        ttft=LatencySummary.of(metrics.ttft for metrics in finished),
        tpot=LatencySummary.of(metrics.tpot for metrics in finished),
        itl=LatencySummary.of(stats.itl.latest),
        e2e=LatencySummary.of(metrics.e2e for metrics in finished),
        busy_share=executor.busy_seconds / duration if duration else 0.0,
        mean_usage=usage.total / duration if duration else 0.0,
        peak_usage=usage.peak,
        evictions=engine.scheduler.blocks.num_evictions,
    )


class _Usage:
    """The pool's usage over time."""

    def __init__(self, start: float):
        self.total = 0.0  # usage times seconds
        self.peak = 0.0
        self._since = start

    def note(self, now: float, usage: float) -> None:
        """What it was since the last note."""
        self.total += usage * (now - self._since)
        self.peak = max(self.peak, usage)
        self._since = now


def _arrival(request: Request) -> float:
    return 0.0 if request.arrival_time is None else request.arrival_time
