"""Rotary embeddings: frequencies against stored ones of transformers, the rotation against complex numbers."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.model_config import RopeConfig
from jaxkv.models import rope
from tests.support.config_matrix import MATRIX, MAX_MODEL_LEN
from tests.support.tiny_models import parse

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "rope_frequencies.npz")


def frequencies_of(name: str, max_model_len: int = MAX_MODEL_LEN) -> tuple[np.ndarray, float]:
    config = parse(MATRIX[name])
    return rope.inverse_frequencies(
        config.rope,
        config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("name", MATRIX)
def test_frequencies_equal_transformers(name):
    frequencies, factor = frequencies_of(name)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, GOLDEN[name][:-1], rtol=1e-6)
    assert factor == pytest.approx(GOLDEN[name][-1], rel=1e-6)


def test_every_scaling_type_is_covered_and_differs_from_none():
    plain = 10_000.0 ** (-np.arange(16) / 16)
    kinds = {name: parse(config).rope.type for name, config in MATRIX.items()}
    assert set(kinds.values()) == {"default", "linear", "dynamic", "llama3", "yarn"}
    for name, kind in kinds.items():
        if kind != "default":
            assert np.abs(frequencies_of(name)[0] / plain - 1).max() > 0.3


def test_dynamic_is_plain_up_to_the_original_length_and_one_fixed_base_beyond():
    plain = 10_000.0 ** (-np.arange(16) / 16)
    for fits in (16, 64):
        np.testing.assert_allclose(frequencies_of("llama_dynamic", fits)[0], plain, rtol=1e-6)
    base = 10_000.0 * (3 * 200 / 64 - 2) ** (32 / 30)
    np.testing.assert_allclose(frequencies_of("llama_dynamic", 200)[0], base ** (-np.arange(16) / 16), rtol=1e-6)


def test_rotation_is_a_complex_product():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 8)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 8191], np.int32)
    frequencies = np.array([1.0, 0.1, 0.01, 0.001], np.float32)
    rotated = rope.rotate(jnp.asarray(x), *rope.cos_sin(jnp.asarray(positions), frequencies, 1.0))
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None] * frequencies.astype(np.float64))[
        :, None
    ]
    # 8191 radians in float32 are off by up to 2.5e-4.
    np.testing.assert_allclose(rotated[..., :4], expected.real, atol=2e-3)
    np.testing.assert_allclose(rotated[..., 4:], expected.imag, atol=2e-3)
    np.testing.assert_allclose(rotated[:4, :, :4], expected.real[:4], atol=2e-5)
    assert np.array_equal(rotated[0], x[0])


def test_factor_scales_cos_and_sin():
    cos, sin = rope.cos_sin(jnp.arange(3), np.array([0.5], np.float32), 1.25)
    np.testing.assert_allclose(cos[:, 0], 1.25 * np.cos([0, 0.5, 1.0]), rtol=1e-6)
    np.testing.assert_allclose(sin[:, 0], 1.25 * np.sin([0, 0.5, 1.0]), rtol=1e-6)


def test_unknown_type_is_refused():
    with pytest.raises(ValueError, match="unknown rope type 'longrope'"):
        rope.inverse_frequencies(RopeConfig(type="longrope"), 32, max_position_embeddings=64, max_model_len=64)
