"""Shapes of cascade_attention that tests and benchmarks share."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.cascade.groups import RowGroups
from pallas_kernels.kv_write.cases import PagedRows, poisoned_pool, store_token

# As kv_write.cases: tables longer than any row needs, and blocks that nobody owns.
_SURPLUS_COLUMNS, _FREE_BLOCKS = 2, 3

IDLE = -1
"""In place of a row's own tokens: a row that has ended."""


@dataclasses.dataclass(frozen=True)
class CascadeCase:
    """One batch. `groups` are (shared tokens, own tokens of each row); rows with 0 shared tokens have nothing in
    common, and of the last `num_ungrouped` rows, which are in no group, nobody is told."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    num_ungrouped: int = 0
    num_empty: int = 1  # groups without rows after the others: the padding of a fixed shape
    block_size: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"  # of the queries
    kv_format: str | None = None  # that of the queries unless told
    soft_cap: float | None = None
    sinks: bool = False
    num_splits: int | None = None

    @property
    def stored(self) -> str:
        return self.kv_format or self.dtype

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_dim**-0.5, None, self.soft_cap)

    def __str__(self) -> str:
        rows = "+".join(f"{shared}x{len(own)}" for shared, own in self.groups) + f"+{self.num_ungrouped}"
        extras = f"-cap{self.soft_cap}" * bool(self.soft_cap) + "-sinks" * self.sinks
        extras += f"-splits{self.num_splits}" * bool(self.num_splits)
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        return f"{rows}-P{self.block_size}-H{heads}-D{self.head_dim}-{self.dtype}-{self.stored}{extras}"


class CascadeInputs(NamedTuple):
    q: np.ndarray  # [S, H, D]
    rows: PagedRows
    seq_lens: np.ndarray  # i32[S]
    groups: RowGroups
    sinks: np.ndarray | None  # f32[H]


def cascade_inputs(case: CascadeCase, seed: int = 0) -> CascadeInputs:
    """Normal random tokens in randomly permuted blocks; whatever no row owns is poison, as in kv_write.cases."""
    rng = np.random.default_rng(seed)
    size, heads = case.block_size, (case.num_kv_heads, case.head_dim)
    ungrouped = tuple(int(n) for n in rng.integers(1, 60, case.num_ungrouped))
    batch = (*case.groups, *((0, (own,)) for own in ungrouped))
    assert all(shared % size == 0 for shared, _ in batch), f"Expected whole blocks to be shared in {case}"

    def num_blocks(tokens: int) -> int:
        return -(-max(tokens, 0) // size)

    total = sum(num_blocks(shared) + sum(map(num_blocks, own)) for shared, own in batch)
    order = list(1 + rng.permutation(total + _FREE_BLOCKS))
    num_rows = sum(len(own) for _, own in batch)
    columns = max(num_blocks(shared) + max(map(num_blocks, own)) for shared, own in batch) + _SURPLUS_COLUMNS
    table = rng.choice(order, (num_rows, columns)).astype(np.int32)
    pool = poisoned_pool(1 + len(order), *heads[:1], size, case.head_dim, case.stored)

    def write(tokens: int) -> tuple[list[int], np.ndarray, np.ndarray]:
        """New blocks with `tokens` tokens, and what can be read back of their keys and values."""
        k, v = (rng.standard_normal((max(tokens, 0), *heads), np.float32) for _ in range(2))
        blocks = [order.pop() for _ in range(num_blocks(tokens))]
        for i in range(max(tokens, 0)):
            k[i], v[i] = store_token(pool, blocks[i // size], i % size, k[i], v[i])
        return blocks, k, v

    seq_lens, rows_k, rows_v = [], [], []
    for shared, owns in batch:
        head, head_k, head_v = write(shared)
        for own in owns:
            blocks, k, v = write(own)
            blocks, row = [*head, *blocks], len(seq_lens)
            table[row, : len(blocks)] = blocks
            seq_lens.append(0 if own == IDLE else shared + own)
            rows_k.append(np.concatenate([head_k, k])[: seq_lens[-1]])
            rows_v.append(np.concatenate([head_v, v])[: seq_lens[-1]])
    sizes = [len(own) for _, own in case.groups] + [0] * case.num_empty
    prefix_lens = [shared for shared, _ in case.groups] + [0] * case.num_empty
    q = rng.standard_normal((num_rows, case.num_heads, case.head_dim), np.float32)
    return CascadeInputs(
        q.astype(jnp.dtype(case.dtype)),
        PagedRows(jax.tree.map(jnp.asarray, pool), table, rows_k, rows_v),
        np.asarray(seq_lens, np.int32),
        RowGroups(np.cumsum([0, *sizes]).astype(np.int32), np.asarray(prefix_lens, np.int32)),
        rng.standard_normal(case.num_heads, np.float32) if case.sinks else None,
    )


CASCADE_CASES = (
    CascadeCase(((64, (1, 17, 37)), (0, (5,)), (16, (1, 40)), (32, (IDLE, 3, 64))), num_ungrouped=2),
    CascadeCase(((128, (IDLE, 17, 130, 1)), (0, (9, 8))), block_size=32, num_heads=9, num_kv_heads=3, sinks=True),
    CascadeCase(((128, (17,) * 5), (256, (1, 2))), block_size=64, num_heads=5, num_kv_heads=1, soft_cap=3.0),
    CascadeCase(((80, (1,) * 12),), num_empty=0, num_heads=4, num_kv_heads=4, head_dim=80, num_splits=3),
    CascadeCase(((64, (37, 1)), (160, (3, 2)), (0, (4,))), 3, dtype="bfloat16", head_dim=128, num_splits=4),
    CascadeCase(((64, (37, 1)), (96, (3, IDLE))), 1, block_size=32, kv_format="int8", sinks=True, num_splits=2),
    CascadeCase(((64, (37,) * 17),), block_size=16, dtype="float16", kv_format="int8", soft_cap=3.0, num_splits=1),
    CascadeCase(((64, (1,)),), num_empty=0, head_dim=256, num_splits=8),  # more splits than blocks
    CascadeCase((), num_ungrouped=4),
)

# shared 0, P, 1024, 2048 x own 1, 17, 37, 512 x rows 1, 2, 12, 17
LARGE_CASES = tuple(
    CascadeCase(((shared, (own,) * rows),), num_splits=splits)
    for shared in (0, 16, 1024, 2048)
    for own in (1, 17, 37, 512)
    for rows, splits in ((1, 1), (2, 4), (12, 8), (17, 1))
)
