"""block_copy for any device: gather both blocks, mix, scatter."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layer_kv import LayerKV


def block_copy(kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array) -> LayerKV:
    head = jnp.arange(kv.block_size)[None, :] < num_tokens[:, None]  # [X, P]

    def copy(blocks: jax.Array, token_axis: int) -> jax.Array:
        shape = [1] * blocks.ndim
        shape[0], shape[token_axis] = head.shape
        mixed = jnp.where(head.reshape(shape), blocks[src], blocks[dst])
        return blocks.at[dst].set(mixed, mode="promise_in_bounds")

    values = copy(kv.v, 3 if kv.v_format.is_scaled else 2)
    others = jax.tree.map(lambda blocks: copy(blocks, 2), dataclasses.replace(kv, v=None))
    return dataclasses.replace(others, v=values)
