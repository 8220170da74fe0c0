"""Decode rows that share a prefix: its blocks are read once for all of them, not once a row.

The queries of a group attend to the prefix together, as one chunk of prefill_attention, and each to its own tokens by
decode_attention; the parts merge by their log-sum-exp (Hydragen, arXiv 2402.05099; ChunkAttention, arXiv 2402.15220).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, add_sinks, merge
from pallas_kernels.cascade import reference
from pallas_kernels.cascade.groups import RowGroups
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import prefill_attention

# Programs of the prefix part that fill a GPU, query rows (tokens times G) that one holds, and the most parts that a
# prefix is cut into: each part writes an output of its own, which the merge reads again.
_GPU_PROGRAMS, _TILE_ROWS, _MOST_SPLITS = 128, 128, 8


def cascade_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    groups: RowGroups,
    options: AttentionOptions,
    *,
    sinks: jax.Array | None = None,
    plan: Any = None,
    num_splits: int | None = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """decode_attention, the blocks that a group of rows shares read once: equal to it within rounding.

    Args:
      q: [S, H, D] rotated queries; query head h reads KV head h // G.
      kv: the layer's blocks, with the newest token already written.
      block_table: i32[S, M] block ids in order; entries beyond the row's length may name any block.
      seq_lens: i32[S] tokens in cache, the newest included; 0 for an idle row, which may be anywhere in a group. No
        other row of a group is shorter than its prefix.
      groups: the rows of S that share a prefix.
      options: without a window: a row's window would cover another part of the prefix than its neighbour's.
      sinks: f32[H] logits that take part in the softmax without a value (see attention_output.add_sinks).
      plan: what `plan_decode` made of these seq_lens and of groups.kv_starts(S), or None to have it made by
        decode_attention.
      num_splits: parts that every prefix is cut into, attended to side by side; None: as many as fill a GPU with a
        Pallas implementation, 1 with another.
      implementation: that of the two operations.
    """
    if options.window is not None:
        raise ValueError(f"Expected no window, got {options.window=}: use decode_attention")
    if groups.cu_rows.shape[0] != groups.prefix_lens.shape[0] + 1:
        raise ValueError(f"Expected {groups.cu_rows.shape=} to have one entry more than {groups.prefix_lens.shape=}")
    if block_table.shape[0] != q.shape[0] or seq_lens.shape != q.shape[:1]:
        raise ValueError(f"Expected {block_table.shape=} and {seq_lens.shape=} to have the rows of {q.shape=}")
    if implementation == "reference":
        return add_sinks(reference.cascade_attention(q, kv, block_table, seq_lens, options), sinks)
    if num_splits is None:
        num_splits = _num_splits(*q.shape[:2], kv.num_kv_heads) if implementation.startswith("pallas") else 1
    own = decode_attention(
        q,
        kv,
        block_table,
        seq_lens,
        options,
        kv_starts=groups.kv_starts(q.shape[0]),
        plan=plan,
        implementation=implementation,
    )
    prefix = _attend_prefixes(q, kv, block_table, seq_lens, groups, options, num_splits, implementation)
    return add_sinks(merge(own, prefix), sinks)


def _num_splits(num_rows: int, num_heads: int, num_kv_heads: int) -> int:
    """One group of all rows makes num_kv_heads programs for each tile of query rows: 8 to 16 of Llama-3-8B, where a GPU
    has 132 processors. Cut into parts the prefix keeps all of them busy."""
    tiles = -(-num_rows * (num_heads // num_kv_heads) // _TILE_ROWS)
    return max(1, min(_MOST_SPLITS, _GPU_PROGRAMS // (num_kv_heads * tiles)))


def _attend_prefixes(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    groups: RowGroups,
    options: AttentionOptions,
    num_splits: int,
    implementation: str,
) -> AttentionOutput:
    """Every row's attention to the prefix of its group. In the one call that makes it split s of group r is a sequence
    of its own, whose table is a piece of the group's and whose chunk are the group's queries: keys are stored rotated,
    so that it does not matter where a piece stands."""
    num_rows, num_groups, columns = q.shape[0], groups.prefix_lens.shape[0], block_table.shape[1]
    cu_rows, prefix_lens = jnp.asarray(groups.cu_rows), jnp.asarray(groups.prefix_lens)
    # The rows in no group are one more, with an empty prefix, so that a split's queries are all rows.
    prefix_lens = jnp.append(prefix_lens, 0)  # [R + 1]
    split_blocks = -(-(prefix_lens // kv.block_size) // num_splits)
    first_block = jnp.arange(num_splits)[:, None] * split_blocks  # [splits, R + 1]
    lens = jnp.clip(prefix_lens - first_block * kv.block_size, 0, split_blocks * kv.block_size)
    table = jnp.asarray(block_table)[jnp.minimum(cu_rows, num_rows - 1)]  # of each group's first row, [R + 1, M]
    if num_splits > 1:
        place = first_block[..., None] + jnp.arange(-(-columns // num_splits))
        table = table[jnp.arange(num_groups + 1)[:, None], jnp.minimum(place, columns - 1)]
        table = table.reshape(num_splits * (num_groups + 1), -1)
    cu_q_lens = jnp.arange(num_splits, dtype=jnp.int32)[:, None] * num_rows + cu_rows
    output = prefill_attention(
        jnp.tile(q, (num_splits, 1, 1)),
        kv,
        table,
        jnp.append(cu_q_lens, jnp.int32(num_splits * num_rows)),
        lens.reshape(-1),
        options,
        kv_lens=lens.reshape(-1),
        implementation=implementation,
    )
    out = output.out.reshape(num_splits, *q.shape)
    # An idle row in a group saw the prefix too.
    lse = jnp.where(seq_lens[:, None] > 0, output.lse.reshape(num_splits, *q.shape[:2]), -jnp.inf)
    return AttentionOutput(out[0], lse[0]) if num_splits == 1 else _merge_splits(out, lse)


def _merge_splits(out: jax.Array, lse: jax.Array) -> AttentionOutput:
    """attention_output.merge of any number of parts [splits, S, ...]; its out stays float32."""
    largest = jnp.max(lse, axis=0)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weights = jnp.exp(lse - largest)
    total = jnp.sum(weights, axis=0)
    shares = weights / jnp.maximum(total, 1e-30)
    merged = jnp.sum(shares[..., None] * out.astype(jnp.float32), axis=0)
    return AttentionOutput(merged, jnp.where(total > 0, largest + jnp.log(total), -jnp.inf))
