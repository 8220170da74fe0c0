"""The oracle: one token after the other."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import quantize
from pallas_kernels.layer_kv import LayerKV


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    k, v, slots = jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots)

    def write_token(i: jax.Array, kv: LayerKV) -> LayerKV:
        block, offset = slots[i] // kv.block_size, slots[i] % kv.block_size
        dtype, scale_dtype = kv.format.dtype, kv.format.scale_dtype
        if not kv.format.is_quantized:
            return dataclasses.replace(
                kv,
                k=kv.k.at[block, :, offset, :].set(kv.hold(k[i], dtype)),
                v=kv.v.at[block, :, offset, :].set(kv.hold(v[i], dtype)),
            )
        (k_stored, k_scale), (v_stored, v_scale) = quantize(k[i]), quantize(v[i])
        return dataclasses.replace(
            kv,
            k=kv.k.at[block, :, offset, :].set(k_stored),
            v=kv.v.at[block, :, :, offset].set(v_stored),
            k_scale=kv.k_scale.at[block, :, offset].set(kv.hold(k_scale, scale_dtype)),
            v_scale=kv.v_scale.at[block, :, offset].set(kv.hold(v_scale, scale_dtype)),
        )

    return jax.lax.fori_loop(0, slots.shape[0], write_token, kv)
