"""cascade_attention: equal to flat attention over the same rows, and wrong groups that fail."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.cascade import RowGroups, cascade_attention
from pallas_kernels.cascade.cases import CASCADE_CASES, LARGE_CASES, CascadeCase, CascadeInputs, cascade_inputs
from pallas_kernels.decode_attention import decode_attention
from tests.support import attention_oracle
from tests.support.tolerance import ATTENTION_LSE, ATTENTION_OUT

jitted = jax.jit(cascade_attention, static_argnames=("options", "num_splits", "implementation"))


def run(case: CascadeCase, inputs: CascadeInputs, implementation: str = "xla", **changed) -> AttentionOutput:
    """Output as float32 numpy arrays; `changed` replaces block_table, seq_lens or groups."""
    arrays = {"block_table": inputs.rows.block_table, "seq_lens": inputs.seq_lens, "groups": inputs.groups} | changed
    output = jitted(
        inputs.q,
        inputs.rows.kv,
        **arrays,
        options=case.options,
        sinks=inputs.sinks,
        num_splits=None if implementation == "reference" else case.num_splits,
        implementation=implementation,
    )
    assert output.out.dtype == case.dtype and output.lse.dtype == np.float32
    return AttentionOutput(np.asarray(output.out, np.float32), np.asarray(output.lse))


def assert_close(case: CascadeCase, actual: AttentionOutput, expected: AttentionOutput) -> None:
    chex.assert_trees_all_close(actual.out, expected.out, rtol=0, atol=ATTENTION_OUT[case.dtype])
    assert np.array_equal(np.isinf(actual.lse), np.isinf(expected.lse)), "rows without keys differ"
    seen = np.isfinite(expected.lse)
    chex.assert_trees_all_close(actual.lse[seen], expected.lse[seen], rtol=1e-6, atol=ATTENTION_LSE[case.dtype])


def check(case: CascadeCase) -> None:
    inputs = cascade_inputs(case)
    actual = run(case, inputs)
    assert np.isfinite(actual.out).all(), "a poisoned slot was read"
    assert_close(case, actual, run(case, inputs, "reference"))
    idle = inputs.seq_lens == 0
    assert (actual.out[idle] == 0).all() and (actual.lse[idle] == -np.inf).all()


@pytest.mark.parametrize("case", CASCADE_CASES, ids=str)
def test_cascade_equals_flat_and_sees_no_poison(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_cascade_equals_flat_on_long_prefixes(case):
    check(case)


def test_the_cases_hold_what_they_are_for():
    groups = [group for case in CASCADE_CASES for group in case.groups]
    assert {len(own) for _, own in groups} >= {1, 2, 12, 17} and {0, 16, 128} <= {shared for shared, _ in groups}
    assert sum((cascade_inputs(case).seq_lens == 0).sum() for case in CASCADE_CASES) == 3
    assert len(LARGE_CASES) == 4 * 4 * 4


@pytest.mark.parametrize("case", CASCADE_CASES[1:2] + CASCADE_CASES[5:6], ids=str)
def test_reference_equals_float64(case):
    inputs = cascade_inputs(case)
    out, lse = attention_oracle.decode(inputs.q, inputs.rows.k, inputs.rows.v, case.options, inputs.sinks)
    expected = AttentionOutput(out.astype(np.float32), lse.astype(np.float32))
    assert_close(case, run(case, inputs, "reference"), expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Parts(RowGroups):
    """Shared parts as the groups say, the rows' own as `starts` does: so one can be wrong and the other right."""

    starts: jax.Array  # i32[S]

    def kv_starts(self, num_rows: int) -> jax.Array:
        return self.starts


SHARED, OWN = (64, 112), (64, 64, 64, 112, 112)
WRONG = {  # rows of the groups, their prefixes, where the rows' own parts begin
    "prefix a block too short": ((3, 5), (48, 112), OWN),
    "prefix a block too long": ((3, 5), (64, 128), OWN),
    "prefix a token too short": ((3, 5), (63, 112), OWN),
    "a member too many": ((4, 5), SHARED, OWN),
    "a member too few": ((2, 5), SHARED, OWN),
    "prefixes exchanged": ((3, 5), (112, 64), OWN),
    "own part a block early": ((3, 5), SHARED, (64, 64, 64, 96, 112)),
    "own part a token late": ((3, 5), SHARED, (64, 65, 64, 112, 112)),
}


@pytest.mark.parametrize("num_splits", [1, 3])
def test_wrong_groups_fail(num_splits):
    """The tolerance can fail: each of them is far outside of it."""
    case = CascadeCase(((64, (37, 1, 20)), (112, (3, 18))), num_empty=0, num_splits=num_splits)
    inputs = cascade_inputs(case)
    expected = run(case, inputs, "reference")

    def check(ends, prefix_lens, starts):
        as_arrays = (np.asarray(x, np.int32) for x in ((0, *ends), prefix_lens, starts))
        assert_close(case, run(case, inputs, groups=_Parts(*as_arrays)), expected)

    check((3, 5), SHARED, OWN)
    for name, wrong in WRONG.items():
        with pytest.raises(AssertionError):
            check(*wrong)
            pytest.fail(f"{name} is not found", pytrace=False)


def test_a_shorter_prefix_than_is_shared_changes_nothing():
    """What is shared but not told is each row's own."""
    case = CASCADE_CASES[0]
    inputs = cascade_inputs(case)
    groups = dataclasses.replace(inputs.groups, prefix_lens=inputs.groups.prefix_lens // 32 * 16)
    assert 0 < groups.prefix_lens.sum() < inputs.groups.prefix_lens.sum()
    assert_close(case, run(case, inputs, groups=groups), run(case, inputs, "reference"))


def test_shared_blocks_are_read_once():
    """With XLA a row's own part never visits what all rows share: poison there shows nothing."""
    case = CascadeCase(((128, (17, 40)),), num_empty=0)
    inputs = cascade_inputs(case)
    output = decode_attention(
        inputs.q,
        jax.tree.map(lambda x: x.at[inputs.rows.block_table[0, :8]].set(np.nan), inputs.rows.kv),
        inputs.rows.block_table,
        inputs.seq_lens,
        case.options,
        kv_starts=inputs.groups.kv_starts(2),
    )
    assert np.isfinite(output.out).all()


def test_what_does_not_fit_is_refused():
    case = CASCADE_CASES[0]
    q, rows, seq_lens, groups, _ = cascade_inputs(case)
    with pytest.raises(ValueError, match="no window"):
        options = dataclasses.replace(case.options, window=64)
        cascade_attention(q, rows.kv, rows.block_table, seq_lens, groups, options)
    with pytest.raises(ValueError, match="one entry more"):
        wrong = dataclasses.replace(groups, cu_rows=groups.cu_rows[:-1])
        cascade_attention(q, rows.kv, rows.block_table, seq_lens, wrong, case.options)
    with pytest.raises(ValueError, match="rows of q.shape="):
        cascade_attention(q[1:], rows.kv, rows.block_table, seq_lens, groups, case.options)
