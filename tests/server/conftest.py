"""A real uvicorn server on a free port of 127.0.0.1, over a scripted engine."""

import asyncio
import contextlib
import pathlib
import runpy
import socket
import threading
import time

import httpx
import pytest
import uvicorn

from jaxkv.async_engine import AsyncEngine
from jaxkv.constraints.compiler import ConstraintCompiler
from jaxkv.control.engine import Engine
from jaxkv.insight.traffic import Traffic
from jaxkv.server.app import create_app
from jaxkv.server.http_protocol import BoundedHead
from jaxkv.server.limits import Front, guard
from jaxkv.server.serving import Serving

TESTS = pathlib.Path(__file__).parents[1]
FAKE = runpy.run_path(str(TESTS / "fake_engine.py"))
SMALL = runpy.run_path(str(TESTS / "small_tokenizers.py"))
MAX_MODEL_LEN = 256


class Running:
    """The server under test.

    Attributes:
      engine: the FakeEngine, unless another is given. text: what each request's output is, unless `script` is replaced.
      limits: keywords of AsyncEngine. guards: keywords of `guard`. traffic: to watch the engine, if it is a real one.
    """

    def __init__(
        self, tokenizer, text="Hello 👋 wörld!", engine=None, limits=None, guards=None, traffic=None, **engine_options
    ):
        self.tokenizer = tokenizer
        self.script = lambda request: (
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] + [3] * 500
        )
        self.engine = engine or FAKE["FakeEngine"](
            lambda request: self.script(request), eos=(tokenizer.eos_token_id,), **engine_options
        )
        self.traffic = traffic or Traffic(max_age=0)
        if isinstance(self.engine, Engine):
            self.traffic.attach(self.engine)
        self.async_engine = AsyncEngine(self.engine, tokenizer, **(limits or {}))
        self.serving = Serving(
            engine=self.async_engine, tokenizer=tokenizer, model_names=("fake", "alias"),
            vocab_size=tokenizer.vocab_size, max_model_len=MAX_MODEL_LEN, max_logprobs=5,
            constraints=ConstraintCompiler(
                tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
            ),
            traffic=self.traffic,
        )  # fmt: skip
        # With its protocol named, as scripts/serve.py has it, asyncio switches Nagle's algorithm off: 40 ms a request.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.front = Front(create_app(self.serving))
        app = guard(self.front, **({"max_body_bytes": 16 * 2**20} | (guards or {})))
        config = uvicorn.Config(app, http=BoundedHead, log_level="warning", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[self._listener])), daemon=True
        )

    def __enter__(self):
        self.async_engine.start()
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=20)
        return self

    def __exit__(self, *_):
        self.http.close()
        self._server.should_exit = True
        if hasattr(self.engine, "gate"):
            self.engine.gate.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.async_engine.shutdown()
        self._listener.close()

    def post(self, path, **body):
        return self.http.post(path, json=body)


def wait_until(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def byte_level():
    return SMALL["byte_level"]()


@pytest.fixture(scope="session")
def sentencepiece():
    return SMALL["sentencepiece"]()


@pytest.fixture
def serve(byte_level):
    """serve(tokenizer=, text=, limits=, guards=, tokens_per_step=, ...) -> Running; ended with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda tokenizer=byte_level, **options: stack.enter_context(Running(tokenizer, **options))


@pytest.fixture(scope="module")
def server(byte_level):
    """One server for tests that leave it as it was."""
    with Running(byte_level, tokens_per_step=3) as running:
        yield running


@pytest.fixture(scope="session")
def until():
    return wait_until


@pytest.fixture(scope="session")
def running():
    """The class itself, for servers of another scope."""
    return Running
