"""kv_write for any device: scatters of [K, D] rows."""

import jax

from pallas_kernels.kv_format import KVFormat, Stored, encode
from pallas_kernels.layer_kv import LayerKV, held


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerKV:
    block, offset = slots // kv.block_size, slots % kv.block_size

    def put(pools: Stored, tokens: jax.Array, kind: KVFormat, *, transposed: bool) -> Stored:
        def put_one(pool: jax.Array | None, new: jax.Array | None, *place) -> jax.Array | None:
            return None if pool is None else pool.at[block, :, *place].set(held(new, pool), mode="promise_in_bounds")

        new = encode(tokens, kind)
        place = (slice(None), offset) if transposed else (offset,)
        return Stored(
            put_one(pools.numbers, new.numbers, *place),
            put_one(pools.scale, new.scale, offset),
            put_one(pools.zero, new.zero, offset),
        )

    k_new = put(Stored(kv.k, kv.k_scale, kv.k_zero), k, kv.k_format, transposed=False)
    v_new = put(Stored(kv.v, kv.v_scale, kv.v_zero), v, kv.v_format, transposed=kv.v_format.is_scaled)
    return LayerKV(k_new.numbers, v_new.numbers, k_new.scale, v_new.scale, k_new.zero, v_new.zero, names=kv.names)
