"""How the cost of a step grows with rows and context: measured, fitted, plotted."""

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchlib.cost_fit import Fit, fit_linear
from benchlib.step_probe import StepProbe
from jaxkv.control.executor import Executor
from jaxkv.core.errors import ConfigError
from jaxkv.measurement import Report


@dataclasses.dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
      rounds: times that the whole grid is gone through, so that a noisy minute does not fall on one point.
      repeats: calls at each point and round.
    """

    rows: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    prefill_tokens: tuple[int, ...] = (64, 128, 256, 512)
    prefill_contexts: tuple[int, ...] = (0, 1024, 3072)
    rounds: int = 3
    repeats: int = 3

    def quick(self) -> "Grid":
        return Grid((1, 4), (32, 128, 256), (32, 64), (0, 128), rounds=2, repeats=2)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is measured."""
        decode = max(self.contexts) + self.repeats + 2
        return max(decode, max(self.prefill_contexts) + max(self.prefill_tokens) + 1)


def measure_costs(report: Report, executor: Executor, grid: Grid, plot_out: str) -> None:
    """Adds every point, the two fits, and the picture's name if one was drawn.

    Raises:
      ConfigError: so many points do not fit the pool or the budget that nothing can be fitted.
    """
    probe = StepProbe(executor)
    decode = [(rows, context) for rows in grid.rows for context in grid.contexts]
    prefill = [(tokens, context) for tokens in grid.prefill_tokens for context in grid.prefill_contexts]
    decode_seconds = _points(
        report,
        "decode step, {} rows, context {}",
        [point for point in decode if probe.holds(point[0], point[1] + grid.repeats + 2)],
        decode,
        lambda rows, context: probe.decode_seconds(rows=rows, context_len=context, repeats=grid.repeats),
        grid.rounds,
    )
    budget = executor.limits.max_num_batched_tokens
    prefill_seconds = _points(
        report,
        "prefill, {} tokens, context {}",
        [point for point in prefill if point[0] <= budget and probe.holds(1, sum(point) + 1)],
        prefill,
        lambda tokens, context: probe.prefill_seconds(tokens=tokens, context_len=context, repeats=grid.repeats),
        grid.rounds,
    )
    decode_fit = _fit(report, "decode step", decode_columns, decode_seconds)
    prefill_fit = _fit(report, "prefill", prefill_columns, prefill_seconds)
    if not plot_out:
        return
    if importlib.util.find_spec("matplotlib") is None:
        report.console.print("matplotlib is not installed (pip install -e '.[plot]'): no plot")
        return
    _plot(decode_seconds, decode_fit, prefill_seconds, prefill_fit, Path(plot_out))
    report.files.append(plot_out)


def decode_columns(rows: int, context: int) -> dict[str, float]:
    """What a decode step's cost is fitted to: rows, and the KV tokens that they attend to in all."""
    return {"rows": rows, "kv_tokens": rows * (context + 1)}


def prefill_columns(tokens: int, context: int) -> dict[str, float]:
    """Tokens, and pairs of a token and one that it attends to: each sees the context and what precedes it."""
    return {"tokens": tokens, "pairs": tokens * (context + (tokens + 1) / 2)}


Columns = Callable[[int, int], dict[str, float]]
Measured = dict[tuple[int, int], float]


def _points(
    report: Report,
    name: str,
    possible: list[tuple[int, int]],
    wanted: list[tuple[int, int]],
    measure: Callable[[int, int], list[float]],
    rounds: int,
) -> Measured:
    """Median seconds of each possible point; those that do not fit are told as skipped."""
    samples: dict[tuple[int, int], list[float]] = {point: [] for point in possible}
    for turn in range(rounds):
        for point in possible:
            samples[point] += measure(*point)
        told = f"{name.partition(',')[0]}: {len(possible)} points measured, round {turn + 1} of {rounds}"
        report.console.print(told, highlight=False)
    for point in wanted:
        label = name.format(*point)
        if point in samples:
            report.add(label, samples[point], unit="s", metric="step_time", engine="jaxkv", point=point)
        else:
            reason = "does not fit: raise kv_cache_memory_bytes, max_num_seqs, max_model_len or max_num_batched_tokens"
            report.skip(label, reason, engine="jaxkv", point=point)
    return {point: statistics.median(seconds) for point, seconds in samples.items()}


def _fit(report: Report, name: str, columns: Columns, measured: Measured) -> Fit:
    points = [columns(*point) for point in measured]
    try:
        fit = fit_linear({key: [p[key] for p in points] for key in columns(1, 1)}, list(measured.values()))
    except ValueError as error:
        raise ConfigError(f"the cost of a {name} cannot be fitted: {error}") from error
    details: dict[str, Any] = {
        "coefficients": fit.coefficients,
        "max_relative_error": fit.max_relative_error,
        "points": len(measured),
    }
    report.add(f"{name} fit", [fit.r2], unit="R^2", metric="r2", engine="jaxkv", **details)
    terms = " + ".join(
        f"{1e3 * value:.4g}" + ("" if key == "constant" else f" {key}") for key, value in fit.coefficients.items()
    )
    report.console.print(f"{name}: {terms} ms, R^2 {fit.r2:.3f}", highlight=False)
    return fit


def _plot(decode: Measured, decode_fit: Fit, prefill: Measured, prefill_fit: Fit, path: Path) -> None:
    from benchlib.cost_plot import Curve, Panel, plot_costs

    by_rows, by_context = {}, {}
    for rows in sorted({point[0] for point in decode}):
        contexts = sorted(context for r, context in decode if r == rows)
        by_rows[f"{rows} rows"] = Curve(
            contexts,
            [decode[rows, context] for context in contexts],
            [decode_fit.predict(**decode_columns(rows, context)) for context in contexts],
        )
    for context in sorted({point[1] for point in prefill}):
        tokens = sorted(t for t, c in prefill if c == context)
        by_context[f"context {context}"] = Curve(
            tokens,
            [prefill[t, context] for t in tokens],
            [prefill_fit.predict(**prefill_columns(t, context)) for t in tokens],
        )
    panels = [
        Panel("one decode step", "context, tokens a row", by_rows),
        Panel("one prefill call", "new tokens", by_context),
    ]
    plot_costs(panels, path)
