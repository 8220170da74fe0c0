"""Rotating keys and values before they are stored, so that outliers do not spoil a whole token's scale.

An orthogonal matrix H on the head dimension changes nothing in exact arithmetic: (H q) . (H k) = q . k, and a weighted sum
of H v is H of the weighted sum. A Hadamard matrix spreads one large number over all of them (QuaRot: Ashkboos et al. 2024,
arXiv 2404.00456). Queries and keys are rotated after RoPE, on the fly; for values H goes into the weights at load.

Where head_dim is no power of two, blocks of the largest power of two that divides it are rotated.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


def hadamard(x: jax.Array) -> jax.Array:
    """[..., D] times a symmetric orthogonal matrix of +-1/sqrt(n), which is its own inverse; computed in float32."""
    size = x.shape[-1] & -x.shape[-1]
    return jax.lax.platform_dependent(
        x, cpu=functools.partial(_by_additions, size=size), default=functools.partial(_by_product, size=size)
    )


def _by_additions(x: jax.Array, size: int) -> jax.Array:
    """A token's result does not depend on how many there are, as a matmul's does on XLA:CPU."""
    y = x.astype(jnp.float32)
    half = 1
    while half < size:
        pairs = y.reshape(*x.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([low + high, low - high], axis=-2)
        half *= 2
    return (y.reshape(x.shape) * size**-0.5).astype(x.dtype)


def _by_product(x: jax.Array, size: int) -> jax.Array:
    """XLA makes five kernels a layer of the additions, in prefill twelve, and one of each product."""
    signs = 1 - 2 * (jax.lax.population_count(jnp.arange(size)[:, None] & jnp.arange(size)) & 1)
    blocks = x.reshape(*x.shape[:-1], -1, size)
    precision = "highest" if x.dtype == jnp.float32 else None
    y = jnp.matmul(blocks, signs.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    return (y.reshape(x.shape) * size**-0.5).astype(x.dtype)


def fold_into_weights(model: nnx.Module) -> nnx.Module:
    """The same model, whose v_proj gives rotated values and whose o_proj takes rotated outputs. In place, one matrix at a
    time."""
    for layer in model.layers:
        attention = layer.attention
        for parameter in (attention.v_proj.weight, getattr(attention.v_proj, "bias", None)):
            if parameter is not None:
                weight = parameter[...]
                by_head = weight.reshape(attention.num_kv_heads, attention.head_dim, -1)  # the heads' outputs
                rotated = jnp.moveaxis(hadamard(jnp.moveaxis(by_head, 1, 2)), 2, 1)
                parameter.set_value(rotated.reshape(weight.shape))
        weight = attention.o_proj.weight[...]
        by_head = weight.reshape(-1, attention.num_heads, attention.head_dim)  # the heads' inputs
        attention.o_proj.weight.set_value(hadamard(by_head).reshape(weight.shape))
    return model
