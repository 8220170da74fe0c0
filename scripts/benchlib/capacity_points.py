"""Plans of many models, devices and settings: each the same flags but for one setting."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxkv.capacity import Capacity, Temporaries, plan_capacity, shard
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device


class Point(NamedTuple):
    """A model on a device, and the one setting that is not as the flags say: a field of EngineConfig, or "shards"."""

    model: str
    device: str
    swept: str | None = None
    value: str | int | float | None = None

    @property
    def name(self) -> str:
        return f"{self.model} on {self.device}" + (f", {self.swept} {self.value}" if self.swept else "")


@dataclasses.dataclass
class Planner:
    """Plans points, each once.

    Attributes:
      shards: devices that share the model.
      available: bytes free on a CPU, which has no share; by device.
      compiler: what tells a device's temporaries; None: their lower bound.
      refused: what the engine would refuse, and how.
    """

    config: EngineConfig
    models: dict[str, ModelConfig]
    devices: dict[str, Device]
    shards: int = 1
    available: dict[str, int] = dataclasses.field(default_factory=dict)
    compiler: Callable[[Device], Temporaries] | None = None
    refused: dict[Point, ConfigError] = dataclasses.field(default_factory=dict)
    _planned: dict[Point, Capacity | None] = dataclasses.field(default_factory=dict)

    def capacity(self, point: Point) -> Capacity | None:
        """None: see `refused`."""
        if point not in self._planned:
            try:
                self._planned[point] = self._plan(point)
            except ConfigError as error:
                self._planned[point], self.refused[point] = None, error
        return self._planned[point]

    def shards_of(self, point: Point) -> int:
        return point.value if point.swept == "shards" else self.shards

    def _plan(self, point: Point) -> Capacity:
        changed = {} if point.swept in (None, "shards") else {point.swept: point.value}
        device = self.devices[point.device]
        return plan_capacity(
            dataclasses.replace(self.config, model=point.model, **changed),
            shard(self.models[point.model], self.shards_of(point)),
            device,
            available=self.available.get(point.device),
            temporaries=self.compiler(device) if self.compiler else None,
        )
