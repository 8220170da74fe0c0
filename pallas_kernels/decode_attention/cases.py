"""Shapes of decode_attention that tests and benchmarks share."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.cases import PagedRows, paged_rows

BLOCK_SIZES = (8, 16, 32, 64, 128)
HEADS = ((4, 4), (8, 2), (9, 3), (5, 1))  # (H, K)
HEAD_DIMS = (64, 80, 128)
DTYPES = ("float32", "bfloat16", "float16")
WINDOWS = (None, 1, 17, 64)


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One batch. Its last two rows share the blocks of their first 128 tokens when both are longer."""

    block_size: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"
    window: int | None = None
    seq_lens: tuple[int, ...] = (0, 1, 15, 16, 17, 127, 128, 129, 0, 300, 290)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        return f"P{self.block_size}-H{heads}-D{self.head_dim}-{self.dtype}-W{self.window}"


class DecodeInputs(NamedTuple):
    q: np.ndarray  # [S, H, D]
    rows: PagedRows
    seq_lens: np.ndarray  # i32[S]


def decode_inputs(case: DecodeCase, seed: int = 0) -> DecodeInputs:
    rng = np.random.default_rng(seed)
    rows = paged_rows(
        rng,
        case.seq_lens,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        num_shared=128 if min(case.seq_lens[-2:]) > 128 else 0,
    )
    q = rng.standard_normal((len(case.seq_lens), case.num_heads, case.head_dim), np.float32)
    return DecodeInputs(q.astype(jnp.dtype(case.dtype)), rows, np.asarray(case.seq_lens, np.int32))


def edge_lengths(block_size: int) -> tuple[int, ...]:
    """Row lengths around the edges of blocks and tiles, with idle rows between."""
    return (0, 1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 0, 300, 290)


def spread(index: int) -> dict:
    """The index-th of 60 parameter sets: all triples of block size, heads and head_dim, with dtypes and windows
    spread over them. Strides that share no factor with 5 keep all block sizes."""
    heads = HEADS[index // len(BLOCK_SIZES) % len(HEADS)]
    return {
        "block_size": BLOCK_SIZES[index % len(BLOCK_SIZES)],
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": HEAD_DIMS[(index + 2 * (index // 20)) % len(HEAD_DIMS)],
        "dtype": DTYPES[(index + index // 5) % len(DTYPES)],
        "window": WINDOWS[(index + index // 5) % len(WINDOWS)],
    }


DECODE_CASES = tuple(DecodeCase(**s, seq_lens=edge_lengths(s["block_size"])) for s in map(spread, range(1, 60, 4)))
