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

from pallas_kernels import mosaic_compat
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
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
    """Products are taken in the stored dtype, sums in float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.num_kv_heads, kv.block_size
    if reason := mosaic_compat.unavailable():
        raise NotImplementedError(f"the Mosaic GPU kernels cannot run: JAX {reason}")
    if not options.scale > 0:
        raise ValueError(f"Expected a positive scale, got {options.scale=}")
    if plan is None:
        capacity = block_table.shape[1] * block_size
        plan = plan_decode(
            seq_lens, num_kv_heads=num_kv_heads, capacity=capacity, window=options.window, kv_starts=kv_starts
        )
    group = num_heads // num_kv_heads
    columns = 8 if group <= 8 else 16
    # Query heads as columns of a tensor core's tile.
    grouped = q.astype(kv.k.dtype).reshape(num_rows, num_kv_heads, group, head_dim)
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, columns - group), (0, 0)))
    items = plan.row.shape[0]
    tile = jax.ShapeDtypeStruct((TILE, head_dim), kv.k.dtype)
    has_tma = interpret or mosaic_compat.compute_capability() >= (9, 0)
    ring = RingShape(num_stages(head_dim), TILE, block_size, tile, tile, has_tma)
    out, lse = mosaic_compat.kernel(
        functools.partial(_attend_item, options=options, ring_shape=ring),
        out_shape=(
            jax.ShapeDtypeStruct((items, num_kv_heads, columns, head_dim), jnp.float32 if plan.is_split else q.dtype),
            jax.ShapeDtypeStruct((items, num_kv_heads, columns), jnp.float32),
        ),
        grid={"item": items, "kv_head": num_kv_heads},
        scratch=[
            plgpu.SMEM((TILE, columns), kv.v.dtype, transforms=(plgpu.TilingTransform((8, 8)),)),
            *ring.scratch(),
        ],
        name="decode_attention",
        interpret=interpret,
    )(plan.row, plan.start, plan.end, block_table, padded, kv.k, kv.v)
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


def num_stages(head_dim: int) -> int:
    """Tiles in shared memory: 64 KiB, so that an A100's multiprocessor holds two warpgroups and an H200's three."""
    return 4 if head_dim == 64 else 2


def _attend_item(
    row_ref,
    start_ref,
    end_ref,
    table_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    p_ref,
    *ring_refs,
    options: AttentionOptions,
    ring_shape: RingShape,
):
    """Refs as in decode_attention, q [S, K, N, D] with N query heads, padded. Arrays below are [TILE, N], [N], [D, N]."""
    item, kv_head = jax.lax.axis_index("item"), jax.lax.axis_index("kv_head")
    row = row_ref[item]

    @pl.when(row >= 0)
    def _():
        start, end = start_ref[item], end_ref[item]
        columns, head_dim = q_ref.shape[2:]
        dtype = p_ref.dtype
        by_row, left, right = (
            layout(dtype) for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
        )
        by_column = by_row.reduce(0)
        # Logits times this are powers of 2; a capped logit is one already.
        to_log2 = 1.0 if options.soft_cap else options.scale * _LOG2_E

        def full(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def spread(x, shape):
            return jax.lax.broadcast_in_dim(x, shape, (1,))

        def seen(first, shape, layout):
            position = first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
            return (position >= start) & (position < end)

        first = jax.lax.div(start, jnp.int32(TILE))
        count = jnp.maximum(jax.lax.div(end + (TILE - 1), jnp.int32(TILE)) - first, 0)
        ring = Ring(
            ring_shape,
            ring_refs,
            k_ref.at[:, kv_head],
            v_ref.at[:, kv_head],
            lambda column: table_ref[row, column],
            first,
            count,
            end,
        )
        ring.fill()
        q = plgpu.load(q_ref.at[row, kv_head].transpose((1, 0)), layout=right, optimized=False)

        def attend_tile(index, carry, *, is_whole: bool):
            """`is_whole`: all of the tile is seen."""
            m, l, acc = carry  # l is still to be summed over tokens
            ring.advance(index)
            position = (first + index) * TILE
            ring.wait_keys(index)
            keys = plgpu.load(ring.keys(index), layout=left)
            logits = plgpu.mma(full((TILE, columns), 0, by_row), keys, q)
            if options.soft_cap:
                logits = options.soft_cap * _LOG2_E * jnp.tanh(logits * (options.scale / options.soft_cap))
            if not is_whole:
                logits = jnp.where(seen(position, logits.shape, by_row), logits, -jnp.inf)
            m_new = jnp.maximum(m, jnp.max(logits, axis=0) * to_log2)
            shrink = jnp.exp2(m - m_new)
            p = jnp.exp2(logits * to_log2 - spread(m_new, logits.shape))
            l = l * spread(shrink, l.shape) + p
            p_ref[...] = p.astype(dtype)
            ring.wait_values(index)
            values = ring.values(index)
            if not is_whole:
                _zero_unseen(values, position, seen)
                ring.release_writes()
            p = plgpu.load(p_ref, layout=right)
            turned = plgpu.load(values.transpose((1, 0)), layout=left)
            return m_new, l, plgpu.mma(acc * spread(shrink, acc.shape), turned, p)

        def attend_up_to(stretch, carry):
            """Whole tiles, and one that may not be whole: the first, or the last."""
            index, *sums = carry
            stop = jnp.where(stretch == stretches - 1, count - 1, 0)
            sums = jax.lax.fori_loop(index, stop, functools.partial(attend_tile, is_whole=True), tuple(sums))
            return stop + 1, *attend_tile(stop, sums, is_whole=False)

        starts_inside = (jax.lax.rem(start, jnp.int32(TILE)) != 0) & (count > 1)
        stretches = jnp.minimum(count, 1) + starts_inside.astype(jnp.int32)
        sums = (
            full((columns,), _NO_KEY, by_column),
            full((TILE, columns), 0, by_row),
            full((head_dim, columns), 0, by_row),
        )
        _, m, l, acc = jax.lax.fori_loop(0, stretches, attend_up_to, (jnp.int32(0), *sums))
        ring.drain()
        l = jnp.sum(l, axis=0)
        share = 1 / jnp.maximum(l, 1e-30)
        out = (acc * spread(share, acc.shape)).astype(out_ref.dtype)
        turned = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)  # a thread has two channels of one head
        store(out_ref.at[item, kv_head].transpose((1, 0)), turned)
        lse = (m + jnp.log2(jnp.maximum(l, 1e-30))) * math.log(2)
        store(lse_ref.at[item, kv_head], jnp.where(l > 0, lse, -jnp.inf))


def _zero_unseen(values, position, seen) -> None:
    """Clear the slots of a tile that are not seen: they may hold anything, and 0 * NaN is NaN.

    A quarter of a tile of 128 channels at a time, or it would take more registers than all the rest.
    """
    layout = plgpu.Layout.MMA_ACC(values.dtype, m_warps=2)
    for row in range(0, values.shape[0], 32):
        for channel in range(0, values.shape[1], 64):
            some = values.at[pl.ds(row, 32), pl.ds(channel, 64)]
            stored = plgpu.load(some, layout=layout)
            some[...] = jnp.where(seen(position + row, stored.shape, layout), stored, jnp.zeros_like(stored))


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
