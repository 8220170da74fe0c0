"""2^x and log2 x as one instruction of the special function unit each.

Triton's own exp2 keeps subnormal results, which costs three instructions more an element, and it does not fuse the
multiplication and the subtraction before it. Here results below 2^-126 are zero.
"""

import struct

import jax
import jax.numpy as jnp

from pallas_kernels import triton_compat as plt


def exp2_scaled(x: jax.Array, scale: float, shift: jax.Array, *, interpret: bool) -> jax.Array:
    """2^(x * scale + shift) of f32 arrays that broadcast: two instructions an element.

    The interpreter knows no assembly.
    """
    x, shift = jnp.broadcast_arrays(x, shift)
    if interpret:
        return jnp.exp2(x * scale + shift)
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    [result] = plt.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[x, shift],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )
    return result


def log2(x: jax.Array, *, interpret: bool) -> jax.Array:
    """Of f32 normal numbers, within 2^-22; the library's takes an integer conversion and 20 instructions."""
    if interpret:
        return jnp.log2(x)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    [result] = plt.elementwise_inline_asm(
        "lg2.approx.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape]
    )
    return result
