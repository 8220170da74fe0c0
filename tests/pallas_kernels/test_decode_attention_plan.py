"""The plan of a decode step: items cover what is seen, once, and are many and alike."""

import jax
import numpy as np
import pytest

from pallas_kernels.decode_attention.plan import TILE, SplitPlan, plan_decode

_jitted = jax.jit(plan_decode, static_argnames=("num_kv_heads", "capacity", "window", "chunk"))


def plan_of(lengths, **options) -> SplitPlan:
    """Of numpy arrays."""
    return jax.tree.map(np.asarray, _jitted(np.asarray(lengths, np.int32), **options))


def tokens_of_rows(plan: SplitPlan, num_rows: int) -> list[list[int]]:
    """Positions that the items of each row visit, in order."""
    seen = [[] for _ in range(num_rows)]
    for item in range(plan.first_item[-1]):
        row = plan.row[item]
        assert plan.first_item[row] <= item < plan.first_item[row + 1]
        seen[row] += range(plan.start[item], plan.end[item])
    assert (plan.row[plan.first_item[-1] :] == -1).all()
    return seen


@pytest.mark.parametrize(
    "window, with_starts, chunk",
    [(None, False, None), (None, True, 64), (1, False, 192), (2, True, None), (65, False, None), (300, True, 192)],
)
def test_items_visit_what_is_seen_once_and_in_order(window, with_starts, chunk):
    rng = np.random.default_rng(0)
    for capacity in (80, 2000):
        lengths = np.r_[0, capacity, 1, rng.integers(0, capacity + 1, 20)].astype(np.int32)
        starts = rng.integers(0, lengths + 2).astype(np.int32) if with_starts else np.zeros_like(lengths)
        plan = plan_of(
            lengths,
            num_kv_heads=3,
            capacity=capacity,
            window=window,
            kv_starts=starts if with_starts else None,
            chunk=chunk,
        )
        first = np.maximum(starts, lengths - window if window else 0)
        assert tokens_of_rows(plan, len(lengths)) == [list(range(a, b)) for a, b in zip(first, lengths, strict=True)]
        assert (np.diff(plan.first_item) >= 1).all(), "a row has no item to write its output"
        if not plan.is_split:
            assert (plan.row == np.arange(len(lengths))).all()
        later = plan.start[plan.row >= 0]
        assert all(start % TILE == 0 for start in later if start not in first)


@pytest.mark.parametrize("num_rows, num_kv_heads", [(1, 8), (8, 1), (64, 8), (8, 32)])
def test_the_number_of_items_holds_any_lengths(num_kv_heads, num_rows):
    """Lengths that need the most items: full tables, one token over a chunk, one long row among short ones."""
    capacity = 32768
    for lengths in (
        [capacity] * num_rows,
        [capacity] + [1] * (num_rows - 1),
        [1 + 256 * (i % 100) for i in range(num_rows)],
    ):
        plan = plan_of(lengths, num_kv_heads=num_kv_heads, capacity=capacity)
        assert plan.first_item[-1] <= plan.row.shape[0] <= num_rows + 2048 // num_kv_heads
        assert [len(seen) for seen in tokens_of_rows(plan, num_rows)] == lengths


@pytest.mark.parametrize("num_kv_heads", [4, 8])
def test_a_short_row_in_a_long_table_fills_the_gpu(num_kv_heads):
    plan = plan_of([2048], num_kv_heads=num_kv_heads, capacity=32768)
    assert plan.first_item[-1] * num_kv_heads >= min(132, 2048 // TILE * num_kv_heads)


def test_ragged_rows_are_cut_into_alike_items():
    """760 tiles of 8 heads: 4 tiles an item, so that the long row is 128 items and no item waits for it."""
    plan = plan_of([32768] + [512] * 31, num_kv_heads=8, capacity=32768)
    assert (plan.end - plan.start).max() == 256
    assert np.diff(plan.first_item).tolist() == [128] + [2] * 31


def test_rows_that_fit_one_tile_are_not_split():
    assert not plan_of([3, 64], num_kv_heads=8, capacity=64).is_split
    assert not plan_of([3, 5000], num_kv_heads=8, capacity=8192, window=1).is_split
    assert not plan_of([3, 5000], num_kv_heads=8, capacity=8192, chunk=8192).is_split
    assert plan_of([3, 65], num_kv_heads=8, capacity=128).is_split


@pytest.mark.parametrize("chunk", [0, -64, 100])
def test_chunks_that_are_no_tiles_are_refused(chunk):
    with pytest.raises(ValueError, match="positive multiple of 64"):
        plan_of([3], num_kv_heads=8, capacity=64, chunk=chunk)
