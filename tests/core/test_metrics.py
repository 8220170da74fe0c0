"""Percentiles and request times."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.metrics import ITL_BOUNDS, EngineStats, RequestMetrics, Samples, percentile
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


@given(st.lists(st.sampled_from([0.0, 0.01, 0.010001, 0.3, 79.0, 80.0, 81.0]) | st.floats(0, 100)))
def test_buckets_count_what_is_at_most_their_bound(values):
    at_once, one_by_one = Samples(bounds=ITL_BOUNDS), Samples(bounds=ITL_BOUNDS)
    at_once.extend(values)
    for value in values:
        one_by_one.add(value)
    bounds, buckets, total = one_by_one.histogram()
    assert at_once.buckets == list(buckets) and total == pytest.approx(at_once.total) == pytest.approx(sum(values))
    assert at_once.count == one_by_one.count == len(values) and list(at_once.latest) == list(one_by_one.latest)
    for place, bound in enumerate(bounds):
        assert sum(buckets[: place + 1]) == len([value for value in values if value <= bound])


def test_a_histogram_is_of_its_moment():
    samples = Samples(bounds=(1,))
    samples.add(1)
    before = samples.histogram()
    assert samples.histogram() is before  # nothing was observed since
    samples.extend([0.5, 2])
    assert before == ((1,), (1, 0), 1.0) and samples.histogram() == ((1,), (2, 1), 3.5)


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
    assert (metrics.ttft, metrics.e2e, metrics.tpot, metrics.inference_time) == (2.5, 6.5, 1.0, 5.5)


def test_a_request_that_never_ran_has_only_an_end():
    metrics = finished_request(first_scheduled=None, first_token=None, last_token=None, num_generated_tokens=0)
    times = (metrics.queue_time, metrics.prefill_time, metrics.decode_time, metrics.ttft, metrics.tpot)
    assert times == (None,) * 5 and metrics.inference_time is None and metrics.e2e == 6.5
    assert finished_request(num_generated_tokens=1).tpot is None


def test_stats_keep_a_bounded_history():
    stats = EngineStats(window=2)
    assert stats.hit_rate == 0.0
    for number in range(3):
        stats.record_finished(finished_request(request_id=str(number)))
    assert stats.num_finished == {FinishReason.STOP: 3}
    assert [metrics.request_id for metrics in stats.requests] == ["1", "2"]
    assert stats.e2e.count == 3


def test_what_a_finished_request_adds():
    stats = EngineStats()
    stats.record_finished(finished_request(max_tokens=9))
    stats.record_finished(finished_request(num_sequences=2, most_generated_tokens=5, num_preemptions=1))
    stats.record_finished(
        finished_request(first_scheduled=None, first_token=None, last_token=None, num_generated_tokens=0)
    )
    histograms = {name: (sum(h.buckets), h.total) for name, h in stats.snapshot().histograms.items()}
    assert histograms["e2e"] == (3, 3 * 6.5) and histograms["prompt_length"] == (3, 24)
    assert histograms["generated_length"] == (3, 10) and histograms["max_tokens"] == (3, 9)
    assert histograms["prefill_time"] == (2, 3.0) and histograms["decode_time"] == (2, 8.0)
    assert histograms["inference_time"] == (2, 11.0) and histograms["tpot"] == (2, 2.0)
    assert histograms["computed_prompt_length"] == (2, 8) and histograms["num_preemptions"] == (3, 1)
    assert histograms["num_sequences"] == (1, 2) and histograms["longest_generated_length"] == (1, 5)
    assert histograms["ttft"] == histograms["itl"] == histograms["queue_time"] == histograms["step_tokens"] == (0, 0)


def test_a_snapshot_keeps_its_values():
    stats = EngineStats()
    stats.loop_steps[8] += 2
    before = stats.snapshot(num_blocks=4, num_owned_blocks=1)
    stats.loop_steps[8] += 1
    stats.record_finished(finished_request())
    stats.prefix_cache.queried += 5
    assert before.loop_steps == {8: 2} and before.num_finished == {} and before.queried == 0
    assert before.kv_cache_usage == 0.25 and stats.snapshot().kv_cache_usage == 0
    assert stats.snapshot().loop_steps == {8: 3} and stats.snapshot().num_finished == {FinishReason.STOP: 1}
