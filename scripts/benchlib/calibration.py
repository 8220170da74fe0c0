"""Measures an executor's calls over a small grid of shapes, and fits a cost model to them.

The calls are made by hand (`StepProbe`), each bucket at two contexts and decode steps at two numbers a call: so many that
every coefficient of `FittedCostModel` can be told from the others. Points are weighted by their own time: what is fitted
is the relative error.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from benchlib.step_probe import StepProbe
from jaxkv.control.executor import Executor
from jaxkv.core.errors import ConfigError
from jaxkv.core.plan import PlanShape
from jaxkv.simulation.fitted_cost import FittedCostModel


class Point(NamedTuple):
    """A call of this shape, and what it took: the median over all rounds, and the extremes."""

    shape: PlanShape
    seconds: float
    least: float
    most: float


@dataclasses.dataclass
class Grid:
    """What is measured: every bucket at each context, decode with each number of steps a call."""

    prefill_buckets: Sequence[int]
    decode_buckets: Sequence[int]
    contexts: Sequence[int] = (0, 768)
    steps: Sequence[int] = (1, 4)


class Calibration:
    """Rounds over a grid; `run_round` may be called between other work, so that no point falls into one noisy minute."""

    def __init__(self, executor: Executor, grid: Grid, repeats: int = 2):
        """Raises ConfigError where the pool or max_model_len leaves a bucket without its two points."""
        self._executor, self._repeats = executor, repeats
        self._rounds: list[dict[PlanShape, list[float]]] = []
        self._grid = grid
        longest = executor.limits.max_model_len
        probe = StepProbe(executor)
        self._calls: list[tuple[PlanShape, Callable[[StepProbe], list[float]]]] = []
        for tokens in grid.prefill_buckets:
            for context in grid.contexts:
                context = min(context, longest - tokens - 1)
                if not probe.holds(1, context + tokens + 1):
                    raise ConfigError(f"a prefill of {tokens} tokens does not fit: raise max_model_len or the KV pool")
                self._calls.append(_prefill(tokens, context, repeats))
        for rows in grid.decode_buckets:
            for context in grid.contexts:
                for steps in grid.steps:
                    seq_len = context + 1 + steps * (repeats + 1)
                    context = max(1, context - max(0, seq_len - longest))
                    while context > 1 and not probe.holds(rows, context + 1 + steps * (repeats + 1)):
                        context //= 2
                    if not probe.holds(rows, context + 1 + steps * (repeats + 1)):
                        raise ConfigError(f"{rows} rows do not fit the KV pool: raise kv_cache_memory_bytes")
                    self._calls.append(_decode(rows, context, steps, repeats))

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def run_round(self, on_measured: Callable[[], None] = lambda: None) -> None:
        probe = StepProbe(self._executor)
        samples: dict[PlanShape, list[float]] = {}
        for shape, measure in self._calls:
            samples.setdefault(shape, []).extend(measure(probe))
            on_measured()
        self._rounds.append(samples)

    def points(self, rounds: slice = slice(None)) -> list[Point]:
        """Of these rounds."""
        merged: dict[PlanShape, list[float]] = {}
        for samples in self._rounds[rounds]:
            for shape, seconds in samples.items():
                merged.setdefault(shape, []).extend(seconds)
        return [
            Point(shape, statistics.median(seconds), min(seconds), max(seconds)) for shape, seconds in merged.items()
        ]

    def fit(
        self, rounds: slice = slice(None), about: dict[str, Any] | None = None
    ) -> tuple[FittedCostModel, float, float]:
        """The model of these rounds, and the mean and the largest relative error over the points."""
        return fit(self.points(rounds), self._grid.prefill_buckets, self._grid.decode_buckets, about or {})


def fit(
    points: Sequence[Point], prefill_buckets: Sequence[int], decode_buckets: Sequence[int], about: dict[str, Any]
) -> tuple[FittedCostModel, float, float]:
    """Least squares of the relative error; no coefficient is negative (Lawson and Hanson's NNLS, by scipy)."""
    columns = 3 + len(prefill_buckets) + len(decode_buckets)  # a call, a pair, a KV token, then the buckets
    design = np.zeros((len(points), columns))
    for row, (shape, *_) in zip(design, points):
        row[0] = 1
        if shape.prefill_tokens:
            row[1] = shape.prefill_pairs
            row[3 + _bucket(prefill_buckets, shape.prefill_tokens)] = 1
        if shape.num_steps:
            kv_tokens = shape.decode_kv_tokens + shape.decode_rows * (shape.num_steps - 1) / 2
            row[2] = shape.num_steps * kv_tokens
            row[3 + len(prefill_buckets) + _bucket(decode_buckets, shape.decode_rows)] = shape.num_steps
    seconds = np.array([point.seconds for point in points])
    weighted = design / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(weighted / scale, np.ones(len(points)))
    values = (solution / scale).tolist()
    first = 3 + len(prefill_buckets)
    # A larger bucket takes no less: noise must not say otherwise.
    model = FittedCostModel(
        call_seconds=values[0],
        prefill_seconds=_rising(prefill_buckets, values[3:first]),
        pair_seconds=values[1],
        decode_seconds=_rising(decode_buckets, values[first:]),
        kv_token_seconds=values[2],
        about=about,
    )
    errors = [abs(model.seconds(point.shape) / point.seconds - 1) for point in points]
    return model, statistics.fmean(errors), max(errors)


def _rising(buckets: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[int, float], ...]:
    highest = np.maximum.accumulate(seconds).tolist()
    return tuple(zip(map(int, buckets), highest, strict=True))


def _bucket(buckets: Sequence[int], size: int) -> int:
    return next(place for place, bucket in enumerate(buckets) if bucket >= size)


def _prefill(tokens: int, context: int, repeats: int):
    shape = PlanShape(tokens, context, 0, 0, 0, prefill_pairs=tokens * context + tokens * (tokens + 1) // 2)
    return shape, lambda probe: probe.prefill_seconds(tokens=tokens, context_len=context, repeats=repeats)


def _decode(rows: int, context: int, steps: int, repeats: int):
    # A row's first call is not counted; the middle one of the others stands for all.
    kv_tokens = rows * round(context + 1 + steps * (1 + (repeats - 1) / 2))
    shape = PlanShape(0, 0, rows, kv_tokens, steps)
    return shape, lambda probe: probe.decode_seconds(rows=rows, context_len=context, num_steps=steps, repeats=repeats)
