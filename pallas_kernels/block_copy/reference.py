"""The oracle: one token of one copy after the other, always out of the blocks as they were."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.layer_kv import LayerKV


def block_copy(kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array) -> LayerKV:
    old = kv
    src, dst, num_tokens = jnp.asarray(src), jnp.asarray(dst), jnp.asarray(num_tokens)

    def copy_token(i: jax.Array, kv: LayerKV) -> LayerKV:
        copy, token = i // old.block_size, i % old.block_size

        def put(new: jax.Array | None, old: jax.Array | None, transposed: bool = False) -> jax.Array | None:
            if new is None:
                return None
            at = (slice(None), slice(None), token) if transposed else (slice(None), token)
            moved = jnp.where(token < num_tokens[copy], old[src[copy], *at], new[dst[copy], *at])
            return new.at[dst[copy], *at].set(moved)

        names = [field.name for field in dataclasses.fields(LayerKV) if field.name != "names"]
        moved = {n: put(getattr(kv, n), getattr(old, n), n == "v" and old.v_format.is_scaled) for n in names}
        return dataclasses.replace(kv, **moved)

    return jax.lax.fori_loop(0, src.shape[0] * old.block_size, copy_token, kv)
