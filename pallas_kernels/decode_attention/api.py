"""One query token a row against its block table."""

from typing import Any

import jax

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, add_sinks
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.layer_kv import LayerKV

_IMPLEMENTATIONS = {"xla": xla.decode_attention, "reference": reference.decode_attention}


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    *,
    kv_starts: jax.Array | None = None,
    sinks: jax.Array | None = None,
    plan: Any = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """Attend from each row's newest token to all tokens of the row, itself included.

    Args:
      q: [S, H, D] rotated queries; query head h reads KV head h // G.
      kv: the layer's blocks, with the newest token already written.
      block_table: i32[S, M] block ids in order; entries beyond the row's length may name any block.
      seq_lens: i32[S] tokens in cache, the newest included; 0 for an idle row.
      kv_starts: i32[S] first position that is seen, where the tokens before it are somebody else's part; None: all of them.
      sinks: f32[H] logits that take part in the softmax without a value (see attention_output.add_sinks).
      plan: what `plan_decode` made of these seq_lens, or None to have it made here.
    """
    num_rows, num_heads, head_dim = q.shape
    if head_dim != kv.head_dim or num_heads % kv.num_kv_heads:
        raise ValueError(f"Expected {q.shape=} to fit {kv.k.shape=} (H a multiple of K, equal D)")
    if block_table.shape[0] != num_rows or seq_lens.shape != (num_rows,):
        raise ValueError(f"Expected {block_table.shape=} and {seq_lens.shape=} to have the rows of {q.shape=}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"Expected {sinks.shape=} to have one logit a head of {q.shape=}")
    if kv_starts is not None and kv_starts.shape != (num_rows,):
        raise ValueError(f"Expected {kv_starts.shape=} to have the rows of {q.shape=}")
    attend = _IMPLEMENTATIONS[implementation]
    return add_sinks(attend(q, kv, block_table, seq_lens, options, kv_starts), sinks)
