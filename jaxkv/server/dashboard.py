"""/dashboard: one page that needs nothing from anywhere else, and the numbers that it asks for every two seconds."""

import base64
import dataclasses
import hashlib
import importlib.resources
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from jaxkv.core.metrics import EngineSnapshot, Histogram
from jaxkv.insight.hit_rates import Group
from jaxkv.insight.traffic import WINDOW_SECONDS
from jaxkv.server.history import History, HistoryPoint
from jaxkv.server.serving import Serving

_PAGE = importlib.resources.files("jaxkv.server").joinpath("dashboard.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """The page's one element of this kind, as a content security policy names it."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


# Nothing from elsewhere, and no script but the page's own: callers' names are what strangers sent.
_HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash_of('style')}; "
    f"script-src {_hash_of('script')}; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page() -> Response:
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


def data(serving: Serving) -> dict[str, Any]:
    """What the page shows, ready for JSON; NaN where nothing is known. Times are seconds, `now` and `start` Unix time."""
    engine, report = serving.engine, serving.traffic.report()
    now = engine.snapshot
    return {
        "model": serving.model_names[0],
        "failed": engine.failed,
        "now": report.now,
        "window_seconds": WINDOW_SECONDS,
        "load": {"running": now.num_running, "waiting": now.num_waiting, "refused": engine.num_refused},
        "pool": _pool(now),
        "totals": _totals(now),
        "recent": _group(report.whole),
        "windows": {name: _group(group) for name, group in report.windows.items()},
        "by_prompt_length": [_group(group) for group in report.by_prompt_length],
        "by_caller": [_group(group) for group in report.by_caller],
        "by_time": [dataclasses.asdict(time_bin) for time_bin in report.by_time],
        "tails": [
            {"by": by, **dataclasses.asdict(tail)}
            for by, tails in (
                ("prompt_length", report.tails_by_prompt_length),
                ("caller", report.tails_by_caller),
            )
            for tail in tails
        ],
        "blocks": {
            name: _histogram(now.histograms[f"block_{name}"]) for name in ("age", "idle", "reuse_gap")
        },
        "history": _history(serving.history),
    }  # fmt: skip


def _group(group: Group) -> dict[str, Any]:
    return {**dataclasses.asdict(group), "hit_rate": group.hit_rate}


def _pool(now: EngineSnapshot) -> dict[str, int]:
    owned, cached = now.num_owned_blocks, now.num_cached_blocks
    return {"owned": owned, "cached": cached, "free": now.num_blocks - owned - cached, "blocks": now.num_blocks}


def _totals(now: EngineSnapshot) -> dict[str, Any]:
    """Since the start."""
    return {
        "finished": {reason.value: count for reason, count in now.num_finished.items()},
        "prompt_tokens": now.prompt_tokens,
        "cached_tokens": now.cached_tokens,
        "computed_tokens": now.computed_tokens,
        "generated_tokens": now.generated_tokens,
        "queried": now.queried,
        "hit": now.hit,
        "missed": {reason.value: count for reason, count in now.missed.items()},
        "preemptions": now.preemptions,
        "evictions": now.num_evictions,
    }


def _histogram(histogram: Histogram) -> Mapping[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.buckets}


def _history(history: History) -> dict[str, list[float]]:
    """A list for each field of HistoryPoint."""
    points = history.points()
    return {field: [point[place] for point in points] for place, field in enumerate(HistoryPoint._fields)}
