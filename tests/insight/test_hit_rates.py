"""Hit rates by length, caller and time: sums add up, quantiles are the usual ones, a hidden tail is found."""

import dataclasses
import math
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.metrics import PROMPT_LENGTH_BOUNDS, PROMPT_LENGTHS, percentile
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.hit_rates import (
    NO_CALLER,
    OTHER_CALLERS,
    Group,
    Quantiles,
    by_time,
    groups,
    hidden_tails,
    split_by_caller,
    split_by_prompt_length,
)


def record(prompt_tokens=1000, cached_tokens=900, ttft=0.1, caller=None, ended=100.0, **more):
    missed = {"first_seen": prompt_tokens - cached_tokens}
    return RequestRecord(
        "x", ended - 1.0, "stop", prompt_tokens, cached_tokens, prompt_tokens - cached_tokens, 7, missed=missed, ttft=ttft,
        caller=caller, e2e=1.0, queue=0.25, prefill=0.5, decode=0.25, **more,
    )  # fmt: skip


@st.composite
def many(draw):
    lengths = st.integers(1, 100_000) | st.sampled_from(PROMPT_LENGTH_BOUNDS)
    return [
        record(
            length, draw(st.integers(0, length)), draw(st.none() | st.floats(0, 100)),
            draw(st.none() | st.sampled_from([*string.ascii_letters, OTHER_CALLERS, NO_CALLER])),
            draw(st.floats(0, 200)),
        )
        for length in draw(st.lists(lengths, max_size=60))
    ]  # fmt: skip


@given(many(), st.integers(1, 5))
def test_the_parts_add_up_to_the_whole(records, most):
    whole = Group.of("all", records)
    for split in (split_by_prompt_length(records), split_by_caller(records, most)):
        parts = groups(split)
        assert [part.name for part in parts] == list(split)
        for field in ("requests", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "preemptions"):
            assert sum(getattr(part, field) for part in parts) == getattr(whole, field)
        assert sum(part.missed["first_seen"] for part in parts) == whole.missed["first_seen"]
        assert sum(part.split["prefill"] for part in parts) == pytest.approx(whole.split["prefill"])
        for part in parts:
            assert part.cached_tokens + sum(part.missed.values()) == part.prompt_tokens
            assert part.hit_rate == pytest.approx(part.cached_tokens / part.prompt_tokens) if part.requests else True
    assert list(split_by_prompt_length(records)) == list(PROMPT_LENGTHS)
    callers = split_by_caller(records, most)
    assert (
        len(callers) <= most + 1 and list(callers).index(OTHER_CALLERS) == len(callers) - 1
        if (OTHER_CALLERS in callers)
        else len(callers) <= most
    )
    tokens = [sum(r.prompt_tokens for r in own) for name, own in callers.items() if name != OTHER_CALLERS]
    assert tokens == sorted(tokens, reverse=True)


@given(many())
def test_time_bins_hold_what_ended_in_them(records):
    bins = by_time(records, 50.0, 10.0, 7)
    assert [one.start for one in bins] == [50.0 + 10 * place for place in range(7)]
    for one in bins:
        inside = [r for r in records if one.start <= r.ended < one.start + 10.0]
        group = Group.of("", inside)
        assert one.requests == len(inside) and (one.hit_rate == group.hit_rate or not inside)
        assert one.ttft == group.ttft or math.isnan(one.ttft.p50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_quantiles_are_percentiles(values):
    assert dataclasses.astuple(Quantiles.of(values)) == pytest.approx(
        tuple(percentile(values, q) for q in (50, 95, 99)), rel=1e-9, abs=1e-6
    )
    assert dataclasses.astuple(Quantiles.reached(values)) == pytest.approx(
        tuple(percentile(values, q) for q in (50, 5, 1)), rel=1e-9, abs=1e-6
    )


def test_a_hit_rate_that_95_percent_reach():
    records = [record(cached_tokens=900)] * 94 + [record(cached_tokens=0)] * 6
    group = Group.of("", records)
    assert group.hit_rate == pytest.approx(0.846) and group.hit_rates == Quantiles(0.9, 0.0, 0.0)


def test_nothing_has_no_hit_rate():
    group = Group.of("", [])
    assert math.isnan(group.hit_rate) and math.isnan(group.ttft.p99) and group.split["queue"] == 0


def test_the_largest_callers_and_the_rest():
    records = [record(1000 - number, caller=f"c{number}", cached_tokens=0) for number in range(30)]
    records += [record(50_000, caller=OTHER_CALLERS), record(caller=None, prompt_tokens=990)]
    split = split_by_caller(records, most=12)
    # Two have 990 tokens: these are in the order of their names.
    assert list(split) == [*[f"c{number}" for number in range(10)], NO_CALLER, "c10", OTHER_CALLERS]
    assert len(split[OTHER_CALLERS]) == 20  # c11 to c29, and whoever calls themselves that


def shop(misses, slow=1.0):
    """A hundred quick requests that hit, and so many that miss and wait `slow` seconds."""
    return {"shop": [record()] * 100, "reports": [record(cached_tokens=20, ttft=slow)] * misses, "empty": []}


def test_a_hidden_tail_is_found():
    (tail,) = hidden_tails(shop(10))
    assert (tail.name, tail.requests, tail.hit_rate) == ("reports", 10, pytest.approx(0.02))
    assert tail.ttft_p99 == 1.0 and tail.ttft_p99_of_hits == pytest.approx(0.1)


@pytest.mark.parametrize(
    "split",
    [
        shop(4),  # too few
        shop(10, slow=0.29),  # not that slow
        shop(100),  # the mean is no good either
        {"shop": [record()] * 100, "slow": [record(ttft=1.0)] * 10},  # slow, but not for want of hits
        {"reports": [record(cached_tokens=500, ttft=1.0)] * 10},  # the only one
        {"shop": [record()] * 100, "reports": [record(cached_tokens=20, ttft=None)] * 10},  # no time is known
    ],
)
def test_no_hidden_tail(split):
    assert hidden_tails(split) == ()


def test_one_tail_hides_no_other_and_the_slowest_comes_first():
    split = shop(5) | {"exports": [record(cached_tokens=0, ttft=3.0)] * 5}
    assert [tail.name for tail in hidden_tails(split)] == ["exports", "reports"]
