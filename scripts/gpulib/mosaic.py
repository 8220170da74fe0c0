"""Mosaic GPU kernels compiled for GPUs that are not there: JAX assumes Hopper then, and tells of PTX by its environment."""

import contextlib
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic_gpu

from gpulib.census import Launch
from gpulib.deviceless import compile_for, find_tool
from gpulib.targets import TARGETS
from pallas_kernels import mosaic_compat


@contextlib.contextmanager
def building(target: str, dump: pathlib.Path | None = None) -> Iterator[None]:
    """Kernels lowered and compiled inside are for a GPU of TARGETS; `dump`, which is emptied, gets their PTX and launches."""
    _choose_assembler()
    environment = {}
    if dump is not None:
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir(parents=True)
        environment = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(dump)}
    with mock.patch.dict(os.environ, environment), _assuming(target):
        yield


@contextlib.contextmanager
def _assuming(target: str) -> Iterator[None]:
    capability = tuple(int(x) for x in re.findall(r"\d", TARGETS[target].arch))
    cuda = pathlib.Path(find_tool("ptxas")).parents[1]
    with (
        mock.patch.object(mosaic_gpu.utils, "_infer_arch", lambda: (capability[0], capability[1])),
        mock.patch.object(mosaic_compat, "compute_capability", lambda: (capability[0], capability[1])),
        mock.patch.dict(os.environ, {"MOSAIC_GPU_CUDA_ROOT": str(cuda)}),
    ):
        yield


@functools.cache
def _choose_assembler() -> None:
    """A process assembles all its Mosaic GPU kernels for the GPU of the first one (JAX 0.11.2, 0.12). So that is Hopper,
    for which code for Ampere can be assembled; not so the other way round. The census assembles again, for the target."""

    def zero(out_ref):
        out_ref[...] = jnp.zeros((128,), jnp.float32)

    write = mosaic_compat.kernel(
        zero,
        out_shape=jax.ShapeDtypeStruct((128,), jnp.float32),
        grid={"x": 1},
        scratch=[],
        name="zero",
        interpret=False,
    )
    with _assuming("h200"):
        compile_for("h200", write)


def entry(kernel: str) -> str:
    """What the kernel of this name is called in PTX."""
    return f"{kernel}_mosaic_gpu_kernel"


def launch(dump: pathlib.Path, kernel: str) -> Launch:
    """The launch of a kernel that was built into `dump`; KeyError if there is none of that name."""
    found = [path for path in dump.glob("*.before_layout_inference.txt") if re.match(rf"{kernel}_\d+\.", path.name)]
    if not found:
        raise KeyError(f"no kernel {kernel} in {dump}")
    text = re.search(r"gpu\.launch.*", found[0].read_text())[0]
    blocks, threads = (re.findall(r"= %c(\d+)", group) for group in re.findall(r" in \(([^)]*)\)", text))
    shared = re.search(r"dynamic_shared_memory_size %c(\d+)", text)
    return Launch(kernel, tuple(map(int, blocks)), int(threads[0]), int(shared[1]))
