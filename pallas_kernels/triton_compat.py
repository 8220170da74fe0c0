"""The one place that knows Pallas' Triton backend: its names, alike from JAX 0.10.2 to 0.12, and its deprecation.

JAX has deprecated the backend since 0.11 in favour of Mosaic GPU and says so at every lowering. That is known, and told
here once instead of to every user.
"""

import warnings

from jax.experimental.pallas.triton import CompilerParams as CompilerParams
from jax.experimental.pallas.triton import dot as dot
from jax.experimental.pallas.triton import elementwise_inline_asm as elementwise_inline_asm
from jax.experimental.pallas.triton import load as load
from jax.experimental.pallas.triton import max_contiguous as max_contiguous
from jax.experimental.pallas.triton import store as store

# pytest sets filters of its own: pyproject.toml repeats this one.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
