"""KVCache: all layers' blocks as one value that goes through pure functions, donated, and comes back."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.core.model_config import ModelConfig
from pallas_kernels.layer_kv import LayerKV, empty_layer_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    layers: tuple[LayerKV, ...]  # L layers, the same block ids in each


def empty_cache(config: ModelConfig, *, num_blocks: int, block_size: int, dtype: str) -> KVCache:
    """`num_blocks` counts the null block."""

    def layer() -> LayerKV:
        return empty_layer_kv(num_blocks, config.num_kv_heads, block_size, config.head_dim, jnp.dtype(dtype))

    return KVCache(tuple(layer() for _ in range(config.num_layers)))


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Stored bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
