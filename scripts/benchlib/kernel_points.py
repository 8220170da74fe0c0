"""Measures one point: our kernel beside its rivals, and whether what it computes is right."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchlib import kernel_inputs
from benchlib.kernel_rivals import rivals_of
from benchlib.kernel_timing import Contender, chained, interleaved, num_calls, num_sets
from benchlib.roofline import CascadePoint, DecodePoint, Point, PrefillPoint, Rates, WritePoint
from jaxkv.measurement import AbsentError
from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.cascade import RowGroups, cascade_attention
from pallas_kernels.decode_attention import decode_attention, plan_decode
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import prefill_attention

# Share of the device's memory that a point's inputs may take; rivals keep a second copy in a layout of their own.
_MOST_MEMORY, _MOST_WITH_RIVALS = 0.85, 0.4
# Relative error against XLA's result, in the norm: bfloat16 products give 2e-3 to 1e-2.
AGREES = 2e-2


@dataclasses.dataclass(frozen=True)
class How:
    """What is the same at every point.

    Attributes:
      memory: bytes of the device that may be used.
      loop_seconds, cold_bytes: see kernel_timing.LOOP_SECONDS and COLD_BYTES.
      check: compare with the XLA implementation.
    """

    implementation: str
    rivals: tuple[str, ...]
    rounds: int
    block_size: int
    rates: Rates
    memory: int
    loop_seconds: float
    cold_bytes: int
    check: bool = True


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one point.

    Attributes:
      seconds: a call's, each round's, by contender; ours is named as the implementation, a cascade's rival is "flat".
      absent: why others were not measured.
      error: relative, of our result against XLA's; None if it was not compared.
    """

    seconds: dict[str, list[float]]
    absent: dict[str, str]
    error: float | None


def too_large(point: Point, how: How) -> str | None:
    """Why a point cannot be measured here; None if it can."""
    needed = _input_bytes(point) * _sets_of(point, how)
    if needed > _MOST_MEMORY * how.memory:
        return f"needs {needed / 1e9:.1f} GB of K/V, {_MOST_MEMORY * how.memory / 1e9:.1f} GB may be used"
    one_array = _input_bytes(point) // 2
    if point.kv_format == "int8" and one_array >= 2**31:
        return f"{one_array / 2**31:.1f} times 2^31 one-byte keys: one array may have fewer than 2^31"
    return None


def measure(point: Point, how: How) -> Measured:
    """Our kernel, its rivals, in turns. Ours may raise; rivals that fail are told as absent."""
    sets = _sets_of(point, how)
    calls = num_calls(point.predict(how.rates), sets, how.loop_seconds)
    contenders, error = _ours(point, how, calls, sets)
    absent = {}
    for name, make in rivals_of(point, list(how.rivals)).items():
        if _input_bytes(point) * sets > _MOST_WITH_RIVALS * how.memory:
            absent[name] = "its own copy of the K/V does not fit beside ours"
            continue
        try:
            rival = make(point, calls, sets, how.block_size)
            rival.run()
            contenders.append(rival)
        except AbsentError as reason:
            absent[name] = str(reason)
        except Exception as failure:  # somebody else's kernel: whatever it says is told
            absent[name] = first_line(failure)
    return Measured(interleaved(contenders, how.rounds), absent, error)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def _ours(point: Point, how: How, calls: int, num: int) -> tuple[list[Contender], float | None]:
    make = {
        DecodePoint: _decode,
        PrefillPoint: _prefill,
        CascadePoint: _cascade,
        WritePoint: _write,
    }[type(point)]
    return make(point, how, calls, num)


def _decode(point: DecodePoint, how: How, calls: int, num: int) -> tuple[list[Contender], float | None]:
    made = [kernel_inputs.decode_inputs(point, how.block_size, seed) for seed in range(num)]
    q, options = made[0][0], _options(point)
    sets = [(kv, table, lens, _plan(how, kv, table, lens)) for _, kv, table, lens in made]

    def attend(q, kv, table, lens, plan=None, implementation=how.implementation):
        return decode_attention(q, kv, table, lens, options, plan=plan, implementation=implementation).out

    run = chained(attend, q, sets, calls)
    return [Contender(how.implementation, run, calls)], _error(attend, how, q, *sets[0][:3])


def _plan(how: How, kv: LayerKV, table: jax.Array, lens: jax.Array, kv_starts: jax.Array | None = None):
    """Made outside of the loop, as the engine makes it once a step for all layers."""
    make = functools.partial(plan_decode, implementation=how.implementation)
    return jax.jit(make)(kv, table, lens, kv_starts=kv_starts)


def _prefill(point: PrefillPoint, how: How, calls: int, num: int) -> tuple[list[Contender], float | None]:
    q, *operands = kernel_inputs.prefill_inputs(point, how.block_size)
    options = _options(point)

    def attend(q, kv, table, cu_q_lens, context_lens, implementation=how.implementation):
        return prefill_attention(q, kv, table, cu_q_lens, context_lens, options, implementation=implementation).out

    run = chained(attend, q, [tuple(operands)], calls)
    return [Contender(how.implementation, run, calls)], _error(attend, how, q, *operands)


def _cascade(point: CascadePoint, how: How, calls: int, num: int) -> tuple[list[Contender], float | None]:
    made = [kernel_inputs.cascade_inputs(point, how.block_size, seed) for seed in range(num)]
    q, options = made[0][0], _options(point)
    groups = RowGroups(jnp.asarray([0, point.batch], jnp.int32), jnp.asarray([point.prefix], jnp.int32))
    starts = groups.kv_starts(point.batch)
    flat_sets = [(kv, table, lens, _plan(how, kv, table, lens)) for _, kv, table, lens in made]
    shared_sets = [(kv, table, lens, _plan(how, kv, table, lens, starts)) for _, kv, table, lens in made]

    def flat(q, kv, table, lens, plan):
        return decode_attention(q, kv, table, lens, options, plan=plan, implementation=how.implementation).out

    def shared(q, kv, table, lens, plan=None, implementation=how.implementation):
        return cascade_attention(q, kv, table, lens, groups, options, plan=plan, implementation=implementation).out

    contenders = [
        Contender(how.implementation, chained(shared, q, shared_sets, calls), calls),
        Contender("flat", chained(flat, q, flat_sets, calls), calls),
    ]
    return contenders, _error(shared, how, q, *shared_sets[0][:3])


def _write(point: WritePoint, how: How, calls: int, num: int) -> tuple[list[Contender], float | None]:
    kv, k, v, slots = kernel_inputs.write_inputs(point, how.block_size)

    def write(kv, k, v, slots, implementation=how.implementation):
        return kv_write(kv, k, v, slots, implementation=implementation)

    error = None
    if how.check:  # to the bit: in the norm of a whole pool a wrong token would not show
        ours, xla = (
            jax.jit(functools.partial(write, implementation=i))(kv, k, v, slots) for i in (how.implementation, "xla")
        )
        same = [bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xla), strict=True)]
        error = 0.0 if all(same) else math.inf
    run = chained(write, kv, [(k, v, slots)], calls, in_place=True)
    return [Contender(how.implementation, run, calls)], error


def _error(call: Callable, how: How, *operands) -> float | None:
    """Of `call` against itself on the XLA implementation: norm of the difference over the norm; NaN never passes."""
    if not how.check:
        return None
    ours, xla = (
        np.asarray(jax.jit(functools.partial(call, implementation=name))(*operands)).astype(np.float64)
        for name in (how.implementation, "xla")
    )
    return float(np.linalg.norm(ours - xla) / np.linalg.norm(xla))


def _options(point: Point) -> AttentionOptions:
    return AttentionOptions(point.heads.head_dim**-0.5)


def _sets_of(point: Point, how: How) -> int:
    """Prefill is bound by products and kv_write goes on where it ended: one set serves."""
    return num_sets(_input_bytes(point), how.cold_bytes) if isinstance(point, DecodePoint | CascadePoint) else 1


def _input_bytes(point: Point) -> int:
    if isinstance(point, DecodePoint):
        tokens = point.batch * point.context
    elif isinstance(point, CascadePoint):
        tokens = point.prefix + point.batch * point.suffix
    elif isinstance(point, PrefillPoint):
        tokens = point.context + point.query_len
    else:
        tokens = point.num_tokens
    return kernel_inputs.pool_bytes(point.heads, tokens, point.kv_format)
