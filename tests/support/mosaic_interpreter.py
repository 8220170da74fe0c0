"""Running Mosaic GPU kernels in Pallas' interpreter: a lowering that it lacks, and the races it sees.

For JAX that mosaic_support.unavailable has nothing against; older ones have none of this.
"""

import contextlib
from collections.abc import Iterator

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.primitives import mma_p
from jax.interpreters import mlir


def _mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    contracted = (((1,), (0,)), ((), ()))
    return acc + jax.lax.dot_general(a, b, contracted, precision="highest", preferred_element_type=acc.dtype)


mlir.register_lowering(mma_p, mlir.lower_fun(_mma, multiple_results=False), platform="cpu")


@contextlib.contextmanager
def race_detectors() -> Iterator[list]:
    """Collects the race detection state (`races_found`) of every kernel that is interpreted inside."""
    made, original = [], gpu_callbacks.GPURaceDetectionState

    def make(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    gpu_callbacks.GPURaceDetectionState = make
    try:
        yield made
    finally:
        gpu_callbacks.GPURaceDetectionState = original
