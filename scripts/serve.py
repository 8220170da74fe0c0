"""Serves one model over an OpenAI-compatible HTTP API: `python scripts/serve.py --model=demo`."""

import asyncio
import os
import signal
import socket
import sys

import uvicorn
from absl import flags

from jaxkv import flags as jaxkv_flags
from jaxkv.async_engine import AsyncEngine
from jaxkv.console import ConsoleProgress, set_up_logging
from jaxkv.core.errors import ConfigError
from jaxkv.server.app import create_app
from jaxkv.server.metrics import cache_config_labels
from jaxkv.server.periodic_log import log_status
from jaxkv.server.serving import Serving

jaxkv_flags.define_engine_flags()
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.")
_PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0 takes a free one.", lower_bound=0, upper_bound=65535)
_NAMES = flags.DEFINE_string(
    "served_model_name", None, "Model id in the API; several, separated by commas, all work. Unset: the model's name."
)
_API_KEY = flags.DEFINE_string("api_key", None, "Clients must send this as a bearer token.")
_LOG_LEVEL = flags.DEFINE_enum(
    "log_level", "info", ["debug", "info", "warning", "error"], "Least important log lines to show."
)

USAGE = """
usage: serve.py [MODEL] [flags]

Loads a model and serves it over an OpenAI-compatible HTTP API. Flags take dashes or underscores, `--flag=value` or
`--flag value`.
"""
GROUPS = jaxkv_flags.GROUPS | {"server": ("host", "port", "served_model_name", "api_key", "log_level")}
# Seconds that open requests may go on after the first Ctrl-C or SIGTERM.
_GRACE_S = 5


def main(rest: list[str]) -> int:
    if rest:
        if len(rest) > 1:
            raise ConfigError(f"one model can be served, but the command line names {', '.join(rest)}")
        flags.FLAGS.model = rest[0]
    config = jaxkv_flags.engine_config()
    set_up_logging(_LOG_LEVEL.value)
    listener = _bind(_HOST.value, _PORT.value)  # before loading: a port in use should not cost a minute
    # While loading, a signal ends the process here; uvicorn catches those that come while it serves.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_cleanly)
    from jaxkv.startup import start_engine

    with ConsoleProgress() as progress:
        started = start_engine(config, progress=progress)
    names = tuple(name for name in (_NAMES.value or "").split(",") if name) or (started.name,)
    engine = AsyncEngine(started.engine, started.tokenizer)
    serving = Serving(
        engine=engine,
        tokenizer=started.tokenizer,
        model_names=names,
        vocab_size=started.model_config.vocab_size,
        max_model_len=started.config.max_model_len,
        max_logprobs=started.config.max_logprobs,
        cache_config=cache_config_labels(started.config),
    )
    server = _Server(
        uvicorn.Config(
            create_app(serving, api_key=_API_KEY.value),
            log_level="warning",
            timeout_graceful_shutdown=2 * _GRACE_S,
            access_log=False,
            ws="none",
        ),
        engine,
        ready=f"jaxkv is ready: {_url(listener)} (model {names[0]})\n{_curl(_url(listener), names[0])}\n",
    )
    engine.on_failure = server.engine_failed
    engine.start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # uvicorn raises the signals it caught once more when it is done
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except OSError as error:
        raise ConfigError(f"cannot listen on {_url(listener)}: {error.strerror}; choose another --port") from error
    finally:
        engine.shutdown()
    if server.failure is not None:
        sys.stderr.write(f"error: the engine failed: {server.failure}\n")
        return 1
    return 0


class _Server(uvicorn.Server):
    """Says when the port answers, and ends open requests when their time is up.

    Attributes:
      failure: what broke the engine, or None.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, ready: str):
        super().__init__(config)
        self._engine = engine
        self._ready = ready
        self.failure: str | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._status = asyncio.create_task(log_status(lambda: self._engine.snapshot))
        if self.started:
            sys.stdout.write(self._ready)
            sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A request that the engine ends gets an error it can read; one that uvicorn cancels would get none.
        asyncio.get_running_loop().call_later(_GRACE_S, self._engine.stop)
        await super().shutdown(sockets)

    def engine_failed(self) -> None:
        self.failure = self._engine.failed
        self.should_exit = True


def _exit_cleanly(*_: object) -> None:
    # At once: an ordinary exit would wait for threads in the middle of a compilation, half a minute long.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
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


def _curl(url: str, name: str) -> str:
    key = " -H 'authorization: Bearer KEY'" if _API_KEY.value else ""
    return (
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{name}", "max_tokens": 64, "temperature": 0,'
        ' "messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
    )


if __name__ == "__main__":
    sys.exit(jaxkv_flags.run(main, sys.argv, USAGE, GROUPS))
