"""The simulated engine that a command line asks for: pool, limits, scheduler and cost model."""

import dataclasses

from benchlib.model_shapes import find_shape
from jaxkv.capacity import plan_capacity
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.config import EngineConfig
from jaxkv.core.devices import DEVICES
from jaxkv.core.errors import ConfigError
from jaxkv.core.model_config import ModelConfig
from jaxkv.execution.kv_cache import kv_bytes_per_token
from jaxkv.settings import MAX_DECODE_STEPS, check_settings
from jaxkv.simulation.cost_model import CostModel
from jaxkv.simulation.fitted_cost import read_cost_model
from jaxkv.simulation.roofline import roofline
from jaxkv.simulation.trace_requests import check_block_size, has_tokens, longest, most_blocks
from jaxkv.simulation.traces import Trace

_MAX_PREFILL_SEQS = 16
DEVICE_POOL = "device"
"""As a capacity: what the engine's own plan leaves for K/V on the device."""


@dataclasses.dataclass(frozen=True)
class ReplaySetup:
    """Attributes:
    capacity_blocks: usable blocks of the pool; None: as many as nothing is ever evicted with.
    cost: how the cost model is told.
    """

    model: str
    limits: ExecutorLimits
    scheduler: SchedulerConfig
    cost_model: CostModel
    capacity_blocks: int | None
    cost: str


def set_up(
    config: EngineConfig,
    trace: Trace,
    *,
    device: str = "h200",
    cost_model: str | None = None,
    capacity_blocks: int | str | None = None,
    full_blocks_only: bool = True,
) -> ReplaySetup:
    """The engine of these flags, for this trace.

    What is unset is as on a GPU; but blocks are those of the trace (16 tokens where it has none), and requests may be as
    long as the trace's longest. Without token ids nothing is known of the heads of blocks, so only whole ones are shared.

    Args:
      device: a name of DEVICES, for the roofline and the pool.
      cost_model: file of a fitted one; None is the roofline of model and device.
      capacity_blocks: usable blocks, DEVICE_POOL, or None for an endless cache.

    Raises ConfigError.
    """
    check_settings(config)
    if device not in DEVICES:
        raise ConfigError(f"device is {device!r}; it must be one of {', '.join(DEVICES)}")
    name, model = find_shape(config)
    block_size = config.block_size or trace.block_size or 16
    check_block_size(trace, block_size)
    max_num_seqs = config.max_num_seqs or 256
    pool = _pool(config, model, device, block_size, capacity_blocks)
    limits = ExecutorLimits(
        num_blocks=(most_blocks(trace, block_size, full_blocks_only) if pool is None else pool) + 1,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(8192, max_num_seqs),
        max_prefill_seqs=min(max_num_seqs, _MAX_PREFILL_SEQS),
        max_model_len=config.max_model_len or longest(trace, block_size, full_blocks_only),
        max_decode_steps=MAX_DECODE_STEPS,
    )
    scheduler = SchedulerConfig(
        policy=config.scheduling_policy,
        decode_steps=config.decode_steps,
        enable_prefix_caching=config.enable_prefix_caching,
        share_partial_blocks=config.share_partial_blocks and has_tokens(trace),
        eviction_policy=config.eviction_policy,
        eviction_lookahead=config.eviction_lookahead,
        ghost_blocks=config.ghost_blocks,
        seed=config.seed,
        unseen_tokens=True,
    )
    scheduler.check(limits)
    if cost_model is not None:
        fitted = read_cost_model(cost_model)
        fitted.check(limits)
        return ReplaySetup(name, limits, scheduler, fitted, pool, f"measured, {cost_model}")
    priced = roofline(
        model,
        DEVICES[device],
        kv_bytes=kv_bytes_per_token(model, _kv_cache_dtype(config)),
        weight_itemsize=4 if config.dtype == "float32" else 2,
    )
    return ReplaySetup(name, limits, scheduler, priced, pool, f"roofline, {name} on {device}")


def _kv_cache_dtype(config: EngineConfig) -> str:
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _pool(
    config: EngineConfig, model: ModelConfig, device: str, block_size: int, capacity_blocks: int | str | None
) -> int | None:
    if capacity_blocks is None:
        return None
    if capacity_blocks == DEVICE_POOL:
        # In the engine's own blocks: those of a trace may be larger than any kernel's.
        plan = plan_capacity(dataclasses.replace(config, block_size=None, max_model_len=None), model, DEVICES[device])
        capacity_blocks = plan.memory.num_tokens // block_size
    if capacity_blocks < 1:
        raise ConfigError(f"capacity_blocks is {capacity_blocks}; it must be at least 1, or unset for an endless cache")
    return capacity_blocks
