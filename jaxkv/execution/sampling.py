"""Choose tokens on the device, each row by its own parameters.

A batch of greedy rows runs an argmax and nothing else: the branches are `lax.cond` on the batch, not on the compiled
shape. Filters follow transformers' logits processors: temperature, then top-k, top-p, min-p.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.execution.decode_state import NO_TOKEN, RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the unfiltered distribution, natural log."""

    chosen: jax.Array  # f32[B]
    rank: jax.Array  # i32[B], 1 for the likeliest
    top_ids: jax.Array  # i32[B, n]
    top: jax.Array  # f32[B, n] in falling order


def forbid(logits: jax.Array, ids: jax.Array, where: jax.Array) -> jax.Array:
    """Logits [B, V] with ids [B, W] (NO_TOKEN: none) made impossible in the rows of `where` bool[B]."""

    def mask(logits: jax.Array) -> jax.Array:
        row = jnp.arange(logits.shape[0])[:, None]
        column = jnp.where(where[:, None] & (ids != NO_TOKEN), ids, logits.shape[1])
        return logits.at[row, column].set(-jnp.inf, mode="drop")

    return jax.lax.cond(where.any(), mask, lambda logits: logits, logits)


def filter_logits(logits: jax.Array, rows: RowSampling) -> jax.Array:
    """Scaled logits [B, V] with everything outside top-k, top-p and min-p at -inf."""
    vocab = logits.shape[1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ranked, (k - 1)[:, None], axis=-1)
    ranked = jnp.where(ranked >= kth, ranked, -jnp.inf)  # logits equal to the k-th stay, as in transformers
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # A top_p of 1 keeps all: the sum may round to 1 before the end, and neighbours' filters must not change a row.
    top_p = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)
    keep = (before < top_p[:, None]) & (probability >= rows.min_p[:, None] * probability[:, :1])
    keep = keep.at[:, 0].set(True)
    kept = jnp.where(keep, ranked, -jnp.inf)
    row = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros_like(logits).at[row, order].set(kept, unique_indices=True)


def sample(logits: jax.Array, rows: RowSampling, positions: jax.Array) -> jax.Array:
    """i32[B] tokens from f32[B, V] logits.

    `positions` i32[B] is where the new token will stand: with the row's seed it is all the randomness there is, so a
    seeded request gets the same tokens whatever its batch, chunking, loop length or preemption.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = rows.temperature > 0

    def draw(logits: jax.Array) -> jax.Array:
        scaled = logits / jnp.where(is_random, rows.temperature, 1.0)[:, None]
        filters = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
        scaled = jax.lax.cond((filters & is_random).any(), lambda x: filter_logits(x, rows), lambda x: x, scaled)

        def one(seed, position, scaled):  # Gumbel-max: argmax(logits + Gumbel noise) is a draw from softmax(logits)
            key = jax.random.fold_in(jax.random.key(seed), position)
            return jnp.argmax(scaled + jax.random.gumbel(key, scaled.shape, scaled.dtype))

        drawn = jax.vmap(one)(rows.seed, positions, scaled).astype(jnp.int32)
        return jnp.where(is_random, drawn, greedy)

    return jax.lax.cond(is_random.any(), draw, lambda _: greedy, logits)


def logprobs(logits: jax.Array, tokens: jax.Array, rows: RowSampling, num_top: int) -> Logprobs:
    """Report [B] chosen tokens and the `num_top` likeliest; zeros when no row asked."""
    return jax.lax.cond(
        (rows.num_logprobs >= 0).any(),
        lambda logits: report(logits, tokens, num_top),
        lambda logits: no_report(logits.shape[0], num_top),
        logits,
    )


def report(logits: jax.Array, tokens: jax.Array, num_top: int) -> Logprobs:
    """Log-probabilities of tokens i32[B] and of the `num_top` likeliest, of logits f32[B, V]."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # subtracted last: no second array [B, V]
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32) + 1
    top, top_ids = jax.lax.top_k(logits, num_top)
    return Logprobs((chosen - total)[:, 0], rank, top_ids.astype(jnp.int32), top - total)


def no_report(batch: int, num_top: int) -> Logprobs:
    ids = jnp.zeros((batch, num_top), jnp.int32)
    return Logprobs(jnp.zeros((batch,)), jnp.zeros((batch,), jnp.int32), ids, jnp.zeros((batch, num_top)))
