"""What a serving benchmark tells, under the names that `vllm bench serve` gives: in its JSON and in its table."""

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchlib.serving_client import Outcome

_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
# Label in the table, key in the JSON, unit.
_TOTALS = (
    ("Successful requests:", "completed", "requests"),
    ("Failed requests:", "failed", "requests"),
    ("Benchmark duration (s):", "duration", "s"),
    ("Total input tokens:", "total_input_tokens", "tokens"),
    ("Total generated tokens:", "total_output_tokens", "tokens"),
    ("Request throughput (req/s):", "request_throughput", "requests/s"),
    ("Output token throughput (tok/s):", "output_throughput", "tokens/s"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", "tokens/s"),
    ("Peak concurrent requests:", "max_concurrent_requests", "requests"),
    ("Total token throughput (tok/s):", "total_token_throughput", "tokens/s"),
)
# Beyond vLLM's.
_CACHE = (
    ("Prompt tokens from the prefix cache:", "cached_prompt_tokens", "tokens"),
    ("Prefix cache hit rate (/metrics):", "prefix_cache_hit_rate", "share"),
    ("Preemptions (/metrics):", "num_preemptions", "preemptions"),
)
_SERVER_COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def summary(outcomes: Sequence[Outcome], duration: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """vLLM's numbers, by its keys; latencies are in milliseconds and of the requests that succeeded."""
    good = [outcome for outcome in outcomes if not outcome.error]
    total_input, total_output = sum(o.prompt_len for o in good), sum(o.output_tokens for o in good)
    result = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "cached_prompt_tokens": sum(o.cached_tokens for o in good),
    }
    for name, values in latencies(good).items():
        values = values or [0.0]
        result[f"mean_{name}_ms"] = statistics.fmean(values) * 1000
        result[f"median_{name}_ms"] = statistics.median(values) * 1000
        result[f"std_{name}_ms"] = statistics.pstdev(values) * 1000
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile)) * 1000
    return result


def latencies(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds, one a request but for itl, which has one an interval."""
    return {
        "ttft": [o.ttft for o in good],
        "tpot": [(o.latency - o.ttft) / (o.output_tokens - 1) for o in good if o.output_tokens > 1],
        "itl": [seconds for o in good for seconds in o.itl],
        "e2el": [o.latency for o in good],
    }


def details(outcomes: Sequence[Outcome]) -> dict[str, list]:
    """vLLM's lists with an entry a request."""
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def table(result: dict[str, Any]) -> list[str]:
    """vLLM's lines, and ours about the cache below them."""
    lines = [" Serving Benchmark Result ".center(50, "=")]
    lines += [_line(label, result[key]) for label, key, _ in _TOTALS]
    for name, (short, title) in _TITLES.items():
        lines += [title.center(50, "-")]
        lines += [_line(f"{word} {short} (ms):", result[key]) for word, key in _latency_keys(result, name)]
    lines += ["Prefix cache".center(50, "-")]
    lines += [_line(label, result[key]) for label, key, _ in _CACHE if key in result]
    return [*lines, "=" * 50]


def units(result: dict[str, Any]) -> dict[str, str]:
    """Unit of every key that is to be reported."""
    plain = {key: unit for _, key, unit in (*_TOTALS, *_CACHE) if key in result}
    return plain | {key: "ms" for name in _TITLES for _, key in _latency_keys(result, name)}


def server_counters(exposition: str) -> dict[str, float]:
    """Totals over all label values out of a /metrics page; what it does not have is missing."""
    found = {}
    for key, name in _SERVER_COUNTERS.items():
        values = re.findall(rf"^{name}(?:{{.*}})? (\S+)", exposition, re.MULTILINE)
        if values:
            found[key] = sum(map(float, values))
    return found


def server_side(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the server counted in between."""
    grown = {key: after[key] - before[key] for key in before.keys() & after.keys()}
    result = {}
    if "queries" in grown and "hits" in grown:
        result["prefix_cache_hit_rate"] = grown["hits"] / grown["queries"] if grown["queries"] else 0.0
    if "preemptions" in grown:
        result["num_preemptions"] = grown["preemptions"]
    return result


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value if isinstance(value, int) else f'{value:.2f}'}"


def _latency_keys(result: dict[str, Any], name: str) -> list[tuple[str, str]]:
    """(word for the table, key), percentiles last."""
    keys = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms")]
    found = [key for key in result if re.fullmatch(rf"p[\d.]+_{name}_ms", key)]
    return keys + [(key.split("_")[0].upper(), key) for key in found]


def _peak_tokens(good: Sequence[Outcome]) -> float:
    """Most tokens that came within one second, counted from the first request's start."""
    begin = min((o.start for o in good), default=0.0)
    seconds: dict[int, int] = {}
    for outcome in good:
        time = outcome.start - begin + outcome.ttft
        for interval in (0.0, *outcome.itl):
            time += interval
            seconds[int(time)] = seconds.get(int(time), 0) + 1
    return float(max(seconds.values(), default=0))


def _peak_requests(good: Sequence[Outcome]) -> int:
    """Most requests that were under way within one second."""
    begin = min((o.start for o in good), default=0.0)
    seconds: dict[int, int] = {}
    for outcome in good:
        first, last = outcome.start - begin, outcome.start - begin + outcome.latency
        for second in range(math.floor(first), math.floor(last) + 1):
            seconds[second] = seconds.get(second, 0) + 1
    return max(seconds.values(), default=0)
