"""int8 storage: rounding, scales, and what cannot be stored."""

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_format import FORMATS, dequantize, quantize, round_up_bf16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_error_is_at_most_half_a_scale(dtype):
    rng = np.random.default_rng(0)
    spread = 2.0 ** rng.integers(-12, 12, (500, 1))
    x = (rng.standard_normal((500, 64)) * spread).astype(dtype)
    stored, scale = jax.jit(quantize)(x)
    assert stored.dtype == np.int8 and scale.dtype == ml_dtypes.bfloat16
    wide, real = np.float64(scale)[:, None], np.float64(x)
    assert (np.abs(np.float64(dequantize(stored, scale)) - real) <= wide * (0.5 + 1e-6)).all()
    exact = np.abs(real).max(axis=1) / 127
    # Rounded up, by less than one unit in the last of bfloat16's 8 bits.
    assert (wide[:, 0] >= exact * (1 - 1e-6)).all() and (wide[:, 0] <= exact * (1 + 2**-7)).all()
    assert np.abs(stored).max() <= 127 and (np.abs(stored).max(axis=1) >= 126).all()


def test_rounds_to_nearest_and_ties_to_even():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -126.6]], np.float32)
    stored, scale = quantize(x)
    assert float(scale[0]) == 1 and stored.tolist() == [[127, 0, 2, 2, 0, -2, 0, -127]]


def test_zeros_stay_zeros_and_what_is_no_number_stays_none():
    stored, scale = quantize(np.zeros((2, 4), np.float32))
    assert (np.asarray(stored) == 0).all() and (np.asarray(scale) == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        x = np.array([[1.0, bad, 2.0]], np.float32)
        assert np.isnan(dequantize(*quantize(x))).any(), f"{bad} must not become a plausible number"


def test_scales_round_up():
    x = np.concatenate([np.float32(2.0) ** np.arange(-20, 20), np.linspace(0.001, 5, 1000, dtype=np.float32)])
    up = np.asarray(round_up_bf16(x)).astype(np.float32)
    nearest = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (up >= x).all() and (up[:40] == x[:40]).all() and (up[nearest >= x] == nearest[nearest >= x]).all()


def test_bytes_a_token():
    assert FORMATS["bfloat16"].bytes_per_token(8, 128) == 4096
    assert FORMATS["int8"].bytes_per_token(8, 128) == 2080
