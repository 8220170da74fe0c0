"""block_copy's Mosaic GPU kernel in Pallas' interpreter, which looks for races, and lowered for GPUs.

Collected from JAX 0.11.2 on (tests/conftest.py); test_mosaic_support.py has what older ones do.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from pallas_kernels.block_copy import block_copy, pallas_mosaic_gpu
from pallas_kernels.block_copy.cases import BLOCK_COPY_CASES, BlockCopyCase, block_copy_inputs
from tests.support.cuda_lowering import lower_for_cuda
from tests.support.mosaic_interpreter import race_detectors

INTERPRETED = functools.partial(block_copy, implementation="pallas_mosaic_gpu_interpreted")
REFERENCE = functools.partial(block_copy, implementation="reference")
CHAIN = BLOCK_COPY_CASES[2]  # a destination is a source as well


@pytest.mark.parametrize("case", BLOCK_COPY_CASES, ids=str)
def test_equals_the_reference_to_the_bit_without_races(case):
    inputs = block_copy_inputs(case)
    with race_detectors() as detectors:
        copied = jax.jit(INTERPRETED)(*inputs)
    assert detectors and not any(detector.races_found for detector in detectors)
    chex.assert_trees_all_equal(_bits(copied), _bits(jax.jit(REFERENCE)(*inputs)))


def _bits(kv):
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), kv)


def test_a_word_that_ends_outside_the_head_must_be_mixed(monkeypatch):
    """Mutant: words of four tokens are taken whole."""
    case = BlockCopyCase(((3, 5, 7),), kv_format="int8")
    inputs = block_copy_inputs(case)
    of = pallas_mosaic_gpu._Words.of
    whole = lambda *pool: dataclasses.replace(of(*pool), token_bytes=4)  # noqa: E731
    monkeypatch.setattr(pallas_mosaic_gpu._Words, "of", whole)
    copied, expected = jax.jit(INTERPRETED)(*inputs), REFERENCE(*inputs)
    np.testing.assert_array_equal(copied.k, expected.k)
    assert (np.asarray(copied.v) != np.asarray(expected.v)).any()


@pytest.mark.parametrize("target", ["a100", "h200"])
@pytest.mark.parametrize("case", (BLOCK_COPY_CASES[1], CHAIN, BLOCK_COPY_CASES[-1]), ids=str)
def test_lowers_for_gpus(case, target):
    copy = functools.partial(block_copy, implementation="pallas_mosaic_gpu")
    text = lower_for_cuda(copy, *block_copy_inputs(case), target=target, donate_argnums=0)
    assert text.count("@mosaic_gpu") == 1 and "triton" not in text
