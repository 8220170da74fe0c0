"""2^x as one instruction of the special function unit.

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
