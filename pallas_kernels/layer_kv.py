"""LayerKV: the stored keys and values of one layer."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's KV blocks. Head-major inside a block, so that a (block, head) pair is one contiguous tile and tensor
    parallelism shards axis 1. Block 0 is the null block: writes of padding land there, and nobody reads it."""

    k: jax.Array  # [N, K, P, D]
    v: jax.Array  # [N, K, P, D]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]


def empty_layer_kv(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype) -> LayerKV:
    """Blocks full of zeros; `num_blocks` counts the null block."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerKV(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
