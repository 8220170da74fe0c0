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
    """

    k: jax.Array  # [N, K, P, D]
    v: jax.Array  # [N, K, P, D], or int8[N, K, D, P]
    k_scale: jax.Array | None = None  # bf16[N, K, P] of int8
    v_scale: jax.Array | None = None  # bf16[N, K, P] of int8

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.k.dtype.name]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]


def empty_layer_kv(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str) -> LayerKV:
    """Blocks full of zeros; `num_blocks` counts the null block."""
    stored = FORMATS[kv_format]
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    if not stored.is_quantized:
        return LayerKV(k=jnp.zeros(shape, stored.dtype), v=jnp.zeros(shape, stored.dtype))
    scales = [jnp.zeros(shape[:3], stored.scale_dtype) for _ in range(2)]
    return LayerKV(jnp.zeros(shape, stored.dtype), jnp.zeros((*shape[:2], head_dim, block_size), stored.dtype), *scales)


def gather_tokens(kv: LayerKV, blocks: jax.Array) -> LayerKV:
    """The tokens of blocks i32[..., B] one after the other: k, v [..., K, B*P, D], scales [..., K, B*P]."""

    def gather(stored: jax.Array | None, transposed: bool = False) -> jax.Array | None:
        if stored is None:
            return None
        tokens = stored.at[blocks].get(mode="promise_in_bounds")  # [..., B, K, P, D]
        axis = blocks.ndim - 1
        tokens = jnp.moveaxis(tokens, axis, axis + 1)  # [..., K, B, P, D]
        if transposed:
            tokens = tokens.swapaxes(-1, -2)
        lead = blocks.shape[:-1] + (kv.num_kv_heads, blocks.shape[-1] * kv.block_size)
        return tokens.reshape(lead + ((kv.head_dim,) if stored.ndim == 4 else ()))

    return LayerKV(gather(kv.k), gather(kv.v, kv.format.is_quantized), gather(kv.k_scale), gather(kv.v_scale))
