"""The oracle: one token after the other."""

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import quantize
from pallas_kernels.layer_kv import LayerKV


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    k, v, slots = jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots)

    def write_token(i: jax.Array, kv: LayerKV) -> LayerKV:
        block, offset = slots[i] // kv.block_size, slots[i] % kv.block_size
        if not kv.format.is_quantized:
            return LayerKV(
                kv.k.at[block, :, offset, :].set(k[i].astype(kv.k.dtype)),
                kv.v.at[block, :, offset, :].set(v[i].astype(kv.v.dtype)),
            )
        (k_stored, k_scale), (v_stored, v_scale) = quantize(k[i]), quantize(v[i])
        return LayerKV(
            kv.k.at[block, :, offset, :].set(k_stored),
            kv.v.at[block, :, :, offset].set(v_stored),
            kv.k_scale.at[block, :, offset].set(k_scale),
            kv.v_scale.at[block, :, offset].set(v_scale),
        )

    return jax.lax.fori_loop(0, slots.shape[0], write_token, kv)
