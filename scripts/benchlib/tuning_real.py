"""Whether the real engine ranks two settings as the simulated one does: the same arrivals, on this machine."""

import dataclasses
import statistics
from typing import TYPE_CHECKING

from rich.table import Table

from benchlib.engine_runs import fresh_engine, run_requests
from benchlib.tuning_replays import Job, load_parts, run_job
from benchlib.tuning_tables import Tuned, finite
from jaxkv.core.request import Request
from jaxkv.measurement import Report
from jaxkv.simulation.goodput import Goal, Served
from jaxkv.simulation.trace_requests import trace_requests
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import Setting

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine  # brings jax

_PART = "served for real"
_WARM_UP_REQUESTS = 4
_ROUNDS = 2


def check_real(report: Report, tuned: Tuned, num_requests: int) -> None:
    """Serves the start of the held-out half with the default and the recommended setting, always with an empty cache.

    At the highest speed that the better of the two should bear: it overloads the other. The settings take turns, so
    that a change of load falls on both. A check of the report: goodput and mean TTFT rank them as simulated.
    """
    if tuned.recommended == tuned.default.setting:
        report.console.print("Nothing to compare for real: the default setting stays")
        return
    requests = tuned.held_out_trace.requests[:num_requests]
    trace = dataclasses.replace(tuned.held_out_trace, requests=requests)
    speeds = [one.details.highest.speed for one in tuned.held_out if one.details.highest is not None]
    speed = max(speeds, default=0.0) or tuned.reference
    load_parts({_PART: trace})
    settings = {"default": tuned.default.setting, "recommended": tuned.recommended}
    started = {name: _start(tuned, setting, trace) for name, setting in settings.items()}
    real: dict[str, list[Served]] = {name: [] for name in settings}
    for _ in range(_ROUNDS):
        for name in settings:
            real[name].append(_serve(started[name], tuned.goal, trace, speed))
    simulated = {
        name: [run_job(Job(tuned.planner.engine(setting), tuned.goal, _PART, (speed,))).replays[speed]]
        for name, setting in settings.items()
    }
    table = Table(
        title=f"Served for real: {len(requests)} requests at speed {speed:.3g}, {_ROUNDS} rounds, and simulated"
    )
    for heading in ("setting", "by", "goodput", "within the limits", "TTFT mean", "ITL P95", "hit rate"):
        table.add_column(heading, justify="left" if heading in ("setting", "by") else "right")
    for name, setting in settings.items():
        for by, served in (("simulated", simulated[name]), ("jaxkv", real[name])):
            rows = [finite(dataclasses.asdict(one)) for one in served]
            extra = {"kind": name, "setting": dict(setting), "part": _PART, "served": rows}
            goodputs = [one.goodput for one in served]
            report.add(f"{_PART}, {name}, {by}", goodputs, unit="requests/s", metric="goodput", engine=by, **extra)
            for one in served:
                figures = (
                    f"{one.goodput:.3g}/s",
                    f"{one.attained:.0%}",
                    f"{one.ttft_mean:.3f} s",
                    f"{one.itl_p95:.3f} s",
                )
                table.add_row(name, by, *figures, f"{one.hit_rate:.1%}")
    report.console.print(table)
    report.check("real engine ranks as simulated", _differences(simulated, real))


def _differences(simulated: dict[str, list[Served]], real: dict[str, list[Served]]) -> list[str]:
    problems = []
    for metric in ("goodput", "ttft_mean"):
        means = [
            [statistics.fmean(getattr(one, metric) for one in found[name]) for name in ("default", "recommended")]
            for found in (simulated, real)
        ]
        (default, recommended), (real_default, real_recommended) = means
        if (recommended > default) != (real_recommended > real_default):
            problems.append(f"{metric}, default and recommended: {means[0]} simulated, {means[1]} served")
    return problems


def _start(tuned: Tuned, setting: Setting, trace: Trace) -> "StartedEngine":
    """A warm engine: the first calls of a process are slower."""
    from jaxkv.startup import start_engine

    started = start_engine(dataclasses.replace(tuned.planner.config, **setting))
    run_requests(started.engine, trace_requests(_head(trace), started.engine.executor.limits.block_size))
    return started


def _serve(started: "StartedEngine", goal: Goal, trace: Trace, speed: float) -> Served:
    engine = fresh_engine(started)
    begin = engine.clock.now()
    block_size = engine.executor.limits.block_size
    requests = [_real(request, begin) for request in trace_requests(trace, block_size, speed=speed)]
    run = run_requests(engine, requests)
    evictions = engine.scheduler.blocks.num_evictions
    return Served.of(engine.stats, goal, duration=run.seconds, num_evictions=evictions, speed=speed)


def _head(trace: Trace) -> Trace:
    rows = tuple([dataclasses.replace(row, arrival=0.0) for row in trace.requests[:_WARM_UP_REQUESTS]])
    return dataclasses.replace(trace, requests=rows)


def _real(request: Request, begin: float) -> Request:
    """Greedy, as calls were measured; on the engine's clock."""
    sampling = dataclasses.replace(request.sampling, temperature=0.0)
    return dataclasses.replace(request, sampling=sampling, arrival_time=begin + request.arrival_time)
