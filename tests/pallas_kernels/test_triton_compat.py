"""Every JAX that is supported lowers the kernels for GPUs, without a word about the backend's age."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import triton_compat as plt
from tests.support.cuda_lowering import DEVICES, lower_for_cuda


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref, out_ref):
        row = pl.program_id(0)
        plt.store(out_ref.at[row], 2 * plt.load(x_ref.at[row]))

    params = plt.CompilerParams(num_warps=1, num_stages=1)
    return pl.pallas_call(kernel, grid=x.shape[:1], out_shape=jax.typeof(x), compiler_params=params)(x)


@pytest.mark.parametrize("target", DEVICES)
def test_lowers_on_a_host_without_a_gpu(target):
    text = lower_for_cuda(double, jnp.zeros((4, 64)), target=target)
    assert "__gpu$xla.gpu.triton" in text


def test_the_deprecation_is_silent():
    code = (
        "import warnings, jax.numpy as jnp; from tests.pallas_kernels.test_triton_compat import double; "
        "from tests.support.cuda_lowering import lower_for_cuda; "
        "print(len(lower_for_cuda(double, jnp.zeros((4, 64)))) > 100)"
    )
    command = [sys.executable, "-W", "default", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=pathlib.Path(__file__).parents[2])
    assert run.stdout.strip() == "True" and "Triton" not in run.stderr, run.stderr
