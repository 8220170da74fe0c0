"""/dashboard and its data; what a browser makes of them is tested in test_dashboard_browser.py."""

import base64
import hashlib
import math
import re

import httpx
import pytest

from jaxkv.core.metrics import EngineStats
from jaxkv.server.history import MOST, History
from tests.support.traffic_scenario import ScenarioServer


@pytest.fixture(scope="module")
def scenario():
    with ScenarioServer("hidden_tail") as server:
        yield server


def data_of(url):
    response = httpx.get(f"{url}/dashboard/data", timeout=20)
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    return response.json()


def test_the_averages_trap_is_in_the_data(scenario):
    """A good mean; one bucket of lengths hits nothing, and its slowest wait many times as long as the others."""
    data = data_of(scenario.url)
    assert data["recent"]["hit_rate"] > 0.9 and data["recent"]["ttft"]["p95"] < 0.1
    lengths = {group["name"]: group for group in data["by_prompt_length"]}
    assert lengths["513-2048"]["hit_rate"] > 0.9 and lengths["2049-8192"]["hit_rate"] == 0
    assert lengths["2049-8192"]["ttft"]["p99"] > 8 * lengths["513-2048"]["ttft"]["p99"]
    assert [(tail["by"], tail["name"]) for tail in data["tails"]] == [
        ("prompt_length", "2049-8192"), ("caller", "reports")
    ]  # fmt: skip
    callers = {group["name"]: group for group in data["by_caller"]}
    assert callers["reports"]["hit_rate"] == 0 and callers["shop"]["hit_rate"] > 0.9
    assert lengths["1-128"]["hit_rate"] is None is lengths["1-128"]["ttft"]["p99"]  # nothing is known


def test_sums_add_up(scenario):
    data = data_of(scenario.url)
    recent, pool, totals = data["recent"], data["pool"], data["totals"]
    assert pool["owned"] + pool["cached"] + pool["free"] == pool["blocks"] == 6000
    for parts in (data["by_prompt_length"], data["by_caller"], data["by_time"]):
        assert sum(part["requests"] for part in parts) == recent["requests"] == sum(totals["finished"].values())
    assert totals["hit"] + sum(totals["missed"].values()) == totals["queried"]
    assert recent["cached_tokens"] + sum(recent["missed"].values()) == recent["prompt_tokens"]
    assert sum(data["blocks"]["age"]["counts"]) == sum(data["blocks"]["idle"]["counts"]) == totals["evictions"] > 0
    assert sum(data["blocks"]["reuse_gap"]["counts"]) > 0
    history = data["history"]
    assert len({len(values) for values in history.values()}) == 1 and len(history["time"]) > 100
    assert all(sum(each) == 6000 for each in zip(history["owned"], history["cached"], history["free"], strict=True))


def test_the_page_needs_nothing_from_elsewhere(scenario):
    page = httpx.get(f"{scenario.url}/dashboard")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert set(re.findall(r"https?://[^\s\"']+", page.text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page.text) == ["data:,"]
    assert "innerHTML" not in page.text and "insertAdjacentHTML" not in page.text and " style=" not in page.text
    assert len(page.content) < 40_000


def test_no_key_is_needed_as_for_metrics(serve):
    server = serve(guards={"api_keys": ["secret"]})
    assert server.http.get("/dashboard").status_code == server.http.get("/dashboard/data").status_code == 200
    assert server.http.get("/dashboard/other").status_code == 401
    assert server.http.post("/dashboard").status_code == 405


def test_a_failed_engine_is_told(serve, until):
    server = serve()
    server.engine.break_with = ValueError("broken")
    server.post("/v1/completions", prompt="x")
    data = server.http.get("/dashboard/data").json()
    assert data["failed"] == "ValueError: broken" and data["recent"]["requests"] == 0
    assert data["model"] == "fake" and data["by_time"] == data["tails"] == []


def test_refused_requests_are_counted(serve):
    server = serve(limits={"max_num_queued_reqs": 1})
    assert server.post("/v1/completions", prompt=["a", "b"]).status_code == 400
    server.async_engine.num_refused = 3
    assert server.http.get("/dashboard/data").json()["load"] == {"running": 0, "waiting": 0, "refused": 3}


def test_history_is_bounded():
    history = History()
    for number in range(MOST + 10):
        history.add(float(number), EngineStats().snapshot(num_blocks=10, num_owned_blocks=3, num_cached_blocks=5))
    points = history.points()
    assert len(points) == MOST and points[0].time == 10.0 and points[-1][1:] == (0, 0, 3, 5, 2)
    assert math.isfinite(points[-1].time)
