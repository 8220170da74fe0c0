"""Replays of one engine at one speed or many, in worker processes. Brings no jax, so that a worker starts at once."""

import dataclasses

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.simulation.cost_model import CostModel
from jaxkv.simulation.goodput import Goal, HighestSpeed, Served, highest_speed
from jaxkv.simulation.replay import replay
from jaxkv.simulation.trace_requests import known_sequences, trace_requests
from jaxkv.simulation.traces import Trace

_parts: dict[str, Trace] = {}
"""Of this process, by name."""


@dataclasses.dataclass(frozen=True)
class SimulatedEngine:
    limits: ExecutorLimits
    scheduler: SchedulerConfig
    cost_model: CostModel


@dataclasses.dataclass(frozen=True)
class Job:
    """Attributes:
    part: name of the part of the trace. share: its first requests, so much of it.
    start: the speed of the first replay. search: look for the highest speed that meets the goal; else that is all.
    """

    engine: SimulatedEngine
    goal: Goal
    part: str
    share: float = 1.0
    start: float = 1.0
    search: bool = True


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Attributes:
    rate: mean arrivals a second in the trace's own time.
    replays: every one, that at the start speed first. highest: None where it was not searched.
    """

    rate: float
    replays: tuple[Served, ...]
    highest: HighestSpeed | None

    @property
    def score(self) -> float:
        """Requests a second within the limits."""
        return self.replays[0].goodput if self.highest is None else self.highest.speed * self.rate


def load_parts(parts: dict[str, Trace]) -> None:
    """Gives this process the traces that its jobs name."""
    _parts.update(parts)


def run_job(job: Job) -> JobResult:
    trace = _parts[job.part]
    count = max(2, round(job.share * len(trace.requests)))
    trace = dataclasses.replace(trace, requests=trace.requests[:count])
    sequences = known_sequences(trace)
    replays: list[Served] = []

    def serve(speed: float) -> float:
        requests = trace_requests(trace, job.engine.limits.block_size, speed=speed)
        engine = job.engine
        report = replay(requests, engine.limits, engine.cost_model, engine.scheduler, sequences=sequences)
        replays.append(Served.of(report, job.goal, speed))
        return replays[-1].strain

    highest = None
    if job.search:
        highest = highest_speed(serve, start=job.start)
    else:
        serve(job.start)
    return JobResult(mean_rate(trace), tuple(replays), highest)


def mean_rate(trace: Trace) -> float:
    """Arrivals a second; 0 where all arrive at once."""
    span = trace.requests[-1].arrival - trace.requests[0].arrival
    return (len(trace.requests) - 1) / span if span else 0.0
