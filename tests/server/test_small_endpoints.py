"""Endpoints that monitors and load generators call beside the two main ones."""

import asyncio
import logging

import pytest

from jaxkv.core.errors import RequestError
from jaxkv.core.metrics import EngineStats
from jaxkv.core.request import FinishReason
from jaxkv.server import periodic_log
from jaxkv.server.periodic_log import status_line


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_head_is_get_without_a_body(serve, until, path):
    server = serve()
    for method in ("GET", "HEAD"):
        response = server.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    server.engine.break_with = ValueError("broken")
    server.post("/v1/completions", prompt="x")
    until(lambda: server.async_engine.failed)
    assert server.http.head(path).status_code == 503 and server.http.head(path).content == b""


def test_load_counts_sequences(serve, until):
    server = serve()
    assert server.http.get("/load").json() == {"server_load": 0}
    server.engine.gate.clear()
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "n": 3, "stream": True}) as response:
        assert server.http.get("/load").json() == {"server_load": 3}
        server.engine.gate.set()
        response.read()
    until(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_tokenizer_info_is_what_remote_tokenizers_read(server, byte_level):
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == byte_level.special_tokens["eos_token"]
    assert info["chat_template"] == byte_level.chat_template
    assert info["model_max_length"] == 256 and info["add_bos_token"] is byte_level.adds_bos
    assert {"bos_token", "pad_token", "unk_token"} <= info.keys()  # null where there is none
    tokens = server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert tokens == [byte_level.eos_token_id]


def test_unknown_endpoints_are_json(server):
    response = server.post("/v1/responses", model="fake", input="hi")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "There is no POST /v1/responses here."


def test_reset_prefix_cache(serve):
    server = serve()
    assert server.http.post("/reset_prefix_cache").json() == {"success": True}
    url = "/reset_prefix_cache?reset_running_requests=true&reset_external=false"
    assert server.http.post(url).json() == {"success": True}
    wrong = server.http.post("/reset_prefix_cache?reset_running_requests=perhaps")
    assert wrong.status_code == 400 and "reset_running_requests" in wrong.json()["error"]["message"]
    server.engine.gate.clear()
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        server.engine.gate.set()
        response.read()
    server.async_engine.shutdown()
    gone = server.http.post("/reset_prefix_cache")
    assert gone.status_code == 503 and "shut down" in gone.json()["error"]["message"]


def test_a_failing_reset_is_told(serve, until):
    server = serve()
    server.engine.reset_prefix_cache = lambda preempt_running: 1 / 0
    assert server.http.post("/reset_prefix_cache").status_code == 503
    until(lambda: server.async_engine.failed)


def test_diagnose_prefix(server, byte_level):
    count = len(byte_level.encode("Hello there, you"))
    told = server.post("/diagnose_prefix", prompt="Hello there, you", cache_salt="mine").json()
    # What others have under another salt counts as unseen, or one could ask for their prompts.
    missed = {"first_seen": count - count // 2}
    assert told == {"prompt_tokens": count, "cached_tokens": count // 2, "parts_at": count // 2, "missed": missed}
    messages = [{"role": "user", "content": "Hi"}]
    tokens = server.post("/tokenize", messages=messages).json()["count"]
    assert server.post("/diagnose_prefix", messages=messages).json()["prompt_tokens"] == tokens
    ids = server.post("/tokenize", prompt="Hello there, you").json()["tokens"]
    assert server.post("/diagnose_prefix", prompt=ids, cache_salt="mine").json() == told
    for wrong, param in (
        (b"{}", "prompt"),
        (rb'{"prompt": "x", "cache_salt": "\ud800"}', "cache_salt"),
        (b'{"prompt": "x", "cache_salt": ""}', "cache_salt"),
        (b'{"prompt": "x", "cache_salt": "%s"}' % (b"x" * 1025), "cache_salt"),
    ):
        refused = server.http.post("/diagnose_prefix", content=wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert server.post("/diagnose_prefix", prompt="x", model="other").status_code == 404
    for path, told in (
        ("/diagnose_prefix", "prompt must be a string or a list of token ids"),
        ("/tokenize", "prompt: Input should be a valid string"),
    ):
        assert server.post(path, prompt=["a", "b"]).json()["error"]["message"] == told


def test_a_prompt_that_cannot_be_served_is_no_failure_of_the_engine(serve):
    server = serve()

    def refuse(request):
        raise RequestError("it is too long", param="prompt")

    server.engine.explain_prefix = refuse
    refused = server.post("/diagnose_prefix", prompt="x")
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "it is too long"
    assert server.async_engine.failed is None and server.http.get("/health").status_code == 200


def snapshot(**changes):
    return EngineStats().snapshot()._replace(**changes)


def test_status_line():
    before = snapshot(computed_tokens=100, generated_tokens=10, queried=1000, hit_full_block=500, steps=3)
    now = snapshot(
        computed_tokens=600, generated_tokens=35, queried=2000, hit_full_block=700, hit_partial_block=50, steps=9,
        num_running=2, num_waiting=1, num_blocks=40, num_owned_blocks=10,
    )  # fmt: skip
    assert status_line(before, now, 10.0) == (
        "prompt throughput: 50.0 tokens/s, generation throughput: 2.5 tokens/s, running: 2 requests, waiting: 1 "
        "requests, KV cache usage: 25.0%, prefix cache hit rate: 25.0% of 1000 tokens"
    )
    assert "prefix cache hit rate: nothing queried" in status_line(now, now, 10.0)


def test_no_status_line_when_nothing_happens():
    idle = snapshot(steps=9)
    assert status_line(idle, idle, 10.0) is None
    assert status_line(idle, idle._replace(num_waiting=1), 10.0)
    assert status_line(idle, idle._replace(steps=10), 10.0)  # began and ended in between
    assert status_line(idle, idle._replace(num_finished={FinishReason.ABORT: 1}), 10.0)


def test_the_line_is_logged_as_long_as_something_happens(monkeypatch, caplog):
    monkeypatch.setattr(periodic_log, "INTERVAL_S", 0.01)
    snapshots = [snapshot(steps=n) for n in (0, 1, 2, 2, 2, 3)]

    async def main():
        with pytest.raises(IndexError):  # the list is used up
            await periodic_log.log_status(lambda: snapshots.pop(0))

    with caplog.at_level(logging.INFO, "jaxkv"):
        asyncio.run(main())
    assert len([record for record in caplog.records if "throughput" in record.message]) == 3
