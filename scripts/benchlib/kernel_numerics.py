"""One operation's kernel against its reference, over the shared cases and those below. A process of gpu_check.py.

    python -m benchlib.kernel_numerics --op=decode_attention --implementation=pallas_triton

The reference runs on the CPU in any case, where float32 products are float32.
"""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchlib.partial_report import save
from jaxkv import measurement
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.block_copy import block_copy
from pallas_kernels.block_copy import cases as copy_cases
from pallas_kernels.cascade import cascade_attention
from pallas_kernels.cascade import cases as cascade_cases
from pallas_kernels.decode_attention import cases as decode_cases
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.kv_write import cases as write_cases
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layer_kv import LayerKV
from pallas_kernels.prefill_attention import cases as prefill_cases
from pallas_kernels.prefill_attention import prefill_attention

OPS = ("kv_write", "block_copy", "decode_attention", "prefill_attention", "cascade")
_OP = flags.DEFINE_enum("op", "decode_attention", OPS, "Which operation.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", "pallas_triton", "Whose kernels.")
_SMALL = flags.DEFINE_bool("small", False, "Two small cases: for the interpreter.")

# Blocks of fewer tokens than a tensor core's step have no GPU kernel.
_LEAST_BLOCK = 16
# Largest absolute error of an output, by the query's dtype: twice what XLA's path shows on a CPU (tests/support/tolerance.py)
# and the GPU's approximate 2^x in float32. int8 products are taken in float16.
_OUT = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 8e-3}
_OUT_INT8 = 4e-3
_LSE, _LSE_INT8 = 1e-4, 2e-3
# Stored int8 numbers: another rounding of a quotient may move one to its neighbour, but few.
_CODE_STEPS, _CODES_MOVED = 1, 1e-3


class Compared(NamedTuple):
    """Largest error of a case, relative to what is allowed: right up to 1."""

    error: float
    what: str


def covering(case: type, **fields: Any) -> list:
    """Cases in which every two values of stored format, head_dim and block_size meet."""
    formats = ("float32", "bfloat16", "float16", "int8")
    head_dims, block_sizes = (64, 80, 96, 128, 256), (16, 32, 64, 128)
    heads = itertools.cycle(((8, 2), (4, 4), (9, 3), (5, 1), (16, 1), (7, 1)))
    cases = []
    for (i, head_dim), (j, block_size) in itertools.product(enumerate(head_dims), enumerate(block_sizes)):
        stored = formats[(i + j) % 4]
        num_heads, num_kv_heads = next(heads)
        made = {name: make(block_size) for name, make in fields.items()}
        made |= {"dtype": "bfloat16" if stored == "int8" else stored, "kv_format": stored}
        cases.append(
            case(block_size=block_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **made)
        )
    return cases


def cases_of(op: str, small: bool) -> Sequence[Any]:
    """The shared cases that have a kernel, and more of them; two small ones where each takes seconds."""
    decode, prefill = decode_cases.DecodeCase, prefill_cases.PrefillCase
    if op == "kv_write":
        cases = write_cases.KV_WRITE_CASES
    elif op == "block_copy":
        cases = copy_cases.BLOCK_COPY_CASES
    elif op == "decode_attention":
        if small:
            lens = {"seq_lens": (0, 1, 17, 70, 0)}
            return decode(**lens), decode(dtype="bfloat16", kv_format="int8", **lens)
        long = [
            decode(64, 32, 8, 128, "bfloat16", seq_lens=(9000, 0, 1, 2049, 4000), kv_format=f) for f in (None, "int8")
        ]
        cases = [*decode_cases.DECODE_CASES, *covering(decode, seq_lens=decode_cases.edge_lengths), *long]
    elif op == "prefill_attention":
        if small:
            chunks = ((0, 5), (0, 0), (17, 9))
            return prefill(chunks), prefill(chunks, dtype="bfloat16", kv_format="int8")
        long = [prefill(((2000, 300), (0, 1025)), 64, 32, 8, 128, "bfloat16", kv_format=f) for f in (None, "int8")]
        cases = [*prefill_cases.PREFILL_CASES, *covering(prefill, chunks=prefill_cases.edge_chunks), *long]
    else:
        cases = cascade_cases.CASCADE_CASES
    cases = [case for case in cases if getattr(case, "block_size", _LEAST_BLOCK) >= _LEAST_BLOCK]
    return cases[:2] if small else cases


def compare(op: str, case: Any, implementation: str) -> Compared:
    """One case, computed both ways."""
    call, arguments, judge = _prepared(op, case)
    arguments = jax.tree.map(np.asarray, arguments)
    actual = jax.jit(functools.partial(call, implementation=implementation))(*arguments)
    actual = jax.tree.map(np.asarray, actual)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(functools.partial(call, implementation="reference"))(*arguments)
        expected = jax.tree.map(np.asarray, expected)
    return judge(actual, expected)


def _prepared(op: str, case: Any) -> tuple[Callable, tuple, Callable[[Any, Any], Compared]]:
    """The call, its arrays, and who compares its results."""
    attention = functools.partial(_compare_attention, case)
    if op == "kv_write":
        inputs = write_cases.kv_write_inputs(case)
        return kv_write, (inputs.kv, inputs.k, inputs.v, inputs.slots), _compare_pools
    if op == "block_copy":
        return block_copy, tuple(copy_cases.block_copy_inputs(case)), _compare_pools
    if op == "decode_attention":
        inputs = decode_cases.decode_inputs(case)
        rows = inputs.rows

        def decode(q, kv, table, lens, sinks, implementation):
            return decode_attention(q, kv, table, lens, case.options, sinks=sinks, implementation=implementation)

        return decode, (inputs.q, rows.kv, rows.block_table, inputs.seq_lens, inputs.sinks), attention
    if op == "prefill_attention":
        inputs = prefill_cases.prefill_inputs(case)
        arrays = (
            inputs.q,
            inputs.rows.kv,
            inputs.rows.block_table,
            inputs.cu_q_lens,
            inputs.context_lens,
            inputs.sinks,
        )

        def prefill(q, kv, table, cu_q_lens, context_lens, sinks, implementation):
            options = {"sinks": sinks, "implementation": implementation}
            return prefill_attention(q, kv, table, cu_q_lens, context_lens, case.options, **options)

        return prefill, arrays, attention
    inputs = cascade_cases.cascade_inputs(case)

    def cascade(q, kv, table, lens, groups, sinks, implementation):
        options = {"sinks": sinks, "num_splits": case.num_splits, "implementation": implementation}
        return cascade_attention(q, kv, table, lens, groups, case.options, **options)

    arrays = (inputs.q, inputs.rows.kv, inputs.rows.block_table, inputs.seq_lens, inputs.groups, inputs.sinks)
    return cascade, arrays, attention


def _compare_attention(case: Any, actual: AttentionOutput, expected: AttentionOutput) -> Compared:
    int8 = case.stored == "int8"
    out, lse = _OUT[case.dtype], _LSE
    if int8:
        out, lse = max(out, _OUT_INT8), _LSE_INT8
    if case.soft_cap:
        lse = max(lse, 2e-3)  # tanh is approximate too
    if not np.array_equal(np.isneginf(actual.lse), np.isneginf(expected.lse)):
        return Compared(np.inf, "rows without keys differ")
    seen = np.isfinite(expected.lse)
    by_out = _largest(actual.out, expected.out) / out
    by_lse = _largest(actual.lse[seen], expected.lse[seen]) / lse
    return Compared(by_out, "out") if not by_out <= by_lse else Compared(by_lse, "lse")


def _compare_pools(actual: LayerKV, expected: LayerKV) -> Compared:
    """Every block but the null block, in bits; stored int8 within a step."""
    worst = Compared(0.0, "equal")
    for name in ("k", "v", "k_scale", "v_scale"):
        a, b = getattr(actual, name), getattr(expected, name)
        if a is None or np.array_equal(a[1:].view(np.uint8), b[1:].view(np.uint8)):
            continue
        if a.dtype != np.int8:
            return Compared(np.inf, f"{name} differs")
        steps = np.abs(a[1:].astype(np.int32) - b[1:])
        error = max(steps.max() / _CODE_STEPS, np.mean(steps > 0) / _CODES_MOVED)
        worst = max(
            worst, Compared(float(error), f"{name}: {np.sum(steps > 0)} numbers moved, by {steps.max()} at most")
        )
    return worst


def _largest(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference; infinite where anything is not a number."""
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    return float(difference.max(initial=0)) if np.isfinite(difference).all() else np.inf


# ---- pools of more than 4 GiB

_FAR_HEADS, _FAR_DIM, _FAR_BLOCK = 8, 128, 64
# Keys of more than 4 GiB; one-byte arrays must end before 2^31 elements, where offsets into them are 32-bit numbers.
_FAR_BLOCKS = {"bfloat16": 34_000, "int8": 2**31 // (_FAR_HEADS * _FAR_DIM * _FAR_BLOCK) - 1}


def compare_far(op: str, kv_format: str, implementation: str) -> Compared:
    """The same rows at the far end of a pool: equal bits, wherever the blocks lie."""
    shape = {"block_size": _FAR_BLOCK, "num_heads": 32, "num_kv_heads": _FAR_HEADS, "head_dim": _FAR_DIM}
    shape |= {"dtype": "bfloat16", "kv_format": kv_format}
    if op == "decode_attention":
        case = decode_cases.DecodeCase(**shape)
    else:
        case = prefill_cases.PrefillCase(((0, 70), (130, 20)), **shape)
    call, (q, kv, table, *rest), _ = _prepared(op, case)
    attend = jax.jit(functools.partial(call, implementation=implementation))
    shift = _FAR_BLOCKS[kv_format] - kv.k.shape[0]

    @jax.jit
    def move(stored: jax.Array) -> jax.Array:
        far = jnp.zeros((_FAR_BLOCKS[kv_format], *stored.shape[1:]), stored.dtype)
        return jax.lax.dynamic_update_slice_in_dim(far, stored, shift, axis=0)

    near = attend(q, kv, table, *rest)
    far = attend(q, jax.tree.map(move, kv), table + shift, *rest)
    same = all(np.array_equal(a, b) for a, b in zip(*map(jax.device_get, (near, far)), strict=True))
    return Compared(0.0 if same else np.inf, "far and near blocks")


# ---- the program


def _measure(report: measurement.Report) -> None:
    op, implementation, small = _OP.value, _IMPLEMENTATION.value, _SMALL.value
    native = jax.default_backend() == "gpu"
    work: dict[str, Callable[[], Compared]] = {}
    for i, case in enumerate(cases_of(op, small)):
        work[f"{op} {i}: {case}"] = functools.partial(compare, op, case, implementation)
    if native and op in ("decode_attention", "prefill_attention"):
        for kv_format in _FAR_BLOCKS:
            work[f"{op} {kv_format} beyond 4 GiB"] = functools.partial(compare_far, op, kv_format, implementation)
    right, worst = 0, Compared(0.0, "")
    # Compiling is what takes time, and it does not hold the GIL.
    with concurrent.futures.ThreadPoolExecutor(8 if native else 1) as pool:
        futures = {name: pool.submit(function) for name, function in work.items()}
        for name, future in futures.items():
            try:
                compared = future.result()
            except Exception as error:  # one case must not hide the others
                report.skip(name, f"{type(error).__name__}: {str(error)[:500]}", engine=implementation)
                report.console.print(f"{name}: {type(error).__name__}", highlight=False, markup=False)
                continue
            worst = max(worst, compared)
            passed = compared.error <= 1
            right += passed
            if not passed:
                report.console.print(f"{name}: {compared}", highlight=False, markup=False)
                details = {"metric": "error", "unit": "of allowed", "engine": implementation, "where": compared.what}
                report.add(name, [min(compared.error, 1e30)], **details)
            save(report)
    report.add(
        f"{op} largest error", [min(worst.error, 1e30)], unit="of allowed", metric="error", engine=implementation
    )
    passed = report.add(f"{op} cases right", [right], unit="cases", metric="right", engine=implementation)
    total = report.add(f"{op} cases", [len(work)], unit="cases", metric="cases", engine=implementation)
    report.ratio(f"{op} cases right", passed, total, target=1.0)


if __name__ == "__main__":
    config = lambda: {"op": _OP.value, "implementation": _IMPLEMENTATION.value, "small": _SMALL.value}  # noqa: E731
    measurement.run("kernel_numerics", config, _measure)
