"""/metrics of hit rates by length of prompt and by caller: what a mean over all requests hides.

Counters and histograms are the engine's, since the start, with the rest of its snapshot. Gauges named `recent` are of the
latest requests (`Traffic`'s window) and say what Prometheus cannot work out: percentiles of hit rates, and shares of callers,
whose names come and go.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jaxkv.core.metrics import PROMPT_LENGTHS, EngineSnapshot, Histogram
from jaxkv.insight.hit_rates import Group, Quantiles
from jaxkv.insight.traffic import TrafficReport

_LABELS = ("model_name", "engine")
# No label named quantile: promtool wants summaries behind it.
_PERCENTILES = {"50": "p50", "95": "p95", "99": "p99"}
_PHASES = ("queue", "prefill", "decode", "ttft", "itl", "e2e")


class TrafficMetrics:
    """Metric families for one engine; `labels` are the values of model_name and engine."""

    def __init__(self, labels: tuple[str, str]):
        self._labels = labels

    def since_start(self, now: EngineSnapshot) -> Iterator[Metric]:
        by_length = list(zip(PROMPT_LENGTHS, now.by_prompt_length, strict=True))
        requests = self._counter("jaxkv_finished_requests", "Requests that ended.", ("prompt_tokens",))
        tokens = self._counter(
            "jaxkv_finished_prompt_tokens",
            "Prompt tokens of requests that ended, by the prompt's length.",
            ("prompt_tokens", "source"),
        )
        ttft = HistogramMetricFamily(
            "jaxkv_time_to_first_token_seconds",
            "From arrival to the first token, of requests that ended, by the prompt's length.",
            labels=(*_LABELS, "prompt_tokens"),
        )
        for name, counts in by_length:
            requests.add_metric((*self._labels, name), counts.requests)
            tokens.add_metric((*self._labels, name, "cached"), counts.cached_tokens)
            tokens.add_metric((*self._labels, name, "computed"), counts.prompt_tokens - counts.cached_tokens)
            ttft.add_metric((*self._labels, name), _buckets(counts.ttft), counts.ttft.total)
        yield from (requests, tokens, ttft)
        for name, text in (
            ("block_age", "From when a full block was written to its eviction."),
            ("block_idle", "From when the last request let go of a full block to its eviction."),
            ("block_reuse_gap", "From when the last request let go of a cached block to when the next one found it."),
        ):
            histogram = now.histograms[name]
            family = HistogramMetricFamily(f"jaxkv_{name}_seconds", text, labels=_LABELS)
            family.add_metric(self._labels, _buckets(histogram), histogram.total)
            yield family

    def recent(self, report: TrafficReport) -> Iterator[Metric]:
        """Nothing while no request has ended in the window: there are no percentiles of nothing."""
        if not report.whole.requests:
            return
        lengths = [group for group in report.by_prompt_length if group.requests]
        yield from self._groups("", "by the prompt's length", "prompt_tokens", lengths)
        yield from self._groups("caller_", "by caller", "caller", report.by_caller)
        hit_rates = self._gauge("jaxkv_recent_hit_rate", "Share of prompt tokens that were cached.", ("window",))
        for window, group in report.windows.items():
            if group.requests:
                hit_rates.add_metric((*self._labels, window), group.hit_rate)
        yield hit_rates
        seconds = self._gauge(
            "jaxkv_recent_request_seconds", "Times of requests, of all together.", ("phase", "percentile")
        )
        for phase in _PHASES:
            self._add(seconds, (phase,), getattr(report.whole, phase))
        yield seconds

    def _groups(self, prefix: str, how: str, label: str, groups: Sequence[Group]) -> Iterator[Metric]:
        requests = self._gauge(f"jaxkv_recent_{prefix}requests", f"Requests {how}.", (label,))
        tokens = self._gauge(f"jaxkv_recent_{prefix}prompt_tokens", f"Prompt tokens {how}.", (label, "source"))
        rates = self._gauge(
            f"jaxkv_recent_{prefix}hit_rate_reached", f"Hit rate that so many requests reach, {how}.",
            (label, "percentile"),
        )  # fmt: skip
        ttft = self._gauge(
            f"jaxkv_recent_{prefix}time_to_first_token_seconds", f"From arrival to the first token, {how}.",
            (label, "percentile"),
        )  # fmt: skip
        for group in groups:
            requests.add_metric((*self._labels, group.name), group.requests)
            tokens.add_metric((*self._labels, group.name, "cached"), group.cached_tokens)
            tokens.add_metric((*self._labels, group.name, "computed"), group.prompt_tokens - group.cached_tokens)
            self._add(rates, (group.name,), group.hit_rates)
            self._add(ttft, (group.name,), group.ttft)
        yield from (family for family in (requests, tokens, rates, ttft) if family.samples)

    def _add(self, family: GaugeMetricFamily, labels: tuple[str, ...], values: Quantiles) -> None:
        for percentile, name in _PERCENTILES.items():
            if not math.isnan(value := getattr(values, name)):
                family.add_metric((*self._labels, *labels, percentile), value)

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=(*_LABELS, *labels))

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, f"{text} Of the latest requests.", labels=(*_LABELS, *labels))


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    cumulative = list(itertools.accumulate(histogram.buckets))
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, cumulative, strict=True))
