"""LayerKV: the stored keys and values of one layer."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import FORMATS, KVFormat, Stored, decode, formats_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's KV blocks. Head-major inside a block, so that a (block, head) pair is one contiguous tile and tensor
    parallelism shards axis 1. Block 0 is the null block: writes of padding land there, and nobody reads it.

    Values with one scale a token and head stand transposed inside their block: 8-bit tensor-core operands cannot be
    transposed on the way from shared memory, and row-major ones cost 64 byte-wide loads a tile.

    Floats of 16 and 8 bits may be held as unsigned integers of the same bits. For XLA:CPU, which has no gather, scatter
    or slice of them and converts the whole pool to float32 instead: a decode step of the demo model in bfloat16 with
    1 GiB of blocks took 0.78 s.
    """

    k: jax.Array  # [N, K, P, D], int4 [N, K, P, D/2]
    v: jax.Array  # the same, or [N, K, D, P] where there is one scale a token
    k_scale: jax.Array | None = None  # bf16[N, K, P], of groups bf16[N, K, P, D/32]
    v_scale: jax.Array | None = None
    k_zero: jax.Array | None = None  # bf16[N, K, P, D/32] of groups
    v_zero: jax.Array | None = None
    names: tuple[str, str] | None = dataclasses.field(default=None, metadata={"static": True})
    """Of the formats of keys and values, where the dtypes do not tell."""

    @property
    def k_format(self) -> KVFormat:
        return FORMATS[self.names[0] if self.names else self.k.dtype.name]

    @property
    def v_format(self) -> KVFormat:
        return FORMATS[self.names[1] if self.names else self.v.dtype.name]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.k_format.is_grouped else 1)


def held(x: jax.Array, pool: jax.Array) -> jax.Array:
    """Stored numbers as this pool holds them: perhaps as their bits."""
    return x if x.dtype == pool.dtype else jax.lax.bitcast_convert_type(x, pool.dtype)


def empty_layer_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str, *, as_bits: bool = False
) -> LayerKV:
    """Blocks full of zeros; `num_blocks` counts the null block. `as_bits`: hold floats of 16 and 8 bits as their bits."""
    pool = (num_blocks, num_kv_heads, block_size)

    def zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
        dtype = jnp.dtype(dtype)
        is_short_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
        return jnp.zeros(shape, f"uint{8 * dtype.itemsize}" if as_bits and is_short_float else dtype)

    def side(stored: KVFormat, transposes: bool) -> Stored:
        numbers, scales = stored.shapes(head_dim)
        shape = (*pool[:2], *numbers, block_size) if transposes and stored.is_scaled else (*pool, *numbers)
        scale = zeros((*pool, *scales), stored.scale_dtype) if stored.is_quantized else None
        zero = zeros((*pool, *scales), stored.scale_dtype) if stored.is_grouped else None
        return Stored(zeros(shape, stored.dtype), scale, zero)

    k_format, v_format = formats_of(kv_format)
    k, v = side(k_format, transposes=False), side(v_format, transposes=True)
    layer = LayerKV(k.numbers, v.numbers, k.scale, v.scale, k.zero, v.zero, (k_format.name, v_format.name))
    told = (layer.k.dtype.name, layer.v.dtype.name)
    return dataclasses.replace(layer, names=None) if told == layer.names else layer


def gather_blocks(kv: LayerKV, blocks: jax.Array) -> LayerKV:
    """Blocks i32[...] as numbers: k, v [..., K, P, D], v with one scale a token [..., K, D, P], such scales [..., K, P].
    Groups come as real numbers, in float32, without scales."""

    def gather(pool: jax.Array | None, dtype: str | None) -> jax.Array | None:
        if pool is None:
            return None
        tokens = pool.at[blocks].get(mode="promise_in_bounds")
        return tokens if tokens.dtype == dtype else jax.lax.bitcast_convert_type(tokens, dtype)

    def side(numbers: jax.Array, scale: jax.Array | None, zero: jax.Array | None, kind: KVFormat) -> Stored:
        stored = Stored(gather(numbers, kind.dtype), gather(scale, kind.scale_dtype), gather(zero, kind.scale_dtype))
        return Stored(decode(stored, kind)) if kind.is_grouped else stored

    k = side(kv.k, kv.k_scale, kv.k_zero, kv.k_format)
    v = side(kv.v, kv.v_scale, kv.v_zero, kv.v_format)
    return LayerKV(k.numbers, v.numbers, k.scale, v.scale)


def gather_tokens(kv: LayerKV, blocks: jax.Array) -> LayerKV:
    """The tokens of blocks i32[..., B] one after the other: k, v [..., K, B*P, D], scales [..., K, B*P], as numbers."""
    stored = gather_blocks(kv, blocks)
    if kv.v_format.is_scaled:
        stored = dataclasses.replace(stored, v=stored.v.swapaxes(-1, -2))

    def side_by_side(tokens: jax.Array) -> jax.Array:
        axis = blocks.ndim - 1
        shape = blocks.shape[:-1] + (kv.num_kv_heads, blocks.shape[-1] * kv.block_size) + tokens.shape[axis + 3 :]
        return jnp.moveaxis(tokens, axis, axis + 1).reshape(shape)  # from [..., B, K, P, D]

    return jax.tree.map(side_by_side, stored)
