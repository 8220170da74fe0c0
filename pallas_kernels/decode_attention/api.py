"""One query token a row against its block table."""

import jax

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import reference, xla
from pallas_kernels.layer_kv import LayerKV

_IMPLEMENTATIONS = {"xla": xla.decode_attention, "reference": reference.decode_attention}


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """Attend from each row's newest token to all tokens of the row, itself included.

    Args:
      q: [S, H, D] rotated queries; query head h reads KV head h // G.
      kv: the layer's blocks, with the newest token already written.
      block_table: i32[S, M] block ids in order; entries beyond the row's length may name any block.
      seq_lens: i32[S] tokens in cache, the newest included; 0 for an idle row.
      scale: multiplies the logits.
      window: sliding window in tokens: only the last `window` tokens are seen.
    """
    num_rows, num_heads, head_dim = q.shape
    if head_dim != kv.k.shape[3] or num_heads % kv.k.shape[1]:
        raise ValueError(f"Expected {q.shape=} to fit {kv.k.shape=} (H a multiple of K, equal D)")
    if block_table.shape[0] != num_rows or seq_lens.shape != (num_rows,):
        raise ValueError(f"Expected {block_table.shape=} and {seq_lens.shape=} to have the rows of {q.shape=}")
    return _IMPLEMENTATIONS[implementation](q, kv, block_table, seq_lens, scale=scale, window=window)
