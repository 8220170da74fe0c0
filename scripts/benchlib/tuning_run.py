"""A whole tuning: trace, search, contributions, front, check on the held-out half."""

import dataclasses
import math
from typing import NamedTuple

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchlib.kv_format_costs import kl_of
from benchlib.model_shapes import find_shape
from benchlib.tuning_engines import EnginePlanner
from benchlib.tuning_evaluation import HELD_OUT, SEARCHED, Evaluator, Found
from benchlib.tuning_plot import draw
from benchlib.tuning_real import check_real
from benchlib.tuning_replays import mean_rate
from benchlib.tuning_tables import Tuned, tell
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.measurement import Report
from jaxkv.simulation.goodput import Goal
from jaxkv.simulation.synthetic_traces import synthetic_trace
from jaxkv.simulation.trace_changes import poisson_arrivals, scaled, with_token_ids
from jaxkv.simulation.trace_requests import has_tokens
from jaxkv.simulation.traces import Trace, read_trace
from jaxkv.simulation.tuning import (
    Setting,
    Trial,
    Trials,
    Value,
    contributions,
    coordinate_descent,
    pareto_front,
)


class Wanted(NamedTuple):
    """The program's own flags. limits: seconds of TTFT and ITL. speed: None searches the highest rate."""

    trace: str | None
    synthetic: str
    trace_block_size: int | None
    num_requests: int
    scale: int
    device: str
    cost_model: str | None
    limits: tuple[float, float]
    goal_share: float
    speed: float | None
    min_gain: float
    max_sweeps: int
    processes: int
    check_real: bool
    real_requests: int
    plot: str | None


def tune(report: Report, wanted: Wanted, config: EngineConfig, space: dict[str, list[Value]]) -> None:
    """Adds what was found to the report, and shows it. Raises UserError."""
    name, model = find_shape(config)
    trace = _open_trace(wanted, model.vocab_size)
    planner = EnginePlanner(config, model, wanted.device, trace, wanted.cost_model)
    default = planner.default()
    space = _searchable(space, planner, wanted.cost_model, report)
    _tell_refused(space, planner, default, report)
    goal = Goal(*wanted.limits, wanted.goal_share)
    parts = _halves(planner.trace)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=report.console, disable=report.console.quiet) as bar:
        task = bar.add_task("replays", total=None)
        stage = "looking for the default's rate"

        def tell_progress(num_replays: int) -> None:
            bar.update(task, description=f"{stage}: {num_replays} replays")

        with Evaluator(
            planner, parts, goal, speed=wanted.speed, processes=wanted.processes, on_replays=tell_progress
        ) as evaluator:
            trials = Trials(evaluator)
            if wanted.speed is None:
                evaluator.reference = _reference_speed(evaluator, default, goal)
            stage = "searching"
            best = coordinate_descent(trials, space, default, min_gain=wanted.min_gain, max_sweeps=wanted.max_sweeps)
            stage = "taking the changes apart"
            recommended, steps = contributions(trials, default, best, min_gain=wanted.min_gain)
            stage = "checking on the held-out half"
            held_out = evaluator.measure([default, recommended], HELD_OUT)
    tuned = Tuned(
        planner=planner,
        model=name,
        held_out_trace=parts[HELD_OUT],
        goal=goal,
        reference=evaluator.reference,
        searches_rate=wanted.speed is None,
        trace_rate=mean_rate(parts[SEARCHED]),
        min_gain=wanted.min_gain,
        default=trials.all[0],
        recommended=recommended,
        steps=steps,
        held_out=(held_out[0], held_out[1]),
        trials=trials.all,
        looks=evaluator.looks,
        num_replays=evaluator.num_replays,
        front=pareto_front(trials.all, lambda trial: front_costs(trial, wanted.min_gain)),
    )
    tell(report, tuned)
    if wanted.check_real:
        check_real(report, tuned, wanted.real_requests)
    if wanted.plot is not None:
        draw(wanted.plot, tuned)
        report.files.append(wanted.plot)


def front_costs(trial: Trial, step: float) -> tuple[float, ...]:
    """What nobody wants more of: lost goodput, P95 of TTFT at the reference speed, lost quality, memory.

    Goodput and TTFT in whole steps: smaller differences do not make a choice.
    """
    ttft = trial.outcome.details.reference.ttft_p95
    goodput, setting = trial.outcome.score, trial.setting
    memory = float(setting["gpu_memory_utilization"])
    return -_whole_steps(goodput, step), _whole_steps(ttft, step), kl_of(str(setting["kv_cache_dtype"])), memory


def _whole_steps(value: float, step: float) -> float:
    if not step or not value > 0:
        return value if value > 0 else -math.inf
    return float(round(math.log(value) / math.log1p(step)))


def _searchable(
    space: dict[str, list[Value]], planner: EnginePlanner, cost_model: str | None, report: Report
) -> dict[str, list[Value]]:
    """Without what neither trace nor cost model nor device say anything of."""
    trace, sizes = planner.trace, space.get("block_size", [])
    reasons: dict[str, str] = {}
    if planner.device.is_cpu:
        reasons["gpu_memory_utilization"] = "a CPU has none"
    if cost_model is not None:
        reasons["kv_cache_dtype"] = f"{cost_model} was measured with one"
        reasons["block_size"] = f"{cost_model} was measured with one"
    elif not has_tokens(trace) and trace.block_size is not None and max(sizes, default=0) > trace.block_size:
        reasons["block_size"] = (
            f"{trace.name} has no token ids but ids of blocks of {trace.block_size} tokens, so nothing is known of "
            "what larger blocks share by the token"
        )
    for name in space.keys() & reasons.keys():
        report.console.print(f"{name} is not searched: {reasons[name]}", style="yellow", highlight=False)
    return {name: values for name, values in space.items() if name not in reasons}


def _tell_refused(
    space: dict[str, list[Value]], planner: EnginePlanner, default: Setting, report: Report
) -> None:
    """Values that no engine takes, or not with the default's other settings."""
    for name, values in space.items():
        for value in values:
            setting = {**default, name: value}
            if planner.engine(setting) is None:
                report.console.print(
                    f"{name} {value} is refused: {planner.reason(setting)}", style="yellow", highlight=False, markup=False
                )


def _open_trace(wanted: Wanted, vocab_size: int) -> Trace:
    """With tokens where it is made up or will be served for real."""
    if wanted.trace is None:
        trace = poisson_arrivals(synthetic_trace(wanted.synthetic, wanted.num_requests))
    else:
        trace = read_trace(wanted.trace, block_size=wanted.trace_block_size, limit=wanted.num_requests)
    trace = scaled(trace, wanted.scale)
    return with_token_ids(trace, vocab_size) if wanted.trace is None or wanted.check_real else trace


def _halves(trace: Trace) -> dict[str, Trace]:
    """Raises ConfigError where a half has no rate."""
    middle = len(trace.requests) // 2
    parts = {}
    for name, rows in ((SEARCHED, trace.requests[:middle]), (HELD_OUT, trace.requests[middle:])):
        start = rows[0].arrival
        rows = tuple([dataclasses.replace(row, arrival=row.arrival - start) for row in rows])
        parts[name] = dataclasses.replace(trace, requests=rows)
        if not mean_rate(parts[name]):
            raise ConfigError(
                f"the {len(rows)} requests of a half of {trace.name} arrive all at once, so they have no rate: raise "
                "num_requests or take another trace"
            )
    return parts


def _reference_speed(evaluator: Evaluator, default: Setting, goal: Goal) -> float:
    """The highest at which the default meets the goal. Raises ConfigError where there is none."""
    (outcome,) = evaluator.measure([default])
    found: Found = outcome.details
    if found.highest.kind == "never":
        idle = found.replays[0]
        raise ConfigError(
            f"with the default setting {idle.attained:.1%} of the requests meet ttft_limit={goal.ttft:g} and "
            f"itl_limit={goal.itl:g} even one by one, and goal_share is {goal.share:g}: P95 of TTFT is then "
            f"{idle.ttft_p95:.3g} s, of ITL {idle.itl_p95:.3g} s, and {idle.refused} requests are refused. Raise the "
            "limits or lower goal_share"
        )
    if found.highest.kind == "always":
        raise ConfigError(
            f"the default setting meets ttft_limit={goal.ttft:g} and itl_limit={goal.itl:g} even if all requests of "
            "the searched half come at once: raise num_requests, or lower the limits"
        )
    return found.highest.speed
