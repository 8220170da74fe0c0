"""What a tuning found, as results and tables."""

import dataclasses
import math
from typing import Any

from rich.table import Table

from benchlib import kv_format_costs
from benchlib.model_shapes import SHAPES
from benchlib.tuning_engines import EnginePlanner, serve_command
from benchlib.tuning_evaluation import HELD_OUT, SEARCHED, Found, Look
from jaxkv.measurement import Report
from jaxkv.simulation.goodput import Goal, Served
from jaxkv.simulation.traces import Trace
from jaxkv.simulation.tuning import Contribution, Outcome, Setting, Trial

_FRONT_ROWS = 12
# Below so many TTFT limits a trace is over before a queue has settled.
_SHORT = 10
# Shares within the limits at one fixed speed that leave hardly any to gain, or hardly any to tell settings apart by.
_IDLE, _SWAMPED = 0.99, 0.05


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Attributes:
    reference: the speed at which latencies are compared.
    searches_rate: goodput is the highest rate that meets the goal.
    trace_rate: arrivals a second of the searched half in its own time.
    held_out: outcomes of default and recommended setting there.
    trials: settings that were measured. looks: at others too.
    """

    planner: EnginePlanner
    model: str
    held_out_trace: Trace
    goal: Goal
    reference: float
    searches_rate: bool
    trace_rate: float
    min_gain: float
    default: Trial
    recommended: Setting
    steps: list[Contribution]
    held_out: tuple[Outcome, Outcome]
    trials: list[Trial]
    looks: list[Look]
    num_replays: int
    front: list[Trial]

    @property
    def command(self) -> str:
        config = self.planner.config
        if self.model in SHAPES:  # a shape, which no server can load
            config = dataclasses.replace(config, model=f"./{self.model}")
        return serve_command(config, self.recommended, self.default.setting)


def tell(report: Report, tuned: Tuned) -> None:
    _tell_traffic(report, tuned)
    _tell_steps(report, tuned)
    _tell_front(report, tuned)
    _tell_tried(report, tuned)
    _tell_held_out(report, tuned)
    report.console.print("Recommended:", style="bold")
    report.console.print(f"  {tuned.command}", highlight=False, markup=False, soft_wrap=True)
    if tuned.recommended["block_size"] != tuned.default.setting["block_size"]:
        report.console.print(
            "  block_size: by what the cache holds and finds; kernels' speed by block size is not seen here"
        )
    if tuned.recommended["kv_cache_dtype"] != tuned.default.setting["kv_cache_dtype"]:
        quality = kv_format_costs.told(str(tuned.recommended["kv_cache_dtype"]))
        report.console.print(
            f"  {quality}, measured on the demo model; eval_kv_quality.py measures yours", highlight=False
        )
    report.config["recommended"] = {"command": tuned.command, "setting": dict(tuned.recommended)}


def _tell_traffic(report: Report, tuned: Tuned) -> None:
    say = report.console.print
    goal, planner = tuned.goal, tuned.planner
    if planner.num_too_long:
        say(f"{planner.num_too_long:,} requests are longer than {tuned.model} takes and were left out", style="yellow")
    say(
        f"{planner.trace.name}: {len(planner.trace.requests):,} requests for {tuned.model} on {planner.device.name}; "
        f"goal: TTFT at most {goal.ttft:g} s and ITL at most {goal.itl:g} s for {goal.share:.0%} of the requests",
        highlight=False,
    )
    before = tuned.default.outcome
    if tuned.searches_rate:
        share = tuned.trace_rate / before.score
        say(
            f"The trace brings {tuned.trace_rate:.3g} requests/s, {share:.0%} of what the default setting serves "
            f"within the goal, {before.score:.3g}" + _advice(share),
            highlight=False,
        )
        fastest = max(trial.outcome.details.highest.speed for trial in tuned.trials)
        duration = planner.trace.requests[-1].arrival / 2 / fastest
        if duration < _SHORT * goal.ttft:
            say(
                f"At the highest rate that was found a half lasts {duration:.3g} s, short against ttft_limit "
                f"= {goal.ttft:g} s: what is found holds for a burst. Raise num_requests",
                style="yellow",
            )
        return
    attained = before.details.reference.attained
    if attained >= _IDLE or attained <= _SWAMPED:
        where = "far below" if attained >= _IDLE else "far above"
        say(
            f"At speed {tuned.reference:g} the default setting serves {attained:.1%} of the requests within the "
            f"limits: arrivals are {where} what it can do, and goodput hardly depends on settings. Leave --speed out "
            "to search the highest rate",
            style="yellow",
        )


def _advice(share: float) -> str:
    if share < 0.5:
        return ": today any setting does; the figures below are what it could serve if more came"
    return ": more than it can; take the recommended setting, more devices, or both" if share > 1 else ""


def _tell_steps(report: Report, tuned: Tuned) -> None:
    table = Table(title=f"One change at a time; TTFT, hit rate and use at {_rate(tuned):.3g} requests/s")
    for heading in ("change", "goodput", "gain", "TTFT mean", "TTFT P95", "ITL P95", "hit rate", "preempted"):
        table.add_column(heading, justify="left" if heading == "change" else "right")
    start = tuned.default.outcome
    rows = [("default", "default", start, None, tuned.default.setting)]
    rows += [(_told(step.changes), "step", step.outcome, step.gain, step.setting) for step in tuned.steps]
    for place, (name, kind, outcome, gain, setting) in enumerate(rows):
        served: Served = outcome.details.reference
        table.add_row(
            name,
            f"{outcome.score:.3g}/s",
            "" if gain is None else f"{gain:+.3g}" + (f" ({gain / start.score:+.0%})" if start.score else ""),
            f"{served.ttft_mean:.3f} s",
            f"{served.ttft_p95:.3f} s",
            f"{served.itl_p95:.4f} s",
            f"{served.hit_rate:.1%}",
            str(served.preemptions),
        )
        extra = {"setting": dict(setting), "part": SEARCHED, "place": place, "gain": gain}
        _add(report, name if kind == "default" else f"{place}: {name}", outcome, kind=kind, **extra)
    report.console.print(table)
    if not tuned.steps:
        report.console.print(f"No change gains {tuned.min_gain:.0%}: the default setting stays", highlight=False)


def _tell_front(report: Report, tuned: Tuned) -> None:
    table = Table(title="Nothing better in everything: goodput, TTFT P95, KL of the K/V format, GPU memory")
    for heading in ("goodput", "TTFT P95", "KL", "memory", "against the default"):
        table.add_column(heading, justify="left" if heading.startswith("against") else "right")
    default = tuned.default.setting
    for place, trial in enumerate(tuned.front):
        served: Served = trial.outcome.details.reference
        kl = kv_format_costs.kl_of(str(trial.setting["kv_cache_dtype"]))
        changes = {name: value for name, value in trial.setting.items() if value != default[name]}
        if place < _FRONT_ROWS:
            memory = trial.setting["gpu_memory_utilization"]
            goodput, ttft = f"{trial.outcome.score:.3g}/s", f"{served.ttft_p95:.3f} s"
            table.add_row(goodput, ttft, f"{kl:.1e}", f"{memory:g}", _told(changes) or "the default")
        extra = {"setting": dict(trial.setting), "part": SEARCHED, "kl": None if math.isinf(kl) else kl}
        _add(report, f"front: {_told(changes) or 'default'}", trial.outcome, kind="front", **extra)
    report.console.print(table)
    if (more := len(tuned.front) - _FRONT_ROWS) > 0:
        report.console.print(f"and {more} more, in the JSON document", highlight=False)


def _tell_tried(report: Report, tuned: Tuned) -> None:
    """In the JSON document: every setting that was measured, looked at, or refused."""
    for trial in tuned.trials:
        setting = dict(trial.setting)
        _add(report, f"measured: {_told(setting)}", trial.outcome, kind="measured", setting=setting, part=SEARCHED)
    where = {"engine": "simulated", "metric": "goodput", "part": SEARCHED}
    for look in tuned.looks:
        setting, name = dict(look.setting), f"looked at: {_told(look.setting)}"
        if look.served is None:
            reason = tuned.planner.reason(look.setting)
            report.skip(name, reason, kind="refused", setting=setting, **where)
            continue
        served = finite(dataclasses.asdict(look.served))
        extra = {"setting": setting, "to_beat": look.to_beat, "served": served}
        report.add(name, [look.served.goodput], unit="requests/s", kind="look", **where, **extra)


def _tell_held_out(report: Report, tuned: Tuned) -> None:
    before, after = tuned.held_out
    results = [
        _add(report, f"held out: {name}", outcome, part=HELD_OUT, kind=kind, setting=dict(setting))
        for name, kind, outcome, setting in (
            ("default", "default", before, tuned.default.setting),
            ("recommended", "recommended", after, tuned.recommended),
        )
    ]
    told = [
        f"{outcome.score:.3g}/s (TTFT P95 {outcome.details.reference.ttft_p95:.3f} s, hit rate "
        f"{outcome.details.reference.hit_rate:.1%})"
        for outcome in (before, after)
    ]
    report.console.print(f"Held-out half: default {told[0]}, recommended {told[1]}", highlight=False)
    if before.score > 0:
        report.ratio("held out: recommended / default", results[1], results[0], target=1 - tuned.min_gain)


def _add(report: Report, name: str, outcome: Outcome, **extra: Any) -> dict[str, Any]:
    found: Found = outcome.details
    return report.add(
        name,
        [outcome.score],
        unit="requests/s",
        metric="goodput",
        engine="simulated",
        **extra,
        highest_speed=None if found.highest is None else dataclasses.asdict(found.highest),
        reference=finite(dataclasses.asdict(found.reference)),
        replays=[finite(dataclasses.asdict(served)) for served in found.replays],
    )


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _told(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def _rate(tuned: Tuned) -> float:
    return tuned.reference * tuned.trace_rate
