"""The whole forward pass through blocks, without torch: stored logits of transformers, and a dense float64 model."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.loading.resolve import resolve_model
from jaxkv.loading.weights import load_config, load_weights
from jaxkv.models.layers import RMSNorm
from tests.support.config_matrix import GOLDEN, GOLDEN_POSITIONS, MATRIX, MAX_MODEL_LEN, PROMPT
from tests.support.demo import demo_text_ids, demo_weights
from tests.support.dense_model import DenseModel
from tests.support.paged_forward import paged_logits
from tests.support.tiny_models import model_of, parse, random_tensors, write_folder

FOLDER = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_equal_transformers(name, tmp_path):
    """Weights go through a Hugging Face folder, so that the loader is proven with the model."""
    source = resolve_model(str(write_folder(tmp_path, MATRIX[name], random_tensors(parse(MATRIX[name])))))
    config = load_config(source)
    model = load_weights(source, config, dtype="float32", max_model_len=MAX_MODEL_LEN)
    logits = paged_logits(model, PROMPT)[list(GOLDEN_POSITIONS)]
    expected = np.load(FOLDER / "tiny_logits.npz")[name]
    assert expected.std() > 2, "logits too flat to prove anything"
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3_bias_window"])
def test_chunks_and_decode_steps_equal_the_dense_model(name):
    config = parse(MATRIX[name])
    tensors = random_tensors(config, seed=3)
    logits = paged_logits(model_of(config, tensors), PROMPT, chunk=33, num_decoded=41, block_size=8)
    np.testing.assert_allclose(logits, DenseModel(config, tensors).logits(PROMPT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", [0, 50, 98])
def test_logits_depend_on_the_whole_history(place):
    """Why these models are a test: one other token far back moves the last logits by far more than the tolerance."""
    config = parse(MATRIX["llama"])
    dense = DenseModel(config, random_tensors(config))
    other = list(PROMPT)
    other[place] = (other[place] + 1) % config.vocab_size
    assert np.abs(dense.logits(tuple(other))[-1] - dense.logits(PROMPT)[-1]).max() > 0.01


def test_windows_and_fields_change_the_logits():
    """Each field of the matrix matters: without it the logits are far outside the tolerance."""
    for name, without in (("mistral_window", {"sliding_window": None}), ("llama_mqa_eps", {"rms_norm_eps": 1e-5})):
        tensors = random_tensors(parse(MATRIX[name]))
        with_field, plain = (
            DenseModel(parse(fields), tensors).logits(PROMPT) for fields in (MATRIX[name], MATRIX[name] | without)
        )
        assert np.abs(with_field - plain).max() > 0.1


def test_rms_norm_is_computed_in_float32():
    norm = RMSNorm(64, eps=1e-5, dtype=jnp.bfloat16)
    norm.weight = nnx.Param(jnp.full((64,), 0.5, jnp.bfloat16))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)) * 1e-3, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * 0.5
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), exact, rtol=2**-7)


def test_demo_model_on_real_text_equals_transformers():
    golden = np.load(FOLDER / "demo_logits.npz")
    ids = tuple(golden["token_ids"].tolist())
    assert ids == demo_text_ids(len(ids)) and len(ids) >= 300
    logits = paged_logits(demo_weights(), ids, chunk=128)
    error = np.abs(logits[::8, ::1000] - golden["logits"])
    assert error.max() <= 5e-4 and error.mean() <= 2e-5
    # Best token everywhere, except where the oracle's own choice is a near tie.
    chosen = logits[np.arange(len(ids)), golden["best"]]
    np.testing.assert_allclose(chosen, golden["best_logit"], rtol=0, atol=5e-4)
    differs = logits.argmax(-1) != golden["best"]
    assert (logits.max(-1)[differs] - chosen[differs] <= 1e-4).all() and differs.mean() <= 0.001
