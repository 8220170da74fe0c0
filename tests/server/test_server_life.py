"""Disconnects, failures, shutdown, many streams at once, and the official client."""

import asyncio
import json
import socket
import struct
import threading
import time

import httpx
import openai
import pytest

from jaxkv.async_engine import AsyncEngine, EngineFailedError
from jaxkv.core.errors import RequestError
from jaxkv.core.request import FinishReason, Request, RequestOutput, SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def start_request(server, body, path="/v1/completions"):
    """Sends a request by hand and returns its socket."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
def test_a_disconnect_aborts_all_sequences(serve, until, stream, after_first_token):
    server = serve(step_seconds=0.01)
    server.script = lambda request: [10] * 100_000
    if not after_first_token:
        server.engine.gate.clear()
    connection = start_request(server, {"prompt": "x", "n": 2, "max_tokens": 200, "stream": stream, "ignore_eos": True})
    if after_first_token and stream:
        assert b"200 OK" in connection.recv(1000)
    else:
        until(lambda: len(server.engine.added) == 2)
    connection.close()
    time.sleep(0.05)
    server.engine.gate.set()
    until(lambda: len(server.engine.aborted) == 2)
    assert set(server.engine.aborted) == {request.request_id for request in server.engine.added}
    assert server.async_engine.num_running == 0
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_sending_is_taken_for_gone(serve, until, stream):
    """As most that do are: `BoundedHead` says why it is not answered."""
    server = serve(step_seconds=0.01)
    server.script = lambda request: [10] * 100_000
    with start_request(server, {"prompt": "x", "max_tokens": 200, "stream": stream, "ignore_eos": True}) as connection:
        until(lambda: server.engine.added)
        begin = time.monotonic()
        connection.shutdown(socket.SHUT_WR)
        until(lambda: len(server.engine.aborted) == 1)
        assert time.monotonic() - begin < 1


def test_a_client_that_stops_reading_is_dropped(serve, until):
    """Its connection ends when the system has had nothing read for the user timeout (here 1 s), and with it its request."""
    server = serve(tokens_per_step=50)
    server.script = lambda request: [10] * 1_000_000
    server.serving.__dict__["max_model_len"] = 1_000_000
    server._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)
    connection = start_request(server, {"prompt": "x", "n": 2, "max_tokens": 500_000, "stream": True})
    begin = time.monotonic()
    until(lambda: len(server.engine.aborted) == 2)
    until(lambda: server.front.num_inside == 0)
    assert time.monotonic() - begin < 10 and server.async_engine.num_running == 0
    assert server.http.get("/health").status_code == 200
    connection.close()


def test_disconnects_in_the_middle_of_streams_are_silent(serve, until, caplog):
    """No "socket.send() raised exception" from writing on to a connection that is gone, no traceback."""
    server = serve(tokens_per_step=8, step_seconds=0.002)
    server.script = lambda request: [10] * 100_000
    for _ in range(3):
        body = {"prompt": "x", "n": 4, "max_tokens": 200, "stream": True, "ignore_eos": True}
        connections = [start_request(server, body) for _ in range(20)]
        for connection in connections:
            assert connection.recv(1000)
            # Unread data at a close: the other side gets a reset, in the middle of its writing.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        until(lambda: server.front.num_inside == 0)
    until(lambda: server.async_engine.num_running == 0)
    assert [record.getMessage() for record in caplog.records] == []


def test_the_server_answers_while_a_step_takes_long(serve, until):
    server = serve()
    server.engine.gate.clear()
    connection = start_request(server, {"prompt": "x"})
    until(lambda: server.engine.added)
    begin = time.monotonic()
    assert server.http.get("/health").status_code == 200 and server.http.get("/v1/models").status_code == 200
    assert time.monotonic() - begin < 1
    server.engine.gate.set()
    assert b"200 OK" in connection.recv(1000)
    connection.close()


def test_many_streams_at_once_are_never_mixed_up(serve):
    server = serve(tokens_per_step=3)

    def script(request):
        number = server.tokenizer.decode(request.prompt_token_ids)
        return [*server.tokenizer.encode(f"{number}👋" * 20, add_special_tokens=False), 2]

    server.script = script

    async def one(client, i):
        text = ""
        body = {"prompt": f"<{i}>", "stream": True, "max_tokens": 240}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def all_of_them():
        async with httpx.AsyncClient(
            base_url=server.url, timeout=30, limits=httpx.Limits(max_connections=64)
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    for i, text in enumerate(asyncio.run(all_of_them())):
        whole = f"<{i}>👋" * 20
        assert text == whole or (whole.startswith(text) and len(text) > 40), (i, text)
    assert server.async_engine.num_running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_ends_requests_clearly_and_flips_health(serve, until, stream):
    server = serve()
    failures = []
    server.async_engine.on_failure = lambda: failures.append(1)
    server.engine.gate.clear()
    with_answer = []
    body = {"prompt": "x", "stream": stream}
    thread = threading.Thread(target=lambda: with_answer.append(server.post("/v1/completions", **body)))
    thread.start()
    until(lambda: server.engine.added)
    server.engine.break_with = ValueError("the device is on fire")
    server.engine.gate.set()
    thread.join(10)
    [response] = with_answer
    if stream:
        error = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        error = response.json()["error"]
        assert response.status_code == 503
    assert error["code"] == 503 and "ValueError: the device is on fire" in error["message"]
    until(lambda: failures == [1])
    assert server.http.get("/health").status_code == 503
    assert server.post("/v1/completions", prompt="x").status_code == 503


def test_a_request_that_ends_in_error_says_so(serve):
    server = serve()

    def fail():
        server.engine.failed = "RuntimeError: no memory"
        request_id = server.engine.added[-1].request_id
        return [RequestOutput(request_id, (), FinishReason.ERROR, error="RuntimeError: no memory")]

    server.engine.step = fail
    response = server.post("/v1/completions", prompt="x")
    assert response.status_code == 503 and "no memory" in response.json()["error"]["message"]


def test_a_bug_in_adding_a_request_is_told_not_hung(serve):
    server = serve()
    server.script = lambda request: 1 / 0
    response = server.post("/v1/completions", prompt="x")
    assert response.status_code == 503 and "ZeroDivisionError" in response.json()["error"]["message"]


def test_equal_x_request_ids_are_both_served(serve):
    server = serve()
    for _ in range(2):
        assert server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"}).is_success
    assert len({request.request_id for request in server.engine.added}) == 2


def test_long_prompts_are_tokenised_off_the_event_loop(serve, monkeypatch):
    server = serve()
    threads = []
    encode = server.tokenizer.encode
    server.script = lambda request: [10] * 500

    def spy(*args):
        threads.append(threading.current_thread())
        return encode(*args)

    monkeypatch.setattr(server.tokenizer, "encode", spy)
    server.post("/v1/completions", prompt="word " * 300)
    server.post("/v1/completions", prompt="word")
    server.post("/v1/chat/completions", messages=MESSAGES)
    assert [thread is server._thread for thread in threads] == [False, True, False]


# AsyncEngine by itself


def request(name, **params):
    return Request(name, (5, 6), SamplingParams(**params))


def test_shutdown_ends_open_streams_and_joins_the_thread(serve):
    server = serve()
    server.script = lambda request: [10] * 100_000
    server.engine.step_seconds = 0.01
    engine = server.async_engine

    async def main():
        stream = await engine.submit([request("a", max_tokens=None)])
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineFailedError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineFailedError, match="shut down"):
            await engine.submit([request("b")])

    asyncio.run(main())
    assert not engine._thread.is_alive()


def test_requests_still_in_the_inbox_at_shutdown_are_told(byte_level, serve):
    server = serve()
    engine = AsyncEngine(server.engine, byte_level)  # its thread starts only after shutdown was asked for

    async def main():
        submitted = asyncio.create_task(engine.submit([request("a")]))
        await asyncio.sleep(0)
        engine.shutdown()
        engine.start()
        engine._inbox.put(lambda: None)
        with pytest.raises(EngineFailedError):
            # The order in the inbox decides whether it was accepted first; either way it ends.
            async for _ in await submitted:
                pass

    asyncio.run(asyncio.wait_for(main(), 10))


def test_what_is_not_read_is_bounded(serve, until):
    server = serve(tokens_per_step=1000)
    server.script = lambda request: [10] * 10**6

    async def main():
        stream = await server.async_engine.submit([request("a", max_tokens=None)])
        while not server.engine.aborted:
            await asyncio.sleep(0.01)
        seen = []
        with pytest.raises(RequestError, match="16385 tokens wait to be read") as error:
            while deltas := await stream.take():
                seen += deltas
        assert error.value.status == 408
        return seen

    assert len(asyncio.run(main())) == 16_385
    until(lambda: server.async_engine.num_running == 0)


def test_take_brings_all_that_has_come(serve):
    server = serve(tokens_per_step=4)
    server.script = lambda request: [10] * 100

    async def main():
        stream = await server.async_engine.submit([request("a", max_tokens=10)])
        lengths = []
        while deltas := await stream.take():
            lengths.append(len(deltas))
        assert not await stream.take()
        return lengths

    assert sum(asyncio.run(main())) == 10


def test_cancelling_a_stream_aborts_once(serve, until):
    server = serve()
    server.script = lambda request: [10] * 100_000
    server.engine.step_seconds = 0.005

    async def main():
        stream = await server.async_engine.submit([request("a", max_tokens=None), request("b", max_tokens=1)])
        seen = [await anext(stream) for _ in range(4)]
        stream.cancel()
        stream.cancel()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return seen

    seen = asyncio.run(main())
    assert [delta.finish_reason for delta in seen if delta.index == 1] == [FinishReason.LENGTH]
    until(lambda: server.engine.aborted == ["a"])


def test_the_official_client(serve):
    server = serve(tokens_per_step=2)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["fake", "alias"]
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == "Hello 👋 wörld!" and whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens // 2
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 👋 wörld!"
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    completion = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=40)
    assert [choice.text for choice in completion.choices] == ["Hello 👋 wörld!"] * 2
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert (error.value.param, error.value.status_code, error.value.type) == ("temperature", 400, "BadRequestError")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    server.engine.break_with = ValueError("broken")
    with pytest.raises(openai.APIError, match="broken"):
        list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True))
