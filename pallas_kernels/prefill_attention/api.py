"""Ragged chunks of one or more sequences against their blocks, causal."""

import jax

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import reference, xla

_IMPLEMENTATIONS = {"xla": xla.prefill_attention, "reference": reference.prefill_attention}


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """Attend from every token of each chunk to the sequence's tokens up to and including itself.

    Args:
      q: [T, H, D] rotated queries, chunk after chunk; rows from cu_q_lens[R] on are padding (their output is zero).
      kv: the layer's blocks, with all tokens of all chunks already written.
      block_table: i32[R, M] of each sequence; entries beyond its length may name any block.
      cu_q_lens: i32[R + 1] where each chunk starts in q; equal neighbours mean an empty chunk.
      context_lens: i32[R] tokens of the sequence before the chunk: query i of chunk r has position context_lens[r] + i.
      scale: multiplies the logits.
      window: sliding window in tokens: a query sees itself and the window - 1 tokens before it.
    """
    num_seqs = context_lens.shape[0]
    if q.shape[2] != kv.k.shape[3] or q.shape[1] % kv.k.shape[1]:
        raise ValueError(f"Expected {q.shape=} to fit {kv.k.shape=} (H a multiple of K, equal D)")
    if block_table.shape[0] != num_seqs or cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"Expected {block_table.shape=}, {cu_q_lens.shape=} to fit {context_lens.shape=}")
    attend = _IMPLEMENTATIONS[implementation]
    return attend(q, kv, block_table, cu_q_lens, context_lens, scale=scale, window=window)
