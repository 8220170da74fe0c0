"""decode_attention in Pallas' Mosaic GPU backend, compute capability 8.0 and up: split over the keys as the Triton kernel,
and by the same SplitPlan.

A warpgroup attends from the G query heads of one KV head to one item, a tile of 64 tokens at a time. Blocks arrive in a
ring of shared memory, several tiles ahead: by TMA from Hopper on, by cp.async before.

- Tokens are the rows of the tensor cores' tiles, 16 a warp, and query heads their 8 or 16 columns. So logits are reduced
  over warps, once a tile for their maximum and once an item for their sum, and probabilities cross shared memory.
- Blocks end with garbage: values of unseen tokens are zeroed in shared memory, in the tiles that have any.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_compat, mosaic_support
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention.mosaic_products import FloatProducts, Int8Products, Seen, filled, rows_layout
from pallas_kernels.decode_attention.plan import TILE, SplitPlan, plan_decode
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.mosaic_compat import plgpu, store
from pallas_kernels.mosaic_ring import Ring, RingShape

# Finite, so that an item that has seen no key yet keeps exp(m - m) = 1 and never NaN.
_NO_KEY = -1e30
_LOG2_E = math.log2(math.e)
# Items that the second kernel merges at a time.
_MERGED = 16


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    kv_starts: jax.Array | None = None,
    plan: SplitPlan | None = None,
    *,
    interpret: bool = False,
) -> AttentionOutput:
    """Products are taken in the stored dtype, int8 in float16; sums in float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.num_kv_heads, kv.block_size
    if reason := mosaic_support.unavailable():
        raise ValueError(f"the Mosaic GPU kernels cannot run: JAX {reason}")
    if not options.scale > 0:
        raise ValueError(f"Expected a positive scale, got {options.scale=}")
    if plan is None:
        capacity = block_table.shape[1] * block_size
        plan = plan_decode(
            seq_lens, num_kv_heads=num_kv_heads, capacity=capacity, window=options.window, kv_starts=kv_starts
        )
    group = num_heads // num_kv_heads
    columns = 8 if group <= 8 else 16
    products = jnp.dtype(jnp.float16) if kv.k_scale is not None else kv.k.dtype
    # Query heads as columns of a tensor core's tile.
    grouped = q.astype(products).reshape(num_rows, num_kv_heads, group, head_dim)
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    items = plan.row.shape[0]
    ring = ring_shape(kv, has_tma=interpret or mosaic_compat.compute_capability() >= (9, 0))
    kind = FloatProducts if kv.k_scale is None else Int8Products
    out, lse = mosaic_compat.kernel(
        functools.partial(_attend_item, options=options, ring_shape=ring, interpret=interpret),
        out_shape=(
            jax.ShapeDtypeStruct((items, num_kv_heads, columns, head_dim), jnp.float32 if plan.is_split else q.dtype),
            jax.ShapeDtypeStruct((items, num_kv_heads, columns), jnp.float32),
        ),
        grid={"item": items, "kv_head": num_kv_heads},
        scratch=[kind.exchange_scratch(columns, products), ring.scratch()],
        name="decode_attention",
        interpret=interpret,
    )((plan.row, plan.start, plan.end), block_table, padded, kv)
    if not plan.is_split:
        return AttentionOutput(out[:, :, :group].reshape(q.shape), lse[:, :, :group].reshape(q.shape[:2]))
    merged = mosaic_compat.kernel(
        _merge_items,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((num_rows, num_heads), jnp.float32),
        ),
        grid={"row": num_rows, "head": num_heads},
        scratch=[],
        name="decode_attention_merge",
        interpret=interpret,
    )(plan.first_item, out, lse)
    return AttentionOutput(*merged)


def ring_shape(kv: LayerKV, *, has_tma: bool) -> RingShape:
    """As many tiles of 64 tokens as fit 64 KiB, but two at least: an A100's multiprocessor then holds two warpgroups and an
    H200's three, of head_dim 256 one."""
    head_dim, dtype = kv.head_dim, kv.k.dtype
    stages = max(2, 65536 // (2 * TILE * head_dim * dtype.itemsize))
    is_turned = kv.v_format.is_scaled
    if head_dim % 64 or (is_turned and kv.block_size < TILE):
        raise ValueError(
            f"Expected head_dim a multiple of 64 and int8 blocks of at least {TILE} tokens, got {kv.k.shape=}"
        )
    keys = jax.ShapeDtypeStruct((TILE, head_dim), dtype)
    values = jax.ShapeDtypeStruct((head_dim, TILE), dtype) if is_turned else keys
    return RingShape(stages, TILE, kv.block_size, keys, values, has_tma, token_axes=(0, int(is_turned)))


def _attend_item(
    item_refs,
    table_ref,
    q_ref,
    kv_ref,
    out_ref,
    lse_ref,
    p_ref,
    ring_refs,
    *,
    options: AttentionOptions,
    ring_shape: RingShape,
    interpret: bool,
):
    """Refs are trees as in decode_attention; item_refs are row, start, end of a SplitPlan, q [S, K, N, D] with N query heads,
    padded. Arrays below are [TILE, N], [N] and [D, N]."""
    item, kv_head = jax.lax.axis_index("item"), jax.lax.axis_index("kv_head")
    row, start, end = (ref[item] for ref in item_refs)
    columns, head_dim = q_ref.shape[2:]

    @pl.when(row >= 0)
    def _():
        first = jax.lax.div(start, jnp.int32(TILE))
        count = jnp.maximum(jax.lax.div(end + (TILE - 1), jnp.int32(TILE)) - first, 0)
        pools = [pool.at[:, kv_head] for pool in jax.tree.leaves(kv_ref)]  # keys, values, and their scales if any
        ring = Ring(ring_shape, ring_refs, *pools[:2], lambda column: table_ref[row, column], first, count, end)
        seen = Seen(start, end)
        here = (ring, seen, q_ref.at[row, kv_head], p_ref)
        products = Int8Products(*here, tuple(pools[2:]), interpret) if len(pools) > 2 else FloatProducts(*here)
        ring.fill()
        queries = products.queries()
        by_row = rows_layout()
        by_column = by_row.reduce(0)
        # Logits times this are powers of 2; a capped logit is one already.
        to_log2 = 1.0 if options.soft_cap else options.scale * _LOG2_E

        def spread(x, shape):
            return jax.lax.broadcast_in_dim(x, shape, (1,))

        def attend_tile(index, carry, *, is_whole: bool):
            """`is_whole`: all of the tile is seen."""
            m, l, acc, scales = carry  # l is still to be summed over tokens
            ring.advance(index)
            position = (first + index) * TILE
            ring.wait_keys(index)
            logits = products.logits(index, queries, scales)
            next_scales = products.scales(index + 1)
            if options.soft_cap:
                logits = options.soft_cap * _LOG2_E * jnp.tanh(logits * (options.scale / options.soft_cap))
            if not is_whole:
                logits = jnp.where(seen.rows(position, logits.shape, by_row), logits, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(logits, axis=0) * to_log2)
            shrink = jnp.exp2(m - m_new)
            p = jnp.exp2(logits * to_log2 - spread(m_new - products.shift, logits.shape))
            l = l * spread(shrink, l.shape) + p
            products.exchange(p, position, scales, is_whole)
            ring.wait_values(index)
            acc = products.add_values(acc * spread(shrink, acc.shape), index, position, is_whole)
            return m_new, l, acc, next_scales

        def attend_up_to(stretch, carry):
            """Whole tiles, and one that may not be whole: the first, or the last."""
            index, *sums = carry
            stop = jnp.where(stretch == stretches - 1, count - 1, 0)
            sums = jax.lax.fori_loop(index, stop, functools.partial(attend_tile, is_whole=True), tuple(sums))
            return stop + 1, *attend_tile(stop, sums, is_whole=False)

        starts_inside = (jax.lax.rem(start, jnp.int32(TILE)) != 0) & (count > 1)
        stretches = jnp.minimum(count, 1) + starts_inside.astype(jnp.int32)
        sums = (
            filled((columns,), _NO_KEY, by_column),
            filled((TILE, columns), 0, by_row),
            filled((head_dim, columns), 0, by_row),
        )
        carry = jnp.int32(0), *sums, products.scales(jnp.int32(0))
        _, m, l, acc, _ = jax.lax.fori_loop(0, stretches, attend_up_to, carry)
        ring.drain()
        l = jnp.sum(l, axis=0)
        share = 1 / jnp.maximum(l, 1e-30)
        out = (acc * spread(share, acc.shape)).astype(out_ref.dtype)
        turned = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)  # a thread has two channels of one head
        store(out_ref.at[item, kv_head].transpose((1, 0)), turned)
        lse = (m - products.shift + jnp.log2(jnp.maximum(l, 1e-30))) * math.log(2)
        store(lse_ref.at[item, kv_head], jnp.where(l > 0, lse, -jnp.inf))


def _merge_items(first_item_ref, part_ref, part_lse_ref, out_ref, lse_ref):
    """One row and query head: attention_output.merge over any number of parts; the parts' heads are [K, N], padded."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    num_kv_heads = part_ref.shape[1]
    group = out_ref.shape[1] // num_kv_heads
    kv_head, column = jax.lax.div(head, jnp.int32(group)), jax.lax.rem(head, jnp.int32(group))
    first, last = first_item_ref[row], first_item_ref[row + 1]
    layout = plgpu.Layout.WGMMA.reduce(1)  # any multiple of 64 numbers

    def merge_some(turn, carry):
        m, l, acc = carry
        item = [first + turn * _MERGED + i for i in range(_MERGED)]
        place = [(jnp.minimum(i, last - 1), kv_head, column) for i in item]
        lse = [jnp.where(i < last, part_lse_ref[p], -jnp.inf) for i, p in zip(item, place, strict=True)]
        parts = [plgpu.load(part_ref.at[p], layout=layout, optimized=False) for p in place]
        m_new = functools.reduce(jnp.maximum, lse, m)
        shrink = jnp.exp2((m - m_new) * _LOG2_E)
        l, acc = l * shrink, acc * shrink
        for part_lse, part in zip(lse, parts, strict=True):
            weight = jnp.exp2((part_lse - m_new) * _LOG2_E)
            l, acc = l + weight, acc + part * weight
        return m_new, l, acc

    zeros = plgpu.layout_cast(jnp.zeros(out_ref.shape[2:], jnp.float32), layout)
    turns = jax.lax.div(last - first + (_MERGED - 1), jnp.int32(_MERGED))
    m, l, acc = jax.lax.fori_loop(0, turns, merge_some, (jnp.float32(_NO_KEY), jnp.float32(0), zeros))
    store(out_ref.at[row, head], (acc * (1 / jnp.maximum(l, 1e-30))).astype(out_ref.dtype))
    lse_ref[row, head] = jnp.where(l > 0, m + jnp.log2(jnp.maximum(l, 1e-30)) * math.log(2), -jnp.inf)
