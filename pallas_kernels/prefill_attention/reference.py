"""The oracle: every query is a decode row of its own, with the length it may see."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.layer_kv import LayerKV


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
    kv_lens: jax.Array | None = None,
) -> AttentionOutput:
    token = jnp.arange(q.shape[0])
    row = jnp.clip(jnp.searchsorted(cu_q_lens, token, side="right") - 1, 0, context_lens.shape[0] - 1)
    ends = context_lens[row] + token - cu_q_lens[row] + 1
    kv_starts = jnp.zeros_like(ends) if options.window is None else jnp.maximum(ends - options.window, 0)
    if kv_lens is not None:
        ends = jnp.minimum(ends, kv_lens[row])
    ends = jnp.where(token < cu_q_lens[-1], ends, 0)
    without_window = dataclasses.replace(options, window=None)
    return decode_reference.decode_attention(q, kv, block_table[row], ends, without_window, kv_starts)
