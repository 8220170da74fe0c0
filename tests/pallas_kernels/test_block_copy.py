"""block_copy against a numpy loop."""

import chex
import jax
import numpy as np
from absl.testing import parameterized

from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.cases import BLOCK_COPY_CASES, BlockCopyCase, block_copy_inputs


class BlockCopyTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*[(case,) for case in BLOCK_COPY_CASES])
    def test_copies_heads_of_blocks_and_nothing_else(self, case: BlockCopyCase):
        inputs = block_copy_inputs(case)
        kv = self.variant(block_copy)(inputs.kv, inputs.src, inputs.dst, inputs.num_tokens)
        for stored, pool in ((kv.k, inputs.kv.k), (kv.v, inputs.kv.v)):
            before = np.asarray(pool)
            expected = before.copy()
            for src, dst, count in case.copies:
                expected[dst, :, :count] = before[src, :, :count]
            chex.assert_trees_all_equal(np.asarray(stored), expected)


def test_copies_in_place_when_donated():
    case = BlockCopyCase(((1, 2, 3),), num_blocks=64)
    inputs = block_copy_inputs(case)
    compiled = jax.jit(block_copy, donate_argnums=0).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    pool_bytes = inputs.kv.k.nbytes + inputs.kv.v.nbytes
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
