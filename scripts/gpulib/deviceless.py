"""XLA:GPU compilation without a GPU or driver: needs jax's CUDA plugin and ptxas, both from PyPI (extra `gpu-build`)."""

import functools
import glob
import importlib.util
import pathlib
import shutil
import sysconfig

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from gpulib.targets import TARGETS

INSTALL = "pip install -e '.[gpu-build]'"


def missing() -> str | None:
    """What is not installed and how to get it; None when all is there."""
    if not any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        return f"jax's CUDA plugin is not installed: {INSTALL}"
    for tool in ("ptxas", "nvdisasm"):
        if find_tool(tool) is None:
            return f"{tool} is neither among the installed packages nor on the PATH: {INSTALL}"
    return None


def find_tool(name: str) -> str | None:
    """A CUDA program of the installed nvidia packages, or of the PATH."""
    packages = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = sorted(glob.glob(f"{packages}/*/bin/{name}"))
    return found[0] if found else shutil.which(name)


@functools.cache
def target_mesh(target: str, num_devices: int = 1) -> jax.sharding.Mesh:
    """A mesh of GPUs that do not exist; JAX_PLATFORMS must be cpu."""
    description = TARGETS[target].description()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology=f"1x1x{num_devices}", target_config=description
    )
    return topologies.make_mesh(topology, (num_devices,), ("x",))


def compile_for(
    target: str,
    fn,
    *args,
    dump: pathlib.Path | None = None,
    fail_on_spill: bool = True,
    **jit_options,
) -> jax.stages.Compiled:
    """`jax.jit(fn, **jit_options)` compiled for a GPU of TARGETS.

    Args:
      args: pytrees of arrays or shapes; every leaf is replicated.
      dump: a folder that gets one .ptx a kernel and the thunk sequence; emptied first.
      fail_on_spill: registers that spill are an error.
    """
    mesh = target_mesh(target)
    replicated = NamedSharding(mesh, PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), args)
    with jax.set_mesh(mesh):  # it carries the abstract device that Pallas' lowering asks for
        lowered = jax.jit(fn, **jit_options).lower(*args)
        return lowered.compile(compiler_options=compiler_options(dump, fail_on_spill))


def compiler_options(dump: pathlib.Path | None, fail_on_spill: bool) -> dict:
    options: dict = {"xla_gpu_fail_ptx_compilation_on_register_spilling": fail_on_spill}
    if dump is not None:
        shutil.rmtree(dump, ignore_errors=True)
        # Only the PTX: dumping everything takes 15 times as long.
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}
    return options
