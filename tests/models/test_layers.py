"""What XLA:CPU makes of the model's products."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.models.layers import project


@functools.cache
def chain(dtype: str):
    """Twelve SwiGLUs of the demo model's shapes, more than the caches hold, and a call of them."""
    rng = np.random.default_rng(0)
    shapes = ((1536, 576), (1536, 576), (576, 1536))
    weights = [[jnp.asarray(rng.standard_normal(s, np.float32) * 0.02, dtype) for s in shapes] for _ in range(12)]

    @jax.jit
    def run(x, weights):
        for gate, up, down in weights:
            x = project(jax.nn.silu(project(x, gate)) * project(x, up), down)
        return x

    return run, weights


@pytest.mark.parametrize("num_rows", [1, 8])
def test_bfloat16_products_keep_up_with_float32(num_rows):
    """Without their float32 results, or with one row alone, they are plain loops: 8 times as long."""
    times = {"float32": [], "bfloat16": []}
    for _ in range(9):
        for name, taken in times.items():
            run, weights = chain(name)
            x = jnp.ones((num_rows, 576), name)
            begin = time.perf_counter()
            run(x, weights).block_until_ready()
            taken.append(time.perf_counter() - begin)
    float32, other = (statistics.median(taken[2:]) for taken in times.values())
    assert other < 3 * float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 63, 64, 100])
def test_products_are_right_for_any_number_of_rows(num_rows, dtype):
    rng = np.random.default_rng(num_rows)
    x, weight = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((num_rows, 96), (80, 96)))
    got = project(x, weight)
    assert got.dtype == x.dtype and project(x, weight, jnp.float32).dtype == jnp.float32
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance, atol=30 * tolerance)
