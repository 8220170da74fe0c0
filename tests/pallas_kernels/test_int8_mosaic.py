"""mosaic_int8's registers, thread by thread: each instruction multiplies the columns of one factor by the rows of the other
that belong together. The interpreter sees none of this. And the bytes' way into float16, in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_int8
from pallas_kernels.int8_dequant import INT8_BIAS
from pallas_kernels.mosaic_compat import plgpu


def places(layout, shape: tuple[int, int]) -> np.ndarray:
    """object[4 warps, 32 lanes, *registers]: the tuple of (row, column) pairs that each register holds."""
    layout = layout.to_mgpu()
    at = np.empty(shape, object)
    for place in np.ndindex(shape):
        at[place] = place
    for tile in layout.tiling.tiles:  # each splits the last axes and puts the insides last
        outer, inner = at.shape[: at.ndim - len(tile)], at.shape[at.ndim - len(tile) :]
        split = [n for size, part in zip(inner, tile, strict=True) for n in (size // part, part)]
        axes = [*range(len(outer))] + [len(outer) + i for i in [*range(0, len(split), 2), *range(1, len(split), 2)]]
        at = at.reshape(*outer, *split).transpose(axes)
    registers = layout.registers_shape(shape)
    held = np.empty((4, 32, *registers), object)
    for warp, lane, *register in np.ndindex(held.shape):
        index = list(register) + [0] * (at.ndim - len(register))
        for dims, number in ((layout.warp_dims, warp), (layout.lane_dims, lane)):
            for dim in reversed(dims):
                size = dim.times if isinstance(dim, plgpu.Replicated) else at.shape[dim]
                number, digit = divmod(number, size)
                if not isinstance(dim, plgpu.Replicated):
                    index[dim] = digit
        values = []
        for element in range(layout.vector_length):
            index[layout.vector_dim] = element
            values.append(at[tuple(index)])
        held[(warp, lane, *register)] = tuple(values)
    return held


def exchanged(four: tuple) -> tuple[tuple, tuple]:
    return four[2:], four[:2]


def halves(four: tuple) -> tuple[tuple, tuple]:
    return four[:2], four[2:]


def slots_of(operand: np.ndarray, expected: np.ndarray) -> dict:
    """Place in the instruction's operand -> place in the array that is there."""
    assert operand.shape == expected.shape
    return {
        slot: place for held, slots in zip(operand.flat, expected.flat) for slot, place in zip(slots, held, strict=True)
    }


def pairs_what_belongs_together(columns: int, halves_of_right) -> bool:
    rows, depth = 64, 32
    left, right = {}, {}
    stored = places(mosaic_int8.stored_layout(), (rows, depth))
    factor = places(mosaic_int8.factor_layout(), (depth, columns))
    lhs = places(plgpu.Layout.MMA_LHS(jnp.float16), (rows, depth))
    rhs = places(plgpu.Layout.MMA_RHS(jnp.float16), (depth, columns))
    for thread in np.ndindex(4, 32):
        left |= slots_of(mosaic_int8.left_operand(stored[thread], halves), lhs[thread])
        warps_right = slots_of(mosaic_int8.right_operand(factor[thread], halves_of_right), rhs[thread])
        assert all(right.get(slot, place) == place for slot, place in warps_right.items()), "warps differ"
        right |= warps_right
    assert len(left) == rows * depth and len(right) == depth * columns
    assert {left[0, k][1] for k in range(depth)} == {*range(depth)}
    return all(
        is_row == row and right[k, column] == (is_k, column)
        for (row, k), (is_row, is_k) in left.items()
        for column in range(columns)
    )


@pytest.mark.parametrize("columns", [8, 16])
def test_products_pair_what_belongs_together(columns):
    assert pairs_what_belongs_together(columns, halves)
    assert not pairs_what_belongs_together(columns, exchanged)


def test_bytes_become_float16():
    numbers = np.arange(-128, 128, dtype=np.int8)
    words = numbers.view(np.uint32) ^ np.uint32(mosaic_int8.SIGNS)
    pool = np.concatenate(
        [words.view(np.uint8).reshape(-1, 4), np.full((64, 4), mosaic_int8.EXPONENTS & 0xFF, np.uint8)], 1
    )
    picked = [pool[:, [(selector >> (4 * i)) & 7 for i in range(4)]] for selector in mosaic_int8.SELECTORS]
    biased = np.ascontiguousarray(np.concatenate(picked, axis=1)).view(np.float16).reshape(-1)
    np.testing.assert_array_equal(biased, numbers.astype(np.float16) + np.float16(INT8_BIAS))
    np.testing.assert_array_equal(biased - np.float16(INT8_BIAS), numbers.astype(np.float16))
