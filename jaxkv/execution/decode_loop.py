"""decode_steps: up to C decode steps in one device call, without the host."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.execution import sampling
from jaxkv.execution.batch import DecodeAttention, slots_of
from jaxkv.execution.decode_state import Adjustments, DecodeState
from jaxkv.execution.kv_cache import KVCache
from jaxkv.execution.logit_adjustments import adjust, count_tokens
from jaxkv.execution.step_output import StepOutput, finish_flags, pack_flags
from jaxkv.models.llama import Llama
from pallas_kernels.cascade import RowGroups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    step: jax.Array  # i32[]
    layers: tuple
    rows: DecodeState  # of the B rows that decode
    token_counts: jax.Array  # u16[S, V] of all rows
    flags: jax.Array  # i32[B] finish flags
    emitted: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B, C]
    logprobs: sampling.Logprobs  # leaves [C, B, ...]


def decode_one(
    model: Llama,
    layers: tuple,
    rows: DecodeState,
    adjustments: Adjustments,
    row_ids: jax.Array,
    groups: RowGroups | None,
    *,
    implementation: str,
    num_top: int,
) -> tuple[tuple, DecodeState, jax.Array, jax.Array, jax.Array, sampling.Logprobs]:
    """One step of B rows: write KV, attend, sample, test for the end. Inactive rows write to the null block.

    `rows` is the state of rows `row_ids` i32[B], `adjustments` that of all rows; `groups` are of the B rows.
    Returns layers, rows, tokens i32[B], stopped bool[B], exhausted bool[B], logprobs.
    """
    active, position = rows.active, rows.seq_len
    batch = jnp.arange(position.shape[0])
    block_size = layers[0].block_size
    slots = slots_of(rows.block_table, batch, position, block_size)
    attention = DecodeAttention(
        slots=jnp.where(active, slots, batch % block_size),
        block_table=rows.block_table,
        seq_lens=jnp.where(active, position + 1, 0),
        groups=groups,
        implementation=implementation,
    ).planned(layers[0], model.config.windows_within(model.storage.window))
    hidden, layers = model(rows.last_token, position, layers, attention)
    logits = model.logits(hidden)
    adjusted = adjust(logits, rows, adjustments, row_ids, active & (rows.min_left > 0))
    tokens = sampling.sample(adjusted, rows.sampling, position + 1)
    logprobs = sampling.logprobs(logits, tokens, rows.sampling, num_top)
    stopped, exhausted = finish_flags(tokens, rows.stop_ids, rows.budget)
    rows = dataclasses.replace(
        rows,
        last_token=jnp.where(active, tokens, rows.last_token),
        seq_len=jnp.where(active, position + 1, position),
        active=active & ~stopped & ~exhausted,
        budget=jnp.where(active, rows.budget - 1, rows.budget),
        min_left=jnp.where(active, jnp.maximum(rows.min_left - 1, 0), rows.min_left),
    )
    return layers, rows, tokens, stopped & active, exhausted & active, logprobs


def decode_steps(
    model: Llama,
    cache: KVCache,
    state: DecodeState,
    row_ids: jax.Array,
    num_steps: jax.Array,
    groups: RowGroups | None = None,
    *,
    max_steps: int,
    implementation: str,
    num_top: int,
) -> tuple[KVCache, DecodeState, StepOutput]:
    """Decode rows `row_ids` i32[B] (padding: the dead row) for up to `num_steps` i32[] <= max_steps steps.

    Leaves early only when no row is active. Blocks for all steps must be in the tables. With `groups`, leading rows of
    `row_ids` attend to what they share together.
    """
    num_rows = row_ids.shape[0]
    rows = state.take(row_ids)
    begun = rows.active

    def buffer(width: int | None, dtype) -> jax.Array:
        return jnp.zeros((max_steps, num_rows) + (() if width is None else (width,)), dtype)

    carry = _Carry(
        step=jnp.int32(0),
        layers=cache.layers,
        rows=rows,
        token_counts=state.adjustments.token_counts,
        flags=jnp.zeros((num_rows,), jnp.int32),
        emitted=jnp.zeros((num_rows,), jnp.int32),
        tokens=jnp.zeros((num_rows, max_steps), jnp.int32),
        logprobs=sampling.Logprobs(
            chosen=buffer(None, jnp.float32),
            rank=buffer(None, jnp.int32),
            top_ids=buffer(num_top, jnp.int32),
            top=buffer(num_top, jnp.float32),
        ),
    )

    def one_step(carry: _Carry) -> _Carry:
        was_active = carry.rows.active
        adjustments = dataclasses.replace(state.adjustments, token_counts=carry.token_counts)
        layers, rows, tokens, stopped, exhausted, logprobs = decode_one(
            model,
            carry.layers,
            carry.rows,
            adjustments,
            row_ids,
            groups,
            implementation=implementation,
            num_top=num_top,
        )
        counted = jnp.where(was_active & rows.sampling.adjusts, row_ids, state.dead_row)
        return _Carry(
            step=carry.step + 1,
            layers=layers,
            rows=dataclasses.replace(rows, active=rows.active & ~rows.one_a_call),
            token_counts=count_tokens(carry.token_counts, counted, tokens),
            flags=jnp.where(was_active, pack_flags(stopped, exhausted), carry.flags),
            emitted=carry.emitted + was_active,
            tokens=jax.lax.dynamic_update_slice_in_dim(carry.tokens, tokens[:, None], carry.step, axis=1),
            logprobs=jax.tree.map(
                lambda all_steps, now: jax.lax.dynamic_update_index_in_dim(all_steps, now, carry.step, axis=0),
                carry.logprobs,
                logprobs,
            ),
        )

    def goes_on(carry: _Carry) -> jax.Array:
        return (carry.step < num_steps) & carry.rows.active.any()

    carry = jax.lax.while_loop(goes_on, one_step, carry)
    rows = carry.rows

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row_ids].set(new, mode="promise_in_bounds")

    state = dataclasses.replace(
        state,
        last_token=put(state.last_token, rows.last_token),
        seq_len=put(state.seq_len, rows.seq_len),
        # In the loop a row that takes one step a call is not active after it, but has not ended.
        active=put(state.active, begun & (carry.flags == 0)),
        budget=put(state.budget, rows.budget),
        min_left=put(state.min_left, rows.min_left),
        adjustments=dataclasses.replace(state.adjustments, token_counts=carry.token_counts),
    )
    packed = jnp.concatenate([carry.emitted[:, None], carry.flags[:, None], carry.tokens], axis=1)
    return KVCache(carry.layers), state, StepOutput(packed, carry.logprobs)
