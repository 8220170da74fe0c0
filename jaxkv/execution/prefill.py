"""prefill_step: compute the KV of known tokens, and the first new token of prompts that end in this call."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.execution import sampling
from jaxkv.execution.batch import PrefillAttention, PrefillBatch, slots_of
from jaxkv.execution.decode_state import DecodeState
from jaxkv.execution.kv_cache import KVCache
from jaxkv.execution.step_output import StepOutput, finish_flags
from jaxkv.models.llama import Llama


def prefill_step(
    model: Llama, cache: KVCache, state: DecodeState, batch: PrefillBatch, *, implementation: str, num_top: int
) -> tuple[KVCache, DecodeState, StepOutput]:
    """Run a PrefillBatch; chunks with `is_last` sample a token and activate their row unless that token ends it."""
    attention = PrefillAttention(
        slots=slots_of(state.block_table, batch.token_row, batch.positions, cache.layers[0].block_size),
        block_table=state.block_table[batch.rows],
        cu_q_lens=batch.cu_q_lens,
        context_lens=batch.context_lens,
        implementation=implementation,
    )
    hidden, layers = model(batch.token_ids, batch.positions, cache.layers, attention)

    last_index = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    rows = jax.tree.map(lambda x: x[batch.rows], dataclasses.replace(state, block_table=state.active))
    seq_len = batch.context_lens + batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    logits = model.logits(hidden[last_index])
    allowed = sampling.forbid(logits, rows.stop_ids, rows.min_left > 0)
    tokens = sampling.sample(allowed, rows.sampling, seq_len)
    logprobs = sampling.logprobs(logits, tokens, rows.sampling, num_top)
    stopped, exhausted = finish_flags(tokens, rows.stop_ids, rows.budget)

    # Chunks that do not end their prompt (and padding) write to the dead row, which stays inactive.
    row = jnp.where(batch.is_last, batch.rows, state.dead_row)
    starts = batch.is_last & ~stopped & ~exhausted

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row].set(new, mode="promise_in_bounds")

    state = dataclasses.replace(
        state,
        last_token=put(state.last_token, tokens),
        seq_len=put(state.seq_len, seq_len),
        active=put(state.active, starts).at[state.dead_row].set(False),
        budget=put(state.budget, rows.budget - 1),
        min_left=put(state.min_left, jnp.maximum(rows.min_left - 1, 0)),
    )
    emitted = batch.is_last.astype(jnp.int32)
    output = StepOutput.of_one_step(tokens, emitted, stopped, exhausted, logprobs)
    return KVCache(layers), state, output
