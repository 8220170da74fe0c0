"""The replay program as a user runs it, and the fit behind its measured cost models."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from benchlib.calibration import Point, fit
from benchlib.replay_setup import set_up

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import UserError
from jaxkv.core.plan import PlanShape
from jaxkv.simulation.fitted_cost import FittedCostModel
from jaxkv.simulation.traces import read_trace

ROOT = pathlib.Path(__file__).parents[2]


def run(program, *arguments, timeout=300):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "scripts" / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def write_trace(path, count=30):
    """One prompt of three blocks in ten conversations: the first two blocks were seen before, but for the first time."""
    row = {"input_length": 1500, "output_length": 5}
    rows = [{**row, "timestamp": 400 * i, "hash_ids": [0, 1 + i % 3, 9 + i]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_alone_gives_latencies_and_the_serial_hit_rate(tmp_path):
    plot = tmp_path / "replay.png"
    done = run("replay_trace.py", f"--trace={write_trace(tmp_path / 't.jsonl')}", f"--plot={plot}")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    results = {result["name"]: result for result in document["results"]}
    serial = results["serial hit rate"]
    keys = (
        "trace block full_blocks_only capacity_blocks policy leaf_only hit_blocks total_blocks block_hit_rate evictions"
    )
    assert [serial[key] for key in keys.split()] == ["t.jsonl", 512, True, None, "lru", False, 56, 60, 0.933333, 0]
    assert serial["token_hit_rate"] == round(56 * 512 / (30 * 1500), 6)
    # They come so far apart that the engine finds the same.
    assert results["hit rate"]["value"] == pytest.approx(serial["token_hit_rate"], abs=1e-6)
    assert results["requests finished"]["value"] == 30 and results["TTFT"]["count"] == 30
    assert 0 < results["TTFT"]["p50"] <= results["TTFT"]["p95"] <= results["TTFT"]["p99"] < results["E2E"]["p99"]
    assert 0 < results["device busy"]["value"] < 1 and results["preemptions"]["value"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and document["files"] == [str(plot)]


def test_serial_with_a_small_pool_and_a_measured_cost_model(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl")
    done = run("replay_trace.py", f"--trace={trace}", "--serial", "--capacity_blocks=3", "--policy=fifo", "--leaf_only")
    (serial,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert (serial["capacity_blocks"], serial["policy"], serial["leaf_only"]) == (3, "fifo", True)
    assert 0 < serial["hit_blocks"] < 56 and serial["evictions"] > 0
    done = run("replay_trace.py", f"--trace={trace}", "--serial", "--capacity_blocks=3", "--policy=opt")
    (optimal,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert optimal["policy"] == "opt" and optimal["hit_blocks"] >= serial["hit_blocks"] > 0
    cost = tmp_path / "cost.json"
    cost.write_text(FittedCostModel(0.5, ((8192, 2.0),), 0.0, ((16, 0.25),), 0.0).to_json())
    flags = (f"--trace={trace}", f"--cost_model={cost}", "--num_requests=1", "--decode_steps=4", "--block_size=64")
    done = run("replay_trace.py", *flags, "--max_num_seqs=16", "--json_only")
    assert done.returncode == 0, done.stderr
    results = {result["name"]: result for result in json.loads(done.stdout)["results"]}
    # A call with the prompt gives the first token; one more gives the other four.
    assert results["TTFT"]["value"] == 2.5 and results["E2E"]["value"] == pytest.approx(2.5 + 0.5 + 4 * 0.25)
    done = run("replay_trace.py", *flags)
    assert done.returncode == 2 and "max_num_seqs is 256, but the cost model was measured up to 16" in done.stderr


def test_a_device_decides_pool_and_times():
    def results(device, *more):
        done = run("replay_trace.py", "--capacity_blocks=device", f"--device={device}", "--num_requests=60", *more)
        assert done.returncode == 0, done.stderr
        return {result["name"]: result for result in json.loads(done.stdout.splitlines()[-1])["results"]}

    small, large = results("a100-40g"), results("h200")
    assert small["TTFT"]["p50"] > 1.5 * large["TTFT"]["p50"]
    # README: 2,584 blocks of 64 tokens on the small card.
    assert small["serial hit rate"]["capacity_blocks"] == 2584 * 4
    int8 = results("a100-40g", "--kv_cache_dtype=int8")
    assert int8["serial hit rate"]["capacity_blocks"] == 5090 * 4


def test_mistakes_are_named(tmp_path):
    lengths = tmp_path / "t.csv"
    lengths.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    for arguments, message in (
        (("--leaf_only",), "leaf_only is set, but policy is 'lru'"),
        ((f"--trace={lengths}", "--serial"), "no hash_ids"),
        (("--policy=opt",), "add --serial"),
        (("--policy=fifo", "--eviction_policy=lfu"), "they are one setting"),
    ):
        done = run("replay_trace.py", *arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    trace, config = read_trace(write_trace(tmp_path / "t.jsonl", 2)), EngineConfig(model="llama-3-8b")
    for changed, options, message in (
        ({"block_size": 48}, {}, "block_size is 48"),
        ({"max_num_seqs": 0}, {}, "max_num_seqs is 0"),
        ({}, {"capacity_blocks": 0}, "capacity_blocks is 0"),
        ({}, {"device": "abacus"}, "device is 'abacus'"),
        ({}, {"cost_model": "/no/such/file"}, "/no/such/file holds no cost model"),
    ):
        with pytest.raises(UserError, match=message):
            set_up(dataclasses.replace(config, **changed), trace, **options)


def test_the_fit_finds_what_the_calls_were_made_of():
    true = FittedCostModel(0.01, ((64, 0.2), (128, 0.35)), 2e-6, ((1, 0.05), (4, 0.08)), 1e-5)
    shapes = [PlanShape(t, c, 0, 0, 0, prefill_pairs=t * c + t * t // 2) for t in (64, 128) for c in (0, 700)]
    shapes += [PlanShape(0, 0, rows, rows * c, steps) for rows in (1, 4) for c in (10, 700) for steps in (1, 8)]
    points = [Point(shape, seconds := true.seconds(shape), seconds, seconds) for shape in shapes]
    found, mean_error, worst = fit(points, (64, 128), (1, 4), {})
    assert worst < 1e-6 and found.call_seconds == pytest.approx(0.01, rel=1e-3)
    assert found.seconds(PlanShape(100, 50, 3, 600, 2, prefill_pairs=9000)) == pytest.approx(
        true.seconds(PlanShape(100, 50, 3, 600, 2, prefill_pairs=9000)), rel=1e-3
    )
    # Noise is told, and makes nothing negative or falling.
    rng = np.random.default_rng(0)
    noisy = [point._replace(seconds=point.seconds * rng.uniform(0.7, 1.3)) for point in points]
    found, mean_error, worst = fit(noisy, (64, 128), (1, 4), {})
    assert 0.05 < mean_error < worst < 0.5 and min(found.call_seconds, found.pair_seconds, found.kv_token_seconds) >= 0
    for pairs in (found.prefill_seconds, found.decode_seconds):
        assert 0 <= pairs[0][1] <= pairs[1][1]


@pytest.mark.slow
def test_simulated_and_served_agree_on_the_demo_model(tmp_path):
    """Within 15 %, calibrated by calls that are no load at all."""
    output = tmp_path / "cost.json"
    limits = (
        "--max_num_seqs=4",
        "--max_num_batched_tokens=128",
        "--max_model_len=1024",
        "--kv_cache_memory_bytes=300MiB",
    )
    done = run("calibrate_cost_model.py", f"--output={output}", *limits, timeout=1800)
    document = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and document["checks"] == [
        {"name": "simulated against served", "ok": True, "problems": []}
    ], done.stderr
    assert output.exists()
