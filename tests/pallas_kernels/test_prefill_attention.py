"""prefill_attention: XLA against the reference, the reference against float64, and mutants that fail."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import prefill_attention, xla
from pallas_kernels.prefill_attention.cases import (
    PREFILL_CASES,
    PrefillCase,
    edge_chunks,
    prefill_inputs,
)
from tests.support import attention_oracle
from tests.support.kv_mutants import exchanged
from tests.support.prefill_calls import assert_close, cut, run

# Formats that only XLA reads.
XLA_CASES = tuple(PrefillCase(edge_chunks(16), kv_format=name) for name in ("int4", "fp8_e4m3", "int8,int4"))


@pytest.mark.parametrize("case", PREFILL_CASES + XLA_CASES, ids=str)
def test_xla_equals_reference_and_sees_no_poison(case):
    inputs = prefill_inputs(case)
    actual, expected = run(case, inputs), run(case, inputs, "reference")
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, expected)
    end = inputs.cu_q_lens[-1]
    assert len(actual.out) == end + case.num_padding > end
    assert (actual.out[end:] == 0).all() and (actual.lse[end:] == -np.inf).all()
    assert np.isfinite(actual.lse[:end]).all() and (np.abs(actual.out[:end]).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("num_kv_heads", [2, 8])
@pytest.mark.parametrize("chunks", [((100, 256),), ((0, 130), (77, 125)), ((40, 25),) * 8], ids=["one", "two", "eight"])
def test_long_and_short_chunks_in_tiles_of_their_own_size(chunks, num_kv_heads):
    """One or two long chunks take the large query tiles, eight short ones the small."""
    case = PrefillCase(chunks, num_kv_heads=num_kv_heads, window=90)
    inputs = prefill_inputs(case)
    assert len(inputs.q) >= xla.LARGE_Q_TILE
    actual = run(case, inputs)
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, run(case, inputs, "reference"))


@pytest.mark.parametrize("case", PREFILL_CASES[::4] + XLA_CASES, ids=str)
def test_reference_equals_float64(case):
    inputs = prefill_inputs(case)
    out, lse = attention_oracle.prefill(
        inputs.q,
        inputs.rows.k,
        inputs.rows.v,
        inputs.cu_q_lens,
        inputs.context_lens,
        case.options,
        inputs.sinks,
    )
    assert_close(case, run(case, inputs, "reference"), AttentionOutput(out.astype(np.float32), lse.astype(np.float32)))


MUTANT_CASES = (
    PrefillCase(edge_chunks(16)),
    PrefillCase(edge_chunks(32), 32, dtype="bfloat16", window=17),
    PrefillCase(edge_chunks(16), kv_format="int8"),
)


@pytest.mark.parametrize("case", MUTANT_CASES, ids=str)
@pytest.mark.parametrize("mutant", ["wrong block", "k for v", "v for k", "context off by one", "window off by one"])
def test_mutants_fail(case, mutant):
    """The tolerance can fail: each wrong computation is far outside of it."""
    inputs = prefill_inputs(case)
    kv, table, context_lens = inputs.rows.kv, inputs.rows.block_table.copy(), inputs.context_lens
    changed_case = case
    if mutant == "wrong block":
        table[8, 160 // case.block_size] = table[8, 0]
    elif mutant == "k for v":
        kv = exchanged(kv, "k")
    elif mutant == "v for k":
        kv = exchanged(kv, "v")
    elif mutant == "context off by one":
        context_lens = np.maximum(context_lens - 1, 0)
    else:
        changed_case = dataclasses.replace(case, window=16 if case.window else 168)
    expected = run(case, inputs, "reference")
    with pytest.raises(AssertionError):
        assert_close(case, run(changed_case, inputs, kv=kv, block_table=table, context_lens=context_lens), expected)


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase(((0, 200), (40, 150)), dtype="float32"),
        PrefillCase(((0, 200), (40, 150)), 8, 9, 3, 80, "bfloat16", 64),
        PrefillCase(((0, 200), (40, 150)), kv_format="int8"),
    ],
    ids=str,
)
def test_chunks_do_not_change_a_bit(case):
    """One call with whole chunks, and calls with pieces of them in any company, give each token the same bits."""
    inputs = prefill_inputs(case)
    whole = run(case, inputs)
    for first in (1, 63, 64, 65, 149):
        for piece in (slice(0, first), slice(first, None)):
            part, tokens = cut(inputs, piece)
            actual = run(case, part)
            chex.assert_trees_all_equal(
                jax.tree.map(lambda x: x[: len(tokens)], actual), jax.tree.map(lambda x: x[tokens], whole)
            )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_with_the_context_as_the_keys_nothing_of_the_chunk_is_seen(implementation):
    """Every query of a chunk then sees the same keys as a decode row of the context's length, with its own window."""
    case = PrefillCase(((37, 3), (0, 4), (200, 40)))
    inputs = prefill_inputs(case)
    actual = run(case, inputs, implementation, kv_lens=inputs.context_lens)
    row = np.repeat([0, 1, 2], [3, 4, 40])
    decoded = decode_attention(
        inputs.q[:47], inputs.rows.kv, inputs.rows.block_table[row], inputs.context_lens[row], case.options
    )
    assert_close(case, jax.tree.map(lambda x: x[:47], actual), AttentionOutput(*map(np.asarray, decoded)))
    assert (actual.out[3:7] == 0).all() and (actual.lse[3:7] == -np.inf).all()


class PrefillVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_jit_changes_nothing(self):
        case = PrefillCase(((0, 40), (30, 70)), window=64)
        inputs = prefill_inputs(case)

        def attend(q, kv, block_table, cu_q_lens, context_lens):
            return prefill_attention(q, kv, block_table, cu_q_lens, context_lens, case.options)

        rows = inputs.rows
        output = self.variant(attend)(inputs.q, rows.kv, rows.block_table, inputs.cu_q_lens, inputs.context_lens)
        actual = AttentionOutput(np.asarray(output.out), np.asarray(output.lse))
        assert_close(case, actual, run(case, inputs, "reference"))


def test_no_sequence_at_all_gives_zeros():
    case = PrefillCase(((0, 0), (0, 0)), num_padding=7)
    output = run(case, prefill_inputs(case))
    assert output.out.shape == (7, 8, 64) and (output.out == 0).all() and (output.lse == -np.inf).all()


def test_shapes_that_do_not_fit_are_refused():
    case = PrefillCase(((0, 5),))
    q, rows, cu_q_lens, context_lens, _ = prefill_inputs(case)
    with pytest.raises(ValueError, match="H a multiple of K"):
        prefill_attention(q[:, :7], rows.kv, rows.block_table, cu_q_lens, context_lens, case.options)
    with pytest.raises(ValueError, match="to fit context_lens.shape="):
        prefill_attention(q, rows.kv, rows.block_table, cu_q_lens[1:], context_lens, case.options)
