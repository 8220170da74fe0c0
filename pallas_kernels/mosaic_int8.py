"""Tensor-core products with int8 numbers in Mosaic GPU: to float16 in registers, four at a time, without byte-wide loads.

A warp's 16-row operand of float16 wants 2 neighbouring columns of each half of 16 in a thread; one of bytes comes from
shared memory (ldmatrix) as 4 neighbouring columns. Since it does not matter in which order a product is summed, these 4
are taken for the 2 and 2, in both factors: nothing is exchanged between threads. The conversion is that of int8_dequant.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.int8_dequant import INT8_BIAS
from pallas_kernels.mosaic_compat import mgpu, plgpu

_HALVES = (slice(0, 2), slice(2, 4))
# Selectors of PRMT: two bytes, each under a byte 0x64, the exponent of 1024 in float16.
EXPONENTS, SELECTORS, SIGNS = 0x64646464, (0x4140, 0x4342), 0x80808080


def stored_layout():
    """Of int8 [M, K], M a multiple of 64 and K of 16: 4 neighbouring columns a thread."""
    return plgpu.Layout.WGMMA_8BIT


def factor_layout():
    """Of float16 [K, N], N a multiple of 8: 4 neighbouring rows a thread, the same in every warp."""
    tiling = plgpu.Tiling(((16, 8), (4, 1)))
    return plgpu.Layout.TILED(tiling, warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -4), vector_dim=-2)


def mma(acc: jax.Array, stored: jax.Array, factor: jax.Array, *, is_biased: bool, interpret: bool) -> jax.Array:
    """acc + stored @ factor, or (stored + INT8_BIAS) @ factor, which is 2 of 5 instructions cheaper.

    Args:
      acc: f32[M, N] in the layout MMA_ACC(float16).
      stored: int8[M, K] in stored_layout. factor: f16[K, N] in factor_layout.
      interpret: the interpreter knows no instructions of a GPU; the plain conversion gives the same numbers.
    """
    if interpret:
        numbers = stored.astype(jnp.float16) + jnp.float16(INT8_BIAS if is_biased else 0)
        return plgpu.mma(acc, numbers, factor)
    layout = plgpu.Layout.MMA_ACC(jnp.float16)

    @plgpu.inline_mgpu(
        arg_types=(layout, stored_layout(), factor_layout()),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=layout),
    )
    def multiply(_, acc, stored, factor):
        layouts = mgpu.MMALayouts(jnp.float16)
        left = left_operand(stored.registers, lambda four: _to_float16(four, is_biased))
        right = right_operand(factor.registers, lambda four: [mgpu.utils.vector_slice(four, h) for h in _HALVES])
        return mgpu.mma(acc, _fragments(left, layouts.lhs), _fragments(right, layouts.rhs))

    return multiply(acc, stored, factor)


def left_operand(stored: np.ndarray, halves_of) -> np.ndarray:
    """Registers of stored_layout as those of MMA_LHS: the lower and the upper two of each four columns where that has the
    lower and the upper half of 16."""
    rows, columns, _, _, eights, *rest = stored.shape
    operand = np.empty((rows, columns, 1, 2, eights, *rest), object)
    for (row, column, _, _, eight, *place), four in np.ndenumerate(stored):
        operand[row, column, 0, 0, eight, *place], operand[row, column, 0, 1, eight, *place] = halves_of(four)
    return operand


def right_operand(factor: np.ndarray, halves_of) -> np.ndarray:
    """Registers of factor_layout as those of MMA_RHS, likewise by rows."""
    rows, columns, *rest = factor.shape
    operand = np.empty((rows, columns, 2, 1, *rest), object)
    for (row, column, *place), four in np.ndenumerate(factor):
        operand[row, column, 0, 0, *place], operand[row, column, 1, 0, *place] = halves_of(four)
    return operand


def _fragments(registers: np.ndarray, layout):
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _to_float16(register, is_biased: bool) -> list:
    """The lower and the upper two of vector<4xi8>, each vector<2xf16>: bytes x + 128 under the exponent of 1024."""
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.F16Type.get())

    def constant(bits: int):
        return arith.constant(i32, ir.IntegerAttr.get(i32, bits - (bits >> 31 << 32)))

    unsigned = arith.xori(mgpu.utils.bitcast(register, i32), constant(SIGNS))
    halves = [mgpu.utils.prmt(unsigned, constant(EXPONENTS), constant(selector)) for selector in SELECTORS]
    pairs = [mgpu.utils.bitcast(half, pair) for half in halves]
    if is_biased:
        return pairs
    bias = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get(ir.F16Type.get(), -INT8_BIAS)))
    return [arith.addf(x, bias) for x in pairs]
