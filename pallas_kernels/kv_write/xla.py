"""kv_write for any device: scatters of [K, D] rows."""

import dataclasses

import jax

from pallas_kernels.kv_format import quantize
from pallas_kernels.layer_kv import LayerKV


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    block, offset = slots // kv.block_size, slots % kv.block_size
    dtype, scale_dtype = kv.format.dtype, kv.format.scale_dtype

    def put(stored: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
        return stored.at[block, :, offset].set(kv.hold(tokens, dtype), mode="promise_in_bounds")

    if not kv.format.is_quantized:
        return dataclasses.replace(kv, k=put(kv.k, k, dtype), v=put(kv.v, v, dtype))
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    return dataclasses.replace(
        kv,
        k=put(kv.k, k, dtype),
        v=kv.v.at[block, :, :, offset].set(v, mode="promise_in_bounds"),
        k_scale=put(kv.k_scale, k_scale, scale_dtype),
        v_scale=put(kv.v_scale, v_scale, scale_dtype),
    )
