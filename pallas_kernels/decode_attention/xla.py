"""decode_attention for any device: online softmax over tiles of blocks, up to the longest row's real length."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, soft_capped
from pallas_kernels.layer_kv import LayerKV, gather_blocks

# Tokens a tile. Measured on XLA:CPU, 16 rows of the demo model at 190 tokens, a core's second cache 0.5 MiB: 1.4 ms a layer,
# 2.2 with 128 and 1.7 with 32. The loop's trip count follows the real lengths, so nobody pays for a padded table.
TILE = 64
# Finite, so that a row that has seen no key yet keeps exp(m - m) = 1 and never NaN.
_NO_KEY = -1e30


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    kv_starts: jax.Array | None = None,
) -> AttentionOutput:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.num_kv_heads, kv.block_size
    tile_blocks = max(1, TILE // block_size)
    tile = tile_blocks * block_size
    padding = -block_table.shape[1] % tile_blocks
    table = jnp.pad(block_table, ((0, 0), (0, padding)))
    queries = q.reshape(num_rows, num_kv_heads, -1, head_dim)
    if options.window is not None:
        in_window = jnp.maximum(seq_lens - options.window, 0)
        kv_starts = in_window if kv_starts is None else jnp.maximum(kv_starts, in_window)

    def attend_tile(carry):
        index, m, l, acc = carry
        blocks = jax.lax.dynamic_slice_in_dim(table, index * tile_blocks, tile_blocks, axis=1)  # [S, B]
        position = index * tile + jnp.arange(tile).reshape(tile_blocks, block_size)
        seen = position < seq_lens[:, None, None]  # [S, B, P]
        if kv_starts is not None:
            seen &= position >= kv_starts[:, None, None]

        # Left as they lie, block by block: putting a head's tokens side by side takes as long as the products.
        stored = gather_blocks(kv, blocks)
        k = stored.k.astype(q.dtype)  # [S, B, K, P, D]
        logits = jnp.einsum("skgd,sbkpd->skgbp", queries, k, preferred_element_type=jnp.float32) * options.scale
        if stored.k_scale is not None:
            logits *= stored.k_scale.swapaxes(1, 2)[:, :, None]
        logits = soft_capped(logits, options.soft_cap)
        logits = jnp.where(seen[:, None, None], logits, 2 * _NO_KEY)  # under every maximum, so that exp gives 0
        m_new = jnp.maximum(m, logits.max(axis=(-2, -1)))
        p = jnp.exp(logits - m_new[..., None, None])
        shrink = jnp.exp(m - m_new)
        l = l * shrink + p.sum(axis=(-2, -1))
        v = stored.v.astype(q.dtype)  # [S, B, K, P, D], quantised [S, B, K, D, P]
        if stored.v_scale is None:  # an unseen slot may hold anything, and 0 * NaN is NaN
            v = jnp.where(seen[:, :, None, :, None], v, 0)
        else:
            p *= jnp.where(seen[:, :, None], stored.v_scale.astype(jnp.float32), 0).swapaxes(1, 2)[:, :, None]
        sum_up = "skgbp,sbkpd->skgd" if stored.v_scale is None else "skgbp,sbkdp->skgd"
        pv = jnp.einsum(sum_up, p.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return index + 1, m_new, l, acc * shrink[..., None] + pv

    group = num_heads // num_kv_heads
    last_tile = (jnp.max(seq_lens) + tile - 1) // tile
    first_tile = jnp.int32(0)
    if kv_starts is not None:
        first_tile = jnp.min(jnp.where(seq_lens > 0, kv_starts // tile, last_tile))
    start = (
        first_tile,
        jnp.full((num_rows, num_kv_heads, group), _NO_KEY, jnp.float32),
        jnp.zeros((num_rows, num_kv_heads, group), jnp.float32),
        jnp.zeros((num_rows, num_kv_heads, group, head_dim), jnp.float32),
    )
    _, m, l, acc = jax.lax.while_loop(lambda carry: carry[0] < last_tile, attend_tile, start)
    out = acc / jnp.maximum(l, 1e-30)[..., None]
    lse = jnp.where(l > 0, m + jnp.log(jnp.maximum(l, 1e-30)), -jnp.inf)
    return AttentionOutput(out.reshape(q.shape).astype(q.dtype), lse.reshape(num_rows, num_heads))
