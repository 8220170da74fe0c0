"""What a replay gave, as results, tables and curves."""

import dataclasses
import pathlib

from rich.table import Table

from benchlib.replay_setup import ReplaySetup
from jaxkv.core.errors import ConfigError
from jaxkv.measurement import Report
from jaxkv.simulation.block_replay import BlockReplayReport
from jaxkv.simulation.replay import ReplayReport
from jaxkv.simulation.traces import Trace

_LATENCIES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "queue_time": "queue"}
_REFUSED_TOLD = 3


def tell_latencies(report: Report, trace: Trace, setup: ReplaySetup, outcome: ReplayReport) -> None:
    """Adds latencies, rates and counts, and shows them."""
    where = {"engine": "simulated", "trace": trace.name, "model": setup.model, "cost_model": setup.cost}
    table = Table(title=f"{trace.name}, {setup.cost}")
    for heading in ("seconds", "mean", "P50", "P90", "P95", "P99", "of"):
        table.add_column(heading, justify="left" if heading == "seconds" else "right")
    for name, heading in _LATENCIES.items():
        summary = getattr(outcome, name)
        values = dataclasses.asdict(summary)
        if not summary.count:
            report.skip(heading, "nothing was observed", **where)
            continue
        report.add(heading, [summary.p50], unit="s", metric=name, **where, **values)
        table.add_row(
            heading, *(f"{values[key]:.4g}" for key in ("mean", "p50", "p90", "p95", "p99")), f"{summary.count:,}"
        )
    report.console.print(table)
    usable = setup.limits.num_blocks - 1
    share = (
        ""
        if setup.capacity_blocks is None
        else f", {outcome.mean_usage:.1%} of the pool, at most {outcome.peak_usage:.1%}"
    )
    stats, cache = outcome.stats, outcome.stats.prefix_cache
    missed = {reason.value: count for reason, count in cache.missed.items()}
    for name, value, unit in (
        ("hit rate", outcome.hit_rate, "of prompt tokens"),
        ("device busy", outcome.busy_share, "of the time"),
        ("pool used, mean", outcome.mean_usage, "of the blocks"),
        ("pool used, peak", outcome.peak_usage, "of the blocks"),
        ("blocks used, mean", outcome.mean_usage * usable, "blocks"),
        ("blocks used, peak", outcome.peak_usage * usable, "blocks"),
        ("output", outcome.output_tokens_per_second, "tokens/s"),
        ("duration", outcome.duration, "s"),
        ("requests finished", len(outcome.requests), "requests"),
        ("requests refused", len(outcome.refused), "requests"),
        ("preemptions", stats.preemptions, "preemptions"),
        ("evictions", outcome.evictions, "blocks"),
        ("prompt tokens computed", stats.computed_tokens, "tokens"),
        ("steps", stats.steps, "calls"),
    ):
        report.add(name, [value], unit=unit, metric=name.replace(" ", "_").replace(",", ""), **where)
    report.results[-1]["loop_steps"] = {str(c): count for c, count in sorted(stats.loop_steps.items())}
    report.results[-1]["missed"] = missed
    report.console.print(
        f"{len(outcome.requests):,} requests in {outcome.duration:,.0f} s, {outcome.output_tokens_per_second:,.0f} output "
        f"tokens/s; device busy {outcome.busy_share:.1%}; hit rate {outcome.hit_rate:.2%} of prompt tokens; "
        f"{outcome.mean_usage * usable:,.0f} blocks in use on average{share}; {stats.preemptions:,} preemptions, "
        f"{outcome.evictions:,} blocks evicted",
        highlight=False,
    )
    if outcome.refused:
        report.console.print(f"{len(outcome.refused):,} requests could never fit and were refused:", style="yellow")
        for request_id, reason in outcome.refused[:_REFUSED_TOLD]:
            report.console.print(f"  {request_id}: {reason}", markup=False, highlight=False)


def told(serial: BlockReplayReport) -> str:
    pool = "an endless cache" if serial.capacity_blocks is None else f"{serial.capacity_blocks:,} blocks"
    policy = serial.policy + (", leaves only" if serial.leaf_only else "")
    return (
        f"One request at a time, {pool}, {policy}: {serial.hit_blocks:,} of {serial.total_blocks:,} blocks hit, "
        f"{serial.block_hit_rate:.2%} ({serial.token_hit_rate:.2%} of tokens), {serial.evictions:,} evictions"
    )


def draw(path: str, trace: Trace, outcome: ReplayReport) -> None:
    """Latencies of the requests over time of arrival, and how each latency is distributed."""
    from matplotlib.figure import Figure

    done = sorted((metrics for metrics in outcome.requests if metrics.ttft is not None), key=lambda one: one.arrival)
    figure = Figure(figsize=(11, 8), layout="constrained")
    over_time, spread, hits, running = figure.subplots(2, 2).flat
    arrivals = [metrics.arrival for metrics in done]
    over_time.scatter(arrivals, [metrics.ttft for metrics in done], s=3, label="TTFT")
    over_time.scatter(arrivals, [metrics.queue_time for metrics in done], s=3, label="queue")
    over_time.set(xlabel="arrival (s)", ylabel="seconds", title="by arrival")
    for name, heading in _LATENCIES.items():
        values = (
            sorted(outcome.stats.itl.latest)
            if name == "itl"
            else sorted(value for metrics in done if (value := getattr(metrics, name)) is not None)
        )
        values = values[:: max(1, len(values) // 2000)]  # as many as can be told apart
        spread.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=heading)
    spread.set(xscale="symlog", xlabel="seconds", ylabel="share of requests", title="at most so long")
    spread.set_xscale("symlog", linthresh=1e-3)
    shares = [metrics.num_cached_tokens / metrics.num_prompt_tokens for metrics in done]
    hits.scatter([metrics.num_prompt_tokens for metrics in done], shares, s=3)
    hits.set(xscale="log", xlabel="prompt (tokens)", ylabel="found in the cache", title="hit rate by prompt")
    changes = sorted([(metrics.first_scheduled, 1) for metrics in done] + [(metrics.finished, -1) for metrics in done])
    times, counts, count = [], [], 0
    for time, change in changes:
        count += change
        times.append(time)
        counts.append(count)
    running.step(times, counts, where="post")
    running.set(xlabel="seconds", ylabel="requests", title="running")
    for axes in (over_time, spread):
        axes.legend()
    for axes in (over_time, spread, hits, running):
        axes.grid(alpha=0.3)
    figure.suptitle(trace.name)
    try:
        figure.savefig(pathlib.Path(path), dpi=120)
    except OSError as error:
        raise ConfigError(f"plot is {path!r}, which cannot be written: {error.strerror}") from error
