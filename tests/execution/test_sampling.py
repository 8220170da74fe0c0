"""Choosing tokens on the device, against float64 numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.request import SamplingParams
from jaxkv.execution.decode_state import NO_TOKEN
from jaxkv.execution.sampling import forbid, logprobs, sample
from tests.support.chi_square import chi_square_and_limit
from tests.support.numpy_sampling import filtered_logits, log_softmax, softmax
from tests.support.sampling_rows import rows_of

VOCAB = 50


jitted_sample = jax.jit(sample)
FILTERS = (
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=VOCAB + 7),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.5, top_p=0.3),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
)


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` tokens [count] of one row, each at a position of its own."""
    rows = rows_of([params] * count)
    return np.asarray(jitted_sample(jnp.tile(logits, (count, 1)), rows, jnp.arange(count, dtype=jnp.int32)))


@pytest.mark.parametrize("params", FILTERS, ids=repr)
def test_draws_follow_the_filtered_distribution(params):
    """Chi-square over 8,192 draws; the 1 - 1e-6 quantile, and nothing outside the filter."""
    logits = (2 * np.random.default_rng(4).standard_normal(VOCAB)).astype(np.float32)
    count = 8192
    counts = np.bincount(draws(logits, params, count), minlength=VOCAB)
    expected = softmax(filtered_logits(logits, params)) * count
    assert not counts[expected == 0].any(), "a token outside the filter was drawn"
    chi_square, limit = chi_square_and_limit(counts, expected)
    assert chi_square <= limit


def test_the_chi_square_test_can_fail():
    logits = (2 * np.random.default_rng(4).standard_normal(VOCAB)).astype(np.float32)
    with pytest.raises(AssertionError):
        counts = np.bincount(draws(logits, SamplingParams(temperature=0.9), 8192), minlength=VOCAB)
        expected = softmax(filtered_logits(logits, SamplingParams())) * 8192
        frequent = expected >= 5
        assert ((counts - expected)[frequent] ** 2 / expected[frequent]).sum() < 120


class SampleVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_a_row_chooses_the_same_in_any_company(self):
        """By its own seed, position and parameters only; greedy rows beside it stay greedy."""
        logits = (2 * np.random.default_rng(0).standard_normal((4, VOCAB))).astype(np.float32)
        params = [
            SamplingParams(temperature=0.0),
            SamplingParams(seed=5, top_p=0.9),
            SamplingParams(seed=6),
            SamplingParams(temperature=0.0, top_k=3),
        ]
        positions = np.array([9, 10, 11, 12], np.int32)
        together = self.variant(sample)(logits, rows_of(params), positions)
        assert together.tolist()[0] == logits[0].argmax() and together.tolist()[3] == logits[3].argmax()
        for row in (0, 1):
            alone = self.variant(sample)(logits[[row]], rows_of([params[row]]), positions[[row]])
            assert alone.tolist() == [together.tolist()[row]]


def test_position_and_seed_are_all_the_randomness():
    logits = np.zeros((1, 1000), np.float32)

    def token(seed: int, position: int) -> int:
        return int(jitted_sample(logits, rows_of([SamplingParams(seed=seed)]), np.array([position], np.int32))[0])

    assert token(3, 8) == token(3, 8)
    assert len({token(seed, 8) for seed in range(20)}) > 15 and len({token(3, position) for position in range(20)}) > 15
    assert token(2**32 - 1, 8) != token(0, 8)


def test_ties_with_the_kth_stay_and_equal_logits_are_drawn_evenly():
    logits = np.array([3.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    drawn = draws(logits, SamplingParams(top_k=2, temperature=10.0), 4000)
    counts = np.bincount(drawn, minlength=5)
    assert counts[4] == 0 and (counts[1:4] > 700).all()


def test_forbidden_ids_are_impossible_in_named_rows_only():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6)), jnp.float32)
    ids = np.array([[1, 4, NO_TOKEN], [2, NO_TOKEN, NO_TOKEN], [5, 0, 3]], np.int32)
    out = np.asarray(forbid(logits, ids, np.array([True, False, True])))
    expected = np.asarray(logits).copy()
    expected[0, [1, 4]] = expected[2, [5, 0, 3]] = -np.inf
    assert np.array_equal(out, expected)
    assert np.array_equal(forbid(logits, ids, np.zeros(3, bool)), logits)


def test_logprobs_are_of_the_raw_distribution():
    rng = np.random.default_rng(1)
    logits = (3 * rng.standard_normal((4, VOCAB))).astype(np.float32)
    tokens = np.array([logits[0].argmax(), 7, 8, logits[3].argmin()], np.int32)
    rows = rows_of([SamplingParams(logprobs=3, temperature=0.2, top_k=2)] + [SamplingParams()] * 3)
    report = jax.jit(logprobs, static_argnums=3)(logits, tokens, rows, 5)
    expected = log_softmax(logits)
    np.testing.assert_allclose(report.chosen, expected[np.arange(4), tokens], rtol=1e-5, atol=1e-5)
    ranks = [(expected[i] > expected[i, token]).sum() + 1 for i, token in enumerate(tokens)]
    assert report.rank.tolist() == ranks and ranks[0] == 1 and ranks[3] == VOCAB
    order = np.argsort(-expected, axis=1)[:, :5]
    assert report.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(report.top, np.take_along_axis(expected, order, 1), rtol=1e-5, atol=1e-5)


def test_nobody_asking_for_logprobs_gets_zeros():
    rows = rows_of([SamplingParams()] * 2)
    report = jax.jit(logprobs, static_argnums=3)(jnp.ones((2, VOCAB)), jnp.zeros((2,), jnp.int32), rows, 5)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(report)) and report.top.shape == (2, 5)
