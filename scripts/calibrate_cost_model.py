#!/usr/bin/env python
"""Measures what this machine's steps take, and writes a cost model for scripts/replay_trace.py.

    python scripts/calibrate_cost_model.py --output=cost_model.json                       # the demo model
    python scripts/calibrate_cost_model.py --model=./Llama-3.2-1B --output=h200.json      # on a GPU
    python scripts/replay_trace.py --trace=requests.jsonl --cost_model=cost_model.json --max_num_seqs=16

The executor's own calls are timed over a small grid: every bucket of prompt tokens and of rows, at two contexts. Then
another load is served for real, and the same arrivals are replayed in simulated time: throughput and mean TTFT must agree
within --tolerance (--no-validate leaves that out). Calibration rounds and served loads take turns, and each served load is
compared with the replay of what the rounds before and after it measured: so a change of the machine's load falls on both.
What is judged is the median over the rounds. Every flag of the engine is taken.
"""

import dataclasses
import pathlib
import statistics
from typing import Any

import numpy as np
from absl import flags
from benchlib.calibration import Calibration, Grid
from benchlib.engine_runs import fresh_engine, greedy_request, random_prompt, run_requests
from rich.progress import Progress

from jaxkv import measurement
from jaxkv.core.errors import ConfigError
from jaxkv.core.request import Request
from jaxkv.flags import define_engine_flags, engine_config
from jaxkv.simulation.replay import replay

_OUTPUT = flags.DEFINE_string("output", "cost_model.json", "Where the cost model is written.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Times that the grid is gone through, and the load served.", 1)
_VALIDATE = flags.DEFINE_bool("validate", True, "Serve a load for real beside its replay.")
_LOAD = flags.DEFINE_integer("validation_requests", 24, "Requests of that load.", 2)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.15, "By how much real and simulated may differ.")
define_engine_flags()


def _config() -> dict[str, Any]:
    own = ("output", "rounds", "validate", "validation_requests", "tolerance", "quick")
    return {name: flags.FLAGS[name].value for name in own} | dataclasses.asdict(engine_config())


def _measure(report: measurement.Report) -> None:
    output = pathlib.Path(_OUTPUT.value)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"output is {_OUTPUT.value!r}, in a folder that does not exist")
    from jaxkv.startup import start_engine  # brings jax

    config = engine_config()
    if config.enforce_eager:
        raise ConfigError("enforce_eager compiles all the time, so there is nothing to calibrate: leave it out")
    report.console.print(f"starting the engine on {config.model} ...")
    started = start_engine(config)
    executor = started.engine.executor
    shapes, rounds = executor.shapes, 1 if flags.FLAGS.quick else _ROUNDS.value
    calibration = Calibration(executor, Grid(shapes.prefill_buckets, shapes.decode_buckets))
    load = _load(started, 4 if flags.FLAGS.quick else _LOAD.value) if _VALIDATE.value else []
    served = []
    with Progress(console=report.console, disable=report.console.quiet) as bar:
        task = bar.add_task("calls measured", total=(rounds + bool(load)) * calibration.num_calls)
        for _ in range(rounds):
            calibration.run_round(lambda: bar.advance(task))
            if load:
                served.append(_serve(started, load))
        if load:
            calibration.run_round(lambda: bar.advance(task))
    about = {"model": started.name, "machine": measurement.device_facts(), "rounds": rounds}
    model, mean_error, worst = calibration.fit(about=about)
    model = dataclasses.replace(model, about=about | {"mean_relative_error": mean_error, "max_relative_error": worst})
    output.write_text(model.to_json() + "\n", encoding="utf-8")
    report.files.append(str(output))
    for shape, seconds, least, most in calibration.points():
        what = f"prefill {shape.prefill_tokens} after {shape.prefill_context}"
        if shape.num_steps:
            what = f"{shape.num_steps} steps of {shape.decode_rows} rows, {shape.decode_kv_tokens} KV tokens"
        predicted = model.seconds(shape)
        report.add(what, [least, seconds, most], unit="s", metric="call_time", engine="jaxkv", predicted=predicted)
    report.add("mean error of the fit", [mean_error], unit="relative", metric="fit_error", engine="fit")
    report.add("largest error of the fit", [worst], unit="relative", metric="max_fit_error", engine="fit")
    if load:
        _compare(report, started, calibration, load, served)


def _load(started, count: int) -> list[Request]:
    """Prompts of many lengths, half of them with a common beginning; they come in two bursts and a trickle."""
    rng = np.random.default_rng(7)
    vocab, limits = started.model_config.vocab_size, started.engine.executor.limits
    longest = min(300, limits.max_model_len - 40)
    common = random_prompt(rng, longest // 3, vocab)
    requests, arrival = [], 0.0
    for number in range(count):
        prompt = random_prompt(rng, int(rng.integers(16, longest // 2)), vocab)
        prompt = common + prompt if number % 2 else prompt
        if number % (count // 2) > count // 4:
            arrival += float(rng.exponential(0.25))
        output_len = int(rng.integers(8, 32))
        requests.append(greedy_request(str(number), prompt, output_len, arrival_time=arrival))
    return requests


def _serve(started, load: list[Request]) -> tuple[float, float]:
    """Output tokens a second, and mean TTFT, of the load in a new engine."""
    engine = fresh_engine(started)
    begin = engine.clock.now()
    requests = [dataclasses.replace(request, arrival_time=begin + request.arrival_time) for request in load]
    run = run_requests(engine, requests)
    return sum(map(len, run.tokens.values())) / run.seconds, engine.stats.ttft.mean


def _compare(
    report: measurement.Report,
    started,
    calibration: Calibration,
    load: list[Request],
    served: list[tuple[float, float]],
) -> None:
    base = started.engine
    simulated = []
    for turn in range(len(served)):
        model, _, _ = calibration.fit(slice(turn, turn + 2))
        outcome = replay(load, base.executor.limits, model, base.scheduler.config)
        simulated.append((outcome.output_tokens_per_second, outcome.ttft.mean))
    problems = []
    for place, name, unit in ((0, "throughput", "tokens/s"), (1, "mean TTFT", "s")):
        real, told = [one[place] for one in served], [one[place] for one in simulated]
        report.add(f"{name}, served", real, unit=unit, metric=name, engine="jaxkv")
        report.add(f"{name}, simulated", told, unit=unit, metric=name, engine="simulated")
        ratios = [ours / theirs for ours, theirs in zip(told, real, strict=True)]
        report.add(f"{name}, simulated / served", ratios, unit="ratio", metric=f"{name} ratio", engine="simulated")
        difference = statistics.median(ratios) - 1
        if abs(difference) > _TOLERANCE.value:
            problems.append(f"{name} differs by {difference:+.0%}, more than {_TOLERANCE.value:.0%}")
    if not flags.FLAGS.quick:  # one round judges nothing
        report.check("simulated against served", problems)


if __name__ == "__main__":
    measurement.run("calibrate_cost_model", _config, _measure)
