"""Pools whose short floats are held as their bits give what others give."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy.cases import BlockCopyCase, block_copy_inputs
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.cases import DecodeCase, decode_inputs
from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import KVWriteCase, kv_write_inputs
from pallas_kernels.layer_kv import LayerKV, empty_layer_kv
from pallas_kernels.prefill_attention import prefill_attention
from pallas_kernels.prefill_attention.cases import PrefillCase, prefill_inputs

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8,int4", "bfloat16,fp8_e4m3")


def as_bits(kv: LayerKV) -> LayerKV:
    def held(x):
        is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 2
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") if is_short else x

    names = (kv.k_format.name, kv.v_format.name)
    kv = dataclasses.replace(jax.tree.map(held, kv), names=names)
    return dataclasses.replace(kv, names=None) if (kv.k.dtype.name, kv.v.dtype.name) == names else kv


def both(kv: LayerKV) -> tuple[LayerKV, LayerKV]:
    return as_bits(kv), kv


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
class TestBits:
    def test_writes(self, kv_format, implementation):
        inputs = kv_write_inputs(KVWriteCase(dtype="float32", kv_format=kv_format))
        write = jax.jit(functools.partial(kv_write, implementation=implementation))
        expected = as_bits(write(inputs.kv, inputs.k, inputs.v, inputs.slots))
        got = write(as_bits(inputs.kv), inputs.k, inputs.v, inputs.slots)
        assert {got.k_format.name, got.v_format.name} == set(kv_format.split(","))
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: np.asarray(x[1:]), kv) for kv in (got, expected)))

    def test_copies(self, kv_format, implementation):
        inputs = block_copy_inputs(BlockCopyCase(((1, 4, 5), (2, 5, 16), (0, 0, 0)), kv_format=kv_format))
        copy = jax.jit(functools.partial(block_copy, implementation=implementation))
        expected = as_bits(copy(inputs.kv, *inputs[1:4]))
        got = copy(as_bits(inputs.kv), *inputs[1:4])
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: np.asarray(x[1:]), kv) for kv in (got, expected)))

    def test_attention_in_decode(self, kv_format, implementation):
        case = DecodeCase(kv_format=kv_format)
        inputs = decode_inputs(case)
        attend = jax.jit(functools.partial(decode_attention, options=case.options, implementation=implementation))
        got, expected = (attend(inputs.q, kv, inputs.rows.block_table, inputs.seq_lens) for kv in both(inputs.rows.kv))
        chex.assert_trees_all_equal(got, expected)

    def test_attention_in_prefill(self, kv_format, implementation):
        case = PrefillCase(((0, 40), (133, 70), (129, 1)), kv_format=kv_format)
        inputs = prefill_inputs(case)
        attend = jax.jit(functools.partial(prefill_attention, options=case.options, implementation=implementation))
        args = (inputs.rows.block_table, inputs.cu_q_lens, inputs.context_lens)
        got, expected = (attend(inputs.q, kv, *args) for kv in both(inputs.rows.kv))
        chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_empty_pools_are_alike(kv_format):
    plain, bits = (empty_layer_kv(3, 2, 16, 8, kv_format, as_bits=held_as_bits) for held_as_bits in (False, True))
    assert (plain.k_format, plain.v_format) == (bits.k_format, bits.v_format)
    chex.assert_trees_all_equal(as_bits(plain), bits)
