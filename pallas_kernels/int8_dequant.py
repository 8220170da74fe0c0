"""int8 numbers to floats inside a Triton kernel, four at a time, without the conversion unit.

I2F runs at a sixteenth of the speed of ordinary instructions. Instead the bytes of a 32-bit register are spread into the
mantissas of floats whose exponent makes their lowest bit worth 1 (PRMT), and the surplus is taken away again. Results are
exact: integers up to 127 are numbers of every float format.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import triton_compat as plt

# Selectors of PRMT: two bytes of the first operand, each under a byte of the second.
_LOW, _HIGH = "0x4140", "0x4342"

# 1024 + (x + 128): 3 instructions for 4 numbers.
INT8_BIAS = 1152
_BIASED_FLOAT16 = f"""{{
.reg .b32 t;
xor.b32 t, $2, 0x80808080;
prmt.b32 $0, t, 0x64646464, {_LOW};
prmt.b32 $1, t, 0x64646464, {_HIGH};
}}"""

# And minus 1152: 5 instructions.
_FLOAT16 = f"""{{
.reg .b32 t, m;
xor.b32 t, $2, 0x80808080;
mov.b32 m, 0x64806480;
prmt.b32 $0, t, 0x64646464, {_LOW};
prmt.b32 $1, t, 0x64646464, {_HIGH};
sub.rn.f16x2 $0, $0, m;
sub.rn.f16x2 $1, $1, m;
}}"""

# bfloat16 has 7 bits of mantissa: 128 + the low 7 bits, minus 128, or 256 where the sign bit is the exponent's lowest.
# 8 instructions for 4 numbers. fma because sm_80 has no subtraction.
_BFLOAT16 = f"""{{
.reg .b32 a, b, s, n;
mov.b32 n, 0xbf80bf80;
prmt.b32 a, $2, 0x43434343, {_LOW};
prmt.b32 b, $2, 0x43434343, {_HIGH};
and.b32 s, a, 0xff80ff80;
and.b32 a, a, 0xff7fff7f;
fma.rn.bf16x2 $0, s, n, a;
and.b32 s, b, 0xff80ff80;
and.b32 b, b, 0xff7fff7f;
fma.rn.bf16x2 $1, s, n, b;
}}"""

# 2^23 + (x + 128), minus 2^23 + 128.
_FLOAT32 = """{
.reg .b32 t, m;
xor.b32 t, $4, 0x80808080;
mov.b32 m, 0x4b000080;
prmt.b32 $0, t, 0x4b000000, 0x7440;
prmt.b32 $1, t, 0x4b000000, 0x7441;
prmt.b32 $2, t, 0x4b000000, 0x7442;
prmt.b32 $3, t, 0x4b000000, 0x7443;
sub.rn.f32 $0, $0, m;
sub.rn.f32 $1, $1, m;
sub.rn.f32 $2, $2, m;
sub.rn.f32 $3, $3, m;
}"""

_ASSEMBLY = {
    "float16": (_FLOAT16, "=&r,=&r,r"),
    "bfloat16": (_BFLOAT16, "=&r,=&r,r"),
    "float32": (_FLOAT32, "=&r,=&r,=&r,=&r,r"),
}


def int8_to_float(x: jax.Array, dtype: jnp.dtype, *, interpret: bool) -> jax.Array:
    """int8 x, of any shape, in float16, bfloat16 or float32.

    The interpreter knows no assembly; the plain conversion gives the same numbers.
    """
    if interpret:
        return x.astype(dtype)
    return _converted(x, dtype, *_ASSEMBLY[jnp.dtype(dtype).name])


def int8_to_biased_float16(x: jax.Array, *, interpret: bool) -> jax.Array:
    """x + INT8_BIAS of int8 x in float16, for those who take the bias away more cheaply elsewhere."""
    if interpret:
        return x.astype(jnp.float16) + jnp.float16(INT8_BIAS)
    return _converted(x, jnp.float16, _BIASED_FLOAT16, "=&r,=&r,r")


def _converted(x: jax.Array, dtype: jnp.dtype, assembly: str, constraints: str) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, dtype)
    [result] = plt.elementwise_inline_asm(
        assembly, args=[x], constraints=constraints, pack=4, result_shape_dtypes=[shape]
    )
    return result
