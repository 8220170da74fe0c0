"""prefill_attention on Pallas Triton: natively on a GPU, else interpreted, against the reference; and lowered for GPUs."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels.attention_options import AttentionOptions
from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.layer_kv import empty_layer_kv
from pallas_kernels.prefill_attention import pallas_triton, prefill_attention
from pallas_kernels.prefill_attention.cases import (
    PREFILL_CASES,
    PrefillCase,
    PrefillInputs,
    edge_chunks,
    prefill_inputs,
)
from tests.support import attention_oracle
from tests.support.cuda_lowering import lower_for_cuda
from tests.support.kv_mutants import exchanged
from tests.support.prefill_calls import PALLAS, assert_close, cut, run

LONG = ((0, 200), (40, 150))
CASES = (
    *[case for case in PREFILL_CASES if case.block_size >= 16][::2],
    # What the drawn ones miss: blocks smaller than a tile in every format, odd groups, windows with masks at both ends.
    PrefillCase(edge_chunks(16), 16, 9, 3, 64, "bfloat16", 17),
    PrefillCase(edge_chunks(16), 16, 32, 2, 128, "bfloat16", 100, kv_format="int8", scale=0.2),
    PrefillCase(edge_chunks(32), 32, 7, 1, 80, "float16", kv_format="int8", soft_cap=30.0, sinks=True),
    PrefillCase(LONG, 128, 6, 2, 256, "bfloat16", 64),
    # A few tokens a sequence: the small tile.
    PrefillCase(((127, 2), (0, 3), (300, 1), (63, 1), (64, 4), (5, 0)), 64, 8, 4, 128, "bfloat16", num_padding=2),
    PrefillCase(((127, 2), (0, 3), (300, 1), (63, 1), (64, 4), (5, 0)), 16, 4, 2, 96, "bfloat16", 64, 2, "int8"),
)


class PrefillOnPallas(parameterized.TestCase):
    @parameterized.named_parameters((f"{i}-{case}", case) for i, case in enumerate(CASES))
    def test_equals_reference_and_sees_no_poison(self, case):
        inputs = prefill_inputs(case)
        actual = run(case, inputs, PALLAS)
        chex.assert_tree_all_finite(actual.out)
        assert_close(case, actual, run(case, inputs, "reference"))
        end = inputs.cu_q_lens[-1]
        assert len(actual.out) == end + case.num_padding > end
        assert (actual.out[end:] == 0).all() and (actual.lse[end:] == -np.inf).all()
        assert np.isfinite(actual.lse[:end]).all() and (np.abs(actual.out[:end]).max(axis=(1, 2)) > 0).all()


def plain(case: PrefillCase, inputs: PrefillInputs) -> np.ndarray:
    """float32 [T, H, D]: attention written down plainly in the type of the queries, one token and head at a time; softmax
    and sums in float32."""
    round_to = functools.partial(jnp.asarray, dtype=case.dtype)
    out, group = np.zeros(inputs.q.shape, np.float32), case.num_heads // case.num_kv_heads
    for seq, context in enumerate(inputs.context_lens):
        k, v = (np.asarray(round_to(x), np.float32) for x in (inputs.rows.k[seq], inputs.rows.v[seq]))
        for i, token in enumerate(range(*inputs.cu_q_lens[seq : seq + 2])):
            for head in range(case.num_heads):
                keys, values = (x[: context + i + 1, head // group] for x in (k, v))
                logits = keys @ np.asarray(inputs.q[token, head], np.float32) * np.float32(case.options.scale)
                weights = np.exp(logits - logits.max())
                out[token, head] = np.asarray(round_to(weights), np.float32) @ values / weights.sum()
    return np.asarray(round_to(out), np.float32)


@pytest.mark.parametrize(
    ("dtype", "kv_format", "most"),
    [("bfloat16", None, 1e-2), ("float16", None, 2e-3), ("bfloat16", "int8", 1e-2), ("float16", "int8", 2e-3)],
)
def test_error_is_at_most_twice_that_of_plain_attention(dtype, kv_format, most):
    """To float64, and below a fixed cap where outputs are below 1 (an unit in the last place grows with the output)."""
    case = PrefillCase(((130, 60), (300, 3)), 64, 8, 2, 128, dtype, kv_format=kv_format)
    inputs = prefill_inputs(case)
    q, k, v = inputs.q, inputs.rows.k, inputs.rows.v
    exact, _ = attention_oracle.prefill(q, k, v, inputs.cu_q_lens, inputs.context_lens, case.options)
    actual = run(case, inputs, PALLAS).out
    assert np.abs(actual - exact).max() <= 2 * np.abs(plain(case, inputs) - exact).max() + 1e-5
    assert np.abs(actual - exact)[np.abs(exact) < 1].max() <= most


MUTANT_CASES = (
    PrefillCase(edge_chunks(32), 32, dtype="bfloat16", window=17),
    PrefillCase(edge_chunks(16), kv_format="int8"),
)


@pytest.mark.parametrize("case", MUTANT_CASES, ids=str)
def test_mutants_fail(case):
    """The tolerance can fail: each wrong computation is far outside of it."""
    inputs = prefill_inputs(case)
    expected = run(case, inputs, "reference")
    table = inputs.rows.block_table.copy()
    table[8, 160 // case.block_size] = table[8, 0]
    window = dataclasses.replace(case, window=16 if case.window else 168)
    mutants = {
        "wrong block": (case, {"block_table": table}),
        "k for v": (case, {"kv": exchanged(inputs.rows.kv, "k")}),
        "v for k": (case, {"kv": exchanged(inputs.rows.kv, "v")}),
        "context off by one": (case, {"context_lens": np.maximum(inputs.context_lens - 1, 0)}),
        "window off by one": (window, {}),
    }
    assert_close(case, run(case, inputs, PALLAS), expected)
    for name, (mutant, changed) in mutants.items():
        actual = run(mutant, inputs, PALLAS, **changed)
        with pytest.raises(AssertionError):
            assert_close(case, actual, expected)
            pytest.fail(f"{name} was not noticed")


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase(LONG, 64),
        PrefillCase(LONG, 16, 9, 3, 80, "bfloat16", 64),
        PrefillCase(LONG, kv_format="int8", dtype="bfloat16"),
    ],
    ids=str,
)
def test_chunks_do_not_change_a_token(case):
    """One call with whole chunks, and calls with pieces of them in any company, give each token the same bits on a GPU.

    XLA:CPU sums the rows of the loop with masks in another order than those of the loop without (1.8e-7 in float32), so
    that interpreted only a window, where no tile goes without, gives the same bits.
    """
    inputs = prefill_inputs(case)
    whole = run(case, inputs, PALLAS)
    for first in (1, 63, 64, 65, 149):
        for piece in (slice(0, first), slice(first, None)):
            part, tokens = cut(inputs, piece)
            actual = jax.tree.map(lambda x: x[: len(tokens)], run(case, part, PALLAS))
            expected = jax.tree.map(lambda x: x[tokens], whole)
            if case.window is not None or jax.default_backend() == "gpu":
                chex.assert_trees_all_equal(actual, expected)
            assert_close(case, actual, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_is_written_however_the_call_is_cut(dtype):
    """Thirty random cuts of one call: each chunk and the padding start at places that tiles do not know."""
    case = PrefillCase(((0, 90), (0, 90), (0, 90)), num_heads=3, num_kv_heads=1, dtype=dtype, num_padding=0)
    inputs = prefill_inputs(case)
    rng = np.random.default_rng(0)
    for _ in range(30):
        ends = np.sort(rng.choice([0, 1, 41, 42, 43, 128, *rng.integers(0, 270, 6)], 3))
        lens = np.diff(ends, prepend=0).clip(max=90)
        cu_q_lens = np.cumsum([0, *lens]).astype(np.int32)
        context_lens = rng.integers(0, 91 - lens).astype(np.int32)
        changed = {"cu_q_lens": cu_q_lens, "context_lens": context_lens}
        assert_close(case, run(case, inputs, PALLAS, **changed), run(case, inputs, "reference", **changed))


@pytest.mark.parametrize("kv_format", ["bfloat16", "int8"])
def test_with_the_context_as_the_keys_nothing_of_the_chunk_is_seen(kv_format):
    """Every query of a chunk then sees the same keys as a decode row of the context's length, with its own window."""
    case = PrefillCase(((37, 3), (0, 4), (200, 40)), 64, dtype="bfloat16", kv_format=kv_format)
    inputs = prefill_inputs(case)
    actual = run(case, inputs, PALLAS, kv_lens=inputs.context_lens)
    row = np.repeat([0, 1, 2], [3, 4, 40])
    decoded = decode_attention(
        inputs.q[:47], inputs.rows.kv, inputs.rows.block_table[row], inputs.context_lens[row], case.options
    )
    decoded = AttentionOutput(np.asarray(decoded.out, np.float32), np.asarray(decoded.lse))
    assert_close(case, jax.tree.map(lambda x: x[:47], actual), decoded)
    assert (actual.out[3:7] == 0).all() and (actual.lse[3:7] == -np.inf).all()


def test_no_sequence_at_all_gives_zeros():
    case = PrefillCase(((0, 0), (0, 0)), num_padding=7)
    output = run(case, prefill_inputs(case), PALLAS)
    assert output.out.shape == (7, 8, 64) and (output.out == 0).all() and (output.lse == -np.inf).all()


def test_scales_that_are_not_positive_are_refused():
    case = PrefillCase(((0, 5),), scale=-1.0)
    with pytest.raises(ValueError, match="positive scale"):
        run(case, prefill_inputs(case), PALLAS)


@pytest.mark.parametrize("target", ["a100", "h200"])
@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize(
    ("dtype", "kv_format", "block_size", "heads"),
    [
        ("bfloat16", "bfloat16", 64, 32),
        ("bfloat16", "int8", 16, 40),
        ("float16", "int8", 128, 8),
        ("float32", "float32", 32, 24),
    ],
)
def test_lowers_for_gpus_on_any_machine(target, head_dim, dtype, kv_format, block_size, heads):
    """What the interpreter takes and Triton does not."""
    options = AttentionOptions(head_dim**-0.5, window=4096, soft_cap=50.0)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    kv = jax.eval_shape(functools.partial(empty_layer_kv, 64, 8, block_size, head_dim, kv_format))
    q = jax.ShapeDtypeStruct((512, heads, head_dim), dtype)
    attend = functools.partial(prefill_attention, options=options, implementation="pallas_triton")
    text = lower_for_cuda(attend, q, kv, i32((4, 32)), i32((5,)), i32((4,)), target=target)
    assert text.count("__gpu$xla.gpu.triton") == 1 and 'name = "prefill_attention"' in text


def test_hopper_gets_the_tile_for_its_own_tensor_cores():
    """64 rows and more a warpgroup, also when compiling for a GPU that is not there."""

    q = jax.ShapeDtypeStruct((8192, 32, 128), jnp.bfloat16)
    kv = jax.eval_shape(functools.partial(empty_layer_kv, 64, 8, 64, 128, "bfloat16"))

    def tile_of(target: str) -> pallas_triton.Tile:
        chosen = []

        def attend(q):
            chosen.append(pallas_triton.choose_tile(q, kv, num_seqs=8))
            return q

        lower_for_cuda(attend, q, target=target)
        return chosen[0]

    assert tile_of("h200") == tile_of("h100") == pallas_triton.Tile(128, 64, 8, 3)
    assert tile_of("a100") == pallas_triton.Tile(128, 32, 8, 3)
