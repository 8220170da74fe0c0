"""Every kernel against its reference with chex: native where JAX sees a GPU, in the interpreter elsewhere."""

import functools

import chex
import jax
import numpy as np
from absl.testing import parameterized

from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.cases import BlockCopyCase, block_copy_inputs
from pallas_kernels.cascade import cascade_attention
from pallas_kernels.cascade.cases import CascadeCase, cascade_inputs
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.cases import DecodeCase, decode_inputs
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import KVWriteCase, kv_write_inputs
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention.cases import PrefillCase, prefill_inputs
from tests.support.native import PALLAS, gpu, on_cpu

# On a GPU, 2^x and tanh are approximate and int8 is multiplied in float16.
OUT = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 8e-3}
LSE = 2e-3

LENGTHS = (0, 1, 17, 64, 70)
DECODE = (
    DecodeCase(seq_lens=LENGTHS, window=33, sinks=True),
    DecodeCase(32, 9, 3, 128, "bfloat16", seq_lens=LENGTHS, kv_format="int8", soft_cap=3.0),
    DecodeCase(64, 5, 1, 80, "float16", seq_lens=LENGTHS),
)
CHUNKS = ((0, 5), (0, 0), (17, 20), (64, 1))
PREFILL = (
    PrefillCase(CHUNKS, window=19, sinks=True),
    PrefillCase(CHUNKS, 32, 4, 4, 128, "bfloat16", kv_format="int8", soft_cap=3.0),
)
CASCADE = (
    CascadeCase(((32, (1, 17)), (0, (5,))), num_ungrouped=1),
    CascadeCase(((64, (3, 9)),), block_size=32, dtype="bfloat16", kv_format="int8", num_splits=2),
)
WRITE = (
    KVWriteCase(num_tokens=20, num_kv_heads=3, head_dim=80, dtype="bfloat16", kv_format="bfloat16"),
    KVWriteCase(block_size=64, num_tokens=20, head_dim=128, dtype="bfloat16", kv_format="int8"),
)
COPY = (
    BlockCopyCase(((1, 2, 9), (2, 3, 30), (3, 1, 16)), block_size=32, num_kv_heads=1, head_dim=80, kv_format="float16"),
    BlockCopyCase(((3, 5, 7), (0, 0, 0), (4, 2, 16), (2, 6, 1)), kv_format="int8"),
)


def cases(all_cases):
    return parameterized.parameters(*[(case,) for case in all_cases])


class KernelTest(chex.TestCase):
    def both(self, call, *arguments):
        """What the kernel and the reference make of the same arrays, as numpy."""
        arguments = jax.tree.map(np.asarray, arguments)
        actual = jax.jit(functools.partial(call, implementation=PALLAS))(*arguments)
        with on_cpu():
            expected = jax.jit(functools.partial(call, implementation="reference"))(*arguments)
        return jax.tree.map(np.asarray, (actual, expected))

    def assert_attention(self, case, actual, expected):
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        chex.assert_tree_all_finite(actual.out)  # every slot that no row owns is poison
        chex.assert_trees_all_close(actual.out, expected.out, rtol=0, atol=OUT[case.dtype])
        np.testing.assert_array_equal(np.isinf(actual.lse), np.isinf(expected.lse))
        seen = np.isfinite(expected.lse)
        self.assertTrue(seen.any())
        chex.assert_trees_all_close(actual.lse[seen], expected.lse[seen], rtol=0, atol=LSE)

    def assert_pools(self, actual, expected):
        """Every block but the null block; a stored int8 may lie beside the nearest where a quotient is approximate."""
        chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
        codes = actual.k.dtype == np.int8
        actual, expected = jax.tree.map(lambda x: x[1:].astype(np.float32), (actual, expected))
        if codes:
            chex.assert_trees_all_close((actual.k, actual.v), (expected.k, expected.v), rtol=0, atol=1)
            self.assertLess(np.mean(actual.k != expected.k) + np.mean(actual.v != expected.v), 1e-3)
            chex.assert_trees_all_equal((actual.k_scale, actual.v_scale), (expected.k_scale, expected.v_scale))
        else:
            chex.assert_trees_all_equal(actual, expected)


@gpu
class AttentionKernels(KernelTest):
    @cases(DECODE)
    def test_decode(self, case: DecodeCase):
        inputs = decode_inputs(case)

        def attend(q, kv, table, lens, sinks, implementation):
            return decode_attention(q, kv, table, lens, case.options, sinks=sinks, implementation=implementation)

        rows = inputs.rows
        actual, expected = self.both(attend, inputs.q, rows.kv, rows.block_table, inputs.seq_lens, inputs.sinks)
        self.assert_attention(case, actual, expected)

    @cases(PREFILL)
    def test_prefill(self, case: PrefillCase):
        inputs = prefill_inputs(case)

        def attend(q, kv, table, cu_q_lens, context_lens, sinks, implementation):
            options = {"sinks": sinks, "implementation": implementation}
            return prefill_attention(q, kv, table, cu_q_lens, context_lens, case.options, **options)

        rows, chunks = inputs.rows, (inputs.cu_q_lens, inputs.context_lens)
        actual, expected = self.both(attend, inputs.q, rows.kv, rows.block_table, *chunks, inputs.sinks)
        self.assert_attention(case, actual, expected)
        padding = inputs.cu_q_lens[-1]
        chex.assert_trees_all_equal(actual.out[padding:], np.zeros_like(actual.out[padding:]))

    @cases(CASCADE)
    def test_cascade(self, case: CascadeCase):
        inputs = cascade_inputs(case)

        def attend(q, kv, table, lens, groups, implementation):
            options = {"num_splits": case.num_splits, "implementation": implementation}
            return cascade_attention(q, kv, table, lens, groups, case.options, **options)

        rows = inputs.rows
        actual, expected = self.both(attend, inputs.q, rows.kv, rows.block_table, inputs.seq_lens, inputs.groups)
        self.assert_attention(case, actual, expected)


@gpu
class WritingKernels(KernelTest):
    @cases(WRITE)
    def test_kv_write(self, case: KVWriteCase):
        inputs = kv_write_inputs(case)
        self.assert_pools(*self.both(kv_write, inputs.kv, inputs.k, inputs.v, inputs.slots))

    @cases(COPY)
    def test_block_copy(self, case: BlockCopyCase):
        self.assert_pools(*self.both(block_copy, *block_copy_inputs(case)))
