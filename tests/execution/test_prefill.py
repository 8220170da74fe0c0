"""The two ways out of a prefill: the last layer for all tokens, or for the chunks' last ones only."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.core.plan import PrefillChunk
from jaxkv.execution.prefill import _logits
from jaxkv.models.llama import Llama
from tests.support.tiny_models import model_of, parse, random_tensors, random_tokens, tiny_config
from tests.support.tiny_programs import make_programs, weights

CHUNKS = (
    PrefillChunk("a", 2, 0, random_tokens(30, seed=1), True),
    PrefillChunk("b", 0, 0, random_tokens(17, seed=2), False),
    PrefillChunk("c", 1, 0, random_tokens(1, seed=3), True),
)


@pytest.mark.parametrize("window", [None, 7])
def test_both_ways_give_the_same_hidden_states_and_the_same_cache(window):
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    fields = {} if window is None else mistral
    programs = make_programs(parse(tiny_config(**fields)))
    limits = programs.shapes.limits
    table = np.zeros((limits.max_num_seqs + 1, limits.max_model_len // limits.block_size), np.int32)
    table[:3, :2] = [[1, 2], [3, 4], [5, 6]]
    outcomes = []
    for chunks in (CHUNKS, (*CHUNKS[:2], dataclasses.replace(CHUNKS[2], targets=(5,)))):
        batch = programs.pack_prefill(chunks, 64)
        cache = programs.shapes.empty_cache()
        step = jax.jit(programs.prefill[64])
        outcomes.append(step(weights(programs.shapes.model), cache, jnp.asarray(table), batch))
    (short_cache, short, no_report), (full_cache, full, report) = outcomes
    np.testing.assert_allclose(short[:3], full[:3], atol=2e-5, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(short_cache), jax.tree.leaves(full_cache), strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])  # but for the null block
    assert not np.any(no_report.chosen) and report.chosen[47] < 0  # the one token of "c"


@pytest.mark.parametrize("is_last", [[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_logits_are_right_wherever_a_prompt_ends(is_last):
    config = parse(tiny_config())
    model: Llama = model_of(config, random_tensors(config))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((4, config.hidden_size)), jnp.float32)
    got = _logits(model, hidden, jnp.asarray(is_last, bool))
    expected = model.logits(hidden)
    assert got.shape == expected.shape
    for row in np.flatnonzero(is_last):
        np.testing.assert_allclose(got[row], expected[row], atol=1e-5, rtol=1e-5)
