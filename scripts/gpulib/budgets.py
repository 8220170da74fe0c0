"""Ceilings for the kernels' figures, each with its reason: pallas_kernels/gpu_budgets.toml.

One table a kernel config (see kernel_configs). A number is a ceiling for the figure of that name (see inventory.FIGURES);
`uses` names figures that must not be zero; a table named after a target replaces entries for that target. Spills are
forbidden without being mentioned. Ceilings may fall, never rise.
"""

import pathlib
import tomllib

from gpulib.inventory import FIGURES
from gpulib.targets import TARGETS

PATH = pathlib.Path(__file__).parents[2] / "pallas_kernels" / "gpu_budgets.toml"


def load_budgets(path: pathlib.Path = PATH) -> dict[str, dict]:
    """Budgets by kernel config; ValueError where one has no reason or names what there is not."""
    budgets = tomllib.loads(path.read_text())
    for name, budget in budgets.items():
        if not budget.get("reason"):
            raise ValueError(f"{path.name}: {name} has no reason")
        for table in (budget, *(budget[target] for target in TARGETS if target in budget)):
            figures = {*table, *table.get("uses", ())} - {"reason", "uses"} - ({*TARGETS} if table is budget else set())
            if unknown := figures - {*FIGURES}:
                raise ValueError(
                    f"{path.name}: {name} names {', '.join(sorted(unknown))}; there are: {', '.join(FIGURES)}"
                )
    return budgets


def violations(figures: dict[str, float], budget: dict, target: str) -> list[str]:
    """What of a kernel's inventory is over its budget for a target, in words; empty when all is within."""
    limits = {"spilled": 0} | {name: value for name, value in budget.items() if name not in TARGETS}
    limits |= budget.get(target, {})
    uses, _ = limits.pop("uses", ()), limits.pop("reason")
    over = [
        f"{name} is {figures[name]:.4g}, over {ceiling:.4g}"
        for name, ceiling in limits.items()
        if figures[name] > ceiling
    ]
    return over + [f"{name} is 0" for name in uses if not figures[name]]
