"""The one place that knows what is different in Pallas' Mosaic GPU backend between JAX 0.11.2 and 0.12.

Import it, and what builds on it, only to run it (see mosaic_support).
"""

import jax
from jax.experimental.mosaic import gpu as mgpu  # noqa: F401
from jax.experimental.pallas import mosaic_gpu as plgpu


def compute_capability() -> tuple[int, int]:
    """Of the GPU that is compiled for, the default device; Hopper's where there is none, as JAX itself has it."""
    told = getattr(jax.devices()[0], "compute_capability", None)
    if told is None:
        return 9, 0
    major, minor = told.split(".")
    return int(major), int(minor)


def store(ref, x: jax.Array) -> None:
    """Store to global or shared memory, in however narrow pieces: from 0.12 on a plain store must be of whole lines."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def kernel(body, *, out_shape, grid: dict[str, int], scratch: list, name: str, interpret: bool):
    """plgpu.kernel over a grid of named axes, with fast 2^x; interpreted, it looks for races too."""
    options = {"interpret": plgpu.InterpretGPUParams(detect_races=True)} if interpret else {}
    return plgpu.kernel(
        body,
        out_type=out_shape,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **options,
    )
