"""The oracle: gather each row's whole table, dequantise, mask, softmax in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, soft_capped
from pallas_kernels.kv_format import dequantize
from pallas_kernels.layer_kv import LayerKV, gather_tokens


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    kv_starts: jax.Array | None = None,
) -> AttentionOutput:
    kv_starts = jnp.zeros_like(seq_lens) if kv_starts is None else kv_starts
    if options.window is not None:
        kv_starts = jnp.maximum(kv_starts, seq_lens - options.window)

    def one_row(q_row, blocks, start, end) -> tuple[jax.Array, jax.Array]:
        position = jnp.arange(blocks.shape[0] * kv.block_size)
        seen = (position >= start) & (position < end)
        tokens = gather_tokens(kv, blocks)

        def real(stored: jax.Array, scale: jax.Array | None) -> jax.Array:  # f32[K, M*P, D]
            numbers = stored.astype(jnp.float32) if scale is None else dequantize(stored, scale)
            return jnp.where(seen[:, None], numbers, 0)

        queries = q_row.reshape(kv.num_kv_heads, -1, q_row.shape[-1]).astype(jnp.float32)
        logits = jnp.einsum("kgd,ktd->kgt", queries, real(tokens.k, tokens.k_scale), precision="highest")
        logits = soft_capped(logits * options.scale, options.soft_cap)
        logits = jnp.where(seen, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
        out = jnp.einsum("kgt,ktd->kgd", weights, real(tokens.v, tokens.v_scale), precision="highest")
        return out.reshape(q_row.shape), lse.reshape(-1)

    out, lse = jax.vmap(one_row)(q, block_table, kv_starts, seq_lens)
    return AttentionOutput(out.astype(q.dtype), lse)
