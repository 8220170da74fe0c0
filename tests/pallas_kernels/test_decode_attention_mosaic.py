"""decode_attention's Mosaic GPU kernel in Pallas' interpreter: against the reference and float64, without races; and wrong
rings, which the race detector or the numbers must betray.

Collected from JAX 0.11.2 on (tests/conftest.py); test_mosaic_support.py has what older ones do.
"""

import functools
import re

import jax
import numpy as np
import pytest

from pallas_kernels import mosaic_ring
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.decode_attention import SplitPlan, decode_attention, plan_decode
from pallas_kernels.decode_attention.cases import DECODE_CASES, DecodeCase, DecodeInputs, decode_inputs
from pallas_kernels.dispatch import MOSAIC_OPERATIONS
from tests.support import attention_oracle
from tests.support.cuda_lowering import lower_for_cuda
from tests.support.decode_calls import MUTANTS, assert_close, mutant_of, naive, run
from tests.support.mosaic_interpreter import race_detectors
from tests.support.tolerance import ATTENTION_OUT

INTERPRETED = "pallas_mosaic_gpu_interpreted"
# (block_size, H, K, D, dtype, window), and more by name: few rows, since a call takes some seconds, most of them compiling.
CASES = (
    DecodeCase(64, 8, 2, 128, "bfloat16", seq_lens=(0, 65, 1, 0, 200)),
    DecodeCase(16, 9, 3, 64, "float16", window=70, seq_lens=(17, 0, 130), soft_cap=3.0),
    DecodeCase(128, 16, 1, 64, "bfloat16", seq_lens=(129, 0, 64), sinks=True),
    DecodeCase(64, 9, 3, 128, "bfloat16", kv_format="int8", window=100, seq_lens=(0, 65, 200)),
    DecodeCase(128, 16, 1, 64, "float32", kv_format="int8", soft_cap=3.0, seq_lens=(129, 0, 64)),
    DecodeCase(32, 5, 1, 256, "float16", window=1, seq_lens=(0, 65, 33), scale=0.2),
)


def run_without_races(case: DecodeCase, inputs: DecodeInputs, **changed):
    with race_detectors() as detectors:
        output = run(case, inputs, INTERPRETED, **changed)
    assert detectors and not any(detector.races_found for detector in detectors)
    return output


# Five seconds each on an idle core and more, most of them compiling what the interpreter makes of a kernel.
FAST = (CASES[0], CASES[3])


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_equals_reference_and_sees_no_poison(case):
    """And is at most twice as far from float64 as a naive computation, the rule FlashAttention is tested by."""
    inputs = decode_inputs(case)
    actual = run_without_races(case, inputs)
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, run(case, inputs, "reference"), INTERPRETED)
    idle = inputs.seq_lens == 0
    assert idle.any() and (actual.out[idle] == 0).all() and (actual.lse[idle] == -np.inf).all()
    truth, _ = attention_oracle.decode(inputs.q, inputs.rows.k, inputs.rows.v, case.options, inputs.sinks)
    assert np.abs(actual.out - truth).max() <= 2 * np.abs(naive(case, inputs) - truth).max() + 1e-5


def test_cases_hold_what_the_kernel_distinguishes():
    assert {case.head_dim for case in CASES} == {64, 128, 256}
    assert {case.stored for case in CASES} == {*MOSAIC_OPERATIONS["decode_attention"]}
    assert {case.block_size for case in CASES} == {16, 32, 64, 128}
    assert {bool(case.soft_cap) for case in CASES} == {bool(case.window) for case in CASES} == {False, True}
    assert {case.num_heads // case.num_kv_heads > 8 for case in CASES} == {False, True}


ROWS = DecodeCase(64, 4, 1, 64, "bfloat16", seq_lens=(321, 64, 0, 300, 200))
KV_STARTS = np.array([5, 0, 0, 64, 199], np.int32)


@pytest.mark.slow
def test_split_every_way():
    """Items of 1, 3 and all tiles, a first tile that is not seen whole, more tiles than the ring holds."""
    inputs = decode_inputs(ROWS)
    arrays = (inputs.rows.kv, inputs.rows.block_table, inputs.seq_lens)
    expected = run(ROWS, inputs, "reference", kv_starts=KV_STARTS)
    planned = jax.jit(plan_decode, static_argnames=("chunk", "implementation"))
    plans = [planned(*arrays, kv_starts=KV_STARTS, chunk=chunk, implementation=INTERPRETED) for chunk in (64, 192, 512)]
    assert [plan.first_item[1] for plan in plans] == [6, 2, 1]
    for plan in plans:
        # As many items as the finest plan has, so that one executable does for all.
        padding = (0, plans[0].row.shape[0] - plan.row.shape[0])
        row = np.pad(plan.row, padding, constant_values=-1)
        plan = SplitPlan(row, np.pad(plan.start, padding), np.pad(plan.end, padding), plan.first_item, is_split=True)
        actual = run_without_races(ROWS, inputs, plan=plan, kv_starts=KV_STARTS)
        assert_close(ROWS, actual, expected, INTERPRETED)


def test_mutants_fail():
    case = DecodeCase(64, 2, 1, 64, "bfloat16", window=70, seq_lens=(0, 65, 200))
    inputs = decode_inputs(case)
    expected = run(case, inputs, "reference")
    assert_close(case, run(case, inputs, INTERPRETED), expected)
    for mutant in MUTANTS:
        changed_case, changed = mutant_of(mutant, case, inputs)
        actual = run(changed_case, inputs, INTERPRETED, **changed)
        with pytest.raises(AssertionError):
            assert_close(case, actual, expected)


# What is wrong -> method of Ring, what takes its place, tokens of a row (2 tiles or 7, and the ring holds 4), and what the
# interpreter may say of it: JAX 0.12 raises at a race, 0.11.2 goes on and says so afterwards.
RACE = "RACE DETECTED"
WRONG_RINGS = {
    "no wait for keys": ("wait_keys", lambda ring, index: None, 128, RACE),
    "no wait for values": ("wait_values", lambda ring, index: None, 128, RACE),
    "keys of the next slot": ("keys", lambda ring, index: ring.refs[0].at[ring.slot(index + 1)], 420, RACE),
    "values of the next slot": ("values", lambda ring, index: ring.refs[1].at[ring.slot(index + 1)], 420, RACE),
    "a slot fetched into too early": (
        "advance",
        lambda ring, index: ring._fetch_if_there(index + ring.shape.stages),
        420,
        f"no threads observed phase 0|{RACE}",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_RINGS)
def test_wrong_rings_are_betrayed(wrong, monkeypatch):
    """By the race detector, by an error of the interpreter, or where a wait is not what is missing by wrong numbers."""
    method, replacement, length, error = WRONG_RINGS[wrong]
    case = DecodeCase(64, 2, 1, 64, "bfloat16", seq_lens=(0, length))
    inputs = decode_inputs(case)
    arrays = (inputs.q, inputs.rows.kv, inputs.rows.block_table, inputs.seq_lens)
    plan = plan_decode(*arrays[1:], chunk=1024, implementation=INTERPRETED)  # one item: nothing to merge
    monkeypatch.setattr(mosaic_ring.Ring, method, replacement)
    attend = functools.partial(decode_attention, options=case.options, plan=plan, implementation=INTERPRETED)
    with race_detectors() as detectors:
        try:
            out = np.asarray(jax.jit(attend)(*arrays).out, np.float32)
        except jax.errors.JaxRuntimeError as refusal:
            assert re.search(error, str(refusal))
            return
    is_race = any(detector.races_found for detector in detectors)
    is_wrong = not np.allclose(out, run(case, inputs, "reference").out, rtol=0, atol=ATTENTION_OUT[case.dtype])
    assert is_race if "wait" in wrong else is_wrong


def test_wrong_rings_name_methods_of_the_ring():
    assert all(hasattr(mosaic_ring.Ring, method) for method, *_ in WRONG_RINGS.values())


LOWERED = [
    case
    for case in DECODE_CASES
    if case.block_size >= (64 if case.stored == "int8" else 16)
    and case.head_dim % 64 == 0
    and case.stored in MOSAIC_OPERATIONS["decode_attention"]
]


@pytest.mark.parametrize("case", LOWERED, ids=str)
def test_lowers_for_hopper(case):
    inputs = decode_inputs(case)

    def attend(q, kv, table, lens):
        return decode_attention(q, kv, table, lens, case.options, implementation="pallas_mosaic_gpu")

    text = lower_for_cuda(attend, inputs.q, *inputs.rows[:2], inputs.seq_lens)
    assert "decode_attention" in text and text.count("mosaic_gpu") >= 1 + (case.window != 1)


def test_what_the_kernel_does_not_do_is_refused():
    inputs = decode_inputs(DecodeCase(dtype="bfloat16"))
    arrays = (inputs.q, *inputs.rows[:2], inputs.seq_lens)
    with pytest.raises(ValueError, match="positive scale"):
        decode_attention(*arrays, AttentionOptions(-1.0), implementation=INTERPRETED)
    for case in (DecodeCase(head_dim=80, dtype="bfloat16"), DecodeCase(block_size=32, kv_format="int8")):
        inputs = decode_inputs(case)
        with pytest.raises(ValueError, match="multiple of 64 and int8 blocks of at least 64"):
            decode_attention(
                inputs.q, *inputs.rows[:2], inputs.seq_lens, AttentionOptions(1.0), implementation=INTERPRETED
            )
