"""Hundreds of clients for a minute (ten behind the slow mark) on a real engine with too little of everything: no answer lost
or mixed up, nothing leaked, and the server as healthy afterwards as before."""

import asyncio
import collections
import functools
import gc
import json
import logging
import os
import random
import socket
import struct
import threading
import time

import psutil
import pytest
import uvicorn
from benchlib.random_model import byte_tokenizer

from jaxkv.async_engine import AsyncEngine
from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.core.request import Request, SamplingParams, StructuredOutputs
from jaxkv.server.app import create_app
from jaxkv.server.http_protocol import BoundedHead
from jaxkv.server.limits import Front, guard
from jaxkv.server.serving import Serving
from jaxkv.tokenization.output_text import OutputText
from jaxkv.tokenization.tokenizer import Tokenizer
from tests.support.tiny_models import parse, random_tokens, tiny_config
from tests.support.tiny_programs import LIMITS, make_engine, run_requests, tokens_of

CLIENTS, QUEUE, BODY_BYTES = 200, 100, 60_000
# 16 blocks of 16 tokens for four rows of up to 190 tokens: somebody is preempted all the time.
NUM_BLOCKS = 17
VOCAB = 256
PATH = "/v1/completions"


def tokenizer():
    return Tokenizer(byte_tokenizer(), special_tokens={})


@functools.cache
def constraints():
    return ConstraintCompiler(tokenizer(), vocab_size=VOCAB, eos_token_ids=(0,))


def make_bodies(rng):
    """Requests that may be asked, all with a defined answer: greedy, or with a seed."""
    heads = [random_tokens(length, VOCAB, seed=length) for length in (20, 40, 90)]
    bodies = []
    for i in range(150):
        tail = random_tokens(rng.randint(1, 40), VOCAB, seed=1000 + i)
        body = {"prompt": [*rng.choice([(), *heads]), *tail], "max_tokens": rng.randint(1, 60), "temperature": 0}
        if i % 3 == 0:
            body |= {"temperature": 0.8, "seed": i, "top_p": 0.9}
        if i % 10 == 0:
            body |= {"n": rng.randint(2, 3)}
        if i % 7 == 0:
            body |= {"structured_outputs": {"regex": "([a-y ]+z){300}"}}
        if i % 7 == 1:
            body |= {"allowed_token_ids": list(range(65, 91))}
        bodies.append(body)
    return bodies


def answers_of(config, bodies):
    """What the engine says by itself, with room for all: (text, tokens) of each choice of each request."""
    requests = []
    for i, body in enumerate(bodies):
        names = ("n", "max_tokens", "temperature", "seed", "top_p")
        sampling = SamplingParams(
            **{name: body[name] for name in names if name in body},
            allowed_token_ids=tuple(body["allowed_token_ids"]) if "allowed_token_ids" in body else None,
            structured_outputs=StructuredOutputs(**body["structured_outputs"])
            if "structured_outputs" in body
            else None,
        )
        constraint = constraints().compile(sampling)
        requests += Request(str(i), tuple(body["prompt"]), sampling, constraint=constraint).sequences()
    news = run_requests(make_engine(config), requests)
    answers = collections.defaultdict(list)
    for request in requests:
        tokens = tokens_of(news[request.request_id])
        text = OutputText(tokenizer(), request.sampling, request.prompt_token_ids)
        delta = text.feed(tokens, news[request.request_id][-1].finish_reason)
        answers[int(request.request_id.split("#")[0])].append((delta.text, len(tokens)))
    return answers


class CheckedEngine:
    """The engine, its books examined after every step."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        news = self._engine.step()
        self._engine.scheduler.check()
        return news


class Server:
    """The server in a thread of this process.

    Attributes:
      core: the control engine. engine: the AsyncEngine.
    """

    def __init__(self, config):
        self.core = make_engine(config, num_blocks=NUM_BLOCKS)
        self.engine = AsyncEngine(CheckedEngine(self.core), tokenizer(), max_num_queued_reqs=QUEUE)
        serving = Serving(
            self.engine, tokenizer(), ("tiny",), VOCAB, max_model_len=LIMITS.max_model_len, max_logprobs=5,
            constraints=constraints(),
        )  # fmt: skip
        self.front = Front(create_app(serving))
        app = guard(self.front, max_body_bytes=BODY_BYTES)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = self._listener.getsockname()
        config = uvicorn.Config(app, http=BoundedHead, log_level="warning", access_log=False, ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._listener]))

    def __enter__(self):
        self.engine.start()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(30)
        self.engine.shutdown()
        assert not self._thread.is_alive()

    @property
    def num_connections(self):
        return len(self._server.server_state.connections)


class Client:
    """One of many. Each thing that it does is counted under its name in `seen`."""

    def __init__(self, address, bodies, answers, seen, seed):
        self.address, self.bodies, self.answers, self.seen = address, bodies, answers, seen
        self.rng = random.Random(seed)

    async def run(self, until):
        acts = (
            [self.whole] * 6 + [self.streamed] * 6 + [self.slow_reader, self.batch, self.leave_a_stream]
            + [self.leave_a_stream, self.leave_while_waiting, self.half_a_request, self.malformed, self.too_large]
            + [self.not_there, self.look]
        )  # fmt: skip
        while time.monotonic() < until:
            act = self.rng.choice(acts)
            self.seen[act.__name__] += 1
            await asyncio.wait_for(act(), 120)

    async def send(self, method, path, content=b"", head=""):
        reader, writer = await asyncio.open_connection(*self.address)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: same\r\n{head}"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        return reader, writer

    async def ask(self, method, path, content=b""):
        """(status, headers, body)"""
        reader, writer = await self.send(method, path, content)
        try:
            return self.parsed(await reader.read())
        finally:
            writer.close()

    def parsed(self, data):
        head, _, body = data.partition(b"\r\n\r\n")
        status, *headers = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in headers)
        assert headers["x-request-id"] == "same"
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while not body.startswith(b"0\r\n"):
                size, _, body = body.partition(b"\r\n")
                parts.append(body[: int(size, 16)])
                body = body[int(size, 16) + 2 :]
            body = b"".join(parts)
        return int(status.split()[1]), headers, body

    def pick(self, **fields):
        number = self.rng.randrange(len(self.bodies))
        return number, json.dumps(self.bodies[number] | {"model": "tiny"} | fields).encode()

    async def was_refused(self, status, headers, body):
        """Whether the queue was full; then it waits a little."""
        if status != 429:
            assert status == 200, (status, body)
            return False
        assert headers["retry-after"] == "1" and json.loads(body)["error"]["code"] == 429
        self.seen["queue full"] += 1
        await asyncio.sleep(self.rng.uniform(0.1, 1))
        return True

    def check(self, choices, expected):
        found = [(choices[i]["text"], choices[i]["finish_reason"]) for i in range(len(expected))]
        assert len(choices) == len(expected)
        assert found == [(text, "length") for text, _ in expected]
        self.seen["right answers"] += 1

    async def whole(self):
        number, content = self.pick()
        status, headers, body = await self.ask("POST", PATH, content)
        if not await self.was_refused(status, headers, body):
            body = json.loads(body)
            self.check(dict(enumerate(body["choices"])), self.answers[number])
            assert body["usage"]["completion_tokens"] == sum(count for _, count in self.answers[number])

    async def batch(self):
        numbers = [
            self.rng.choice([i for i in range(len(self.bodies)) if i % 3 and i % 10 and i % 7 > 1]) for _ in range(3)
        ]
        longest = min(self.bodies[i]["max_tokens"] for i in numbers)
        numbers = [i for i in numbers if self.bodies[i]["max_tokens"] == longest]
        body = {"prompt": [self.bodies[i]["prompt"] for i in numbers], "max_tokens": longest, "temperature": 0}
        status, headers, body = await self.ask("POST", PATH, json.dumps(body).encode())
        if not await self.was_refused(status, headers, body):
            expected = [answer for i in numbers for answer in self.answers[i]]
            self.check(dict(enumerate(json.loads(body)["choices"])), expected)

    async def streamed(self, pause=0.0):
        number, content = self.pick(stream=True, stream_options={"include_usage": True})
        reader, writer = await self.send("POST", PATH, content)
        try:
            first = await reader.read(400)
            await asyncio.sleep(pause)
            status, headers, body = self.parsed(first + await reader.read())
        finally:
            writer.close()
        if await self.was_refused(status, headers, body):
            return
        *events, done, rest = body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
        choices = collections.defaultdict(lambda: {"text": "", "finish_reason": None})
        for chunk in chunks:
            [part] = chunk["choices"]
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "a token after the end"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
        self.check(choices, self.answers[number])
        assert usage["usage"]["completion_tokens"] == sum(count for _, count in self.answers[number])

    async def slow_reader(self):
        await self.streamed(pause=self.rng.uniform(0.2, 2))

    def leave(self, writer):
        if self.rng.random() < 0.5:  # with a reset instead of a goodbye
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def leave_a_stream(self):
        _, content = self.pick(stream=True, n=self.rng.randint(1, 3), max_tokens=60)
        reader, writer = await self.send("POST", PATH, content)
        for _ in range(self.rng.randint(0, 5)):
            await reader.read(300)
        self.leave(writer)

    async def leave_while_waiting(self):
        _, content = self.pick()
        _, writer = await self.send("POST", PATH, content)
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        self.leave(writer)

    async def half_a_request(self):
        _, content = self.pick()
        reader, writer = await asyncio.open_connection(*self.address)
        text = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        writer.write(text[: self.rng.randint(0, len(text) - 1)])
        await asyncio.sleep(self.rng.uniform(0, 0.2))
        self.leave(writer)

    async def malformed(self):
        bad = [b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": 0}', b'{"prompt": "\\ud800"}',
               b'{"prompt": [300]}', b'{"prompt": [[1], []]}', b'{"prompt": "x", "top_p": 7}', b"\xff" * 100,
               json.dumps({"prompt": [1] * 5000}).encode(), self.rng.randbytes(200)]  # fmt: skip
        status, _, body = await self.ask("POST", PATH, self.rng.choice(bad))
        # What is wrong with the values of a prompt is looked at when there is room for it.
        assert status in (400, 429) and json.loads(body)["error"]["code"] == status

    async def too_large(self):
        status, _, body = await self.ask("POST", PATH, b" " * self.rng.randint(BODY_BYTES + 1, 4 * BODY_BYTES))
        assert status == 413 and json.loads(body)["error"]["code"] == 413

    async def not_there(self):
        _, content = self.pick(model="another")
        path = self.rng.choice([PATH, "/v1/nothing"])
        status, _, body = await self.ask("POST", path, content)
        assert status == 404 and json.loads(body)["error"]["code"] == 404

    async def look(self):
        path = self.rng.choice(["/health", "/v1/models", "/version"])
        assert (await self.ask("GET", path))[0] == 200


def resources():
    gc.collect()
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "MB": psutil.Process().memory_info().rss / 1e6,
    }


def wait_until_quiet(server):
    end = time.monotonic() + 60
    while server.engine.num_running or server.front.num_inside or server.num_connections:
        assert time.monotonic() < end, "requests are left over"
        time.sleep(0.02)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_soak(seconds, caplog):
    config = parse(tiny_config(vocab_size=VOCAB))
    bodies = make_bodies(random.Random(0))
    answers = answers_of(config, bodies)
    seen = collections.Counter()

    async def crowd(seconds, seed):
        until = time.monotonic() + seconds
        clients = [Client(server.address, bodies, answers, seen, f"{seed} {i}") for i in range(CLIENTS)]
        await asyncio.gather(*(client.run(until) for client in clients))

    caplog.set_level(logging.WARNING)
    with Server(config) as server:
        asyncio.run(crowd(seconds / 4, "warm-up"))
        wait_until_quiet(server)
        before = resources()
        asyncio.run(crowd(seconds * 3 / 4, "counted"))
        wait_until_quiet(server)
        after = resources()
        stats, scheduler = server.core.stats, server.core.scheduler
        scheduler.check()
        assert scheduler.live_ids == () and scheduler.blocks.num_free == scheduler.blocks.num_usable == NUM_BLOCKS - 1
        assert server.engine._num_submitted == server.engine._num_ended
        alone = Client(server.address, bodies, answers, collections.Counter(), "after")
        asyncio.run(alone.look())
        for _ in range(5):
            asyncio.run(alone.streamed())
        assert alone.seen == {"right answers": 5}
    told = {"preemptions": stats.preemptions, "refused": server.engine.num_refused, **seen, **stats.num_finished}
    print(f"{told}\nbefore {before}\nafter {after}")
    assert [record.getMessage() for record in caplog.records] == []
    assert (after["threads"], after["files"]) == (before["threads"], before["files"])
    assert after["MB"] - before["MB"] < 20
    # All of it happened.
    assert stats.preemptions > 20 and server.engine.num_refused >= seen["queue full"] > 20
    assert seen["right answers"] > 5 * seconds and min(seen.values()) > 10, seen
