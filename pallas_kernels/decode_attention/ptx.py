"""Arithmetic of the GPU kernel that Pallas Triton has no word for, as PTX; the interpreter, which knows no assembly, gets
the same numbers from plain operations."""

import struct

import jax
import jax.numpy as jnp

from pallas_kernels import triton_compat as plt

# An int8 x lies in the lowest mantissa bits of a float16 with the exponent of 1024, its sign bit flipped: 1024 + 128 + x.
INT8_BIAS = 1152

_SPREAD = "xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;"
_UNBIAS = "mov.b32 bias, 0x64806480; sub.rn.f16x2 $0, $0, bias; sub.rn.f16x2 $1, $1, bias;"


def biased_int8(x: jax.Array) -> jax.Array:
    """float16 x + INT8_BIAS of int8 x, 3 instructions for 4 numbers (a conversion would take 4, each at a quarter of the
    speed)."""
    return _int8_to_float16(f"{{ .reg .b32 t; {_SPREAD} }}", x)


def unbiased_int8(x: jax.Array) -> jax.Array:
    """float16 x of int8 x, 5 instructions for 4 numbers."""
    return _int8_to_float16(f"{{ .reg .b32 t, bias; {_SPREAD} {_UNBIAS} }}", x)


def exp2_scaled(x: jax.Array, scale: float, shift: jax.Array) -> jax.Array:
    """2^(x * scale + shift) of f32 arrays that broadcast, in 2 instructions; below 2^-126 it is 0. Triton's own keeps
    subnormal numbers, which costs 3 instructions more, and does not fuse the multiplication with the addition."""
    x, shift = jnp.broadcast_arrays(x, shift)
    bits = struct.unpack("<I", struct.pack("<f", scale))[0]
    assembly = f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}"
    return _elementwise(assembly, "=f,f,f", 1, jnp.float32, x, shift)


def log2(x: jax.Array) -> jax.Array:
    """Of f32 normal numbers, within 2^-22; the library's takes an integer conversion and 20 instructions."""
    return _elementwise("lg2.approx.f32 $0, $1;", "=f,f", 1, jnp.float32, x)


class Interpreted:
    """The functions above for Pallas' interpreter."""

    biased_int8 = staticmethod(lambda x: x.astype(jnp.float16) + jnp.float16(INT8_BIAS))
    unbiased_int8 = staticmethod(lambda x: x.astype(jnp.float16))
    exp2_scaled = staticmethod(lambda x, scale, shift: jnp.exp2(x * scale + shift))
    log2 = staticmethod(jnp.log2)


def _int8_to_float16(assembly: str, x: jax.Array) -> jax.Array:
    return _elementwise(assembly, "=&r,=&r,r", 4, jnp.float16, x)


def _elementwise(assembly: str, constraints: str, pack: int, dtype, *args: jax.Array) -> jax.Array:
    result = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    [out] = plt.elementwise_inline_asm(
        assembly, args=args, constraints=constraints, pack=pack, result_shape_dtypes=result
    )
    return out
