#!/usr/bin/env python
"""Hit rates of every eviction policy by capacity, between LRU and Belady's optimum, on a trace.

    python scripts/bench_eviction.py                                     # made-up conversations
    python scripts/bench_eviction.py --trace=mooncake_conversation.jsonl.gz --plot=hit_rates.png
    python scripts/bench_eviction.py --synthetic=agents --lookaheads=0,32

Serial: one request at a time, so it needs no model and no GPU. Policies adapt on the first half of the requests, and
hits are counted on the second.
"""


from absl import flags
from rich.progress import Progress

from jaxkv import measurement
from jaxkv.control.eviction_choice import EVICTION_POLICIES
from jaxkv.core.errors import ConfigError
from jaxkv.simulation.block_replay import OPT, replay_blocks
from jaxkv.simulation.synthetic_traces import SYNTHETIC_SHAPES, synthetic_trace
from jaxkv.simulation.traces import Trace, read_trace

_TRACE = flags.DEFINE_string("trace", None, "Mooncake or Qwen-Bailian JSON lines; unset makes up a trace.")
_SYNTHETIC = flags.DEFINE_enum("synthetic", "conversations", SYNTHETIC_SHAPES, "Shape of the made-up trace.")
_REQUESTS = flags.DEFINE_integer("num_requests", None, "Use the first so many; unset: all, or 4000 made up.", 1)
_CAPACITIES = flags.DEFINE_list("capacities", [], "Pool sizes in blocks of the trace; empty: fractions of all blocks.")
_POLICIES = flags.DEFINE_list("policies", list(EVICTION_POLICIES), "Policies beside lru and the optimum.")
_LOOKAHEADS = flags.DEFINE_list("lookaheads", ["0"], "Waiting requests that the policy sees, each measured.")
_PLOT = flags.DEFINE_string("plot", None, "Write the curves to this PNG; needs matplotlib (pip install -e '.[plot]').")

# Of all distinct blocks, where no capacities are given: from a pool that holds next to nothing to one that holds most.
_FRACTIONS = (0.01, 0.03, 0.1, 0.3)


def _config() -> dict:
    names = ("trace", "synthetic", "num_requests", "capacities", "policies", "lookaheads", "plot", "quick")
    return {name: flags.FLAGS[name].value for name in names}


def _whole_numbers(name: str, least: int) -> list[int]:
    values = flags.FLAGS[name].value
    try:
        numbers = [int(value) for value in values]
    except ValueError:
        numbers = [-1]
    if any(number < least for number in numbers):
        raise ConfigError(f"{name} is {','.join(values)!r}; it must be whole numbers from {least}, e.g. 32,128")
    return sorted(set(numbers))


def _open_trace() -> Trace:
    count = 300 if flags.FLAGS.quick else _REQUESTS.value
    if _TRACE.value is None:
        return synthetic_trace(_SYNTHETIC.value, count or 4000)
    trace = read_trace(_TRACE.value, limit=count)
    if trace.block_size is None:
        raise ConfigError(f"{trace.name} has no hash_ids, so nothing is known of shared prefixes: choose another trace")
    return trace


def _measure(report: measurement.Report) -> None:
    if unknown := set(_POLICIES.value) - set(EVICTION_POLICIES):
        raise ConfigError(f"policies has {', '.join(sorted(unknown))}; there are: {', '.join(EVICTION_POLICIES)}")
    measurement.check_plot(_PLOT.value)
    lookaheads = _whole_numbers("lookaheads", 0)
    trace = _open_trace()
    distinct = len({block for request in trace.requests for block in request.block_ids})
    capacities = _whole_numbers("capacities", 1) or sorted({max(1, int(part * distinct)) for part in _FRACTIONS})
    policies = list(dict.fromkeys(["lru", *_POLICIES.value]))
    runs = [("lru", 0), (OPT, 0)]
    runs += [(policy, depth) for policy in policies for depth in lookaheads if (policy, depth) != ("lru", 0)]
    rates: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    with Progress(console=report.console, disable=report.console.quiet) as bar:
        task = bar.add_task(f"{trace.name}: replays", total=len(capacities) * len(runs))
        for capacity in capacities:
            for policy, depth in runs:
                skip = len(trace.requests) // 2
                rate = replay_blocks(trace, policy, capacity, skip=skip, lookahead=depth).block_hit_rate
                rates[policy, depth].append(rate)
                gap = rates[OPT, 0][-1] - rates["lru", 0][-1] if policy != "lru" or depth else 0.0
                report.add(
                    f"{_label(policy, depth)} at {capacity} blocks",
                    [rate],
                    unit="hits/block",
                    metric="block_hit_rate",
                    engine=policy,
                    capacity_blocks=capacity,
                    lookahead=depth,
                    gap_closed=(rate - rates["lru", 0][-1]) / gap if gap > 0 else None,
                )
                bar.advance(task)
    if _PLOT.value is not None:
        _draw(trace, capacities, rates)
        report.files.append(_PLOT.value)


def _label(policy: str, lookahead: int) -> str:
    return f"{policy} +{lookahead} waiting" if lookahead else policy


def _draw(trace: Trace, capacities: list[int], rates: dict[tuple[str, int], list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for (policy, depth), values in rates.items():
        style = "k--" if policy == OPT else "o-"
        axes.plot(capacities, values, style, label=_label(policy, depth), markersize=3)
    axes.set(
        xscale="log", xlabel=f"pool (blocks of {trace.block_size} tokens)", ylabel="block hit rate", title=trace.name
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(_PLOT.value, dpi=120)


if __name__ == "__main__":
    measurement.run("bench_eviction", _config, _measure)
