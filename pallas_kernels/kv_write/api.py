"""Append keys and values to KV blocks."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.kv_write import pallas_triton, reference, xla
from pallas_kernels.layer_kv import LayerKV

_IMPLEMENTATIONS = {
    "pallas_triton": pallas_triton.kv_write,
    "pallas_triton_interpreted": functools.partial(pallas_triton.kv_write, interpret=True),
    "xla": xla.kv_write,
    "reference": reference.kv_write,
}


def kv_write(kv: LayerKV, k: jax.Array, v: jax.Array, slots: jax.Array, *, implementation: str = "xla") -> LayerKV:
    """Store token i's rotated key and value in flat place `slots[i]`.

    Args:
      kv: the layer's blocks; donated by the caller's jit, so that the write is in place.
      k, v: [T, K, D], converted to the stored format (see kv_format).
      slots: i32[T], block_id * block_size + offset. Padding names a slot of the null block (0 <= slot < block_size).
        Slots outside the null block are distinct.

    Returns:
      The blocks with those slots replaced and every other slot of a block other than 0 untouched.
    """
    expected = (slots.shape[0], kv.num_kv_heads, kv.head_dim)
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"Expected {k.shape=} and {v.shape=} to equal {expected=} for {kv.k.shape=}, {slots.shape=}")
    run = _IMPLEMENTATIONS[dispatch.backend("kv_write", implementation)]
    return run(kv, k, v, slots)
