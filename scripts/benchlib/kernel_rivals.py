"""Other attention kernels, on the same shapes in the same run. The only file that may use JAX's private modules.

Each function makes one contender, with arrays of its own in the layout that the kernel asks for, or raises: a rival that
is not installed or refuses a shape is told with its reason.
"""

import importlib.util
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchlib.kernel_inputs import decode_inputs, random_array
from benchlib.kernel_timing import Contender, chained
from benchlib.roofline import CascadePoint, DecodePoint, Point, PrefillPoint, WritePoint
from jaxkv.measurement import AbsentError

Make = Callable[..., Contender]
"""(point, calls, num_sets, block_size) -> Contender."""


def rivals_of(point: Point, names: list[str]) -> dict[str, Make]:
    """Those of `names` that do what `point` asks for."""
    if isinstance(point, CascadePoint | WritePoint):
        return {}
    table = _DECODE if isinstance(point, DecodePoint) else _PREFILL
    return {name: table[name] for name in names if name in table}


def _jax_pallas(point: DecodePoint, calls: int, num_sets: int, block_size: int) -> Contender:
    """JAX's own Pallas paged attention: pages [K, N, P, D], splits fixed by the padded table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    scales = ("k_scales_pages", "v_scales_pages")

    def attend(q, pages, table, seq_lens):
        k, v, *rest = pages
        return paged_attention(q, k, v, table, seq_lens, **dict(zip(scales, rest)))

    sets = []
    for seed in range(num_sets):
        q, kv, table, seq_lens = decode_inputs(point, block_size, seed)
        k, v = (jnp.moveaxis(x, 1, 0) for x in (kv.k, kv.v.swapaxes(2, 3) if kv.v_format.is_scaled else kv.v))
        rest = [] if kv.k_scale is None else [jnp.moveaxis(x, 1, 0) for x in (kv.k_scale, kv.v_scale)]
        sets.append(([k, v, *rest], table, seq_lens))
    return Contender("jax pallas", chained(attend, q, sets, calls), calls)


def _cudnn_paged(point: DecodePoint, calls: int, num_sets: int, block_size: int) -> Contender:
    """cuDNN's paged attention through JAX's private binding: blocks [N, K, P, D], no null block, no int8."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    if point.kv_format == "int8":
        raise AbsentError("cuDNN's paged attention has no int8")

    def attend(q, k, v, table, seq_lens):
        ones = jnp.ones_like(seq_lens)
        out = paged_attention(
            q[:, :, None],
            k,
            v,
            ones,
            seq_lens,
            table,
            table,
            scale=point.heads.head_dim**-0.5,
            mask_type=MaskType.PADDING,
            qkv_layout="BNTH",
        )
        return (out[0] if isinstance(out, tuple | list) else out)[:, :, 0]

    sets = []
    for seed in range(num_sets):
        q, kv, table, seq_lens = decode_inputs(point, block_size, seed)
        sets.append((kv.k[1:], kv.v[1:], (table - 1)[:, None, :, None], seq_lens))
    return Contender("cudnn paged", chained(attend, q, sets, calls), calls)


def _cudnn_dense(point: PrefillPoint, calls: int, num_sets: int, block_size: int) -> Contender:
    """cuDNN's fused attention through jax.nn, on keys that lie in one piece."""
    if point.context or point.kv_format == "int8":
        raise AbsentError("measured without a context and without quantisation only")
    heads, keys = point.heads, jax.random.split(jax.random.key(0), 3)

    def tokens(i: int, num_heads: int) -> jax.Array:
        return random_array(keys[i], (1, point.query_len, num_heads, heads.head_dim), "bfloat16")

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    sets = [(tokens(1, heads.num_kv_heads), tokens(2, heads.num_kv_heads))]
    return Contender("cudnn dense", chained(attend, tokens(0, heads.num_heads), sets, calls), calls)


def _torch_sets(point: DecodePoint | PrefillPoint, num_sets: int):
    """torch, queries [B, H, T, D] and sets of keys and values [B, K, L, D] on the GPU."""
    if importlib.util.find_spec("torch") is None:
        raise AbsentError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise AbsentError("torch sees no GPU")
    if point.kv_format == "int8":
        raise AbsentError("torch's attention has no int8 keys")
    heads, decode = point.heads, isinstance(point, DecodePoint)
    if not decode and point.context:
        raise AbsentError("measured without a context only")
    batch, queries, length = (point.batch, 1, point.context) if decode else (1, point.query_len, point.query_len)

    def random(num_heads: int, tokens: int):
        return torch.randn(batch, num_heads, tokens, heads.head_dim, device="cuda", dtype=torch.bfloat16)

    sets = [tuple(random(heads.num_kv_heads, length) for _ in range(2)) for _ in range(num_sets)]
    return torch, random(heads.num_heads, queries), sets


def _torch_contender(name: str, torch, attend, q, sets, calls: int) -> Contender:
    """Timed with events. Calls follow each other in a stream, which is dependence enough."""

    def run() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode():
            begin.record()
            for i in range(calls):
                attend(q, *sets[i % len(sets)])
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    return Contender(name, run, calls)


def _torch_sdpa(point: DecodePoint | PrefillPoint, calls: int, num_sets: int, block_size: int) -> Contender:
    torch, q, sets = _torch_sets(point, num_sets)
    causal = isinstance(point, PrefillPoint)

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return _torch_contender("torch sdpa", torch, attend, q, sets, calls)


def _torch_flex(point: DecodePoint, calls: int, num_sets: int, block_size: int) -> Contender:
    """FlexAttention, compiled; its decoding kernel splits the keys."""
    torch, q, sets = _torch_sets(point, num_sets)
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return _torch_contender("torch flex", torch, lambda q, k, v: compiled(q, k, v, enable_gqa=True), q, sets, calls)


_DECODE = {
    "jax_pallas": _jax_pallas,
    "cudnn_paged": _cudnn_paged,
    "torch_sdpa": _torch_sdpa,
    "torch_flex": _torch_flex,
}
_PREFILL = {"cudnn_dense": _cudnn_dense, "torch_sdpa": _torch_sdpa}
ALL = tuple(dict.fromkeys((*_DECODE, *_PREFILL)))
# torch_flex compiles for half a minute a shape, so it has to be asked for.
DEFAULT = tuple(name for name in ALL if name != "torch_flex")
