"""What a running engine's latest requests were like, live and out of its log."""

import dataclasses
import math

import pytest

from jaxkv.core.metrics import PROMPT_LENGTHS, MissReason, RequestMetrics
from jaxkv.core.request import FinishReason
from jaxkv.core.request_record import RequestRecord
from jaxkv.insight.hit_rates import Group, groups, split_by_caller, split_by_prompt_length
from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import WINDOW_REQUESTS, Traffic
from tests.support.traffic_scenario import play


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(the scenario with the hidden tail, the lines of its request log)"""
    path = tmp_path_factory.mktemp("log") / "requests.jsonl"
    log = RequestLog(str(path))
    played = play("hidden_tail", log=log)
    log.close()
    return played, path.read_text().splitlines()


def test_a_good_mean_hides_a_slow_tail(played):
    """The averages trap: by bucket it is in plain sight."""
    report = played[0].traffic.report()
    assert report.whole.hit_rate > 0.9 and report.whole.ttft.p95 < 0.1 and report.whole.requests > 1000
    lengths = {group.name: group for group in report.by_prompt_length}
    short, long = lengths["513-2048"], lengths["2049-8192"]
    assert short.hit_rate > 0.9 and short.hit_rates.p95 > 0.85
    assert long.hit_rate == 0.0 and long.ttft.p99 > 8 * short.ttft.p99
    assert 5 <= long.requests < 0.01 * report.whole.requests
    (by_length,), (by_caller,) = report.tails_by_prompt_length, report.tails_by_caller
    assert (by_length.name, by_caller.name) == ("2049-8192", "reports")
    assert by_length.ttft_p99 == long.ttft.p99 and by_length.ttft_p99_of_hits == pytest.approx(short.ttft.p99)
    worst = min(report.by_time, key=lambda one: one.hit_rate if one.requests else 1.0)
    assert worst.hit_rate < 0.85 and worst.ttft.p99 > 0.5  # in time too


def test_the_reports_numbers_are_the_engines(played):
    engine, report = played[0].engine, played[0].traffic.report()
    now = engine.snapshot()
    assert report.whole.requests == sum(now.num_finished.values()) == sum(c.requests for c in now.by_prompt_length)
    assert (
        report.whole.prompt_tokens == now.prompt_tokens and report.whole.cached_tokens == now.cached_tokens == now.hit
    )
    assert report.whole.missed == {reason.value: count for reason, count in now.missed.items()}
    assert report.whole.computed_tokens == now.computed_tokens and report.whole.preemptions == now.preemptions
    for name, group, counts in zip(PROMPT_LENGTHS, report.by_prompt_length, now.by_prompt_length, strict=True):
        assert (group.name, group.requests) == (name, counts.requests)
        assert (group.prompt_tokens, group.cached_tokens) == (counts.prompt_tokens, counts.cached_tokens)
        assert sum(counts.ttft.buckets) == counts.requests
    for phase in ("queue", "prefill", "decode"):
        assert report.whole.split[phase] == pytest.approx(now.histograms[f"{phase}_time"].total)


def test_the_log_gives_the_same_tables(played):
    records = [RequestRecord.from_json(line) for line in played[1]]
    report = played[0].traffic.report()
    assert Group.of("all", records) == report.whole
    same = [group for group in report.by_prompt_length if group.requests]
    assert [group for group in groups(split_by_prompt_length(records)) if group.requests] == same
    assert groups(split_by_caller(records)) == report.by_caller


def test_windows_are_by_the_end_of_a_request(played):
    report = played[0].traffic.report()
    counts = [report.windows[name].requests for name in ("1m", "5m", "15m")]
    assert 40 < counts[0] < counts[1] < counts[2] == report.whole.requests
    assert sum(one.requests for one in report.by_time) == report.whole.requests and len(report.by_time) == 60


class Clock:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


def ended(number, finished=0.0, **fields):
    metrics = RequestMetrics(
        str(number), arrival=finished - 1.0, finished=finished, finish_reason=FinishReason.STOP, num_prompt_tokens=10,
        num_cached_tokens=4, num_generated_tokens=1, missed={MissReason.FIRST_SEEN: 6},
    )  # fmt: skip
    return dataclasses.replace(metrics, **fields)


def watched(**options):
    clock = Clock()
    return clock, Traffic(clock=clock, unix_time=lambda: 1e9 + clock.time, **options)


def test_times_are_unix_times():
    clock, traffic = watched()
    clock.time = 7.5
    traffic.ended(None, ended(1, finished=7.0))
    (record,) = traffic.records(0.0)
    assert (record.arrival, record.ended) == (1e9 + 6.0, 1e9 + 7.0)


def test_the_window_forgets():
    clock, traffic = watched(max_age=0.0)
    for number in range(WINDOW_REQUESTS + 5):
        traffic.ended(None, ended(number))
    assert traffic.report().whole.requests == WINDOW_REQUESTS
    clock.time = 901.0
    traffic.ended(None, ended("late", finished=901.0))
    report = traffic.report()
    assert report.whole.requests == 1 and report.whole.prompt_tokens == 10
    clock.time = 2000.0
    assert traffic.report().whole.requests == 0 and math.isnan(traffic.report().whole.hit_rate)
    assert traffic.report().by_time == () and traffic.report().by_caller == ()


def test_a_report_is_made_once_a_second():
    clock, traffic = watched()
    first = traffic.report()
    traffic.ended(None, ended(1))
    clock.time = 0.9
    assert traffic.report() is first
    clock.time = 1.1
    assert traffic.report().whole.requests == 1


def test_callers_need_not_be_named():
    _, traffic = watched(names_callers=False)
    for number in range(10):
        traffic.ended(None, ended(number, caller="somebody@example.org"))
    report = traffic.report()
    assert report.by_caller == () == report.tails_by_caller and report.whole.requests == 10
