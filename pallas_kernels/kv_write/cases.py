"""Random contents in scattered blocks, shared by tests and benchmarks of every operation.

Pools are laid out by numpy loops, independently of kv_write. Everything that no row owns is poison: the null block,
free blocks and the slots after a row's end hold NaN (int8: 127 with an infinite scale), so that an operation that reads
one too many shows it.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layer_kv import LayerKV, empty_layer_kv

# Block tables are longer than any row needs; the surplus entries name blocks of other rows, or free ones.
_SURPLUS_COLUMNS = 2
_FREE_BLOCKS = 3


class PagedRows(NamedTuple):
    """Rows of keys and values, once as blocks and once as plain sequences (for oracles that know no blocks): the stored
    numbers, dequantised where they are quantised."""

    kv: LayerKV
    block_table: np.ndarray  # i32[S, M]
    k: list[np.ndarray]  # S arrays [seq_len, K, D]
    v: list[np.ndarray]


def paged_rows(
    rng: np.random.Generator,
    seq_lens: tuple[int, ...],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: str,
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
    pool = poisoned_pool(num_blocks, num_kv_heads, block_size, head_dim, kv_format)
    rows_k, rows_v = [], []
    for row, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        shape = (seq_len, num_kv_heads, head_dim)
        k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
        blocks = [order.pop() for _ in range(count - (shared_blocks if row == len(seq_lens) - 1 else 0))]
        if row == len(seq_lens) - 1 and shared_blocks:
            k[:num_shared], v[:num_shared] = rows_k[-1][:num_shared], rows_v[-1][:num_shared]
            blocks = [*table[row - 1, :shared_blocks], *blocks]
        first = num_shared if row == len(seq_lens) - 1 else 0  # what is shared is stored already
        for position in range(first, seq_len):
            block, offset = blocks[position // block_size], position % block_size
            k[position], v[position] = store_token(pool, block, offset, k[position], v[position])
        table[row, :count] = blocks
        rows_k.append(k)
        rows_v.append(v)
    return PagedRows(jax.tree.map(jnp.asarray, pool), table, rows_k, rows_v)


def give_back(table: np.ndarray, first_queries: Sequence[int], window: int | None, block_size: int) -> None:
    """Put the null block, which is poisoned, in the places of an i32[S, M] table that no query at or behind each row's
    first one sees."""
    for row, position in enumerate(first_queries):
        if window is not None:
            table[row, : max(0, (position + 1 - window) // block_size)] = 0


def random_pool(
    rng: np.random.Generator, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str
) -> LayerKV:
    """Stored numbers and scales of any kind."""

    def fill(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            least = -127 if x.dtype == jnp.int8 else 0
            return jnp.asarray(rng.integers(least, least + 255, x.shape), x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)

    return jax.tree.map(fill, empty_layer_kv(num_blocks, num_kv_heads, block_size, head_dim, kv_format))


def poisoned_pool(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str) -> LayerKV:
    """Numpy arrays that nobody should read."""
    pool = jax.tree.map(np.array, empty_layer_kv(num_blocks, num_kv_heads, block_size, head_dim, kv_format))
    for numbers, scale, zero in ((pool.k, pool.k_scale, pool.k_zero), (pool.v, pool.v_scale, pool.v_zero)):
        numbers[:] = np.nan if scale is None else 127
        if scale is not None:
            scale[:] = np.inf
        if zero is not None:
            zero[:] = np.nan
    return pool


def store_token(pool: LayerKV, block: int, offset: int, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put f32[K, D] keys and values into a pool of numpy arrays; what can be read back, float32.

    Written out in numpy, apart from kv_format.
    """
    real = []
    for side, x, kind in (("k", k, pool.k_format), ("v", v, pool.v_format)):
        numbers, scales, zeros = (getattr(pool, f"{side}{name}") for name in ("", "_scale", "_zero"))
        place = numbers[block, :, :, offset] if side == "v" and kind.is_scaled else numbers[block, :, offset]
        if not kind.is_quantized:
            place[:] = x
            real.append(place.astype(np.float32))
        elif kind.is_grouped:
            groups = x.reshape(x.shape[0], scales.shape[-1], -1)
            zero = groups.min(axis=-1).astype(zeros.dtype)
            above = groups - zero.astype(np.float32)[..., None]
            scale = _rounded_up(np.maximum(above.max(axis=-1), 0) * np.float32(1 / 15), scales.dtype)
            codes = _divided(above, scale).clip(0, 15)
            real.append(
                (codes * scale.astype(np.float32)[..., None] + zero.astype(np.float32)[..., None]).reshape(x.shape)
            )
            codes = codes.reshape(x.shape).astype(np.uint8)
            half = x.shape[-1] // 2
            place[:] = codes[:, :half] + 16 * codes[:, half:]
            scales[block, :, offset], zeros[block, :, offset] = scale, zero
        else:
            scale = _rounded_up(np.abs(x).max(axis=-1) * np.float32(1 / kind.largest), scales.dtype)
            if kind.dtype == "int8":
                place[:] = _divided(x, scale).clip(-127, 127)
            else:
                place[:] = x * (np.float32(1) / scale.astype(np.float32))[:, None]
            scales[block, :, offset] = scale
            real.append(place.astype(np.float32) * scale.astype(np.float32)[:, None])
    return real[0], real[1]


def _rounded_up(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The smallest bfloat16 that is not below."""
    scale = exact.astype(dtype)
    return np.where(scale < exact, np.nextafter(scale, scale.dtype.type(np.inf)), scale)


def _divided(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Nearest integers of x in units of its scale, 0 where that is 0."""
    wide = scale.astype(np.float32)[..., None]
    with np.errstate(divide="ignore"):
        return np.rint(x * np.where(wide > 0, np.float32(1) / wide, np.float32(0)))


@dataclasses.dataclass(frozen=True)
class KVWriteCase:
    """`num_tokens` tokens to random distinct slots, and `num_padding` to the null block."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    kv_format: str = "float32"
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
    pool = random_pool(rng, num_blocks, case.num_kv_heads, case.block_size, case.head_dim, case.kv_format)
    tokens_shape = (total, case.num_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(tokens_shape, np.float32).astype(jnp.dtype(case.dtype)) for _ in range(2))
    slots = case.block_size + rng.permutation((num_blocks - 1) * case.block_size)[:total]
    is_padding = rng.permutation(total) < case.num_padding
    slots[is_padding] %= case.block_size
    return KVWriteInputs(pool, k, v, slots.astype(np.int32), is_padding)


KV_WRITE_CASES = (
    KVWriteCase(block_size=8, num_kv_heads=4, dtype="float32"),
    KVWriteCase(block_size=16, num_kv_heads=1, head_dim=80, dtype="bfloat16", kv_format="bfloat16"),
    KVWriteCase(block_size=32, num_kv_heads=3, head_dim=128, dtype="float16", kv_format="float16"),
    KVWriteCase(block_size=64, dtype="float32", kv_format="bfloat16"),
    KVWriteCase(block_size=128, num_tokens=1, num_padding=0),
    KVWriteCase(block_size=16, num_kv_heads=3, dtype="float32", kv_format="int8"),
    KVWriteCase(block_size=64, head_dim=128, dtype="bfloat16", kv_format="int8"),
    KVWriteCase(num_tokens=0, num_padding=6),
)
