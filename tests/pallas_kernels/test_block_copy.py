"""block_copy against a numpy loop."""

import functools

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.cases import BLOCK_COPY_CASES, BlockCopyCase, block_copy_inputs
from tests.support.cuda_lowering import lower_for_cuda


class BlockCopyTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*BLOCK_COPY_CASES)
    def test_xla(self, case: BlockCopyCase):
        self.check(self.variant(block_copy), case)

    @parameterized.product(case=BLOCK_COPY_CASES, implementation=("reference", "pallas_triton_interpreted"))
    def test_other_implementations(self, case: BlockCopyCase, implementation: str):
        self.check(jax.jit(functools.partial(block_copy, implementation=implementation)), case)

    def check(self, copy, case: BlockCopyCase):
        """Copies heads of blocks and nothing else."""
        inputs = block_copy_inputs(case)
        kv = copy(inputs.kv, inputs.src, inputs.dst, inputs.num_tokens)
        before = jax.tree.map(np.asarray, inputs.kv)
        expected = jax.tree.map(np.copy, before)
        for src, dst, count in case.copies:
            for name in ("k", "k_scale", "v_scale") + (() if before.v_format.is_scaled else ("v",)):
                if (pool := getattr(before, name)) is not None:
                    getattr(expected, name)[dst, :, :count] = pool[src, :, :count]
            if before.v_format.is_scaled:
                expected.v[dst, ..., :count] = before.v[src, ..., :count]
        chex.assert_trees_all_equal(jax.tree.map(np.asarray, kv), expected)


@pytest.mark.parametrize("target", ["a100", "h200"])
@pytest.mark.parametrize("case", BLOCK_COPY_CASES, ids=str)
def test_lowers_for_gpus(case, target):
    copy = functools.partial(block_copy, implementation="pallas_triton")
    text = lower_for_cuda(copy, *block_copy_inputs(case), target=target, donate_argnums=0)
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_copies_in_place_when_donated():
    case = BlockCopyCase(((1, 2, 3),), num_blocks=64)
    inputs = block_copy_inputs(case)
    compiled = jax.jit(block_copy, donate_argnums=0).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    pool_bytes = inputs.kv.k.nbytes + inputs.kv.v.nbytes
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
