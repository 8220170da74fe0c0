"""kv_write for any device: scatters of [K, D] rows."""

import jax

from pallas_kernels.kv_format import quantize
from pallas_kernels.layer_kv import LayerKV


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    block, offset = slots // kv.block_size, slots % kv.block_size

    def put(stored: jax.Array, tokens: jax.Array) -> jax.Array:
        return stored.at[block, :, offset].set(tokens.astype(stored.dtype), mode="promise_in_bounds")

    if not kv.format.is_quantized:
        return LayerKV(put(kv.k, k), put(kv.v, v))
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    transposed = kv.v.at[block, :, :, offset].set(v, mode="promise_in_bounds")
    return LayerKV(put(kv.k, k), transposed, put(kv.k_scale, k_scale), put(kv.v_scale, v_scale))
