"""The same kernel tests natively and interpreted: native where JAX sees an NVIDIA GPU, in Pallas' interpreter elsewhere.

A test class or function of a kernel is marked `gpu` (below) and runs PALLAS; scripts/gpu_check.py runs all that are so
marked on a GPU. Anything else of a test, above all the reference, is computed on the CPU in either case: there float32
products are float32, where a GPU takes TF32 unless told otherwise.
"""

import jax
import pytest

NATIVE = jax.default_backend() == "gpu"
PALLAS = "pallas_triton" if NATIVE else "pallas_triton_interpreted"

# Runs natively on a GPU: what gpu_check.py selects. It is no skip: elsewhere the test runs interpreted.
gpu = pytest.mark.gpu


def on_cpu():
    """with on_cpu(): what is jitted and made inside runs on the CPU, also where the default device is a GPU."""
    return jax.default_device(jax.devices("cpu")[0])
