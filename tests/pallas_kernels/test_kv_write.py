"""kv_write against a numpy loop."""

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import KV_WRITE_CASES, KVWriteCase, kv_write_inputs, store_token
from pallas_kernels.layer_kv import empty_layer_kv


class KVWriteTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*[(case,) for case in KV_WRITE_CASES])
    def test_writes_named_slots_and_nothing_else(self, case: KVWriteCase):
        inputs = kv_write_inputs(case)
        kv = jax.tree.map(np.asarray, self.variant(kv_write)(inputs.kv, inputs.k, inputs.v, inputs.slots))
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
