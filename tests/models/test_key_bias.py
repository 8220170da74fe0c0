"""Factors taken out of keys with large biases change no bit of the logits, and less is lost when such keys are quantised."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv import startup
from jaxkv.core.config import EngineConfig
from jaxkv.kv_quality import KVVariant, summarize, token_figures, with_key_bias_folded, with_rotation
from jaxkv.models.key_bias import fold_key_bias, pair_factors
from tests.support.paged_forward import paged_logits
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_bias": True, "hidden_size": 128,
         "head_dim": 64}  # fmt: skip
CONFIG = parse(tiny_config(**QWEN2))
IDS = random_tokens(150)


def tensors_of(config=CONFIG):
    """Biases as Qwen2 has them: a few pairs, slow ones above all, of up to 100; the others 1."""
    tensors, rng = random_tensors(config), np.random.default_rng(1)
    size = np.ones((config.head_dim // 2,), np.float32)
    size[[5, -4, -3, -2, -1]] = 20, 10, 30, 60, 100
    for name in [name for name in tensors if name.endswith("k_proj.bias")]:
        bias = rng.standard_normal((config.num_kv_heads, 2, len(size)), np.float32)
        tensors[name] = (bias / np.linalg.norm(bias, axis=1, keepdims=True) * size).reshape(-1)
    return tensors


@pytest.fixture(scope="module")
def model():
    return model_of(CONFIG, tensors_of())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_keep_their_bits(model, dtype):
    folded = with_key_bias_folded(model)
    before, after = (m.layers[0].attention.k_proj.bias[...] for m in (model, folded))
    assert np.abs(after).max() < np.abs(before).max() / 4, "nothing was folded"
    logits = [paged_logits(m, IDS, num_decoded=5, dtype=dtype) for m in (model, folded)]
    np.testing.assert_array_equal(*logits)


def test_weights_of_two_bytes_keep_theirs(model):
    """Keys and queries in bfloat16, times and divided by powers of two."""
    short = nnx.clone(model)
    for layer in short.layers:
        for linear in (layer.attention.q_proj, layer.attention.k_proj):
            for parameter in (linear.weight, linear.bias):
                parameter.set_value(parameter[...].astype(jnp.bfloat16))
    folded = with_key_bias_folded(short)
    for one, other in zip(short.layers, folded.layers, strict=True):
        factors = pair_factors(one.attention, one.input_norm.weight[...])
        rows = np.concatenate([factors, factors], axis=1).reshape(-1, 1)
        back = np.asarray(other.attention.k_proj.weight[...].astype(jnp.float32)) * rows
        np.testing.assert_array_equal(back, np.asarray(one.attention.k_proj.weight[...].astype(jnp.float32)))


def test_both_channels_of_a_pair_and_all_queries_of_a_group_share_a_factor(model):
    folded = with_key_bias_folded(model)
    one, other = (m.layers[1].attention for m in (model, folded))
    heads = {
        name: np.asarray(getattr(other, name).weight[...] / getattr(one, name).weight[...])
        for name in ("q_proj", "k_proj")
    }
    keys = heads["k_proj"].reshape(2, 2, 32, -1)
    queries = heads["q_proj"].reshape(2, 2, 2, 32, -1)  # KV head, query of its group, half, pair
    factors = pair_factors(one, model.layers[1].input_norm.weight[...])
    assert factors.min() == 1 and 4 <= factors.max() <= 16 and not np.modf(np.log2(factors))[0].any()
    assert (factors[:, [-1, -2, -3, 5]] > 1).all() and np.median(factors) == 1
    np.testing.assert_array_equal(keys, np.broadcast_to(1 / factors[:, None, :, None], keys.shape))
    np.testing.assert_array_equal(queries, np.broadcast_to(factors[:, None, None, :, None], queries.shape))


@pytest.mark.parametrize("rotated, at_least", [(False, 8.0), (True, 2.5)])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_keys_lose_less(model, dtype, rotated, at_least):
    """KL of int8 falls by more than 8 without rotation and 2.5 with it; int4's is too large to fall as far."""
    variants = [model, with_key_bias_folded(model)]
    if rotated:
        variants = [with_rotation(variant) for variant in variants]
    found = token_figures(
        KVVariant("base", model, "float32"), [KVVariant("", variant, dtype) for variant in variants], IDS, chunk=64
    )
    plain, folded = (summarize([figures]).kl_mean for figures in found)
    assert 0 < folded * (at_least if dtype == "int8" else 1.5) < plain, (plain, folded)


@pytest.mark.parametrize("fields", [{}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True}], ids=["no bias", "norm on keys"])  # fmt: skip
def test_what_it_leaves_alone(fields):
    config = parse(tiny_config(num_hidden_layers=1, **fields))
    tensors = random_tensors(config)
    model = model_of(config, tensors)
    assert fold_key_bias(model) == 1.0
    key = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(model.layers[0].attention.k_proj.weight[...], tensors[key])


@pytest.mark.parametrize("kv_cache_dtype, folds", [("int8", True), ("int4", True), ("int8,int4", True), ("fp8_e4m3", False), ("bfloat16,int8", False), ("float32", False)])  # fmt: skip
def test_weights_are_folded_where_keys_are_integers(model, kv_cache_dtype, folds, caplog):
    before = model.layers[0].attention.k_proj.bias[...]
    with caplog.at_level(logging.INFO, logger="jaxkv"):
        stored = startup._as_stored(nnx.clone(model), EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_rotation="none"))
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("key bias")]
    assert np.array_equal(stored.layers[0].attention.k_proj.bias[...], before) is not folds and len(told) == folds
    assert not folds or "powers of two up to 8," in told[0]
