"""Rotary position embeddings: frequencies for every scaling type, and the rotation itself.

Sources: RoPE (Su et al. 2021, arXiv 2104.09864); linear scaling (Chen et al. 2023, arXiv 2306.15595); dynamic NTK (as in
transformers); YaRN (Peng et al. 2023, arXiv 2309.00071); llama3 (Meta's Llama 3.1 reference code).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.model_config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, *, max_position_embeddings: int, max_model_len: int
) -> tuple[np.ndarray, float]:
    """Frequencies f32[D/2] in radians a position, and the factor that cos and sin are multiplied by.

    `dynamic` depends on the running length in transformers, which keys already in a cache can't follow. Here it is one
    fixed base: the default one when max_model_len fits the original length, otherwise the one transformers would use at
    max_model_len.
    """
    # float32 throughout, since that is what the checkpoints were trained and are tested with.
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    base = rope.theta
    if rope.type == "dynamic":
        length = max(max_model_len, max_position_embeddings)
        stretch = rope.factor * length / max_position_embeddings - (rope.factor - 1)
        base *= stretch ** (head_dim / (head_dim - 2))
    frequencies = (np.float32(1.0) / np.float32(base) ** exponent).astype(np.float32)
    if rope.type in ("default", "dynamic"):
        return frequencies, 1.0
    if rope.type == "linear":
        return frequencies / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, frequencies), 1.0
    if rope.type == "yarn":
        return _yarn(rope, frequencies, head_dim), _yarn_attention_factor(rope)
    raise ValueError(f"unknown rope type {rope.type!r}")


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * np.pi / frequencies
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return ((1 - smooth) * frequencies / rope.factor + smooth * frequencies).astype(np.float32)


def _yarn(rope: RopeConfig, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that turn more than beta_fast times over the original length are kept, those under beta_slow divided."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (frequencies / rope.factor * ramp + frequencies * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def cos_sin(positions: jax.Array, frequencies: np.ndarray, factor: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, D/2], of i32[T] positions."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate [T, heads, D], where dimension i pairs with i + D/2 (Hugging Face's order), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
