"""prefill_attention for any device: one query tile at a time, online softmax over tiles of blocks.

Work is proportional to the real lengths: both loops have dynamic trip counts. KV tiles start at absolute positions, so a
token's output does not depend on how its prompt was cut into chunks.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, soft_capped
from pallas_kernels.layer_kv import LayerKV, gather_tokens

# Large query tiles run fewer loop steps, but short chunks fill them badly. XLA:CPU, 9 heads of 64: a chunk of 512 takes
# 11.7 ms with 128 and 12.6 with 64; 16 chunks of 32 behind a prefix take half as long with 64 as with 128.
LARGE_Q_TILE, SMALL_Q_TILE = 128, 32
# A large tile costs about as much as so many small ones.
_SMALL_TILES = 3
# Fewer rows of a matmul would not be rounded as many are (models.layers and BUILD_NOTES.md).
_LEAST_MATMUL_ROWS = 64
KV_TILE = 128
_NO_KEY = -1e30


def prefill_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    cu_q_lens: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
    kv_lens: jax.Array | None = None,
) -> AttentionOutput:
    cu_q_lens, context_lens = jnp.asarray(cu_q_lens), jnp.asarray(context_lens)  # traced indices need jax arrays
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size, window = kv.num_kv_heads, kv.block_size, options.window
    group = num_heads // num_kv_heads
    tile_blocks = max(1, KV_TILE // block_size)
    kv_tile = tile_blocks * block_size
    table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % tile_blocks)))
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    small = max(SMALL_Q_TILE, _LEAST_MATMUL_ROWS // group)

    def num_tiles(q_tile: int) -> jax.Array:
        return jnp.sum((q_lens + q_tile - 1) // q_tile)

    def attend(q_tile: int) -> AttentionOutput:
        # A tile may start at the last token: keep the slices in bounds.
        padded_q = jnp.pad(q, ((0, q_tile), (0, 0), (0, 0)))

        tile_ends = jnp.cumsum((q_lens + q_tile - 1) // q_tile)  # [R] query tiles up to and including sequence r

        def attend_q_tile(index, carry):
            out, lse = carry
            seq = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
            tiles_before = jnp.where(seq > 0, tile_ends[seq - 1], 0)
            offset = (index - tiles_before) * q_tile  # of the tile in its chunk
            start = cu_q_lens[seq] + offset
            queries = jax.lax.dynamic_slice_in_dim(padded_q, start, q_tile)  # [Q, H, D]
            queries = queries.reshape(q_tile, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
            queries = queries.reshape(num_kv_heads, group * q_tile, head_dim)
            valid = offset + jnp.arange(q_tile) < q_lens[seq]
            position = context_lens[seq] + offset + jnp.arange(q_tile)
            end = context_lens[seq] + jnp.minimum(offset + q_tile, q_lens[seq])
            if kv_lens is not None:
                end = jnp.minimum(end, kv_lens[seq])
            blocks_of_seq = table[seq]

            def attend_kv_tile(carry):
                kv_index, m, l, acc = carry
                blocks = jax.lax.dynamic_slice_in_dim(blocks_of_seq, kv_index * tile_blocks, tile_blocks)
                kv_position = kv_index * kv_tile + jnp.arange(kv_tile)
                owned = kv_position < end
                if window is not None:  # what is behind every window may be somebody else's already
                    owned &= kv_position > position[0] - window

                tokens = gather_tokens(kv, blocks)  # [K, tile, D]
                seen = kv_position <= position[:, None]  # [Q, tile]
                if kv_lens is not None:
                    seen &= kv_position < end
                if window is not None:
                    seen &= kv_position > position[:, None] - window
                seen = jnp.tile(seen, (group, 1))  # [G*Q, tile]
                k = tokens.k.astype(q.dtype)
                logits = jnp.einsum("kqd,ktd->kqt", queries, k, preferred_element_type=jnp.float32) * options.scale
                if tokens.k_scale is not None:
                    logits *= tokens.k_scale[:, None, :]
                logits = soft_capped(logits, options.soft_cap)
                logits = jnp.where(seen, logits, 2 * _NO_KEY)  # under every maximum, so that exp gives 0
                m_new = jnp.maximum(m, logits.max(axis=-1))
                p = jnp.exp(logits - m_new[..., None])
                shrink = jnp.exp(m - m_new)
                l = l * shrink + p.sum(axis=-1)
                v = tokens.v.astype(q.dtype)  # an unowned slot may hold anything, and 0 * NaN is NaN
                if tokens.v_scale is None:
                    v = jnp.where(owned[:, None], v, 0)
                else:
                    p *= jnp.where(owned, tokens.v_scale.astype(jnp.float32), 0)[:, None, :]
                pv = jnp.einsum("kqt,ktd->kqd", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
                return kv_index + 1, m_new, l, acc * shrink[..., None] + pv

            first = jnp.int32(0)
            if window is not None:
                first = jnp.maximum(context_lens[seq] + offset + 1 - window, 0) // kv_tile
            begin = (
                first,
                jnp.full((num_kv_heads, group * q_tile), _NO_KEY, jnp.float32),
                jnp.zeros((num_kv_heads, group * q_tile), jnp.float32),
                jnp.zeros((num_kv_heads, group * q_tile, head_dim), jnp.float32),
            )
            num_kv_tiles = (end + kv_tile - 1) // kv_tile
            _, m, l, acc = jax.lax.while_loop(lambda carry: carry[0] < num_kv_tiles, attend_kv_tile, begin)

            tile_out = (acc / jnp.maximum(l, 1e-30)[..., None]).reshape(num_kv_heads, group, q_tile, head_dim)
            tile_out = tile_out.transpose(2, 0, 1, 3).reshape(q_tile, num_heads, head_dim).astype(q.dtype)
            tile_lse = jnp.where(l > 0, m + jnp.log(jnp.maximum(l, 1e-30)), -jnp.inf)
            tile_lse = tile_lse.reshape(num_kv_heads, group, q_tile).transpose(2, 0, 1).reshape(q_tile, num_heads)
            # Rows past the chunk belong to the next one: keep what is there.
            old_out = jax.lax.dynamic_slice_in_dim(out, start, q_tile)
            old_lse = jax.lax.dynamic_slice_in_dim(lse, start, q_tile)
            tile_out = jnp.where(valid[:, None, None], tile_out, old_out)
            tile_lse = jnp.where(valid[:, None], tile_lse, old_lse)
            out = jax.lax.dynamic_update_slice_in_dim(out, tile_out, start, axis=0)
            return out, jax.lax.dynamic_update_slice_in_dim(lse, tile_lse, start, axis=0)

        nothing = (jnp.zeros_like(padded_q), jnp.full((num_tokens + q_tile, num_heads), -jnp.inf, jnp.float32))
        out, lse = jax.lax.fori_loop(0, tile_ends[-1], attend_q_tile, nothing)
        return AttentionOutput(out[:num_tokens], lse[:num_tokens])

    if num_tokens < LARGE_Q_TILE:
        return attend(small)
    few_and_long = _SMALL_TILES * num_tiles(LARGE_Q_TILE) <= num_tiles(small)
    return jax.lax.cond(few_and_long, lambda: attend(LARGE_Q_TILE), lambda: attend(small))
