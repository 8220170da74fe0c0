"""Random contents in scattered blocks, shared by tests and benchmarks of every operation.

Pools are laid out by numpy loops, independently of kv_write. Everything that no row owns is poison: the null block,
free blocks and the slots after a row's end hold NaN, so that an operation that reads one too many shows it.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layer_kv import LayerKV

# Block tables are longer than any row needs; the surplus entries name blocks of other rows, or free ones.
_SURPLUS_COLUMNS = 2
_FREE_BLOCKS = 3


class PagedRows(NamedTuple):
    """Rows of keys and values, once as blocks and once as plain sequences (for oracles that know no blocks)."""

    kv: LayerKV
    block_table: np.ndarray  # i32[S, M]
    k: list[np.ndarray]  # S arrays [seq_len, K, D], in the stored dtype
    v: list[np.ndarray]


def paged_rows(
    rng: np.random.Generator,
    seq_lens: tuple[int, ...],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    num_shared: int = 0,
) -> PagedRows:
    """Rows of normal random tokens in randomly permuted blocks.

    The last row has its first `num_shared` tokens (a multiple of block_size) in common with the row before it, in the
    same blocks.
    """
    assert num_shared % block_size == 0, f"Expected whole blocks to be shared, got {num_shared=} {block_size=}"
    counts = [-(-n // block_size) for n in seq_lens]
    shared_blocks = num_shared // block_size
    num_blocks = 1 + sum(counts) - shared_blocks + _FREE_BLOCKS
    order = list(1 + rng.permutation(num_blocks - 1))
    table = rng.choice(order, (len(seq_lens), max(counts) + _SURPLUS_COLUMNS)).astype(np.int32)
    np_dtype = jnp.dtype(dtype)
    pool_k = np.full((num_blocks, num_kv_heads, block_size, head_dim), np.nan, np_dtype)
    pool_v = pool_k.copy()
    rows_k, rows_v = [], []
    for row, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        shape = (seq_len, num_kv_heads, head_dim)
        k, v = (rng.standard_normal(shape, np.float32).astype(np_dtype) for _ in range(2))
        blocks = [order.pop() for _ in range(count - (shared_blocks if row == len(seq_lens) - 1 else 0))]
        if row == len(seq_lens) - 1 and shared_blocks:
            k[:num_shared], v[:num_shared] = rows_k[-1][:num_shared], rows_v[-1][:num_shared]
            blocks = [*table[row - 1, :shared_blocks], *blocks]
        for position in range(seq_len):
            block, offset = blocks[position // block_size], position % block_size
            pool_k[block, :, offset], pool_v[block, :, offset] = k[position], v[position]
        table[row, :count] = blocks
        rows_k.append(k)
        rows_v.append(v)
    return PagedRows(LayerKV(jnp.asarray(pool_k), jnp.asarray(pool_v)), table, rows_k, rows_v)


@dataclasses.dataclass(frozen=True)
class KVWriteCase:
    """`num_tokens` tokens to random distinct slots, and `num_padding` to the null block."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    kv_dtype: str = "float32"
    num_tokens: int = 70
    num_padding: int = 5


class KVWriteInputs(NamedTuple):
    kv: LayerKV
    k: np.ndarray  # [T, K, D]
    v: np.ndarray
    slots: np.ndarray  # i32[T]
    is_padding: np.ndarray  # bool[T]


def kv_write_inputs(case: KVWriteCase, seed: int = 0) -> KVWriteInputs:
    """A pool twice as large as the tokens, full of random values; padding stands between the tokens."""
    rng = np.random.default_rng(seed)
    total = case.num_tokens + case.num_padding
    num_blocks = 2 + 2 * case.num_tokens // case.block_size
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    pool = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.dtype(case.kv_dtype)) for _ in range(2)]
    tokens_shape = (total, case.num_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(tokens_shape, np.float32).astype(jnp.dtype(case.dtype)) for _ in range(2))
    slots = case.block_size + rng.permutation((num_blocks - 1) * case.block_size)[:total]
    is_padding = rng.permutation(total) < case.num_padding
    slots[is_padding] %= case.block_size
    return KVWriteInputs(LayerKV(*pool), k, v, slots.astype(np.int32), is_padding)


KV_WRITE_CASES = (
    KVWriteCase(block_size=8, num_kv_heads=4, dtype="float32"),
    KVWriteCase(block_size=16, num_kv_heads=1, head_dim=80, dtype="bfloat16", kv_dtype="bfloat16"),
    KVWriteCase(block_size=32, num_kv_heads=3, head_dim=128, dtype="float16", kv_dtype="float16"),
    KVWriteCase(block_size=64, dtype="float32", kv_dtype="bfloat16"),
    KVWriteCase(block_size=128, num_tokens=1, num_padding=0),
    KVWriteCase(num_tokens=0, num_padding=6),
)
