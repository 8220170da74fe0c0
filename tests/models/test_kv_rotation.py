"""Rotated keys and values change nothing but rounding, and spread outliers before they are quantised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from jaxkv.core.model_config import ModelConfig
from jaxkv.models.kv_rotation import _by_product, fold_into_weights, hadamard
from jaxkv.models.llama import KVStorage, Llama
from tests.support.paged_forward import paged_logits
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config


def rotated(config: ModelConfig, tensors: dict[str, np.ndarray]) -> Llama:
    folded = fold_into_weights(model_of(config, tensors))
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=jnp.float32, storage=KVStorage(rotates=True))))
    return nnx.merge(graphdef, nnx.state(folded))


@pytest.mark.parametrize("head_dim, size", [(64, 64), (128, 128), (80, 16), (96, 32), (5, 1)])
def test_it_is_a_hadamard_matrix_of_blocks(head_dim, size):
    matrix = np.asarray(hadamard(jnp.eye(head_dim)))
    block = scipy.linalg.hadamard(size) / np.sqrt(size)
    assert np.allclose(matrix, np.kron(np.eye(head_dim // size), block), atol=1e-6)
    assert np.allclose(matrix @ matrix, np.eye(head_dim), atol=1e-5)
    assert np.allclose(_by_product(jnp.eye(head_dim), size), matrix, atol=1e-6)


def test_a_row_does_not_depend_on_its_company():
    x = np.random.default_rng(0).standard_normal((300, 2, 64)).astype(np.float32)
    whole = np.asarray(jax.jit(hadamard)(x))
    assert np.array_equal(np.asarray(jax.jit(hadamard)(x[7:9])), whole[7:9])


@pytest.mark.parametrize("fields", [{}, {"head_dim": 24}, {"attention_bias": True}], ids=str)
def test_logits_stay_what_they_were(fields):
    config = parse(tiny_config(**fields))
    tensors, tokens = random_tensors(config), random_tokens(100)
    plain = paged_logits(model_of(config, tensors), tokens, num_decoded=10)
    turned = paged_logits(rotated(config, tensors), tokens, num_decoded=10)
    assert np.abs(turned - plain).max() < 1e-4 < np.abs(plain).max() / 100
    assert not np.array_equal(turned, plain), "nothing was rotated"
    # Folding alone, without rotating queries and keys, changes values but not their use: o_proj takes it back.
    folded = paged_logits(fold_into_weights(model_of(config, tensors)), tokens)
    assert np.abs(folded - plain).max() < 1e-4


def test_outliers_cost_less():
    """Two rotary pairs of every key times 32, of the queries divided by it: the function stays, a token's scale does not."""
    config = parse(tiny_config())
    tensors, tokens, dim = random_tensors(config), random_tokens(100), config.head_dim
    for name, factor in (("k_proj", 32.0), ("q_proj", 1 / 32)):
        for key in [key for key in tensors if key.endswith(f"{name}.weight")]:
            by_head = tensors[key].reshape(-1, dim, tensors[key].shape[1])
            by_head[:, [1, 3, 1 + dim // 2, 3 + dim // 2]] *= factor
            tensors[key] = by_head.reshape(tensors[key].shape)
    exact = paged_logits(model_of(config, tensors), tokens)
    errors = [
        np.abs(paged_logits(model, tokens, dtype="int8") - exact).mean()
        for model in (model_of(config, tensors), rotated(config, tensors))
    ]
    assert errors[1] * 2 < errors[0], errors  # 4 of 32 numbers are large: sqrt(8) less at best
