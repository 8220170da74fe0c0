"""Calls of prefill_attention on a case's inputs, and what counts as equal."""

import chex
import jax
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention.cases import PrefillCase, PrefillInputs
from tests.support.tolerance import ATTENTION_LSE, ATTENTION_OUT

PALLAS = "pallas_triton" if jax.default_backend() == "gpu" else "pallas_triton_interpreted"

_jitted = jax.jit(prefill_attention, static_argnames=("options", "implementation"))


def run(case: PrefillCase, inputs: PrefillInputs, implementation: str = "xla", **changed) -> AttentionOutput:
    """Output as float32 numpy arrays; `changed` replaces kv, block_table, cu_q_lens or context_lens, or adds kv_lens."""
    arrays = {
        "kv": inputs.rows.kv,
        "block_table": inputs.rows.block_table,
        "cu_q_lens": inputs.cu_q_lens,
        "context_lens": inputs.context_lens,
    } | changed
    output = _jitted(inputs.q, **arrays, options=case.options, sinks=inputs.sinks, implementation=implementation)
    assert output.out.dtype == case.dtype and output.lse.dtype == np.float32
    return AttentionOutput(np.asarray(output.out, np.float32), np.asarray(output.lse))


def assert_close(case: PrefillCase, actual: AttentionOutput, expected: AttentionOutput) -> None:
    chex.assert_trees_all_close(actual.out, expected.out, rtol=0, atol=ATTENTION_OUT[case.dtype])
    assert np.array_equal(np.isinf(actual.lse), np.isinf(expected.lse)), "tokens without keys differ"
    seen = np.isfinite(expected.lse)
    chex.assert_trees_all_close(actual.lse[seen], expected.lse[seen], rtol=1e-6, atol=ATTENTION_LSE[case.dtype])


def cut(inputs: PrefillInputs, piece: slice) -> tuple[PrefillInputs, np.ndarray]:
    """Of two chunks only a piece each, in the other order and padded to as many tokens; and which tokens these are."""
    ranges = [range(*inputs.cu_q_lens[i : i + 2])[piece] for i in (1, 0)]
    tokens = np.concatenate([np.asarray(r, np.int64) for r in ranges])
    padding = np.zeros((len(inputs.q) - len(tokens),), np.int64)
    part = PrefillInputs(
        inputs.q[np.concatenate([tokens, padding])],
        inputs.rows._replace(block_table=inputs.rows.block_table[[1, 0]]),
        np.cumsum([0, *map(len, ranges)]).astype(np.int32),
        inputs.context_lens[[1, 0]] + (piece.start or 0),
        inputs.sinks,
    )
    return part, tokens
