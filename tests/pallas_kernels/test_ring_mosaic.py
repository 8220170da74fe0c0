"""The ring without barriers (cp.async), which the interpreter does not know: played through with a memory that hands out a
copy only when it has been waited for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_ring
from pallas_kernels.mosaic_ring import Ring, RingShape

TILE = 8


class Copies:
    """cp.async: every copy is a group; waiting for all but the n latest lets the others arrive."""

    class OOBFillMode:
        PROMISE_IN_BOUNDS = None

    def __init__(self):
        self.pending = []

    def copy_gmem_to_smem(self, source, target, oob_mode):
        target[...] = np.nan  # while it is under way the place holds neither
        self.pending.append((source, target))

    def wait_gmem_to_smem(self, n):
        while len(self.pending) > n:
            source, target = self.pending.pop(0)
            target[...] = source


class Ref:
    """A numpy array with the `at` of a Pallas reference, whose parts are views."""

    def __init__(self, array):
        self.array = array

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        index = tuple(
            i
            if isinstance(i, slice)
            else slice(int(i.start), int(i.start) + i.size)
            if hasattr(i, "size") and hasattr(i, "start")
            else int(i)
            for i in index
        )
        return Ref(self.array[index])

    def __setitem__(self, index, value):
        self.array[...] = value.array if isinstance(value, Ref) else value


def play(monkeypatch, shape: RingShape, start: int, end: int) -> None:
    """Every tile of tokens start .. end - 1 holds its keys and values when it has been waited for."""
    copies = Copies()
    monkeypatch.setattr(mosaic_ring, "plgpu", copies)
    rng = np.random.default_rng(0)
    columns = -(-end // shape.block_size)
    table = rng.permutation(columns + 3)[:columns]
    k_pool, v_pool = (rng.standard_normal((columns + 3, shape.block_size, 4)) for _ in range(2))
    refs = [Ref(np.full((shape.stages, TILE, 4), np.nan)) for _ in range(2)]
    first, count = start // TILE, -(-end // TILE) - start // TILE
    ring = Ring(
        shape,
        refs,
        Ref(k_pool),
        Ref(v_pool),
        lambda column: table[int(column)],
        jnp.int32(first),
        jnp.int32(count),
        jnp.int32(end),
    )
    ring.fill()
    for index in range(count):
        ring.advance(jnp.int32(index))
        ring.wait_keys(jnp.int32(index))
        ring.wait_values(jnp.int32(index))
        for side, pool in ((ring.keys, k_pool), (ring.values, v_pool)):
            tile = side(jnp.int32(index)).array
            for token in range(max(start, (first + index) * TILE), min(end, (first + index + 1) * TILE)):
                stored = pool[table[token // shape.block_size], token % shape.block_size]
                np.testing.assert_array_equal(tile[token % TILE], stored)
    ring.drain()
    assert not copies.pending


def shape_of(block_size: int, stages: int) -> RingShape:
    tile = jax.ShapeDtypeStruct((TILE, 4), jnp.float32)
    return RingShape(stages, TILE, block_size, tile, tile, has_tma=False)


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("stages", [2, 4])
def test_tiles_have_arrived_when_they_are_read(block_size, stages, monkeypatch):
    for start, end in ((0, 1), (0, 8), (3, 70), (16, 61)):
        play(monkeypatch, shape_of(block_size, stages), start, end)


@pytest.mark.parametrize("wrong", ["wait_keys", "advance"])
def test_a_ring_that_waits_too_little_or_for_other_tiles_is_seen(wrong, monkeypatch):
    too_late = {
        "wait_keys": lambda ring, index: mosaic_ring.plgpu.wait_gmem_to_smem(2 * ring.shape.copies * ring.shape.stages),
        "advance": lambda ring, index: ring._fetch_if_there(index + ring.shape.stages),
    }
    monkeypatch.setattr(Ring, wrong, too_late[wrong])
    with pytest.raises(AssertionError):
        play(monkeypatch, shape_of(8, 2), 3, 70)
