"""scripts/bench_serving.py: its workloads and numbers, and the program against servers of its own and of others."""

import gzip
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from benchlib import serving_metrics
from benchlib import serving_workloads as workloads
from benchlib.serving_client import Outcome

from jaxkv.core.errors import ConfigError
from jaxkv.simulation.traces import Trace, TraceRequest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
LENGTHS = workloads.Lengths(input_len=20, output_len=5, prefix_len=10)


# Workloads


def test_arrivals():
    assert workloads.arrivals(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert workloads.arrivals(4, 2.0, math.inf, 0) == [0.5, 1.0, 1.5, 2.0]
    times = np.array(workloads.arrivals(5000, 10.0, 1.0, 0))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(500) and (gaps >= 0).all()
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    bursts = np.diff(workloads.arrivals(5000, 10.0, 0.1, 0))
    assert bursts.std() > 2.5 * bursts.mean()
    assert workloads.arrivals(50, 1.0, 1.0, 3) == workloads.arrivals(50, 1.0, 1.0, 3)
    assert workloads.arrivals(50, 1.0, 1.0, 3) != workloads.arrivals(50, 1.0, 1.0, 4)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_shared_prefixes_are_taken_in_turn():
    prompts = [turn for (turn,) in workloads.shared_prefix(6, LENGTHS, 3, seed=0)]
    assert {len(turn.symbols) for turn in prompts} == {30} and {turn.output_len for turn in prompts} == {5}
    assert [shared(prompts[0].symbols, turn.symbols) for turn in prompts] == [30, 0, 0, 10, 0, 0]
    ids = [workloads.token_ids(turn.symbols, 1000) for turn in prompts]
    assert shared(ids[0], ids[3]) == 10 and all(100 <= i < 1000 for i in ids[0])
    texts = [workloads.text(turn.symbols) for turn in prompts]
    assert shared(texts[0].split(), texts[3].split()) >= 10 and len(texts[0].split()) == 30


def test_lengths_vary_as_asked():
    lengths = workloads.Lengths(100, 40, range_ratio=0.5)
    turns = [turn for (turn,) in workloads.shared_prefix(300, lengths, 1, seed=0)]
    for found, middle in (([len(t.symbols) for t in turns], 100), ([t.output_len for t in turns], 40)):
        assert middle / 2 <= min(found) < 0.6 * middle and 1.4 * middle < max(found) <= 1.5 * middle


def test_conversations():
    talks = workloads.multi_turn(7, LENGTHS, 3, seed=0)
    assert [len(talk) for talk in talks] == [3, 3, 1]
    assert [len(turn.symbols) for turn in talks[0]] == [30, 20, 20]
    assert shared(talks[0][0].symbols, talks[1][0].symbols) == 10


def test_traces_keep_their_shared_blocks():
    rows = (TraceRequest(0.0, 1200, 30, (0, 1, 2)), TraceRequest(1.0, 1536, 1, (0, 1, 5)))
    first, second = (turn for (turn,) in workloads.of_trace(Trace("t", rows, 512), 1 / 32, seed=0))
    assert (len(first.symbols), len(second.symbols), first.output_len, second.output_len) == (38, 48, 1, 1)
    assert shared(first.symbols, second.symbols) == 32
    with pytest.raises(ConfigError, match="trace_scale is 0.01.*0.03125 for blocks of 16"):
        workloads.of_trace(Trace("t", rows, 512), 0.01, seed=0)
    plain = Trace("t", (TraceRequest(0.0, 40, 8), TraceRequest(0.0, 40, 8)), None)
    first, second = (turn for (turn,) in workloads.of_trace(plain, 0.5, seed=0))
    assert (len(first.symbols), first.output_len, shared(first.symbols, second.symbols)) == (20, 4, 0)


# Numbers


def test_summary_by_hand():
    outcomes = [
        Outcome(10.0, ttft=0.2, latency=1.2, itl=[0.5, 0.5], prompt_len=7, output_tokens=3, cached_tokens=4),
        Outcome(11.0, ttft=0.4, latency=0.4, prompt_len=3, output_tokens=1),
        Outcome(10.5, error="HTTP 500"),
    ]
    result = serving_metrics.summary(outcomes, 2.0, [50, 99.9])
    assert (result["completed"], result["failed"], result["duration"]) == (2, 1, 2.0)
    assert (result["total_input_tokens"], result["total_output_tokens"], result["cached_prompt_tokens"]) == (10, 4, 4)
    assert (result["request_throughput"], result["output_throughput"]) == (1.0, 2.0)
    assert result["total_token_throughput"] == 7.0
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 2  # at 0.2, 0.7; 1.2, 1.4 s
    assert result["mean_ttft_ms"] == pytest.approx(300) and result["std_ttft_ms"] == pytest.approx(100)
    assert result["median_tpot_ms"] == pytest.approx(500)  # only the first has one
    assert result["mean_itl_ms"] == 500 and result["p50_e2el_ms"] == pytest.approx(800)
    assert result["p99.9_e2el_ms"] == pytest.approx(1199.2)
    lines = serving_metrics.table(result)
    assert "Successful requests:                     2" in lines
    assert "Output token throughput (tok/s):         2.00" in lines
    assert (
        "P99.9 E2EL (ms):                         1199.20" in lines
        and "Mean TTFT (ms):                          300.00" in lines
    )
    assert serving_metrics.units(result).keys() <= result.keys()


def test_nothing_succeeded():
    result = serving_metrics.summary([Outcome(0.0, error="x")], 1.0, [99])
    assert result["completed"] == 0 and result["mean_ttft_ms"] == 0 and result["max_concurrent_requests"] == 0


def test_counters_of_a_server():
    page = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a b"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="a"} 1e2
vllm:prefix_cache_hits_total 50
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
"""
    before = serving_metrics.server_counters(page)
    assert before == {"queries": 200.0, "hits": 50.0}
    after = {"queries": 300.0, "hits": 125.0, "preemptions": 3.0}
    assert serving_metrics.server_side(before, after) == {"prefix_cache_hit_rate": 0.75}
    assert serving_metrics.server_side({"preemptions": 1.0}, after) == {"num_preemptions": 2.0}
    assert serving_metrics.server_side({}, after) == {}


# The program


def test_a_server_of_its_own(bench, tmp_path):
    path = tmp_path / "result.json"
    code, document, err = bench(
        "bench_serving.py", "--vocab_size=256", "--input_len=10", "--output_len=8", "--dataset_name=multi_turn",
        "--num_turns=3", "--prefix_len=8", "--request_rate=50", "--metric_percentiles=50,99", f"--result_filename={path}",
    )  # fmt: skip
    assert code == 0, err
    found = {result["metric"]: result["value"] for result in document["results"]}
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (8, 0, 64)
    assert found["cached_prompt_tokens"] > 8 * 8 * 4 / 2  # of tokens of a byte: the prefix, and what was said before
    assert 0.5 < found["prefix_cache_hit_rate"] < 1 and found["num_preemptions"] >= 0  # out of /metrics
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"mean_{name}_ms", f"median_{name}_ms", f"p50_{name}_ms", f"p99_{name}_ms"} <= found.keys()
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    saved = json.loads(path.read_text())
    assert saved["output_lens"] == [8] * 8 and saved["request_rate"] == 50 and saved["errors"] == [""] * 8
    assert saved["request_throughput"] == found["request_throughput"] and document["files"] == [str(path)]
    assert "Serving Benchmark Result" in err and "Mean TTFT (ms):" in err


@pytest.fixture(scope="module")
def url():
    """A server of somebody else's: jaxkv's HTTP layer over an engine that makes letters."""
    settings = {"tokens_per_second": 50_000, "tokens_per_step": 1, "max_num_seqs": 64}
    command = [sys.executable, "-m", "benchlib.scripted_server", json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=SCRIPTS) as process:
        yield process.stdout.readline().strip()
        process.terminate()


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    command = [sys.executable, str(SCRIPTS / "bench_serving.py"), "--json_only", "--vocab_size=256", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, done.stderr


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_any_endpoint(url, endpoint):
    arguments = [f"--base_url={url}", f"--endpoint={endpoint}", "--num_prompts=30", "--output_len=7", "--input_len=5"]
    code, document, err = run(*arguments, "--max_concurrency=4")
    assert (code, err) == (0, "")
    found = {result["metric"]: result["value"] for result in document["results"]}
    assert (found["completed"], found["total_output_tokens"]) == (30, 210)
    assert found["total_input_tokens"] == 150 if endpoint == "/v1/completions" else found["total_input_tokens"] > 150
    assert found["request_throughput"] == pytest.approx(30 / found["duration"])


def test_a_trace_at_its_own_times(url, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rows = [{"timestamp": 100 * i, "input_length": 64, "output_length": 4, "hash_ids": [0, i]} for i in range(12)]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    arguments = [
        f"--base_url={url}",
        "--dataset_name=trace",
        f"--trace={path}",
        "--trace_scale=0.5",
        "--num_prompts=11",
    ]
    code, document, err = run(*arguments, "--time_scale=2")
    assert (code, err) == (0, "")
    found = {result["metric"]: result["value"] for result in document["results"]}
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (11, 11 * 32, 22)
    assert 2.0 <= found["duration"] < 4.0


def test_failures_are_told(url):
    code, document, _ = run(f"--base_url={url}", "--num_prompts=5", "--num_warmups=0", "--served_model_name=other")
    [check] = document["checks"]
    assert code == 1 and not check["ok"] and "404" in check["problems"][0] and "`other`" in check["problems"][0]
    found = {result["metric"]: result["value"] for result in document["results"]}
    assert (found["completed"], found["failed"]) == (0, 5)


def test_mistakes_are_one_line(url):
    for arguments, text in (
        (["--base_url=http://127.0.0.1:9"], "GET /v1/models there gives no model"),
        ([f"--base_url={url}", "--served_model_name=other"], "a first request failed: HTTP 404"),
        (["--dataset_name=trace"], "trace names no file"),
        (["--metric_percentiles=101"], "numbers from 0 to 100"),
        (["--request_rate=0"], "must be above 0"),
        (["--model=/no/such/folder"], "the server did not start: error: "),
    ):
        code, document, err = run(*arguments)
        assert (code, document) == (2, None) and text in err and err.count("\n") == 1, err
