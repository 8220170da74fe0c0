"""Which implementation of the operations runs: named, or chosen once.

A named implementation runs or raises with the reason; unset, the first supported one of PREFERENCE is taken. Nothing
falls back silently. `pallas_mosaic_gpu` has kernels for some operations only (MOSAIC_OPERATIONS), runs the others with the
Triton kernels, and says so.
"""

import dataclasses
from typing import NamedTuple

from pallas_kernels import mosaic_support
from pallas_kernels.triton_compat import MAX_ONE_BYTE_ELEMENTS

# Triton before Mosaic GPU, on every architecture and for every format: neither has been timed on a GPU, Triton has kernels
# for all operations, and XLA leaves Mosaic GPU's calls out of its CUDA graphs (JAX 0.11.2), which cuts a decode step into one
# graph a layer with two launches between.
PREFERENCE = ("pallas_triton", "xla")
ALL = (
    "pallas_triton",
    "pallas_triton_interpreted",
    "pallas_mosaic_gpu",
    "pallas_mosaic_gpu_interpreted",
    "xla",
    "reference",
)

OPERATIONS = ("decode_attention", "prefill_attention", "kv_write", "block_copy")
# Those with kernels in Mosaic GPU, and the formats that these read.
MOSAIC_OPERATIONS = {
    "decode_attention": ("bfloat16", "float16", "int8"),
    "block_copy": ("float32", "bfloat16", "float16", "int8"),
}
# A tile and its scales are in one block; so are values, which lie transposed there.
_LEAST_MOSAIC_INT8_BLOCK = 64

# Tensor cores take 16 rows of bfloat16, and asynchronous copies and the instructions the kernels use begin with Ampere.
_LEAST_CAPABILITY = (8, 0)
_LEAST_TRITON_BLOCK, _MOST_GROUP = 16, 16
_MOST_HEAD_DIM = 256
# Products of float32 in three parts need so many registers that prefill spills from here on: 16 to 676 bytes a thread at
# 256, whatever the tile (JAX 0.10.2, A100 and H200).
_MOST_HEAD_DIM_FLOAT32 = 128
_TRITON_FORMATS = ("float32", "bfloat16", "float16", "int8")


class Support(NamedTuple):
    ok: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Configuration:
    """All that decides whether an implementation can run.

    Attributes:
      platform: "cpu", "cuda", or another of JAX's. capability: compute capability of a CUDA device, (9, 0) for Hopper.
      group: query heads a KV head. dtype: of the queries. kv_format: as kv_format.formats_of reads it.
    """

    platform: str
    capability: tuple[int, int] | None
    block_size: int
    head_dim: int
    group: int
    dtype: str
    kv_format: str


def backend(operation: str, implementation: str) -> str:
    """The implementation of one of OPERATIONS that runs under a name of ALL."""
    if implementation not in ALL:
        raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(ALL)}")
    if implementation.startswith("pallas_mosaic_gpu") and operation not in MOSAIC_OPERATIONS:
        return implementation.replace("pallas_mosaic_gpu", "pallas_triton")
    return implementation


def supports(implementation: str, configuration: Configuration) -> Support:
    """Whether `implementation` can run on this configuration, and why or why not."""
    block_size = configuration.block_size
    if implementation not in ALL:
        return Support(False, f"unknown implementation {implementation!r}; known: {', '.join(ALL)}")
    if block_size < 8 or block_size & (block_size - 1):
        return Support(False, f"block_size must be a power of two of at least 8, not {block_size}")
    if implementation == "reference":
        return Support(True, "runs anywhere, gathers every row's whole padded table: for tests")
    if implementation == "xla":
        return Support(True, "runs on any device")
    if reason := _not_for_triton(configuration):
        return Support(False, reason)
    is_mosaic = implementation.startswith("pallas_mosaic_gpu")
    if is_mosaic and (reason := _not_for_mosaic(configuration)):
        return Support(False, reason)
    kernels = f"GPU kernels{_shared_out() if is_mosaic else ''}"
    if implementation.endswith("_interpreted"):
        return Support(True, f"the {kernels} in Pallas' interpreter, anywhere and slowly: for tests")
    if configuration.platform != "cuda":
        return Support(False, f"needs an NVIDIA GPU, and this is {configuration.platform}")
    if configuration.capability is None or configuration.capability < _LEAST_CAPABILITY:
        found = "an unknown one" if configuration.capability is None else "{}.{}".format(*configuration.capability)
        return Support(False, f"needs compute capability 8.0 (Ampere) or newer, and this GPU has {found}")
    return Support(True, "{} for compute capability {}.{}".format(kernels, *configuration.capability))


def _shared_out() -> str:
    """Which operations are whose, where the name does not tell."""
    others = [operation for operation in OPERATIONS if operation not in MOSAIC_OPERATIONS]
    return f" ({', '.join(MOSAIC_OPERATIONS)} in Mosaic GPU; {', '.join(others)} in Triton)"


def _not_for_triton(configuration: Configuration) -> str | None:
    """What the Triton kernels can't do of a configuration, on whatever device; None when they can do it."""
    if configuration.block_size < _LEAST_TRITON_BLOCK:
        return (
            f"block_size must be at least {_LEAST_TRITON_BLOCK}, a tensor core's rows, not {configuration.block_size}"
        )
    if configuration.head_dim > _MOST_HEAD_DIM:
        return f"head_dim must be at most {_MOST_HEAD_DIM}, not {configuration.head_dim}"
    if configuration.dtype == "float32" and configuration.head_dim > _MOST_HEAD_DIM_FLOAT32:
        return f"head_dim must be at most {_MOST_HEAD_DIM_FLOAT32} in float32, not {configuration.head_dim}"
    if configuration.group > _MOST_GROUP:
        return f"at most {_MOST_GROUP} query heads may share a KV head, not {configuration.group}"
    if configuration.kv_format not in _TRITON_FORMATS:
        return f"the KV format must be one of {', '.join(_TRITON_FORMATS)}, not {configuration.kv_format}"
    return None


def _not_for_mosaic(configuration: Configuration) -> str | None:
    """What the Mosaic GPU kernels can't do of a configuration that the Triton kernels can."""
    if reason := mosaic_support.unavailable():
        return reason
    if configuration.head_dim % 64:
        return f"head_dim must be a multiple of 64, the rows of a warpgroup's tile, not {configuration.head_dim}"
    for operation, formats in MOSAIC_OPERATIONS.items():
        if configuration.kv_format not in formats:
            return f"the KV format of {operation} must be one of {', '.join(formats)}, not {configuration.kv_format}"
    if configuration.kv_format == "int8" and configuration.block_size < _LEAST_MOSAIC_INT8_BLOCK:
        return (
            f"block_size must be at least {_LEAST_MOSAIC_INT8_BLOCK} for int8, a tile with its scales in one block, "
            f"not {configuration.block_size}"
        )
    return None


def resolve(implementation: str | None, configuration: Configuration) -> tuple[str, str]:
    """The implementation to use and the reason for it; raises ValueError when the named one can't run.

    The reason for a choice names what was preferred and can't run.
    """
    if implementation is not None:
        support = supports(implementation, configuration)
        if not support.ok:
            raise ValueError(f"attention_implementation={implementation!r} can't run: {support.reason}")
        return implementation, support.reason
    passed_over = []
    for name in PREFERENCE:
        support = supports(name, configuration)
        if support.ok:
            return name, "; ".join([support.reason, *passed_over])
        passed_over.append(f"not {name}: {support.reason}")
    raise ValueError(support.reason)


def max_blocks(implementation: str, *, num_kv_heads: int, block_size: int, head_dim: int, kv_format: str) -> int | None:
    """Most blocks a layer's pool may have, the null block included; None: as many as fit the memory."""
    if not implementation.startswith("pallas_") or kv_format != "int8":
        return None
    return MAX_ONE_BYTE_ELEMENTS // (num_kv_heads * block_size * head_dim)
