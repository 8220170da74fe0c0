"""One query token a row against its block table."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput, add_sinks
from pallas_kernels.decode_attention import pallas_triton, reference, xla
from pallas_kernels.decode_attention import plan as planning
from pallas_kernels.decode_attention.plan import SplitPlan
from pallas_kernels.layer_kv import LayerKV


def _pallas_mosaic_gpu(*arrays, interpret: bool = False, **planned) -> AttentionOutput:
    """Imported when it is called: see mosaic_support."""
    from pallas_kernels.decode_attention import pallas_mosaic_gpu

    return pallas_mosaic_gpu.decode_attention(*arrays, interpret=interpret, **planned)


_IMPLEMENTATIONS = {
    "pallas_triton": pallas_triton.decode_attention,
    "pallas_triton_interpreted": functools.partial(pallas_triton.decode_attention, interpret=True),
    "pallas_mosaic_gpu": _pallas_mosaic_gpu,
    "pallas_mosaic_gpu_interpreted": functools.partial(_pallas_mosaic_gpu, interpret=True),
    "xla": xla.decode_attention,
    "reference": reference.decode_attention,
}


def plan_decode(
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    window: int | None = None,
    kv_starts: jax.Array | None = None,
    chunk: int | None = None,
    implementation: str = "xla",
) -> SplitPlan | None:
    """What calls of `decode_attention` with these arguments share: all layers of a step with the same window. None for
    implementations that have no use for it. See plan.plan_decode for `chunk`."""
    if not implementation.startswith("pallas_"):
        return None
    capacity = block_table.shape[1] * kv.block_size
    return planning.plan_decode(
        seq_lens, num_kv_heads=kv.num_kv_heads, capacity=capacity, window=window, kv_starts=kv_starts, chunk=chunk
    )


def decode_attention(
    q: jax.Array,
    kv: LayerKV,
    block_table: jax.Array,
    seq_lens: jax.Array,
    options: AttentionOptions,
    *,
    kv_starts: jax.Array | None = None,
    sinks: jax.Array | None = None,
    plan: SplitPlan | None = None,
    implementation: str = "xla",
) -> AttentionOutput:
    """Attend from each row's newest token to all tokens of the row, itself included.

    Args:
      q: [S, H, D] rotated queries; query head h reads KV head h // G.
      kv: the layer's blocks, with the newest token already written.
      block_table: i32[S, M] block ids in order; entries beyond the row's length may name any block.
      seq_lens: i32[S] tokens in cache, the newest included; 0 for an idle row.
      kv_starts: i32[S] first position that is seen, where the tokens before it are somebody else's part; None: all of them.
      sinks: f32[H] logits that take part in the softmax without a value (see attention_output.add_sinks).
      plan: what `plan_decode` made of these seq_lens, kv_starts and window, or None to have it made here.
    """
    num_rows, num_heads, head_dim = q.shape
    if head_dim != kv.head_dim or num_heads % kv.num_kv_heads:
        raise ValueError(f"Expected {q.shape=} to fit {kv.k.shape=} (H a multiple of K, equal D)")
    if block_table.shape[0] != num_rows or seq_lens.shape != (num_rows,):
        raise ValueError(f"Expected {block_table.shape=} and {seq_lens.shape=} to have the rows of {q.shape=}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"Expected {sinks.shape=} to have one logit a head of {q.shape=}")
    if kv_starts is not None and kv_starts.shape != (num_rows,):
        raise ValueError(f"Expected {kv_starts.shape=} to have the rows of {q.shape=}")
    planned = {} if plan is None else {"plan": plan}
    attend = _IMPLEMENTATIONS[dispatch.backend("decode_attention", implementation)]
    output = attend(q, kv, block_table, seq_lens, options, kv_starts, **planned)
    return add_sinks(output, sinks)
