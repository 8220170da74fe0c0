"""decode_attention for NVIDIA GPUs, compute capability 8.0 and up: split over the keys (Flash-Decoding, Dao et al. 2023).

One program attends from the G query heads of one KV head to one item of a SplitPlan, a tile of tokens at a time with an
online softmax; a second kernel merges the items of a row. Chosen by the instructions that the compiled loop issues for a
byte of KV, since at full bandwidth a GPU has few to spend (BUILD_NOTES.md has the table):

- Tokens are the rows of the tensor cores' 16-row tiles and query heads their 8 columns: half of the work would be padding
  the other way round. It also keeps the softmax's sum per thread until the end, where it is reduced once.
- A tile's block id is read one tile ahead. Loads that wait for a load inside their own iteration are not pipelined deeper
  than one tile.
- int8 goes to float16, exactly, in 3 instructions for 4 keys and 5 for 4 values; scales multiply logits and probabilities.
  Keys keep the bias of that conversion: it adds bias * sum(q) to every logit, which is taken away there. Values do not:
  tensor cores round their running sums towards zero, and over a long row that would show.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_compat as plt
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention.plan import SplitPlan, plan_decode
from pallas_kernels.fast_exp2 import exp2_scaled, log2
from pallas_kernels.int8_dequant import INT8_BIAS, int8_to_biased_float16, int8_to_float
from pallas_kernels.layer_kv import LayerKV

# Finite, so that an item that has seen no key yet keeps exp(m - m) = 1 and never NaN.
_NO_KEY = -1e30
# int8: probabilities times 2^8 times the values' scales are float16 numbers. Without the 2^8, values below 1 with a
# probability below 0.01 would be subnormal; with it, values up to 32,000 stay finite.
_SHIFT = 8.0
# Items that the second kernel merges at a time.
_MERGED = 16


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    kv_starts: jax.Array | None = None,
    plan: SplitPlan | None = None,
    *,
    interpret: bool = False,
) -> AttentionOutput:
    """Products are taken in the stored dtype, int8 in float16, float32 in full float32; sums in float32."""
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.block_size, kv.num_kv_heads
    if not options.scale > 0:
        raise ValueError(f"Expected a positive scale, got {options.scale=}")
    plt.check_addressing(kv)
    if plan is None:
        capacity = block_table.shape[1] * block_size
        plan = plan_decode(
            seq_lens, num_kv_heads=num_kv_heads, capacity=capacity, window=options.window, kv_starts=kv_starts
        )
    group = num_heads // num_kv_heads
    tile, num_warps, num_stages = loop_shape(kv.k.dtype, head_dim, group)
    items = plan.row.shape[0]
    parts = pl.pallas_call(
        functools.partial(_attend_item, options=options, tile=tile, interpret=interpret),
        grid=(items, num_kv_heads),
        out_shape=AttentionOutput(
            jax.ShapeDtypeStruct((items, num_heads, head_dim), jnp.float32 if plan.is_split else q.dtype),
            jax.ShapeDtypeStruct((items, num_heads), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="decode_attention",
    )((plan.row, plan.start, plan.end), block_table, q, kv)
    parts = AttentionOutput(*parts)
    if not plan.is_split:
        return parts
    merged = pl.pallas_call(
        _merge_items,
        grid=(num_rows, num_heads),
        out_shape=AttentionOutput(
            jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32)
        ),
        compiler_params=plt.CompilerParams(num_warps=1 if head_dim <= 128 else 2, num_stages=2),
        interpret=interpret,
        name="decode_attention_merge",
    )(plan.first_item, parts)
    return AttentionOutput(*merged)


def loop_shape(stored: jnp.dtype, head_dim: int, group: int) -> tuple[int, int, int]:
    """Tokens a tile, warps and pipeline stages: the fewest instructions within 128 registers a thread.

    3 stages are two tiles in flight. 4 warps with 64 tokens and 16 query heads would make int8 use wgmma on sm_90, whose
    operands come from shared memory a byte or two at a time; 2 warps, or 32 tokens, cannot.
    """
    if stored == jnp.float32:  # no tensor cores: every product is an instruction
        return 16, 4 if head_dim <= 128 else 8, 2
    if stored == jnp.int8:
        if head_dim > 128:
            return 64 if group <= 8 else 32, 4, 3
        return 64, 2 if head_dim in (64, 128) or group > 8 else 4, 3
    if head_dim > 128:
        return 32, 4, 3
    return 64, 2 if head_dim <= 64 else 4, 3


def _attend_item(
    item_refs, table_ref, q_ref, kv_ref, out_ref, lse_ref, *, options: AttentionOptions, tile: int, interpret: bool
):
    """Refs are trees as in decode_attention; item_refs are row, start, end of a SplitPlan. Arrays below are [tile, N],
    [N] and [D, N] with N query heads, padded, and D padded."""
    item, kv_head = pl.program_id(0), pl.program_id(1)
    row, start, end = (plt.load(ref.at[item]) for ref in item_refs)
    num_kv_heads, block_size, head_dim = kv_ref.k.shape[1:]
    group = q_ref.shape[1] // num_kv_heads
    quantized = kv_ref.k_scale is not None

    member = jnp.arange(max(8, pl.next_power_of_2(group)), dtype=jnp.int32)
    channel = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    token = jnp.arange(tile, dtype=jnp.int32)
    head = kv_head * group + member
    is_channel = channel < head_dim
    in_group = (member < group)[:, None] & is_channel[None, :]

    def block_of(index):
        """Id of the block of tile `index`, or ids i32[tile] of its tokens' where blocks are smaller; in range past the
        end too."""
        first = index * tile
        if block_size >= tile:
            column = jax.lax.div(first, jnp.int32(block_size))
            return plt.load(table_ref.at[row, column], mask=first < end, other=0)
        column = jax.lax.div(first + token, jnp.int32(block_size))
        # By column, not by token: 16 neighbours that surely share a block are loaded 16 bytes at a time.
        used = column < jax.lax.div(end + (block_size - 1), jnp.int32(block_size))
        return plt.load(table_ref.at[row, column], mask=used, other=0)

    def offset_of(index):
        """Places i32[tile] in their blocks."""
        if block_size > tile:
            return jax.lax.rem(index, jnp.int32(block_size // tile)) * tile + token
        return token if block_size == tile else jax.lax.rem(token, jnp.int32(block_size))

    def load(ref, block, *indices, mask=None):
        """Padded channels are 0; other places are loaded whatever they hold, unless masked."""
        return plt.load(ref.at[block, kv_head, *indices], mask=mask, other=None if mask is None else 0)

    @pl.when(row >= 0)
    def _():
        q = plt.load(q_ref.at[row, head[:, None], channel[None, :]], mask=in_group, other=0)
        q = q.astype(jnp.float16 if quantized else kv_ref.k.dtype)
        bias = INT8_BIAS * jnp.sum(q.astype(jnp.float32), axis=1) if quantized else None
        # Logits times this are powers of 2; a capped logit is one already.
        to_log2 = 1.0 if options.soft_cap else options.scale * math.log2(math.e)
        shift = _SHIFT if quantized else 0.0

        def attend_tile(index, carry):
            m, l, acc, block = carry  # l is still to be summed over tokens
            next_block = block_of(index + 1)
            offset = offset_of(index)
            position = index * tile + token
            seen = (position - start).astype(jnp.uint32) < (end - start).astype(
                jnp.uint32
            )  # both ends in one comparison
            by_token = block[:, None] if block_size < tile else block
            padded = None if head_dim == channel.shape[0] else is_channel

            if quantized:
                k_scale = load(kv_ref.k_scale, block, offset).astype(jnp.float32)
                v_scale = load(kv_ref.v_scale, block, offset).astype(jnp.float32)
            mask = None if padded is None else jnp.broadcast_to(padded[None, :], (tile, channel.shape[0]))
            k = load(kv_ref.k, by_token, offset[:, None], channel[None, :], mask=mask)
            if quantized:
                logits = _dot(int8_to_biased_float16(k, interpret=interpret), q, 1, 1) - bias[None, :]
                logits = logits * k_scale[:, None]
            else:
                logits = _dot(k, q, 1, 1)
            if options.soft_cap:
                # tanh x = 1 - 2 / (e^2x + 1)
                double = exp2_scaled(
                    logits, 2 * options.scale / options.soft_cap * math.log2(math.e), 0.0, interpret=interpret
                )
                logits = (options.soft_cap * math.log2(math.e)) * (1 - 2 / (double + 1))
            logits = jnp.where(seen[:, None], logits, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(logits, axis=0) * to_log2)
            shrink = exp2_scaled(m, 1.0, -m_new, interpret=interpret)
            p = exp2_scaled(logits, to_log2, (shift - m_new)[None, :], interpret=interpret)
            l = l * shrink[None, :] + p

            if quantized:
                p = p * jnp.where(seen, v_scale, 0.0)[:, None]
                by_token = block[None, :] if block_size < tile else block
                mask = None if padded is None else jnp.broadcast_to(padded[:, None], (channel.shape[0], tile))
                v = load(kv_ref.v, by_token, channel[:, None], offset[None, :], mask=mask)
                pv = _dot(int8_to_float(v, jnp.float16, interpret=interpret), p.astype(jnp.float16), 1, 0)
            else:  # an unseen slot may hold anything, and 0 * NaN is NaN
                mask = seen[:, None] & is_channel[None, :]
                v = load(kv_ref.v, by_token, offset[:, None], channel[None, :], mask=mask)
                pv = _dot(v, p.astype(v.dtype), 0, 0)
            return m_new, l, acc * shrink[None, :] + pv, next_block

        first = jax.lax.div(start, jnp.int32(tile))
        last = jax.lax.div(end + (tile - 1), jnp.int32(tile))
        m, l, acc, _ = jax.lax.fori_loop(
            first,
            last,
            attend_tile,
            (
                jnp.full(member.shape, _NO_KEY, jnp.float32),
                jnp.zeros((tile, member.shape[0]), jnp.float32),
                jnp.zeros((channel.shape[0], member.shape[0]), jnp.float32),
                block_of(first),
            ),
        )
        l = jnp.sum(l, axis=0)
        out = acc / jnp.maximum(l, 1e-30)[None, :]
        lse = jnp.where(l > 0, (m - shift + log2(jnp.maximum(l, 1e-30), interpret=interpret)) * math.log(2), -jnp.inf)
        target = out_ref.at[item, head[:, None], channel[None, :]]
        plt.store(target, out.T.astype(out_ref.dtype), mask=in_group)
        plt.store(lse_ref.at[item, head], lse, mask=member < group)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """f32 product over one axis of each; float32 without TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def _merge_items(first_item_ref, parts_ref, out_ref, lse_ref):
    """One row and query head: attention_output.merge over any number of parts."""
    row, head = pl.program_id(0), pl.program_id(1)
    first, last = plt.load(first_item_ref.at[row]), plt.load(first_item_ref.at[row + 1])
    head_dim = out_ref.shape[2]
    channel = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    is_channel = channel < head_dim

    def merge_some(index, carry):
        m, l, acc = carry
        item = first + index * _MERGED + jnp.arange(_MERGED, dtype=jnp.int32)
        lse = plt.load(parts_ref.lse.at[item, head], mask=item < last, other=-jnp.inf)
        mask = (item < last)[:, None] & is_channel[None, :]
        part = plt.load(parts_ref.out.at[item[:, None], head, channel[None, :]], mask=mask, other=0)
        m_new = jnp.maximum(m, jnp.max(lse))
        weight, shrink = jnp.exp(lse - m_new), jnp.exp(m - m_new)
        return m_new, l * shrink + jnp.sum(weight), acc * shrink + jnp.sum(weight[:, None] * part, axis=0)

    rounds = jax.lax.div(last - first + (_MERGED - 1), jnp.int32(_MERGED))
    start = (jnp.float32(_NO_KEY), jnp.float32(0), jnp.zeros(channel.shape, jnp.float32))
    m, l, acc = jax.lax.fori_loop(0, rounds, merge_some, start)
    out = acc / jnp.maximum(l, 1e-30)
    plt.store(out_ref.at[row, head, channel], out.astype(out_ref.dtype), mask=is_channel)
    plt.store(lse_ref.at[row, head], jnp.where(l > 0, m + jnp.log(jnp.maximum(l, 1e-30)), -jnp.inf))
