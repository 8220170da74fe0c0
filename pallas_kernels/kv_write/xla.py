"""kv_write for any device: one scatter of [K, D] rows."""

import jax

from pallas_kernels.layer_kv import LayerKV


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    block, offset = slots // kv.block_size, slots % kv.block_size
    return LayerKV(
        k=kv.k.at[block, :, offset].set(k.astype(kv.k.dtype), mode="promise_in_bounds"),
        v=kv.v.at[block, :, offset].set(v.astype(kv.v.dtype), mode="promise_in_bounds"),
    )
