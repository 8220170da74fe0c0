"""The oracle: gather each row's whole table, mask, softmax in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.layer_kv import LayerKV


def decode_attention(
    q: jax.Array, kv: LayerKV, block_table: jax.Array, seq_lens: jax.Array, *, scale: float, window: int | None = None
) -> AttentionOutput:
    def one_row(q_row: jax.Array, blocks: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = jnp.arange(blocks.shape[0] * kv.block_size)
        seen = position < seq_len
        if window is not None:
            seen &= position >= seq_len - window

        def tokens(stored: jax.Array) -> jax.Array:  # [K, M*P, D]
            gathered = stored[blocks].swapaxes(0, 1).reshape(stored.shape[1], -1, stored.shape[3])
            return jnp.where(seen[:, None], gathered, 0).astype(jnp.float32)

        queries = q_row.reshape(kv.k.shape[1], -1, q_row.shape[-1]).astype(jnp.float32)
        logits = jnp.einsum("kgd,ktd->kgt", queries, tokens(kv.k), precision="highest") * scale
        logits = jnp.where(seen, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.where(seen, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0)
        out = jnp.einsum("kgt,ktd->kgd", weights, tokens(kv.v), precision="highest")
        return out.reshape(q_row.shape), lse.reshape(-1)

    out, lse = jax.vmap(one_row)(q, block_table, seq_lens)
    return AttentionOutput(out.astype(q.dtype), lse)
