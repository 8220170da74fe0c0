"""prefill_step: compute the KV of known tokens, the first new token of prompts that end in this call, and the
log-probabilities of prompt tokens where they are wanted."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.execution import sampling
from jaxkv.execution.batch import PrefillAttention, PrefillBatch, slots_of
from jaxkv.execution.decode_state import NO_TOKEN, DecodeState
from jaxkv.execution.kv_cache import KVCache
from jaxkv.execution.logit_adjustments import adjust, count_tokens
from jaxkv.execution.step_output import StepOutput, finish_flags
from jaxkv.models.llama import Llama

# Tokens whose logits exist at once for prompt log-probabilities: 32 MB at V = 128k.
_TILE = 64


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
    rows = dataclasses.replace(state, block_table=state.active).take(batch.rows)
    seq_len = batch.context_lens + batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    logits = model.logits(hidden[last_index])
    adjusted = adjust(logits, rows, state.adjustments, batch.rows, rows.min_left > 0)
    tokens = sampling.sample(adjusted, rows.sampling, seq_len)
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
        adjustments=dataclasses.replace(
            state.adjustments,
            token_counts=count_tokens(
                state.adjustments.token_counts, jnp.where(rows.sampling.adjusts, row, state.dead_row), tokens
            ),
        ),
    )
    emitted = batch.is_last.astype(jnp.int32)
    output = StepOutput.of_one_step(tokens, emitted, stopped, exhausted, logprobs)
    output = dataclasses.replace(output, prompt_logprobs=_target_logprobs(model, hidden, batch.targets, num_top))
    return KVCache(layers), state, output


def _target_logprobs(model: Llama, hidden: jax.Array, targets: jax.Array, num_top: int) -> sampling.Logprobs:
    """Log-probabilities [T] of targets i32[T] after hidden states [T, E]; zeros in tiles that want none (NO_TOKEN)."""
    num_tokens = targets.shape[0]
    size = min(_TILE, num_tokens)

    def one_tile(i: jax.Array, report: sampling.Logprobs) -> sampling.Logprobs:
        start = jnp.minimum(i * size, num_tokens - size)  # the last tile overlaps the one before where T is no multiple
        wanted = jax.lax.dynamic_slice_in_dim(targets, start, size)

        def compute(report: sampling.Logprobs) -> sampling.Logprobs:
            logits = model.logits(jax.lax.dynamic_slice_in_dim(hidden, start, size))
            tile = sampling.report(logits, jnp.maximum(wanted, 0), num_top)
            return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=0), report, tile)

        return jax.lax.cond((wanted != NO_TOKEN).any(), compute, lambda report: report, report)

    num_tiles = jnp.where((targets != NO_TOKEN).any(), -(-num_tokens // size), 0)
    return jax.lax.fori_loop(0, num_tiles, one_tile, sampling.no_report(num_tokens, num_top))
