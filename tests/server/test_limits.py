"""Bounded bodies, queue and time; API keys, request ids, and the states in which nothing is served."""

import concurrent.futures
import json
import socket
import time

import openai
import pytest

from jaxkv.server import http_protocol, limits

LIMIT = 10_000


@pytest.fixture(scope="module")
def limited(byte_level, running):
    with running(byte_level, guards={"max_body_bytes": LIMIT}) as server:
        yield server


def error_of(response, status):
    error = response.json()["error"]
    assert response.status_code == status and error["code"] == status, response.text
    return error


def body_of(length):
    """A completion request of exactly so many bytes, whose prompt is one token's worth of text and blanks."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    return body + b" " * (length - len(body))


# Bodies


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("excess", [0, 1, 5_000_000])
def test_a_body_too_large_is_refused_however_it_is_sent(limited, chunked, excess):
    body = body_of(LIMIT + excess)
    content = (body[i : i + 60_000] for i in range(0, len(body), 60_000)) if chunked else body
    response = limited.http.post("/v1/completions", content=content)
    if excess == 0:
        assert response.status_code == 200
    else:
        error = error_of(response, 413)
        assert str(LIMIT) in error["message"] and "max_body_bytes" in error["message"]
        assert response.headers["connection"] == "close"
    assert limited.http.get("/health").status_code == 200


def test_a_body_too_large_is_refused_before_it_is_parsed(limited):
    assert error_of(limited.http.post("/v1/completions", content=b"{" * (LIMIT + 1)), 413)
    assert error_of(limited.http.post("/nowhere", content=b"{" * (LIMIT + 1)), 413)


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_all(connection):
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_declared_length_is_answered_before_the_body_comes(limited, monkeypatch):
    monkeypatch.setattr(limits, "_LINGER_S", 0.5)
    with connect(limited) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        begin = time.monotonic()
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and time.monotonic() - begin < 5


def test_an_endless_body_is_refused_and_cut_off(limited, monkeypatch):
    monkeypatch.setattr(limits, "_LINGER_S", 0.5)
    with connect(limited) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begin < 10:
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
    assert time.monotonic() - begin < 5


def test_a_body_that_does_not_come_is_given_up(limited, monkeypatch):
    monkeypatch.setattr(limits, "_BODY_S", 0.3)
    with connect(limited) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":408' in answer


@pytest.mark.parametrize("head", [b"GET /health HTTP/1.1\r\nx: ", b"GET /" + b"y" * 5000])
def test_an_endless_head_is_cut_off(limited, head):
    with connect(limited) as connection:
        connection.sendall(head)
        begin = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - begin < 10:
                connection.sendall(b"z" * 4096)
    assert time.monotonic() - begin < 5
    long = limited.http.get("/health", headers={"x": "y" * 40_000})
    assert long.status_code == 200
    assert (
        "head is larger than 65536"
        in error_of(limited.http.get("/health", headers={"x": "y" * 66_000}), 400)["message"]
    )


@pytest.mark.parametrize(
    "request_",
    [
        b"FOO /health HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_as_other_mistakes(limited, request_):
    with connect(limited) as connection:
        connection.sendall(request_)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == 400


def test_no_answer_leads_to_another_host(limited, caplog):
    assert limited.http.get("/health/", headers={"host": "elsewhere"}).status_code == 404
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    assert limited.http.get("/health", headers=upgrade).status_code == 200 and not caplog.records


@pytest.mark.parametrize("start", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTT"])
def test_a_head_that_does_not_come_is_given_up(limited, monkeypatch, start):
    """A connection without a request, or with a part of one, also after a whole one."""
    monkeypatch.setattr(http_protocol, "_HEAD_S", 0.3)
    with connect(limited) as connection:
        connection.sendall(start)
        try:
            answer = read_all(connection)
        except ConnectionResetError:
            answer = b""
    assert answer.count(b"200 OK") == start.count(b"\r\n\r\n") or not answer
    if answer and not start.endswith(b"\n"):
        assert answer.count(b'"code":408') == bool(start)


def test_a_client_that_leaves_in_the_middle_of_its_body(limited, until, caplog):
    before = len(limited.engine.added)
    with connect(limited) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        until(lambda: len(limited._server.server_state.connections) >= 1)
    until(lambda: limited.front.num_inside == 0)
    assert limited.http.get("/health").status_code == 200
    assert len(limited.engine.added) == before and not caplog.records


# The queue


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(serve, until):
    server = serve(limits={"max_num_queued_reqs": 3})
    server.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, "/v1/completions", prompt=["a", "b"])
        until(lambda: len(server.engine.added) == 2)
        # Two of three places are taken.
        assert "2 requests run or wait" in error_of(server.post("/v1/completions", prompt="c", n=2), 429)["message"]
        second = pool.submit(server.post, "/v1/completions", prompt="c")
        until(lambda: server.async_engine._num_submitted == 3)
        refused = server.post("/v1/completions", prompt="d")
        error = error_of(refused, 429)
        assert "3 requests run or wait" in error["message"] and "max_num_queued_reqs is 3" in error["message"]
        assert refused.headers["retry-after"] == "1" and error["type"] == "RateLimitError"
        assert error_of(
            server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True), 429
        )
        assert server.async_engine.num_refused == 3 and server.http.get("/health").status_code == 200
        with pytest.raises(openai.RateLimitError):
            client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            client.completions.create(model="fake", prompt="x")
        counted = 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"} 4.0'
        assert counted in server.http.get("/metrics").text.splitlines()
        server.engine.gate.set()
        assert first.result(20).status_code == second.result(20).status_code == 200
    assert server.post("/v1/completions", prompt="d", n=3).status_code == 200
    assert len(server.engine.added) == 6
    error = error_of(server.post("/v1/completions", prompt=["d", "e"], n=2), 400)
    assert "asks for 4 sequences" in error["message"] and error["param"] == "n"


@pytest.mark.parametrize("body", [{"cache_salt": "refuse"}, {"prompt": ["x", "x"], "cache_salt": "refuse"}])
def test_refused_and_aborted_requests_leave_their_places(serve, until, body):
    server = serve(limits={"max_num_queued_reqs": 1})
    for _ in range(3):
        assert server.post("/v1/completions", **({"prompt": "x"} | body)).status_code == 400
    server.script = lambda request: [10] * 100_000
    server.engine.step_seconds = 0.01
    for number in range(1, 4):
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 200}):
            until(lambda: len(server.engine.added) >= number)
        until(lambda: len(server.engine.aborted) == number)
    until(lambda: server.async_engine._num_submitted == server.async_engine._num_ended)


# Time


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended_and_told(serve, until, stream):
    server = serve(limits={"request_timeout": 0.4}, step_seconds=0.01)
    server.script = lambda request: [10] * 100_000
    begin = time.monotonic()
    response = server.post("/v1/completions", prompt=["x", "y"], max_tokens=200, ignore_eos=True, stream=stream)
    assert 0.4 <= time.monotonic() - begin < 3
    if stream:
        *chunks, error, done = response.text.strip().split("\n\n")
        assert response.status_code == 200 and done == "data: [DONE]" and len(chunks) > 10
        error = json.loads(error.removeprefix("data: "))["error"]
        assert error["code"] == 408
    else:
        error = error_of(response, 408)
        assert response.headers["x-should-retry"] == "false"
    assert "request_timeout = 0.4 s" in error["message"]
    until(lambda: len(server.engine.aborted) == 2)


def test_the_wait_counts_too(serve, until):
    server = serve(limits={"request_timeout": 0.3})
    server.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x")
        time.sleep(0.5)
        server.engine.gate.set()
        error_of(answer.result(10), 408)
    until(lambda: server.async_engine.num_running == 0)


def test_requests_in_time_do_not_notice(serve):
    server = serve(limits={"request_timeout": 5})
    assert server.post("/v1/completions", prompt="x").json()["choices"][0]["text"] == "Hello 👋 wörld!"


# Ids and keys


def test_x_request_id_comes_back(limited):
    for headers, status in (({}, 200), ({"content-type": "application/json"}, 400)):
        content = b'{"prompt": "x"}' if status == 200 else b"{"
        response = limited.http.post("/v1/completions", content=content, headers=headers | {"x-request-id": "a-1"})
        assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["a-1"])
    assert limited.http.get("/health", headers={"x-request-id": "probe"}).headers["x-request-id"] == "probe"
    assert limited.http.post("/x", content=b"x" * 20_000, headers={"x-request-id": "b"}).headers["x-request-id"] == "b"
    assert "x-request-id" not in limited.http.get("/health").headers


@pytest.mark.parametrize("value", ["x" * 257, "ä", "two words"])
def test_ids_that_are_none_are_not_repeated(limited, value):
    response = limited.http.get("/health", headers={"x-request-id": value.encode()})
    assert response.status_code == 200 and "x-request-id" not in response.headers


def test_any_of_several_keys_opens_all_that_computes(serve):
    server = serve(guards={"api_keys": ["one", "zwei"]})
    paths = [("GET", "/v1/models"), ("GET", "/v1/models/fake"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
             ("POST", "/v1/chat/completions"), ("POST", "/detokenize"), ("POST", "/reset_prefix_cache"),
             ("GET", "/openapi.json"), ("GET", "/nowhere")]  # fmt: skip
    for method, path in paths:
        for given in (None, "Bearer three", "one", "Basic one", "Bearer onezwei", "Bearer one,zwei", "Bearer"):
            headers = {} if given is None else {"authorization": given.encode()}
            response = server.http.request(method, path, headers=headers)
            assert error_of(response, 401)["type"] == "AuthenticationError" and "zwei" not in response.text
        for given in ("Bearer one", "Bearer zwei", "bearer one"):
            assert server.http.request(method, path, headers={"authorization": given}).status_code != 401
    for path in ("/health", "/ping", "/version"):
        assert server.http.get(path).status_code == 200


def test_keys_are_compared_in_constant_time(serve, monkeypatch):
    """All of them, whichever matches, by hashes of one length."""
    compared = []
    monkeypatch.setattr(limits.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    server = serve(guards={"api_keys": ["first", "x" * 100, "third"]})
    for key in ("first", "third", "x" * 1000, "y"):
        server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert compared == [(32, 32)] * 12


# States


def test_nothing_is_served_while_loading(serve):
    server = serve()
    app, server.front.app = server.front.app, None
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions")):
        response = server.http.request(method, path)
        assert "still loading" in error_of(response, 503)["message"] and response.headers["retry-after"] == "5"
    server.front.app = app
    assert server.http.get("/health").status_code == 200


def test_draining_finishes_what_runs_and_begins_nothing(serve, until):
    server = serve()
    server.engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x")
        until(lambda: server.engine.added)
        server.front.draining = True
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/v1/completions"), ("POST", "/tokenize")):
            assert "shutting down" in error_of(server.http.request(method, path), 503)["message"]
        assert server.http.get("/version").status_code == server.http.get("/v1/models").status_code == 200
        until(lambda: server.front.num_inside == 1)
        server.engine.gate.set()
        assert answer.result(10).json()["choices"][0]["finish_reason"] == "stop"
    until(lambda: server.front.num_inside == 0)
    assert len(server.engine.added) == 1
