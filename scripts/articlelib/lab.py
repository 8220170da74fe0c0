"""What the measurements of one run share."""

import dataclasses
from collections.abc import Callable
from typing import Any

from articlelib.worlds import RealWorld, SimulatedWorld


@dataclasses.dataclass
class Lab:
    """Attributes:
    basics, serving: 7B on an A100 with 80 GB (the article on the basics), with 40 GB (the one on hit rates), simulated.
    engine: the model that is asked for, on this machine. layers: a few random layers of its shape, for what needs an
      engine for each of several settings. needles: the model once more, with few rows. None in simulation.
    sizes: how much to ask of real engines. runs: how often, where time counts. on_cpu: whether they run on one.
    model: name of `engine`'s model, where it is a trained one; None otherwise.
    tick: tells that a part is done.
    kept: what one experiment measures and another needs too.
    """

    basics: SimulatedWorld
    serving: SimulatedWorld
    engine: RealWorld | None = None
    layers: RealWorld | None = None
    needles: RealWorld | None = None
    model: str | None = None
    sizes: "Sizes | None" = None
    runs: int = 3
    quick: bool = False
    on_cpu: bool = True
    tick: Callable[[], None] = lambda: None
    kept: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of what is asked of a real engine.

    Attributes:
      generated: tokens after which generations with and without a cache are compared. uncached_step: without a cache every
        so many-th token is computed, and the time between is interpolated.
      concurrent, shared_len, own_len, output_len: the prefix experiment.
      block_sizes: those that run here.
    """

    generated: tuple[int, ...]
    uncached_step: int
    prompt_len: int
    concurrent: int
    shared_len: int
    own_len: int
    output_len: int
    block_sizes: tuple[int, ...]


FULL = Sizes((128, 512, 2048), 16, 64, 12, 500, 32, 64, (16, 32, 64, 128))
"""On a GPU, whose kernels start at blocks of 16."""

SMALL = Sizes((16, 64, 256), 16, 32, 12, 500, 32, 8, (8, 16, 32, 64))
"""On a CPU."""

QUICK = Sizes((4, 8, 24), 2, 16, 4, 96, 16, 4, (8, 16, 64))
