"""kv_write on Pallas Triton: a program quantises and stores a tile of tokens of one KV head, in place."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_compat as plt
from pallas_kernels.kv_format import quantize
from pallas_kernels.layer_kv import LayerKV

# A decode step's rows fill the GPU one token a program. In a prefill, tiles let neighbouring tokens of a transposed block
# leave in one 32-byte sector instead of a byte each.
_MOST_SINGLE_TOKENS = 512
_TILE = 32


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array, *, interpret: bool = False) -> LayerKV:
    plt.check_addressing(kv)
    num_tokens = slots.shape[0]
    tile = 1 if num_tokens <= _MOST_SINGLE_TOKENS else _TILE
    pools, structure = jax.tree.flatten(kv)
    written = pl.pallas_call(
        functools.partial(_write_tile, tile=tile, structure=structure),
        grid=(pl.cdiv(num_tokens, tile), kv.num_kv_heads),
        out_shape=[jax.typeof(pool) for pool in pools],
        input_output_aliases={3 + i: i for i in range(len(pools))},
        compiler_params=plt.CompilerParams(num_warps=1 if tile == 1 else 4, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(slots, k, v, *pools)
    return jax.tree.unflatten(structure, written)


def _write_tile(slots_ref, k_ref, v_ref, *pool_refs, tile: int, structure) -> None:
    """The pools come twice, as inputs and, behind them, as the outputs that alias them: only the latter are used."""
    kv = jax.tree.unflatten(structure, pool_refs[len(pool_refs) // 2 :])
    num_tokens, _, head_dim = k_ref.shape
    head = pl.program_id(1)
    token = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    dim = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)[None, :]
    is_token = token < num_tokens
    is_value = is_token[:, None] & (dim < head_dim)
    slot = plt.load(slots_ref.at[token], mask=is_token, other=0)
    block_size = kv.k.shape[2]  # a power of two: slots split by shift and mask, not by division
    block, offset = slot >> (block_size.bit_length() - 1), slot & (block_size - 1)

    def load(ref) -> jax.Array:
        return plt.load(ref.at[token[:, None], head, dim], mask=is_value, other=0)

    def store_rows(ref, rows: jax.Array) -> None:
        plt.store(ref.at[block[:, None], head, offset[:, None], dim], rows.astype(ref.dtype), mask=is_value)

    k, v = load(k_ref), load(v_ref)
    if kv.k_scale is None:
        store_rows(kv.k, k)
        store_rows(kv.v, v)
        return
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    store_rows(kv.k, k)
    plt.store(kv.v.at[block[None, :], head, dim.T, offset[None, :]], v.T, mask=is_value.T)
    plt.store(kv.k_scale.at[block, head, offset], k_scale, mask=is_token)
    plt.store(kv.v_scale.at[block, head, offset], v_scale, mask=is_token)
