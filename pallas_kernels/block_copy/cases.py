"""Copies of block heads, shared by tests and benchmarks."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels.kv_write.cases import poisoned_pool, random_pool
from pallas_kernels.layer_kv import LayerKV


@dataclasses.dataclass(frozen=True)
class BlockCopyCase:
    """Copies (src, dst, num_tokens) in one call; (0, 0, 0) is padding."""

    copies: tuple[tuple[int, int, int], ...]
    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 64
    kv_format: str = "float32"
    num_blocks: int = 8


class BlockCopyInputs(NamedTuple):
    kv: LayerKV
    src: np.ndarray  # i32[X]
    dst: np.ndarray  # i32[X]
    num_tokens: np.ndarray  # i32[X]


def block_copy_inputs(case: BlockCopyCase, seed: int = 0) -> BlockCopyInputs:
    """Random blocks; the null block is poison."""
    rng = np.random.default_rng(seed)
    pool = random_pool(rng, case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim, case.kv_format)
    poison = poisoned_pool(1, case.num_kv_heads, case.block_size, case.head_dim, case.kv_format)
    pool = jax.tree.map(lambda x, bad: x.at[:1].set(bad), pool, poison)
    return BlockCopyInputs(pool, *np.asarray(case.copies, np.int32).T)


BLOCK_COPY_CASES = (
    BlockCopyCase(((3, 5, 7), (0, 0, 0), (4, 2, 1))),
    # A whole block, nothing at all, and one source for two destinations.
    BlockCopyCase(((1, 2, 8), (1, 3, 3), (4, 5, 0)), block_size=8, num_kv_heads=3, kv_format="bfloat16"),
    # A destination that is a source as well: reads come before writes.
    BlockCopyCase(((1, 2, 9), (2, 3, 30), (3, 1, 16)), block_size=32, num_kv_heads=1, head_dim=80, kv_format="float16"),
    BlockCopyCase(((0, 0, 0), (0, 0, 0))),
    BlockCopyCase(((6, 7, 127),), block_size=128, head_dim=128),
    BlockCopyCase(((3, 5, 7), (0, 0, 0), (4, 2, 16), (2, 6, 1)), kv_format="int8"),
    BlockCopyCase(((1, 2, 40), (2, 3, 64)), block_size=64, head_dim=128, num_kv_heads=1, kv_format="int8"),
)
