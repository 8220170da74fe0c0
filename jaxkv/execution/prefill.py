"""Two calls: prefill_step computes the KV of known tokens, and first_tokens the first new token of prompts that end in it.

They are compiled apart, because the second is the same for every bucket: sampling takes a third of an executable's
compile time. Chunks that do not end their prompt need no logits at all.
"""

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
    model: Llama, cache: KVCache, block_table: jax.Array, batch: PrefillBatch, *, implementation: str, num_top: int
) -> tuple[KVCache, jax.Array, sampling.Logprobs]:
    """Compute a PrefillBatch's KV.

    Returns the cache, the hidden states [R, E] of the chunks' last tokens, and log-probabilities [T] of the targets.
    Without targets nobody but those last tokens goes through the last layer behind its keys and values: 3 % less work
    with 30 layers.
    """
    attention = PrefillAttention(
        slots=slots_of(block_table, batch.token_row, batch.positions, cache.layers[0].block_size),
        block_table=block_table[batch.rows],
        cu_q_lens=batch.cu_q_lens,
        context_lens=batch.context_lens,
        implementation=implementation,
    )
    x, layers = model.body(batch.token_ids, batch.positions, cache.layers, attention)
    ends = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)

    def all_tokens() -> tuple[jax.Array, sampling.Logprobs]:
        hidden = model.tail(x, batch.positions, layers[-1], attention)
        return hidden[ends], _target_logprobs(model, hidden, batch.targets, num_top)

    def last_tokens() -> tuple[jax.Array, sampling.Logprobs]:
        hidden = model.tail(x[ends], batch.positions[ends], layers[-1], attention.of_last_tokens())
        return hidden, sampling.no_report(len(batch.targets), num_top)

    wanted = (batch.targets != NO_TOKEN).any()
    return KVCache(layers), *jax.lax.cond(wanted, all_tokens, last_tokens)


def first_tokens(
    model: Llama,
    state: DecodeState,
    hidden: jax.Array,
    row_ids: jax.Array,
    seq_lens: jax.Array,
    is_last: jax.Array,
    *,
    num_top: int,
) -> tuple[DecodeState, StepOutput]:
    """Sample a token for each chunk that ends its prompt, and activate its row unless that token ends it.

    Args:
      hidden: [R, E] of the chunks' last tokens. row_ids: i32[R]. seq_lens: i32[R] known tokens of the row.
      is_last: bool[R] the chunk ends its prompt; others, and padding, change nothing.
    """
    rows = dataclasses.replace(state, block_table=state.active).take(row_ids)
    logits = _logits(model, hidden, is_last)
    adjusted = adjust(logits, rows, state.adjustments, row_ids, rows.min_left > 0)
    tokens = sampling.sample(adjusted, rows.sampling, seq_lens)
    logprobs = sampling.logprobs(logits, tokens, rows.sampling, num_top)
    stopped, exhausted = finish_flags(tokens, rows.stop_ids, rows.budget)

    # Chunks that do not end their prompt (and padding) write to the dead row, which stays inactive.
    row = jnp.where(is_last, row_ids, state.dead_row)
    starts = is_last & ~stopped & ~exhausted

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row].set(new, mode="promise_in_bounds")

    state = dataclasses.replace(
        state,
        last_token=put(state.last_token, tokens),
        seq_len=put(state.seq_len, seq_lens),
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
    return state, StepOutput.of_one_step(tokens, is_last.astype(jnp.int32), stopped, exhausted, logprobs)


def _logits(model: Llama, hidden: jax.Array, is_last: jax.Array) -> jax.Array:
    """f32[R, V], right where a chunk ends its prompt."""

    def cpu() -> jax.Array:
        """Mostly one does, and XLA:CPU takes twice as long for 16 rows of the demo model as for one (17 ms)."""
        row = jnp.argmax(is_last)
        only = lambda: jnp.broadcast_to(model.logits(hidden[row][None]), (hidden.shape[0], model.config.vocab_size))
        return jax.lax.cond(is_last.sum() == 1, only, lambda: model.logits(hidden))

    return jax.lax.platform_dependent(cpu=cpu, default=lambda: model.logits(hidden))


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

    return jax.lax.fori_loop(0, -(-num_tokens // size), one_tile, sampling.no_report(num_tokens, num_top))
