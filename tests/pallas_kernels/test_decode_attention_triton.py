"""decode_attention's GPU kernel in Pallas' interpreter: against the reference and float64, split every way; and lowered."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import SplitPlan, decode_attention, plan_decode
from pallas_kernels.decode_attention.cases import DECODE_CASES, DecodeCase, DecodeInputs, decode_inputs
from tests.support import attention_oracle
from tests.support.cuda_lowering import DEVICES, lower_for_cuda
from tests.support.decode_calls import MUTANTS, assert_close, mutant_of, naive, run

INTERPRETED = "pallas_triton_interpreted"
# (block_size, H, K, D, dtype, window), and more by name: each kind of loop, and options in turn.
CASES = (
    DecodeCase(64, 8, 2, 128, "bfloat16"),
    DecodeCase(64, 9, 3, 128, "bfloat16", kv_format="int8", window=100),
    DecodeCase(16, 16, 1, 64, "float16", sinks=True),
    DecodeCase(32, 5, 1, 256, "float32", kv_format="int8", soft_cap=3.0),
    DecodeCase(128, 4, 4, 80, "float32", window=17, scale=0.2),
    DecodeCase(16, 5, 1, 96, "bfloat16", kv_format="int8", sinks=True),
    DecodeCase(32, 8, 2, 256, "bfloat16", window=1),
    DecodeCase(128, 16, 1, 128, "float16", kv_format="int8"),
)
LOWERED = tuple(case for case in DECODE_CASES if case.block_size >= 16)
_planned = jax.jit(plan_decode, static_argnames=("window", "chunk", "implementation"))


def split(inputs: DecodeInputs, chunk: int, kv_starts: np.ndarray | None = None) -> SplitPlan:
    """Plan of chunks of a fixed length."""
    arrays = (inputs.rows.kv, inputs.rows.block_table, inputs.seq_lens)
    return _planned(*arrays, kv_starts=kv_starts, chunk=chunk, implementation=INTERPRETED)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference_and_sees_no_poison(case):
    """And is at most twice as far from float64 as a naive computation, the rule FlashAttention is tested by."""
    inputs = decode_inputs(case)
    actual = run(case, inputs, INTERPRETED)
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, run(case, inputs, "reference"), INTERPRETED)
    idle = inputs.seq_lens == 0
    assert idle.sum() == 2 and (actual.out[idle] == 0).all() and (actual.lse[idle] == -np.inf).all()
    truth, _ = attention_oracle.decode(inputs.q, inputs.rows.k, inputs.rows.v, case.options, inputs.sinks)
    assert np.abs(actual.out - truth).max() <= 2 * np.abs(naive(case, inputs) - truth).max() + 1e-5


def test_cases_hold_what_the_kernel_distinguishes():
    assert {case.head_dim for case in CASES} == {64, 80, 96, 128, 256}
    assert {case.stored for case in CASES} == {"float32", "bfloat16", "float16", "int8"}
    assert {case.block_size for case in CASES} == {16, 32, 64, 128}
    assert {(case.num_heads, case.num_kv_heads) for case in CASES} >= {(9, 3), (5, 1), (16, 1), (8, 2)}
    assert {bool(case.soft_cap) for case in CASES} == {bool(case.window) for case in CASES} == {False, True}


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(window=17),
        DecodeCase(block_size=64, dtype="bfloat16"),
        DecodeCase(block_size=32, kv_format="int8"),
    ],
    ids=str,
)
def test_mutants_fail(case):
    inputs = decode_inputs(case)
    expected = run(case, inputs, "reference")
    assert_close(case, run(case, inputs, INTERPRETED), expected, INTERPRETED)
    for mutant in MUTANTS:
        changed_case, changed = mutant_of(mutant, case, inputs)
        actual = run(changed_case, inputs, INTERPRETED, **changed)
        with pytest.raises(AssertionError):
            assert_close(case, actual, expected, INTERPRETED)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_a_row_split_any_number_of_times_is_the_same(stored):
    """Rows of up to 17 tiles in 1, 2, 3, 5 and 17 items, with and without a first tile that is not seen whole."""
    lengths = (17 * 64, 17 * 64 - 63, 0, 1, 64, 65, 1000, 5 * 64)
    case = DecodeCase(block_size=64, num_heads=4, num_kv_heads=1, dtype="bfloat16", kv_format=stored, seq_lens=lengths)
    inputs = decode_inputs(case)
    rows = inputs.rows._replace(block_table=inputs.rows.block_table[:, :17])  # no surplus: 17 tiles are all
    inputs = inputs._replace(rows=rows)
    kv_starts = np.array([0, 5, 0, 0, 0, 64, 999, 130], np.int32)
    expected = run(case, inputs, "reference", kv_starts=kv_starts)
    for num_splits, tiles in ((1, 17), (2, 9), (3, 6), (5, 4), (17, 1)):
        plan = split(inputs, 64 * tiles, kv_starts)
        assert plan.first_item[1] == num_splits and plan.is_split == (num_splits > 1)
        # As many items as the finest plan has, so that one executable does for all.
        padding = (0, 17 * len(lengths) - plan.row.shape[0])
        row = np.pad(plan.row, padding, constant_values=-1)
        start, end = np.pad(plan.start, padding), np.pad(plan.end, padding)
        plan = SplitPlan(row, start, end, plan.first_item, is_split=True)
        actual = run(case, inputs, INTERPRETED, plan=plan, kv_starts=kv_starts)
        assert_close(case, actual, expected, INTERPRETED)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8"])
def test_a_row_of_fixed_chunks_does_not_depend_on_its_company(stored):
    """Bitwise: alone among idle rows, in the batch, and with the batch permuted."""
    case = DecodeCase(
        block_size=32, head_dim=128, dtype="float32" if stored == "float32" else "bfloat16", kv_format=stored
    )
    inputs = decode_inputs(case)
    together = run(case, inputs, INTERPRETED, plan=split(inputs, 128))
    order = np.random.default_rng(1).permutation(len(case.seq_lens))
    rows = inputs.rows._replace(block_table=inputs.rows.block_table[order])
    permuted = DecodeInputs(inputs.q[order], rows, inputs.seq_lens[order], None)
    output = run(case, permuted, INTERPRETED, plan=split(permuted, 128))
    chex.assert_trees_all_equal(output, jax.tree.map(lambda x: x[order], together))
    for row in (1, 4, 9):
        alone = inputs._replace(seq_lens=np.where(np.arange(len(order)) == row, inputs.seq_lens, 0))
        output = run(case, alone, INTERPRETED, plan=split(alone, 128))
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[row], output), jax.tree.map(lambda x: x[row], together))
        assert (np.delete(output.out, row, axis=0) == 0).all()


def test_tiny_and_large_values_survive_float16():
    """int8 with values of 1e-3 and of 1e4, under 300 keys of like weight."""
    case = DecodeCase(dtype="float32", kv_format="int8", block_size=64, seq_lens=(300, 0, 290))
    inputs = decode_inputs(case)
    ordinary = run(case, inputs, INTERPRETED).out
    for factor in (2.0**-10, 2.0**13):
        kv = inputs.rows.kv
        scaled = jax.tree.map(jnp.asarray, kv)
        scaled = type(kv)(scaled.k, scaled.v, scaled.k_scale, scaled.v_scale * jnp.bfloat16(factor))
        actual = run(case, inputs, INTERPRETED, kv=scaled).out / factor
        chex.assert_trees_all_close(actual, ordinary, rtol=0, atol=1e-3)


@pytest.mark.parametrize("case, target", list(zip(LOWERED, itertools.cycle(DEVICES))), ids=str)
def test_lowers_for_gpus(case, target):
    """What the interpreter hides: operations and shapes that the GPU backend does not take."""
    inputs = decode_inputs(case)
    attend = functools.partial(decode_attention, options=case.options, implementation="pallas_triton")
    text = lower_for_cuda(attend, inputs.q, *inputs.rows[:2], inputs.seq_lens, target=target)
    merged = case.window != 1  # a window of 1 is one item
    assert text.count("__gpu$xla.gpu.triton") == 1 + merged


def test_rows_of_one_item_are_not_merged():
    inputs = decode_inputs(DecodeCase(block_size=64, seq_lens=(64, 0, 3)))
    attend = functools.partial(decode_attention, options=AttentionOptions(1.0), implementation="pallas_triton")
    text = lower_for_cuda(attend, inputs.q, inputs.rows.kv, inputs.rows.block_table[:, :1], inputs.seq_lens)
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_what_the_kernel_does_not_do_is_refused():
    inputs = decode_inputs(DecodeCase())
    arrays = (inputs.q, *inputs.rows[:2], inputs.seq_lens)
    with pytest.raises(ValueError, match="positive scale"):
        decode_attention(*arrays, AttentionOptions(-1.0), implementation=INTERPRETED)
    with pytest.raises(TypeError, match="plan"):
        decode_attention(*arrays, AttentionOptions(1.0), plan=split(inputs, 64), implementation="xla")


class DecodeOnAnyDevice(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_jit_changes_nothing(self):
        """Natively where there is a GPU."""
        implementation = "pallas_triton" if jax.default_backend() == "gpu" else INTERPRETED
        case = DecodeCase(block_size=64, num_heads=4, num_kv_heads=1, seq_lens=(70, 0, 3, 130))
        inputs = decode_inputs(case)

        def attend(q, kv, block_table, seq_lens):
            return decode_attention(q, kv, block_table, seq_lens, case.options, implementation=implementation)

        output = self.variant(attend)(inputs.q, *inputs.rows[:2], inputs.seq_lens)
        actual = AttentionOutput(np.asarray(output.out), np.asarray(output.lse))
        assert_close(case, actual, run(case, inputs, "reference"))
