"""A real Prometheus scrapes the server and answers every query of our board and of vLLM's (`make test-prometheus`)."""

import json
import math
import pathlib
import random
import runpy
import shutil
import socket
import subprocess
import threading

import httpx
import pytest

pytestmark = pytest.mark.prometheus

ROOT = pathlib.Path(__file__).parents[2]
OBSERVABILITY = ROOT / "observability"
SIM_ENGINE = runpy.run_path(str(pathlib.Path(__file__).with_name("test_metrics.py")))["sim_engine"]
SCRAPES = 12  # one a second
# As a board of that age would have it; long enough for all scrapes.
RATE_INTERVAL = "30s"


def per_second(name, by=None):
    return f"sum{f' by ({by})' if by else ''} (rate(vllm:{name}[30s]))"


def latency(name):
    """Percentiles and mean, as panels on latency have them."""
    quantiles = [f"histogram_quantile({q}, {per_second(f'{name}_bucket', 'le')})" for q in (0.5, 0.9, 0.95, 0.99)]
    return [*quantiles, f"{per_second(f'{name}_sum')} / {per_second(f'{name}_count')}"]


# What vLLM's public boards ask for, metric by metric.
VLLM_QUERIES = [
    *latency("e2e_request_latency_seconds"),
    *latency("inter_token_latency_seconds"),
    *latency("time_to_first_token_seconds"),
    *latency("request_time_per_output_token_seconds"),
    per_second("prompt_tokens_total"),
    per_second("generation_tokens_total"),
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sum by (le) (increase(vllm:request_prompt_tokens_bucket[30s]))",
    "sum by (le) (increase(vllm:request_generation_tokens_bucket[30s]))",
    "sum by (finished_reason) (increase(vllm:request_success_total[30s]))",
    per_second("request_queue_time_seconds_sum"),
    per_second("request_prefill_time_seconds_sum"),
    per_second("request_decode_time_seconds_sum"),
    per_second("request_max_num_generation_tokens_sum"),
    f"{per_second('prefix_cache_hits_total')} / {per_second('prefix_cache_queries_total')}",
    f"{per_second('prompt_tokens_cached_total')} / {per_second('prompt_tokens_total')}",
    'sum by (job, model_name, instance, engine) (rate(vllm:num_preemptions_total{job="jaxkv"}[30s]))',
    "sum by (reason) (vllm:num_requests_waiting_by_reason)",
    "sum by (source) (rate(vllm:prompt_tokens_by_source_total[30s]))",
    "vllm:cache_config_info",
]


def board_queries():
    board = json.loads((OBSERVABILITY / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def traffic(byte_level):
    """A server with requests running all the time: shared prefixes, preemptions, several clients."""
    running = runpy.run_path(str(pathlib.Path(__file__).with_name("conftest.py")))["Running"]
    end = threading.Event()

    def client(number):
        rng = random.Random(number)
        with httpx.Client(base_url=server.url, timeout=30) as http:
            while not end.wait(0.02):
                prompt = [*range(rng.choice([0, 100]), 160), rng.randrange(200)]
                body = {"prompt": prompt, "max_tokens": rng.randint(1, 90), "ignore_eos": rng.random() < 0.5}
                assert http.post("/v1/completions", json=body).status_code == 200

    with running(byte_level, engine=SIM_ENGINE(byte_level.vocab_size, num_blocks=31)) as server:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        yield server
        end.set()
        for thread in threads:
            thread.join(30)


@pytest.fixture(scope="module")
def prometheus(traffic, tmp_path_factory, until):
    """query(path, **parameters) of one that has scraped the server for some seconds."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (OBSERVABILITY / "prometheus.yml").read_text()
    for shipped, here in (("localhost:8000", traffic.url.removeprefix("http://")), ("interval: 5s", "interval: 1s")):
        assert shipped in config
        config = config.replace(shipped, here)
    (folder / "prometheus.yml").write_text(config)
    port = free_port()
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:

            def query(path, **parameters):
                response = http.get(f"/api/v1/{path}", params=parameters)
                assert response.status_code == 200, response.text
                return response.json()["data"]

            def is_ready():
                assert process.poll() is None, log.read_text()
                try:
                    return http.get("/-/ready").status_code == 200
                except httpx.TransportError:  # not listening yet
                    return False

            def num_scrapes():
                found = query("query", query='count_over_time(up{job="jaxkv"}[1m])')["result"]
                return int(found[0]["value"][1]) if found else 0

            until(is_ready, timeout=30)
            until(lambda: num_scrapes() >= SCRAPES, timeout=60)
            yield query
    finally:
        process.terminate()
        process.wait(20)


def program(name):
    path = shutil.which(name)
    assert path, f"{name} is not installed: apt-get install prometheus"
    return path


def test_every_scrape_succeeded(prometheus):
    (up,) = prometheus("query", query="min_over_time(up[1m])")["result"]
    assert up["value"][1] == "1"
    (target,) = prometheus("targets")["activeTargets"]
    assert target["lastError"] == "" and target["health"] == "up"


@pytest.mark.parametrize("expression", VLLM_QUERIES)
def test_vllms_boards_get_data(prometheus, expression):
    numbers(prometheus, expression)


@pytest.mark.parametrize("expression", board_queries())
def test_our_board_gets_data(prometheus, expression):
    numbers(prometheus, expression.replace("$__rate_interval", RATE_INTERVAL).replace("$model_name", ".*"))


def numbers(prometheus, expression):
    assert "$" not in expression
    result = prometheus("query", query=expression)["result"]
    values = [float(series["value"][1]) for series in result]
    assert values and not any(math.isnan(value) for value in values), (expression, result)
    return values


def test_values_are_what_the_traffic_makes(prometheus):
    def value(expression):
        (number,) = numbers(prometheus, expression)
        return number

    assert 0 < value(f"{per_second('prefix_cache_hits_total')} / {per_second('prefix_cache_queries_total')}") < 1
    assert value("jaxkv_preemptions_total") > 0 and value("jaxkv_evictions_total") > 0
    missed = "sum (jaxkv_prefix_cache_missed_tokens_total) + sum (jaxkv_prefix_cache_hit_tokens_total)"
    assert value(f"{missed} - sum (jaxkv_prefix_cache_queried_tokens_total)") == 0
    assert 0 < value(latency("time_to_first_token_seconds")[0]) < value(latency("e2e_request_latency_seconds")[3])


def test_the_boards_variables_have_values(prometheus):
    assert prometheus("label/model_name/values") == ["fake"]
    variables = json.loads((OBSERVABILITY / "grafana.json").read_text())["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "model_name"]
    assert variables[1]["definition"] == "label_values(vllm:num_requests_running, model_name)"


def test_the_board_covers_what_it_should():
    asked = " ".join(board_queries())
    for name in (
        "jaxkv_prefix_cache_hit_tokens_total", "jaxkv_prefix_cache_missed_tokens_total", "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds", "jaxkv_request_seconds_total",
        "vllm:kv_cache_usage_perc", "jaxkv_preemptions_total", "jaxkv_decode_steps_per_call", "jaxkv_finished_prompt_tokens_total",
        "jaxkv_recent_time_to_first_token_seconds", "jaxkv_recent_caller_prompt_tokens", "jaxkv_block_idle_seconds_bucket",
        "0.5,", "0.95,", "0.99,",
    ):  # fmt: skip
        assert name in asked
    panels = json.loads((OBSERVABILITY / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap or stick out"


def test_promtool_finds_nothing_but_vllms_names(traffic):
    text = traffic.http.get("/metrics").text
    assert "jaxkv_" in text

    def check(text):
        run = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
        return run.returncode, [line for line in (run.stdout + run.stderr).splitlines() if line]

    code, complaints = check(text)
    allowed = {'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix'}
    assert code == 3 and {line for line in complaints if "should not contain ':'" not in line} == allowed
    own = [line for line in text.splitlines(keepends=True) if "vllm:" not in line]
    assert check("".join(own)) == (0, [])


def test_promtool_accepts_our_configuration():
    run = subprocess.run(
        [program("promtool"), "check", "config", str(OBSERVABILITY / "prometheus.yml")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
