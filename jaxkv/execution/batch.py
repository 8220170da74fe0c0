"""Plans as arrays, and how the tokens of a call meet the cache."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.plan import PrefillChunk, PrefixGroup
from jaxkv.execution.decode_state import NO_TOKEN
from jaxkv.models.llama import Sinks
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, merge
from pallas_kernels.cascade import RowGroups, cascade_attention
from pallas_kernels.decode_attention import SplitPlan, decode_attention, plan_decode
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import prefill_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Chunks of up to R requests, one after the other, padded to T tokens."""

    token_ids: np.ndarray  # i32[T]
    positions: np.ndarray  # i32[T]
    token_row: np.ndarray  # i32[T] row of each token; padding is the dead row, whose table is the null block
    rows: np.ndarray  # i32[R] row of each chunk; padding is the dead row
    cu_q_lens: np.ndarray  # i32[R + 1]
    context_lens: np.ndarray  # i32[R]
    is_last: np.ndarray  # bool[R] the chunk ends its prompt
    targets: np.ndarray  # i32[T] the next token where its log-probability is wanted, else NO_TOKEN


def pack_prefill(
    chunks: tuple[PrefillChunk, ...], *, num_tokens: int, max_seqs: int, dead_row: int, block_size: int
) -> PrefillBatch:
    """`chunks` padded to T = num_tokens and R = max_seqs."""
    batch = PrefillBatch(
        token_ids=np.zeros((num_tokens,), np.int32),
        # Padding is spread over the null block's slots, so that no slot is written by all of it.
        positions=np.arange(num_tokens, dtype=np.int32) % block_size,
        token_row=np.full((num_tokens,), dead_row, np.int32),
        rows=np.full((max_seqs,), dead_row, np.int32),
        cu_q_lens=np.zeros((max_seqs + 1,), np.int32),
        context_lens=np.zeros((max_seqs,), np.int32),
        is_last=np.zeros((max_seqs,), np.bool_),
        targets=np.full((num_tokens,), NO_TOKEN, np.int32),
    )
    start = 0
    for i, chunk in enumerate(chunks):
        end = start + len(chunk.token_ids)
        batch.token_ids[start:end] = chunk.token_ids
        batch.positions[start:end] = np.arange(chunk.start, chunk.start + end - start)
        batch.token_row[start:end] = chunk.row
        batch.rows[i] = chunk.row
        batch.cu_q_lens[i + 1 :] = end
        batch.context_lens[i] = chunk.start
        batch.is_last[i] = chunk.is_last
        if chunk.targets:
            first = start + chunk.first_target
            batch.targets[first : first + len(chunk.targets)] = chunk.targets
        start = end
    return batch


def pack_groups(groups: tuple[PrefixGroup, ...], *, max_groups: int, block_size: int) -> RowGroups:
    """`groups` of the leading decode rows, padded to R = max_groups with empty ones."""
    num_rows, num_blocks = np.zeros((2, max_groups), np.int32)
    for i, group in enumerate(groups):
        num_rows[i], num_blocks[i] = group
    return RowGroups(np.append(np.int32(0), np.cumsum(num_rows, dtype=np.int32)), num_blocks * block_size)


def slots_of(block_table: jax.Array, rows: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Flat cache slots i32[T] of positions i32[T] in rows i32[T]."""
    block = block_table.at[rows, positions // block_size].get(mode="promise_in_bounds")
    return block * block_size + positions % block_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillAttention:
    """Implements models.llama.PagedAttention for the chunks of a PrefillBatch."""

    slots: jax.Array  # i32[T]
    block_table: jax.Array  # i32[R, M]
    cu_q_lens: jax.Array  # i32[R + 1]
    context_lens: jax.Array  # i32[R]
    implementation: str = dataclasses.field(metadata={"static": True})

    def write(self, kv: LayerKV, k: jax.Array, v: jax.Array) -> LayerKV:
        return kv_write(kv, k, v, self.slots, implementation=self.implementation)

    def attend(
        self, q: jax.Array, kv: LayerKV, *, scale: float, window: int | None, sinks: Sinks | None = None
    ) -> jax.Array:
        output = prefill_attention(
            q,
            kv,
            self.block_table,
            self.cu_q_lens,
            self.context_lens,
            AttentionOptions(scale, window),
            implementation=self.implementation,
        )
        return (output if sinks is None else merge(output, self._attend_sinks(sinks, kv, scale, window))).out

    def _attend_sinks(self, sinks: Sinks, kv: LayerKV, scale: float, window: int) -> AttentionOutput:
        """A chunk is two here: its tokens that are in the first window, and see no sinks, and the others, the first of
        which stands so far behind the sinks as behind its window."""
        q_lens = self.cu_q_lens[1:] - self.cu_q_lens[:-1]
        near = jnp.clip(window - self.context_lens, 0, q_lens)
        starts = jnp.stack([self.cu_q_lens[:-1], self.cu_q_lens[:-1] + near], axis=1).reshape(-1)
        behind = jnp.maximum(self.context_lens + near - window, 0)
        nothing = jnp.zeros_like(q_lens)
        return prefill_attention(
            sinks.q,
            kv,
            jnp.repeat(self.block_table[:, : -(-sinks.count // kv.block_size)], 2, axis=0),
            jnp.append(starts, self.cu_q_lens[-1]),
            jnp.stack([nothing, behind], axis=1).reshape(-1),
            AttentionOptions(scale),
            kv_lens=jnp.stack([nothing, jnp.full_like(q_lens, sinks.count)], axis=1).reshape(-1),
            implementation=self.implementation,
        )

    def of_last_tokens(self) -> "DecodeAttention":
        """For the last token of each chunk alone, once all keys and values are written; padding sees nothing."""
        q_lens = self.cu_q_lens[1:] - self.cu_q_lens[:-1]
        return DecodeAttention(
            slots=jnp.zeros_like(q_lens),
            block_table=self.block_table,
            seq_lens=jnp.where(q_lens > 0, self.context_lens + q_lens, 0),
            implementation=self.implementation,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeAttention:
    """Implements models.llama.PagedAttention for one new token a row."""

    slots: jax.Array  # i32[B]
    block_table: jax.Array  # i32[B, M]
    seq_lens: jax.Array  # i32[B] the new token included; 0 for an idle row
    implementation: str = dataclasses.field(metadata={"static": True})
    groups: RowGroups | None = None  # whose shared prefixes are attended to once, in layers without a window
    plans: dict[int, SplitPlan | None] = dataclasses.field(default_factory=dict)  # by window, 0 without one

    def planned(self, kv: LayerKV, windows: Iterable[int | None]) -> "DecodeAttention":
        """With the work split once for all layers that have the same window; `kv` is any layer's. Layers of other windows
        plan for themselves."""

        def plan(window: int | None) -> SplitPlan | None:
            groups = self.groups if window is None else None
            return plan_decode(
                kv,
                self.block_table,
                self.seq_lens,
                window=window,
                kv_starts=None if groups is None else groups.kv_starts(self.seq_lens.shape[0]),
                implementation=self.implementation,
            )

        return dataclasses.replace(self, plans={window or 0: plan(window) for window in set(windows)})

    def write(self, kv: LayerKV, k: jax.Array, v: jax.Array) -> LayerKV:
        return kv_write(kv, k, v, self.slots, implementation=self.implementation)

    def attend(
        self, q: jax.Array, kv: LayerKV, *, scale: float, window: int | None, sinks: Sinks | None = None
    ) -> jax.Array:
        options = AttentionOptions(scale, window)
        if self.groups is not None and window is None:
            return cascade_attention(
                q,
                kv,
                self.block_table,
                self.seq_lens,
                self.groups,
                options,
                plan=self.plans.get(0),
                implementation=self.implementation,
            ).out
        output = decode_attention(
            q,
            kv,
            self.block_table,
            self.seq_lens,
            options,
            plan=self.plans.get(window or 0),
            implementation=self.implementation,
        )
        if sinks is not None:
            seen = decode_attention(
                sinks.q,
                kv,
                self.block_table[:, : -(-sinks.count // kv.block_size)],
                jnp.clip(self.seq_lens - window, 0, sinks.count),
                AttentionOptions(scale),
                implementation=self.implementation,
            )
            output = merge(output, seen)
        return output.out
