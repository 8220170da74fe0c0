"""Goodput: who met the limits, and the highest speed at which enough of them do."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxkv.control.executor import ExecutorLimits
from jaxkv.core.request import Request, SamplingParams
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.goodput import Goal, Served, highest_speed
from jaxkv.simulation.replay import replay

LIMITS = ExecutorLimits(
    num_blocks=101,
    block_size=16,
    max_num_seqs=1,
    max_num_batched_tokens=512,
    max_prefill_seqs=1,
    max_model_len=256,
    max_decode_steps=1,
)
# 10 tokens of prompt: 1 s. Each further token: 1 s.
SECONDS = ConstantCostModel(call_seconds=0, prefill_token_seconds=0.1, decode_step_seconds=1, decode_row_seconds=0)


def served(requests, goal):
    report = replay(requests, LIMITS, SECONDS, max_in_flight=1)
    refused = len(report.refused)
    return Served.of(report.stats, goal, duration=report.duration, num_refused=refused, speed=2.0)


def request(name, arrival, prompt=10, max_tokens=3):
    tokens = tuple(range(1000 * ord(name), 1000 * ord(name) + prompt))
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), arrival_time=arrival)


def test_requests_within_the_limits_by_hand():
    # One row: "a" takes 3 s, "b" waits 3 s for it and has its first token at 4 s, "c" one second after it came at 50.
    requests = [request("a", 0.0), request("b", 0.0), request("c", 50.0)]
    found = served(requests, Goal(ttft=1.0, itl=1.0, share=1.0))
    assert found.attained == pytest.approx(2 / 3) and found.strain == 4.0 and found.speed == 2.0
    assert found.goodput == pytest.approx(2 / 53)
    assert served(requests, Goal(ttft=1.0, itl=1.0, share=0.6)).strain == 1.0
    assert served(requests, Goal(ttft=4.0, itl=1.0)).attained == 1.0
    slow_tokens = served(requests, Goal(ttft=4.0, itl=0.5))
    assert slow_tokens.attained == 0.0 and slow_tokens.strain == 2.0


def test_refused_requests_meet_nothing():
    requests = [request("a", 0.0), request("b", 10.0, prompt=300)]
    found = served(requests, Goal(ttft=1.0, itl=1.0, share=0.9))
    assert (found.refused, found.attained, found.strain) == (1, 0.5, math.inf)
    assert served(requests, Goal(ttft=1.0, itl=1.0, share=0.5)).strain == 1.0


def test_a_request_of_one_token_has_no_itl():
    found = served([request("a", 0.0, max_tokens=1)], Goal(ttft=1.0, itl=1e-9))
    assert found.attained == 1.0 and math.isnan(found.itl_p95)


def queue(capacity, idle, calls):
    """Strain of a server that is `idle` alone and lags behind without bound from `capacity` on."""

    def strain(speed):
        calls.append(speed)
        use = speed / capacity
        return idle / (1 - use) if use < 0.98 else idle * 50 * use

    return strain


@given(st.floats(0.02, 50), st.floats(0.03, 0.9))
def test_highest_speed_of_a_queue(capacity, idle):
    calls = []
    found = highest_speed(queue(capacity, idle, calls))
    assert found.kind == "found"
    assert found.speed == pytest.approx(capacity * (1 - idle), rel=0.03)
    assert len(calls) == len(set(calls)) <= 16


def test_near_the_start_few_replays_are_enough():
    calls = []
    highest_speed(queue(1.5, 0.2, calls))
    assert len(calls) <= 6 and calls[0] == 1.0


def test_goals_that_are_always_or_never_met():
    always = highest_speed(lambda speed: 0.5)
    assert always.kind == "always" and always.speed > 4000
    assert highest_speed(lambda speed: 2.0) == type(always)(0.0, "never")
    assert highest_speed(lambda speed: math.inf).kind == "never"


@given(st.floats(0.1, 10), st.floats(0.05, 0.95), st.floats(1.1, 1e6))
def test_a_jump_is_found_between_the_speeds_around_it(where, below, above):
    found = highest_speed(lambda speed: below if speed <= where else above)
    assert found.speed == pytest.approx(where, rel=0.06)


@given(st.lists(st.floats(0.01, 100), min_size=64, max_size=64), st.floats(0.1, 10))
def test_any_strains_give_a_crossing(strains, start):
    """Not monotonic: still it ends, and within a bracket."""

    def strain(speed):
        return strains[round(10 * math.log(speed)) % 64]

    calls = []
    found = highest_speed(lambda speed: calls.append(speed) or strain(speed), start=start)
    assume(found.kind == "found")
    passed = [speed for speed in calls if strain(speed) <= 1]
    failed = [speed for speed in calls if strain(speed) > 1]
    assert min(passed) * 0.999 <= found.speed <= max(failed) * 1.001
