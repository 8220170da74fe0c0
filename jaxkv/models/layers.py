"""Building blocks of the model."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx


def _normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype) -> nnx.Param:
    """Random weights, or zeros without rngs: for models that loading fills, where tracing 272 draws costs 1.5 s."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param((jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02).astype(dtype))


def project(x: jax.Array, weight: jax.Array, dtype=None) -> jax.Array:
    """x W^T: [T, in] times [out, in], the checkpoints' own orientation, to [T, out] in `dtype` (None: x's)."""
    dtype = dtype or x.dtype
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))

    def cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        """What XLA:CPU multiplies fastest; times of 12 SwiGLUs of 576 x 1536 on 2 cores, JAX 0.10.2.

        Float32, 2 to 63 rows: weights as the left operand, 13 ms instead of 24 at 8 rows. The barrier keeps XLA from
        swapping the operands back. Bfloat16: results in float32, 16 ms instead of 105 at 8 rows; and never one row
        alone, which runs as plain loops, 10 ms instead of 76. Float16 has no fast way: 110 ms.
        """
        num_rows = x.shape[0]
        if x.dtype == jnp.bfloat16:
            x = jnp.pad(x, ((0, 1 if num_rows == 1 else 0), (0, 0)))
            return dot(x, weight, preferred_element_type=jnp.float32)[:num_rows].astype(dtype)
        if 1 < num_rows < 64:
            return jax.lax.optimization_barrier(dot(weight, x, preferred_element_type=dtype)).T
        return dot(x, weight, preferred_element_type=dtype)

    return jax.lax.platform_dependent(x, weight, cpu=cpu, default=functools.partial(dot, preferred_element_type=dtype))


class Linear(nnx.Module):
    """y = x W^T + b."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype, rngs: nnx.Rngs | None):
        self.weight = _normal(rngs, (out_features, in_features), dtype)
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.weight[...])
        return y + self.bias[...] if hasattr(self, "bias") else y


class Embedding(nnx.Module):
    def __init__(self, num_embeddings: int, features: int, *, dtype, rngs: nnx.Rngs | None):
        self.weight = _normal(rngs, (num_embeddings, features), dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        weight = self.weight[...]

        def gather(weight: jax.Array) -> jax.Array:
            return weight.at[ids].get(mode="promise_in_bounds")

        def cpu() -> jax.Array:
            """XLA:CPU has no gather of 16-bit floats, and would convert the whole table; of their bits it has."""
            if weight.dtype.itemsize != 2:
                return gather(weight)
            # Bound to the ids, or the bits are made once before a loop: as a copy of the table.
            table, _ = jax.lax.optimization_barrier((weight, ids))
            bits = gather(jax.lax.bitcast_convert_type(table, jnp.uint16))
            return jax.lax.bitcast_convert_type(bits, weight.dtype)

        return jax.lax.platform_dependent(cpu=cpu, default=lambda: gather(weight))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, features: int, *, eps: float, dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * x32.astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool, dtype, rngs: nnx.Rngs | None):
        self.gate_proj = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, intermediate, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(intermediate, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
