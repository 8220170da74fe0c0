"""RowGroups: which rows of a decode batch share the first blocks of their tables."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGroups:
    """Groups of neighbouring rows: group r is rows cu_rows[r] to cu_rows[r + 1]; rows from cu_rows[R] on are in none.

    All rows of a group have the same blocks in the first prefix_lens[r] // block_size columns of their tables. A group
    may be empty, and its prefix too: both cost nothing.
    """

    cu_rows: jax.Array  # i32[R + 1] rising from 0
    prefix_lens: jax.Array  # i32[R] tokens, whole blocks

    def kv_starts(self, num_rows: int) -> jax.Array:
        """i32[S] where each row's own tokens begin; 0 for a row in no group."""
        cu_rows, prefix_lens = jnp.asarray(self.cu_rows), jnp.asarray(self.prefix_lens)
        row = jnp.arange(num_rows)
        is_member = (row >= cu_rows[:-1, None]) & (row < cu_rows[1:, None])  # [R, S]
        return jnp.sum(jnp.where(is_member, prefix_lens[:, None], 0), axis=0, dtype=jnp.int32)
