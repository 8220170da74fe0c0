"""The roofline card and the tables of measured kernels, for people."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from benchlib.roofline import Point, Rates

if TYPE_CHECKING:
    from benchlib.kernel_points import Measured  # brings jax


def card(points: Mapping[str, Sequence[Point]], rates: Rates, device: str) -> Table:
    """What each point must move and compute, and the times that follow."""
    ceilings = f"copy {rates.copy / 1e12:.2f} TB/s, matmul {rates.matmul / 1e12:.0f} TFLOP/s"
    table = Table(title=f"roofline card: {device}: {ceilings}")
    for column in ("kernel", "point", "MB", "GFLOP", "FLOP/B", "bound", "floor us", "predicted us"):
        table.add_column(column, justify="left" if column in ("kernel", "point", "bound") else "right")
    for section, chosen in points.items():
        for point in chosen:
            work = point.work
            by_memory = work.num_bytes / rates.copy >= work.flops / rates.matmul
            numbers = (f"{work.num_bytes / 1e6:,.1f}", f"{work.flops / 1e9:,.1f}", f"{work.intensity:,.1f}")
            times = (f"{1e6 * work.floor(rates):,.1f}", f"{1e6 * point.predict(rates):,.1f}")
            table.add_row(section, str(point), *numbers, "memory" if by_memory else "products", *times)
    return table


def measured_table(section: str, rows: Sequence[tuple[Point, "Measured"]], rates: Rates) -> Table:
    """One line a contender."""
    table = Table(title=section)
    for column in ("point", "engine", "us", "floor us", "predicted us", "GB/s", "% of copy", "TFLOP/s", "error"):
        table.add_column(column, justify="left" if column in ("point", "engine") else "right")
    for point, measured in rows:
        work = point.work
        for i, (engine, seconds) in enumerate(measured.seconds.items()):
            middle = statistics.median(seconds)
            bandwidth = work.num_bytes / middle
            table.add_row(
                str(point) if i == 0 else "",
                engine,
                f"{1e6 * middle:,.1f}",
                f"{1e6 * work.floor(rates):,.1f}",
                f"{1e6 * point.predict(rates):,.1f}" if i == 0 else "",
                f"{bandwidth / 1e9:,.0f}",
                f"{100 * bandwidth / rates.copy:.1f}",
                f"{work.flops / middle / 1e12:,.1f}",
                f"{measured.error:.1e}" if i == 0 and measured.error is not None else "",
            )
        for engine, reason in measured.absent.items():
            table.add_row("", engine, reason, *[""] * 6)
    return table
