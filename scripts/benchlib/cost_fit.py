"""Least-squares fits of what a step costs."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Fit:
    """seconds = coefficients["constant"] + sum of coefficients[name] * value of the column of that name.

    Attributes:
      r2: share of the variance explained, 1 for a perfect fit.
      max_relative_error: of any point, relative to what was measured there.
    """

    coefficients: dict[str, float]
    r2: float
    max_relative_error: float

    def predict(self, **values: float) -> float:
        """Seconds at one point."""
        terms = (self.coefficients[name] * value for name, value in values.items())
        return self.coefficients["constant"] + sum(terms)


def fit_linear(columns: Mapping[str, Sequence[float]], seconds: Sequence[float]) -> Fit:
    """The fit over all points.

    Args:
      columns: for each quantity, its value at every point. seconds: what was measured there.

    Raises:
      ValueError: fewer points than coefficients, or columns that do not tell the quantities apart.
    """
    measured = np.asarray(seconds, np.float64)
    design = np.column_stack([np.ones_like(measured), *(np.asarray(c, np.float64) for c in columns.values())])
    # Columns of one size: kv_tokens in the ten thousands beside a constant of 1 would cost digits.
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1
    solution, _, rank, _ = np.linalg.lstsq(design / scale, measured, rcond=None)
    if rank < design.shape[1]:
        raise ValueError(
            f"{len(measured)} points do not determine the {design.shape[1]} coefficients of {', '.join(columns)}: "
            "vary each quantity on its own"
        )
    predicted = design @ (solution / scale)
    spread = np.square(measured - measured.mean()).sum()
    r2 = 1 - np.square(measured - predicted).sum() / spread if spread > 0 else 1.0
    names = ("constant", *columns)
    return Fit(
        {name: float(value) for name, value in zip(names, solution / scale, strict=True)},
        float(r2),
        float(np.max(np.abs(predicted - measured) / measured)),
    )
