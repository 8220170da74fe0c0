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
    part: name of the part of the trace.
    speeds: replays that are wanted in any case.
    search_from: where to look for the highest speed that meets the goal; None: nowhere.
    known: replays of this engine and part that need not be run again.
    """

    engine: SimulatedEngine
    goal: Goal
    part: str
    speeds: tuple[float, ...]
    search_from: float | None = None
    known: tuple[Served, ...] = ()


@dataclasses.dataclass(frozen=True)
class JobResult:
    """Attributes:
    replays: the known ones and those that were run, by speed. num_run: of the latter.
    highest: None where it was not searched.
    """

    replays: dict[float, Served]
    num_run: int
    highest: HighestSpeed | None


def load_parts(parts: dict[str, Trace]) -> None:
    """Gives this process the traces that its jobs name."""
    _parts.update(parts)


def run_job(job: Job) -> JobResult:
    trace = _parts[job.part]
    replays = {served.speed: served for served in job.known}

    def strain_at(speed: float) -> float:
        if speed not in replays:
            engine = job.engine
            requests = trace_requests(trace, engine.limits.block_size, speed=speed)
            sequences = known_sequences(trace)
            report = replay(requests, engine.limits, engine.cost_model, engine.scheduler, sequences=sequences)
            replays[speed] = Served.of(
                report.stats,
                job.goal,
                duration=report.duration,
                num_refused=len(report.refused),
                num_evictions=report.evictions,
                speed=speed,
            )
        return replays[speed].strain

    for speed in job.speeds:
        strain_at(speed)
    highest = None if job.search_from is None else highest_speed(strain_at, start=job.search_from)
    return JobResult(replays, len(replays) - len(job.known), highest)


def mean_rate(trace: Trace) -> float:
    """Arrivals a second; 0 where all arrive at once."""
    span = trace.requests[-1].arrival - trace.requests[0].arrival
    return (len(trace.requests) - 1) / span if span else 0.0
