"""Key biases out of the stored keys: what a checkpoint with a bias on k_proj needs before its keys are quantised.

Such biases (Qwen2's reach some hundreds) make a few channels of every key large, and these set the scale of all others. A
factor a rotary pair is divided out of k_proj's rows and multiplied into those of the queries that meet them. Channels i and
i + D/2 share it, so RoPE, which mixes the two, does not see it; q . k stays. Factors are powers of two: in float32 and
bfloat16 nothing is rounded, and all logits keep their bits as long as keys are stored unrounded (in float16 numbers below
6e-5 may lose some).

The factor is the square root of how much larger a pair's keys are than the median pair's. The whole ratio would make keys
alike, and queries as unlike as keys were; then errors of the same size are weighted with large queries. What counts is the
product: the sum over channels of |q|^2 f^2 times that of |k|^2 / f^2 is smallest where f^2 is |k| / |q|. On the demo model
with biases of 10 to 200 on four slow pairs, int8's KL divergence fell from 2.7e-2 to 5.4e-3 after rotation and from 0.35 to
0.034 without; with the whole ratio it became 0.16 and 0.36. Floating-point formats lose (fp8_e4m3 0.60, with factors 1.24):
an outlier's small neighbours have exponents of their own. Fold before rotation, which spreads outliers over all channels.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv.models.llama import Attention


def fold_key_bias(model: nnx.Module) -> float:
    """Scale k_proj and q_proj of every layer, in place. Returns the largest factor: 1.0 where there was nothing to do.

    A model without key biases stays as it is; one with a norm on keys too, which would take the factors out again.
    """
    largest = 1.0
    for layer in model.layers:
        attention = layer.attention
        if not hasattr(attention.k_proj, "bias") or hasattr(attention, "k_norm"):
            continue
        factors = pair_factors(attention, layer.input_norm.weight[...])
        channels = np.concatenate([factors, factors], axis=1)  # [K, D]
        queries = np.repeat(channels, attention.num_heads // attention.num_kv_heads, axis=0)  # [H, D]
        _scale_rows(attention.k_proj, 1 / channels.ravel())
        _scale_rows(attention.q_proj, queries.ravel())
        largest = max(largest, float(factors.max()))
    return largest


def pair_factors(attention: Attention, input_gain: jnp.ndarray) -> np.ndarray:
    """f32[K, D/2] powers of two, at least 1, of a layer whose input has been through a norm with gains f32[E].

    Keys without their bias are taken to be as large as inputs of unit variance, each on its own, would make them.
    """
    shape = attention.num_kv_heads, 2, attention.head_dim // 2
    bias = attention.k_proj.bias[...].astype(jnp.float32).reshape(shape)
    weight = attention.k_proj.weight[...].astype(jnp.float32) * input_gain.astype(jnp.float32)
    variance = (weight**2).sum(axis=1).reshape(shape)
    sizes = np.sqrt(np.asarray((bias**2 + variance).sum(axis=1), np.float64))
    median = np.median(sizes, axis=1, keepdims=True)
    ratios = np.maximum(sizes, np.finfo(np.float32).tiny) / np.maximum(median, np.finfo(np.float32).tiny)
    return np.exp2(np.maximum(0, np.round(np.log2(ratios) / 2))).astype(np.float32)


def _scale_rows(linear: nnx.Module, factors: np.ndarray) -> None:
    for parameter in (linear.weight, getattr(linear, "bias", None)):
        if parameter is not None:
            values = parameter[...]
            by_row = jnp.asarray(factors.reshape(-1, *[1] * (values.ndim - 1)), values.dtype)
            parameter.set_value(values * by_row)
