"""Percentiles and request times."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.metrics import EngineStats, RequestMetrics, Samples, percentile
from jaxkv.core.request import FinishReason


def test_percentile_interpolates():
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="q=101"):
        percentile([1.0], 101)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_percentile_agrees_with_statistics(values):
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    assert [percentile(values, q) for q in (25, 50, 75)] == pytest.approx(quartiles, abs=1e-6)
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


def test_samples_count_all_and_keep_the_latest():
    samples = Samples(window=3)
    assert math.isnan(samples.mean)
    samples.add(10.0)
    samples.extend([1.0, 2.0, 3.0])
    assert (samples.count, samples.total, samples.mean) == (4, 16.0, 4.0)
    assert list(samples.latest) == [1.0, 2.0, 3.0]
    assert samples.percentile(50) == 2.0


def finished_request(**changes):
    fields = dict(
        request_id="a",
        arrival=10.0,
        finished=16.5,
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=8,
        num_cached_tokens=4,
        num_generated_tokens=5,
        first_scheduled=11.0,
        first_token=12.5,
        last_token=16.5,
    )
    return RequestMetrics(**{**fields, **changes})


def test_times_of_a_request():
    metrics = finished_request()
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (1.0, 1.5, 4.0)
    assert (metrics.ttft, metrics.e2e, metrics.tpot) == (2.5, 6.5, 1.0)


def test_a_request_that_never_ran_has_only_an_end():
    metrics = finished_request(first_scheduled=None, first_token=None, last_token=None, num_generated_tokens=0)
    times = (metrics.queue_time, metrics.prefill_time, metrics.decode_time, metrics.ttft, metrics.tpot)
    assert times == (None,) * 5 and metrics.e2e == 6.5
    assert finished_request(num_generated_tokens=1).tpot is None


def test_stats_keep_a_bounded_history():
    stats = EngineStats(window=2)
    assert stats.hit_rate == 0.0
    for number in range(3):
        stats.record_finished(finished_request(request_id=str(number)))
    assert stats.num_finished == {FinishReason.STOP: 3}
    assert [metrics.request_id for metrics in stats.requests] == ["1", "2"]
    assert stats.e2e.count == 3
