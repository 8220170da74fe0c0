"""What the engine's plan says of capacity, for the rows that follow from it: B2 to B6, parts of A4 and A14."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxkv.capacity import Capacity, plan_capacity
from jaxkv.control.block_manager import BlockManager
from jaxkv.core.config import EngineConfig
from jaxkv.core.model_config import ModelConfig
from jaxkv.device import DEVICES
from jaxkv.execution.kv_cache import empty_cache, kv_bytes_per_token
from jaxkv.execution.memory import GiB, MemoryPlan
from pallas_kernels.kv_format import FORMATS

LENGTH = 2048
OUTSIDE = (GiB // 2, GiB)
"""Least and most memory that is not the allocator's to share out: CUDA's context, the kernels' code and libraries'.
Assumed, from reports of 0.4 to 0.8 GiB."""


def measure(mha: ModelConfig, gqa: ModelConfig) -> dict[str, dict[str, Any]]:
    """Values by row. `mha`: Llama-2-7B, with as many KV heads as heads; `gqa`: Llama-3-8B, with a quarter of them."""
    at_90 = _plan(mha, "a100-80g", 0.9).memory
    shares = (0.90, 0.95, 0.98)
    lengths = random.Random(0)  # a seed of its own, so that the figure is the same every time
    request = LENGTH * kv_bytes_per_token(mha, "float16")
    return {
        "B2": {
            "allocated": _allocated_bytes(mha),
            "formula": 2 * mha.num_layers * mha.num_heads * mha.head_dim * LENGTH * 2,
            "gqa_stored": kv_bytes_per_token(gqa, "float16"),
            "gqa_formula": 2 * gqa.num_layers * gqa.num_heads * gqa.head_dim * 2,
        },
        "B3": {
            "request_bytes": request,
            "whole": num_that_fit(at_90, _endlessly(LENGTH)),
            "real": num_that_fit(at_90, iter(lambda: lengths.randint(1, LENGTH), None)),
        },
        "B4": {
            "request_bytes": request,
            "shares": list(shares),
            "fit": [int(_plan(mha, "a100-80g", share).memory.concurrency(LENGTH)) for share in shares],
        },
        "B5": {"available": at_90.available, "kv": at_90.kv_bytes, "weights": at_90.needs.weights},
        "B6": {
            "largest_safe": {name: _largest_safe(name) for name in ("a100-80g", "a100-40g", "24g")},
            "pools": [_plan(mha, "a100-40g", share).memory.kv_bytes for share in (0.85, 0.90)],
        },
        "A4": {
            "tokens": {
                name: _plan(mha, "a100-40g", 0.9, name).memory.num_tokens for name in ("float16", "int8", "fp8_e4m3")
            },
            "bytes_per_token": {name: kv_bytes_per_token(mha, name) for name in FORMATS},
        },
        "A14": {
            "max_model_len": at_90.max_model_len,
            "told": int(at_90.max_concurrency),
            "fit": num_that_fit(at_90, _endlessly(at_90.max_model_len)),
            "fit_half": num_that_fit(at_90, _endlessly(at_90.max_model_len // 2)),
        },
    }


def num_that_fit(memory: MemoryPlan, lengths: Iterable[int]) -> int:
    """Requests of these lengths, sharing nothing, that the engine's block manager takes before one does not fit."""
    manager = BlockManager(memory.num_blocks + 1, memory.block_size)
    count = 0
    for length in lengths:
        blocks = -(-length // memory.block_size)
        if blocks > manager.num_free:
            break
        manager.allocate(blocks)
        count += 1
    return count


def _plan(model: ModelConfig, device: str, utilization: float, kv_cache_dtype: str = "auto") -> Capacity:
    config = EngineConfig(dtype="float16", gpu_memory_utilization=utilization, kv_cache_dtype=kv_cache_dtype)
    if kv_cache_dtype.startswith("fp8"):  # which the GPU kernels do not read; its bytes are the same for all who do
        config = EngineConfig(
            dtype="float16",
            gpu_memory_utilization=utilization,
            kv_cache_dtype=kv_cache_dtype,
            attention_implementation="xla",
        )
    return plan_capacity(config, model, DEVICES[device])


def _allocated_bytes(mha: ModelConfig) -> int:
    """Of the arrays of an engine's cache for one request."""
    cache = jax.eval_shape(lambda: empty_cache(mha, num_blocks=LENGTH // 16, block_size=16, dtype="float16"))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def _largest_safe(device: str) -> list[float]:
    """Shares that leave CUDA the most and the least of OUTSIDE."""
    most, least = (int(100 * (1 - outside / DEVICES[device].memory)) / 100 for outside in OUTSIDE)
    return [least, most]


def _endlessly(length: int) -> Iterator[int]:
    while True:
        yield length
