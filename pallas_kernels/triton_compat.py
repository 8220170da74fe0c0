"""The one place that knows Pallas' Triton backend: its names, alike from JAX 0.10.2 to 0.12, and its deprecation.

JAX has deprecated the backend since 0.11 in favour of Mosaic GPU and says so at every lowering. That is known, and told
here once instead of to every user.
"""

import math
import warnings

import jax
from jax.experimental.pallas.triton import CompilerParams as CompilerParams
from jax.experimental.pallas.triton import dot as dot
from jax.experimental.pallas.triton import elementwise_inline_asm as elementwise_inline_asm
from jax.experimental.pallas.triton import load as load
from jax.experimental.pallas.triton import max_contiguous as max_contiguous
from jax.experimental.pallas.triton import store as store

from pallas_kernels.layer_kv import LayerKV

# pytest sets filters of its own: pyproject.toml repeats this one.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

# Offsets into an array of one-byte elements are 32-bit signed numbers: element 2^31 would be read before the array's start.
MAX_ONE_BYTE_ELEMENTS = 2**31 - 1


def check_addressing(kv: LayerKV) -> None:
    """ValueError where a kernel would address the pool wrongly; every kernel that takes blocks asks."""
    for pool in jax.tree.leaves(kv):
        if pool.dtype.itemsize == 1 and pool.size > MAX_ONE_BYTE_ELEMENTS:
            raise ValueError(
                f"Expected fewer than 2^31 elements in {pool.dtype.name}{list(pool.shape)}, got {pool.size:,}: "
                f"at most {MAX_ONE_BYTE_ELEMENTS // math.prod(pool.shape[1:]):,} blocks can be addressed"
            )
