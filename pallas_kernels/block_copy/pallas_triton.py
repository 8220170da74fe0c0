"""block_copy on Pallas Triton, in place and without a temporary.

What a copy writes at one place of a block depends on nothing but the same place of other blocks. So a program owns a
slice of places in every block, loads it for all copies, and then stores: reads come before writes, and the compiler
keeps that order because they are the same array.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_compat as plt
from pallas_kernels.layer_kv import LayerKV

_WARPS = 4
# What a program owns of a block's head, 4 bytes a thread: a slice of every copy is held in registers at once, int8 spread out
# to one number a register (with 16 bytes a thread they spill on sm_80).
_SLICE_BYTES = 4 * 32 * _WARPS


def block_copy(
    kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array, *, interpret: bool = False
) -> LayerKV:
    plt.check_addressing(kv)
    pools, structure = jax.tree.flatten(kv)
    # Places of a head stand [P, D], or transposed, or [P] where they are scales: a token's number changes every so many.
    places_per_token = [kv.head_dim, 1 if kv.v_format.is_scaled else kv.head_dim, 1, 1]
    flat = [jax.ShapeDtypeStruct((*x.shape[:2], x.size // (x.shape[0] * x.shape[1])), x.dtype) for x in pools]
    num_slices = max(pl.cdiv(x.shape[2] * x.dtype.itemsize, _SLICE_BYTES) for x in flat)
    copied = pl.pallas_call(
        functools.partial(_copy_slice, places_per_token=places_per_token, block_size=kv.block_size),
        grid=(kv.num_kv_heads, num_slices),
        out_shape=flat,
        input_output_aliases={3 + i: i for i in range(len(flat))},
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="block_copy",
    )(src, dst, num_tokens, *(x.reshape(shape.shape) for x, shape in zip(pools, flat, strict=True)))
    return jax.tree.unflatten(structure, [new.reshape(x.shape) for new, x in zip(copied, pools, strict=True)])


def _copy_slice(src_ref, dst_ref, num_tokens_ref, *pool_refs, places_per_token: list[int], block_size: int) -> None:
    """The pools come twice, as inputs and, behind them, as the outputs that alias them: only the latter are used."""
    head = pl.program_id(0)
    copies = [jnp.int32(i) for i in range(src_ref.shape[0])]
    for ref, per_token in zip(pool_refs[len(pool_refs) // 2 :], places_per_token):
        size = _SLICE_BYTES // ref.dtype.itemsize
        place = pl.program_id(1) * size + jnp.arange(size, dtype=jnp.int32)
        token = jax.lax.div(place, jnp.int32(per_token)) & (block_size - 1)
        exists = place < ref.shape[2]

        def load(blocks_ref, copy: jax.Array, ref=ref, place=place, exists=exists) -> jax.Array:
            return plt.load(ref.at[plt.load(blocks_ref.at[copy]), head, place], mask=exists, other=0)

        # Whole slices, mixed in registers: a mask by tokens would cut the stores of a transposed block into bytes.
        mixed = [
            jnp.where(token < plt.load(num_tokens_ref.at[copy]), load(src_ref, copy), load(dst_ref, copy))
            for copy in copies
        ]
        for copy, values in zip(copies, mixed, strict=True):
            plt.store(ref.at[plt.load(dst_ref.at[copy]), head, place], values, mask=exists)
