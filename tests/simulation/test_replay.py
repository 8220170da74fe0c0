"""Replays: hand-computed times on a tiny case, and the real engine's behaviour on larger ones."""

import dataclasses
import math
import random

import pytest

from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.request import FinishReason, Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.replay import LatencySummary, replay

LIMITS = ExecutorLimits(
    num_blocks=201,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    max_prefill_seqs=8,
    max_model_len=1024,
    max_decode_steps=8,
)
SECONDS = ConstantCostModel(call_seconds=0, prefill_token_seconds=0.1, decode_step_seconds=1, decode_row_seconds=0)


def request(request_id, prompt, max_tokens, arrival):
    return Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens), arrival_time=arrival)


def shared_prefix_load(count=60, seed=0, gap=0.02):
    rng = random.Random(seed)
    system = range(200)
    return [
        request(str(i), [*system, *(rng.randrange(1000, 9000) for _ in range(40))], 1 + rng.randrange(60), i * gap)
        for i in range(count)
    ]


def test_times_of_one_request_by_hand():
    report = replay([request("a", range(10), 9, arrival=5.0)], LIMITS, SECONDS)
    (metrics,) = report.requests
    # 10 tokens of prefill: 1 s. Then 8 steps in one call.
    assert (metrics.queue_time, metrics.ttft, metrics.e2e) == (0.0, 1.0, 9.0)
    assert (metrics.tpot, report.duration) == (1.0, 9.0)
    assert report.output_tokens_per_second == 1.0
    assert report.ttft == LatencySummary(1, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_request_that_arrives_during_a_call_is_seen_when_it_ends():
    first, second = request("a", range(10), 9, arrival=0.0), request("b", range(100, 120), 1, arrival=2.5)
    report = replay([second, first], LIMITS, SECONDS, max_in_flight=1)
    times = {metrics.request_id: metrics for metrics in report.requests}
    assert times["a"].e2e == 9.0
    assert times["b"].queue_time == pytest.approx(6.5)  # the call of 8 steps ends at 9.0
    assert times["b"].ttft == pytest.approx(6.5 + 2.0)


def test_idle_gaps_cost_no_time_in_the_report():
    report = replay([request("a", range(10), 1, 0.0), request("b", range(50, 60), 1, 100.0)], LIMITS, SECONDS)
    assert [metrics.ttft for metrics in report.requests] == pytest.approx([1.0, 1.0])
    assert report.duration == pytest.approx(101.0)


def test_prefix_cache_lowers_ttft_and_is_reported():
    load = shared_prefix_load()
    cached = replay(load, LIMITS, SECONDS)
    plain = replay(load, LIMITS, SECONDS, SchedulerConfig(enable_prefix_caching=False))
    # 200 of 240 tokens are common to all, 12 blocks and half of one; only the first request computes them.
    assert cached.hit_rate == pytest.approx(59 * 200 / (60 * 240))
    assert cached.stats.computed_tokens == 60 * 240 - 59 * 200
    assert cached.stats.prefix_cache.hit_partial_block == 59 * 8
    assert plain.hit_rate == 0 and plain.stats.computed_tokens == 60 * 240
    assert cached.ttft.p50 < plain.ttft.p50 / 2
    assert cached.stats.generated_tokens == plain.stats.generated_tokens == sum(r.sampling.max_tokens for r in load)


def test_same_replay_gives_the_same_report():
    first, second = (replay(shared_prefix_load(), LIMITS, SECONDS) for _ in range(2))
    assert first.requests == second.requests and first.ttft == second.ttft
    assert first.requests != replay(shared_prefix_load(seed=1), LIMITS, SECONDS).requests


def test_overload_preempts_and_still_finishes_all():
    limits = dataclasses.replace(LIMITS, num_blocks=40)
    report = replay(shared_prefix_load(gap=0), limits, SECONDS)
    assert report.stats.num_finished == {FinishReason.LENGTH: 60} and report.stats.preemptions > 0
    assert report.e2e.count == 60 and report.e2e.p50 < report.e2e.p90 < report.e2e.p99


def test_impossible_requests_are_refused_and_reported():
    report = replay([request("a", range(2000), 5, 0.0), request("b", range(5), 5, 0.0)], LIMITS, SECONDS)
    ((refused, reason),) = report.refused
    assert refused == "a" and "maximum context length is 1024" in reason
    assert [metrics.request_id for metrics in report.requests] == ["b"]


def test_nothing_to_replay():
    report = replay([], LIMITS, SECONDS)
    assert report.requests == () and report.duration == 0 and math.isnan(report.ttft.p50)
    assert report.output_tokens_per_second == 0
