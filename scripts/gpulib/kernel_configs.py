"""The kernels that are judged by their machine code: one table, name -> how to call them.

Names are operation/stored format/what else matters, and those of the tables in pallas_kernels/gpu_budgets.toml.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpulib import mosaic
from gpulib.census import census, launches
from gpulib.deviceless import compile_for
from gpulib.inventory import inventory
from pallas_kernels import mosaic_support
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.block_copy import block_copy
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.decode_attention.pallas_triton import loop_shape
from pallas_kernels.decode_attention.plan import TILE
from pallas_kernels.kv_format import bytes_per_token
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layer_kv import LayerKV, empty_layer_kv
from pallas_kernels.prefill_attention import prefill_attention


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """One kernel at one configuration.

    Attributes:
      kernel: its name in the executable.
      call: the function, and its arguments as shapes.
      donate: positions of donated arguments.
      loop_kv_bytes: bytes of K, V and scales that a program reads in one turn of its innermost loop; None: no such loop.
      is_mosaic: a kernel of the Mosaic GPU backend.
    """

    kernel: str
    call: Callable[[], tuple[Callable, tuple[Any, ...]]]
    donate: tuple[int, ...] = ()
    loop_kv_bytes: int | None = None
    is_mosaic: bool = False


def measure(name: str, target: str, dump: pathlib.Path) -> dict[str, float]:
    """The inventory of a kernel of CONFIGS, compiled for a target; `dump` is emptied first."""
    config = CONFIGS[name]
    function, args = config.call()
    if config.is_mosaic:
        with mosaic.building(target, dump):
            compile_for(target, function, *args, donate_argnums=config.donate)
        figures = census(dump, mosaic.entry(config.kernel), target)
        return inventory(figures, mosaic.launch(dump, config.kernel), config.loop_kv_bytes)
    # Spills are for the budgets to judge.
    compile_for(target, function, *args, dump=dump, fail_on_spill=False, donate_argnums=config.donate)
    launch = next(launch for launch in launches(dump) if launch.kernel == config.kernel)
    return inventory(census(dump, config.kernel, target), launch, config.loop_kv_bytes)


def shape(*dimensions: int, dtype="int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.dtype(dtype))


def pool(kv_format: str, head_dim: int, *, num_kv_heads: int = 8, block_size: int = 64, blocks: int = 2048) -> LayerKV:
    """The shapes of a layer's blocks, Llama-3-8B's unless told."""
    make = functools.partial(empty_layer_kv, blocks, num_kv_heads, block_size, head_dim, kv_format)
    return jax.eval_shape(make)


def _kv_write(kv_format: str, head_dim: int, num_tokens: int) -> KernelConfig:
    def call():
        new = shape(num_tokens, 8, head_dim, dtype="bfloat16")
        write = functools.partial(kv_write, implementation="pallas_triton")
        return write, (pool(kv_format, head_dim), new, new, shape(num_tokens))

    return KernelConfig("kv_write", call, donate=(0,))


def _block_copy(kv_format: str, head_dim: int, *, implementation: str = "pallas_triton") -> KernelConfig:
    def call():
        copy = functools.partial(block_copy, implementation=implementation)
        return copy, (pool(kv_format, head_dim), shape(16), shape(16), shape(16))

    return KernelConfig("block_copy", call, donate=(0,), is_mosaic=implementation == "pallas_mosaic_gpu")


def _decode(
    kv_format: str,
    head_dim: int,
    group: int,
    block_size: int = 64,
    *,
    merge: bool = False,
    implementation: str = "pallas_triton",
) -> KernelConfig:
    """8 rows of up to 32k tokens."""

    def call():
        options = AttentionOptions(head_dim**-0.5)
        attend = functools.partial(decode_attention, options=options, implementation=implementation)
        q = shape(8, 8 * group, head_dim, dtype="bfloat16" if kv_format == "int8" else kv_format)
        return attend, (q, pool(kv_format, head_dim, block_size=block_size), shape(8, 32768 // block_size), shape(8))

    is_mosaic = implementation == "pallas_mosaic_gpu"
    if merge:
        return KernelConfig("decode_attention_merge", call, is_mosaic=is_mosaic)
    tile = TILE if is_mosaic else loop_shape(jnp.dtype(kv_format), head_dim, group)[0]
    loop_kv_bytes = tile * bytes_per_token(kv_format, 1, head_dim)
    return KernelConfig("decode_attention", call, loop_kv_bytes=loop_kv_bytes, is_mosaic=is_mosaic)


def _prefill(
    kv_format: str,
    head_dim: int,
    *,
    group: int = 4,
    dtype: str = "bfloat16",
    block_size: int = 64,
    chunks: tuple[int, int] = (8192, 8),
    window: int | None = None,
    soft_cap: float | None = None,
) -> KernelConfig:
    """`chunks` are the tokens of a call and its sequences."""

    def call():
        num_tokens, num_seqs = chunks
        options = AttentionOptions(head_dim**-0.5, window, soft_cap)
        attend = functools.partial(prefill_attention, options=options, implementation="pallas_triton")
        q = shape(num_tokens, 8 * group, head_dim, dtype=dtype)
        kv = pool(kv_format, head_dim, block_size=block_size)
        return attend, (q, kv, shape(num_seqs, 512), shape(num_seqs + 1), shape(num_seqs))

    return KernelConfig("prefill_attention", call)


CONFIGS: dict[str, KernelConfig] = {
    **{
        f"decode/{kv_format}/d{head_dim}/g{group}/p{block_size}": _decode(kv_format, head_dim, group, block_size)
        for kv_format in ("bfloat16", "int8")
        for head_dim, group, block_size in (
            (128, 4, 64),
            (128, 4, 16),
            (128, 16, 64),
            (64, 4, 64),
            (80, 4, 64),
            (256, 4, 64),
        )
    },
    "decode/float32/d128/g4/p64": _decode("float32", 128, 4),
    "decode/merge/d128": _decode("bfloat16", 128, 4, merge=True),
    "kv_write/bfloat16/d128/t64": _kv_write("bfloat16", 128, 64),
    "kv_write/bfloat16/d80/t64": _kv_write("bfloat16", 80, 64),
    "kv_write/bfloat16/d128/t8192": _kv_write("bfloat16", 128, 8192),
    "kv_write/int8/d128/t64": _kv_write("int8", 128, 64),
    "kv_write/int8/d80/t64": _kv_write("int8", 80, 64),
    "kv_write/int8/d128/t8192": _kv_write("int8", 128, 8192),
    "kv_write/int8/d80/t8192": _kv_write("int8", 80, 8192),
    "block_copy/bfloat16/d128": _block_copy("bfloat16", 128),
    "block_copy/int8/d128": _block_copy("int8", 128),
    "prefill_attention/bfloat16/d128/g4": _prefill("bfloat16", 128),
    "prefill_attention/bfloat16/d128/g4/p16": _prefill("bfloat16", 128, block_size=16),
    "prefill_attention/bfloat16/d128/g4/window": _prefill("bfloat16", 128, window=4096),
    "prefill_attention/bfloat16/d128/g4/soft_cap": _prefill("bfloat16", 128, soft_cap=50.0),
    "prefill_attention/bfloat16/d128/g4/few": _prefill("bfloat16", 128, chunks=(256, 64)),
    "prefill_attention/bfloat16/d64/g4": _prefill("bfloat16", 64),
    "prefill_attention/bfloat16/d80/g1": _prefill("bfloat16", 80, group=1),
    "prefill_attention/bfloat16/d96/g3": _prefill("bfloat16", 96, group=3),
    "prefill_attention/bfloat16/d256/g2": _prefill("bfloat16", 256, group=2),
    "prefill_attention/bfloat16/d256/g2/few": _prefill("bfloat16", 256, group=2, chunks=(256, 64)),
    "prefill_attention/float16/d128/g4": _prefill("float16", 128, dtype="float16"),
    "prefill_attention/int8/d128/g4": _prefill("int8", 128),
    "prefill_attention/int8/d128/g4/p16": _prefill("int8", 128, block_size=16),
    "prefill_attention/int8/d128/g4/window": _prefill("int8", 128, window=4096),
    "prefill_attention/int8/d128/g4/few": _prefill("int8", 128, chunks=(256, 64)),
    "prefill_attention/int8/d64/g4": _prefill("int8", 64),
    "prefill_attention/int8/d256/g2": _prefill("int8", 256, group=2),
    "prefill_attention/float32/d64/g4": _prefill("float32", 64, dtype="float32"),
    "prefill_attention/float32/d128/g4": _prefill("float32", 128, dtype="float32"),
}
# Left out where JAX is too old for them (mosaic_support.unavailable() says so).
MOSAIC_CONFIGS: dict[str, KernelConfig] = {
    **{
        f"mosaic/decode/{kv_format}/d{head_dim}/g{group}/p{block_size}": _decode(
            kv_format, head_dim, group, block_size, implementation="pallas_mosaic_gpu"
        )
        for kv_format in ("bfloat16", "int8")
        for head_dim, group, block_size in ((128, 4, 64), (128, 4, 16), (128, 16, 64), (64, 4, 64), (256, 4, 64))
        if kv_format != "int8" or block_size >= TILE
    },
    "mosaic/decode/merge/d128": _decode("bfloat16", 128, 4, merge=True, implementation="pallas_mosaic_gpu"),
    **{
        f"mosaic/block_copy/{kv_format}/d128": _block_copy(kv_format, 128, implementation="pallas_mosaic_gpu")
        for kv_format in ("bfloat16", "int8")
    },
}
if mosaic_support.unavailable() is None:
    CONFIGS |= MOSAIC_CONFIGS
