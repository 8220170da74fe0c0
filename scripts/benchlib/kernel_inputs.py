"""Inputs of the kernels at the sizes that are measured, made on the device.

Values are random, never zeros: a GPU draws less power on zeros and clocks higher. A large array repeats one random piece,
so that making it takes no memory beside it; the pieces lie apart, and no cache knows that they are alike.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchlib.roofline import CascadePoint, DecodePoint, Heads, PrefillPoint, WritePoint
from pallas_kernels.kv_format import bytes_per_token
from pallas_kernels.layer_kv import LayerKV, empty_layer_kv

# Numbers in the piece that is repeated.
_PIECE = 2**24


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_array(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers, int8 over its whole range."""
    rest = math.prod(shape[1:])
    rows = min(shape[0], max(1, _PIECE // rest))
    if dtype == "int8":
        piece = jax.random.randint(key, (rows, *shape[1:]), -127, 128, jnp.int8)
    else:
        piece = jax.random.normal(key, (rows, *shape[1:]), dtype)
    copies = -(-shape[0] // rows)
    return jnp.broadcast_to(piece, (copies, *piece.shape)).reshape(copies * rows, *shape[1:])[: shape[0]]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _scales(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """As of normal numbers: the largest of a token is about three, stored as 127."""
    return jax.random.uniform(key, shape, minval=0.02, maxval=0.03).astype(dtype)


def random_pool(key: jax.Array, heads: Heads, num_blocks: int, block_size: int, kv_format: str) -> LayerKV:
    """A layer's blocks; `num_blocks` counts the null block."""
    shapes = jax.eval_shape(
        lambda: empty_layer_kv(num_blocks, heads.num_kv_heads, block_size, heads.head_dim, kv_format)
    )
    keys = jax.random.split(key, 4)
    pool = [random_array(keys[i], x.shape, x.dtype.name) for i, x in enumerate((shapes.k, shapes.v))]
    if shapes.k_scale is not None:
        pool += [_scales(keys[2 + i], x.shape, x.dtype.name) for i, x in enumerate((shapes.k_scale, shapes.v_scale))]
    return LayerKV(*pool)


def pool_bytes(heads: Heads, num_tokens: int, kv_format: str) -> int:
    return num_tokens * bytes_per_token(kv_format, heads.num_kv_heads, heads.head_dim)


def decode_inputs(
    point: DecodePoint, block_size: int, seed: int = 0
) -> tuple[jax.Array, LayerKV, jax.Array, jax.Array]:
    """(q, kv, block_table, seq_lens) of a full batch; the blocks of the rows stand in random order."""
    heads, columns = point.heads, point.context // block_size
    num_blocks = 1 + point.batch * columns
    keys = jax.random.split(jax.random.key(seed), 2)
    table = 1 + np.random.default_rng(seed).permutation(num_blocks - 1).reshape(point.batch, columns)
    return (
        random_array(keys[0], (point.batch, heads.num_heads, heads.head_dim), "bfloat16"),
        random_pool(keys[1], heads, num_blocks, block_size, point.kv_format),
        jnp.asarray(table, jnp.int32),
        jnp.full((point.batch,), point.context, jnp.int32),
    )


def prefill_inputs(point: PrefillPoint, block_size: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, kv, block_table, cu_q_lens, context_lens) of one sequence."""
    heads, columns = point.heads, -(-(point.context + point.query_len) // block_size)
    keys = jax.random.split(jax.random.key(seed), 2)
    return (
        random_array(keys[0], (point.query_len, heads.num_heads, heads.head_dim), "bfloat16"),
        random_pool(keys[1], heads, 1 + columns, block_size, point.kv_format),
        jnp.asarray(1 + np.random.default_rng(seed).permutation(columns)[None], jnp.int32),
        jnp.asarray([0, point.query_len], jnp.int32),
        jnp.asarray([point.context], jnp.int32),
    )


def cascade_inputs(point: CascadePoint, block_size: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """(q, kv, block_table, seq_lens) of rows whose first blocks are the same ones."""
    heads, shared, own = point.heads, point.prefix // block_size, point.suffix // block_size
    num_blocks = 1 + shared + point.batch * own
    keys = jax.random.split(jax.random.key(seed), 2)
    blocks = 1 + np.random.default_rng(seed).permutation(num_blocks - 1)
    table = [np.concatenate([blocks[:shared], blocks[shared + row * own :][:own]]) for row in range(point.batch)]
    return (
        random_array(keys[0], (point.batch, heads.num_heads, heads.head_dim), "bfloat16"),
        random_pool(keys[1], heads, num_blocks, block_size, point.kv_format),
        jnp.asarray(np.stack(table), jnp.int32),
        jnp.full((point.batch,), point.prefix + point.suffix, jnp.int32),
    )


def write_inputs(point: WritePoint, block_size: int, seed: int = 0) -> tuple[LayerKV, jax.Array, jax.Array, jax.Array]:
    """(kv, k, v, slots): each token in a block of its own where they are few, as in decode, and side by side where they
    are many, as in prefill."""
    heads, tokens = point.heads, point.num_tokens
    num_blocks = 1 + (tokens if tokens <= 256 else -(-tokens // block_size))
    keys = jax.random.split(jax.random.key(seed), 3)
    rng = np.random.default_rng(seed)
    if tokens <= 256:
        slots = (1 + rng.permutation(tokens)) * block_size + rng.integers(0, block_size, tokens)
    else:
        slots = block_size + np.arange(tokens)
    k, v = (random_array(key, (tokens, heads.num_kv_heads, heads.head_dim), "bfloat16") for key in keys[:2])
    return random_pool(keys[2], heads, num_blocks, block_size, point.kv_format), k, v, jnp.asarray(slots, jnp.int32)
