"""A decode step splits its work once for all layers of a window."""

import jax.numpy as jnp
import numpy as np

from jaxkv.execution.batch import DecodeAttention
from pallas_kernels.decode_attention.cases import DecodeCase, decode_inputs


def attention(implementation: str) -> tuple[DecodeAttention, np.ndarray, object]:
    inputs = decode_inputs(DecodeCase(block_size=64, num_heads=4, num_kv_heads=1, seq_lens=(70, 0, 3, 130)))
    seq_lens, table = jnp.asarray(inputs.seq_lens), jnp.asarray(inputs.rows.block_table)
    return DecodeAttention(seq_lens, table, seq_lens, implementation), inputs.q, inputs.rows.kv


def test_one_plan_a_window():
    unplanned, _, kv = attention("pallas_triton_interpreted")
    plans = unplanned.planned(kv, (None, 64, None, 64, 64)).plans
    assert plans.keys() == {0, 64}
    assert (plans[0].start[0], plans[0].end[0]) == (0, 64) and (plans[64].start[0], plans[64].end[0]) == (6, 64)


def test_a_planned_step_attends_as_an_unplanned_one():
    unplanned, q, kv = attention("pallas_triton_interpreted")
    planned = unplanned.planned(kv, (None, 64))
    for window in (None, 64):
        expected = unplanned.attend(q, kv, scale=0.125, window=window)
        assert jnp.array_equal(planned.attend(q, kv, scale=0.125, window=window), expected)


def test_other_implementations_have_no_plans():
    unplanned, q, kv = attention("xla")
    planned = unplanned.planned(kv, (None, 64))
    assert planned.plans == {0: None, 64: None}
    assert planned.attend(q, kv, scale=0.125, window=64).shape == q.shape
