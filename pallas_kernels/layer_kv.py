"""LayerKV: the stored keys and values of one layer."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import FORMATS, KVFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's KV blocks. Head-major inside a block, so that a (block, head) pair is one contiguous tile and tensor
    parallelism shards axis 1. Block 0 is the null block: writes of padding land there, and nobody reads it.

    int8 values stand transposed inside their block: 8-bit tensor-core operands cannot be transposed on the way from
    shared memory, and row-major ones cost 64 byte-wide loads a tile.

    With `bits_of`, a format's name, 16-bit floats are held as uint16 of the same bits. For XLA:CPU, which has no gather,
    scatter or slice of 16-bit floats and converts the whole pool to float32 instead: a decode step of the demo model in
    bfloat16 with 1 GiB of blocks took 0.78 s.
    """

    k: jax.Array  # [N, K, P, D]
    v: jax.Array  # [N, K, P, D], or int8[N, K, D, P]
    k_scale: jax.Array | None = None  # bf16[N, K, P] of int8
    v_scale: jax.Array | None = None  # bf16[N, K, P] of int8
    bits_of: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.bits_of or self.k.dtype.name]

    def hold(self, x: jax.Array, dtype: str) -> jax.Array:
        """Numbers, converted to the `dtype` that the format stores them in, as these arrays hold them."""
        x = x.astype(dtype)
        is_half = self.bits_of is not None and x.dtype.itemsize == 2
        return jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half else x

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]


def empty_layer_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str, *, as_bits: bool = False
) -> LayerKV:
    """Blocks full of zeros; `num_blocks` counts the null block. `as_bits`: hold 16-bit floats as their bits."""
    stored = FORMATS[kv_format]
    shape = (num_blocks, num_kv_heads, block_size, head_dim)

    def zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
        return jnp.zeros(shape, jnp.uint16 if as_bits and jnp.dtype(dtype).itemsize == 2 else dtype)

    bits_of = kv_format if as_bits and kv_format != "float32" else None
    if not stored.is_quantized:
        return LayerKV(zeros(shape, stored.dtype), zeros(shape, stored.dtype), bits_of=bits_of)
    scales = [zeros(shape[:3], stored.scale_dtype) for _ in range(2)]
    values = zeros((*shape[:2], head_dim, block_size), stored.dtype)
    return LayerKV(zeros(shape, stored.dtype), values, *scales, bits_of=bits_of)


def gather_blocks(kv: LayerKV, blocks: jax.Array) -> LayerKV:
    """Blocks i32[...] as they are stored, as numbers: k, v [..., K, P, D] (quantised v [..., K, D, P]), scales
    [..., K, P]."""

    def gather(stored: jax.Array | None, dtype: str | None) -> jax.Array | None:
        if stored is None:
            return None
        tokens = stored.at[blocks].get(mode="promise_in_bounds")
        return tokens if tokens.dtype == dtype else jax.lax.bitcast_convert_type(tokens, dtype)

    numbers = kv.format
    return LayerKV(
        gather(kv.k, numbers.dtype),
        gather(kv.v, numbers.dtype),
        gather(kv.k_scale, numbers.scale_dtype),
        gather(kv.v_scale, numbers.scale_dtype),
    )


def gather_tokens(kv: LayerKV, blocks: jax.Array) -> LayerKV:
    """The tokens of blocks i32[..., B] one after the other: k, v [..., K, B*P, D], scales [..., K, B*P], as numbers."""
    stored = gather_blocks(kv, blocks)
    if kv.format.is_quantized:
        stored = dataclasses.replace(stored, v=stored.v.swapaxes(-1, -2))

    def side_by_side(tokens: jax.Array) -> jax.Array:
        axis = blocks.ndim - 1
        shape = blocks.shape[:-1] + (kv.num_kv_heads, blocks.shape[-1] * kv.block_size) + tokens.shape[axis + 3 :]
        return jnp.moveaxis(tokens, axis, axis + 1).reshape(shape)  # from [..., B, K, P, D]

    return jax.tree.map(side_by_side, stored)
