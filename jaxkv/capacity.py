"""What fits: the engine's own plan of its memory, for any device and before there are weights.

No arithmetic of its own: settings are resolved, and memory is planned, by what a starting engine calls.
"""

import dataclasses
from collections.abc import Callable

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import Device
from jaxkv.execution.memory import MemoryPlan, gpu_share
from jaxkv.execution.programs import Programs
from jaxkv.program_plan import make_programs, memory_needs, most_blocks, plan_blocks
from jaxkv.settings import check_settings, resolve_settings

Temporaries = Callable[[Programs], int]
"""Bytes of the biggest temporary of step functions that are not compiled yet."""


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What an engine would have.

    Attributes:
      config: with every None and "auto" resolved but those that follow from the memory.
      memory: what the engine tells at start; `memory.lines()` are its lines.
      capped: the kernels address no more blocks, so that memory stays free.
    """

    config: EngineConfig
    memory: MemoryPlan
    capped: bool

    def concurrency(self, num_tokens: int) -> float | None:
        """Requests of `num_tokens` tokens at once; None: longer than max_model_len."""
        return self.memory.concurrency(num_tokens) if num_tokens <= self.memory.max_model_len else None


def plan_capacity(
    config: EngineConfig,
    model: ModelConfig,
    device: Device,
    *,
    available: int | None = None,
    temporaries: Temporaries | None = None,
) -> Capacity:
    """What an engine with these settings would say at start on `device`.

    Args:
      available: bytes that the engine may use; None is gpu_memory_utilization of the device's memory.
      temporaries: asks a compiler; None takes the lower bound that the engine refuses hopeless settings with, so that
        the cache is at least as large as the engine's.

    Raises ConfigError as the engine does for what cannot work.
    """
    check_settings(config)
    config = resolve_settings(config, model, device)
    if available is None:
        available = gpu_share(device.memory, config.gpu_memory_utilization)
    needs = memory_needs(config, model)
    memory = plan_blocks(config, model, needs, device, available)
    if temporaries is not None:
        compiled = temporaries(make_programs(config, model, memory, device))
        needs = dataclasses.replace(needs, temporaries=compiled, compiled=True)
        memory = plan_blocks(config, model, needs, device, available)
    capped = config.num_gpu_blocks_override is None and memory.num_blocks + 1 == most_blocks(config, model)
    return Capacity(config, memory, capped)


def mean_waste(block_size: int) -> float:
    """Tokens of a request's last block that stay empty, on average over lengths that favour no remainder."""
    return (block_size - 1) / 2


def shard(model: ModelConfig, num_devices: int) -> ModelConfig:
    """What one of `num_devices` computes and keeps: its part of the heads, the KV heads and the MLP; embeddings, norms
    and head whole.

    Raises ConfigError where they cannot be dealt out evenly.
    """
    parts = ("num_heads", "num_kv_heads", "intermediate_size")
    if odd := [f"{name} {getattr(model, name)}" for name in parts if getattr(model, name) % num_devices]:
        raise ConfigError(f"{num_devices} devices cannot share the model: {', '.join(odd)} is no multiple of it")
    return dataclasses.replace(model, **{name: getattr(model, name) // num_devices for name in parts})
