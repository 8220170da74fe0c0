"""Lowering for a GPU on a host without one, with nothing but jax: shows what the interpreter hides (missing lowerings,
shapes that Triton does not take), but compiles nothing."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

DEVICES = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def lower_for_cuda(function, *args, target: str = "h200", **jit_options) -> str:
    """StableHLO text of `jax.jit(function, **jit_options)` for a GPU of DEVICES; Pallas kernels in it are custom calls."""
    device = AbstractDevice(device_kind=DEVICES[target], num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return jax.jit(function, **jit_options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
