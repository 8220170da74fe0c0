"""block_copy for any device: gather both blocks, mix, scatter."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layer_kv import LayerKV


def block_copy(kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array) -> LayerKV:
    head = jnp.arange(kv.block_size)[None, :] < num_tokens[:, None]  # [X, P]

    def copy(blocks: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
        if blocks is None:
            return None
        mixed = jnp.where(head.reshape(-1, *shape), blocks[src], blocks[dst])
        return blocks.at[dst].set(mixed, mode="promise_in_bounds")

    token = (1, kv.block_size, 1)
    value = (1, 1, kv.block_size) if kv.format.is_quantized else token
    return dataclasses.replace(
        kv,
        k=copy(kv.k, token),
        v=copy(kv.v, value),
        k_scale=copy(kv.k_scale, token[:2]),
        v_scale=copy(kv.v_scale, token[:2]),
    )
