"""What a KV format costs: next-token distributions on known tokens, against those of another format.

Every variant runs the project's own forward pass: keys and values are written into blocks as the format stores them,
and attention sees nothing but the blocks. The tokens are given (teacher forcing), so that the variants stay comparable
position by position, where generated texts part at the first difference.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.execution.batch import PrefillAttention
from jaxkv.execution.kv_cache import empty_cache
from jaxkv.models.key_bias import fold_key_bias
from jaxkv.models.kv_rotation import fold_into_weights
from jaxkv.models.llama import Llama, run_layer

_BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True)
class KVVariant:
    """One way to run the model: its weights, which a variant may transform, and the format of its keys and values."""

    name: str
    model: Llama
    kv_cache_dtype: str


class TokenFigures(NamedTuple):
    """Of every position of one sequence, whose distribution is that of the token after it.

    Attributes:
      kl: f32[n] KL divergence (nats) of the variant's distribution from the base's.
      agrees: bool[n] whether both have the same most likely token.
      base_nll, nll: f32[n - 1] -log p of the token that follows; the last position has none.
    """

    kl: np.ndarray
    agrees: np.ndarray
    base_nll: np.ndarray
    nll: np.ndarray


@dataclasses.dataclass(frozen=True)
class KVQuality:
    """TokenFigures of many sequences, taken together.

    Attributes:
      kl_mean, kl_p99: over positions. top1_agreement: share of positions.
      base_perplexity, perplexity: exp of the mean -log p. perplexity_change: relative, 0.01 for one percent more.
    """

    num_positions: int
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    base_perplexity: float
    perplexity: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.base_perplexity - 1


def token_figures(
    base: KVVariant, variants: Sequence[KVVariant], token_ids: Sequence[int], *, chunk: int = 256, room: int = 0
) -> Iterator[TokenFigures]:
    """Figures of each variant on one sequence of at least two tokens, one after the other.

    Args:
      chunk: tokens computed at once. Whole logits exist for so many positions only: of a long sequence and a large
        vocabulary they would take gigabytes.
      room: tokens the cache holds, if more than there are: sequences up to there share their compiled functions.
    """
    room = max(room, len(token_ids))
    targets = np.zeros((-(-len(token_ids) // chunk) * chunk,), np.int32)
    targets[: len(token_ids) - 1] = token_ids[1:]
    expected = _hidden_states(base, token_ids, chunk, room)
    for variant in variants:
        found = _hidden_states(variant, token_ids, chunk, room)
        parts = [
            _compare(*nnx.split(base.model), *nnx.split(variant.model), *chunks)
            for chunks in zip(expected, found, targets.reshape(-1, chunk), strict=True)
        ]
        kl, agrees, base_nll, nll = (np.concatenate(figure)[: len(token_ids)] for figure in zip(*parts, strict=True))
        yield TokenFigures(kl, agrees, base_nll[:-1], nll[:-1])


def summarize(figures: Sequence[TokenFigures]) -> KVQuality:
    kl, agrees, base_nll, nll = (np.concatenate(parts).astype(np.float64) for parts in zip(*figures, strict=True))
    return KVQuality(
        num_positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1_agreement=float(agrees.mean()),
        base_perplexity=float(np.exp(base_nll.mean())),
        perplexity=float(np.exp(nll.mean())),
    )


def with_key_outliers(model: Llama, factor: float) -> Llama:
    """The same function with keys that are hard to quantise, as models of other families have them: two rotary pairs of
    every head are `factor` times as large, and those of the queries as much smaller."""
    scale = np.ones((model.config.head_dim,), np.float32)
    half = len(scale) // 2
    for pair in (half // 4, half // 2):
        scale[[pair, pair + half]] = factor
    model = nnx.clone(model)
    for layer in model.layers:
        attention = layer.attention
        normalized = hasattr(attention, "k_norm")  # what stands before a norm would be lost
        for module, by in (
            (attention.k_norm if normalized else attention.k_proj, scale),
            (attention.q_norm if normalized else attention.q_proj, 1 / scale),
        ):
            for parameter in (module.weight, getattr(module, "bias", None)):
                if parameter is not None:
                    values = parameter[...]
                    rows = jnp.asarray(np.tile(by, len(values) // len(by)))
                    parameter[...] = (values.T * rows).T.astype(values.dtype)
    return model


def with_key_bias_folded(model: Llama) -> Llama:
    """The same function with the weights an engine with int8 or int4 keys loads (see models.key_bias)."""
    model = nnx.clone(model)
    fold_key_bias(model)
    return model


def with_rotation(model: Llama) -> Llama:
    """The same function with rotated keys and values, as `kv_rotation=hadamard` stores them."""
    model = fold_into_weights(nnx.clone(model))
    for layer in model.layers:
        layer.attention.rotates = True
    return model


def _hidden_states(variant: KVVariant, token_ids: Sequence[int], chunk: int, room: int) -> list[jax.Array]:
    """[chunk, E] of each chunk; the last one is padded.

    Layer by layer, since alike layers compile once. As one function, 30 of them take 20 s to compile, for every format.
    """
    num_blocks = -(-room // _BLOCK_SIZE)
    model = variant.model
    cache = empty_cache(
        model.config,
        num_blocks=num_blocks + 1,
        block_size=_BLOCK_SIZE,
        dtype=variant.kv_cache_dtype,
        as_bits=True,  # XLA:CPU converts whole pools of short floats; elsewhere it makes no difference
    )
    layers_kv = list(cache.layers)
    table = jnp.arange(1, num_blocks + 1, dtype=jnp.int32)
    index = np.arange(chunk, dtype=np.int32)
    hidden = []
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        ids = np.zeros((chunk,), np.int32)
        ids[:count] = token_ids[start : start + count]
        positions = np.where(index < count, start + index, 0)
        slots = (1 + positions // _BLOCK_SIZE) * _BLOCK_SIZE + positions % _BLOCK_SIZE
        attention = PrefillAttention(
            slots=jnp.asarray(np.where(index < count, slots, index % _BLOCK_SIZE)),  # padding: in the null block
            block_table=table[None],
            cu_q_lens=jnp.array([0, count], jnp.int32),
            context_lens=jnp.array([start], jnp.int32),
            implementation="xla",
        )
        angles = model.angles(jnp.asarray(positions))
        x = model.embed_tokens(jnp.asarray(ids))
        for i, layer in enumerate(model.layers):
            x, layers_kv[i] = run_layer(*nnx.split(layer), x, angles, layers_kv[i], attention)
        hidden.append(model.norm(x))
    return hidden


@functools.partial(jax.jit, static_argnums=(0, 2))
def _compare(
    base_graphdef: nnx.GraphDef,
    base_weights: nnx.State,
    graphdef: nnx.GraphDef,
    weights: nnx.State,
    base_hidden: jax.Array,
    hidden: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """kl, agrees, base_nll and nll of hidden states [T, E] before targets i32[T]."""
    base_logits = nnx.merge(base_graphdef, base_weights).logits(base_hidden)
    logits = nnx.merge(graphdef, weights).logits(hidden)
    log_p, log_q = jax.nn.log_softmax(base_logits), jax.nn.log_softmax(logits)
    p, q, d = jnp.exp(log_p), jnp.exp(log_q), log_q - log_p
    # The sum of p * -d, plus that of q - p, which is 0: no term is negative, so that nothing cancels, and the rounding
    # of the two normalisers counts squared. Plain, float32 would add noise of 1e-6: as much as float16 costs.
    kl = jnp.where(d < 1, p * (jnp.expm1(d) - d), q - p - p * d).sum(axis=-1)

    def nll(log_probs: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]

    return kl, base_logits.argmax(axis=-1) == logits.argmax(axis=-1), nll(log_p), nll(log_q)
