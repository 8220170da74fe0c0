"""Copy the head of blocks: copy-on-write of a partly matched prefix."""

import jax
import jax.numpy as jnp

from pallas_kernels.layer_kv import LayerKV


def block_copy(kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array) -> LayerKV:
    """Replace the first `num_tokens[i]` tokens of block `dst[i]` by those of block `src[i]`.

    Args:
      src, dst, num_tokens: i32[X]; all reads happen before all writes. Padding is (0, 0, 0). `dst` entries are distinct
        but for padding.
    """

    def copy(blocks: jax.Array) -> jax.Array:
        head = jnp.arange(blocks.shape[2])[None, :] < num_tokens[:, None]  # [X, P]
        mixed = jnp.where(head[:, None, :, None], blocks[src], blocks[dst])
        return blocks.at[dst].set(mixed, mode="promise_in_bounds")

    return LayerKV(k=copy(kv.k), v=copy(kv.v))
