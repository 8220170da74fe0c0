"""The oracle: every query is a decode row of its own, with the length it may see."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.layer_kv import LayerKV


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
) -> AttentionOutput:
    token = jnp.arange(q.shape[0])
    row = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, context_lens.shape[0] - 1)
    seq_lens = context_lens[row] + token - cu_q_lens[row] + 1
    seq_lens = jnp.where(token < cu_q_lens[-1], seq_lens, 0)
    return decode_reference.decode_attention(q, kv, block_table[row], seq_lens, scale=scale, window=window)
