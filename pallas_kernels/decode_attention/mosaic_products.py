"""The two products of a tile in Mosaic GPU, for numbers stored as 16-bit floats or as int8 with scales.

Both have: `queries`, to be loaded once; `scales(index)` of a tile, loaded one tile ahead of their use; `logits`, [TILE, N];
`exchange`, which hands the probabilities [TILE, N] of a tile to all warps; and `add_values`, to [D, N].
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_int8
from pallas_kernels.decode_attention.plan import TILE
from pallas_kernels.mosaic_compat import plgpu, store
from pallas_kernels.mosaic_ring import Ring


def rows_layout(m_warps: int = 4):
    """Of [M, N] results: 16 rows a warp, or with 2 warps of rows also columns by warp."""
    return plgpu.Layout.MMA_ACC(jnp.float16, m_warps=m_warps)


def filled(shape: tuple[int, ...], value: float, layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The tokens start .. end - 1 of a row."""

    start: jax.Array
    end: jax.Array

    def rows(self, first: jax.Array, shape: tuple[int, ...], layout) -> jax.Array:
        """bool of `shape`: whether the token first + its row is seen."""
        position = first + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        return (position >= self.start) & (position < self.end)


@dataclasses.dataclass(frozen=True)
class FloatProducts:
    """Keys and values as they are stored.

    Attributes:
      q_ref: a row's queries of one KV head, [N, D]. p_ref: shared memory for probabilities.
    """

    ring: Ring
    seen: Seen
    q_ref: Any
    p_ref: Any
    shift = 0.0

    @staticmethod
    def exchange_scratch(columns: int, dtype: jnp.dtype):
        return plgpu.SMEM((TILE, columns), dtype, transforms=(plgpu.TilingTransform((8, 8)),))

    def queries(self) -> jax.Array:
        layout = plgpu.Layout.MMA_RHS(self.p_ref.dtype)
        return plgpu.load(self.q_ref.transpose((1, 0)), layout=layout, optimized=False)

    def scales(self, index: jax.Array) -> tuple:
        return ()

    def logits(self, index: jax.Array, queries: jax.Array, scales: tuple) -> jax.Array:
        keys = plgpu.load(self.ring.keys(index), layout=plgpu.Layout.MMA_LHS(self.p_ref.dtype))
        return plgpu.mma(filled((TILE, queries.shape[1]), 0, rows_layout()), keys, queries)

    def exchange(self, p: jax.Array, position: jax.Array, scales: tuple, is_whole: bool) -> None:
        self.p_ref[...] = p.astype(self.p_ref.dtype)

    def add_values(self, acc: jax.Array, index: jax.Array, position: jax.Array, is_whole: bool) -> jax.Array:
        values, dtype = self.ring.values(index), self.p_ref.dtype
        if not is_whole:
            self._zero_unseen(values, position)
            self.ring.release_writes()
        p = plgpu.load(self.p_ref, layout=plgpu.Layout.MMA_RHS(dtype))
        turned = plgpu.load(values.transpose((1, 0)), layout=plgpu.Layout.MMA_LHS(dtype))
        return plgpu.mma(acc, turned, p)

    def _zero_unseen(self, values, position: jax.Array) -> None:
        """Clear the slots of a tile that are not seen: they may hold anything, and 0 * NaN is NaN.

        A quarter of a tile of 128 channels at a time, or it would take more registers than all the rest.
        """
        layout = rows_layout(m_warps=2)
        for row in range(0, values.shape[0], 32):
            for channel in range(0, values.shape[1], 64):
                some = values.at[pl.ds(row, 32), pl.ds(channel, 64)]
                stored = plgpu.load(some, layout=layout)
                seen = self.seen.rows(position + row, stored.shape, layout)
                some[...] = jnp.where(seen, stored, jnp.zeros_like(stored))


@dataclasses.dataclass(frozen=True)
class Int8Products:
    """Keys and values as float16, exactly; scales multiply logits and probabilities. Values lie transposed in blocks.

    Keys keep the bias of their conversion: sums begin at minus what it comes to. Values do not: tensor cores round their
    running sums towards zero, and over a long row that would show.
    """

    ring: Ring
    seen: Seen
    q_ref: Any
    p_ref: Any
    scale_refs: tuple[Any, Any]  # of keys and of values: a KV head's, [N, P] in global memory
    interpret: bool
    # Probabilities times 2^8 times the values' scales are float16 numbers (see pallas_triton._SHIFT).
    shift = 8.0

    @staticmethod
    def exchange_scratch(columns: int, dtype: jnp.dtype):
        return plgpu.SMEM((columns, TILE), jnp.float16)

    def queries(self) -> tuple[jax.Array, jax.Array]:
        """As a factor, and the sums that logits begin at."""
        head_dim, columns = self.q_ref.shape[1], self.q_ref.shape[0]
        q = plgpu.load(self.q_ref.transpose((1, 0)), layout=mosaic_int8.factor_layout(), optimized=False)
        zeros = plgpu.layout_cast(jnp.zeros((TILE, head_dim), jnp.int8), mosaic_int8.stored_layout())
        nothing = filled((TILE, columns), 0, rows_layout())
        return q, -mosaic_int8.mma(nothing, zeros, q, is_biased=True, interpret=self.interpret)

    def scales(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        column, offset = self.ring.place(index)
        block = self.ring.block_of(self.ring.seen_column(column))
        places = [ref.at[block, pl.ds(offset, TILE)] for ref in self.scale_refs]
        return tuple(plgpu.load(place, layout=rows_layout().reduce(1), optimized=False) for place in places)

    def logits(self, index: jax.Array, queries: tuple, scales: tuple) -> jax.Array:
        keys = plgpu.load(self.ring.keys(index), layout=mosaic_int8.stored_layout())
        q, start = queries
        logits = mosaic_int8.mma(start, keys, q, is_biased=True, interpret=self.interpret)
        return logits * self._down_rows(scales[0], logits.shape)

    def exchange(self, p: jax.Array, position: jax.Array, scales: tuple, is_whole: bool) -> None:
        scale = self._down_rows(scales[1], p.shape)
        if not is_whole:
            scale = jnp.where(self.seen.rows(position, p.shape, rows_layout()), scale, 0)
        turned = plgpu.layout_cast((p * scale).astype(jnp.float16), plgpu.Layout.WGMMA_TRANSPOSED)
        store(self.p_ref.transpose((1, 0)), turned)

    def add_values(self, acc: jax.Array, index: jax.Array, position: jax.Array, is_whole: bool) -> jax.Array:
        p = plgpu.load(self.p_ref.transpose((1, 0)), layout=mosaic_int8.factor_layout())
        values = plgpu.load(self.ring.values(index), layout=mosaic_int8.stored_layout())
        return mosaic_int8.mma(acc, values, p, is_biased=False, interpret=self.interpret)

    @staticmethod
    def _down_rows(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.lax.broadcast_in_dim(scale.astype(jnp.float32), shape, (0,))
