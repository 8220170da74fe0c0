#!/usr/bin/env python
"""What the HTTP layer costs by itself: tokens and requests a second that one core can carry, over an engine that computes
nothing.

    python scripts/bench_http.py
    python scripts/bench_http.py --vllm_python=/path/to/python     # and vLLM's API server, over its own engine

The server runs in a process of its own; what counts is the CPU time that it takes, so that neither the client nor other
load on the machine makes it look slow. Everything between the engine and the socket is in it: text from tokens, JSON,
server-sent events, HTTP.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from absl import flags
from benchlib.random_model import write_random_model
from benchlib.serving_client import ask
from rich.progress import Progress

from jaxkv import measurement
from jaxkv.core.errors import ConfigError

_STREAMS = flags.DEFINE_integer("num_streams", 64, "Clients at the same time.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("output_len", 500, "Tokens of each stream.", lower_bound=2)
_OFFERED = flags.DEFINE_float("tokens_per_second", 6400.0, "What the scripted engine makes.", lower_bound=1.0)
_RUNS = flags.DEFINE_integer("runs", 3, "Counted runs of each case.", lower_bound=1)
_VLLM = flags.DEFINE_string("vllm_python", None, "Interpreter that has vLLM: its API server is measured too.")

_TARGET = 5_000.0  # tokens a second and core
_VLLM_START_S = 300.0


def _config() -> dict[str, Any]:
    names = ("num_streams", "output_len", "tokens_per_second", "runs", "vllm_python", "quick")
    return {name: flags.FLAGS[name].value for name in names}


def _measure(report: measurement.Report) -> None:
    if _VLLM.value is not None and not Path(_VLLM.value).is_file():
        raise ConfigError(f"vllm_python is {_VLLM.value!r}: no such file")
    ours = {}
    for tokens_per_step in (1, 8):
        with _scripted_server(tokens_per_step) as (url, pid):
            for api in ("completions", "chat/completions"):
                if api == "completions" or tokens_per_step == 1:
                    ours[api, tokens_per_step] = _streams(report, "jaxkv", url, pid, api, f"{tokens_per_step} a step")
            if tokens_per_step == 1:
                _whole_requests(report, url, pid)
    worst = min(ours.values(), key=lambda result: result["value"])
    short = [f"{worst['name']}: {worst['value']:.0f} tokens/s a core"] if worst["value"] < _TARGET else []
    report.check(f"at least {_TARGET:.0f} tokens/s a core", [] if flags.FLAGS.quick else short)
    if _VLLM.value is not None:
        with _vllm_server(report) as (url, pid):
            theirs = _streams(report, "vllm", url, pid, "completions", "as its engine makes them")
        report.ratio("tokens/s a core: jaxkv / vllm", ours["completions", 1], theirs, target=None)


def _streams(report: measurement.Report, engine: str, url: str, pid: int, api: str, steps: str) -> dict[str, Any]:
    clients, tokens = _STREAMS.value, 20 if flags.FLAGS.quick else _TOKENS.value
    body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"prompt": [5, 6, 7]} if api == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}

    async def run(session: aiohttp.ClientSession) -> int:
        outcomes = await asyncio.gather(*(ask(session, f"{url}/v1/{api}", body) for _ in range(clients)))
        if failed := next((outcome for outcome in outcomes if outcome.error), None):
            raise RuntimeError(f"{engine}: {failed.error}")
        return sum(outcome.output_tokens for outcome in outcomes)

    details = {"api": api, "streams": clients, "output_len": tokens}
    return _timed(report, f"{engine}, {clients} streams of {api}, tokens {steps}", run, pid, "tokens", engine, details)


def _whole_requests(report: measurement.Report, url: str, pid: int) -> None:
    clients, each = _STREAMS.value, 2 if flags.FLAGS.quick else 20
    body = {"prompt": "Hello", "max_tokens": 1}

    async def run(session: aiohttp.ClientSession) -> int:
        async def client() -> None:
            for _ in range(each):
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    response.raise_for_status()
                    await response.read()

        await asyncio.gather(*(client() for _ in range(clients)))
        return clients * each

    name = f"jaxkv, {clients} clients, unstreamed requests of 1 token"
    _timed(report, name, run, pid, "requests", "jaxkv", {"streams": clients})


def _timed(
    report: measurement.Report,
    name: str,
    run: Callable[[aiohttp.ClientSession], Awaitable[int]],
    pid: int,
    unit: str,
    engine: str,
    details: dict[str, Any],
) -> dict[str, Any]:
    """Adds `unit`s a second of the process's CPU time; beside it what was delivered a second of real time.

    Args:
      run: returns how many `unit`s it had.
    """
    process = psutil.Process(pid)
    rates, delivered = [], []

    async def runs() -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            with Progress(console=report.console, disable=report.console.quiet, transient=True) as bar:
                for number in bar.track(range((1 if flags.FLAGS.quick else _RUNS.value) + 1), description=name):
                    before, begin = process.cpu_times(), time.perf_counter()
                    count = await run(session)
                    seconds, after = time.perf_counter() - begin, process.cpu_times()
                    if number:  # the first warms up
                        # The clock of CPU times ticks 100 times a second.
                        cpu = max(0.01, after.user + after.system - before.user - before.system)
                        rates.append(count / cpu)
                        delivered.append(count / seconds)

    asyncio.run(runs())
    details["delivered_per_second"] = max(delivered)
    return report.add(name, rates, unit=f"{unit}/s a core", metric=f"{unit}_per_core", engine=engine, **details)


@contextlib.contextmanager
def _scripted_server(tokens_per_step: int) -> Iterator[tuple[str, int]]:
    """Address and process id."""
    settings = {
        "tokens_per_second": _OFFERED.value,
        "tokens_per_step": tokens_per_step,
        "max_num_seqs": _STREAMS.value,
    }
    command = [sys.executable, "-m", "benchlib.scripted_server", json.dumps(settings)]
    with _process(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent) as process:
        yield process.stdout.readline().strip(), process.pid


@contextlib.contextmanager
def _vllm_server(report: measurement.Report) -> Iterator[tuple[str, int]]:
    """vLLM's API server: the engine is a process of its own there, whose time does not count."""
    port = 8765
    with tempfile.TemporaryDirectory(prefix="jaxkv-bench-") as folder, open(f"{folder}/log", "w+") as log:
        model = write_random_model(Path(folder) / "tiny", vocab_size=256, hidden_size=256, head_dim=64)
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        command = [
            _VLLM.value, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", f"--port={port}",
            "--host=127.0.0.1", "--max-model-len=2048", f"--max-num-seqs={_STREAMS.value}", "--enforce-eager",
        ]  # fmt: skip
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment.pop("PYTHONPATH", None)  # another interpreter's packages
        report.console.print("starting vLLM ...")
        with _process(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _VLLM_START_S
            while not _answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise measurement.AbsentError(
                        f"vLLM's API server does not start; it said last: {log.read()[-500:]}"
                    )
                time.sleep(1)
            yield url, process.pid


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


if __name__ == "__main__":
    measurement.run("bench_http", _config, _measure)
