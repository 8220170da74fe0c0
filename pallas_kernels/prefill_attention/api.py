"""Ragged chunks of one or more sequences against their blocks, causal."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, add_sinks
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import pallas_triton, reference, xla

_IMPLEMENTATIONS = {
    "xla": xla.prefill_attention,
    "reference": reference.prefill_attention,
    "pallas_triton": pallas_triton.prefill_attention,
    "pallas_triton_interpreted": functools.partial(pallas_triton.prefill_attention, interpret=True),
}


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
    *,
    kv_lens: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """Attend from every token of each chunk to the sequence's tokens up to and including itself.

    Args:
      q: [T, H, D] rotated queries, chunk after chunk; rows from cu_q_lens[R] on are padding (their output is zero).
      kv: the layer's blocks, with all tokens of all chunks already written.
      block_table: i32[R, M] of each sequence; entries beyond its length may name any block.
      cu_q_lens: i32[R + 1] where each chunk starts in q; equal neighbours mean an empty chunk.
      context_lens: i32[R] tokens of the sequence before the chunk: query i of chunk r has position context_lens[r] + i.
      kv_lens: i32[R] tokens of each sequence that may be seen, if fewer than are in cache: with kv_lens = context_lens all
        queries of a chunk see the whole context and nothing of the chunk (the shared part of a cascade).
      sinks: f32[H] logits that take part in the softmax without a value (see attention_output.add_sinks).
    """
    num_seqs = context_lens.shape[0]
    if q.shape[2] != kv.head_dim or q.shape[1] % kv.num_kv_heads:
        raise ValueError(f"Expected {q.shape=} to fit {kv.k.shape=} (H a multiple of K, equal D)")
    if block_table.shape[0] != num_seqs or cu_q_lens.shape != (num_seqs + 1,):
        raise ValueError(f"Expected {block_table.shape=}, {cu_q_lens.shape=} to fit {context_lens.shape=}")
    if kv_lens is not None and kv_lens.shape != (num_seqs,):
        raise ValueError(f"Expected {kv_lens.shape=} to fit {context_lens.shape=}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"Expected {sinks.shape=} to have one logit a head of {q.shape=}")
    attend = _IMPLEMENTATIONS[dispatch.backend("prefill_attention", implementation)]
    return add_sinks(attend(q, kv, block_table, cu_q_lens, context_lens, options, kv_lens), sinks)
