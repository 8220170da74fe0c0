"""Calls of decode_attention, what they must equal, and calls that are wrong."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.cases import DecodeCase, DecodeInputs
from tests.support.kv_mutants import exchanged
from tests.support.tolerance import ATTENTION_LSE, ATTENTION_OUT, FLOAT16_MATH

jitted = jax.jit(decode_attention, static_argnames=("options", "implementation"))


def run(case: DecodeCase, inputs: DecodeInputs, implementation: str = "xla", **changed) -> AttentionOutput:
    """Output as float32 numpy arrays; `changed` replaces kv, block_table or seq_lens, or adds kv_starts or a plan."""
    arrays = {"kv": inputs.rows.kv, "block_table": inputs.rows.block_table, "seq_lens": inputs.seq_lens} | changed
    output = jitted(inputs.q, **arrays, options=case.options, sinks=inputs.sinks, implementation=implementation)
    assert output.out.dtype == case.dtype and output.lse.dtype == np.float32
    return AttentionOutput(np.asarray(output.out, np.float32), np.asarray(output.lse))


def assert_close(
    case: DecodeCase, actual: AttentionOutput, expected: AttentionOutput, implementation: str = "xla"
) -> None:
    out, lse = ATTENTION_OUT[case.dtype], ATTENTION_LSE[case.dtype]
    if implementation.startswith("pallas") and case.stored == "int8":
        out, lse = max(out, FLOAT16_MATH), FLOAT16_MATH if case.dtype == "float32" else 10 * lse
    chex.assert_trees_all_close(actual.out, expected.out, rtol=0, atol=out)
    assert np.array_equal(np.isinf(actual.lse), np.isinf(expected.lse)), "rows without keys differ"
    seen = np.isfinite(expected.lse)
    chex.assert_trees_all_close(actual.lse[seen], expected.lse[seen], rtol=1e-6, atol=lse)


MUTANTS = ("wrong block", "k for v", "v for k", "one too short", "one too long", "window off by one")


def mutant_of(mutant: str, case: DecodeCase, inputs: DecodeInputs) -> tuple[DecodeCase, dict]:
    """The case and the arrays of a call that should not equal that of `case`."""
    table, seq_lens = inputs.rows.block_table.copy(), inputs.seq_lens
    if mutant == "wrong block":
        row = int(np.argmax(seq_lens))
        column = (seq_lens[row] - 1) // case.block_size  # the newest block: every window sees it
        table[row, column] = table[row, column - 1]
        return case, {"block_table": table}
    if mutant in ("k for v", "v for k"):
        return case, {"kv": exchanged(inputs.rows.kv, mutant[0])}
    if mutant == "one too short":
        return case, {"seq_lens": np.maximum(seq_lens - 1, 0)}
    if mutant == "one too long":
        return case, {"seq_lens": np.where(seq_lens > 0, seq_lens + 1, 0).astype(np.int32)}
    assert mutant == "window off by one", mutant
    return dataclasses.replace(case, window=case.window - 1 if case.window else 299), {}


def naive(case: DecodeCase, inputs: DecodeInputs) -> np.ndarray:
    """float32 outputs of the plainest computation that rounds where a tensor-core kernel has to: queries and
    probabilities to the dtype of the products, which is that of the stored numbers, or float16 for int8."""
    products = jnp.dtype("float16" if case.stored == "int8" else case.stored)
    group, kv = case.num_heads // case.num_kv_heads, jax.tree.map(np.asarray, inputs.rows.kv)
    stored_v = kv.v.swapaxes(-1, -2) if case.stored == "int8" else kv.v
    out = np.zeros(inputs.q.shape, np.float32)
    for row, length in enumerate(inputs.seq_lens):
        position = np.arange(max(0, length - (case.window or length)), length)
        block, offset = inputs.rows.block_table[row, position // case.block_size], position % case.block_size
        for head in range(case.num_heads if length else 0):
            q = inputs.q[row, head].astype(products).astype(np.float32)
            place = (block, head // group, offset)
            k, v = kv.k[place].astype(np.float32), stored_v[place].astype(np.float32)
            logits = (k @ q) * np.float32(case.options.scale)
            if kv.k_scale is not None:
                logits *= kv.k_scale[place].astype(np.float32)
            if case.soft_cap:
                logits = np.float32(case.soft_cap) * np.tanh(logits / np.float32(case.soft_cap))
            p = np.exp(logits - logits.max())
            total = p.sum() + (0 if inputs.sinks is None else np.exp(inputs.sinks[head] - logits.max()))
            if kv.v_scale is not None:
                p *= kv.v_scale[place].astype(np.float32)
            out[row, head] = (p.astype(products).astype(np.float32) @ v / total).astype(jnp.dtype(case.dtype))
    return out
