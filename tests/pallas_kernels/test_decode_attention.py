"""decode_attention: XLA against the reference, the reference against float64, and mutants that fail."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pallas_kernels.attention_output import AttentionOutput, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.cases import DECODE_CASES, DecodeCase, DecodeInputs, decode_inputs
from tests.support import attention_oracle
from tests.support.decode_calls import MUTANTS, assert_close, jitted, mutant_of, run

# Formats that only XLA reads.
XLA_CASES = (
    DecodeCase(kv_format="int4"),
    DecodeCase(block_size=8, num_heads=9, num_kv_heads=3, head_dim=80, kv_format="int4", window=17),
    DecodeCase(block_size=64, head_dim=128, dtype="bfloat16", kv_format="fp8_e4m3", sinks=True),
    DecodeCase(kv_format="fp8_e5m2", soft_cap=3.0),
    DecodeCase(block_size=32, kv_format="int8,int4"),
    DecodeCase(kv_format="float32,int8"),
)


@pytest.mark.parametrize("case", DECODE_CASES + XLA_CASES, ids=str)
def test_xla_equals_reference_and_sees_no_poison(case):
    inputs = decode_inputs(case)
    actual, expected = run(case, inputs), run(case, inputs, "reference")
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, expected)
    idle = inputs.seq_lens == 0
    assert idle.sum() == 2 + (case.block_size == 0) and (actual.out[idle] == 0).all()
    assert (actual.lse[idle] == -np.inf).all() and np.isfinite(actual.lse[~idle]).all()


@pytest.mark.parametrize("case", DECODE_CASES[::5] + XLA_CASES, ids=str)
def test_reference_equals_float64(case):
    inputs = decode_inputs(case)
    out, lse = attention_oracle.decode(inputs.q, inputs.rows.k, inputs.rows.v, case.options, inputs.sinks)
    assert_close(case, run(case, inputs, "reference"), AttentionOutput(out.astype(np.float32), lse.astype(np.float32)))


MUTANT_CASES = (
    DecodeCase(),
    DecodeCase(window=17),
    DecodeCase(block_size=64, dtype="bfloat16"),
    DecodeCase(block_size=32, kv_format="int8"),
)


@pytest.mark.parametrize("case", MUTANT_CASES, ids=str)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(case, mutant):
    """The tolerance can fail: each wrong computation is far outside of it."""
    inputs = decode_inputs(case)
    changed_case, changed = mutant_of(mutant, case, inputs)
    actual = run(changed_case, inputs, **changed)
    with pytest.raises(AssertionError):
        assert_close(case, actual, run(case, inputs, "reference"))


@pytest.mark.parametrize(
    "case", [DecodeCase(), DecodeCase(8, 9, 3, 80, "bfloat16", 17), DecodeCase(kv_format="int8")], ids=str
)
def test_a_row_does_not_depend_on_its_company(case):
    """Bitwise within a compiled shape: among idle rows, in the batch, and with the batch permuted.

    Another number of rows is another executable, which XLA may round differently (1 ulp of lse at S = 1 on CPU).
    """
    inputs = decode_inputs(case)
    together = run(case, inputs)
    order = np.random.default_rng(1).permutation(len(case.seq_lens))
    rows = inputs.rows._replace(block_table=inputs.rows.block_table[order])
    permuted = run(case, DecodeInputs(inputs.q[order], rows, inputs.seq_lens[order], inputs.sinks))
    chex.assert_trees_all_equal(permuted, jax.tree.map(lambda x: x[order], together))
    for row in (1, 4, 9):
        alone = np.zeros_like(inputs.seq_lens)
        alone[row] = inputs.seq_lens[row]
        output = run(case, inputs, seq_lens=alone)
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[row], output), jax.tree.map(lambda x: x[row], together))
        assert (np.delete(output.out, row, axis=0) == 0).all()


@pytest.mark.parametrize("implementation", ["xla", "reference", "pallas_triton_interpreted"])
@pytest.mark.parametrize("case", [DecodeCase(), DecodeCase(window=64, kv_format="int8")], ids=str)
def test_two_parts_of_the_keys_merge_into_the_whole(case, implementation):
    """What `kv_starts` leaves out is what a call with shorter rows sees: together they are the whole."""
    inputs = decode_inputs(case)
    cuts = np.array([0, 1, 0, 5, 17, 64, 100, 128, 0, 299, 256], np.int32)
    whole = run(case, inputs, implementation)
    after = run(case, inputs, implementation, kv_starts=cuts)
    options = dataclasses.replace(case.options, window=None)
    first = np.zeros_like(cuts) if case.window is None else np.maximum(inputs.seq_lens - case.window, 0)
    before = jitted(
        inputs.q,
        inputs.rows.kv,
        inputs.rows.block_table,
        np.minimum(cuts, inputs.seq_lens),
        options=options,
        kv_starts=first.astype(np.int32),
        implementation=implementation,
    )
    merged = jax.tree.map(np.asarray, merge(AttentionOutput(*before), AttentionOutput(*after)))
    assert_close(case, merged, whole, implementation)


def test_the_number_of_rows_changes_rounding_only():
    case = DecodeCase()
    inputs = decode_inputs(case)
    together = run(case, inputs)
    for row in (1, 9):
        rows = inputs.rows._replace(block_table=inputs.rows.block_table[[row]])
        alone = run(case, DecodeInputs(inputs.q[[row]], rows, inputs.seq_lens[[row]], inputs.sinks))
        chex.assert_trees_all_close(alone, jax.tree.map(lambda x: x[[row]], together), rtol=0, atol=1e-6)


class DecodeVariants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_jit_changes_nothing(self):
        case = DecodeCase(window=64)
        inputs = decode_inputs(case)

        def attend(q, kv, block_table, seq_lens):
            return decode_attention(q, kv, block_table, seq_lens, case.options)

        output = self.variant(attend)(inputs.q, inputs.rows.kv, inputs.rows.block_table, inputs.seq_lens)
        actual = AttentionOutput(np.asarray(output.out), np.asarray(output.lse))
        assert_close(case, actual, run(case, inputs, "reference"))


def test_a_longer_table_costs_no_work_and_changes_nothing():
    """Columns beyond the longest row are never visited: same bits, and the temporaries hold no KV of theirs."""
    case = DecodeCase()
    inputs = decode_inputs(case)
    wide = np.pad(inputs.rows.block_table, ((0, 0), (0, 512 - inputs.rows.block_table.shape[1])))
    chex.assert_trees_all_equal(run(case, inputs, block_table=wide), run(case, inputs))

    def temporaries(table: np.ndarray) -> int:
        def attend(q, kv, block_table, seq_lens):
            return decode_attention(q, kv, block_table, seq_lens, case.options)

        lowered = jax.jit(attend).lower(inputs.q, inputs.rows.kv, table, inputs.seq_lens)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # The only thing that may grow is the padded copy of the table itself.
    assert temporaries(wide) - temporaries(inputs.rows.block_table) <= 2 * wide.nbytes


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_shapes_that_do_not_fit_are_refused(implementation):
    case = DecodeCase()
    q, rows, seq_lens, _ = decode_inputs(case)
    options = {"options": case.options, "implementation": implementation}
    with pytest.raises(ValueError, match="H a multiple of K"):
        decode_attention(q[:, :7], rows.kv, rows.block_table, seq_lens, **options)
    with pytest.raises(ValueError, match="equal D"):
        decode_attention(q[..., :32], rows.kv, rows.block_table, seq_lens, **options)
    with pytest.raises(ValueError, match="to have the rows of q.shape="):
        decode_attention(q, rows.kv, rows.block_table[1:], seq_lens, **options)
