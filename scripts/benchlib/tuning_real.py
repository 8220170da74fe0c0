"""Whether the real engine ranks two settings as the simulated one does: the same arrivals, on this machine."""

import dataclasses

from rich.table import Table

from benchlib.engine_runs import fresh_engine, run_requests
from benchlib.tuning_replays import Job, load_parts, run_job
from benchlib.tuning_tables import Tuned, finite
from jaxkv.core.request import Request
from jaxkv.measurement import Report
from jaxkv.simulation.goodput import Served
from jaxkv.simulation.trace_requests import trace_requests
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import Setting

_PART = "served for real"
_WARM_UP_REQUESTS = 4


def check_real(report: Report, tuned: Tuned, num_requests: int) -> None:
    """Serves the start of the held-out half with the default and the recommended setting, each with an empty cache.

    At the speed half way (of its logarithm) between the highest that the two should bear: where the simulation tells
    them apart most. A check of the report: both rank goodput and mean TTFT alike.
    """
    if tuned.recommended == tuned.default.setting:
        report.console.print("Nothing to compare for real: the default setting stays")
        return
    requests = tuned.held_out_trace.requests[:num_requests]
    trace = dataclasses.replace(tuned.held_out_trace, requests=requests)
    speeds = [one.details.highest.speed for one in tuned.held_out if one.details.highest is not None]
    speed = (speeds[0] * speeds[1]) ** 0.5 if speeds and min(speeds) > 0 else tuned.reference
    load_parts({_PART: trace})
    table = Table(title=f"Served for real: {len(requests)} requests at speed {speed:.3g}")
    for heading in ("setting", "by", "goodput", "within the limits", "TTFT mean", "TTFT P95", "ITL P95", "hit rate"):
        table.add_column(heading, justify="left" if heading in ("setting", "by") else "right")
    found: dict[str, list[Served]] = {"simulated": [], "jaxkv": []}
    for name, setting in (("default", tuned.default.setting), ("recommended", tuned.recommended)):
        engine = tuned.planner.engine(setting)
        simulated = run_job(Job(engine, tuned.goal, _PART, (speed,))).replays[speed]
        served = _serve(tuned, setting, trace, speed)
        for by, one in (("simulated", simulated), ("jaxkv", served)):
            found[by].append(one)
            extra = {"kind": name, "setting": dict(setting), "part": _PART, "served": finite(dataclasses.asdict(one))}
            report.add(f"{_PART}, {name}, {by}", [one.goodput], unit="requests/s", metric="goodput", engine=by, **extra)
            figures = f"{one.goodput:.3g}/s", f"{one.attained:.0%}", f"{one.ttft_mean:.3f} s", f"{one.ttft_p95:.3f} s"
            table.add_row(name, by, *figures, f"{one.itl_p95:.4f} s", f"{one.hit_rate:.1%}")
    report.console.print(table)
    report.check("real engine ranks as simulated", _differences(found["simulated"], found["jaxkv"]))


def _differences(simulated: list[Served], real: list[Served]) -> list[str]:
    problems = []
    for name, metric, better in (("goodput", "goodput", 1), ("mean TTFT", "ttft_mean", -1)):
        expected, seen = (better * (getattr(b, metric) - getattr(a, metric)) for a, b in (simulated, real))
        if (expected > 0) != (seen > 0):
            figures = ", ".join(f"{getattr(one, metric):.3g}" for one in (*simulated, *real))
            problems.append(f"{name}, default and recommended: simulated, then real: {figures}")
    return problems


def _serve(tuned: Tuned, setting: Setting, trace: Trace, speed: float) -> Served:
    from jaxkv.startup import start_engine

    started = start_engine(dataclasses.replace(tuned.planner.config, **setting))
    limits, clock = started.engine.executor.limits, started.engine.clock
    # The first calls of a process are slower: they are another engine's, whose cache goes with it.
    run_requests(started.engine, trace_requests(_head(trace), limits.block_size))
    engine = fresh_engine(started)
    begin = clock.now()
    requests = [_real(request, begin) for request in trace_requests(trace, limits.block_size, speed=speed)]
    run = run_requests(engine, requests)
    return Served.of(
        engine.stats,
        tuned.goal,
        duration=run.seconds,
        num_evictions=engine.scheduler.blocks.num_evictions,
        speed=speed,
    )


def _head(trace: Trace) -> Trace:
    rows = tuple([dataclasses.replace(row, arrival=0.0) for row in trace.requests[:_WARM_UP_REQUESTS]])
    return dataclasses.replace(trace, requests=rows)


def _real(request: Request, begin: float) -> Request:
    """Greedy, as calls were measured; on the engine's clock."""
    sampling = dataclasses.replace(request.sampling, temperature=0.0)
    return dataclasses.replace(request, sampling=sampling, arrival_time=begin + request.arrival_time)
