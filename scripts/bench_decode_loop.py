#!/usr/bin/env python
"""What the compiled decode loop gives and costs.

    python scripts/bench_decode_loop.py                            # everything, with the targets
    python scripts/bench_decode_loop.py --sections=costs --plot_out=costs.png

Sections:

    host      host time between two calls of the loop as a share of the call, with one and two calls in flight
    loop      tokens a second by steps a call on a tiny random model, where dispatch dominates
    latency   time between deliveries and to the first token by steps a call, against throughput
    costs     step time by rows and context, prefill time by length and context: fitted and plotted

Every flag of the engine is taken; --model is measured in all sections but loop.
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from benchlib.engine_runs import fresh_engine, greedy_request, random_prompt, run_requests
from benchlib.loop_latency import Load, measure_latency, setting_name
from benchlib.random_model import write_random_model
from benchlib.step_costs import Grid, measure_costs
from benchlib.timed_executor import TimedExecutor

from jaxkv import measurement
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.metrics import percentile
from jaxkv.flags import define_engine_flags, engine_config

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine

ALL = ("host", "loop", "latency", "costs")

_SECTIONS = flags.DEFINE_list("sections", list(ALL), f"Which to run: {', '.join(ALL)}.")
_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of each setting.", lower_bound=1)
_PLOT_OUT = flags.DEFINE_string("plot_out", "decode_loop_costs.png", "Picture of the costs; empty draws none.")
define_engine_flags()

# Host time under 5 % of a call; eight steps a call against one.
_HOST_TARGET, _LOOP_TARGET = 20.0, 1.3
_PROMPT_LEN = 32


def _config() -> dict[str, Any]:
    own = {"sections": _SECTIONS.value, "runs": _RUNS.value, "quick": flags.FLAGS.quick}
    return dataclasses.asdict(engine_config()) | own


def _measure(report: measurement.Report) -> None:
    if unknown := set(_SECTIONS.value) - set(ALL):
        raise ConfigError(f"sections has {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    if engine_config().enforce_eager:
        raise ConfigError("enforce_eager runs one step a call, so there is no loop to measure: leave it out")
    quick, runs = flags.FLAGS.quick, 1 if flags.FLAGS.quick else _RUNS.value
    if set(_SECTIONS.value) - {"loop"}:
        grid = dataclasses.replace(Grid(), rounds=runs)
        grid = grid.quick() if quick else grid
        started = _start(report, engine_config(), grid.longest if "costs" in _SECTIONS.value else 512)
        if "host" in _SECTIONS.value:
            _measure_host(report, started, runs)
        if "latency" in _SECTIONS.value:
            load = Load().quick() if quick else Load(runs=runs)
            measure_latency(report, started, load.fitting(started.config.max_num_seqs))
        if "costs" in _SECTIONS.value:
            measure_costs(report, started.engine.executor, grid, _PLOT_OUT.value)
        del started  # its memory
    if "loop" in _SECTIONS.value:
        with tempfile.TemporaryDirectory(prefix="jaxkv-bench-") as folder:
            tiny = EngineConfig(
                model=str(write_random_model(Path(folder) / "tiny")),
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=512,
                num_gpu_blocks_override=256,
                compilation_cache_dir=engine_config().compilation_cache_dir,
            )
            _measure_loop(report, _start(report, tiny, 512), runs)


def _start(report: measurement.Report, config: EngineConfig, max_model_len: int) -> "StartedEngine":
    from jaxkv.startup import start_engine  # brings jax

    if config.max_model_len is None:
        config = dataclasses.replace(config, max_model_len=max_model_len)
    report.console.print(f"starting the engine on {config.model} ...")
    return start_engine(config)


def _measure_host(report: measurement.Report, started: "StartedEngine", runs: int) -> None:
    """Calls of a steady batch: what the host does between having results and the next call being in the queue.

    With one call in flight the device stands still for so long; with two it works on the other one meanwhile, which the
    share of calls that found it idle shows.
    """
    rng = np.random.default_rng(0)
    output_len = 64 if flags.FLAGS.quick else 96  # at 8 steps a call, enough calls that are alike
    rows = min(8, started.config.max_num_seqs)
    settings = [(steps, in_flight) for steps in (1, 8) for in_flight in (1, 2)]
    samples = {setting: {key: [] for key in ("call", "host", "host_cpu", "idle", "rate")} for setting in settings}
    for _ in range(runs):
        for steps, in_flight in settings:
            executor = TimedExecutor(started.engine.executor)
            engine = fresh_engine(started, executor=executor, max_in_flight=in_flight, decode_steps=steps)
            run = run_requests(engine, _requests(rng, started, rows, output_len))
            calls = executor.steady_calls()
            kept = samples[steps, in_flight]
            kept["call"] += [seconds for _, seconds in calls]
            kept["host"] += [call.host_seconds for call, _ in calls]
            kept["host_cpu"] += [call.host_cpu_seconds for call, _ in calls]
            kept["idle"] += [float(call.device_was_idle) for call, _ in calls]
            kept["rate"].append(rows * output_len / run.seconds)
            told = f"host, {setting_name(steps)}, {in_flight} in flight: {run.seconds:.1f} s"
            report.console.print(told, highlight=False)
    rates = {}
    for (steps, in_flight), kept in samples.items():
        name = f"{setting_name(steps)}, {in_flight} in flight"
        details = {"engine": "jaxkv", "decode_steps": steps, "max_in_flight": in_flight, "rows": rows}
        call = report.add(f"{name} call", kept["call"], unit="s", metric="call_time", **details)
        host = report.add(
            f"{name} host time between calls",
            kept["host"],
            unit="s",
            metric="host_time",
            p95=percentile(kept["host"], 95),
            cpu_seconds=statistics.median(kept["host_cpu"]),
            **details,
        )
        found_idle = [statistics.fmean(kept["idle"])]
        report.add(f"{name} calls that found the device idle", found_idle, unit="share", metric="idle", **details)
        rates[steps, in_flight] = report.add(
            f"{name} tokens/s", kept["rate"], unit="tokens/s", metric="throughput", **details
        )
        judged = started.config.model == "demo" and not flags.FLAGS.quick
        report.ratio(f"{name}: call / host time", call, host, target=_HOST_TARGET if judged else None)
    for steps in (1, 8):
        name = f"{setting_name(steps)} tokens/s: 2 in flight / 1"
        report.ratio(name, rates[steps, 2], rates[steps, 1], target=None)


def _measure_loop(report: measurement.Report, started: "StartedEngine", runs: int) -> None:
    rng = np.random.default_rng(0)
    output_len = 64 if flags.FLAGS.quick else 384
    settings = (1, 2, 4, 8)
    for rows in (1, 4):
        rates: dict[int, list[float]] = {steps: [] for steps in settings}
        for run in range(runs + 1):
            for steps in settings:
                engine = fresh_engine(started, decode_steps=steps)
                seconds = run_requests(engine, _requests(rng, started, rows, output_len)).seconds
                if run > 0:  # the first warms up
                    rates[steps].append(rows * output_len / seconds)
        results = {
            steps: report.add(
                f"tiny model, {rows} rows, {setting_name(steps)}",
                rates[steps],
                unit="tokens/s",
                metric="throughput",
                engine="jaxkv",
                rows=rows,
                decode_steps=steps,
            )
            for steps in settings
        }
        for steps in settings[1:]:
            target = _LOOP_TARGET if steps == 8 and not flags.FLAGS.quick else None
            report.ratio(f"tiny model, {rows} rows: C={steps} / C=1", results[steps], results[1], target=target)


def _requests(rng: np.random.Generator, started: "StartedEngine", rows: int, output_len: int) -> Sequence:
    vocab_size = started.model_config.vocab_size
    return [greedy_request(str(i), random_prompt(rng, _PROMPT_LEN, vocab_size), output_len) for i in range(rows)]


if __name__ == "__main__":
    measurement.run("bench_decode_loop", _config, _measure)
