"""int8 storage: rounding, scales, and what cannot be stored."""

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kv_format import (
    FORMATS,
    bytes_per_token,
    decode,
    dequantize,
    encode,
    formats_of,
    quantize,
    round_up_bf16,
)


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
    assert bytes_per_token("bfloat16", 8, 128) == 4096
    assert bytes_per_token("int8", 8, 128) == 2080
    # Tokens in the same room, against bfloat16: what a token and head takes at head_dim 128.
    bf16 = bytes_per_token("bfloat16", 8, 128)
    ratios = {name: bf16 / bytes_per_token(name, 8, 128) for name in ("int8", "int4", "fp8_e4m3", "int8,int4")}
    assert ratios == pytest.approx({"int8": 1.969, "int4": 3.2, "fp8_e4m3": 1.969, "int8,int4": 2.438}, abs=1e-3)
    assert bytes_per_token("int8,int4", 3, 64) == 3 * (66 + 40)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_int4_is_within_half_a_step_of_its_group(head_dim):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((300, 2, head_dim)) + rng.standard_normal((300, 2, 1))).astype(np.float32)
    stored = jax.jit(encode, static_argnums=1)(x, FORMATS["int4"])
    assert stored.numbers.dtype == np.uint8 and stored.numbers.shape == (300, 2, head_dim // 2)
    assert stored.scale.dtype == stored.zero.dtype == ml_dtypes.bfloat16
    step = np.repeat(np.float64(stored.scale), head_dim // stored.scale.shape[-1], axis=-1)
    # Below the stored zero point, which is rounded to 8 bits, lies nothing that counts.
    error = np.abs(np.float64(decode(stored, FORMATS["int4"])) - x)
    slack = 2.0**-8 * np.abs(x).max()
    assert (error <= step * (0.5 + 1e-5) + slack).all() and np.median(error / step) < 0.3


@pytest.mark.parametrize("name, mantissa", [("fp8_e4m3", 4), ("fp8_e5m2", 3)])
def test_fp8_is_scaled_to_its_range(name, mantissa):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((500, 64)) * 2.0 ** rng.integers(-20, 20, (500, 1))).astype(np.float32)
    stored = jax.jit(encode, static_argnums=1)(x, FORMATS[name])
    real = np.float64(decode(stored, FORMATS[name]))
    assert np.isfinite(real).all()
    smallest = np.float64(stored.scale)[:, None] * 2.0**-9  # what e4m3 can tell from 0
    assert (np.abs(real - x) <= np.abs(x) * 2.0**-mantissa * (1 + 1e-5) + smallest).all()


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_zeros_and_what_is_no_number_in_every_format(name):
    kind = FORMATS[name]
    assert (np.asarray(decode(encode(np.zeros((2, 32), np.float32), kind), kind)) == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 32), np.float32)
        x[0, 3] = bad
        assert not np.isfinite(decode(encode(x, kind), kind)).all(), f"{bad} must not become a plausible number"
    constant = np.full((1, 32), 3.0, np.float32)
    assert np.asarray(decode(encode(constant, kind), kind)) == pytest.approx(3.0, rel=0.01)


def test_names_of_formats():
    assert [side.name for side in formats_of("int8")] == ["int8", "int8"]
    assert [side.name for side in formats_of("int8,int4")] == ["int8", "int4"]
    for wrong in ("int3", "int8,", "int8,int8,int8", ""):
        with pytest.raises(KeyError):
            formats_of(wrong)
