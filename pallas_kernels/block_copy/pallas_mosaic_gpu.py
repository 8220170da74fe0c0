"""block_copy in Pallas' Mosaic GPU backend, compute capability 8.0 and up: in place and without a temporary.

As in the Triton kernel a warpgroup owns a slice of places in every block and holds it for all copies in registers, so that
reads come before writes, whichever block is a source and a destination at once. Pools are words of 32 bits to it, since
Mosaic has no arithmetic on bytes, and a word that only begins inside the head is mixed by a mask.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_compat, mosaic_support
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.mosaic_compat import plgpu, store

_THREADS = 128


@dataclasses.dataclass(frozen=True)
class _Words:
    """A pool's words in a block and head.

    Attributes:
      count: of them. size: those that a warpgroup copies at a time, one a thread; 1 where there are too few.
      token_words: words in a row that belong to one token, before the next one's begin; all of a block's, then again.
      token_bytes: bytes of a word that belong to one token.
    """

    count: int
    size: int
    token_words: int
    token_bytes: int

    @classmethod
    def of(cls, pool: jax.Array, places_per_token: int) -> "_Words":
        itemsize = pool.dtype.itemsize
        count = pool.size // (pool.shape[0] * pool.shape[1]) * itemsize // 4
        token_bytes = places_per_token * itemsize
        return cls(count, _THREADS if count % _THREADS == 0 else 1, max(1, token_bytes // 4), min(4, token_bytes))


def block_copy(
    kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array, *, interpret: bool = False
) -> LayerKV:
    if reason := mosaic_support.unavailable():
        raise ValueError(f"the Mosaic GPU kernels cannot run: JAX {reason}")
    pools, structure = jax.tree.flatten(kv)
    # Places of a head stand [P, D], or transposed, or [P] where they are scales.
    places_per_token = [kv.head_dim, 1 if kv.v_format.is_scaled else kv.head_dim, 1, 1]
    words = [_Words.of(pool, per_token) for pool, per_token in zip(pools, places_per_token)]
    refs = [jax.new_ref(_as_words(pool)) for pool in pools]
    mosaic_compat.kernel(
        functools.partial(_copy_slice, words=words, block_size=kv.block_size),
        out_shape=(),
        grid={"kv_head": kv.num_kv_heads, "slice": max(one.count // one.size for one in words)},
        scratch=[],
        name="block_copy",
        interpret=interpret,
    )(src, dst, num_tokens, refs)
    copied = [_as_before(jax.ref.freeze(ref), pool) for ref, pool in zip(refs, pools, strict=True)]
    return jax.tree.unflatten(structure, copied)


def _as_words(pool: jax.Array) -> jax.Array:
    """u32[N, K, words of a block and head]."""
    each = 4 // pool.dtype.itemsize
    shape = (*pool.shape[:2], -1) if each == 1 else (*pool.shape[:2], -1, each)
    return jax.lax.bitcast_convert_type(pool.reshape(shape), jnp.uint32)


def _as_before(words: jax.Array, pool: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, pool.dtype).reshape(pool.shape)


def _copy_slice(src_ref, dst_ref, num_tokens_ref, pool_refs, *, words: list[_Words], block_size: int) -> None:
    head, index = jax.lax.axis_index("kv_head"), jax.lax.axis_index("slice")

    def copy_in(pool_ref, of_pool: _Words) -> None:
        size = of_pool.size
        start = index * size
        is_scalar = size == 1
        layout = None if is_scalar else plgpu.Layout.WG_STRIDED((size,), vec_size=1)
        word = start if is_scalar else start + plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
        tokens_in_word = 4 // of_pool.token_bytes
        token = (jax.lax.div(word, jnp.int32(of_pool.token_words)) * tokens_in_word) & (block_size - 1)

        def load(block):
            if is_scalar:
                return pool_ref[block, head, start]
            return plgpu.load(pool_ref.at[block, head, pl.ds(start, size)], layout=layout, optimized=False)

        mixed = []
        for copy in range(src_ref.shape[0]):
            old, new = load(dst_ref[copy]), load(src_ref[copy])
            seen = num_tokens_ref[copy] - token  # from this word's first token on
            for tokens in range(1, tokens_in_word):
                mask = jnp.uint32(2 ** (8 * of_pool.token_bytes * tokens) - 1)
                new = jnp.where(seen == tokens, (new & mask) | (old & ~mask), new)
            mixed.append(jnp.where(seen > 0, new, old))
        for copy, values in enumerate(mixed):
            if is_scalar:
                pool_ref[dst_ref[copy], head, start] = values
            else:
                store(pool_ref.at[dst_ref[copy], head, pl.ds(start, size)], values)

    for pool_ref, of_pool in zip(pool_refs, words, strict=True):
        pl.when(index < of_pool.count // of_pool.size)(functools.partial(copy_in, pool_ref, of_pool))
