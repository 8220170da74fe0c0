"""Shapes of prefill_attention that tests and benchmarks share."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.decode_attention.cases import drawn
from pallas_kernels.kv_write.cases import PagedRows, give_back, paged_rows


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """One call. `chunks` are (context_len, query_len); `num_padding` queries follow the last chunk.

    The last two sequences share the blocks of their first 128 tokens when both are longer.
    """

    chunks: tuple[tuple[int, int], ...]
    block_size: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"  # of the queries
    window: int | None = None
    num_padding: int = 9
    kv_format: str | None = None  # that of the queries unless told
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None

    @property
    def stored(self) -> str:
        return self.kv_format or self.dtype

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.scale or self.head_dim**-0.5, self.window, self.soft_cap)

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        extras = (
            f"-W{self.window}" * bool(self.window)
            + f"-cap{self.soft_cap}" * bool(self.soft_cap)
            + "-sinks" * self.sinks
        )
        return f"P{self.block_size}-H{heads}-D{self.head_dim}-{self.dtype}-{self.stored}{extras}"


class PrefillInputs(NamedTuple):
    q: np.ndarray  # [T, H, D]
    rows: PagedRows
    cu_q_lens: np.ndarray  # i32[R + 1]
    context_lens: np.ndarray  # i32[R]
    sinks: np.ndarray | None  # f32[H]


def prefill_inputs(case: PrefillCase, seed: int = 0) -> PrefillInputs:
    rng = np.random.default_rng(seed)
    seq_lens = tuple(context + query for context, query in case.chunks)
    rows = paged_rows(
        rng,
        seq_lens,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        kv_format=case.stored,
        num_shared=128 if len(seq_lens) > 1 and min(seq_lens[-2:]) > 128 else 0,
    )
    give_back(rows.block_table, [context for context, _ in case.chunks], case.window, case.block_size)
    query_lens = [query for _, query in case.chunks]
    num_tokens = sum(query_lens) + case.num_padding
    q = rng.standard_normal((num_tokens, case.num_heads, case.head_dim), np.float32)
    return PrefillInputs(
        q.astype(jnp.dtype(case.dtype)),
        rows,
        np.cumsum([0, *query_lens]).astype(np.int32),
        np.asarray([context for context, _ in case.chunks], np.int32),
        rng.standard_normal(case.num_heads, np.float32) if case.sinks else None,
    )


def edge_chunks(block_size: int) -> tuple[tuple[int, int], ...]:
    """Chunks around the edges of blocks and tiles, with and without context, and empty ones among them."""
    p = block_size
    return ((0, 1), (0, 0), (0, p - 1), (p, 2), (p - 1, 1), (127, 2), (0, 0), (0, 65), (129, 40), (130, 1))


PREFILL_CASES = tuple(PrefillCase(edge_chunks(s["block_size"]), **s) for s in drawn(10, seed=1))
