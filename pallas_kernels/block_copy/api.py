"""Copy the head of blocks: copy-on-write of a partly matched prefix."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.block_copy import pallas_triton, reference, xla
from pallas_kernels.layer_kv import LayerKV


def _pallas_mosaic_gpu(*arrays, interpret: bool = False) -> LayerKV:
    """Imported when it is called: see mosaic_support."""
    from pallas_kernels.block_copy import pallas_mosaic_gpu

    return pallas_mosaic_gpu.block_copy(*arrays, interpret=interpret)


_IMPLEMENTATIONS = {
    "pallas_triton": pallas_triton.block_copy,
    "pallas_triton_interpreted": functools.partial(pallas_triton.block_copy, interpret=True),
    "pallas_mosaic_gpu": _pallas_mosaic_gpu,
    "pallas_mosaic_gpu_interpreted": functools.partial(_pallas_mosaic_gpu, interpret=True),
    "xla": xla.block_copy,
    "reference": reference.block_copy,
}


def block_copy(
    kv: LayerKV, src: jax.Array, dst: jax.Array, num_tokens: jax.Array, *, implementation: str = "xla"
) -> LayerKV:
    """Replace the first `num_tokens[i]` tokens of block `dst[i]` by those of block `src[i]`.

    Args:
      src, dst, num_tokens: i32[X]; all reads happen before all writes. Padding is (0, 0, 0). `dst` entries are distinct
        but for padding.
    """
    run = _IMPLEMENTATIONS[dispatch.backend("block_copy", implementation)]
    return run(kv, src, dst, num_tokens)
