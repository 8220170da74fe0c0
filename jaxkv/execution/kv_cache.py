"""KVCache: all layers' blocks as one value that goes through pure functions, donated, and comes back."""

import dataclasses

import jax

from jaxkv.core.model_config import ModelConfig
from pallas_kernels.kv_format import bytes_per_token
from pallas_kernels.layer_kv import LayerKV, empty_layer_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    layers: tuple[LayerKV, ...]  # L layers, the same block ids in each


def empty_cache(config: ModelConfig, *, num_blocks: int, block_size: int, dtype: str, as_bits: bool = False) -> KVCache:
    """`num_blocks` counts the null block. `as_bits`: see empty_layer_kv."""

    def layer() -> LayerKV:
        return empty_layer_kv(num_blocks, config.num_kv_heads, block_size, config.head_dim, dtype, as_bits=as_bits)

    return KVCache(tuple(layer() for _ in range(config.num_layers)))


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Stored bytes of one token's keys and values in all layers, scales included."""
    return config.num_layers * bytes_per_token(dtype, config.num_kv_heads, config.head_dim)
