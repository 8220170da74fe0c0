"""Which tokens may be drawn, and how likely, against transformers' logits processors."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is transformers' logits processors")

import jax
import jax.numpy as jnp
import torch
import transformers

from jaxkv.core.request import SamplingParams
from jaxkv.execution.sampling import sample
from tests.support.numpy_sampling import filtered_logits, softmax
from tests.support.sampling_rows import rows_of

jitted_sample = jax.jit(sample)


def transformers_logits(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    processors = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    return transformers.LogitsProcessorList(processors)(None, torch.from_numpy(logits.copy())[None])[0].numpy()


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.uniform(0.2, 2.5)),
        top_k=int(rng.choice([0, 1, 3, 20, 64, 100])),
        top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.05])),
        min_p=float(rng.choice([0.0, 0.01, 0.2, 0.9])),
    )


def test_the_numpy_rules_are_those_of_transformers():
    """So that the torch-free tests stand on the same ground."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        logits, params = (3 * rng.standard_normal(64)).astype(np.float32), random_params(rng)
        ours, theirs = (
            softmax(filtered_logits(logits, params)),
            softmax(transformers_logits(logits, params).astype(np.float64)),
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-6, err_msg=repr(params))


def test_drawn_tokens_are_exactly_those_that_transformers_keeps():
    """4,096 draws of flat-tailed logits find every kept token that is at all likely, and no other."""
    rng = np.random.default_rng(1)
    for _ in range(12):
        logits, params = rng.standard_normal(24).astype(np.float32), random_params(rng)
        kept = softmax(transformers_logits(logits, params).astype(np.float64))
        count = 4096

        rows = rows_of([dataclasses.replace(params, seed=9)] * count)
        drawn = np.bincount(
            jitted_sample(jnp.tile(logits, (count, 1)), rows, jnp.arange(count, dtype=jnp.int32)), minlength=24
        )
        assert not drawn[kept == 0].any(), params
        assert (drawn[kept > 0.01] > 0).all(), params
        np.testing.assert_allclose(drawn / count, kept, atol=0.05, err_msg=repr(params))
