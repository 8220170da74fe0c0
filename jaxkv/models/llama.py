"""The Llama family as one Flax NNX module: a pure function of weights, KV cache and batch.

There is a single forward pass. It does not know whether it prefills or decodes: the `PagedAttention` it is handed says
where keys and values go and how queries see them.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv.core.model_config import ModelConfig
from jaxkv.models import rope
from jaxkv.models.kv_rotation import hadamard
from jaxkv.models.layers import MLP, Embedding, Linear, RMSNorm, project
from pallas_kernels.layer_kv import LayerKV


class Sinks(NamedTuple):
    """What a query sees beside its window: the first `count` tokens, so far as they are behind it (StreamingLLM, Xiao et
    al. 2023, arXiv 2309.17453)."""

    q: jax.Array  # [T, H, D] the queries once more, rotated to where they would stand if nothing lay between
    count: int


class Angles(NamedTuple):
    """f32[T, D/2] of the tokens' positions, and of where sinks are seen from."""

    cos: jax.Array
    sin: jax.Array
    sink_cos: jax.Array | None = None
    sink_sin: jax.Array | None = None


class PagedAttention(Protocol):
    """How the tokens of one call meet the KV cache."""

    def write(self, kv: LayerKV, k: jax.Array, v: jax.Array) -> LayerKV:
        """Store rotated keys and values [T, K, D] in the call's slots."""
        ...

    def attend(
        self, q: jax.Array, kv: LayerKV, *, scale: float, window: int | None, sinks: Sinks | None = None
    ) -> jax.Array:
        """[T, H, D] queries to [T, H, D] outputs, seeing only what is in blocks."""
        ...


@dataclasses.dataclass(frozen=True)
class KVStorage:
    """What the engine's settings change in a model.

    Attributes:
      rotates: the weights have been through `kv_rotation.fold_into_weights`; queries and keys are rotated too.
      window: most tokens that a layer sees back, itself included; None: as the model has it.
      num_sinks: first tokens that layers which would see more than `window` see beside it.
    """

    rotates: bool = False
    window: int | None = None
    num_sinks: int = 0


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) that writes, then attends only through blocks."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None, storage: KVStorage):
        hidden, head_dim = config.hidden_size, config.head_dim
        self.rotates = storage.rotates
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.window = config.windows_within(storage.window)[layer]
        # A layer that is made for its window has no need of sinks.
        self.num_sinks = storage.num_sinks if self.window != config.window_sizes[layer] else 0
        bias = config.qkv_bias
        self.q_proj = Linear(hidden, self.num_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(hidden, self.num_kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(hidden, self.num_kv_heads * head_dim, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(self.num_heads * head_dim, hidden, bias=config.o_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, dtype=dtype)

    def store(self, x: jax.Array, angles: Angles, kv: LayerKV, attention: PagedAttention) -> LayerKV:
        """The cache with the keys and values of x [T, E]."""
        k, v = (y(x).reshape(-1, self.num_kv_heads, self.head_dim) for y in (self.k_proj, self.v_proj))
        if hasattr(self, "k_norm"):
            k = self.k_norm(k)
        return attention.write(kv, self._rotated(rope.rotate(k, angles.cos, angles.sin)), v)

    def _rotated(self, x: jax.Array) -> jax.Array:
        return hadamard(x) if self.rotates else x

    def __call__(self, x: jax.Array, angles: Angles, kv: LayerKV, attention: PagedAttention) -> jax.Array:
        """[T, E] for x [T, E], whose keys and values are stored."""
        q = self.q_proj(x).reshape(-1, self.num_heads, self.head_dim)
        if hasattr(self, "q_norm"):
            q = self.q_norm(q)
        sinks = None
        if self.num_sinks:
            sinks = Sinks(self._rotated(rope.rotate(q, angles.sink_cos, angles.sink_sin)), self.num_sinks)
        q = self._rotated(rope.rotate(q, angles.cos, angles.sin))
        out = attention.attend(q, kv, scale=self.head_dim**-0.5, window=self.window, sinks=sinks)
        return self.o_proj(out.reshape(x.shape[0], -1))


class DecoderLayer(nnx.Module):
    def __init__(self, config: ModelConfig, layer: int, *, dtype, rngs: nnx.Rngs | None, storage: KVStorage):
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs, storage=storage)
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def store(self, x: jax.Array, angles: Angles, kv: LayerKV, attention: PagedAttention) -> LayerKV:
        return self.attention.store(self.input_norm(x), angles, kv, attention)

    def __call__(self, x: jax.Array, angles: Angles, kv: LayerKV, attention: PagedAttention) -> jax.Array:
        """After `store`; for as many of its tokens as are needed further."""
        x = x + self.attention(self.input_norm(x), angles, kv, attention)
        return x + self.mlp(self.post_attention_norm(x))


@functools.partial(jax.jit, static_argnums=0)
def run_layer(graphdef, weights, x, angles, kv, attention) -> tuple[jax.Array, LayerKV]:
    """One layer as a function of its own: alike layers are traced once, not L times (30 layers: lowering takes
    0.4 s instead of 1.8 s). XLA inlines the calls."""
    layer = nnx.merge(graphdef, weights)
    kv = layer.store(x, angles, kv, attention)
    return layer(x, angles, kv, attention), kv


class Llama(nnx.Module):
    """Decoder-only transformer: Llama, SmolLM2, TinyLlama, CodeLlama, Mistral, Qwen2, Qwen3.

    Layers are unrolled in Python and every layer owns its weights and its KV leaf: a scan over stacked layers copies
    each layer's weights every step on XLA:GPU and runs 6 to 10 times slower on XLA:CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype,
        rngs: nnx.Rngs | None = None,
        max_model_len: int | None = None,
        storage: KVStorage = KVStorage(),
    ):
        """Random weights from `rngs`, or zeros.

        Args:
          max_model_len: matters to `dynamic` rope scaling only (see rope.inverse_frequencies).
        """
        self.config, self.storage = config, storage
        self.max_model_len = max_model_len or config.max_position_embeddings
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs, storage=storage) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, layers_kv: tuple[LayerKV, ...], attention: PagedAttention
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Hidden states [T, E] of i32[T] tokens at i32[T] positions, and the cache with their keys and values."""
        x, layers_kv = self.body(token_ids, positions, layers_kv, attention)
        return self.tail(x, positions, layers_kv[-1], attention), layers_kv

    def body(
        self, token_ids: jax.Array, positions: jax.Array, layers_kv: tuple[LayerKV, ...], attention: PagedAttention
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """All keys and values, and what goes into the last layer [T, E]: `tail` need not follow for every token."""
        angles = self.angles(positions)
        x = self.embed_tokens(token_ids)
        new_kv = []
        for layer, kv in zip(self.layers[:-1], layers_kv[:-1], strict=True):
            x, kv = run_layer(*nnx.split(layer), x, angles, kv, attention)
            new_kv.append(kv)
        new_kv.append(self.layers[-1].store(x, angles, layers_kv[-1], attention))
        return x, tuple(new_kv)

    def tail(self, x: jax.Array, positions: jax.Array, kv: LayerKV, attention: PagedAttention) -> jax.Array:
        """Hidden states [T, E] of those tokens; `kv` is the last layer's."""
        return self.norm(self.layers[-1](x, self.angles(positions), kv, attention))

    def angles(self, positions: jax.Array) -> Angles:
        frequencies, factor = rope.inverse_frequencies(
            self.config.rope,
            self.config.head_dim,
            max_position_embeddings=self.config.max_position_embeddings,
            max_model_len=self.max_model_len,
        )
        angles = Angles(*rope.cos_sin(positions, frequencies, factor))
        if not any(layer.attention.num_sinks for layer in self.layers):
            return angles
        seen_from = jnp.minimum(positions, self.storage.window + self.storage.num_sinks - 1)
        return Angles(angles.cos, angles.sin, *rope.cos_sin(seen_from, frequencies, factor))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[T, V] of hidden states [T, E]."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return project(hidden, head.weight[...], jnp.float32)
