"""min_tokens, logit_bias and penalties on the device, against float64 numpy."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxkv.core.plan import Admission, TokenMask
from jaxkv.core.request import MAX_LOGIT_BIASES, SamplingParams
from jaxkv.core.token_constraint import mask_of
from jaxkv.execution import sampling
from jaxkv.execution.decode_state import DecodeState, empty_state
from jaxkv.execution.logit_adjustments import (
    COUNTS_A_CALL,
    MASKS_A_CALL,
    adjust,
    apply_adjustments,
    apply_masks,
    count_tokens,
    pack_adjustments,
    pack_masks,
)
from tests.support.chi_square import chi_square_and_limit
from tests.support.numpy_sampling import adjusted_logits, filtered_logits, softmax
from tests.support.sampling_rows import rows_of
from tests.support.tiny_models import parse, tiny_config
from tests.support.tiny_programs import make_programs

VOCAB = 40
apply_jitted = jax.jit(apply_adjustments)
adjust_jitted = jax.jit(adjust)
sample_jitted = jax.jit(sampling.sample)


@dataclasses.dataclass(frozen=True)
class Row:
    params: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()

    def admission(self) -> Admission:
        return Admission(self.params, 9, 0, self.forbidden, self.prompt, self.output)


def state_with(rows: list[Row], vocab_size: int = VOCAB) -> DecodeState:
    """A state whose rows 0, 1, ... belong to `rows`."""
    state = empty_state(len(rows), 1, 4, vocab_size)
    stop_ids = np.full((len(rows) + 1, 4), -1, np.int32)
    for i, row in enumerate(rows):
        for update in pack_adjustments(i, row.admission()):
            state = apply_jitted(state, update)
        stop_ids[i, : len(row.forbidden)] = row.forbidden
    of_rows = rows_of([row.params for row in rows] + [SamplingParams(temperature=0.0)])
    return dataclasses.replace(state, sampling=of_rows, stop_ids=jnp.asarray(stop_ids))


def adjusted(rows: list[Row], logits: np.ndarray) -> np.ndarray:
    state, ids = state_with(rows), jnp.arange(len(rows))
    forbids = np.array([bool(row.forbidden) for row in rows])
    return np.asarray(adjust_jitted(logits, state.take(ids), state.adjustments, ids, forbids))


PARAMS = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.9),
    SamplingParams(frequency_penalty=-2.0, presence_penalty=-0.5),
    SamplingParams(logit_bias={3: 5.0, 39: -100.0, 0: 0.25}),
    SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias=((2, -3.0), (7, 9.5))
    ),
)


def test_every_kind_of_row_side_by_side():
    rng = np.random.default_rng(0)
    rows = []
    for i, params in enumerate(PARAMS * 2):
        prompt, output = (tuple(rng.integers(0, VOCAB, count).tolist()) for count in (12, i))
        rows.append(Row(params, prompt, output, (3, 7) if i % 3 == 0 else ()))
    logits = (3 * rng.standard_normal((len(rows), VOCAB))).astype(np.float32)
    expected = [
        adjusted_logits(x, r.params, r.prompt, r.output, r.forbidden) for x, r in zip(logits, rows, strict=True)
    ]
    result = adjusted(rows, logits)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    changed = [not np.array_equal(*pair) for pair in zip(result, logits, strict=True)]
    assert changed == [r.params != SamplingParams() or bool(r.forbidden) for r in rows]
    assert np.array_equal(result[8], logits[8]), "a row that asks for nothing is untouched"


def test_the_order_is_min_tokens_then_bias_then_penalties():
    """Bias first: (1 + 3) / 2, and a logit that the bias makes negative is multiplied. What is forbidden stays so."""
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 3.0, 1: -3.0, 2: 100.0})
    row = Row(params, prompt=(0, 1, 2), forbidden=(2,))
    result = adjusted([row], np.ones((1, VOCAB), np.float32))[0]
    assert result[:4].tolist() == [2.0, -4.0, -np.inf, 1.0]


def test_presence_and_frequency_look_at_the_output_only():
    history = {"prompt": (4, 5), "output": (5, 6, 6)}
    rows = [Row(SamplingParams(presence_penalty=1.0), **history), Row(SamplingParams(frequency_penalty=1.0), **history)]
    result = adjusted(rows, np.zeros((2, VOCAB), np.float32))
    assert result[:, 3:7].tolist() == [[0, 0, -1, -1], [0, 0, -1, -2]]


def test_greedy_takes_the_best_of_the_adjusted_logits():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 9], logits[0, 11] = 4.0, 3.0
    row = Row(SamplingParams(temperature=0.0, repetition_penalty=1.5), prompt=(9,))
    assert adjusted([row], logits).argmax() == 11 and logits.argmax() == 9


@pytest.mark.parametrize("params", [p for p in PARAMS if p != SamplingParams()], ids=lambda p: str(PARAMS.index(p)))
def test_draws_follow_the_adjusted_and_filtered_distribution(params):
    """Chi-square over 8,192 draws, the 1 - 1e-6 quantile; the unadjusted distribution fails."""
    params = dataclasses.replace(params, temperature=0.9, top_p=0.95, seed=5)
    row = Row(params, prompt=(1, 2, 3, 4, 5, 6), output=(5, 6, 6, 7, 8, 8, 8))
    logits, count = (2 * np.random.default_rng(4).standard_normal(VOCAB)).astype(np.float32), 8192
    logits[5:9] = 2.5  # the output's tokens are likely, so that adjusting them matters
    scores = np.repeat(adjusted([row], logits[None]), count, axis=0)
    drawn = sample_jitted(scores, rows_of([params] * count), jnp.arange(count, dtype=jnp.int32))
    counts = np.bincount(drawn, minlength=VOCAB)
    expected, unadjusted = (
        softmax(filtered_logits(x, params)) * count
        for x in (adjusted_logits(logits, params, row.prompt, row.output), logits)
    )
    chi_square, limit = chi_square_and_limit(counts, expected)
    assert chi_square <= limit and not counts[expected == 0].any()
    assert chi_square_and_limit(counts, unadjusted)[0] > limit


# -- packing

BIG_VOCAB = 3 * COUNTS_A_CALL
tokens = st.lists(st.integers(0, BIG_VOCAB - 1), max_size=40)
biases = st.dictionaries(st.integers(0, BIG_VOCAB - 1), st.floats(-100, 100, width=32), max_size=MAX_LOGIT_BIASES)


@functools.lru_cache
def big_state() -> DecodeState:
    return empty_state(2, 1, 1, BIG_VOCAB)


def token_counts(prompt, output) -> np.ndarray:
    in_prompt = np.isin(np.arange(BIG_VOCAB), prompt)
    return 2 * np.bincount(np.asarray(output, np.int64), minlength=BIG_VOCAB) + in_prompt


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(prompt=tokens, output=tokens, bias=biases, old=tokens)
def test_a_row_holds_its_owners_history_and_biases_and_nothing_of_the_last(prompt, output, bias, old):
    state = big_state()
    owners = (
        SamplingParams(frequency_penalty=1.0, logit_bias={1: 1.0, 2: 2.0}),
        SamplingParams(repetition_penalty=1.1, logit_bias=bias),
    )
    for params, history in zip(owners, ((old, old), (prompt, output)), strict=True):
        for update in pack_adjustments(1, Admission(params, 1, 0, (), tuple(history[0]), tuple(history[1]))):
            state = apply_jitted(state, update)
    counts = np.asarray(state.adjustments.token_counts)
    assert np.array_equal(counts[1], token_counts(prompt, output))
    assert not counts[[0, 2]].any()
    ids, values = np.asarray(state.adjustments.bias_ids[1]), np.asarray(state.adjustments.bias[1])
    assert dict(zip(ids[ids >= 0].tolist(), values[ids >= 0].tolist(), strict=True)) == bias
    assert (np.asarray(state.adjustments.bias_ids)[[0, 2]] == -1).all()


def test_a_long_history_takes_several_calls_and_loses_nothing():
    rng = np.random.default_rng(0)
    prompt, output = (tuple(rng.integers(0, BIG_VOCAB, 6000).tolist()) for _ in range(2))
    params = SamplingParams(presence_penalty=0.5)
    updates = pack_adjustments(0, Admission(params, 1, 0, (), prompt, output))
    assert len(updates) == -(-len({*prompt, *output}) // COUNTS_A_CALL) == 3
    state = big_state()
    for update in updates:
        state = apply_jitted(state, update)
    assert np.array_equal(state.adjustments.token_counts[0], token_counts(prompt, output))


def test_requests_that_change_no_logits_cost_no_call():
    assert pack_adjustments(0, Admission(SamplingParams(top_p=0.5, min_tokens=3, seed=1), 1, 1, (2,))) == []
    assert len(pack_adjustments(0, Admission(SamplingParams(logit_bias={1: 2.0}), 1, 0, ()))) == 1


def test_counting_one_more_token():
    counts = jnp.zeros((4, 6), jnp.uint16).at[1, 5].set(1).at[0, 2].set(2)
    counts = count_tokens(counts, jnp.array([0, 1, 3, 3]), jnp.array([2, 5, 1, 1]))
    assert counts[:3].tolist() == [[0, 0, 4, 0, 0, 0], [0, 0, 0, 0, 0, 3], [0] * 6]


def test_full_counts_stay_full():
    full = jnp.array([[65534, 65535, 65532, 65533]], jnp.uint16)
    for token in range(4):
        for _ in range(2):
            full = count_tokens(full, jnp.array([0]), jnp.array([token]))
    assert full.tolist() == [[65534, 65535, 65534, 65535]]
    admission = Admission(SamplingParams(frequency_penalty=1.0), 1, 0, (), (7,), (7,) * 40_000)
    assert pack_adjustments(0, admission)[0].counts[0] == 65535


# -- what a batch without them pays


def shapes_outside_and_inside_conditionals(jaxpr) -> tuple[set, set]:
    """(dtype, shape) of all that is computed whatever the batch asks for, and of what is computed in branches."""
    outside, inside = set(), set()

    def walk(jaxpr, found: set) -> None:
        for equation in jaxpr.eqns:
            found |= {(str(var.aval.dtype), var.aval.shape) for var in equation.outvars}
            target = inside if equation.primitive.name == "cond" else found
            for value in equation.params.values():
                for item in value if isinstance(value, list | tuple) else (value,):
                    if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                        walk(getattr(item, "jaxpr", item), target)

    walk(jaxpr, outside)
    return outside, inside


@pytest.mark.parametrize("kind", ["decode", "prefill", "first"])
def test_a_batch_that_asks_for_nothing_computes_nothing_of_it(kind):
    """Rows' counts and biases, and logits of prompt tokens, are gathered and computed within conditionals only."""
    vocab = 101  # no other width of the model
    programs = make_programs(parse(tiny_config(vocab_size=vocab)))
    weights, cache, state = programs.abstract_weights, programs.abstract_cache, programs.abstract_state
    rows = np.zeros((4,), np.int32)
    if kind == "decode":
        jaxpr = jax.make_jaxpr(programs.decode[4])(weights, cache, state, rows, np.int32(8))
    elif kind == "first":
        hidden = jax.ShapeDtypeStruct((4, programs.shapes.model.hidden_size), np.float32)
        jaxpr = jax.make_jaxpr(programs.first_tokens)(weights, state, hidden, rows, rows, rows > 0)
    else:
        jaxpr = jax.make_jaxpr(programs.prefill[64])(weights, cache, state.block_table, programs.pack_prefill((), 64))
    outside, inside = shapes_outside_and_inside_conditionals(jaxpr.jaxpr)
    if kind == "prefill":
        assert ("float32", (64, vocab)) in inside and ("float32", (64, vocab)) not in outside
        return
    optional = {("uint16", (4, vocab)), ("float32", (4, MAX_LOGIT_BIASES))}
    assert optional <= inside and not optional & outside
    assert ("float32", (4, vocab)) in outside, "the logits themselves are there: shapes are seen"


@hypothesis.given(st.sampled_from([1, 31, 32, 33, 100]), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=30, deadline=None)
def test_masks_forbid_exactly_what_is_outside_them(vocab, seed):
    """In the rows that have one; after a bias, which they overrule."""
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(temperature=0.0, allowed_token_ids=(0,)),
        SamplingParams(temperature=0.0, allowed_token_ids=(0,), logit_bias={int(rng.integers(vocab)): 90.0}),
        SamplingParams(temperature=0.0),
    ]
    state = state_with([Row(p) for p in params], vocab)
    allowed = rng.random((3, vocab)) < rng.choice([0.05, 0.5, 1.0])
    masks = tuple(TokenMask(row, mask_of(np.flatnonzero(allowed[row]).tolist(), vocab)) for row in range(3))
    for update in pack_masks(masks, dead_row=3, num_words=-(-vocab // 32)):
        state = apply_masks(state, update)
    logits, ids = rng.normal(size=(3, vocab)).astype(np.float32), jnp.arange(3)
    none = np.zeros(3, bool)
    result = np.asarray(adjust_jitted(logits, state.take(ids), state.adjustments, ids, none))
    for row, p in enumerate(params):
        expected = adjusted_logits(logits[row], p, (), (), ())
        if p.has_constraint:
            expected = np.where(allowed[row], expected, -np.inf)
        np.testing.assert_allclose(result[row], expected, rtol=1e-6)


@pytest.mark.parametrize("num_rows", [2, 40])
def test_more_masks_than_a_call_takes(num_rows):
    masks = tuple(TokenMask(row, mask_of((row,), 64)) for row in range(num_rows))
    updates = pack_masks(masks, dead_row=num_rows, num_words=2)
    assert len(updates) == -(-num_rows // min(num_rows, MASKS_A_CALL))
    state = empty_state(num_rows, 1, 4, 64)
    for update in updates:
        state = apply_masks(state, update)
    words = np.asarray(state.adjustments.mask[:num_rows]).astype(np.uint64)
    assert (words[:, 0] | words[:, 1] << np.uint64(32)).tolist() == [1 << row for row in range(num_rows)]
