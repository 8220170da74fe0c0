"""What every attention operation returns, and how parts of it are put together."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class AttentionOutput(NamedTuple):
    """Attention over one part of the keys; parts merge by their log-sum-exp.

    out: [T or S, H, D] in the query's dtype; zero where no key was seen.
    lse: f32[T or S, H] natural log of the sum of exponentiated scaled logits; -inf where no key was seen.
    """

    out: jax.Array
    lse: jax.Array


def merge(a: AttentionOutput, b: AttentionOutput) -> AttentionOutput:
    """Attention over the keys of both parts, in float32 (Milakov and Gimelshein 2018, arXiv 1805.02867)."""
    largest = jnp.maximum(a.lse, b.lse)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weight_a, weight_b = jnp.exp(a.lse - largest), jnp.exp(b.lse - largest)
    total = weight_a + weight_b
    share_a, share_b = (jnp.where(total > 0, w / jnp.maximum(total, 1e-30), 0)[..., None] for w in (weight_a, weight_b))
    out = share_a * a.out.astype(jnp.float32) + share_b * b.out.astype(jnp.float32)
    return AttentionOutput(out.astype(a.out.dtype), jnp.where(total > 0, largest + jnp.log(total), -jnp.inf))


def add_sinks(output: AttentionOutput, sinks: jax.Array | None) -> AttentionOutput:
    """Attention sinks f32[H]: one logit a head that takes its share of the softmax and has no value. Rows without keys
    stay as they are."""
    if sinks is None:
        return output
    seen = jnp.isfinite(output.lse)
    lse = jnp.where(seen, jnp.logaddexp(output.lse, sinks.astype(jnp.float32)), -jnp.inf)
    share = jnp.where(seen, jnp.exp(output.lse - jnp.where(seen, lse, 0)), 0)
    return AttentionOutput((output.out.astype(jnp.float32) * share[..., None]).astype(output.out.dtype), lse)


def soft_capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
