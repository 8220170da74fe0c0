"""Latency against throughput for each number of decode steps a call, so that the adaptive choice can be judged."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from benchlib.engine_runs import fresh_engine, greedy_request, random_prompt, run_requests
from jaxkv.core.metrics import percentile
from jaxkv.core.request import Request
from jaxkv.measurement import Report

if TYPE_CHECKING:
    from jaxkv.startup import StartedEngine  # brings jax

Samples = dict[tuple[int, str, str], list[float]]
"""By decode_steps, case and metric."""

PROMPT_LEN, NEWCOMER_OUTPUT = 32, 8


@dataclasses.dataclass(frozen=True)
class Load:
    """Rows that decode all the time, and requests that join them at random moments.

    Attributes:
      settings: values of decode_steps; 0 is adaptive.
    """

    rows: int = 8
    output_len: int = 96
    newcomers: int = 6
    runs: int = 3
    settings: tuple[int, ...] = (1, 2, 4, 8, 0)

    def quick(self) -> "Load":
        return Load(output_len=16, newcomers=2, runs=1, settings=(1, 0))

    def fitting(self, max_num_seqs: int) -> "Load":
        """With so few rows that a newcomer waits for none, even if all are there at once."""
        return dataclasses.replace(self, rows=max(1, min(self.rows, max_num_seqs - self.newcomers)))


def setting_name(decode_steps: int) -> str:
    return f"C={decode_steps}" if decode_steps else "C adaptive"


def measure_latency(report: Report, started: "StartedEngine", load: Load) -> None:
    """For one client, for `load.rows` clients, and for those with newcomers: tokens a second, time between two
    deliveries to a client (ITL; a delivery has up to C tokens), and the newcomers' time to the first token."""
    rng = np.random.default_rng(0)
    samples: Samples = {}

    def note(setting: int, case: str, metric: str, values: list[float]) -> None:
        samples.setdefault((setting, case, metric), []).extend(values)

    for run in range(load.runs):
        for setting in load.settings:
            for case, rows in (("1 client", 1), (f"{load.rows} clients", load.rows)):
                engine = fresh_engine(started, decode_steps=setting)
                seconds = run_requests(engine, _requests(rng, started, rows, load.output_len)).seconds
                note(setting, case, "throughput", [rows * load.output_len / seconds])
                note(setting, case, "itl", list(engine.stats.itl.latest))
            case = "newcomers"
            engine = fresh_engine(started, decode_steps=setting)
            arrivals = _arrivals(rng, engine.clock.now(), seconds, load.newcomers)
            run_requests(engine, _requests(rng, started, load.rows, load.output_len, arrivals))
            ttfts = [m.ttft for m in engine.stats.requests if m.request_id.startswith("new")]
            note(setting, case, "itl", list(engine.stats.itl.latest))
            note(setting, case, "ttft", ttfts)
            told = f"latency, run {run + 1}, {setting_name(setting)}: {load.rows} clients alone took {seconds:.1f} s"
            report.console.print(told, highlight=False)
    for (setting, case, metric), values in samples.items():
        details = {"engine": "jaxkv", "decode_steps": setting, "case": case}
        name = f"{setting_name(setting)}, {case}, {metric}"
        if metric == "throughput":
            report.add(name, values, unit="tokens/s", metric=metric, **details)
        else:
            percentiles = {"p50": percentile(values, 50), "p95": percentile(values, 95)}
            report.add(name, values, unit="s", metric=metric, **details, **percentiles)
    report.console.print(_table(load, samples))


def _table(load: Load, samples: Samples) -> Table:
    """A line a setting, a group of columns a case."""
    several = f"{load.rows} clients"
    table = Table(title="latency against throughput: milliseconds P50 / P95")
    columns = [("1 client", "throughput"), ("1 client", "itl"), (several, "throughput"), (several, "itl")]
    columns += [("newcomers", "itl"), ("newcomers", "ttft")]
    table.add_column("steps a call")
    for case, metric in columns:
        table.add_column(f"{case}: {'tokens/s' if metric == 'throughput' else metric.upper()}", justify="right")
    for setting in load.settings:
        cells = []
        for case, metric in columns:
            values = samples[setting, case, metric]
            if metric == "throughput":
                cells.append(f"{statistics.median(values):.1f}")
            else:
                cells.append(f"{_ms(percentile(values, 50))} / {_ms(percentile(values, 95))}")
        table.add_row(setting_name(setting), *cells)
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _requests(
    rng: np.random.Generator, started: "StartedEngine", rows: int, output_len: int, arrivals: Sequence[float] = ()
) -> list[Request]:
    vocab_size = started.model_config.vocab_size
    running = [greedy_request(f"row{i}", random_prompt(rng, PROMPT_LEN, vocab_size), output_len) for i in range(rows)]
    joining = [
        greedy_request(f"new{i}", random_prompt(rng, PROMPT_LEN, vocab_size), NEWCOMER_OUTPUT, arrival_time=when)
        for i, when in enumerate(arrivals)
    ]
    return running + joining


def _arrivals(rng: np.random.Generator, now: float, seconds: float, count: int) -> list[float]:
    """One at a random moment of each of `count` equal parts of the first 80 % of the time that the rows take alone."""
    part = 0.8 * seconds / count
    return [now + part * (i + rng.random()) for i in range(count)]
