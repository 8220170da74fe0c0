#!/usr/bin/env python
"""What a shared prefix saves: requests that come at once, with the prefix cache on and off, otherwise alike.

    python scripts/bench_prefix_sharing.py                  # the acceptance setting, with its targets
    python scripts/bench_prefix_sharing.py --scenarios=chats --block_size=32 --runs=1

Every flag of the engine is taken. Each run has a fresh random prefix:

    off    the prefix cache is off
    cold   on, and empty: requests share the prefix while the first of them still computes it
    warm   on, the prefix is in the cache from the run before, the requests' own parts are new
"""

import dataclasses
import statistics
from typing import Any

import numpy as np
from absl import flags
from benchlib.engine_runs import fresh_engine, greedy_request, random_prompt, run_requests
from benchlib.prefix_scenarios import ALL, Scenario, check_room

from jaxkv import measurement
from jaxkv.control.engine import Engine
from jaxkv.core.errors import ConfigError
from jaxkv.core.metrics import percentile
from jaxkv.flags import define_engine_flags, engine_config

_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of each.", lower_bound=1)
_SCENARIOS = flags.DEFINE_list("scenarios", ["chats", "documents"], "Which to run: chats, documents.")
define_engine_flags()

MODES = ("off", "cold", "warm")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run: seconds by metric, prompt tokens computed, and the tokens that came out."""

    seconds: dict[str, float]
    computed_tokens: int
    tokens: dict[str, tuple[int, ...]]


def _config() -> dict[str, Any]:
    return dataclasses.asdict(engine_config()) | {
        "runs": _RUNS.value,
        "quick": flags.FLAGS.quick,
        "scenarios": {name: dataclasses.asdict(ALL[name]) for name in _SCENARIOS.value if name in ALL},
    }


def _measure(report: measurement.Report) -> None:
    from jaxkv.startup import start_engine  # brings jax

    if unknown := set(_SCENARIOS.value) - ALL.keys():
        raise ConfigError(f"scenarios has {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    scenarios = [ALL[name].quick() if flags.FLAGS.quick else ALL[name] for name in _SCENARIOS.value]
    config = engine_config()
    longest = max(scenario.total_len for scenario in scenarios)
    if config.max_model_len is None:
        config = dataclasses.replace(config, max_model_len=longest)
    report.console.print("starting the engine ...")
    started = start_engine(config)
    check_room(started.config, started.memory.num_tokens, scenarios)
    rng = np.random.default_rng(0)
    vocab_size = started.model_config.vocab_size
    # The first calls touch memory for the first time; nobody is measured by them.
    warm_up = [greedy_request(str(i), random_prompt(rng, 64, vocab_size), 8) for i in range(4)]
    run_requests(fresh_engine(started), warm_up)
    for scenario in scenarios:
        outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
        for _ in range(1 if flags.FLAGS.quick else _RUNS.value):
            shared = random_prompt(rng, scenario.shared_len, vocab_size)
            first, second = (
                [shared + random_prompt(rng, scenario.own_len, vocab_size) for _ in range(scenario.num_requests)]
                for _ in range(2)
            )
            off = fresh_engine(started, enable_prefix_caching=False)
            outcomes["off"].append(_run(off, first, scenario.output_len))
            on = fresh_engine(started, enable_prefix_caching=True)
            outcomes["cold"].append(_run(on, first, scenario.output_len))
            outcomes["warm"].append(_run(on, second, scenario.output_len))
            for mode in MODES:
                seconds = outcomes[mode][-1].seconds
                report.console.print(f"{scenario.name} {mode}: {seconds['total']:.2f} s", highlight=False)
        _tell(report, scenario, outcomes)


def _run(engine: Engine, prompts: list[tuple[int, ...]], output_len: int) -> Outcome:
    """All prompts at once. An engine may run several batches, one after the other."""
    computed, finished = engine.stats.computed_tokens, len(engine.stats.requests)
    run = run_requests(engine, [greedy_request(str(i), ids, output_len) for i, ids in enumerate(prompts)])
    ttfts = [metrics.ttft for metrics in list(engine.stats.requests)[finished:]]
    seconds = {
        "ttft_mean": statistics.fmean(ttfts),
        "ttft_p50": percentile(ttfts, 50),
        "ttft_p95": percentile(ttfts, 95),
        "total": run.seconds,
    }
    return Outcome(seconds, engine.stats.computed_tokens - computed, run.tokens)


def _tell(report: measurement.Report, scenario: Scenario, outcomes: dict[str, list[Outcome]]) -> None:
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for mode in MODES:
        for metric in ("ttft_mean", "ttft_p50", "ttft_p95", "total"):
            samples = [outcome.seconds[metric] for outcome in outcomes[mode]]
            results[mode, metric] = report.add(
                f"{scenario.name} {mode} {metric}", samples, unit="s", metric=metric, engine="jaxkv", cache=mode
            )
        report.add(
            f"{scenario.name} {mode} computed prompt tokens",
            [outcome.computed_tokens for outcome in outcomes[mode]],
            unit="tokens",
            metric="computed_tokens",
            engine="jaxkv",
            cache=mode,
        )
    # Fast and wrong would be no saving: a hit reads the K/V that a miss computes.
    equal = [
        sum(off.tokens[key] == cold.tokens[key] for key in off.tokens) / len(off.tokens)
        for off, cold in zip(outcomes["off"], outcomes["cold"], strict=True)
    ]
    report.add(
        f"{scenario.name} requests with equal tokens, cold and off", equal, unit="share", metric="equal", engine="jaxkv"
    )
    for metric in ("ttft_mean", "total"):
        for mode in ("cold", "warm"):
            judged = mode == "cold" and metric == scenario.judged_metric and not flags.FLAGS.quick
            report.ratio(
                f"{scenario.name} {metric}: off / {mode}",
                results["off", metric],
                results[mode, metric],
                target=scenario.target if judged else None,
            )


if __name__ == "__main__":
    measurement.run("bench_prefix_sharing", _config, _measure)
