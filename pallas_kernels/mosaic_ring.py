"""A ring of tiles of keys and values in shared memory, filled several tiles ahead out of the blocks of a paged pool."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_compat import plgpu


@dataclasses.dataclass(frozen=True)
class RingShape:
    """What a ring is made of.

    Attributes:
      stages: tiles it holds. tile: tokens of one, a power of two. block_size: tokens of a block, likewise.
      keys, values: shape and dtype of one tile of each. token_axes: the axes of keys and values that count tokens; the last
        one only where a block is no smaller than a tile.
      has_tma: tiles arrive by the tensor memory accelerator (compute capability 9.0 and up), which tells a barrier;
        without it by cp.async, which every thread waits for by counting.
    """

    stages: int
    tile: int
    block_size: int
    keys: jax.ShapeDtypeStruct
    values: jax.ShapeDtypeStruct
    has_tma: bool
    token_axes: tuple[int, int] = (0, 0)

    @property
    def copies(self) -> int:
        """Of one side of a tile."""
        return max(1, self.tile // self.block_size)

    def scratch(self) -> list:
        """For plgpu.kernel: the references that a Ring is made of."""
        sides = [_swizzled(self.stages, side) for side in (self.keys, self.values)]
        barrier = plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.stages) if self.has_tma else None
        return sides + [barrier] * 2 if self.has_tma else sides


def _swizzled(stages: int, tile: jax.ShapeDtypeStruct):
    """Up to 128 bytes of a row at a time, whose 16-byte pieces change places by row: no two rows meet in a bank."""
    row = min(128, tile.shape[-1] * tile.dtype.itemsize)
    transforms = (plgpu.TilingTransform((8, row // tile.dtype.itemsize)), plgpu.SwizzleTransform(row))
    return plgpu.SMEM((stages, *tile.shape), tile.dtype, transforms=transforms)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The tiles first .. first + count - 1 of one row, in order, by the warpgroup that reads them.

    Tile i is in slot i % stages from `wait_keys(i)` and `wait_values(i)` on, until tile i + stages is fetched. Every
    index is relative to `first`.

    Attributes:
      refs: those of RingShape.scratch. k_ref, v_ref: a KV head's blocks, [N, P, D] in global memory.
      block_of: column of the block table -> block id.
      end: tokens of the row that are seen; blocks behind them are not read.
    """

    shape: RingShape
    refs: list
    k_ref: Any
    v_ref: Any
    block_of: Any
    first: jax.Array
    count: jax.Array
    end: jax.Array

    def slot(self, index: jax.Array) -> jax.Array:
        return jax.lax.rem(index, jnp.int32(self.shape.stages))

    def keys(self, index: jax.Array):
        return self.refs[0].at[self.slot(index)]

    def values(self, index: jax.Array):
        return self.refs[1].at[self.slot(index)]

    def fill(self) -> None:
        """Fetch all but one slot's tiles."""
        for index in range(self.shape.stages - 1):
            self._fetch_if_there(jnp.int32(index))

    def advance(self, index: jax.Array) -> None:
        """Fetch what belongs in the slot of the tile before `index`, which nobody reads any more."""
        self._fetch_if_there(index + (self.shape.stages - 1))

    def wait_keys(self, index: jax.Array) -> None:
        if self.shape.has_tma:
            plgpu.barrier_wait(self.refs[2].at[self.slot(index)])
        else:  # and for values: all groups but those of the tiles fetched later
            plgpu.wait_gmem_to_smem(2 * self.shape.copies * (self.shape.stages - 1))

    def wait_values(self, index: jax.Array) -> None:
        if self.shape.has_tma:
            plgpu.barrier_wait(self.refs[3].at[self.slot(index)])

    def release_writes(self) -> None:
        """After storing into a tile: its place may be fetched into again. The accelerator sees memory another way."""
        if self.shape.has_tma:
            plgpu.commit_smem()

    def drain(self) -> None:
        """Before the kernel's end: no copy may be under way."""
        if not self.shape.has_tma:
            plgpu.wait_gmem_to_smem(0)

    def _fetch_if_there(self, index: jax.Array) -> None:
        if self.shape.has_tma:
            pl.when(index < self.count)(lambda: self._fetch(index))
        else:  # groups are counted, so there must be as many of them in every turn: the last tile once more
            self._fetch(jnp.clip(index, 0, jnp.maximum(self.count - 1, 0)), slot=self.slot(index))

    def _fetch(self, index: jax.Array, slot: jax.Array | None = None) -> None:
        slot = self.slot(index) if slot is None else slot
        shape, (column, offset) = self.shape, self.place(index)
        for side, pool in enumerate((self.k_ref, self.v_ref)):
            before = (slice(None),) * shape.token_axes[side]
            for part in range(shape.copies):
                block = pool.at[self.block_of(self.seen_column(column + part))]
                target = self.refs[side].at[slot]
                if shape.block_size < shape.tile:
                    target = target.at[*before, pl.ds(part * shape.block_size, shape.block_size)]
                elif shape.block_size > shape.tile:
                    block = block.at[*before, pl.ds(offset, shape.tile)]
                if shape.has_tma:
                    plgpu.copy_gmem_to_smem(block, target, self.refs[2 + side].at[slot])
                else:
                    plgpu.copy_gmem_to_smem(block, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Column of the block table and offset in its block of a tile's first token."""
        token = (self.first + index) * self.shape.tile
        block_size = jnp.int32(self.shape.block_size)
        return jax.lax.div(token, block_size), jax.lax.rem(token, block_size)

    def seen_column(self, column: jax.Array) -> jax.Array:
        """The column, or where that is behind the row's end its last one: that block is at hand, and nobody looks there."""
        last = jax.lax.div(jnp.maximum(self.end - 1, 0), jnp.int32(self.shape.block_size))
        return jnp.minimum(column, last)
