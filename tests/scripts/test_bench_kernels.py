"""scripts/bench_kernels.py: what it predicts, and that it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from benchlib import kernel_timing
from benchlib.roofline import H200, LLAMA_2_7B, LLAMA_3_8B, CascadePoint, DecodePoint, Heads, PrefillPoint, WritePoint

ROOT = Path(__file__).parents[2]


def bench_kernels(*arguments):
    """(exit code, the JSON document or None, stderr)"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    command = [sys.executable, str(ROOT / "scripts/bench_kernels.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done.stderr


# Microseconds, by hand from the formula's own statement: 8 us and the bytes at 0.9 (int8: 0.8) of 4.3 TB/s.
@pytest.mark.parametrize(
    ("heads", "batch", "context", "bfloat16", "int8"),
    [
        (LLAMA_3_8B, 1, 2048, 10, 9),
        (LLAMA_3_8B, 1, 32768, 43, 28),
        (LLAMA_3_8B, 8, 32768, 288, 169),
        (LLAMA_3_8B, 64, 8192, 568, 330),
        (LLAMA_3_8B, 256, 32768, 8958, 5161),
        (LLAMA_2_7B, 8, 8192, 286, 167),
        (LLAMA_2_7B, 64, 2048, 564, 327),
        (Heads("Llama-3-70B, one of 8 shards", 8, 1), 64, 8192, 79, 49),
    ],
)
def test_decode_predictions(heads, batch, context, bfloat16, int8):
    for kv_format, expected in (("bfloat16", bfloat16), ("int8", int8)):
        assert round(1e6 * DecodePoint(heads, batch, context, kv_format).predict(H200)) == expected


@pytest.mark.parametrize(
    ("kv_format", "batch", "prefix", "suffix", "flat", "cascade"),
    [
        ("bfloat16", 16, 2048, 512, 51, 23),
        ("bfloat16", 64, 2048, 512, 181, 53),
        ("bfloat16", 256, 8192, 512, 2366, 249),
        ("int8", 64, 2048, 512, 107, 38),
        ("int8", 64, 32768, 1024, 1316, 150),
    ],
)
def test_cascade_predictions(kv_format, batch, prefix, suffix, flat, cascade):
    point = CascadePoint(LLAMA_3_8B, batch, prefix, suffix, kv_format)
    assert round(1e6 * point.predict_flat(H200)) == flat and round(1e6 * point.predict(H200)) == cascade


def test_what_must_be_moved_and_computed():
    decode = DecodePoint(LLAMA_3_8B, 8, 32768, "bfloat16")
    assert decode.kv_bytes == 8 * 32768 * 4096 and decode.work.flops / decode.kv_bytes == 4
    assert DecodePoint(LLAMA_2_7B, 1, 1, "int8").kv_bytes == 8320
    prefill = PrefillPoint(LLAMA_3_8B, 2048, 8192)
    assert prefill.work.flops == pytest.approx(309.2e9, rel=1e-3)
    assert prefill.work.floor(H200) == prefill.work.flops / H200.matmul  # products bound it, and memory decode
    assert decode.work.floor(H200) == decode.work.num_bytes / H200.copy
    write = WritePoint(LLAMA_3_8B, 10, "int8")
    assert write.work.num_bytes == 10 * (4 * 8 * 128 + 2080)


def test_without_a_gpu_it_predicts_and_says_so():
    code, document, err = bench_kernels("--points=full")
    assert code == 0, err
    assert "Nothing was measured" in err and "no target is judged" in err and document["ratios"] == []
    results = {result["name"]: result for result in document["results"]}
    # 2 models x 4 batches x 3 contexts x 2 formats, and the others.
    assert len([name for name in results if name.startswith("decode ")]) == 48 and len(results) == 48 + 4 + 2 + 6
    assert all(result["predicted"] and result["engine"] == "formula" for result in document["results"])
    assert results["decode Llama-3-8B bfloat16 8 x 32k"]["value"] == pytest.approx(287.7, abs=0.05)


def test_a_rehearsal_measures_and_judges_nothing():
    code, document, err = bench_kernels("--rehearse", "--sections=decode", "--rivals=torch_sdpa", "--quick")
    assert code == 0, err
    assert "no target is judged" in err
    times = [result for result in document["results"] if result.get("metric") == "time"]
    assert len(times) == 2 and all(t["engine"] == "xla" and 0 < t["min"] <= t["max"] for t in times)
    assert all(t["gb_per_s"] == pytest.approx(t["bytes"] / t["value"] / 1e3) for t in times)
    absent = [result for result in document["results"] if result.get("skipped")]
    assert [result["engine"] for result in absent] == ["torch_sdpa"] * 2
    ratios = {ratio["name"]: ratio for ratio in document["ratios"]}
    assert (ratios.pop("points that agree with XLA")["value"], len(ratios)) == (1, 2)
    assert all(ratio["target"] is None for ratio in ratios.values())


def test_users_errors():
    for argument, code, text in (
        ("--sections=decod", 2, "sections has decod; there are decode"),
        ("--implementation=pallas_triton", 3, "pallas_triton cannot be timed: there is no GPU"),
    ):
        done = bench_kernels(argument)
        assert done[:2] == (code, None) and text in done[2]


def test_calls_are_whole_turns_over_the_input_sets():
    for sets in (1, 2, 3, 5, 24):
        for seconds in (1e-6, 4e-5, 3e-3, 1.0):
            calls = kernel_timing.num_calls(seconds, sets)
            assert calls % sets == 0 and calls >= kernel_timing.FEWEST_CALLS
            assert calls * seconds >= 0.99 * min(kernel_timing.LOOP_SECONDS, kernel_timing.MOST_CALLS * seconds)
    assert kernel_timing.num_sets(10**9) == 1 and kernel_timing.num_sets(10**8) == 2
    assert kernel_timing.num_sets(1000) == kernel_timing.MOST_SETS


def test_each_call_takes_the_output_of_the_one_before():
    """The sets in turn, as often as told: a number in base 10 that grows by a digit a call."""
    kept = []

    def call(x, digit):
        return {"number": 10 * x["number"] + digit}

    first = {"number": jnp.int32(0)}
    run = kernel_timing.chained(call, first, [(jnp.int32(1),), (jnp.int32(2),), (jnp.int32(3),)], 6, keep=kept.append)
    assert run() > 0 and int(kept[0]["number"]) == 123123
