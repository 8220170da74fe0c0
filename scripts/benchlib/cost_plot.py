"""The measured costs and their fits as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend is chosen first)


class Curve(NamedTuple):
    """Seconds at rising values of x: measured, and as the fit has them."""

    x: Sequence[float]
    seconds: Sequence[float]
    fitted: Sequence[float]


class Panel(NamedTuple):
    title: str
    xlabel: str
    curves: Mapping[str, Curve]


def plot_costs(panels: Sequence[Panel], path: Path) -> None:
    """One panel beside the other: points measured, lines fitted, milliseconds upwards."""
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        for label, curve in panel.curves.items():
            (points,) = axis.plot(curve.x, [1e3 * s for s in curve.seconds], "o", label=label)
            axis.plot(curve.x, [1e3 * s for s in curve.fitted], "-", color=points.get_color(), linewidth=1)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel="ms", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
