"""The oracle: one token after the other."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import encode
from pallas_kernels.layer_kv import LayerKV, held


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    k, v, slots = jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots)

    def write_token(i: jax.Array, kv: LayerKV) -> LayerKV:
        block, offset = slots[i] // kv.block_size, slots[i] % kv.block_size
        new = {}
        for side, tokens, kind in (("k", k, kv.k_format), ("v", v, kv.v_format)):
            is_transposed = side == "v" and kind.is_scaled
            for name, stored in zip((side, f"{side}_scale", f"{side}_zero"), encode(tokens[i], kind), strict=True):
                pool = getattr(kv, name)
                if pool is not None:
                    at = (slice(None), slice(None), offset) if name == side and is_transposed else (slice(None), offset)
                    new[name] = pool.at[block, *at].set(held(stored, pool))
        return dataclasses.replace(kv, **new)

    return jax.lax.fori_loop(0, slots.shape[0], write_token, kv)
