"""/metrics over the real scheduler on a simulated device: names, labels, buckets, and values after known traffic."""

import collections
import concurrent.futures
import dataclasses
import random

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.control.engine import Engine
from jaxkv.control.executor import ExecutorLimits
from jaxkv.control.scheduler_config import SchedulerConfig
from jaxkv.core.clock import SimulatedClock
from jaxkv.core.config import EngineConfig
from jaxkv.core.metrics import EngineStats
from jaxkv.core.request import Request, SamplingParams
from jaxkv.server.metrics import cache_config_labels, metrics_registry
from jaxkv.simulation.cost_model import ConstantCostModel
from jaxkv.simulation.sim_executor import SimExecutor

# What vLLM exposes and means something here, with the labels beside model_name and engine; type as Prometheus sees it.
VLLM = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_by_source": ("counter", ("source",)),
    "prompt_tokens_cached": ("counter", ()),
    "prompt_tokens_cached_by_source": ("counter", ("source",)),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
}
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # up to max_model_len, 256
BUCKETS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
OURS = {
    "prefix_cache_queried_tokens": ("counter", ()),
    "prefix_cache_hit_tokens": ("counter", ("block",)),
    "prefix_cache_missed_tokens": ("counter", ("reason",)),
    "cached_tokens": ("counter", ()),
    "computed_tokens": ("counter", ()),
    "preemptions": ("counter", ()),
    "evictions": ("counter", ()),
    "kv_blocks": ("gauge", ("state",)),
    "steps": ("counter", ()),
    "cascade_rows": ("counter", ()),
    "compiles": ("counter", ()),
    "request_seconds": ("counter", ("phase",)),
    "decode_steps_per_call": ("histogram", ()),
    "finished_requests": ("counter", ("prompt_tokens",)),
    "finished_prompt_tokens": ("counter", ("prompt_tokens", "source")),
    "time_to_first_token_seconds": ("histogram", ("prompt_tokens",)),
    "block_age_seconds": ("histogram", ()),
    "block_idle_seconds": ("histogram", ()),
    "block_reuse_gap_seconds": ("histogram", ()),
}
# Of the latest requests; there are none at the start.
RECENT = {
    "requests": ("prompt_tokens",),
    "prompt_tokens": ("prompt_tokens", "source"),
    "hit_rate_reached": ("prompt_tokens", "percentile"),
    "time_to_first_token_seconds": ("prompt_tokens", "percentile"),
    "caller_requests": ("caller",),
    "caller_prompt_tokens": ("caller", "source"),
    "caller_hit_rate_reached": ("caller", "percentile"),
    "caller_time_to_first_token_seconds": ("caller", "percentile"),
    "hit_rate": ("window",),
    "request_seconds": ("phase", "percentile"),
}
LIMITS = ExecutorLimits(
    num_blocks=41, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_seqs=4, max_model_len=256,
    max_decode_steps=8,
)  # fmt: skip


def sim_engine(vocab_size=300, config=SchedulerConfig(), **limits):
    clock = SimulatedClock(0.0)
    limits = dataclasses.replace(LIMITS, **limits)
    return Engine(SimExecutor(limits, ConstantCostModel(), clock, vocab_size=vocab_size), config, clock=clock)


def parsed(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


class Values:
    """One scrape; `values("name", label=...)` of samples, the common labels checked and left out."""

    def __init__(self, text, model_name="fake"):
        self.samples = {}
        for family in parsed(text).values():
            for sample in family.samples:
                labels = dict(sample.labels)
                if family.name == "vllm:admission_rejections":  # vLLM's has no engine
                    assert labels.pop("model_name") == model_name
                elif not family.name.startswith("process_") and family.name != "vllm:cache_config_info":
                    assert (labels.pop("model_name"), labels.pop("engine")) == (model_name, "0"), sample
                self.samples[sample.name, tuple(sorted(labels.items()))] = sample.value

    def __call__(self, name, **labels):
        return self.samples[name, tuple(sorted(labels.items()))]

    def by(self, name, label=None):
        """The values of the one label of a family; or the sums over the others."""
        sums = collections.Counter()
        for (sample, labels), value in self.samples.items():
            if sample == name:
                sums[labels[0][1] if label is None else dict(labels)[label]] += value
        return dict(sums)


@pytest.fixture
def sim_server(serve, byte_level):
    """Four rows, 40 blocks of 16 tokens."""
    return serve(engine=sim_engine(byte_level.vocab_size))


def scrape(server):
    response = server.http.get("/metrics")
    assert response.status_code == 200
    return Values(response.text)


def complete(server, prompt, **body):
    response = server.post("/v1/completions", prompt=prompt, ignore_eos=True, **body)
    assert response.status_code == 200, response.text
    return response.json()


def test_names_types_and_labels(sim_server):
    families = parsed(sim_server.http.get("/metrics").text)
    expected = {f"vllm:{name}": value for name, value in VLLM.items()}
    expected |= {f"vllm:{name}": ("histogram", ()) for name in BUCKETS}
    expected |= {f"jaxkv_{name}": value for name, value in OURS.items()}
    config = families.pop("vllm:cache_config_info")
    assert config.type == "gauge" and [sample.value for sample in config.samples] == [1]
    refused = families.pop("vllm:admission_rejections")
    assert refused.type == "counter"
    assert [sample.labels for sample in refused.samples] == [{"model_name": "fake", "reason": "max_num_queued_reqs"}]
    engine_families = {name: family for name, family in families.items() if not name.startswith("process_")}
    assert {name: family.type for name, family in engine_families.items()} == {n: t for n, (t, _) in expected.items()}
    for name, family in engine_families.items():
        labels = {"model_name", "engine", *expected[name][1]} | ({"le"} if family.type == "histogram" else set())
        assert family.documentation and family.samples, name
        # Of a histogram only the buckets have le.
        assert labels == set().union(*(sample.labels for sample in family.samples)), name
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6


def test_recent_gauges(sim_server):
    """What the latest requests were like, by length and by caller: the parts add up, and to what the counters say."""
    assert "jaxkv_recent_" not in sim_server.http.get("/metrics").text
    for number in range(6):
        complete(sim_server, list(range(10, 60)), max_tokens=3, user=f"u{number % 2}")
    complete(sim_server, list(range(150)), max_tokens=3)
    text = sim_server.http.get("/metrics").text
    families = {name: family for name, family in parsed(text).items() if name.startswith("jaxkv_recent_")}
    assert families.keys() == {f"jaxkv_recent_{name}" for name in RECENT}
    for name, labels in RECENT.items():
        family = families[f"jaxkv_recent_{name}"]
        assert family.type == "gauge" and family.documentation
        assert all(sample.labels.keys() == {"model_name", "engine", *labels} for sample in family.samples)
    values = Values(text)
    assert values.by("jaxkv_recent_requests") == {"1-128": 6, "129-512": 1}
    assert values.by("jaxkv_recent_caller_requests") == {"u0": 3, "u1": 3, "(none)": 1}
    finished = values.by("jaxkv_finished_prompt_tokens_total", "source")
    assert sum(finished.values()) == 6 * 50 + 150 and finished["cached"] == values("jaxkv_cached_tokens_total") > 0
    for name in ("jaxkv_recent_prompt_tokens", "jaxkv_recent_caller_prompt_tokens"):
        assert values.by(name, "source") == finished
    lengths = ("1-128", "129-512", "513-2048", "2049-8192", "8193-32768", "32769+")
    assert values.by("jaxkv_finished_requests_total") == dict.fromkeys(lengths, 0) | {"1-128": 6, "129-512": 1}
    first_tokens = [values("jaxkv_time_to_first_token_seconds_count", prompt_tokens=name) for name in lengths]
    assert first_tokens == [6, 1, 0, 0, 0, 0] and values("vllm:time_to_first_token_seconds_count") == 7
    rate = finished["cached"] / 450
    assert values.by("jaxkv_recent_hit_rate") == pytest.approx({"1m": rate, "5m": rate, "15m": rate})
    assert values("jaxkv_recent_hit_rate_reached", prompt_tokens="1-128", percentile="50") == pytest.approx(49 / 50)
    assert values("jaxkv_recent_hit_rate_reached", prompt_tokens="1-128", percentile="99") < 0.5  # the first missed
    slowest = values("jaxkv_recent_time_to_first_token_seconds", prompt_tokens="129-512", percentile="99")
    assert slowest > values("jaxkv_recent_time_to_first_token_seconds", prompt_tokens="1-128", percentile="99") > 0
    assert values("jaxkv_block_reuse_gap_seconds_count") > 0 == values("jaxkv_evictions_total")


def test_buckets(sim_server):
    families = parsed(sim_server.http.get("/metrics").text)
    for name, bounds in BUCKETS.items():
        samples = families[f"vllm:{name}"].samples
        found = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
        assert found == [*bounds, float("inf")], name
    steps = [sample.labels.get("le") for sample in families["jaxkv_decode_steps_per_call"].samples]
    assert steps == ["1.0", "2.0", "4.0", "8.0", "+Inf", None, None]


def test_values_after_known_traffic(sim_server):
    prompt = list(range(10, 50))  # 2.5 blocks
    complete(sim_server, prompt, max_tokens=9)
    complete(sim_server, prompt, max_tokens=9)  # finds two blocks and the head of a third
    complete(sim_server, prompt[:16] + list(range(100, 120)), max_tokens=1)  # shares a block
    values = scrape(sim_server)
    assert values("vllm:prompt_tokens_total") == 40 + 40 + 36
    assert values("vllm:generation_tokens_total") == 9 + 9 + 1
    full, partial = values("jaxkv_prefix_cache_hit_tokens_total", block="full"), 7
    assert full == 32 + 16 and values("jaxkv_prefix_cache_hit_tokens_total", block="partial") == partial
    assert values("vllm:prefix_cache_queries_total") == 116 == values("jaxkv_prefix_cache_queried_tokens_total")
    assert values("vllm:prefix_cache_hits_total") == 55 == values("vllm:prompt_tokens_cached_total")
    assert (
        values("jaxkv_cached_tokens_total")
        == 55
        == values("vllm:prompt_tokens_cached_by_source_total", source="device")
    )
    assert values.by("vllm:prompt_tokens_by_source_total") == {"local_compute": 61, "local_cache_hit": 55}
    assert values("jaxkv_computed_tokens_total") == 61
    missed = values.by("jaxkv_prefix_cache_missed_tokens_total")
    assert {reason: count for reason, count in missed.items() if count} == {
        "first_seen": 40 + 20, "last_token": 1
    }  # fmt: skip
    assert values.by("vllm:request_success_total") == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert values("vllm:request_prompt_tokens_sum") == 116 and values("vllm:request_prompt_tokens_count") == 3
    assert values("vllm:request_prefill_kv_computed_tokens_sum") == 61
    assert values("vllm:request_generation_tokens_sum") == 19 == values("vllm:request_params_max_tokens_sum")
    assert values("vllm:request_generation_tokens_bucket", le="5.0") == 1
    assert values("vllm:request_max_num_generation_tokens_sum") == 19
    assert values("vllm:request_params_n_count") == 3 == values("vllm:request_params_n_bucket", le="1.0")
    assert values("vllm:request_num_preemptions_count") == 3 and values("vllm:request_num_preemptions_sum") == 0
    # A prefill step gives a request's first token, one call of 8 steps the other 8; nothing is in flight beside them.
    assert values("jaxkv_steps_total") == 5 == values("vllm:iteration_tokens_total_count")
    assert values("vllm:iteration_tokens_total_sum") == 61 + 19
    assert values("jaxkv_decode_steps_per_call_count") == 2 and values("jaxkv_decode_steps_per_call_sum") == 16
    assert values("jaxkv_decode_steps_per_call_bucket", le="4.0") == 0
    assert values("vllm:time_to_first_token_seconds_count") == 3
    assert values("vllm:inter_token_latency_seconds_count") == 2
    # 0.5 ms a call, 8 steps of 4 ms and 10 us a row.
    assert values("vllm:inter_token_latency_seconds_sum") == pytest.approx(2 * (0.0005 + 8 * 0.00401))
    assert values("vllm:request_time_per_output_token_seconds_count") == 2
    split = values.by("jaxkv_request_seconds_total")
    assert sum(split.values()) == pytest.approx(values("vllm:e2e_request_latency_seconds_sum"))
    assert split["decode"] == pytest.approx(values("vllm:request_decode_time_seconds_sum")) and split["prefill"] > 0
    together = split["prefill"] + split["decode"]
    assert values("vllm:request_inference_time_seconds_sum") == pytest.approx(together)
    assert (values("vllm:num_requests_running"), values("vllm:num_requests_waiting")) == (0, 0)
    assert values("vllm:kv_cache_usage_perc") == 0 and values("jaxkv_compiles_total") == 0
    blocks = values.by("jaxkv_kv_blocks")
    assert sum(blocks.values()) == 40 and blocks["owned"] == 0 and blocks["cached"] > 0


def test_the_sequences_of_a_prompt_are_one_group(sim_server):
    complete(sim_server, [5] * 10, n=3, max_tokens=7)
    values = scrape(sim_server)
    assert values("vllm:request_params_n_count") == 1 and values("vllm:request_params_n_sum") == 3
    assert values("vllm:request_max_num_generation_tokens_count") == 1
    assert values("vllm:request_max_num_generation_tokens_sum") == 7
    assert values("vllm:request_generation_tokens_count") == 3 and values("vllm:request_generation_tokens_sum") == 21


def test_queue_and_pool_while_requests_run():
    engine = sim_engine(num_blocks=21)
    for name in "abcdef":
        engine.add(Request(name, tuple(range(ord(name), ord(name) + 20)), SamplingParams(max_tokens=30)))
    engine.step()
    values = Values(exposition(engine))
    assert (values("vllm:num_requests_running"), values("vllm:num_requests_waiting")) == (4, 2)
    assert values("vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert 8 / 20 <= values("vllm:kv_cache_usage_perc") == values("jaxkv_kv_blocks", state="owned") / 20 <= 1
    engine.abort("a")
    engine.step()
    assert Values(exposition(engine)).by("vllm:request_success_total")["abort"] == 1


def exposition(source, **settings):
    """`source`: has a snapshot, as Engine and EngineStats do."""
    return generate_latest(metrics_registry(source.snapshot, "fake", 256, settings)).decode()


@pytest.mark.parametrize("seed", range(2))
def test_counters_never_go_down_and_add_up(seed):
    """Random requests in a pool too small for them, aborts, resets of the cache."""
    rng = random.Random(seed)
    engine = sim_engine(config=SchedulerConfig(eos_token_ids=tuple(range(10))), num_blocks=20)
    before, number, steps = {}, 0, 0
    while number < 150 or engine.has_work():
        if number < 150 and rng.random() < 0.4:
            prompt = tuple(range(rng.choice([0, 50]), rng.choice([60, 90]))) + tuple(rng.choices(range(200), k=3))
            sampling = SamplingParams(max_tokens=rng.randint(1, 150), n=rng.choice([1, 1, 2]), seed=number)
            engine.add(Request(str(number), prompt, sampling, cache_salt=rng.choice([None, "a"])))
            number += 1
        if rng.random() < 0.02:
            engine.abort(str(rng.randrange(number + 1)))
        if rng.random() < 0.01:
            engine.reset_prefix_cache(preempt_running=rng.random() < 0.5)
        engine.step()
        engine.scheduler.check()
        steps += 1
        if steps % 20 == 0 or not engine.has_work():
            values = Values(exposition(engine))
            before = check_against(before, values)
    preempted = values("vllm:num_preemptions_total")
    assert preempted > 0 and preempted == values("vllm:request_num_preemptions_sum") == values(
        "jaxkv_preemptions_total"
    )
    finished = values.by("vllm:request_success_total")
    assert min(finished["stop"], finished["length"], finished["abort"]) > 0 and finished["error"] == 0
    assert sum(finished.values()) == engine.stats.num_requests == values("vllm:e2e_request_latency_seconds_count")
    assert values("vllm:request_params_n_count") == 150
    assert values("vllm:request_params_n_sum") == engine.stats.num_requests
    assert values("vllm:request_generation_tokens_sum") == values("vllm:generation_tokens_total")
    missed = values.by("jaxkv_prefix_cache_missed_tokens_total")
    assert values("jaxkv_evictions_total") > 0 and missed["evicted"] > 0 and missed["recomputed"] > 0
    assert sum(values.by("jaxkv_finished_requests_total").values()) == engine.stats.num_requests
    assert sum(values.by("jaxkv_finished_prompt_tokens_total", "source").values()) == values(
        "vllm:request_prompt_tokens_sum"
    )


def check_against(before, values):
    """No counter is below an earlier scrape's, and they fit together; returns the counters."""
    ends = ("_total", "_bucket", "_sum", "_count")
    now = {key: n for key, n in values.samples.items() if key[0].endswith(ends) and not key[0].startswith("process_")}
    assert len(now) > 300 and now.keys() >= before.keys()
    assert all(value >= before.get(key, 0) for key, value in now.items())
    queried = values("jaxkv_prefix_cache_queried_tokens_total")
    hit = sum(values.by("jaxkv_prefix_cache_hit_tokens_total").values())
    missed = values.by("jaxkv_prefix_cache_missed_tokens_total")
    assert hit + sum(missed.values()) == queried
    assert values("vllm:prefix_cache_queries_total") == queried - missed["recomputed"]
    assert sum(values.by("jaxkv_kv_blocks").values()) == 19
    for name in ("jaxkv_block_age_seconds_count", "jaxkv_block_idle_seconds_count"):
        assert values(name) == values("jaxkv_evictions_total")
    for name, bounds in BUCKETS.items():
        counts = [values(f"vllm:{name}_bucket", le=str(float(bound))) for bound in bounds]
        counts.append(values(f"vllm:{name}_bucket", le="+Inf"))
        assert counts == sorted(counts) and counts[-1] == values(f"vllm:{name}_count")
    return now


def test_every_scrape_beside_traffic_is_consistent(sim_server):
    def ask(number):
        complete(sim_server, [*range(number % 3, 30), number], max_tokens=5 + number % 7)

    scrapes = 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(ask, number) for number in range(240)]
        while not all(future.done() for future in pending):
            values = scrape(sim_server)
            hit = sum(values.by("jaxkv_prefix_cache_hit_tokens_total").values())
            missed = sum(values.by("jaxkv_prefix_cache_missed_tokens_total").values())
            assert hit + missed == values("jaxkv_prefix_cache_queried_tokens_total")
            assert values("jaxkv_computed_tokens_total") + values("vllm:generation_tokens_total") >= values(
                "vllm:iteration_tokens_total_sum"
            )
            scrapes += 1
    for future in pending:
        future.result()
    # The last token's news come after the snapshot that counts it.
    assert scrape(sim_server)("vllm:e2e_request_latency_seconds_count") == 240 and scrapes > 3


def test_a_snapshot_does_not_change():
    engine = sim_engine()
    engine.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=5)))
    engine.step()
    before = engine.snapshot()
    copy = repr(before)
    while engine.has_work():
        engine.step()
    assert repr(before) == copy != repr(engine.snapshot())


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0,text/plain;version=1.0.0;q=0.5"])
def test_format(sim_server, accept):
    """vLLM's names have a colon in whatever format a Prometheus prefers."""
    plain = sim_server.http.get("/metrics", headers={"accept": accept})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8" and plain.text.endswith("\n")
    assert "_created" not in plain.text and "vllm:num_requests_running{" in plain.text
    head = sim_server.http.head("/metrics")
    assert (
        head.status_code == 200
        and head.content == b""
        and head.headers["content-type"] == plain.headers["content-type"]
    )


def test_metrics_answer_while_a_step_takes_long_and_after_a_failure(serve, until):
    server = serve()
    server.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x")
        until(lambda: server.engine.added)
        assert scrape(server)("vllm:num_requests_running") == 0
        server.engine.break_with = ValueError("broken")
        server.engine.gate.set()
        assert answer.result().status_code == 503
    assert scrape(server)("vllm:generation_tokens_total") == 0


def test_metrics_need_no_key(serve):
    server = serve(guards={"api_keys": ["secret"]})
    assert server.http.get("/metrics").status_code == server.http.get("/load").status_code == 200
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/tokenizer_info"), ("GET", "/v1/models")):
        assert server.http.request(method, path).status_code == 401


def test_cache_config_info():
    config = EngineConfig(block_size=16, num_gpu_blocks_override=100, kv_cache_dtype="int8", max_pinned_blocks=3)
    engine = sim_engine()
    family = parsed(exposition(engine, **cache_config_labels(config)))["vllm:cache_config_info"]
    labels = family.samples[0].labels
    assert labels.items() >= {
        "engine": "0", "block_size": "16", "num_gpu_blocks": "100", "enable_prefix_caching": "True",
        "cache_dtype": "int8", "max_pinned_blocks": "3", "eviction_policy": "lru",
    }.items()  # fmt: skip


def test_nothing_known_yet_is_zero():
    values = Values(exposition(EngineStats()))
    assert values("vllm:kv_cache_usage_perc") == 0
    assert all(
        value == 0 for (name, _), value in values.samples.items() if name.startswith(("vllm:n", "vllm:p", "jaxkv"))
    )
