"""What every JAX makes of the Mosaic GPU backend: kernels from 0.11.2 on, a refusal that says why before."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from pallas_kernels import dispatch, mosaic_support
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.cases import DecodeCase, decode_inputs

H200 = dispatch.Configuration("cuda", (9, 0), 64, head_dim=128, group=4, dtype="bfloat16", kv_format="bfloat16")
ROOT = pathlib.Path(__file__).parents[2]
IS_NEW = jax.__version_info__ >= (0, 11, 2)
NAMES = ("pallas_mosaic_gpu", "pallas_mosaic_gpu_interpreted")
TOO_OLD = f"needs JAX 0.11.2 or newer, and this is {jax.__version__}"


def test_the_version_decides():
    assert mosaic_support.unavailable() == (None if IS_NEW else TOO_OLD)


@pytest.mark.parametrize("name", NAMES)
def test_supported_or_refused_with_the_reason(name):
    supported = dispatch.supports(name, H200)
    assert supported.ok == IS_NEW
    operations = "(decode_attention, block_copy in Mosaic GPU; prefill_attention, kv_write in Triton)"
    assert (operations if IS_NEW else TOO_OLD) in supported.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 80}, "head_dim must be a multiple of 64, the rows of a warpgroup's tile, not 80"),
        (
            {"kv_format": "float32"},
            "the KV format of decode_attention must be one of bfloat16, float16, int8, not float32",
        ),
        (
            {"kv_format": "int8", "block_size": 32},
            "must be at least 64 for int8, a tile with its scales in one block, not 32",
        ),
        ({"group": 32}, "at most 16 query heads may share a KV head, not 32"),
        ({"block_size": 8}, "block_size must be at least 16"),
        ({"capability": (7, 5)}, "needs compute capability 8.0 (Ampere) or newer, and this GPU has 7.5"),
        ({"platform": "cpu", "capability": None}, "needs an NVIDIA GPU, and this is cpu"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(changed, reason):
    configuration = dataclasses.replace(H200, **changed)
    told = reason if IS_NEW or "at least 16" in reason or "heads" in reason else TOO_OLD
    with pytest.raises(ValueError, match=re.escape(told)):
        dispatch.resolve("pallas_mosaic_gpu", configuration)


def test_an_old_jax_does_not_run_the_kernels():
    inputs = decode_inputs(DecodeCase(64, 2, 1, 64, "bfloat16", seq_lens=(3,)))
    arrays = (inputs.q, *inputs.rows[:2], inputs.seq_lens)

    def attend(*arrays):
        return decode_attention(*arrays, DecodeCase().options, implementation="pallas_mosaic_gpu")

    if IS_NEW:
        shapes = jax.eval_shape(attend, *arrays)
        assert shapes.out.shape == inputs.q.shape and shapes.lse.shape == inputs.q.shape[:2]
    else:
        with pytest.raises(ValueError, match=re.escape(TOO_OLD)):
            attend(*arrays)


def test_importing_the_operations_does_not_bring_the_backend_along():
    code = "import sys, pallas_kernels.decode_attention; print('jax.experimental.pallas.mosaic_gpu' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.stdout.strip() == "False", run.stderr
