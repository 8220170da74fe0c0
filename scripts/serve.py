"""Serves one model over an OpenAI-compatible HTTP API: `python scripts/serve.py --model=demo`."""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time

import uvicorn
from absl import flags

from jaxkv import flags as jaxkv_flags
from jaxkv.async_engine import AsyncEngine
from jaxkv.console import ConsoleProgress, set_up_logging
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.insight.request_log import RequestLog
from jaxkv.insight.traffic import Traffic
from jaxkv.server.app import create_app
from jaxkv.server.http_protocol import BoundedHead
from jaxkv.server.limits import MAX_BODY_BYTES, Front, guard
from jaxkv.server.metrics import cache_config_labels
from jaxkv.server.periodic_log import log_status
from jaxkv.server.serving import Serving

jaxkv_flags.define_engine_flags()
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_NAMES = flags.DEFINE_string(
    "served_model_name", None, "Model id in the API; several, separated by commas, all work. Unset: the model's name."
)
_API_KEY = flags.DEFINE_list(
    "api_key", [], "Clients must send one of these, separated by commas, as a bearer token. Unset: JAXKV_API_KEY's."
)
_API_KEY_NAMES = flags.DEFINE_list(
    "api_key_names", [], "What to call the API keys in statistics, separated by commas, in the keys' order."
)
_MAX_QUEUED = flags.DEFINE_integer(
    "max_num_queued_reqs",
    1024,
    "Most requests that run and wait together, each of n sequences and of several prompts counting; more get a 429.",
    lower_bound=1,
)
jaxkv_flags.define_size("max_body_bytes", MAX_BODY_BYTES, "Longest request body; a longer one gets a 413.")
_REQUEST_TIMEOUT = flags.DEFINE_float(
    "request_timeout", 0.0, "Seconds a request may wait and run together; 0 sets no limit.", lower_bound=0.0
)
_DRAIN_TIMEOUT = flags.DEFINE_float(
    "drain_timeout", 30.0, "Seconds that running requests may go on after the first SIGTERM or Ctrl-C.", lower_bound=0.0
)
_REQUEST_LOG = flags.DEFINE_string(
    "request_log",
    None,
    "File to append a line of JSON to for each request that has ended: times, tokens, hits. No texts.",
)
_REQUEST_LOG_TOKENS = flags.DEFINE_boolean(
    "request_log_tokens", False, "Log the token ids of prompts and outputs too, which can be turned back into texts."
)
_SHOW_CALLERS = flags.DEFINE_boolean(
    "show_callers", True, "Name callers on /metrics and /dashboard, which anyone who reaches the server may read."
)
_LOG_LEVEL = flags.DEFINE_enum(
    "log_level", "info", ["debug", "info", "warning", "error"], "Least important log lines to show."
)

USAGE = """
usage: serve.py [MODEL] [flags]

Loads a model and serves it over an OpenAI-compatible HTTP API. Flags take dashes or underscores, `--flag=value` or
`--flag value`.
"""
GROUPS = jaxkv_flags.GROUPS | {
    "server": ("host", "port", "served_model_name", "api_key", "api_key_names", "max_num_queued_reqs",
               "max_body_bytes", "request_timeout", "drain_timeout", "log_level"),
    "watching": ("request_log", "request_log_tokens", "show_callers"),
}  # fmt: skip
# Seconds for the last step to end and the last bytes to be written.
_FLUSH_S = 5.0
# Seconds after which a client that reads nothing is gone: its connection ends, and with it its request.
_STALLED_S = 60
# Seconds that an unused connection stays open: longer than clients keep theirs, so that none sends into one that closes.
_KEEP_ALIVE_S = 75

log = logging.getLogger("jaxkv.serve")


def main(rest: list[str]) -> int:
    if rest:
        if len(rest) > 1:
            raise ConfigError(f"one model can be served, but the command line names {', '.join(rest)}")
        flags.FLAGS.model = rest[0]
    config = jaxkv_flags.engine_config()
    set_up_logging(_LOG_LEVEL.value)
    _allow_many_connections()
    keys = [key for key in _API_KEY.value or os.environ.get("JAXKV_API_KEY", "").split(",") if key]
    key_names = _checked_names(keys, _API_KEY_NAMES.value)
    if _REQUEST_LOG_TOKENS.value and not _REQUEST_LOG.value:
        raise ConfigError("--request_log_tokens needs --request_log=FILE")
    log = RequestLog(_REQUEST_LOG.value, token_ids=_REQUEST_LOG_TOKENS.value) if _REQUEST_LOG.value else None
    listener = _bind(_HOST.value, _PORT.value)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _exit(0))  # before and after uvicorn's own
    server = _Server(config, keys, key_names, listener, Traffic(log, names_callers=_SHOW_CALLERS.value))
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))
    if server.load_error is not None:
        raise server.load_error
    if server.engine is not None:
        server.engine.shutdown()
        if log is not None:
            log.close()
    if server.failure is not None:
        sys.stderr.write(f"error: the engine failed: {server.failure}\n")
        return 1
    return 0


class _Server(uvicorn.Server):
    """The life of the process: it answers from the first moment, loads the model, serves until the first signal, lets
    running requests finish, and ends; a second signal ends it at once.

    Attributes:
      engine: None while the model loads.
      load_error: why the model could not be loaded. failure: what broke the engine later. None if all went well.
    """

    def __init__(
        self,
        config: EngineConfig,
        keys: list[str],
        key_names: list[str],
        listener: socket.socket,
        traffic: Traffic,
    ):
        self._front = Front()
        app = guard(self._front, api_keys=keys, api_key_names=key_names, max_body_bytes=flags.FLAGS.max_body_bytes)
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHead,
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self.engine: AsyncEngine | None = None
        self.load_error: BaseException | None = None
        self.failure: str | None = None
        self._engine_config, self._traffic = config, traffic
        self._url = _url(listener)
        self._with_key = bool(keys)
        self._drain_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            serving = await asyncio.to_thread(_load, self._engine_config, self._traffic)
            self._front.app = create_app(serving)
        except BaseException as error:
            self.load_error = error
            self.should_exit = True
            return
        self.engine, self._constraints = serving.engine, serving.constraints
        self.engine.on_failure = self._engine_failed
        self.engine.start()
        name = serving.model_names[0]
        sys.stdout.write(f"jaxkv is ready: {self._url} (model {name})\n{_curl(self._url, name, self._with_key)}\n")
        sys.stdout.flush()
        self._status = asyncio.create_task(log_status(lambda: self.engine.snapshot))
        self._history = asyncio.create_task(serving.history.watch(lambda: self.engine.snapshot))

    def _engine_failed(self) -> None:
        self.failure = self.engine.failed
        self.should_exit = True

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.engine is None:
            _exit(0)  # an ordinary end would wait for a thread in the middle of compiling, half a minute long
        if self._front.draining:
            _exit(128 + sig)
        self._drain_until = time.monotonic() + _DRAIN_TIMEOUT.value
        self._front.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Every 0.1 s; True ends the serving."""
        if self._front.draining:
            left = self._drain_until - time.monotonic()
            if left <= 0 or self._front.num_inside == 0:
                return True
            if counter % 50 == 0:
                log.info("draining: %d still running, %.0f s left", self._front.num_inside, left)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What still runs is told that it ends; connections that do not end by themselves are cut."""
        if self.engine is not None:
            self._front.draining = True
            self.engine.stop()
            self._front.give_up()
            self._constraints.close()
        deadline = time.monotonic() + _FLUSH_S
        while self._front.num_inside and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.server_state.connections):
            connection.transport.close()  # once all has been written
        await asyncio.sleep(0.1)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def _load(config: EngineConfig, traffic: Traffic) -> Serving:
    from jaxkv.startup import start_engine

    with ConsoleProgress() as progress:
        started = start_engine(config, progress=progress)
    traffic.attach(started.engine)
    return Serving(
        engine=AsyncEngine(
            started.engine,
            started.tokenizer,
            max_num_queued_reqs=_MAX_QUEUED.value,
            request_timeout=_REQUEST_TIMEOUT.value or None,
        ),
        tokenizer=started.tokenizer,
        model_names=tuple(name for name in (_NAMES.value or "").split(",") if name) or (started.name,),
        vocab_size=started.model_config.vocab_size,
        max_model_len=started.config.max_model_len,
        max_logprobs=started.config.max_logprobs,
        constraints=started.constraints,
        cache_config=cache_config_labels(started.config),
        traffic=traffic,
    )


def _checked_names(keys: list[str], names: list[str]) -> list[str]:
    if names and len(names) != len(keys):
        raise ConfigError(f"--api_key_names has {len(names)} names for {len(keys)} API keys: give one for each key")
    return names


def _exit(code: int) -> None:
    """At once, whatever runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _allow_many_connections() -> None:
    """Each open request is an open file, of which many systems allow a process 1,024 until it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int) -> socket.socket:
    """Before loading: a port in use should not cost a minute."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _STALLED_S)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _curl(url: str, name: str, with_key: bool) -> str:
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    return (
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{name}", "max_tokens": 64, "temperature": 0,'
        ' "messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
    )


if __name__ == "__main__":
    sys.exit(jaxkv_flags.run(main, sys.argv, USAGE, GROUPS))
