"""prefill_attention on NVIDIA GPUs: one query tile and KV head a program, tensor cores, online softmax (FlashAttention-2,
Dao 2023, arXiv 2307.08691).

The rows of a query tile are pairs of a token and a query head of the group, so that keys and values are read once for the
whole group. KV tiles start at absolute positions: with query tiles of one size, a token's output does not depend on how
its prompt was cut into chunks.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton_compat as plt
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.fast_exp2 import exp2_scaled, log2
from pallas_kernels.int8_dequant import int8_to_float
from pallas_kernels.layer_kv import LayerKV

# The maximum before there is one. Logits of unseen keys are twice that: 2^x of the difference is 0, never NaN.
_NO_KEY = -1e20
_LOG2E = math.log2(math.e)


class Tile(NamedTuple):
    """How the work is cut: (token, query head) pairs a program, KV tokens a step, warps, and stages of the pipeline."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


def choose_tile(q: jax.Array, kv: LayerKV, num_seqs: int) -> Tile:
    """The largest tile whose registers do not spill; BUILD_NOTES.md has what was tried."""
    is_wide, is_quantized = kv.head_dim > 128, kv.k_format.is_quantized
    if q.dtype == jnp.float32:
        return Tile(16, 32, 8 if is_wide else 4, 2)
    if q.shape[0] * q.shape[1] <= 16 * num_seqs * kv.num_kv_heads:  # few tokens a sequence: nearly all is reading keys
        return Tile(16, 32, 8, 3) if is_wide else Tile(16, 64, 4, 3)
    if not _is_hopper():
        return Tile(64 if is_wide else 128, 64 if kv.head_dim <= 64 else 32, 8, 3)
    gathers_bytes = is_quantized and kv.block_size < 64
    return Tile(64 if is_wide and is_quantized else 128, 32 if is_wide or gathers_bytes else 64, 8, 3)


def _is_hopper() -> bool:
    """Of the device compiled for: an abstract one has no compute capability, only a name."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return re.search(r"\bG?H\d", device.device_kind) is not None


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
    kv_lens: jax.Array | None = None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> AttentionOutput:
    plt.check_addressing(kv)
    if not options.scale > 0:
        raise ValueError(f"pallas_triton takes the maximum before it scales: expected a positive scale, got {options}")
    num_seqs, group = len(context_lens), q.shape[1] // kv.num_kv_heads
    tile = tile or choose_tile(q, kv, num_seqs)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, tile=tile, options=options, interpret=interpret),
        grid=(kv.num_kv_heads, len(q) // (tile.rows // group) + num_seqs + 1),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)),
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="prefill_attention",
    )(q, kv, block_table, cu_q_lens, context_lens, kv_lens)
    return AttentionOutput(out, lse)


class _Chunk(NamedTuple):
    """A query tile's part of a chunk."""

    seq: jax.Array
    begin: jax.Array  # first token, an index of q
    end: jax.Array  # one past the last token
    shift: jax.Array  # from a token's index to its position in the sequence
    num_keys: jax.Array  # that the last token may see; 0 where there is nothing to do


def _find_chunk(slot, tile_tokens: int, num_tokens: int, cu_q_lens_ref, context_lens_ref, kv_lens_ref) -> _Chunk:
    """Sequence r has the slots from cu_q_lens[r] // tile_tokens + r on, which are enough for its tiles and need no sum over
    the sequences before it. The padding is one more sequence, without keys."""
    num_seqs = context_lens_ref.shape[0]
    index = jnp.arange(pl.next_power_of_2(num_seqs + 1), dtype=jnp.int32)
    starts = plt.load(cu_q_lens_ref.at[index], mask=index <= num_seqs, other=1 << 30)
    chunk = jnp.sum((_div(starts, tile_tokens) + index <= slot).astype(jnp.int32)) - 1
    is_padding, seq = chunk == num_seqs, jnp.minimum(chunk, num_seqs - 1)
    start = plt.load(cu_q_lens_ref.at[chunk])
    begin = start + (slot - chunk - _div(start, tile_tokens)) * tile_tokens
    end = jnp.where(is_padding, num_tokens, plt.load(cu_q_lens_ref.at[seq + 1]))
    end = jnp.minimum(end, begin + tile_tokens)
    shift = plt.load(context_lens_ref.at[seq]) - start
    num_keys = jnp.where(is_padding | (begin >= end), 0, end + shift)
    if kv_lens_ref is not None:
        num_keys = jnp.minimum(num_keys, plt.load(kv_lens_ref.at[seq]))
    return _Chunk(seq, begin, end, shift, num_keys)


def _kernel(
    q_ref,
    kv: LayerKV,
    table_ref,
    cu_q_lens_ref,
    context_lens_ref,
    kv_lens_ref,
    out_ref,
    lse_ref,
    *,
    tile: Tile,
    options: AttentionOptions,
    interpret: bool,
):
    num_tokens, num_heads, head_dim = q_ref.shape
    dtype, block_size, group = q_ref.dtype, kv.block_size, num_heads // kv.num_kv_heads
    dot = functools.partial(plt.dot, precision=_dot_precision(dtype, interpret))
    head = pl.program_id(0)
    slot = pl.num_programs(1) - 1 - pl.program_id(1)  # the last tile of a long chunk has most to do and goes first
    chunk = _find_chunk(slot, tile.rows // group, num_tokens, cu_q_lens_ref, context_lens_ref, kv_lens_ref)

    row = jnp.arange(tile.rows, dtype=jnp.int32)
    token, q_head = chunk.begin + _div(row, group), head * group + _rem(row, group)
    is_row = token < chunk.end
    position = token + chunk.shift
    last_key = jnp.minimum(position, chunk.num_keys - 1)
    channel = jnp.arange(pl.next_power_of_2(head_dim), dtype=jnp.int32)
    is_channel = None if len(channel) == head_dim else channel < head_dim
    q_at = (token[:, None], q_head[:, None], channel[None, :])
    q = _load(q_ref.at[q_at], is_row[:, None], _row(is_channel))

    def attend(i: jax.Array, carry, *, masked: bool, far: bool = False):
        """One KV tile. A tile that every row sees whole needs no mask; `far`: the window's far edge may lie in it."""
        largest, total, acc = carry
        first, offset = i * tile.tokens, jnp.arange(tile.tokens, dtype=jnp.int32)
        owned = first + offset < chunk.num_keys if masked else None
        if far and block_size < tile.tokens:  # of several blocks the first may be somebody else's already; of one never
            begin = jnp.maximum(chunk.begin + chunk.shift + 1 - options.window, 0)
            num_seen = jnp.maximum(chunk.num_keys - begin, 0)
            owned = (first - begin + offset).astype(jnp.uint32) < num_seen.astype(jnp.uint32)
        if block_size >= tile.tokens:
            tiles = block_size // tile.tokens  # a block
            block = plt.load(table_ref.at[chunk.seq, _div(i, tiles)])
            block_of_row = block_of_column = block
            offset += _rem(i, tiles) * tile.tokens  # so that the compiler sees what divides it, for wide loads
        else:
            block = _load(table_ref.at[chunk.seq, _div(first + offset, block_size)], owned)
            block_of_row, block_of_column = block[:, None], block[None, :]
            offset = _rem(offset, block_size)
        at = (block_of_row, head, offset[:, None], channel[None, :])

        k = _load(kv.k.at[at], _row(is_channel))
        unit = options.scale * _LOG2E  # of the logits, to the base 2
        if kv.k_scale is None:
            logits = dot(q, k, trans_b=True)
        else:
            logits = dot(q, int8_to_float(k, dtype, interpret=interpret), trans_b=True)
            logits *= (plt.load(kv.k_scale.at[block, head, offset]).astype(jnp.float32) * unit)[None, :]
            unit = 1.0
        if options.soft_cap is not None:  # cap * tanh(x / cap)
            cap = options.soft_cap * _LOG2E
            power = exp2_scaled(logits, 2 * _LOG2E * unit / cap, 0.0, interpret=interpret)
            logits, unit = cap - 2 * cap / (1 + power), 1.0
        if masked:
            key = (first + jnp.arange(tile.tokens, dtype=jnp.int32))[None, :]
            seen = key <= last_key[:, None]
            if options.window is not None:
                seen &= key > position[:, None] - options.window
            logits = jnp.where(seen, logits, 2 * _NO_KEY / unit)

        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1) * unit)
        weights = exp2_scaled(logits, unit, -new_largest[:, None], interpret=interpret)
        shrink = exp2_scaled(largest, 1.0, -new_largest, interpret=interpret)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc *= shrink[:, None]
        if kv.v_scale is None:
            # Nobody's slots may hold NaN, and 0 * NaN is NaN.
            v = _load(kv.v.at[at], _column(owned), _row(is_channel))
            acc += dot(weights.astype(dtype), v)
        else:
            at = (block_of_column, head, channel[:, None], offset[None, :])
            v = int8_to_float(_load(kv.v.at[at], _column(is_channel)), dtype, interpret=interpret)
            v_scale = plt.load(kv.v_scale.at[block, head, offset]).astype(jnp.float32)
            weights *= (jnp.where(owned, v_scale, 0) if masked else v_scale)[None, :]
            acc += dot(weights.astype(dtype), v, trans_b=True)
        return new_largest, total, acc

    carry = (
        jnp.full((tile.rows,), _NO_KEY, jnp.float32),
        jnp.zeros((tile.rows,), jnp.float32),
        jnp.zeros((tile.rows, len(channel)), jnp.float32),
    )
    num_tiles = _div(chunk.num_keys + tile.tokens - 1, tile.tokens)
    begin, end = chunk.begin + chunk.shift, chunk.end + chunk.shift  # positions
    begin_whole = jnp.int32(0)
    end_whole = _div(jnp.minimum(begin + 1, chunk.num_keys), tile.tokens)
    if options.window is not None:
        begin_seen = _div(jnp.maximum(begin + 1 - options.window, 0), tile.tokens)
        begin_whole = _div(jnp.maximum(end - options.window + tile.tokens - 1, 0), tile.tokens)
        begin_whole = jnp.minimum(begin_whole, num_tiles)
        end_whole = jnp.maximum(end_whole, begin_whole)
        carry = jax.lax.fori_loop(begin_seen, begin_whole, functools.partial(attend, masked=True, far=True), carry)
    carry = jax.lax.fori_loop(begin_whole, end_whole, functools.partial(attend, masked=False), carry)
    carry = jax.lax.fori_loop(end_whole, num_tiles, functools.partial(attend, masked=True), carry)

    largest, total, acc = carry
    any_key = total > 0
    total = jnp.where(any_key, total, 1.0)
    out = acc / total[:, None]
    lse = jnp.where(any_key, (largest + log2(total, interpret=interpret)) * math.log(2), -jnp.inf)
    mask = is_row[:, None] if is_channel is None else is_row[:, None] & is_channel[None, :]
    plt.store(out_ref.at[q_at], out.astype(dtype), mask=mask)
    plt.store(lse_ref.at[token, q_head], lse, mask=is_row)


def _dot_precision(dtype: jnp.dtype, interpret: bool) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset | None:
    """float32 as three products of TF32 on the tensor cores, which is as exact: true float32 products spill 2 kB a thread."""
    if dtype != jnp.float32:
        return None
    return jax.lax.Precision.HIGHEST if interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def _load(ref, *masks: jax.Array | None) -> jax.Array:
    """Zero where one of the masks is false."""
    masks = [mask for mask in masks if mask is not None]
    if not masks:
        return plt.load(ref)
    return plt.load(ref, mask=jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), ref.shape), other=0)


def _row(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x[None, :]


def _column(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x[:, None]


def _div(x: jax.Array, y: int) -> jax.Array:
    """x // y of x >= 0, without the instructions that // has for signs."""
    return jax.lax.div(x, jnp.full_like(x, y))


def _rem(x: jax.Array, y: int) -> jax.Array:
    return jax.lax.rem(x, jnp.full_like(x, y))
