"""What programs show on a terminal: progress bars and log lines, both on stderr so that stdout stays data."""

import logging
import sys

from rich import progress as bars
from rich.console import Console


class ConsoleProgress:
    """`jaxkv.core.progress.Progress` as bars; without a terminal, a line a stage. A context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = bars.Progress(
            bars.TextColumn("{task.description:<24}"),
            bars.BarColumn(),
            bars.TextColumn("{task.fields[amount]:>20}"),
            bars.TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, bars.TaskID] = {}
        self._finished: set[str] = set()

    def __enter__(self) -> "ConsoleProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, stage: str, done: int, total: int, unit: str = "") -> None:
        amount = f"{format_amount(done, unit)} / {format_amount(total, unit)}"
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, amount=amount)
        self._bars.update(self._tasks[stage], completed=done, total=total, amount=amount)
        if done >= total and stage not in self._finished:
            self._finished.add(stage)
            if self._bars.disable:
                self._console.print(f"{stage}: {format_amount(total, unit)} done", markup=False, highlight=False)


def format_amount(count: int, unit: str) -> str:
    """Bytes in binary units, anything else as it is."""
    if unit != "B":
        return f"{count} {unit}".strip()
    value = float(count)
    for name in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {name}" if name == "B" else f"{value:.1f} {name}"
        value /= 1024
    return f"{value:.2f} GiB"


def set_up_logging(level: str = "info") -> None:
    """Log lines of this project from `level` on, of libraries from warnings on."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for name in ("jaxkv", "pallas_kernels"):
        logging.getLogger(name).setLevel(level.upper())
