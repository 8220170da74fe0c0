"""int8_to_float: its assembly, run by a model of the instructions, and its double for the interpreter."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import int8_dequant

ALL = np.arange(-128, 128, dtype=np.int8)
FLOATS = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16, "f32": np.float32}


def execute(assembly: str, registers: dict[str, int]) -> dict[str, int]:
    """PTX of a single lane: the few instructions that int8_dequant uses, by NVIDIA's description of them."""

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 16)

    for line in assembly.strip("{}\n").splitlines():
        opcode, *operands = line.strip(";").replace(",", "").split()
        if opcode == ".reg":
            continue
        target, *sources = operands[0], *map(value, operands[1:])
        name, *modifiers = opcode.split(".")
        if name == "mov":
            result = sources[0]
        elif name == "xor":
            result = sources[0] ^ sources[1]
        elif name == "and":
            result = sources[0] & sources[1]
        elif name == "prmt":
            available = np.array(sources[:2], "<u4").view(np.uint8)
            result = int(available[[sources[2] >> 4 * i & 7 for i in range(4)]].view("<u4")[0])
        else:
            x = [np.array([s], "<u4").view(FLOATS[modifiers[-1]]).astype(np.float64) for s in sources]
            exact = {"sub": lambda: x[0] - x[1], "fma": lambda: x[0] * x[1] + x[2]}[name]()
            result = int(exact.astype(FLOATS[modifiers[-1]]).view("<u4")[0])
        registers[target] = result
    return registers


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_assembly_gives_every_int8(dtype):
    assembly, constraints = int8_dequant._ASSEMBLY[dtype]
    num_results = constraints.count("=")
    for four in ALL.reshape(-1, 4):
        registers = execute(assembly, {f"${num_results}": int(four.view("<u4")[0])})
        packed = np.array([registers[f"${i}"] for i in range(num_results)], "<u4").view(jnp.dtype(dtype))
        np.testing.assert_array_equal(packed.astype(np.int8), four)
        np.testing.assert_array_equal(packed.astype(np.float32), four.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_interpreted_gives_every_int8(dtype):
    result = int8_dequant.int8_to_float(jnp.asarray(ALL), dtype, interpret=True)
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result, np.float32), ALL.astype(np.float32))


def test_the_biased_form_is_off_by_the_bias():
    for four in ALL.reshape(-1, 4):
        registers = execute(int8_dequant._BIASED_FLOAT16, {"$2": int(four.view("<u4")[0])})
        packed = np.array([registers["$0"], registers["$1"]], "<u4").view(np.float16)
        np.testing.assert_array_equal(packed.astype(np.float32), four.astype(np.float32) + int8_dequant.INT8_BIAS)
    result = int8_dequant.int8_to_biased_float16(jnp.asarray(ALL), interpret=True)
    assert result.dtype == np.float16
    np.testing.assert_array_equal(np.asarray(result, np.float32), ALL.astype(np.float32) + int8_dequant.INT8_BIAS)
