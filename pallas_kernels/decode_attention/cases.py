"""Shapes of decode_attention that tests and benchmarks share."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.kv_write.cases import PagedRows, give_back, paged_rows

# What the drawn cases combine, field by field.
CHOICES = {
    "block_size": (8, 16, 32, 64, 128),
    "heads": ((4, 4), (8, 2), (9, 3), (5, 1), (16, 1), (2, 2)),  # (H, K)
    "head_dim": (64, 80, 96, 128, 256),
    "dtype": ("float32", "bfloat16", "float16"),
    "kv_format": (None, "int8"),
    "window": (None, None, 1, 17, 64),
    "soft_cap": (None, None, 3.0),
    "sinks": (False, True),
    "scale": (None, 0.2),
}


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One batch. Its last two rows share the blocks of their first 128 tokens when both are longer."""

    block_size: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"  # of the queries
    window: int | None = None
    seq_lens: tuple[int, ...] = (0, 1, 15, 16, 17, 127, 128, 129, 0, 300, 290)
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


class DecodeInputs(NamedTuple):
    q: np.ndarray  # [S, H, D]
    rows: PagedRows
    seq_lens: np.ndarray  # i32[S]
    sinks: np.ndarray | None  # f32[H]


def decode_inputs(case: DecodeCase, seed: int = 0) -> DecodeInputs:
    rng = np.random.default_rng(seed)
    rows = paged_rows(
        rng,
        case.seq_lens,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        kv_format=case.stored,
        num_shared=128 if min(case.seq_lens[-2:]) > 128 else 0,
    )
    give_back(rows.block_table, [length - 1 for length in case.seq_lens], case.window, case.block_size)
    q = rng.standard_normal((len(case.seq_lens), case.num_heads, case.head_dim), np.float32)
    sinks = rng.standard_normal(case.num_heads, np.float32) if case.sinks else None
    return DecodeInputs(q.astype(jnp.dtype(case.dtype)), rows, np.asarray(case.seq_lens, np.int32), sinks)


def edge_lengths(block_size: int) -> tuple[int, ...]:
    """Row lengths around the edges of blocks and tiles, with idle rows between."""
    return (0, 1, block_size - 1, block_size, block_size + 1, 127, 128, 129, 0, 300, 290)


def drawn(count: int, seed: int) -> list[dict]:
    """`count` parameter sets, each field drawn by itself: twenty of them hold every value several times."""
    rng = np.random.default_rng(seed)
    sets = []
    for _ in range(count):
        chosen = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        chosen["num_heads"], chosen["num_kv_heads"] = chosen.pop("heads")
        sets.append(chosen)
    return sets


DECODE_CASES = tuple(DecodeCase(**s, seq_lens=edge_lengths(s["block_size"])) for s in drawn(20, seed=0))
