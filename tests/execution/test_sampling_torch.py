"""Which tokens may be drawn, and how likely, against transformers' logits processors."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch", reason="the oracle is transformers' logits processors")

import jax
import jax.numpy as jnp
import torch
import transformers

from jaxkv.core.plan import Admission
from jaxkv.core.request import SamplingParams
from jaxkv.execution.decode_state import empty_state
from jaxkv.execution.logit_adjustments import adjust, apply_adjustments, pack_adjustments
from jaxkv.execution.sampling import filter_logits, sample
from tests.support.numpy_sampling import adjusted_logits, filtered_logits, softmax
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


FILTERS = {
    "temperature": [SamplingParams(temperature=t) for t in (0.1, 0.7, 1.0, 3.0)],
    "top_k": [SamplingParams(top_k=k) for k in (1, 2, 7, 63, 64, 100)],
    "top_p": [SamplingParams(top_p=p) for p in (1e-3, 0.2, 0.5, 0.9, 0.999)],
    "min_p": [SamplingParams(min_p=p) for p in (1e-3, 0.05, 0.3, 1.0)],
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone_gives_transformers_distribution(name):
    """On the device, to float32: 40 rows of random logits for each value, all values in one batch."""
    rng = np.random.default_rng(2)
    params = FILTERS[name] * 40
    logits = (3 * rng.standard_normal((len(params), 64))).astype(np.float32)
    scaled = logits / np.array([[p.temperature] for p in params], np.float32)
    ours = np.asarray(filter_logits(jnp.asarray(scaled), rows_of(params)))
    theirs = np.stack([transformers_logits(row, p) for row, p in zip(logits, params, strict=True)])
    assert ((ours == -np.inf) == (theirs == -np.inf)).all(), "another set of tokens is kept"
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    dropped = (ours == -np.inf).any(axis=1).mean()
    assert dropped == 0 if name == "temperature" else dropped > 0.5, "the filter had nothing to do"


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 2.0])
def test_the_repetition_penalty_is_transformers(penalty):
    """Over prompt and output together, a token counted once however often it occurs."""
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((8, 64))).astype(np.float32)
    params = SamplingParams(repetition_penalty=penalty)
    state = empty_state(8, 1, 1, 64)
    theirs = []
    for row in range(8):
        prompt, output = (tuple(rng.integers(0, 64, count).tolist()) for count in (20, row))
        for update in pack_adjustments(row, Admission(params, 1, 0, (), prompt, output)):
            state = apply_adjustments(state, update)
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        ids = torch.tensor([[*prompt, *output]])
        theirs.append(processor(ids, torch.from_numpy(logits[row].copy())[None])[0].numpy())
        numpy_rules = adjusted_logits(logits[row], params, prompt, output)
        np.testing.assert_allclose(numpy_rules, theirs[-1], rtol=1e-6)
    state = dataclasses.replace(state, sampling=rows_of([params] * 9))
    ids = jnp.arange(8)
    ours = adjust(logits, state.take(ids), state.adjustments, ids, np.zeros((8,), np.bool_))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert np.array_equal(ours, logits) == (penalty == 1)


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
