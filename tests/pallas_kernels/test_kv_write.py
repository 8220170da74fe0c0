"""kv_write against a numpy loop."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import KV_WRITE_CASES, KVWriteCase, kv_write_inputs, store_token
from pallas_kernels.layer_kv import empty_layer_kv
from tests.support.cuda_lowering import lower_for_cuda

# More tokens than the GPU kernel takes one by one; padding in its last tile too.
LONG_CASES = (
    KVWriteCase(block_size=64, num_kv_heads=1, head_dim=80, dtype="bfloat16", kv_format="bfloat16", num_tokens=600),
    KVWriteCase(block_size=64, num_kv_heads=1, head_dim=80, dtype="bfloat16", kv_format="int8", num_tokens=600),
)
# What only XLA stores.
XLA_CASES = (
    KVWriteCase(kv_format="int4", dtype="bfloat16"),
    KVWriteCase(kv_format="int4", num_kv_heads=1, head_dim=80, block_size=8),
    KVWriteCase(kv_format="fp8_e4m3", num_kv_heads=3, block_size=32),
    KVWriteCase(kv_format="fp8_e5m2", dtype="float16"),
    KVWriteCase(kv_format="int8,int4", head_dim=128),
    KVWriteCase(kv_format="bfloat16,fp8_e4m3"),
)
IMPLEMENTATIONS = ("xla", "reference", "pallas_triton_interpreted")


class KVWriteTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*KV_WRITE_CASES, *XLA_CASES)
    def test_xla(self, case: KVWriteCase):
        self.check(self.variant(kv_write), case)

    @parameterized.product(case=KV_WRITE_CASES + LONG_CASES, implementation=IMPLEMENTATIONS[1:])
    def test_other_implementations(self, case: KVWriteCase, implementation: str):
        self.check(jax.jit(functools.partial(kv_write, implementation=implementation)), case)

    @parameterized.parameters(*XLA_CASES)
    def test_reference(self, case: KVWriteCase):
        self.check(jax.jit(functools.partial(kv_write, implementation="reference")), case)

    def check(self, write, case: KVWriteCase):
        """Writes named slots and nothing else."""
        inputs = kv_write_inputs(case)
        kv = jax.tree.map(np.asarray, write(inputs.kv, inputs.k, inputs.v, inputs.slots))
        before = jax.tree.map(np.asarray, inputs.kv)
        expected = jax.tree.map(np.copy, before)
        for slot, k, v in zip(inputs.slots, inputs.k, inputs.v, strict=True):
            store_token(expected, slot // case.block_size, slot % case.block_size, np.float32(k), np.float32(v))
        # Padding may overwrite the null block in any order; every other block is exact.
        own_blocks = lambda pool: jax.tree.map(lambda x: x[1:], pool)  # noqa: E731
        chex.assert_trees_all_equal(own_blocks(kv), own_blocks(expected))
        changed = (kv.k != before.k).any(axis=(1, 3)).reshape(-1)
        own = inputs.slots[~inputs.is_padding]
        assert set(np.flatnonzero(changed)) - set(range(case.block_size)) == set(own)

    def test_keys_and_values_are_not_swapped(self):
        inputs = kv_write_inputs(KVWriteCase(num_padding=0))
        kv = kv_write(inputs.kv, inputs.k, inputs.v, inputs.slots)
        slot = int(inputs.slots[0])
        assert np.array_equal(kv.k[slot // 16, :, slot % 16], inputs.k[0])
        assert np.array_equal(kv.v[slot // 16, :, slot % 16], inputs.v[0])
        assert not np.array_equal(inputs.k[0], inputs.v[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_that_are_no_numbers_stay_none(implementation):
    """And their neighbours are not touched by them."""
    inputs = kv_write_inputs(KVWriteCase(kv_format="int8", num_tokens=3, num_padding=0))
    k = np.array(inputs.k)
    k[1, 0, 5], k[1, 1, 7] = np.nan, np.inf
    kv = kv_write(inputs.kv, k, inputs.v, inputs.slots, implementation=implementation)
    block, offset = inputs.slots // 16, inputs.slots % 16
    scales = np.float32(kv.k_scale)[block, :, offset]  # [T, K]
    assert not np.isfinite(scales[1]).any() and np.isfinite(scales[[0, 2]]).all()
    assert np.isfinite(np.float32(kv.v_scale)[block, :, offset]).all()


@pytest.mark.parametrize("target", ["a100", "h200"])
@pytest.mark.parametrize("case", KV_WRITE_CASES + LONG_CASES, ids=str)
def test_lowers_for_gpus(case, target):
    inputs = kv_write_inputs(case)
    write = functools.partial(kv_write, implementation="pallas_triton")
    text = lower_for_cuda(write, inputs.kv, inputs.k, inputs.v, inputs.slots, target=target, donate_argnums=0)
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_pools_that_the_kernels_cannot_address_are_refused():
    kv = jax.eval_shape(functools.partial(empty_layer_kv, 2**15, 8, 64, 128, "int8"))
    tokens, slots = jax.ShapeDtypeStruct((4, 8, 128), "bfloat16"), jax.ShapeDtypeStruct((4,), "int32")
    write = functools.partial(kv_write, implementation="pallas_triton")
    with pytest.raises(ValueError, match="got 2,147,483,648: at most 32,767 blocks can be addressed"):
        jax.eval_shape(write, kv, tokens, tokens, slots)
    fits = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2**15 - 1, *x.shape[1:]), x.dtype), kv)
    assert jax.eval_shape(write, fits, tokens, tokens, slots) == fits
    twice_as_wide = dataclasses.replace(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), kv), k_scale=None, v_scale=None
    )
    assert jax.eval_shape(write, twice_as_wide, tokens, tokens, slots) == twice_as_wide  # offsets are 64-bit there


@pytest.mark.parametrize("kv_format", ["float32", "int8"])
def test_writes_in_place_when_donated(kv_format):
    inputs = kv_write_inputs(KVWriteCase())._replace(kv=empty_layer_kv(64, 2, 16, 64, kv_format))
    compiled = jax.jit(kv_write, donate_argnums=0).lower(inputs.kv, inputs.k, inputs.v, inputs.slots).compile()
    memory = compiled.memory_analysis()
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(inputs.kv))
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.parametrize("bad", ["tokens", "heads", "values"])
def test_shapes_that_do_not_fit_are_refused(bad):
    inputs = kv_write_inputs(KVWriteCase())
    k, v = inputs.k, inputs.v
    if bad == "tokens":
        k = k[:-1]
    elif bad == "heads":
        k = np.concatenate([k, k], axis=1)
    else:
        v = v[..., :32]
    with pytest.raises(ValueError, match=r"Expected k.shape=.* to equal expected=\(75, 2, 64\)"):
        kv_write(inputs.kv, k, v, inputs.slots)
